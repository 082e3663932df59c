// mbarriers and the ring of buffers that the producer fills and the consumers empty. Used by the Hopper kernels.
#pragma once

#include <cstdint>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>
#include <cutlass/arch/barrier.h>

namespace cutlass_ext::sm90 {

/// An mbarrier in shared memory, which the compiler moves no access to memory across. Built with
/// CUTLASS_EXT_TRAP_ON_HANG defined (the environment variable CUTLASS_EXT_TRAP_ON_HANG=1 at build), a wait of seconds
/// ends the kernel with an error; otherwise a fault in a pipeline hangs the device.
struct Barrier : cutlass::arch::ClusterTransactionBarrier {
  CUTE_DEVICE void arrive() const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterTransactionBarrier::arrive();
  }
  /// The same at the barrier that lies there in CTA `rank` of the cluster.
  CUTE_DEVICE void arrive_at(uint32_t rank) const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterTransactionBarrier::arrive(rank);
  }
  CUTE_DEVICE void wait_for(uint32_t phase) const {
#ifdef CUTLASS_EXT_TRAP_ON_HANG
    for (int tries = 0; !try_wait(phase); ++tries) {
      if (tries == 1 << 20) __trap();
    }
#else
    wait(phase);
#endif
    asm volatile("" ::: "memory");
  }
};

/// By a whole warp, which has read a buffer by load instructions, before one of its lanes lets the copy engine have it
/// again. An arrival overtakes loads that wait for shared memory beside WGMMAs: without this the short kernel read the
/// bias of the next tile in places, in 1 to 194 of 200 launches of three or four CTAs on each multiprocessor of an
/// H200.
CUTE_DEVICE void finish_loads_of_shared() {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

/// The address in CTA `rank` of the cluster of what lies at `here` in this one's shared memory.
CUTE_DEVICE uint32_t address_in(uint32_t rank, void const* here) {
  return cute::set_block_rank(cute::cast_smem_ptr_to_uint(here), rank);
}

/// Writes `x` to the shared memory of another CTA of the cluster and counts its bytes at a barrier there: addresses of
/// `address_in`.
CUTE_DEVICE void push(uint32_t to, unsigned x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(x),
               "r"(barrier)
               : "memory");
}
CUTE_DEVICE void push(uint32_t to, float2 const& x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}
CUTE_DEVICE void push(uint32_t to, float4 const& x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

/// Copies `bytes` of shared memory to where `to` lies in CTA `rank`, whose barrier there counts them. By one thread.
CUTE_DEVICE void copy_to(uint32_t rank, void const* to, void const* from, int bytes, Barrier const& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address_in(rank, to)),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "r"(address_in(rank, &barrier))
               : "memory");
}

/// Position in a ring of `Stages` buffers; `phase` flips at each turn.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  CUTE_DEVICE void advance() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

}  // namespace cutlass_ext::sm90

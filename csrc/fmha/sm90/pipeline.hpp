// mbarriers and the ring of buffers that the producer fills and the consumers empty. Used by the Hopper kernels.
#pragma once

#include <cstdint>

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

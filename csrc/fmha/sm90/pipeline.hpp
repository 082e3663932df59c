// mbarriers and the ring of buffers that the producer fills and the consumers empty. Used by fmha.hpp.
#pragma once

#include <cstdint>

#include <cute/arch/util.hpp>
#include <cutlass/arch/barrier.h>

namespace cutlass_ext::sm90 {

/// An mbarrier in shared memory, which the compiler moves no access to memory across. With FMHA_TRAP_ON_HANG a wait of
/// seconds ends the kernel, instead of the machine.
struct Barrier : cutlass::arch::ClusterTransactionBarrier {
  CUTE_DEVICE void arrive() const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterTransactionBarrier::arrive();
  }
  CUTE_DEVICE void wait_for(uint32_t phase) const {
#ifdef FMHA_TRAP_ON_HANG
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

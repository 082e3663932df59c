// How sums of dQ are added to. Used by sm80.hpp and simt.hpp.
#pragma once

#include <cute/config.hpp>

namespace cutlass_ext {

/// Adds to a number in global memory, as atomicAdd does where the compiler knows whose address it is.
CUTE_DEVICE void add_in_memory(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x));
}

}  // namespace cutlass_ext

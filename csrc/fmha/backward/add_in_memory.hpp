// How sums of dQ are added to. Used by sm80.hpp and simt.hpp.
#pragma once

#include <cute/config.hpp>

namespace cutlass_ext {

/// Adds to a number in global memory, as atomicAdd does where the compiler knows whose address it is.
CUTE_DEVICE void add_in_memory(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x));
}

/// Adds a lane's four numbers to those of a warp: 128 side by side. From compute capability 9.0 on lanes have vectors
/// of them, before it the first 32, the next 32, and so on (SumsOfTile::Order).
CUTE_DEVICE void add_in_memory(float* of_warp, int lane, float const (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(of_warp + 4 * lane)),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
#else
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) add_in_memory(of_warp + 32 * i + lane, x[i]);
#endif
}

}  // namespace cutlass_ext

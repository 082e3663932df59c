// Numbers that the compiler does not see through: it works them out where it is told to, and neither earlier nor for as
// long as a loop runs, for which a main loop has no registers to spare. Used by the kernels.
#pragma once

#include <type_traits>

#include <cute/config.hpp>

namespace cutlass_ext {

#if defined(__CUDACC__)
/// Has the compiler work `x` out here: not where it is used, nor before a loop for the sake of all turns.
template <class T>
CUTE_DEVICE void materialize(T& x) {
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(x));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
}

/// `x`, of which the compiler does not know that it is the same each time: what follows from it is then worked out
/// where it is wanted, and not kept in registers around a main loop.
CUTE_DEVICE int opaque(int x) {
  materialize(x);
  return x;
}
#endif

}  // namespace cutlass_ext

// The instructions of mma.sync tensor cores, and of shared memory beside them, by the names that the main loops use.
// Called by sm80/warp.hpp and decode/.
#pragma once

#include <type_traits>

#include <cute/arch/util.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/numeric_types.h>

#include "load_matrices.hpp"

namespace cutlass_ext::sm80 {

using namespace cute;

/// C += A B of one m16n8k16.
template <class Element>
CUTE_DEVICE void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  using Atom =
      std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
  Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}

CUTE_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

CUTE_DEVICE uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace cutlass_ext::sm80

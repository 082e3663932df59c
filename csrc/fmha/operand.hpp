// What P, an accumulator of fp32, becomes as operand A of the next product on the tensor cores, and O on its way out.
// Called by the families that use them.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/config.hpp>
#include <cutlass/numeric_types.h>

namespace cutlass_ext {

/// Two floats rounded to the two halves of a register.
template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    __half2 const x = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  } else {
    __nv_bfloat162 const x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  }
}

/// Puts columns j (even) and j + 1 of a thread's row i, of two rows 8 apart, in the words of operand A. mma.sync and
/// WGMMA alike have 16 columns of both rows in four words, in the order in which the accumulators of 8 columns lie.
template <class Element, class Words>
CUTE_DEVICE void put_operand(Words& words, int i, int j, float left, float right) {
  words[j + i] = pack<Element>(left, right);
}

}  // namespace cutlass_ext

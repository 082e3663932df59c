// Two floats rounded to the two halves of a register: P as an operand of the tensor cores, O on its way out. Called by
// the families that use them.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/config.hpp>
#include <cutlass/numeric_types.h>

namespace cutlass_ext {

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

}  // namespace cutlass_ext

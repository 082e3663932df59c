// Describes one instantiation of a family's FMHA to the dispatch. Included by kernels/*.cu, each of which names its
// tiles.
#pragma once

#include <type_traits>

#include <cutlass/numeric_types.h>

#include "../dispatch.hpp"

namespace cutlass_ext {

template <class Element>
constexpr DType dtype_of = std::is_same_v<Element, float>             ? DType::Float32
                           : std::is_same_v<Element, cutlass::half_t> ? DType::Float16
                                                                      : DType::BFloat16;

/// `short_warpgroups`: see Kernel.
template <class Fmha>
Kernel kernel_of(int short_warpgroups = 0) {
  using Traits = typename Fmha::Traits;
  return {Fmha::kFamily,
          dtype_of<typename Traits::Element>,
          Traits::HeadDim,
          Traits::HeadDimV,
          Traits::B_r,
          Traits::B_c,
          Fmha::kScoreMods,
          Traits::Threads,
          Fmha::kSharedBytes,
          reinterpret_cast<void const*>(Fmha::kernel),
          [](ForwardParams const& params, cudaStream_t stream) { return Fmha{}(params, stream); },
          Fmha::refuses,
          short_warpgroups};
}

}  // namespace cutlass_ext

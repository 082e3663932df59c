// Describes one instantiation of the mma.sync FMHA to the dispatch. Included by kernels/sm80_*.cu, each of which names
// its tiles.
#pragma once

#include "../dispatch.hpp"
#include "../fmha/sm80/fmha.hpp"

namespace cutlass_ext {

template <int B_r, int B_c, int HeadDim, class Element, int Threads>
Kernel sm80_kernel() {
  using Fmha = sm80::FMHA<B_r, B_c, HeadDim, Element, Threads>;
  return {"sm80",
          std::is_same_v<Element, cute::half_t> ? DType::Float16 : DType::BFloat16,
          HeadDim,
          B_r,
          B_c,
          Threads,
          Fmha::kSharedBytes,
          reinterpret_cast<void const*>(Fmha::kernel),
          [](ForwardParams const& params, cudaStream_t stream) { return Fmha{}(params, stream); }};
}

}  // namespace cutlass_ext

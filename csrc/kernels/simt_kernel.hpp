// Describes one instantiation of the CUDA-core FMHA to the dispatch. Included by kernels/simt_*.cu, each of which names
// its tiles.
#pragma once

#include "../dispatch.hpp"
#include "../fmha/simt/fmha.hpp"

namespace cutlass_ext {

template <int B_r, int B_c, int HeadDim, int Threads>
Kernel simt_kernel() {
  using Fmha = simt::FMHA<B_r, B_c, HeadDim, float, Threads>;
  return {"simt",
          DType::Float32,
          HeadDim,
          B_r,
          B_c,
          Threads,
          Fmha::kSharedBytes,
          reinterpret_cast<void const*>(Fmha::kernel),
          [](ForwardParams const& params, cudaStream_t stream) { return Fmha{}(params, stream); }};
}

}  // namespace cutlass_ext

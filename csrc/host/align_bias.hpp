// The launch that lays a bias anew for Hopper's kernels. Called by plan.cpp and backward.cpp.
#pragma once

#include <cuda_runtime.h>

#include "../fmha/align_bias.hpp"
#include "workspace.hpp"

namespace cutlass_ext {

/// What a call has of pairs, the bias in rows of whole vectors: a copy where it is of 16 bits and has none
/// (`is_alignable`).
Pairs align_bias(Params const& params, cudaStream_t stream, Allocate const& allocate);

}  // namespace cutlass_ext

// The launch that makes bits, and a map of their blocks, of a mask of bytes. Called by torch/operators.cpp.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../fmha/pack_mask.hpp"

namespace cutlass_ext {

/// Writes `bits`, [batch, heads, Mask::stored_rows(rows), Mask::words_of(keys)], contiguous.
void pack_mask(ByteMask const& mask, uint32_t* bits, cudaStream_t stream);

}  // namespace cutlass_ext

// The launch that writes new keys to a cache ahead of a kernel that reads it alone. Called by plan.cpp.
#pragma once

#include "kernel_table.hpp"

namespace cutlass_ext {

/// New keys, rotated, and values to their places in the cache; what has none is dropped. Where there is rotary
/// embedding, q, rotated, to `rotated_q`, [B, N_q, H_q, d].
void append_new_keys(DType dtype, Params const& params, void* rotated_q, cudaStream_t stream);

}  // namespace cutlass_ext

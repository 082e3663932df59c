// The launch that merges the splits of prefill kernels. Called by plan.cpp.
#pragma once

#include "kernel_table.hpp"

namespace cutlass_ext {

/// O and lse of every query row from the parts in `params.o_partial` and `params.lse_partial`.
void merge_splits(DType dtype, Params const& params, cudaStream_t stream);

}  // namespace cutlass_ext

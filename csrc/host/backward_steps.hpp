// The launches before the backward kernels and after them. Called by backward.cpp.
#pragma once

#include <cstddef>

#include "../fmha/backward/params.hpp"
#include "kernel_table.hpp"
#include "workspace.hpp"

namespace cutlass_ext {

/// `params.row_statistics` of every query row, `params.empty_rows` where there is room for them, and the sink's
/// gradient where it is asked for. If there are query rows, `floats` from `to_clear` on, a multiple of four, are
/// zero then. `ctas_of_heads`: 0, or CTAs of a launch of whole heads, that of `params.scheduler`: then only
/// of the heads that these begin with.
void compute_row_statistics(DType dtype, BackwardParams const& params, int64_t ctas_of_heads, float* to_clear,
                            size_t floats, cudaStream_t stream);

/// `params.transposed_mask`, and `params.tile_map` of a launch, both of which there is room for.
void transpose_mask(BackwardParams const& params, cudaStream_t stream);
void classify_tiles(BackwardParams const& params, bool of_keys, int held, int step, cudaStream_t stream);

/// What `kernel` has left as sums, if it has: dK and dV, or dQ, of the tiles that CTAs share, in `params.shared_tiles`;
/// and dQ in `params.dq_sums`, where that is not null, which begin with head `head0`, those of all sequences counted.
void finish_gradients(Kernel const& kernel, BackwardParams const& params, int64_t head0, cudaStream_t stream);

/// `params.dbias`, once the statistics of rows are there, by `hopper`, of Kind::BiasGradients, unless that is null.
void compute_dbias(DType dtype, Kernel const* hopper, BackwardParams params, cudaStream_t stream,
                   Allocate const& allocate);

}  // namespace cutlass_ext

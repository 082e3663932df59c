// Merges the splits of prefill kernels, for each dtype of o.
#include "../fmha/merge_splits.hpp"
#include "../host/merge.hpp"

#include <cutlass/numeric_types.h>

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {

namespace {

/// The launch that has each row merged by `Warps`.
template <int Warps>
struct Merge {
  MergedRows const rows;
  dim3 const grid;

  explicit Merge(Params const& params)
      : rows(params, Warps == 1 ? 0 : 2),
        grid(grid_of(int64_t(params.stored_batch()) * params.heads_q * rows.ctas_a_head.divisor, "q"),
             (params.head_dim_v + kMergeColumns - 1) / kMergeColumns) {}

  void operator()(DType dtype, Params const& params, cudaStream_t stream) const {
    auto const kernel = dtype == DType::Float32   ? merge_splits_kernel<float, Warps>
                        : dtype == DType::Float16 ? merge_splits_kernel<cutlass::half_t, Warps>
                                                  : merge_splits_kernel<cutlass::bfloat16_t, Warps>;
    kernel<<<grid, kMergeWarps * 32, 0, stream>>>(params, rows);
    check_cuda(cudaGetLastError(), "launching the merge of splits");
  }
};

}  // namespace

void merge_splits(DType dtype, Params const& params, cudaStream_t stream) {
  if (params.result_rows() == 0) return;
  if (params.widens) dtype = DType::Float32;
  Merge<1> const merge(params);
  // Where all of these CTAs are there at once, warps share many splits of a row: up to 16 are then under way.
  int64_t const ctas = int64_t(merge.grid.x) * merge.grid.y, resident = kMergeCtas * current_device().multiprocessors;
  if (params.num_splits > kMergeSums && ctas * kMergeWarps <= resident) {
    Merge<kMergeSums>{params}(dtype, params, stream);
  } else {
    merge(dtype, params, stream);
  }
}

}  // namespace cutlass_ext

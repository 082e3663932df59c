// Merges the splits of prefill kernels, for each dtype of o.
#include "../fmha/merge.hpp"
#include "../host/merge.hpp"

#include <cutlass/numeric_types.h>

#include "../host/error.hpp"

namespace cutlass_ext {

void merge_splits(DType dtype, Params const& params, cudaStream_t stream) {
  int64_t const blocks_a_head = (params.stored_rows() + kMergeRows - 1) / kMergeRows;
  int64_t const blocks = int64_t(params.stored_batch()) * params.heads_q * blocks_a_head;
  if (blocks == 0) return;
  if (params.widens) dtype = DType::Float32;
  auto const kernel = dtype == DType::Float32   ? merge_splits_kernel<float>
                      : dtype == DType::Float16 ? merge_splits_kernel<cutlass::half_t>
                                                : merge_splits_kernel<cutlass::bfloat16_t>;
  kernel<<<grid_of(blocks, "q"), kMergeRows * 32, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launching the merge of splits");
}

}  // namespace cutlass_ext

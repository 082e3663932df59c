// What the backward kernels have to know of each query row, for each dtype, and of a mask.
#include "../fmha/backward/preprocess.hpp"
#include "../fmha/backward/transposed_mask.hpp"
#include "../host/backward_steps.hpp"

#include <cutlass/numeric_types.h>

#include "../host/error.hpp"

namespace cutlass_ext {
namespace {

/// For rows of so many columns.
template <class Element>
auto kernel_of_rows(int cols) {
  int const bytes = cols * int(sizeof(Element)), vectors = (bytes + kLanesOfRow * 16 - 1) / (kLanesOfRow * 16);
  return vectors <= 1   ? row_statistics_kernel<Element, 1>
         : vectors <= 2 ? row_statistics_kernel<Element, 2>
         : vectors <= 4 ? row_statistics_kernel<Element, 4>
                        : row_statistics_kernel<Element, 8>;
}

}  // namespace

void compute_row_statistics(DType dtype, BackwardParams const& params, int64_t ctas_of_heads, float* to_clear,
                            size_t floats, cudaStream_t stream) {
  int64_t const all_heads = int64_t(params.batch) * params.heads_q,
                tiles = Scheduler::tiles_of(params.n_q, StatisticsRows::kTile);
  int64_t heads = all_heads;
  int tiles_a_head = 0;
  if (ctas_of_heads > 0) {
    heads = ctas_of_heads * (params.heads_q / params.heads_kv);
    tiles_a_head = static_cast<int>(params.scheduler.size() / (int64_t(params.batch) * params.heads_kv));
  }
  int const cols = params.head_dim_v;
  auto const kernel = dtype == DType::Float32   ? kernel_of_rows<float>(cols)
                      : dtype == DType::Float16 ? kernel_of_rows<cutlass::half_t>(cols)
                                                : kernel_of_rows<cutlass::bfloat16_t>(cols);
  constexpr int kCtasOfTile = StatisticsRows::kTile / kStatisticsRows;
  int64_t const ctas = heads * tiles * kCtasOfTile, all = all_heads * tiles;
  if (ctas > 0) {
    ToClear clear{reinterpret_cast<float4*>(to_clear), static_cast<int64_t>(floats / 4)};
    clear.of_a_cta = (clear.size + ctas - 1) / ctas;
    kernel<<<grid_of(ctas, "q"), kStatisticsThreads, 0, stream>>>(params, tiles_a_head, clear);
    check_cuda(cudaGetLastError(), "launching the statistics of rows");
    if (params.empty_rows) {
      empty_rows_kernel<<<grid_of(all, "q"), kStatisticsThreads, 0, stream>>>(params);
      check_cuda(cudaGetLastError(), "looking for rows without keys");
    }
  }
  if (!params.dsink) return;
  sink_gradient_kernel<<<params.heads_q, kSinkThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launching the sums over rows");
}

void transpose_mask(BackwardParams const& params, cudaStream_t stream) {
  TransposedMask const to(params);
  int64_t const ctas = int64_t(to.batch) * to.heads * (to.words / 4) * Mask::words_of(params.n_kv);
  transposed_mask_kernel<<<grid_of(ctas, "mask"), kSideThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "transposing the mask");
}

void classify_tiles(BackwardParams const& params, bool of_keys, int held, int step, cudaStream_t stream) {
  int64_t const ctas = TileMap(params, of_keys, held, step).size(params) / 2;
  tile_map_kernel<<<grid_of(ctas, "mask"), 32, 0, stream>>>(params, of_keys, held, step);
  check_cuda(cudaGetLastError(), "classifying the mask's tiles");
}

}  // namespace cutlass_ext

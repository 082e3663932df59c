// Gradients from the sums of kernels, for each dtype that these have.
#include "../fmha/backward/postprocess.hpp"
#include "../fmha/score.hpp"
#include "../host/backward_steps.hpp"

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {
namespace {

int64_t tiles_to_finish(BackwardParams const& params) {
  return int64_t(params.shared_tiles.count) * (params.is_mirrored ? 2 : 1);
}

void launch_sums(Kernel const& kernel, BackwardParams const& params, GradientSums of_keys, GradientSums of_rows,
                 cudaStream_t stream) {
  int64_t all = 0;
  auto const lay_out = [&](GradientSums& gradients, int rows, int heads) {
    int const tiles = Scheduler::tiles_of(gradients.of_splits() ? gradients.block : rows, gradients.rows_a_cta());
    gradients.ctas_a_unit = tiles * gradients.panels();
    int64_t const units =
                      gradients.of_splits() ? tiles_to_finish(params) : int64_t(params.batch) * heads - gradients.head0,
                  ctas = units * gradients.ctas_a_unit;
    gradients.ctas = static_cast<unsigned>(ctas);
    all += ctas;
  };
  lay_out(of_keys, params.n_kv, params.heads_kv);
  lay_out(of_rows, params.n_q, params.heads_q);
  if (all == 0) return;
  LaunchConfig const launch({dim3(grid_of(all, "q"))}, kSumsWarps * 32, 0, stream, wants_hopper(kernel));
  auto const run = kernel.dtype == DType::Float16 ? gradient_sums_kernel<cutlass::half_t>
                                                  : gradient_sums_kernel<cutlass::bfloat16_t>;
  check_cuda(cudaLaunchKernelEx(&launch.config, run, params, of_keys, of_rows), "launching the last step of gradients");
}

void launch_float_sums(Kernel const& kernel, BackwardParams const& params, bool of_keys, cudaStream_t stream) {
  int const block = of_keys ? kernel.block_c : kernel.block_r;
  int64_t const ctas = tiles_to_finish(params) * Scheduler::tiles_of(block, kFloatRows);
  auto const run = of_keys ? float_sums_kernel<Axis::Keys> : float_sums_kernel<Axis::Rows>;
  run<<<grid_of(ctas, of_keys ? "k" : "q"), kFloatThreads, 0, stream>>>(params, kernel.head_dim, kernel.head_dim_v,
                                                                        block);
  check_cuda(cudaGetLastError(), "launching the last step of gradients");
}

}  // namespace

void finish_gradients(Kernel const& kernel, BackwardParams const& params, int64_t head0, cudaStream_t stream) {
  bool const of_keys = kernel.kind != Kind::QueryGradients, of_splits = params.shared_tiles.count > 0;
  if (kernel.dtype == DType::Float32) {
    if (of_splits) launch_float_sums(kernel, params, of_keys, stream);
    return;
  }
  GradientSums keys, rows;
  if (of_splits) {
    GradientSums& side = of_keys ? keys : rows;
    side.block = of_keys ? kernel.block_c : kernel.block_r;
    float const* const sums = params.shared_tiles.sums;
    side.first = {sums, kernel.head_dim, of_keys ? params.dk : params.dq, of_keys ? params.dk_stride : params.dq_stride,
                  params.head_dim};
    if (of_keys) {
      side.second = {sums + SplitSums(params, Axis::Keys, side.block).size(kernel.head_dim), kernel.head_dim_v,
                     params.dv, params.dv_stride, params.head_dim_v};
    }
  }
  if (params.dq_sums) {
    rows.head0 = head0;
    rows.scale = factor_of_gradients(params);
    bool const adds_vectors = wants_hopper(kernel) || occupancy_of(kernel, current_device()).compiled_for >= 90;
    rows.order = adds_vectors ? SumsOfTile::Order::Vectors : SumsOfTile::Order::Lanes;
    rows.first = {params.dq_sums, kernel.head_dim, params.dq, params.dq_stride, params.head_dim};
  }
  launch_sums(kernel, params, keys, rows, stream);
}

}  // namespace cutlass_ext

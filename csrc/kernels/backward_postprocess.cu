// Gradients from the sums of kernels, for each dtype that these have.
#include "../fmha/backward/postprocess.hpp"
#include "../fmha/score.hpp"
#include "../host/backward_steps.hpp"

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {
namespace {

void launch_sums(DType dtype, BackwardParams const& params, GradientSums of_keys, GradientSums of_rows,
                 cudaStream_t stream) {
  int64_t all = 0;
  auto const lay_out = [&](GradientSums& gradients, int rows, int heads) {
    int const tiles = Scheduler::tiles_of(rows, gradients.rows_a_cta());
    gradients.ctas_a_head = tiles * gradients.panels();
    int64_t const ctas = (int64_t(params.batch) * heads - gradients.head0) * gradients.ctas_a_head;
    gradients.ctas = static_cast<unsigned>(ctas);
    all += ctas;
  };
  lay_out(of_keys, params.n_kv, params.heads_kv);
  lay_out(of_rows, params.n_q, params.heads_q);
  if (all == 0) return;
  auto const kernel =
      dtype == DType::Float16 ? gradient_sums_kernel<cutlass::half_t> : gradient_sums_kernel<cutlass::bfloat16_t>;
  kernel<<<grid_of(all, "q"), kSumsWarps * 32, 0, stream>>>(params, of_keys, of_rows);
  check_cuda(cudaGetLastError(), "launching the last step of gradients");
}

void launch_float_sums(Kernel const& kernel, BackwardParams const& params, bool of_keys, cudaStream_t stream) {
  unsigned const ctas_a_head = Scheduler::tiles_of(of_keys ? params.n_kv : params.n_q, kFloatRows);
  int64_t const ctas = int64_t(params.batch) * (of_keys ? params.heads_kv : params.heads_q) * ctas_a_head;
  auto const run = of_keys ? float_sums_kernel<Axis::Keys> : float_sums_kernel<Axis::Rows>;
  run<<<grid_of(ctas, of_keys ? "k" : "q"), kFloatThreads, 0, stream>>>(params, kernel.head_dim, kernel.head_dim_v,
                                                                        ctas_a_head);
  check_cuda(cudaGetLastError(), "launching the last step of gradients");
}

}  // namespace

void finish_gradients(Kernel const& kernel, BackwardParams const& params, int64_t head0, cudaStream_t stream) {
  bool const of_keys = kernel.kind != Kind::QueryGradients;
  int const splits = params.splits();
  if (kernel.dtype == DType::Float32) {
    if (splits > 1) launch_float_sums(kernel, params, of_keys, stream);
    return;
  }
  GradientSums keys, rows;
  if (splits > 1) {
    SplitSums const sums(params, of_keys ? Axis::Keys : Axis::Rows);
    GradientSums& side = of_keys ? keys : rows;
    side.splits = splits, side.of_a_split = sums.of_a_split;
    side.first = {params.split_sums, kernel.head_dim, of_keys ? params.dk : params.dq,
                  of_keys ? params.dk_stride : params.dq_stride, params.head_dim};
    if (of_keys) {
      side.second = {params.split_sums + sums.size(splits, kernel.head_dim), kernel.head_dim_v, params.dv,
                     params.dv_stride, params.head_dim_v};
    }
  }
  if (params.dq_sums) {
    rows.head0 = head0;
    rows.scale = factor_of_gradients(params);
    rows.order = wants_hopper(kernel) ? SumsOfTile::Order::Vectors : SumsOfTile::Order::Lanes;
    rows.first = {params.dq_sums, kernel.head_dim, params.dq, params.dq_stride, params.head_dim};
  }
  launch_sums(kernel.dtype, params, keys, rows, stream);
}

}  // namespace cutlass_ext

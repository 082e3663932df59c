// Gradients from the sums of kernels, for each dtype that these have.
#include "../fmha/backward/postprocess.hpp"
#include "../fmha/score.hpp"
#include "../host/backward_steps.hpp"

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {
namespace {

/// Of as many heads.
void finish(DType dtype, BackwardParams const& params, GradientSums gradients, int64_t heads, cudaStream_t stream) {
  bool const of_splits = gradients.splits > 1;
  int const tiles = Scheduler::tiles_of(gradients.side == Axis::Keys ? params.n_kv : params.n_q, sums_rows(of_splits));
  gradients.ctas_a_head = tiles * (gradients.first.panels() + gradients.second.panels());
  int64_t const ctas = heads * gradients.ctas_a_head;
  if (ctas == 0) return;
  auto const run = [&](auto kernel) {
    kernel<<<grid_of(ctas, gradients.side == Axis::Keys ? "k" : "q"), kSumsWarps * 32, 0, stream>>>(params, gradients);
  };
  bool const half = dtype == DType::Float16;
  if (of_splits) {
    run(half ? gradient_sums_kernel<cutlass::half_t, true> : gradient_sums_kernel<cutlass::bfloat16_t, true>);
  } else {
    run(half ? gradient_sums_kernel<cutlass::half_t, false> : gradient_sums_kernel<cutlass::bfloat16_t, false>);
  }
  check_cuda(cudaGetLastError(), "launching the last step of gradients");
}

}  // namespace

void finish_dq(Kernel const& kernel, BackwardParams const& params, int64_t head0, cudaStream_t stream) {
  auto const order = wants_hopper(kernel) ? SumsOfTile::Order::Vectors : SumsOfTile::Order::Lanes;
  GradientSums gradients{Axis::Rows, head0, 1, 1, 0, factor_of_gradients(params), order, {}, {}};
  gradients.first = {params.dq_sums, kernel.head_dim, params.dq, params.dq_stride, params.head_dim};
  finish(kernel.dtype, params, gradients, int64_t(params.batch) * params.heads_q - head0, stream);
}

void finish_splits(Kernel const& kernel, BackwardParams const& params, cudaStream_t stream) {
  bool const of_keys = kernel.kind != Kind::QueryGradients;
  Axis const side = of_keys ? Axis::Keys : Axis::Rows;
  if (kernel.dtype == DType::Float32) {
    unsigned const ctas_a_head = Scheduler::tiles_of(of_keys ? params.n_kv : params.n_q, kFloatRows);
    int64_t const ctas = int64_t(params.batch) * (of_keys ? params.heads_kv : params.heads_q) * ctas_a_head;
    auto const run = of_keys ? float_sums_kernel<Axis::Keys> : float_sums_kernel<Axis::Rows>;
    run<<<grid_of(ctas, of_keys ? "k" : "q"), kFloatThreads, 0, stream>>>(params, kernel.head_dim, kernel.head_dim_v,
                                                                          ctas_a_head);
    return check_cuda(cudaGetLastError(), "launching the last step of gradients");
  }
  SplitSums const splits(params, side);
  GradientSums gradients{side, 0, 1, params.splits(), splits.of_a_split, 1.f, SumsOfTile::Order::Vectors, {}, {}};
  gradients.first = {params.split_sums, kernel.head_dim, of_keys ? params.dk : params.dq,
                     of_keys ? params.dk_stride : params.dq_stride, params.head_dim};
  if (of_keys) {
    gradients.second = {params.split_sums + splits.size(params.splits(), kernel.head_dim), kernel.head_dim_v, params.dv,
                        params.dv_stride, params.head_dim_v};
  }
  finish(kernel.dtype, params, gradients, int64_t(params.batch) * (of_keys ? params.heads_kv : params.heads_q), stream);
}

}  // namespace cutlass_ext

// One timed case of fmha_bench: random device tensors, a check of sampled rows in float64, a loop timed by CUDA events.
// Used by fmha_bench.cu (the library's dispatch), tile_sweep.cu, tile_sweep_sm90.cu and backward_sweep_sm90.cu (tile
// shapes).
#pragma once

#include <functional>
#include <string>

#include <benchmark/benchmark.h>

#include "host/plan.hpp"

namespace cutlass_ext::bench {

struct Case {
  int batch, n, heads, head_dim;
  bool causal;
  DType dtype = DType::Float32;
  int head_dim_v = head_dim;
  std::string name() const;  // "b2/n8192/h16/d64/causal", "b2/n8192/h10/d192_128/full"
};

/// Times what `plan` makes of the case's parameters, in manual time; a wrong row or a failed launch ends it with an
/// error.
void run(benchmark::State& state, Case const& c, std::function<Plan(Params const&)> const& plan);

/// Times one tile shape on the case, whatever would be chosen, and counts its registers, bytes of local memory and CTAs
/// a multiprocessor.
void run_kernel(benchmark::State& state, Case const& c, Kernel const& kernel);

/// The same of gradients in bfloat16, by one kernel that has them all, or two; the launches around them are timed, too.
void run_gradients(benchmark::State& state, Case const& c, Kernel const& of_keys, Kernel const* of_queries);

}  // namespace cutlass_ext::bench

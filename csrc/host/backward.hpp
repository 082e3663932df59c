// From a backward call to its launches: chooses the kernels of the table, completes the parameters, launches.
// Called by torch/operators.cpp; knows no torch.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "../fmha/backward/params.hpp"
#include "backward_heuristics.hpp"
#include "plan.hpp"

namespace cutlass_ext {

/// A launch, with the order of its tiles, and how many CTAs share one.
struct GradientLaunch {
  Kernel const* kernel = nullptr;
  Scheduler scheduler;
  GradientSplits splits;
  SharedTiles shared_tiles() const { return splits.of(scheduler); }
  int64_t ctas = 0;
  unsigned cluster = 1;            // CTAs of a cluster
  bool is_mirrored = false;        // as in Gradients
  bool is_ordered = false;         // whether tiles of keys add to dQ in their order (sm90/dq_semaphore.hpp), ...
  bool last_keys_first = false;    // ... and as in Gradients
  bool fuses_postprocess = false;  // whether CTAs make dQ of sums beside their tiles (sm90/sections.hpp)
};

/// Two launches, one of dQ and one of dK and dV; or one that has them all, with sums for dQ that a small launch
/// finishes, or, in float32 or of heads of few rows, without. And one for dBias, where that is asked for.
struct BackwardPlan {
  GradientLaunch of_keys, of_queries;
  Kernel const* of_bias = nullptr;  // for dBias, where a kernel of the table has it; else there is one for every GPU
  bool stores_dbias = false;        // whether the launch of keys makes it instead
  std::shared_ptr<BackwardPlan const> out_of_range;  // of kernels that multiply parts: for what these do not hold
  std::string refusal;  // where a kernel is missing, the argument that none takes, and what would do

  bool adds_to_queries() const { return of_keys.kernel && of_keys.kernel->kind == Kind::AllGradients; }
  /// Whether one kernel makes all gradients.
  bool is_one() const { return adds_to_queries() || (of_keys.kernel && of_keys.kernel->kind == Kind::HeadGradients); }
  explicit operator bool() const { return of_keys.kernel && (is_one() || of_queries.kernel); }
};

/// Chooses by host-known shapes alone.
BackwardPlan plan_backward(BackwardParams const& params, Request const& request);

/// The plan of kernels that the caller has chosen, `of_queries` null where one has all gradients; for bench/.
BackwardPlan plan_backward_with(Kernel const* of_keys, Kernel const* of_queries, BackwardParams const& params);

/// Launches.
void run_backward(BackwardPlan const& plan, BackwardParams params, cudaStream_t stream, Allocate const& allocate);

}  // namespace cutlass_ext

// From a call to a launch: chooses a kernel of the table for the current device, completes the parameters, launches.
// Called by torch/operators.cpp and bench/; knows no torch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device.hpp"
#include "workspace.hpp"

namespace cutlass_ext {

/// Of float32: on tensor cores with operands in parts, or on CUDA cores.
enum class Precision { Any, High, Highest };

/// What a caller decides about a call's execution. `backend` is "auto" or a family's name; `num_splits` 0 leaves the
/// number to the heuristics.
struct Request {
  DType dtype = DType::Float32;
  std::string backend = "auto";
  int num_splits = 0;
  bool is_cache = false;       // of the cache operator
  bool deterministic = false;  // of the backward pass: the same bits, run after run; the forward has no others
  Precision precision = Precision::Any;
};

/// A launch, and those that it may have beside it.
struct Plan {
  Params params;                   // the call, completed by what is decided of its work
  Kernel const* kernel = nullptr;  // null: nothing here runs the call
  Grid grid;
  unsigned relief = 0;         // CTAs of a second launch, which takes work of the first once what decodes is done
  int splits = 1;              // parts of a sequence's keys; 0 where the batch's keys are shared out by their lengths
  int64_t partial_rows = 0;    // rows of parts that are merged: d_v floats each
  int floats_a_part = 0;       // and so many: its lse, or m and l
  size_t counters = 0;         // that the kernel wants
  bool merges_apart = false;   // parts are merged by a launch of its own
  bool appends_apart = false;  // new keys are written, and q rotated, by a launch of its own before
  std::shared_ptr<Plan const> few;  // where sequences of few query rows come with others: the launch that decodes them
  std::shared_ptr<Plan const> out_of_range;  // of a kernel that multiplies parts: the launch for what they do not hold
  std::string refusal;      // where there is no kernel, the argument that none takes, and what would do
  std::string passed_over;  // why a family that would have come first does not run the call

  explicit Plan(Params const& params, Kernel const* kernel = nullptr) : params(params), kernel(kernel) {}

  /// Why this kernel, in a sentence.
  std::string reason(Request const& request) const;
};

/// What a kernel is called: its kind, and what its operands are in where that is not the call's dtype.
std::string kernel_name(Kernel const& kernel);

/// Chooses. Follows from host-known shapes alone, never from device memory.
Plan plan(Params params, Request const& request);

/// The same with a kernel of query tiles that the caller has chosen, and `params.num_splits`.
Plan plan_with(Kernel const& kernel, Params params);

/// The call as it is once the launch of append.hpp is done: all keys are there, and q, where it is rotated, lies at
/// `rotated_q`.
Params after_append(Params const& params, void* rotated_q);

/// Launches, and writes where `plan.params` says, which may be told after planning.
void run(Plan const& plan, cudaStream_t stream, Allocate const& allocate);

}  // namespace cutlass_ext

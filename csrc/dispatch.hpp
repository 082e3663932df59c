// (device, dtype, head_dim, features) -> kernel, number of splits, launch. Called by torch_ops.cpp and
// bench/fmha_bench.cu; knows no torch.
#pragma once

#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "fmha/params.hpp"

namespace cutlass_ext {

enum class DType { Float32, Float16, BFloat16 };

/// One compiled kernel: a family's way of carrying FMHA out at one tile shape. Defined in csrc/kernels/.
struct Kernel {
  char const* family;  // "simt", "sm80", "sm90"
  DType dtype;
  int head_dim, head_dim_v;  // of the tile: the largest d and d_v that it takes
  int block_r, block_c;
  bool score_mods;  // takes softcap and ALiBi
  int threads;
  int shared_bytes;
  void const* entry;  // for occupancy and the shared-memory limit
  cudaError_t (*launch)(ForwardParams const&, cudaStream_t);
  char const* (*refuses)(ForwardParams const&);  // why tensors like these are not for it, or null
  int short_warpgroups;  // for launches that are over before a pipeline is full: warpgroups of a query tile; else 0
};

struct Plan {
  Kernel const* kernel = nullptr;  // null: nothing here runs this call
  int num_splits = 1;
  int slots = 0;       // CTAs of it that the device holds at once
  std::string reason;  // why this kernel, or why none; filled when asked for
};

/// Chooses for the current device. `backend` is "auto" or a family's name; `num_splits` 0 leaves the number to the
/// heuristic. Follows from host-known shapes alone, never from device memory.
cudaError_t plan_forward(ForwardParams const& params, DType dtype, std::string const& backend, int num_splits,
                         bool want_reason, Plan* plan);

/// Launches the kernel and, where there are splits, their merge. `params` holds the plan's number of splits and their
/// workspace.
cudaError_t run_forward(Plan const& plan, ForwardParams params, cudaStream_t stream);

}  // namespace cutlass_ext

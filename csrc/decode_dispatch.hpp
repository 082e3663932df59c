// The table of decode kernels, the choice among them, the grid, and the counters by which the CTAs of one sequence find
// out who is last. Called by torch_ops.cpp and torch_kvcache.cpp; knows no torch.
#pragma once

#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "dispatch.hpp"
#include "fmha/decode/params.hpp"

namespace cutlass_ext::decode {

/// One compiled kernel. Defined in csrc/kernels/.
struct Kernel {
  DType dtype;
  int head_dim;  // of the tile: the largest d and d_v that it takes
  int rows;      // packed query rows of the tile
  int tile_keys;
  int threads;
  int shared_bytes;
  void const* entries[2];  // the whole and the plain kernel, for occupancy and the shared-memory limit
  void const* lean_entry;  // lean.hpp's, or null
  int lean_shared_bytes;
  cudaError_t (*launch)(DecodeParams const&, cudaStream_t);
};

/// One compiled kernel of cluster.hpp. Defined in csrc/kernels/sm90_decode.cu.
struct ClusterKernel {
  DType dtype;
  int head_dim;
  int threads;
  int shared_bytes;
  void const* entries[2];  // the reading and the appending kernel
  cudaError_t (*launch)(DecodeParams const&, cudaStream_t);
};

struct Plan {
  cudaError_t (*launch)(DecodeParams const&, cudaStream_t) = nullptr;  // null: the backend has no kernel for the call
  int64_t partial_rows = 0;  // rows of o_partial (d_v floats each) and lse_partial (2 floats each): 0 without splits
  std::string reason;        // why this kernel; filled when asked for
};

/// The backend of the kernels that run on every GPU, and take every call.
char const* family_of(DType dtype);

/// A call of `fmha` as the decode kernels see it: a contiguous cache of n_kv keys.
DecodeParams params_of(ForwardParams const& params);

/// Whether q, k and v lie as the decode kernels read them: rows that start on 16 bytes.
bool aligned(DecodeParams const& params, DType dtype);

/// Whether a call of `fmha` is for the decode kernels, if its backend has them: few query rows, whose keys are then
/// read once for all heads that share them, and their splits merged in the same launch. Packed sequences are not.
bool takes(DecodeParams const& params, DType dtype);

/// Chooses for the current device and completes `params` by tiles and grid. `num_splits` 0 shares the keys of the batch
/// out evenly. Follows from host-known shapes alone, never from device memory.
cudaError_t plan(DecodeParams* params, DType dtype, std::string const& backend, int num_splits, bool want_reason,
                 Plan* plan);

/// Completes `params` by counters and launches.
cudaError_t run(Plan const& plan, DecodeParams* params, cudaStream_t stream);

}  // namespace cutlass_ext::decode

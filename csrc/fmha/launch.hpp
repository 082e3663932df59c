// The launch of the families that run one CTA for each work item of the scheduler. Called by their FMHA structs.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "params.hpp"

namespace cutlass_ext {

/// Launches `Fmha::kernel` for every query tile and split of `params`, as many as host-known shapes alone allow for.
template <class Fmha>
cudaError_t launch_work_items(ForwardParams const& params, cudaStream_t stream) {
  using Traits = typename Fmha::Traits;
  int64_t const blocks = params.scheduler.size();
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Fmha::kernel<<<static_cast<unsigned>(blocks), Traits::Threads, Fmha::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace cutlass_ext

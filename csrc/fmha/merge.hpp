// Merges the splits of each query row by their lse, in split order, and lets the sink in (Flash-Decoding's second step,
// in a launch of its own). Launched by dispatch.cu after a kernel that ran with num_splits > 1.
#pragma once

#include "online_softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kMergeThreads = 128;

/// One warp a query row. O = sum_s exp(lse_s - lse) O_s: the bits depend on the number of splits alone.
template <class Element>
__global__ void __launch_bounds__(kMergeThreads) merge_splits_kernel(__grid_constant__ ForwardParams const params) {
  int64_t const rows = int64_t(params.batch) * params.heads_q * params.n_q;
  int64_t const index =
      int64_t(blockIdx.x) * (kMergeThreads / 32) + threadIdx.x / 32;  // (b, h, row), as lse is laid out
  if (index >= rows) return;
  int const lane = threadIdx.x % 32;
  int const row = static_cast<int>(index % params.n_q);
  int const head = static_cast<int>(index / params.n_q % params.heads_q);
  int64_t const b = index / params.n_q / params.heads_q;

  float const sink = params.sink ? params.sink[head] : -INFINITY;
  float lse_max = sink;
  for (int s = 0; s < params.num_splits; ++s) lse_max = fmaxf(lse_max, params.lse_partial[s * rows + index]);
  float const base = lse_max == -INFINITY ? 0.f : lse_max;
  float sum = expf(sink - base);
  for (int s = 0; s < params.num_splits; ++s) sum += expf(params.lse_partial[s * rows + index] - base);
  float const factor = sum == 0.f ? 0.f : 1.f / sum;

  Element* out = static_cast<Element*>(params.o) + b * params.o_stride.batch + row * params.o_stride.row +
                 head * params.o_stride.head;
  for (int col = lane * 4; col < params.head_dim_v; col += 32 * 4) {
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < params.num_splits; ++s) {
      float const weight = expf(params.lse_partial[s * rows + index] - base) * factor;
      float4 const part =
          *reinterpret_cast<float4 const*>(params.o_partial + (s * rows + index) * params.head_dim_v + col);
      acc = make_float4(acc.x + weight * part.x, acc.y + weight * part.y, acc.z + weight * part.z,
                        acc.w + weight * part.w);
    }
    out[col] = Element(acc.x);
    out[col + 1] = Element(acc.y);
    out[col + 2] = Element(acc.z);
    out[col + 3] = Element(acc.w);
  }
  if (lane == 0) params.lse[index] = sum == 0.f ? -INFINITY : base + logf(sum);
}

template <class Element>
cudaError_t merge_splits(ForwardParams const& params, cudaStream_t stream) {
  int64_t const rows = int64_t(params.batch) * params.heads_q * params.n_q;
  int64_t const blocks = (rows + kMergeThreads / 32 - 1) / (kMergeThreads / 32);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  merge_splits_kernel<Element><<<static_cast<unsigned>(blocks), kMergeThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace cutlass_ext

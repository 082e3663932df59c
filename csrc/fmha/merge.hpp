// Merges the splits of each query row by their lse, in split order, and lets the sink in (Flash-Decoding's second step,
// in a launch of its own). Launched by dispatch.cu after a kernel that ran with num_splits > 1.
#pragma once

#include "online_softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kMergeRows = 4;  // query rows of a block, a warp each

/// One warp a query row. O = sum_s exp(lse_s - lse) O_s: the bits depend on the number of splits alone.
template <class Element>
__global__ void __launch_bounds__(kMergeRows * 32) merge_splits_kernel(__grid_constant__ Params const params) {
  int const n = params.stored_rows(), blocks = (n + kMergeRows - 1) / kMergeRows;
  int const row = blockIdx.x % blocks * kMergeRows + threadIdx.x / 32;
  if (row >= n) return;
  unsigned const batch_head = blockIdx.x / blocks;
  int64_t const rows = params.result_rows();
  int64_t const index = int64_t(batch_head) * n + row;  // as lse is laid out
  int const lane = threadIdx.x % 32, head = batch_head % params.heads_q;
  int64_t const b = batch_head / params.heads_q;

  float const sink = params.sink ? params.sink[head] : -INFINITY;
  float lse_max = sink;
  for (int s = 0; s < params.num_splits; ++s) lse_max = fmaxf(lse_max, params.lse_partial[s * rows + index]);
  float const base = lse_max == -INFINITY ? 0.f : lse_max;
  float sum = expf(sink - base);
  for (int s = 0; s < params.num_splits; ++s) sum += expf(params.lse_partial[s * rows + index] - base);
  float const factor = sum == 0.f ? 0.f : reciprocal(sum);

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
    Element* to = out + col;
    to[0] = Element(acc.x), to[1] = Element(acc.y), to[2] = Element(acc.z), to[3] = Element(acc.w);
  }
  if (lane == 0) params.lse[index] = sum == 0.f ? -INFINITY : base + logf(sum);
}

}  // namespace cutlass_ext

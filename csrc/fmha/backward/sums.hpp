// dQ from the sums that Hopper's kernels over tiles of keys leave in the order of their accumulators (sm90.hpp).
// Launched by kernels/dq_sums.cu.
#pragma once

#include <cutlass/numeric_types.h>

#include "../operand.hpp"
#include "../rows.hpp"
#include "../score.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kSumsRows = 64, kSumsThreads = 128;

/// A CTA scales and rounds the 64 rows of one tile and head.
template <int HeadDim, class Element>
__global__ void __launch_bounds__(kSumsThreads) dq_kernel(__grid_constant__ BackwardParams const params) {
  using Sums = SumsOfTile<HeadDim>;
  static_assert(Sums::kRows == kSumsRows && kSumsThreads == kSumsRows * 2, "a warp takes 16 rows");
  constexpr int kVectors = HeadDim / 8;  // of a thread
  constexpr int kPitch = HeadDim + 8;    // of a row in shared memory: 16 bytes more spread rows over the banks
  __shared__ __align__(16) Element tile[kSumsRows * kPitch];
  int const b = blockIdx.z, head = blockIdx.y, row0 = blockIdx.x * kSumsRows;
  Sequence const sequence = sequence_of(params, b);
  int const rows = sequence.visibility.n_q - row0;
  if (rows <= 0) return;
  int64_t const first = StatisticsRows(params).first(params, sequence, b, head) + row0;
  auto const* const sums = reinterpret_cast<float4 const*>(params.dq_sums + first * HeadDim);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp * 16 + lane / 4;
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    constexpr int kOfAPart = kVectors / Sums::kParts;
    float4 const x = sums[Sums::first(i / kOfAPart, warp) + i % kOfAPart * 32 + lane];
    float const scale = ScoreMod::gradient_scale(params);
    auto* const to = reinterpret_cast<uint32_t*>(tile + row * kPitch + i * 8 + lane % 4 * 2);
    to[0] = pack<Element>(x.x * scale, x.y * scale);
    to[8 * kPitch / 2] = pack<Element>(x.z * scale, x.w * scale);
  }
  __syncthreads();
  auto* const dq = row_at<Element>(params.dq, params.dq_stride, sequence.batch, sequence.q_row0 + row0, head);
  for (int i = threadIdx.x; i < kSumsRows * HeadDim / 8; i += kSumsThreads) {
    int const to_row = i / (HeadDim / 8), col = i % (HeadDim / 8) * 8;
    if (to_row < rows && col < params.head_dim)
      *reinterpret_cast<uint4*>(dq + to_row * params.dq_stride.row + col) =
          *reinterpret_cast<uint4 const*>(tile + to_row * kPitch + col);
  }
}

}  // namespace cutlass_ext

// Gradients from sums that kernels leave in the order of their accumulators (SumsOfTile): dQ, which kernels over tiles
// of keys add to; and what the splits of a tile have summed up apart. Launched by kernels/backward_postprocess.cu.
#pragma once

#include <cutlass/numeric_types.h>

#include "../operand.hpp"
#include "../pack_gqa.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kSumsRows = 64, kSumsColumns = 64, kSumsThreads = 128;

/// One gradient: where its sums lie, and where it goes.
struct SummedGradient {
  float const* sums = nullptr;  // of the first split, rows as TiledRows has them
  int columns = 0;              // of a row of sums
  void* to = nullptr;
  Strides stride;
  int cols = 0;  // of a row of the gradient
  CUTE_HOST_DEVICE int panels() const { return (cols + kSumsColumns - 1) / kSumsColumns; }
};

/// What a launch finishes, of rows of one side: one gradient, or two; of heads, all sequences' counted, from `head0`
/// on, which the sums begin with.
struct GradientSums {
  Axis side;
  int64_t head0 = 0;
  unsigned ctas_a_head = 1;
  int splits = 1;
  int64_t of_a_split = 0;  // rows
  float scale = 1.f;
  SumsOfTile::Order order = SumsOfTile::Order::Vectors;
  SummedGradient first, second;
};

/// A CTA adds up the splits of 64 rows and columns of a head, in their order, scales and rounds.
template <class Element>
__global__ void __launch_bounds__(kSumsThreads) gradient_sums_kernel(__grid_constant__ BackwardParams const params,
                                                                     __grid_constant__ GradientSums const gradients) {
  static_assert(SumsOfTile::kRows == kSumsRows && SumsOfTile::kPanel == kSumsColumns && kSumsThreads == kSumsRows * 2,
                "a warp takes 16 rows");
  constexpr int kVectors = kSumsColumns / 8;  // of a thread
  constexpr int kPitch = kSumsColumns + 8;    // of a row in shared memory: 16 bytes more spread rows over the banks
  __shared__ __align__(16) Element tile[kSumsRows * kPitch];
  int const panels = gradients.first.panels() + gradients.second.panels();
  bool const of_keys = gradients.side == Axis::Keys;
  unsigned const head_of_launch = blockIdx.x / gradients.ctas_a_head,
                 cta = blockIdx.x - head_of_launch * gradients.ctas_a_head;
  int const heads = of_keys ? params.heads_kv : params.heads_q, row0 = cta / panels * kSumsRows, panel = cta % panels;
  int64_t const head_of_all = gradients.head0 + head_of_launch;
  int const b = head_of_all / heads, head = head_of_all - int64_t(b) * heads;
  bool const is_second = panel >= gradients.first.panels();
  SummedGradient const of = is_second ? gradients.second : gradients.first;
  int const panel_of = panel - (is_second ? gradients.first.panels() : 0);
  Sequence const sequence = sequence_of(params, b);
  int const rows = (of_keys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0;
  if (rows <= 0) return;
  TiledRows const tiled(params, gradients.side);
  int64_t const first = tiled.first(params, sequence, b, head) - gradients.head0 * tiled.of_a_head + row0;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp * 16 + lane / 4;
  auto const* from =
      reinterpret_cast<float4 const*>(of.sums + first * of.columns) + SumsOfTile::first(of.columns, panel_of, warp);
  auto const vector = [&](int i) {
    if (gradients.order == SumsOfTile::Order::Vectors) return from[i * 32 + lane];
    auto const* const x = reinterpret_cast<float const*>(from + i * 32) + lane;
    return make_float4(x[0], x[32], x[64], x[96]);
  };
  float4 sums[kVectors];
  int const vectors = (of.columns - panel_of * kSumsColumns) / 8;  // that there are
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) sums[i] = i < vectors ? vector(i) : float4{};
  int64_t const of_a_split = gradients.of_a_split * of.columns / 4;
#pragma unroll 4
  for (int split = 1; split < gradients.splits; ++split) {
    from += of_a_split;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float4 const x = i < vectors ? vector(i) : float4{};
      sums[i] = make_float4(sums[i].x + x.x, sums[i].y + x.y, sums[i].z + x.z, sums[i].w + x.w);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    float4 const x = sums[i];
    float const scale = gradients.scale;
    auto* const to = reinterpret_cast<uint32_t*>(tile + row * kPitch + i * 8 + lane % 4 * 2);
    to[0] = pack<Element>(x.x * scale, x.y * scale);
    to[8 * kPitch / 2] = pack<Element>(x.z * scale, x.w * scale);
  }
  __syncthreads();
  auto* const to =
      row_at<Element>(of.to, of.stride, sequence.batch, (of_keys ? sequence.k_row0 : sequence.q_row0) + row0, head);
  for (int i = threadIdx.x; i < kSumsRows * kSumsColumns / 8; i += kSumsThreads) {
    int const to_row = i / (kSumsColumns / 8), at = i % (kSumsColumns / 8) * 8, col = panel_of * kSumsColumns + at;
    if (to_row < rows && col < of.cols)
      *reinterpret_cast<uint4*>(to + to_row * of.stride.row + col) =
          *reinterpret_cast<uint4 const*>(tile + to_row * kPitch + at);
  }
}

}  // namespace cutlass_ext

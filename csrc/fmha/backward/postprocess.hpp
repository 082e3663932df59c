// Gradients from sums that kernels leave: dQ, which kernels over tiles of keys add to; and what the splits of a tile
// have summed up apart. On tensor cores they lie in the order of accumulators (SumsOfTile), of CUDA cores row by row.
// Launched by kernels/backward_postprocess.cu.
#pragma once

#include <cutlass/numeric_types.h>

#include "../operand.hpp"
#include "../pack_gqa.hpp"
#include "../score.hpp"
#include "../softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kSumsColumns = 64, kSumsWarps = 4;

/// Rows of a CTA: of splits its warps share the same 16.
constexpr int sums_rows(bool of_splits) { return of_splits ? 16 : 16 * kSumsWarps; }

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

/// A CTA scales and rounds some rows and 64 columns of a head: sums, or those of splits, of which a warp adds up every
/// fourth, and the first one theirs, always in the same order. A warp takes 1 us to read four: where each had all of
/// its rows, (1, 361 on 37, 8 heads on 1, 64) took 37 us for it.
template <class Element, bool OfSplits>
__global__ void __launch_bounds__(kSumsWarps * 32)
    gradient_sums_kernel(__grid_constant__ BackwardParams const params,
                         __grid_constant__ GradientSums const gradients) {
  constexpr int kRows = sums_rows(OfSplits), kTileRows = SumsOfTile::kRows;
  static_assert(kTileRows == 16 * kSumsWarps && SumsOfTile::kPanel == kSumsColumns, "a warp takes 16 rows");
  constexpr int kVectors = kSumsColumns / 8;  // of a thread
  constexpr int kPitch = kSumsColumns + 8;    // of a row in shared memory: 16 bytes more spread rows over the banks
  __shared__ __align__(16) Element tile[kRows * kPitch];
  int const panels = gradients.first.panels() + gradients.second.panels();
  bool const of_keys = gradients.side == Axis::Keys;
  unsigned const head_of_launch = blockIdx.x / gradients.ctas_a_head,
                 cta = blockIdx.x - head_of_launch * gradients.ctas_a_head;
  int const heads = of_keys ? params.heads_kv : params.heads_q, row0 = cta / panels * kRows, panel = cta % panels;
  int64_t const head_of_all = gradients.head0 + head_of_launch;
  int const b = head_of_all / heads, head = head_of_all - int64_t(b) * heads;
  bool const is_second = panel >= gradients.first.panels();
  SummedGradient const of = is_second ? gradients.second : gradients.first;
  int const panel_of = panel - (is_second ? gradients.first.panels() : 0);
  Sequence const sequence = sequence_of(params, b);
  int const rows = (of_keys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0;
  if (rows <= 0) return;
  TiledRows const tiled(params, gradients.side);
  int64_t const first =
      tiled.first(params, sequence, b, head) - gradients.head0 * tiled.of_a_head + row0 / kTileRows * kTileRows;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, sixteen = OfSplits ? row0 % kTileRows / 16 : warp;
  auto const* from =
      reinterpret_cast<float4 const*>(of.sums + first * of.columns) + SumsOfTile::first(of.columns, panel_of, sixteen);
  auto const vector = [&](int i) {
    if (gradients.order == SumsOfTile::Order::Vectors) return from[i * 32 + lane];
    auto const* const x = reinterpret_cast<float const*>(from + i * 32) + lane;
    return make_float4(x[0], x[32], x[64], x[96]);
  };
  float4 sums[kVectors] = {};
  auto const add = [&](int i, float4 const& x) {
    sums[i] = make_float4(sums[i].x + x.x, sums[i].y + x.y, sums[i].z + x.z, sums[i].w + x.w);
  };
  int const vectors = (of.columns - panel_of * kSumsColumns) / 8;  // that there are
  int64_t const of_a_split = gradients.of_a_split * of.columns / 4;
  if constexpr (OfSplits) from += warp * of_a_split;
#pragma unroll 4
  for (int split = OfSplits ? warp : 0; split < gradients.splits;
       split += kSumsWarps, from += kSumsWarps * of_a_split) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) add(i, i < vectors ? vector(i) : float4{});
  }
  if constexpr (OfSplits) {
    __shared__ float4 of_warps[kSumsWarps][kVectors][32];
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) of_warps[warp][i][lane] = sums[i];
    __syncthreads();
    CUTE_UNROLL
    for (int w = 1; w < kSumsWarps; ++w) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) add(i, of_warps[w][i][lane]);
    }
  }
  if (!OfSplits || warp == 0) {
    int const row = (OfSplits ? 0 : warp * 16) + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float4 const x = sums[i];
      float const scale = gradients.scale;
      auto* const to = reinterpret_cast<uint32_t*>(tile + row * kPitch + i * 8 + lane % 4 * 2);
      to[0] = pack<Element>(x.x * scale, x.y * scale);
      to[8 * kPitch / 2] = pack<Element>(x.z * scale, x.w * scale);
    }
  }
  __syncthreads();
  auto* const to =
      row_at<Element>(of.to, of.stride, sequence.batch, (of_keys ? sequence.k_row0 : sequence.q_row0) + row0, head);
  for (int i = threadIdx.x; i < kRows * kSumsColumns / 8; i += kSumsWarps * 32) {
    int const to_row = i / (kSumsColumns / 8), at = i % (kSumsColumns / 8) * 8, col = panel_of * kSumsColumns + at;
    if (to_row < rows && col < of.cols)
      *reinterpret_cast<uint4*>(to + to_row * of.stride.row + col) =
          *reinterpret_cast<uint4 const*>(tile + to_row * kPitch + at);
  }
}

constexpr int kFloatRows = 8, kFloatThreads = 128;

/// The same in float32, of 8 rows and a head: rows of `columns`, of dV `columns_v`. What P of a query row lack to sum
/// to 1, as simt.hpp finds it where a CTA has a tile alone, is taken out of dQ, and left in lse for the launch over
/// keys.
template <Axis Side>
__global__ void __launch_bounds__(kFloatThreads)
    float_sums_kernel(__grid_constant__ BackwardParams const params, int columns, int columns_v, unsigned ctas_a_head) {
  constexpr bool OfKeys = Side == Axis::Keys;
  __shared__ float factors[kFloatRows];
  int const heads = OfKeys ? params.heads_kv : params.heads_q, head_of_all = blockIdx.x / ctas_a_head,
            row0 = blockIdx.x % ctas_a_head * kFloatRows, b = head_of_all / heads, head = head_of_all - b * heads;
  Sequence const sequence = sequence_of(params, b);
  int const rows = min((OfKeys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0, kFloatRows);
  if (rows <= 0) return;
  SplitSums const splits(params, Side);
  auto const place = [&](int of_a_row) { return splits.first(params, sequence, b, head, row0, 0, of_a_row); };
  float const* const second = params.split_sums + splits.size(params.splits(), columns);
  if (threadIdx.x < rows) {
    factors[threadIdx.x] = 1.f;
    if constexpr (!OfKeys) {
      float const* const sums = second + place(1) + threadIdx.x;
      float sum = sums[0];
      for (int split = 1; split < params.splits(); ++split) sum += sums[split * splits.of_a_split];
      float& lse_log2 =
          params.row_statistics[StatisticsRows(params).first(params, sequence, b, head) + row0 + threadIdx.x].lse_log2;
      sum = sum_for_one(sum, ScoreMod(params, b, head).sink_log2, lse_log2);
      factors[threadIdx.x] = reciprocal(sum);
      lse_log2 += log2f(sum);
    }
  }
  __syncthreads();
  auto const finish = [&](float const* from, int of_a_row, void* to, Strides const& stride, int cols, float scale) {
    from += place(of_a_row);
    int64_t const of_a_split = splits.of_a_split * of_a_row;
    float* const out =
        row_at<float>(to, stride, sequence.batch, (OfKeys ? sequence.k_row0 : sequence.q_row0) + row0, head);
    int const vectors = cols / 4;
    for (int i = threadIdx.x; i < rows * vectors; i += kFloatThreads) {
      int const row = i / vectors, col = i % vectors * 4;
      float const* at = from + row * of_a_row + col;
      float4 sum = *reinterpret_cast<float4 const*>(at);
#pragma unroll 4
      for (int split = 1; split < params.splits(); ++split) {
        at += of_a_split;
        float4 const x = *reinterpret_cast<float4 const*>(at);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      float const factor = factors[row] * scale;
      *reinterpret_cast<float4*>(out + row * stride.row + col) =
          make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    }
  };
  float const scale = ScoreMod::gradient_scale(params);
  if constexpr (OfKeys) {
    finish(params.split_sums, columns, params.dk, params.dk_stride, params.head_dim, scale);
    finish(second, columns_v, params.dv, params.dv_stride, params.head_dim_v, params.dropout.scale);
  } else {
    finish(params.split_sums, columns, params.dq, params.dq_stride, params.head_dim, scale);
  }
}

}  // namespace cutlass_ext

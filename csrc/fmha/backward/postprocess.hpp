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

constexpr int kSumsColumns = 64, kSumsWarps = kSumsColumns / 8;
static_assert(16 * kSumsWarps == TiledRows::kTile);
/// CTAs of a multiprocessor, which leaves 85 registers a thread. With 64 ptxas puts each addition behind its load,
/// which takes 0.7 us a split.
constexpr int kSumsCtas = 3;

/// One gradient: where its sums lie, and where it goes.
struct SummedGradient {
  float const* sums = nullptr;  // of the first split, rows as TiledRows has them
  int columns = 0;              // of a row of sums
  void* to = nullptr;
  Strides stride;
  int cols = 0;  // of a row of the gradient
  CUTE_HOST_DEVICE int panels() const { return (cols + kSumsColumns - 1) / kSumsColumns; }
};

/// What a launch finishes of the rows of one side: one gradient, or two; of heads, all sequences' counted, from `head0`
/// on, which the sums begin with. A CTA makes 64 columns. Without splits each of its warps has 16 rows of its own; of
/// splits all have the same 16, and each warp eight columns, which a thread reads of eight splits at once.
struct GradientSums {
  int64_t head0 = 0;
  unsigned ctas = 0, ctas_a_head = 1;
  int splits = 1;
  int64_t of_a_split = 0;  // rows
  float scale = 1.f;
  SumsOfTile::Order order = SumsOfTile::Order::Vectors;  // without splits; theirs are vectors
  SummedGradient first, second;
  CUTE_HOST_DEVICE int panels() const { return first.panels() + second.panels(); }
  CUTE_HOST_DEVICE bool of_splits() const { return splits > 1; }
  CUTE_HOST_DEVICE int rows_a_cta() const { return of_splits() ? 16 : TiledRows::kTile; }
};

/// Adds up, scales and rounds `of_keys` and, by CTAs behind them, `of_rows`. Splits are added in their order.
template <class Element>
__global__ void __launch_bounds__(kSumsWarps * 32, kSumsCtas)
    gradient_sums_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ GradientSums const of_keys,
                         __grid_constant__ GradientSums const of_rows) {
  constexpr int kTileRows = SumsOfTile::kRows, kVectors = kSumsColumns / 8;  // of 16 rows, eight columns each
  static_assert(SumsOfTile::kPanel == kSumsColumns && TiledRows::kTile % kTileRows == 0);
  constexpr int kPitch = kSumsColumns + 8;  // of a row in shared memory: 16 bytes more spread rows over the banks
  __shared__ __align__(16) Element tile[TiledRows::kTile * kPitch];
  bool const is_of_keys = blockIdx.x < of_keys.ctas;
  GradientSums const& gradients = is_of_keys ? of_keys : of_rows;
  bool const of_splits = gradients.of_splits();
  unsigned const cta_of_side = blockIdx.x - (is_of_keys ? 0 : of_keys.ctas),
                 head_of_launch = cta_of_side / gradients.ctas_a_head,
                 cta = cta_of_side - head_of_launch * gradients.ctas_a_head, panels = gradients.panels(),
                 heads = is_of_keys ? params.heads_kv : params.heads_q,
                 head_of_all = static_cast<unsigned>(gradients.head0) + head_of_launch;
  int const row0 = cta / panels * gradients.rows_a_cta(), panel = cta % panels, b = head_of_all / heads,
            head = head_of_all % heads;
  bool const is_second = panel >= gradients.first.panels();
  SummedGradient const of = is_second ? gradients.second : gradients.first;
  int const panel_of = panel - (is_second ? gradients.first.panels() : 0);
  Sequence const sequence = sequence_of(params, b);
  int const rows = (is_of_keys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0;
  if (rows <= 0) return;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = of_splits ? 0 : warp * 16,
            vector0 = of_splits ? warp : 0;
  TiledRows const tiled(params, is_of_keys ? Axis::Keys : Axis::Rows);
  int64_t const first = tiled.first(params, sequence, b, head) - gradients.head0 * tiled.of_a_head +
                        (row0 + warp_row) / kTileRows * kTileRows;
  float4 const* from = reinterpret_cast<float4 const*>(of.sums + first * of.columns) +
                       SumsOfTile::first(of.columns, panel_of, (row0 + warp_row) % kTileRows / 16) + vector0 * 32;
  int const vectors = (of.columns - panel_of * kSumsColumns) / 8 - vector0;  // that there are from the first on
  float4 sums[kVectors] = {};
  if (of_splits) {
    int64_t const of_a_split = gradients.of_a_split * of.columns / 4;
    auto const add = [&](auto count) {  // all are read before the first is added
      float4 x[decltype(count)::value];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i, from += of_a_split) x[i] = from[lane];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i)
        sums[0] = make_float4(sums[0].x + x[i].x, sums[0].y + x[i].y, sums[0].z + x[i].z, sums[0].w + x[i].w);
    };
    int const splits = vectors > 0 ? gradients.splits : 0;
    CUTE_NO_UNROLL
    for (int i = splits / 8; i > 0; --i) add(cute::Int<8>{});
    if (splits & 4) add(cute::Int<4>{});
    if (splits & 2) add(cute::Int<2>{});
    if (splits & 1) add(cute::Int<1>{});
  } else if (warp_row < rows) {
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (i >= vectors) break;
      float4 const* const at = from + i * 32;
      auto const* const x = reinterpret_cast<float const*>(at) + lane;
      sums[i] = gradients.order == SumsOfTile::Order::Vectors ? at[lane] : make_float4(x[0], x[32], x[64], x[96]);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    if (of_splits && i > 0) break;
    float4 const x = sums[i];
    float const scale = gradients.scale;
    auto* const to =
        reinterpret_cast<uint32_t*>(tile + (warp_row + lane / 4) * kPitch + (vector0 + i) * 8 + lane % 4 * 2);
    to[0] = pack<Element>(x.x * scale, x.y * scale);
    to[8 * kPitch / 2] = pack<Element>(x.z * scale, x.w * scale);
  }
  __syncthreads();
  int64_t const first_row = (is_of_keys ? sequence.k_row0 : sequence.q_row0) + row0;
  auto* const to = row_at<Element>(of.to, of.stride, sequence.batch, first_row, head);
  int const end = cute::min(rows, gradients.rows_a_cta()) * kSumsColumns / 8;
  for (int i = threadIdx.x; i < end; i += kSumsWarps * 32) {
    int const to_row = i / (kSumsColumns / 8), at = i % (kSumsColumns / 8) * 8, col = panel_of * kSumsColumns + at;
    if (col < of.cols)
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

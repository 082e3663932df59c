// Gradients from sums that kernels leave: dQ, which kernels over tiles of keys add to; and what the splits of a tile
// have summed up apart. On tensor cores they lie in the order of accumulators (SumsOfTile), of CUDA cores row by row.
// Launched by kernels/backward_postprocess.cu.
#pragma once

#include <cutlass/numeric_types.h>

#include "../operand.hpp"
#include "../launch_order.hpp"
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
  float const* sums = nullptr;  // of the first split
  int columns = 0;              // of a row of sums
  void* to = nullptr;
  Strides stride;
  int cols = 0;  // of a row of the gradient
  CUTE_HOST_DEVICE int panels() const { return (cols + kSumsColumns - 1) / kSumsColumns; }
};

/// What a launch finishes of the rows of one side: one gradient, or two. A CTA makes 64 columns: of rows of heads, all
/// sequences' counted, from `head0` on, which the sums begin with, as TiledRows has them, each of its warps 16; or, of
/// tiles that CTAs share, of the same 16 for all warps, each eight columns, which a thread reads of eight splits at
/// once.
struct GradientSums {
  int64_t head0 = 0;
  int block = 0;                       // rows of a tile that CTAs share; 0: of heads
  unsigned ctas = 0, ctas_a_unit = 1;  // for each head, or tile
  float scale = 1.f;
  SumsOfTile::Order order = SumsOfTile::Order::Vectors;  // of heads; those of tiles are vectors
  SummedGradient first, second;
  CUTE_HOST_DEVICE int panels() const { return first.panels() + second.panels(); }
  CUTE_HOST_DEVICE bool of_splits() const { return block > 0; }
  CUTE_HOST_DEVICE int rows_a_cta() const { return of_splits() ? 16 : TiledRows::kTile; }
};

/// Of a tile that CTAs share, the `unit`-th: its first row, and where the first split of it has left its sums.
struct TileToFinish {
  int b, head, row0;
  Sequence sequence;
  int64_t split_row0;
  CUTE_DEVICE TileToFinish(SplitSums const& splits, int unit) {
    BackwardParams const& params = splits.params;
    SharedTiles::Item const item{params.shared_tiles.begin + unit / splits.images(), 0};
    bool const is_image = unit % splits.images();
    WorkItem const work = params.scheduler(item.index);
    b = work.batch, head = work.head, row0 = params.row0_of(item.index, work.row0, is_image);
    sequence = sequence_of(params, b);
    split_row0 = splits.first_row(item, is_image, sequence, b, head, row0);
  }
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
  wait_for_launch_before();
  bool const is_of_keys = blockIdx.x < of_keys.ctas;
  GradientSums const& gradients = is_of_keys ? of_keys : of_rows;
  bool const of_splits = gradients.of_splits();
  unsigned const cta_of_side = blockIdx.x - (is_of_keys ? 0 : of_keys.ctas), unit = cta_of_side / gradients.ctas_a_unit,
                 cta = cta_of_side - unit * gradients.ctas_a_unit, panels = gradients.panels();
  int const row_of_unit = cta / panels * gradients.rows_a_cta(), panel = cta % panels;
  bool const is_second = panel >= gradients.first.panels();
  SummedGradient const of = is_second ? gradients.second : gradients.first;
  int const panel_of = panel - (is_second ? gradients.first.panels() : 0);
  Axis const side = is_of_keys ? Axis::Keys : Axis::Rows;
  SplitSums const splits(params, side, gradients.block);
  int b, head, row0 = row_of_unit;
  Sequence sequence;
  int64_t sums_row0;
  if (of_splits) {
    TileToFinish const shared(splits, unit);
    b = shared.b, head = shared.head, row0 += shared.row0, sequence = shared.sequence, sums_row0 = shared.split_row0;
  } else {
    int const heads = is_of_keys ? params.heads_kv : params.heads_q,
              head_of_all = static_cast<int>(gradients.head0 + unit);
    b = head_of_all / heads, head = head_of_all % heads, sequence = sequence_of(params, b);
    TiledRows const tiled(params, side);
    sums_row0 = tiled.first(params, sequence, b, head) - gradients.head0 * tiled.of_a_head;
  }
  int const rows = (is_of_keys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0;
  if (rows <= 0) return;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = of_splits ? 0 : warp * 16,
            vector0 = of_splits ? warp : 0, first = row_of_unit + warp_row;
  float4 const* from =
      reinterpret_cast<float4 const*>(of.sums + (sums_row0 + first / kTileRows * kTileRows) * of.columns) +
      SumsOfTile::first(of.columns, panel_of, first % kTileRows / 16) + vector0 * 32;
  int const vectors = (of.columns - panel_of * kSumsColumns) / 8 - vector0;  // that there are from the first on
  float4 sums[kVectors] = {};
  if (of_splits) {
    int64_t const of_a_split = splits.rows() * of.columns / 4;
    auto const add = [&](auto count) {  // all are read before the first is added
      float4 x[decltype(count)::value];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i, from += of_a_split) x[i] = from[lane];
      CUTE_UNROLL
      for (int i = 0; i < count; ++i)
        sums[0] = make_float4(sums[0].x + x[i].x, sums[0].y + x[i].y, sums[0].z + x[i].z, sums[0].w + x[i].w);
    };
    int const count = vectors > 0 ? params.shared_tiles.splits : 0;
    CUTE_NO_UNROLL
    for (int i = count / 8; i > 0; --i) add(cute::Int<8>{});
    if (count & 4) add(cute::Int<4>{});
    if (count & 2) add(cute::Int<2>{});
    if (count & 1) add(cute::Int<1>{});
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

/// The same in float32, of 8 rows of a tile of `block` that CTAs share: rows of `columns`, of dV `columns_v`. What P of
/// a query row lack to sum to 1, as simt.hpp finds it where a CTA has a tile alone, is taken out of dQ, and left in lse
/// for the launch over keys.
template <Axis Side>
__global__ void __launch_bounds__(kFloatThreads)
    float_sums_kernel(__grid_constant__ BackwardParams const params, int columns, int columns_v, int block) {
  constexpr bool OfKeys = Side == Axis::Keys;
  __shared__ float factors[kFloatRows];
  unsigned const ctas_a_tile = block / kFloatRows, tile = blockIdx.x / ctas_a_tile;
  int const row_of_tile = (blockIdx.x - tile * ctas_a_tile) * kFloatRows;
  SplitSums const splits(params, Side, block);
  TileToFinish const shared(splits, tile);
  int const b = shared.b, head = shared.head, row0 = shared.row0 + row_of_tile;
  Sequence const& sequence = shared.sequence;
  int const rows = min((OfKeys ? sequence.visibility.len_kv : sequence.visibility.n_q) - row0, kFloatRows);
  if (rows <= 0) return;
  int const num_splits = params.shared_tiles.splits;
  int64_t const first = shared.split_row0 + row_of_tile;
  float const* const second = params.shared_tiles.sums + splits.size(columns);
  if (threadIdx.x < rows) {
    factors[threadIdx.x] = 1.f;
    if constexpr (!OfKeys) {
      float const* const sums = second + first + threadIdx.x;
      float sum = sums[0];
      for (int split = 1; split < num_splits; ++split) sum += sums[split * splits.rows()];
      float& lse_log2 =
          params.row_statistics[StatisticsRows(params).first(params, sequence, b, head) + row0 + threadIdx.x].lse_log2;
      sum = sum_for_one(sum, ScoreMod(params, b, head).sink_log2, lse_log2);
      factors[threadIdx.x] = reciprocal(sum);
      lse_log2 += log2f(sum);
    }
  }
  __syncthreads();
  auto const finish = [&](float const* from, int of_a_row, void* to, Strides const& stride, int cols, float scale) {
    from += first * of_a_row;
    int64_t const of_a_split = splits.rows() * of_a_row;
    float* const out =
        row_at<float>(to, stride, sequence.batch, (OfKeys ? sequence.k_row0 : sequence.q_row0) + row0, head);
    int const vectors = cols / 4;
    for (int i = threadIdx.x; i < rows * vectors; i += kFloatThreads) {
      int const row = i / vectors, col = i % vectors * 4;
      float const* at = from + row * of_a_row + col;
      float4 sum = *reinterpret_cast<float4 const*>(at);
#pragma unroll 4
      for (int split = 1; split < num_splits; ++split) {
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
    finish(params.shared_tiles.sums, columns, params.dk, params.dk_stride, params.head_dim, scale);
    finish(second, columns_v, params.dv, params.dv_stride, params.head_dim_v, params.dropout.scale);
  } else {
    finish(params.shared_tiles.sums, columns, params.dq, params.dq_stride, params.head_dim, scale);
  }
}

}  // namespace cutlass_ext

// dBias: the sum of dS over the sequences, heads and rows that share an element, always in the same
// order. A CTA owns a tile of it and goes through those that share it, with two products for each; where there
// are few tiles several CTAs take parts, which a second launch adds up. Launched by kernels/dbias.cu.
#pragma once

#include <cute/tensor.hpp>

#include "../copy/cp_async.hpp"
#include "../pairs.hpp"
#include "../rows.hpp"
#include "../sm80/warp.hpp"
#include "../softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kBiasTile = 64, kBiasThreads = 128;  // rows and keys of a tile

/// The tiles of dBias, and what is summed up for each.
struct BiasTiles {
  int batches, heads, row_tiles, key_tiles;  // of dBias
  int of_batches, of_heads, of_row_tiles;    // that share one
  int parts = 1;                             // of them, each a CTA's
  float* partial = nullptr;                  // [parts, elements], where there are several
  int64_t elements;

  explicit BiasTiles(BackwardParams const& p)
      : batches(p.dbias_batch ? p.batch : 1),
        heads(p.dbias_head ? p.heads_q : 1),
        row_tiles(p.dbias_row ? Scheduler::tiles_of(p.n_q, kBiasTile) : 1),
        key_tiles(Scheduler::tiles_of(p.n_kv, kBiasTile)),
        of_batches(p.dbias_batch ? 1 : p.batch),
        of_heads(p.dbias_head ? 1 : p.heads_q),
        of_row_tiles(p.dbias_row ? 1 : Scheduler::tiles_of(p.n_q, kBiasTile)),
        elements(int64_t(batches) * heads * (p.dbias_row ? p.n_q : 1) * p.n_kv) {}

  CUTE_HOST_DEVICE int64_t all() const { return int64_t(batches) * heads * row_tiles * key_tiles; }
  CUTE_HOST_DEVICE int64_t turns() const { return int64_t(of_batches) * of_heads * of_row_tiles; }
};

/// S += A B^T of 64 rows and keys over one panel of columns in shared memory, in the order of tensor-core accumulators.
template <class Element>
struct PanelProduct {
  using Traits = sm80::Traits<kBiasTile, kBiasTile, sm80::kPanel, Element, kBiasThreads, 1>;
  static constexpr int kColumns = sm80::kPanel;
  using Scores = float[1][kBiasTile / 8][4];

  CUTE_DEVICE static void add(Scores& S, Element const* a, Element const* b) {
    sm80::Place<Traits> const place;
    typename sm80::Queries<Traits>::Held held;
    sm80::Queries<Traits> const rows{
        held, cute::cast_smem_ptr_to_uint(a) +
                  2 * sm80::chunk_offset<kBiasTile>(place.warp_row + place.lane % 16, place.lane / 16)};
    rows.take();
    Scores T;
    sm80::gemm_qk<Traits>(
        T, rows,
        cute::cast_smem_ptr_to_uint(b) +
            2 * sm80::chunk_offset<kBiasTile>(place.lane % 8 + place.lane / 16 * 8, place.lane / 8 % 2),
        [] {});
    CUTE_UNROLL
    for (int n = 0; n < kBiasTile / 8; ++n) {
      CUTE_UNROLL
      for (int x = 0; x < 4; ++x) S[0][n][x] += T[0][n][x];
    }
  }
};

template <>
struct PanelProduct<float> {
  static constexpr int kColumns = 32;
  using Scores = float[1][kBiasTile / 8][4];

  CUTE_DEVICE static void add(Scores& S, float const* a, float const* b) {
    int const lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    auto const vector = [](float const* tile, int row, int chunk) {
      return *reinterpret_cast<float4 const*>(tile + row * kColumns + swizzled_chunk<float>(chunk, row));
    };
    CUTE_NO_UNROLL
    for (int chunk = 0; chunk < kColumns / 4; ++chunk) {
      float4 const x[2] = {vector(a, row, chunk), vector(a, row + 8, chunk)};
      CUTE_UNROLL
      for (int n = 0; n < kBiasTile / 8; ++n) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float4 const y = vector(b, n * 8 + lane % 4 * 2 + c, chunk);
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            float& s = S[0][n][2 * i + c];
            s = fmaf(x[i].x, y.x, fmaf(x[i].y, y.y, fmaf(x[i].z, y.z, fmaf(x[i].w, y.w, s))));
          }
        }
      }
    }
  }
};

/// Writes element `at` of dbias in its dtype.
CUTE_DEVICE void store_bias(BackwardParams const& params, int64_t at, float value) {
  if (dtype_of_bias(params) == BiasType::Float32) static_cast<float*>(params.dbias)[at] = value;
  if (dtype_of_bias(params) == BiasType::Float16) static_cast<__half*>(params.dbias)[at] = __float2half(value);
  if (dtype_of_bias(params) == BiasType::BFloat16)
    static_cast<__nv_bfloat16*>(params.dbias)[at] = __float2bfloat16(value);
}

template <class Element>
__global__ void __launch_bounds__(kBiasThreads)
    bias_gradient_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ BiasTiles const tiles) {
  using Product = PanelProduct<Element>;
  using Scores = typename Product::Scores;
  __shared__ __align__(128) Element panel[2][kBiasTile * Product::kColumns];
  __shared__ float sums[kBiasThreads / 32][kBiasTile];
  int rest = blockIdx.x / tiles.key_tiles;
  int const key0 = (blockIdx.x - rest * tiles.key_tiles) * kBiasTile, row_tile = rest % tiles.row_tiles;
  rest /= tiles.row_tiles;
  int const bias_head = rest % tiles.heads, bias_batch = rest / tiles.heads;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_in_tile = warp * 16 + lane / 4, column = lane % 4 * 2;

  // acc += A B^T of rows that begin at `row` and keys that begin at `key`, `cols` columns.
  auto const product = [&](Scores& acc, GlobalTile<Element> a, GlobalTile<Element> b) {
    auto const moved = [](int row) { return row; };
    int const cols = a.cols;
    CUTE_NO_UNROLL
    for (int col = 0; col < cols; col += Product::kColumns) {
      __syncthreads();  // the panels before these have been read
      a.cols = b.cols = cols - col;
      copy_tile<kBiasTile, Product::kColumns, kBiasThreads>(a, panel[0], moved);
      copy_tile<kBiasTile, Product::kColumns, kBiasThreads>(b, panel[1], moved);
      a.data += Product::kColumns, b.data += Product::kColumns;
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();
      Product::add(acc, panel[0], panel[1]);
    }
  };

  Scores gradient = {};
  auto dB = sm80::rows_and_columns(gradient);
  int64_t const turns = tiles.turns(), end = turns * (blockIdx.y + 1) / tiles.parts;
  CUTE_NO_UNROLL
  for (int64_t turn = turns * blockIdx.y / tiles.parts; turn < end; ++turn) {
    int64_t const pair = turn / tiles.of_row_tiles;
    int const row0 = (row_tile + static_cast<int>(turn - pair * tiles.of_row_tiles)) * kBiasTile,
              head = bias_head + static_cast<int>(pair % tiles.of_heads),
              batch = bias_batch + static_cast<int>(pair / tiles.of_heads);
    Sequence const sequence = sequence_of(params, batch);
    Visibility const& visibility = sequence.visibility;
    int const first_key = key0 - sequence.leftpad, last_row = visibility.last_row(row0, kBiasTile);
    // Rows that see no key hold anything; those that see some are next to each other.
    Range const seeing = visibility.rows_with_keys();
    if (visibility.keys_of_row(row0).begin >= first_key + kBiasTile ||
        visibility.keys_of_row(last_row).end <= max(first_key, 0))
      continue;

    Scores scores = {}, dp = {};
    auto const of_rows = [&](void const* data, Strides const& stride, int cols) {
      return global_tile<Element>(data, stride, sequence.batch, head, sequence.q_row0 + row0, visibility.n_q - row0,
                                  cols);
    };
    auto const of_keys = [&](void const* data, Strides const& stride, int cols) {
      return global_tile<Element>(data, stride, sequence.batch, params.heads_per_kv.div(head),
                                  sequence.k_row0 + first_key, visibility.len_kv - first_key, cols);
    };
    product(scores, of_rows(params.q, params.q_stride, params.head_dim),
            of_keys(params.k, params.k_stride, params.head_dim));
    product(dp, of_rows(params.dout, params.dout_stride, params.head_dim_v),
            of_keys(params.v, params.v_stride, params.head_dim_v));

    auto S = sm80::rows_and_columns(scores);
    auto dP = sm80::rows_and_columns(dp);
    int const first_row = row0 + row_in_tile;
    CUTE_UNROLL
    for (int e = 0; e < cute::size(S); ++e) S(e) *= ScoreMod::query_scale(params);
    ScoreMod(params, batch, head)
        .template apply<(sizeof(Element) == 2)>(S, visibility.offset(first_row, first_key + column),
                                                [](int i, int j) { return sm80::row_of(i) - sm80::key_of(j); });
    PairMod const pairs(params, sequence, batch, head);
    change_in_memory(S, [&](float (&x)[kQuadColumns], int i, int j) {
      pairs.apply(x, params, visibility, first_row + sm80::row_of(i), first_key + column + sm80::key_of(j),
                  key_of_quad);
    });
    if (has_dropout(params)) {
      change_in_memory(dP, [&](float (&x)[kQuadColumns], int i, int j) {
        pairs.drop_in_quad(x, first_row + sm80::row_of(i), first_key + sm80::key_of(j), lane);
      });
    }
    mask(S, visibility.counted_from(first_key + column), first_row, sm80::row_of, sm80::key_of);
    RowStatistics const* const statistics =
        params.row_statistics + StatisticsRows(params).first(params, sequence, batch, head);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = first_row + sm80::row_of(i);
      RowStatistics const of = seeing.contains(row) ? statistics[row] : RowStatistics{INFINITY, 0.f};
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(S); ++j) {
        bool const hidden = S(i, j) == -INFINITY || first_key + column + sm80::key_of(j) < 0;  // or left padding
        float const p = hidden || !seeing.contains(row) ? 0.f : exp2_approx(S(i, j) - of.lse_log2);
        if (p > 0.f) dB(i, j) = fmaf(p, fmaf(dP(i, j), params.dropout.scale, -of.delta), dB(i, j));
      }
    }
  }

  auto const store = [&](int row, int key, float value) {
    if (key >= params.n_kv) return;
    int64_t const at = bias_batch * params.dbias_batch + bias_head * params.dbias_head + row * params.dbias_row + key;
    if (tiles.parts > 1) {
      tiles.partial[blockIdx.y * tiles.elements + at] = value;
    } else {
      store_bias(params, at, value);
    }
  };
  if (params.dbias_row) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = row_tile * kBiasTile + row_in_tile + sm80::row_of(i);
      if (row >= params.n_q) continue;
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(dB); ++j) store(row, key0 + column + sm80::key_of(j), dB(i, j));
    }
    return;
  }
  CUTE_UNROLL
  for (int j = 0; j < cute::size<1>(dB); ++j) {
    float const sum = warp_sum<8, 4>(dB(0, j) + dB(1, j));
    if (lane < 4) sums[warp][column + sm80::key_of(j)] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kBiasTile) return;
  float sum = 0.f;
  CUTE_UNROLL
  for (int w = 0; w < kBiasThreads / 32; ++w) sum += sums[w][threadIdx.x];
  store(0, key0 + threadIdx.x, sum);
}

/// The sum of the parts, an element a thread.
inline __global__ void __launch_bounds__(kBiasThreads)
    bias_parts_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ BiasTiles const tiles) {
  int64_t const at = int64_t(blockIdx.x) * kBiasThreads + threadIdx.x;
  if (at >= tiles.elements) return;
  float sum = 0.f;
  for (int part = 0; part < tiles.parts; ++part) sum += tiles.partial[part * tiles.elements + at];
  store_bias(params, at, sum);
}

}  // namespace cutlass_ext

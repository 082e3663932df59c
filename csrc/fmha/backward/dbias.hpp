// dBias: the sum of dS over the sequences, heads and rows that share an element, always in the same
// order. A CTA owns a tile of it and goes through those that share it, with two products for each; where there
// are few tiles several CTAs take parts, which a second launch adds up. Launched by kernels/dbias.cu.
#pragma once

#include "../copy/cp_async.hpp"
#include "../cute_tensor.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../sm80/warp.hpp"
#include "../softmax.hpp"
#include "bias_tiles.hpp"

namespace cutlass_ext {

constexpr int kBiasTile = 64, kBiasThreads = 128;  // rows and keys of a tile

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

template <class Element>
__global__ void __launch_bounds__(kBiasThreads)
    bias_gradient_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ BiasTiles const tiles) {
  using Product = PanelProduct<Element>;
  using Scores = typename Product::Scores;
  __shared__ __align__(128) Element panels[4][kBiasTile * Product::kColumns];  // of Q, K, dO, V
  __shared__ float sums[kBiasThreads / 32][kBiasTile];
  BiasTile const tile = tiles.tile(blockIdx.x, 0);
  int const key0 = tile.key0;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_in_tile = warp * 16 + lane / 4, column = lane % 4 * 2;

  struct Turn : BiasTurn {
    Sequence sequence;
    int first_key;
  };
  auto const turn_of = [&](int turn) {
    BiasTurn const of = tiles.turn(tile, turn);
    Sequence const sequence = sequence_of(params, of.batch);
    return Turn{of, sequence, key0 - sequence.leftpad};
  };
  Range const turns = tiles.turns_of(blockIdx.y, params.dbias_parts);
  // The first turn from `turn` on of which some row sees some key.
  auto const next_from = [&](int turn) {
    for (; turn < turns.end; ++turn) {
      Turn const here = turn_of(turn);
      Visibility const& visibility = here.sequence.visibility;
      if (visibility.keys_of_row(here.row0).begin < here.first_key + kBiasTile &&
          visibility.keys_of_row(visibility.last_row(here.row0, kBiasTile)).end > max(here.first_key, 0))
        break;
    }
    return turn;
  };
  // Starts the copies of a turn's columns from `col` on.
  auto const load = [&](int turn, int col) {
    Turn const here = turn_of(turn);
    Visibility const& visibility = here.sequence.visibility;
    auto const copy = [&](void const* data, Strides const& stride, int head, int row, int rows, int cols, int to) {
      GlobalTile<Element> tile = global_tile<Element>(data, stride, here.sequence.batch, head, row, rows, cols - col);
      tile.data += col;
      copy_tile<kBiasTile, Product::kColumns, kBiasThreads>(tile, panels[to], [](int row) { return row; });
    };
    int const row = here.sequence.q_row0 + here.row0, rows = visibility.n_q - here.row0;
    int const key = here.sequence.k_row0 + here.first_key, keys = visibility.len_kv - here.first_key;
    int const head_kv = params.heads_per_kv.div(here.head);
    copy(params.q, params.q_stride, here.head, row, rows, params.head_dim, 0);
    copy(params.k, params.k_stride, head_kv, key, keys, params.head_dim, 1);
    copy(params.dout, params.dout_stride, here.head, row, rows, params.head_dim_v, 2);
    copy(params.v, params.v_stride, head_kv, key, keys, params.head_dim_v, 3);
    cute::cp_async_fence();
  };

  Scores gradient = {};
  auto dB = sm80::rows_and_columns(gradient);
  int const cols = max(params.head_dim, params.head_dim_v);
  int turn = next_from(turns.begin);
  if (turn < turns.end) load(turn, 0);
  CUTE_NO_UNROLL
  for (int next = turn; turn < turns.end; turn = next) {
    Turn const here = turn_of(turn);
    Sequence const& sequence = here.sequence;
    Visibility const& visibility = sequence.visibility;
    int const first_row = here.row0 + row_in_tile, first_key = here.first_key, head = here.head, batch = here.batch;
    // Rows that see no key hold anything; those that see some are next to each other.
    Range const seeing = visibility.rows_with_keys();
    PairMod pairs(params, sequence, batch, head);
    static_assert(kBiasTile == 64, "a word has the bits of a thread's pairs");
    uint32_t kept = ~0u;  // drawn while there are no scores
    if (has_dropout(params)) kept = pairs.kept_of_rows(threshold_of(params), first_row - lane / 4, first_key, lane);
    Scores scores = {}, dp = {};
    auto S = sm80::rows_and_columns(scores);
    auto dP = sm80::rows_and_columns(dp);
    if (!ScoreMod::changes(params)) {  // products are added to the bias, whose loads are then out of their way
      load_bias(S, 1.f / ScoreMod::gradient_scale(params), pairs, params, visibility, first_row, first_key + column,
                sm80::row_of, sm80::key_of);
      pairs = pairs.without_bias();
    }
    CUTE_NO_UNROLL
    for (int col = 0; col < cols; col += Product::kColumns) {
      cute::cp_async_wait<0>();
      __syncthreads();
      Product::add(scores, panels[0], panels[1]);
      Product::add(dp, panels[2], panels[3]);
      __syncthreads();  // the panels have been read
      if (col + Product::kColumns < cols) {
        load(turn, col + Product::kColumns);
      } else {
        next = next_from(turn + 1);
        if (next < turns.end) load(next, 0);
      }
    }

    CUTE_UNROLL
    for (int e = 0; e < cute::size(S); ++e) S(e) *= ScoreMod::query_scale(params);
    ScoreMod(params, batch, head)
        .template apply<(sizeof(Element) == 2)>(S, visibility.offset(first_row, first_key + column),
                                                [](int i, int j) { return sm80::row_of(i) - sm80::key_of(j); });
    if (pairs.changes_scores()) {
      change_by_columns<false>(S, [&](float (&x)[kQuadColumns], int i, int j) {
        pairs.apply(x, params, visibility, first_row + sm80::row_of(i), first_key + column + sm80::key_of(j),
                    key_of_quad);
      });
    }
    if (has_dropout(params)) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(dP); ++j) {
          if (!(kept & 1u << PairMod::bit_of_rows(j / 2, j % 2, i))) dP(i, j) = 0.f;
        }
      }
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
    store_bias(params, tiles, tile, blockIdx.y, row, key, value);
  };
  if (params.dbias_row) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = tile.row0 + row_in_tile + sm80::row_of(i);
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
    bias_parts_kernel(__grid_constant__ BackwardParams const params, int64_t elements) {
  int64_t const at = int64_t(blockIdx.x) * kBiasThreads + threadIdx.x;
  if (at >= elements) return;
  float sum = 0.f;
  for (int part = 0; part < params.dbias_parts; ++part) sum += params.dbias_sums[part * elements + at];
  write_bias(params, at, sum);
}

}  // namespace cutlass_ext

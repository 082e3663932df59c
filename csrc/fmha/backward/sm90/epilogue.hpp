// The sums of a consumer warpgroup to memory, once it has gone through all tiles. Used by consumer.hpp.
#pragma once

#include "../../cute_tensor.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../../softmax.hpp"
#include "../params.hpp"
#include "dq_gemm.hpp"
#include "parts.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// dQ of a head from shared memory, once all of its keys have been gone through: of the tiles that the warpgroup adds
/// to.
template <class Traits>
CUTE_DEVICE void store_held_sums(BackwardParams const& params, DqAccumulator<Traits> const& due,
                                 GradientTile<Traits> const& tile) {
  int const tiles = due.tiles_of_rows;
  Tensor cQ = due.sums.accumulator();
  CUTE_NO_UNROLL
  for (int held = due.row_block; held < tile.heads * tiles; held += Traits::Consumers) {
    float4* const from = due.sums.at(held);
    CUTE_UNROLL
    for (int e = 0; e < size(cQ); e += 4) {
      float4 const x = from[e * 8];
      cQ(e) = x.x, cQ(e + 1) = x.y, cQ(e + 2) = x.z, cQ(e + 3) = x.w;
    }
    __syncwarp();  // all have read what is written over
    int const head = held / tiles;
    store_queries(params, tile, tile.head_q + head, held - head * tiles, 0, cQ,
                  reinterpret_cast<typename Traits::Element*>(from - threadIdx.x % 32));
  }
}

/// `A`: dK or dQ of a tile in hand whose operands were in parts, `V`: dV, as far as `What` has them. `mine`: of rows in
/// hand that are query rows, and `row_sum` the thread's share of what their P, in parts, sum to.
template <class Traits, Accumulates What, class SumsA, class SumsV>
CUTE_DEVICE void store_in_parts(BackwardParams const& params, GradientTile<Traits> const& tile, SumsA const& A,
                                SumsV const& V, GradientScales const& scales, RowStatistics const (&mine)[2],
                                float const (&row_sum)[2]) {
  GradientThread const thread;
  int const lane = thread.lane, warp_row = thread.warp_row % Traits::Held;
  float factors[2];
  auto const factor_of = [&](float scale) {
    int const row = tile.work.row0 + warp_row + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      factors[i] = factor_of_sums<Traits::Step>(scale, tile.view.keys_of_row(row + row_of(i)).size());
  };
  auto const store = [&](void* data, Strides const& stride, auto const& sums, int cols, int head) {
    float* const to = static_cast<float*>(data) + tile.sequence.batch * stride.batch + head * stride.head +
                      (int64_t(tile.held_row0) + tile.work.row0 + warp_row) * stride.row;
    store_floats(to, stride.row, tile.rows() - warp_row, cols, sums, factors, lane);
  };
  float const scale = ScoreMod::gradient_scale(params);
  if constexpr (sums_p(What)) {
    factor_of(scales.dv);
    store(params.dv, params.dv_stride, V, params.head_dim_v, tile.head_kv);
  }
  if constexpr (sums_ds(What) && Traits::OfKeys) {
    factor_of(scale * scales.dk);
    store(params.dk, params.dk_stride, A, params.head_dim, tile.head_kv);
  }
  if constexpr (!Traits::OfKeys) {
    factor_of(scale * scales.dq);
    RowStatistics* const rows = params.row_statistics +
                                StatisticsRows(params).first(params, tile.sequence, tile.work.batch, tile.head_q) +
                                tile.work.row0 + warp_row + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const sum = sum_of_weights(params, warp_sum<4, 1>(row_sum[i]), tile.head_q, mine[i].lse_log2);
      factors[i] *= reciprocal(sum);
      if (lane % 4 == 0 && lane / 4 + row_of(i) < tile.rows() - warp_row)
        rows[row_of(i)].lse_log2 = mine[i].lse_log2 + log2f(sum);
    }
    store(params.dq, params.dq_stride, A, params.head_dim, tile.head_q);
  }
}

/// The accumulators `cA` of dK or dQ and `cV` of dV of a tile in hand, as far as `What` has them, through `staging`:
/// 16 rows of a panel that are the warp's own.
template <class Traits, Accumulates What, class SumsA, class SumsV>
CUTE_DEVICE void store_results(BackwardParams const& params, GradientTile<Traits> const& tile, SumsA& cA, SumsV& cV,
                               typename Traits::Element* staging) {
  using Element = typename Traits::Element;
  GradientThread const thread;
  int const lane = thread.lane, warp_row = thread.warp_row % Traits::Held;
  int const head = Traits::OfKeys ? tile.head_kv : tile.head_q;
  auto const store = [&](void* data, Strides const& stride, auto const& sums, int cols, auto head_dim) {
    int64_t const row = tile.held_row0 + tile.work.row0 + warp_row + lane / 8;
    auto* const to =
        static_cast<Element*>(data) + tile.sequence.batch * stride.batch + head * stride.head + row * stride.row;
    store_rows<Stored<Traits, decltype(head_dim)::value>>(
        to, [&](int pass) { return pass * 4 * stride.row; }, tile.rows() - warp_row, cols, sums, staging, lane);
  };
  // What a split has is added up, in their order, by the launch that follows (../postprocess.hpp): accumulators as they
  // are.
  [[maybe_unused]] auto const leave = [&](auto const& sums, int64_t from, auto head_dim) {
    constexpr int kColumns = decltype(head_dim)::value;
    int const first = warp_row / kAtomRows * kAtomRows;
    if (first >= tile.rows()) return;
    auto* const to = reinterpret_cast<float4*>(params.shared_tiles.sums + from + (tile.split_row0 + first) * kColumns);
    CUTE_UNROLL
    for (int e = 0; e < size(sums); e += 4) {
      constexpr int kOfAPanel = kPanel / 2;  // of a thread
      to[SumsOfTile::first(kColumns, e / kOfAPanel, warp_row % kAtomRows / 16) + e % kOfAPanel * 8 + lane] =
          make_float4(sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
    }
  };
  Tensor A = rows_and_columns(cA);
  Tensor V = rows_and_columns(cV);
  bool const is_split = Traits::Splits && tile.split_row0 >= 0;
  if constexpr (sums_p(What)) {
    if constexpr (Traits::Pairs) {
      CUTE_UNROLL
      for (int e = 0; e < size(V); ++e) V(e) *= params.dropout.scale;
    }
    if (is_split) {
      leave(cV, Traits::split_sums(params).size(Traits::HeadDim), Int<Traits::HeadDimV>{});
    } else {
      store(params.dv, params.dv_stride, V, params.head_dim_v, Int<Traits::HeadDimV>{});
    }
  }
  if constexpr (sums_ds(What)) {
    CUTE_UNROLL
    for (int e = 0; e < size(A); ++e) A(e) *= factor_of_gradients(params);
    Strides const& stride = Traits::OfKeys ? params.dk_stride : params.dq_stride;
    if (is_split) {
      leave(cA, 0, Int<Traits::HeadDim>{});
    } else {
      store(Traits::OfKeys ? params.dk : params.dq, stride, A, params.head_dim, Int<Traits::HeadDim>{});
    }
  }
}

}  // namespace cutlass_ext::sm90

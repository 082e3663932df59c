// The backward pass on CUDA cores, exact fp32: dK and dV of a tile of keys, or dQ of a tile of query rows. One loop for
// both: a CTA owns the rows of two tensors and walks over the rows of the two others that they see.
// Instantiated by csrc/kernels/simt_f32_backward_*.cu; launched through host/backward.cpp.
#pragma once

#include <cute/tensor.hpp>

#include "../features.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../simt/products.hpp"
#include "../softmax.hpp"
#include "params.hpp"
#include "simt_traits.hpp"

namespace cutlass_ext::simt {

/// `x`, read from shared memory each time.
template <class T>
CUTE_DEVICE T const& reread(T const& x) {
  unsigned address = cast_smem_ptr_to_uint(&x);
  asm volatile("" : "+r"(address));
  return *static_cast<T const*>(__cvta_shared_to_generic(address));
}

/// Columns of a piece of `piece_cols` that begins at `col0`; none where the tensor has ended.
CUTE_DEVICE int cols_of_piece(int cols, int col0, int piece_cols) {
  return cols - col0 < piece_cols ? cols - col0 : piece_cols;
}

/// What store_p has put, changed where it lies: element (i, j) of the lane's becomes `changed(i, j, element)`.
template <class Traits, class Changed>
CUTE_DEVICE void change_p(float* sP, LanePlace place, Changed const& changed) {
  float* rows = sP + rows_offset<Traits::B_c>(place, place.col, 0);
  CUTE_UNROLL
  for (int h = 0; h < Traits::Halves; ++h) {
    CUTE_UNROLL
    for (int j = 0; j < Traits::Keys; ++j) {
      float* const at = rows + (h * Traits::PanelsApart * Traits::B_c + j / kVector * kPanel + j % kVector) * kPanel;
      int const i = h * kVector;
      float4 const p = load_vector(at);
      *reinterpret_cast<float4*>(at) =
          make_float4(changed(i, j, p.x), changed(i + 1, j, p.y), changed(i + 2, j, p.z), changed(i + 3, j, p.w));
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::MinCtas)
    backward_kernel(__grid_constant__ BackwardParams const params) {
  using Products = typename Traits::Products;
  constexpr bool OfKeys = Traits::OfKeys;
  constexpr int Own = Traits::Own, Walked = Traits::Walked, PieceCols = Traits::PieceCols, Pieces = Traits::Pieces,
                Rows = Traits::Rows, Keys = Traits::Keys, OutCols = Traits::OutCols, Stages = Traits::Stages;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

  if (params.is_skipped()) return;
  {
    WorkItem const work = params.scheduler(blockIdx.x);
    Sequence sequence = sequence_of(params, work.batch);
    Visibility& visibility = sequence.visibility;
    int const own_length = OfKeys ? visibility.len_kv : visibility.n_q;
    if (work.row0 >= own_length) return;  // packed: the launch counts the tiles of the longest sequence for each
    // Query rows that see no key count nowhere, whatever bits they hold: they are not walked over.
    Range const rows = OfKeys ? visibility.rows_with_keys() : Range{0, visibility.n_q};
    visibility = visibility.of_rows(rows);
    if (threadIdx.x == 0) {
      shared.task = {
          work,
          sequence,
          rows.begin,
          own_length,
          OfKeys ? visibility.row_tiles_of(work.row0, Own, Walked) : visibility.tiles_of(work.row0, Own, Walked),
          OfKeys ? visibility.unmasked_row_tiles_of(work.row0, Own, Walked)
                 : visibility.unmasked_tiles_of(work.row0, Own, Walked),
          ScoreMod::query_scale(params),
          ScoreMod::changes(params) || has_pairs(params),
          ScoreMod::caps(params),
          has_dropout(params)};
    }
    __syncthreads();
  }

  // Worked out where it is wanted, as what lies in `task` is read there.
  struct Lane {
    int thread = opaque(threadIdx.x);
    LanePlace place{thread % (Traits::RowWarps * 32)};
    int part = Traits::ColWarps == 1 ? 0 : thread / (Traits::RowWarps * 32);
    int own = place.panel * kPanel + place.row_chunk * kVector;    // first row of the lane, in the CTA's tile
    int walked = part * Traits::WarpWalked + place.col * kVector;  // and in a tile that is walked over
  };
  // Own and walked rows of the lane, counted from its first.
  auto own_of = [](int i) { return (i / kVector) * Traits::PanelsApart * kPanel + i % kVector; };
  auto walked_of = [](int j) { return (j / kVector) * kPanel + j % kVector; };
  // Their p - j, counted from that of the first.
  auto offset_of = [&](int i, int j) { return OfKeys ? walked_of(j) - own_of(i) : own_of(i) - walked_of(j); };

  // S and dP are the products of Q and K (0) and of dO and V (1).
  auto cols = [&](int x) { return x == 0 ? params.head_dim : params.head_dim_v; };
  auto pieces = [&](int x) { return (cols(x) + PieceCols - 1) / PieceCols; };
  // Rows `first` and on of the query's or the key's side of a product, columns `col0` and on.
  auto tile_of = [&](bool of_keys, int x, Task const& task, int head, int first, int length, int col0) {
    void const* const data = of_keys ? x == 0 ? params.k : params.v : x == 0 ? params.q : params.dout;
    Strides const& stride = of_keys  ? x == 0 ? params.k_stride : params.v_stride
                            : x == 0 ? params.q_stride
                                     : params.dout_stride;
    int64_t const row0 = of_keys ? task.sequence.k_row0 : task.sequence.q_row0 + task.first_row;
    GlobalTile<float> tile =
        global_tile<float>(data, stride, task.sequence.batch, head, row0 + first, length - first, cols(x) - col0);
    tile.data += col0;
    return tile;
  };
  auto statistics_row = [&](Task const& task, int head, int row0) {
    return StatisticsRows(params).first(params, task.sequence, task.work.batch, head) + task.first_row + row0;
  };
  // Of rows of q and dout, those that see no key by what pairs have are left out.
  auto sifted = [&](GlobalTile<float> const& tile, Task const& task, int head, int row0) {
    int64_t const bit = statistics_row(task, head, row0);  // the word's place and what is left: fewer registers
    auto const* const words = Traits::Pairs && params.empty_rows ? params.empty_rows + bit / 32 : nullptr;
    return SiftedTile<float>{tile, words, bit & 31};
  };
  auto copy_statistics = [&](Task const& task, int head, int row0) {
    RowStatistics const* const from = params.row_statistics + statistics_row(task, head, row0);
    for (int row = threadIdx.x; row < Traits::B_r; row += Traits::Threads) {
      bool const exists = row0 + row < task.sequence.visibility.n_q;
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from[row].lse_log2, shared.lse[row], exists);
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from[row].delta, shared.delta[row], exists);
    }
  };

  // Heads of the rows that are walked over: the query heads of the KV head, or the KV head of the query head.
  int const heads = OfKeys ? params.heads_per_kv.divisor : 1;
  // Items of the ring, for each head and tile: the pieces of Q (or K) for S, those of dO (or V), those of Q once more.
  // The statistics of walked rows come with a tile's first piece, when those of the tile before have been used.
  auto load_item = [&](int head, int tile, int step, float* slot) {
    Task const& task = reread(shared.task);
    if (step == 2 * pieces(0) + pieces(1)) {
      step = 0;
      if (++tile == task.tiles.end) tile = task.tiles.begin, ++head;
    }
    if (head < heads) {
      bool const second = step >= pieces(0) && step < pieces(0) + pieces(1);
      int const piece = step < pieces(0) ? step : step - (second ? pieces(0) : pieces(0) + pieces(1));
      int const first = tile * Walked, query_head = OfKeys ? task.work.head * heads + head : task.work.head;
      auto const src =
          tile_of(!OfKeys, second, task, OfKeys ? query_head : params.heads_per_kv.div(query_head), first,
                  OfKeys ? task.sequence.visibility.n_q : task.sequence.visibility.len_kv, piece * PieceCols);
      auto const moved = [](int row) { return row / 4; };
      if constexpr (OfKeys) {
        copy_tile<Walked, PieceCols, Traits::Threads>(sifted(src, task, query_head, first), slot, moved);
      } else {
        copy_tile<Walked, PieceCols, Traits::Threads>(src, slot, moved);
      }
      if (OfKeys && step == 0) copy_statistics(task, query_head, first);
    }
    cp_async_fence();
  };
  int slot = 0;
  // Waits for an item; frees the slot of the item before it and starts the copy that goes there.
  auto next_item = [&](int head, int tile, int step) -> float const* {
    if constexpr (Stages == 1) {
      __syncthreads();
      load_item(head, tile, step, shared.ring[0]);
      cp_async_wait<0>();
      __syncthreads();
      return shared.ring[0];
    } else {
      cp_async_wait<0>();
      __syncthreads();
      int const arrived = slot;
      slot ^= 1;
      load_item(head, tile, step + 1, shared.ring[slot]);
      return shared.ring[arrived];
    }
  };

  Tensor dX = make_tensor<float>(Shape<Int<Rows>, Int<OutCols>, Int<Pieces>>{});  // dK or dQ
  Tensor dV = make_tensor_like(dX);                                               // of keys alone
  Tensor S = make_tensor<float>(Shape<Int<Rows>, Int<Keys>>{});
  // What dS is dP - delta times, of each score, where that is not P: under softcap and dropout. In local memory,
  // registers are for sums; until P is known, the score's derivative.
  float weight[Rows * Keys];
  float row_sum[Rows] = {};  // of P, where its rows are owned
  clear(dX);
  clear(dV);

  if (shared.task.tiles.size() > 0) {
    Task const& task = reread(shared.task);
    if (!OfKeys) copy_statistics(task, task.work.head, task.work.row0);
    if (Stages > 1) load_item(0, task.tiles.begin, 0, shared.ring[0]);
    CUTE_UNROLL
    for (int x = 0; x < 2; ++x) {
      auto const copy = [&](auto const& tile) {
        tile.aligned ? copy_q<Products, true>(tile, shared.own[x], 1.f)
                     : copy_q<Products, false>(tile, shared.own[x], 1.f);
      };
      auto const own = tile_of(OfKeys, x, task, task.work.head, task.work.row0, task.own_length, 0);
      if constexpr (OfKeys) {
        copy(own);
      } else {
        copy(sifted(own, task, task.work.head, task.work.row0));
      }
    }
  }

  // S (or dP) += the product of a piece of its columns; dX (or dV) += dS (or P) times a piece of its columns.
  auto gemm_scores = [&](int x, int piece, float const* item) {
    Lane const lane;
    add_qk<Products>(S, shared.own[x] + piece * PieceCols * kPanel, item + lane.part * Traits::WarpWalked * kPanel,
                     lane.place, cols_of_piece(cols(x), piece * PieceCols, PieceCols));
  };
  auto gemm_gradients = [&](auto& A, int piece, float const* item) {
    Lane const lane;
    Tensor of_piece = A(_, _, piece);
    gemm_pv<Products>(
        of_piece, [](int) { return 1.f; }, shared.p,
        item + lane.part * (Traits::WarpPieceCols / kPanel) * Walked * kPanel, lane.place);
  };
  auto own_p = [&](Lane const& lane) { return shared.p + lane.part * Traits::WarpWalked * kPanel; };
  // lse or delta of each of the lane's query rows.
  constexpr int LaneRows = OfKeys ? Keys : Rows;
  auto load_statistics = [&](float (&x)[LaneRows], float const* statistics, Lane const& lane) {
    CUTE_UNROLL
    for (int r = 0; r < LaneRows; r += kVector) {
      float4 const four = load_vector(statistics + (OfKeys ? lane.walked + walked_of(r) : lane.own + own_of(r)));
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) x[r + e] = component(four, e);
    }
  };

  // Where pairs count too, registers are wanted for more than what a call asks for.
  bool const with_mods = ScoreMod::changes(params), with_cap = ScoreMod::caps(params);
  auto const changed = [&] { return Traits::Pairs ? reread(shared.task).changed : with_mods; };
  auto const capped = [&] { return Traits::Pairs ? reread(shared.task).capped : with_cap; };
  auto const drops = [&] { return reread(shared.task).drops; };
  auto put = [&] {
    Lane const lane;
    store_p<Products>(S, own_p(lane), lane.place);
  };
  // Bias and mask of what store_p has put of a tile; or what dropout makes of it, times `scale`.
  auto change_pairs = [&](int head, int tile, bool drops, float scale) {
    Lane const lane;
    Task const& task = reread(shared.task);
    int const batch = task.work.batch, first_own = task.work.row0 + lane.own,
              first_walked = tile * Walked + lane.walked + (OfKeys ? task.first_row : 0);
    Sequence const sequence = sequence_of(params, batch);
    PairMod const pairs(params, sequence, batch, OfKeys ? task.work.head * heads + head : task.work.head);
    change_fours<Products, OfKeys>(own_p(lane), lane.place, [&](float (&x)[kVector], int i, int j) {
      int const own = first_own + own_of(i), walked = first_walked + walked_of(j);
      int const row = OfKeys ? walked : own, key = OfKeys ? own : walked;
      if (drops) {
        pairs.drop(x, threshold_of(params), row, key, scale);
      } else {
        pairs.apply(x, params, sequence.visibility, row, key, [](int e) { return e; });
      }
    });
  };
  // The products in S become P, and go where the warp reads them back. Hidden pairs get exactly 0.
  auto probabilities = [&](int head, int tile) {
    if (changed()) {
      Lane const lane;
      Task const& task = reread(shared.task);
      Visibility const& visibility = task.sequence.visibility;
      int const first_own = task.work.row0 + lane.own, first_walked = tile * Walked + lane.walked;
      ScoreMod const score_mod(params, task.work.batch, OfKeys ? task.work.head * heads + head : task.work.head);
      int const offset =
          OfKeys ? visibility.offset(first_walked, first_own) : visibility.offset(first_own, first_walked);
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= task.scale;
      score_mod.apply(S, offset, offset_of);
      if (capped()) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) weight[opaque(e)] = S(e);
        CUTE_NO_UNROLL
        for (int e = 0; e < size(S); ++e)
          weight[e] = score_mod.derivative(weight[e], offset + offset_of(e % Rows, e / Rows));
      }
    }
    if (Traits::Pairs && changed() && changes_scores(params)) {
      put();
      change_pairs(head, tile, false, 1.f);
      Lane const lane;
      load_p<Products>(S, own_p(lane), lane.place);
    }
    Lane const lane;
    Task const& task = reread(shared.task);
    Visibility const& visibility = task.sequence.visibility;
    int const first_own = task.work.row0 + lane.own, first_walked = tile * Walked + lane.walked;
    if (!task.whole_tiles.contains(tile)) {
      if constexpr (OfKeys) {
        mask_transposed(S, visibility.of_rows({first_walked, visibility.n_q}), first_own, own_of, walked_of);
      } else {
        mask(S, visibility.counted_from(first_walked), first_own, own_of, walked_of);
      }
    }
    float const scale = changed() ? 1.f : task.scale;
    float lse[LaneRows];
    load_statistics(lse, shared.lse, lane);
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Keys; ++j) S(i, j) = exp2_approx(fmaf(S(i, j), scale, -lse[OfKeys ? j : i]));
    }
    if constexpr (!OfKeys) {
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        float sum = S(i, 0);
        CUTE_UNROLL
        for (int j = 1; j < Keys; ++j) sum += S(i, j);
        row_sum[i] += sum;
      }
    }
    store_p<Products>(S, own_p(lane), lane.place);
    if (Traits::Pairs && drops()) {
      bool const with_derivative = capped();
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) {
        int const at = opaque(e);
        weight[at] = with_derivative && S(e) > 0.f ? S(e) * weight[at] : S(e);
      }
    }
    if (Traits::Pairs && OfKeys && drops()) change_pairs(head, tile, true, 1.f);
  };
  // With dP in S, dS takes the place of P, which other lanes have read for dV.
  auto score_gradients = [&](int head, int tile) {
    if constexpr (OfKeys) Traits::ColWarps > 1 ? __syncthreads() : __syncwarp();
    if (Traits::Pairs && drops()) {
      put();
      change_pairs(head, tile, true, params.dropout.scale);
    }
    Lane const lane;
    float delta[LaneRows];
    load_statistics(delta, shared.delta, lane);
    if (Traits::Pairs && drops()) {
      change_p<Products>(own_p(lane), lane.place, [&](int i, int j, float dp) {
        float const of_score = weight[opaque(j * Rows + i)];
        return of_score == 0.f ? 0.f : of_score * (dp - delta[OfKeys ? j : i]);
      });
      return;
    }
    bool const with_derivative = capped();
    change_p<Products>(own_p(lane), lane.place, [&](int i, int j, float p) {
      float const dp = S(i, j) - delta[OfKeys ? j : i];
      float const of_score = with_derivative ? p * weight[opaque(j * Rows + i)] : p;
      return p == 0.f ? 0.f : of_score * dp;  // dP and the derivative of a hidden pair may be anything
    });
  };

  CUTE_NO_UNROLL
  for (int head = 0; head < heads; ++head) {
    CUTE_NO_UNROLL
    for (int tile = shared.task.tiles.begin; tile < reread(shared.task).tiles.end; ++tile) {
      clear(S);
      CUTE_NO_UNROLL
      for (int piece = 0; piece < pieces(0); ++piece) gemm_scores(0, piece, next_item(head, tile, piece));
      probabilities(head, tile);

      clear(S);  // dP from here on
      CUTE_UNROLL
      for (int piece = 0; piece < Pieces; ++piece) {
        if (piece >= pieces(1)) continue;
        float const* const item = next_item(head, tile, pieces(0) + piece);  // its barrier also orders P, as below dS
        if constexpr (OfKeys) gemm_gradients(dV, piece, item);
        gemm_scores(1, piece, item);
      }
      score_gradients(head, tile);

      CUTE_UNROLL
      for (int piece = 0; piece < Pieces; ++piece) {
        if (piece >= pieces(0)) continue;
        gemm_gradients(dX, piece, next_item(head, tile, pieces(0) + pieces(1) + piece));
      }
    }
  }

  // What P lacks to sum to 1: dQ gets it here, dK and dV from the lse that is left for their launch.
  auto finish_rows = [&] {
    Lane const lane;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) row_sum[i] = warp_sum<kLaneCols, kLaneColStride>(row_sum[i]);
    if constexpr (Traits::ColWarps > 1) {  // the other warps of the rows have seen other keys
      __syncthreads();
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        if (lane.place.col == 0) shared.p[lane.part * Own + lane.own + own_of(i)] = row_sum[i];
      }
      __syncthreads();
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        row_sum[i] = 0.f;
        CUTE_UNROLL
        for (int part = 0; part < Traits::ColWarps; ++part) row_sum[i] += shared.p[part * Own + lane.own + own_of(i)];
      }
    }
    Task const& task = reread(shared.task);
    float const sink_log2 = ScoreMod(params, task.work.batch, task.work.head).sink_log2;
    RowStatistics* const rows = params.row_statistics + statistics_row(task, task.work.head, task.work.row0) + lane.own;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      float const lse_log2 = shared.lse[lane.own + own_of(i)];
      float const sum = sum_for_one(row_sum[i], sink_log2, lse_log2), factor = reciprocal(sum);
      // Rows that do not exist have a place, too.
      if (lane.place.col == 0 && lane.part == 0) rows[own_of(i)].lse_log2 = lse_log2 + log2f(sum);
      CUTE_UNROLL
      for (int e = 0; e < OutCols * Pieces; ++e) dX(i, e % OutCols, e / OutCols) *= factor;
    }
  };

  auto store = [&](auto const& A, void* data, Strides const& stride, int cols, float factor) {
    Lane const lane;
    Task const& task = reread(shared.task);
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      int const row = task.work.row0 + lane.own + own_of(i);
      if (row >= task.own_length) continue;
      Range const seen = OfKeys ? task.sequence.visibility.rows_of_key(row) : task.sequence.visibility.keys_of_row(row);
      int64_t const stored_row = int64_t(OfKeys ? task.sequence.k_row0 : task.sequence.q_row0) + row;
      float* const out = static_cast<float*>(data) + task.sequence.batch * stride.batch + stored_row * stride.row +
                         task.work.head * stride.head;
      CUTE_UNROLL
      for (int piece = 0; piece < Pieces; ++piece) {
        CUTE_UNROLL
        for (int j = 0; j < OutCols; j += kVector) {
          int const col =
              piece * PieceCols + lane.part * Traits::WarpPieceCols + j / kVector * kPanel + lane.place.col * kVector;
          auto const value = [&](int e) { return seen.size() > 0 ? A(i, j + e, piece) * factor : 0.f; };
          if (col < cols) *reinterpret_cast<float4*>(out + col) = make_float4(value(0), value(1), value(2), value(3));
        }
      }
    }
  };
  if constexpr (OfKeys) {
    store(dX, params.dk, params.dk_stride, params.head_dim, ScoreMod::gradient_scale(params));
    store(dV, params.dv, params.dv_stride, params.head_dim_v, params.dropout.scale);
  } else {
    if (shared.task.tiles.size() > 0) finish_rows();
    store(dX, params.dq, params.dq_stride, params.head_dim, ScoreMod::gradient_scale(params));
  }
}

/// The kernel of one tile shape: a CTA for each tile of keys, or of query rows.
template <Axis Of, int B_r, int B_c, int HeadDim, class Element, int Threads, class Way>
struct Backward {
  using Traits = BackwardTraits<Of, B_r, B_c, HeadDim, Element, Threads, Way>;
  static constexpr char const* kFamily = "simt";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &backward_kernel<Traits>;
  static constexpr Kind kKind = Traits::OfKeys ? Kind::KeyGradients : Kind::QueryGradients;
  static constexpr Features kTakes = feature::kScoreMods | (Traits::Pairs ? feature::kPairs : 0) | feature::Sink |
                                     feature::Packed | feature::kUnlike | feature::UnalignedRows;
};

}  // namespace cutlass_ext::simt

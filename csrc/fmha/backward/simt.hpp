// The backward pass on CUDA cores, exact fp32: dK and dV of a tile of keys, or dQ of a tile of query rows. One loop for
// both: a CTA owns the rows of two tensors and walks over the rows of the two others that they see. Of long sequences,
// where bits may differ, and where one tile has all keys, tiles of keys also add to dQ (FlashAttention-2,
// arXiv:2307.08691, section 3.1.2): five products for seven. Several CTAs may share a tile, each with a split of what
// is walked over. Instantiated by csrc/kernels/simt_f32_backward_*.cu; launched through host/backward.cpp.
#pragma once

#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../simt/products.hpp"
#include "../softmax.hpp"
#include "add_in_memory.hpp"
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

/// Sum over the lanes of a warp that have the same columns and other rows (LanePlace): bits 0 and 4.
CUTE_DEVICE float sum_of_lane_rows(float x) { return warp_sum<2, 16>(warp_sum<2, 1>(x)); }
CUTE_DEVICE bool is_first_lane_row(int thread) { return (thread & 17) == 0; }

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

/// A CTA's tile. The arrays are the kernel's own variables: one of them is indexed by what is known when it runs, and
/// with it all of an object would lie in local memory.
template <class Traits>
class BackwardTile {
  using Products = typename Traits::Products;
  static constexpr bool OfKeys = Traits::OfKeys, Pairs = Traits::Pairs;
  static constexpr int Own = Traits::Own, Walked = Traits::Walked, PieceCols = Traits::PieceCols,
                       Pieces = Traits::Pieces, Rows = Traits::Rows, Keys = Traits::Keys, OutCols = Traits::OutCols,
                       Stages = Traits::Stages;

 public:
  using Scores = decltype(make_tensor<float>(Shape<Int<Rows>, Int<Keys>>{}));
  using Gradient = decltype(make_tensor<float>(Shape<Int<Rows>, Int<OutCols>, Int<Pieces>>{}));
  using Weights = float[Rows * Keys];
  using RowSums = float[Rows];

  /// `dX`: dK or dQ, `dV` of keys alone. `S`: scores, then P, then dP. `weight`: what dS is dP - delta times, of each
  /// score, where that is not P, under softcap and dropout, in local memory, registers are for sums; until P is known,
  /// the score's derivative. `row_sum`: of P, where its rows are owned.
  CUTE_DEVICE BackwardTile(BackwardParams const& params, typename Traits::SharedStorage& shared, Gradient& dX,
                           Gradient& dV, Scores& S, Weights& weight, RowSums& row_sum)
      : params_(params), shared_(shared), dX_(dX), dV_(dV), S_(S), weight_(weight), row_sum_(row_sum) {}

  /// Finds the tile's work, and leaves it in shared memory; false where there is none.
  CUTE_DEVICE bool begin() const {
    SharedTiles const& shared_tiles = params_.shared_tiles;
    SharedTiles::Item const item = shared_tiles(blockIdx.x);
    WorkItem const work = params_.scheduler(item.index);
    Sequence sequence = sequence_of(params_, work.batch);
    Visibility& visibility = sequence.visibility;
    int const own_length = OfKeys ? visibility.len_kv : visibility.n_q;
    // Packed: the launch counts the tiles of the longest sequence for each.
    if (work.row0 >= own_length) return false;
    // Query rows that see no key count nowhere, whatever bits they hold: they are not walked over.
    Range const rows = OfKeys ? visibility.rows_with_keys() : Range{0, visibility.n_q};
    visibility = visibility.of_rows(rows);
    if (threadIdx.x == 0) {
      // Heads of the rows that are walked over: the query heads of the KV head, or the KV head of the query head.
      int const heads = OfKeys ? params_.heads_per_kv.divisor : 1;
      Range tiles =
          OfKeys ? visibility.row_tiles_of(work.row0, Own, Walked) : visibility.tiles_of(work.row0, Own, Walked);
      bool const is_split = item.split >= 0;
      Range const heads_of_split = is_split ? shared_tiles.turns(item.split, heads, &tiles) : Range{0, heads};
      shared_.task = {work,
                      is_split ? split_sums().first_row(item, false, sequence, work.batch, work.head, work.row0) : -1,
                      sequence,
                      rows.begin,
                      own_length,
                      own_length <= Own,
                      heads_of_split,
                      tiles,
                      OfKeys ? visibility.unmasked_row_tiles_of(work.row0, Own, Walked)
                             : visibility.unmasked_tiles_of(work.row0, Own, Walked),
                      ScoreMod::query_scale(params_),
                      ScoreMod::changes(params_) || has_pairs(params_),
                      ScoreMod::caps(params_),
                      has_dropout(params_)};
    }
    __syncthreads();
    return true;
  }

  CUTE_DEVICE void run() {
    clear(dX_);
    clear(dV_);
    if (shared_.task.tiles.size() > 0) copy_own();
    CUTE_NO_UNROLL
    for (int head = shared_.task.heads.begin; head < task().heads.end; ++head) {
      CUTE_NO_UNROLL
      for (int tile = shared_.task.tiles.begin; tile < task().tiles.end; ++tile) walk_over(head, tile);
    }
    if constexpr (!OfKeys) {
      if (shared_.task.tiles.size() > 0) finish_rows();
    }
    store_gradients();
  }

 private:
  CUTE_DEVICE SplitSums split_sums() const { return {params_, OfKeys ? Axis::Keys : Axis::Rows, Own}; }

  // ---- Where things lie. Worked out where it is wanted, as what lies in `task` is read there.

  struct Lane {
    int thread = opaque(threadIdx.x);
    LanePlace place{thread % (Traits::RowWarps * 32)};
    int part = Traits::ColWarps == 1 ? 0 : thread / (Traits::RowWarps * 32);
    int own = place.panel * kPanel + place.row_chunk * kVector;    // first row of the lane, in the CTA's tile
    int walked = part * Traits::WarpWalked + place.col * kVector;  // and in a tile that is walked over
  };
  // Own and walked rows of the lane, counted from its first.
  CUTE_DEVICE static constexpr int own_of(int i) { return (i / kVector) * Traits::PanelsApart * kPanel + i % kVector; }
  CUTE_DEVICE static constexpr int walked_of(int j) { return (j / kVector) * kPanel + j % kVector; }
  // Their p - j, counted from that of the first.
  CUTE_DEVICE static constexpr int offset_of(int i, int j) {
    return OfKeys ? walked_of(j) - own_of(i) : own_of(i) - walked_of(j);
  }

  CUTE_DEVICE Task const& task() const { return reread(shared_.task); }
  CUTE_DEVICE float* own_p(Lane const& lane) const { return shared_.p + lane.part * Traits::WarpWalked * kPanel; }

  // S and dP are the products of Q and K (0) and of dO and V (1).
  CUTE_DEVICE int cols(int x) const { return x == 0 ? params_.head_dim : params_.head_dim_v; }
  CUTE_DEVICE int pieces(int x) const { return Pieces == 1 ? 1 : (cols(x) + PieceCols - 1) / PieceCols; }
  // Items of a tile are the pieces for S (part 0), then those for dP and dV, then those for dX.
  CUTE_DEVICE int first_item(int part) const {
    return (part > 0 ? pieces(0) : 0) + (part > 1 ? pieces(1) : 0) + (part > 2 ? pieces(0) : 0);
  }
  CUTE_DEVICE int query_head(Task const& task, int head) const {
    return OfKeys ? task.work.head * params_.heads_per_kv.divisor + head : task.work.head;
  }

  /// Rows `first` and on of the query's or the key's side of a product, columns `col0` and on.
  CUTE_DEVICE GlobalTile<float> tile_of(bool of_keys, int x, Task const& task, int head, int first, int length,
                                        int col0) const {
    void const* const data = of_keys ? x == 0 ? params_.k : params_.v : x == 0 ? params_.q : params_.dout;
    Strides const& stride = of_keys  ? x == 0 ? params_.k_stride : params_.v_stride
                            : x == 0 ? params_.q_stride
                                     : params_.dout_stride;
    int64_t const row0 = of_keys ? task.sequence.k_row0 : task.sequence.q_row0 + task.first_row;
    GlobalTile<float> tile =
        global_tile<float>(data, stride, task.sequence.batch, head, row0 + first, length - first, cols(x) - col0);
    tile.data += col0;
    return tile;
  }
  CUTE_DEVICE int64_t statistics_row(Task const& task, int head, int row0) const {
    return StatisticsRows(params_).first(params_, task.sequence, task.work.batch, head) + task.first_row + row0;
  }
  /// Of rows of q and dout, those that see no key by what pairs have are left out.
  CUTE_DEVICE SiftedTile<float> sifted(GlobalTile<float> const& tile, Task const& task, int head, int row0) const {
    int64_t const bit = statistics_row(task, head, row0);  // the word's place and what is left: fewer registers
    auto const* const words = Pairs && params_.empty_rows ? params_.empty_rows + bit / 32 : nullptr;
    return {tile, words, bit & 31};
  }

  // ---- Copies.

  CUTE_DEVICE void copy_statistics(Task const& task, int head, int row0) const {
    RowStatistics* const from = params_.row_statistics + statistics_row(task, head, row0);
    for (int row = threadIdx.x; row < Traits::B_r; row += Traits::Threads) {
      bool const exists = row0 + row < task.sequence.visibility.n_q;
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from[row].lse_log2, shared_.lse[row], exists);
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(from[row].delta, shared_.delta[row], exists);
    }
  }

  CUTE_DEVICE void copy_own() {
    Task const& task = this->task();
    if (!OfKeys) copy_statistics(task, task.work.head, task.work.row0);
    if (Stages > 1) load_item(task.heads.begin, task.tiles.begin, 0, shared_.ring[0]);
    CUTE_UNROLL
    for (int x = 0; x < 2; ++x) {
      auto const copy = [&](auto const& tile) {
        tile.aligned ? copy_q<Products, true>(tile, shared_.own[x], 1.f)
                     : copy_q<Products, false>(tile, shared_.own[x], 1.f);
      };
      auto const own = tile_of(OfKeys, x, task, task.work.head, task.work.row0, task.own_length, 0);
      if constexpr (OfKeys) {
        copy(own);
      } else {
        copy(sifted(own, task, task.work.head, task.work.row0));
      }
    }
  }

  /// Items of the ring, for each head and tile: the pieces of Q (or K) for S, those of dO (or V), those of Q once more.
  /// The statistics of walked rows come with a tile's first piece, when those of the tile before have been used.
  CUTE_DEVICE void load_item(int head, int tile, int item, float* slot) const {
    Task const& task = this->task();
    if (item == first_item(3)) {
      item = 0;
      if (++tile == task.tiles.end) tile = task.tiles.begin, ++head;
    }
    if (head < task.heads.end) {
      int const part = (item >= first_item(1)) + (item >= first_item(2)), piece = item - first_item(part);
      bool const second = part == 1;
      int const first = tile * Walked, of_head = query_head(task, head);
      auto const src =
          tile_of(!OfKeys, second, task, OfKeys ? of_head : params_.heads_per_kv.div(of_head), first,
                  OfKeys ? task.sequence.visibility.n_q : task.sequence.visibility.len_kv, piece * PieceCols);
      auto const moved = [](int row) { return row / 4; };
      if constexpr (OfKeys) {
        copy_tile<Walked, PieceCols, Traits::Threads>(sifted(src, task, of_head, first), slot, moved);
      } else {
        copy_tile<Walked, PieceCols, Traits::Threads>(src, slot, moved);
      }
      if (OfKeys && item == 0) copy_statistics(task, of_head, first);
    }
    cp_async_fence();
  }

  /// Waits for an item; frees the slot of the item before it and starts the copy that goes there.
  CUTE_DEVICE float const* next_item(int head, int tile, int item) {
    if constexpr (Stages == 1) {
      __syncthreads();
      load_item(head, tile, item, shared_.ring[0]);
      cp_async_wait<0>();
      __syncthreads();
      return shared_.ring[0];
    } else {
      cp_async_wait<0>();
      __syncthreads();
      int const arrived = slot_;
      slot_ ^= 1;
      load_item(head, tile, item + 1, shared_.ring[slot_]);
      return shared_.ring[arrived];
    }
  }

  // ---- A tile that is walked over.

  CUTE_DEVICE void walk_over(int head, int tile) {
    // Pieces in loops, so that what is done with them stands once, but where sums in registers tell them apart: a
    // turn's instructions are to stay in the cache of 128 KB. With 164 KB a kernel that adds to dQ took 25.0 ms
    // for 19.9 with 130.
    auto const for_pieces = [&](int part, auto const& work) {
      CUTE_NO_UNROLL
      for (int piece = 0; piece < pieces(part == 1); ++piece)
        work(piece, next_item(head, tile, first_item(part) + piece));  // its barrier also orders P, and dS
    };
    clear(S_);
    for_pieces(0, [&](int piece, float const* item) { gemm_scores(0, piece, item); });
    probabilities(head, tile);
    clear(S_);  // dP from here on
    for_pieces(1, [&](int piece, float const* item) {
      if constexpr (OfKeys) gemm_gradients(dV_, piece, item);
      gemm_scores(1, piece, item);
    });
    score_gradients(head, tile);
    for_pieces(2, [&](int piece, float const* item) { gemm_gradients(dX_, piece, item); });
    if constexpr (Traits::AddsDq) add_dq(head, tile);
  }

  /// S (or dP) += the product of a piece of its columns.
  CUTE_DEVICE void gemm_scores(int x, int piece, float const* item) {
    Lane const lane;
    add_qk<Products>(S_, shared_.own[x] + piece * PieceCols * kPanel, item + lane.part * Traits::WarpWalked * kPanel,
                     lane.place, cols_of_piece(cols(x), piece * PieceCols, PieceCols));
  }
  /// dX (or dV) += dS (or P) times a piece of its columns.
  CUTE_DEVICE void gemm_gradients(Gradient& gradient, int piece, float const* item) {
    Lane const lane;
    CUTE_UNROLL
    for (int p = 0; p < Pieces; ++p) {  // registers have no index
      if (p != piece) continue;
      Tensor of_piece = gradient(_, _, p);
      gemm_pv<Products>(
          of_piece, [](int) { return 1.f; }, shared_.p,
          item + lane.part * (Traits::WarpPieceCols / kPanel) * Walked * kPanel, lane.place);
    }
  }

  /// lse or delta of each of the lane's query rows.
  static constexpr int LaneRows = OfKeys ? Keys : Rows;
  CUTE_DEVICE static void load_statistics(float (&x)[LaneRows], float const* statistics, Lane const& lane) {
    CUTE_UNROLL
    for (int r = 0; r < LaneRows; r += kVector) {
      float4 const four = load_vector(statistics + (OfKeys ? lane.walked + walked_of(r) : lane.own + own_of(r)));
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) x[r + e] = component(four, e);
    }
  }

  // Where pairs count too, registers are wanted for more than what a call asks for.
  CUTE_DEVICE bool changed() const { return Pairs ? task().changed : ScoreMod::changes(params_); }
  CUTE_DEVICE bool capped() const { return Pairs ? task().capped : ScoreMod::caps(params_); }
  CUTE_DEVICE bool drops() const { return Pairs && task().drops; }

  CUTE_DEVICE void put() const {
    Lane const lane;
    store_p<Products>(S_, own_p(lane), lane.place);
  }
  /// Bias and mask of what store_p has put of a tile; or what dropout makes of it, times `scale`.
  CUTE_DEVICE void change_pairs(int head, int tile, bool drops, float scale) const {
    Lane const lane;
    Task const& task = this->task();
    int const batch = task.work.batch, first_own = task.work.row0 + lane.own,
              first_walked = tile * Walked + lane.walked + (OfKeys ? task.first_row : 0);
    Sequence const sequence = sequence_of(params_, batch);
    PairMod const pairs(params_, sequence, batch, query_head(task, head));
    change_fours<Products, OfKeys>(own_p(lane), lane.place, [&](float (&x)[kVector], int i, int j) {
      int const own = first_own + own_of(i), walked = first_walked + walked_of(j);
      int const row = OfKeys ? walked : own, key = OfKeys ? own : walked;
      if (drops) {
        pairs.drop(x, params_.dropout.threshold, row, key, scale);
      } else {
        pairs.apply(x, params_, sequence.visibility, row, key, [](int e) { return e; });
      }
    });
  }

  /// What softcap, ALiBi, a bias and a mask make of the products in S, which the scale is then part of.
  CUTE_DEVICE void change_scores(int head, int tile) {
    {
      Lane const lane;
      Task const& task = this->task();
      Visibility const& visibility = task.sequence.visibility;
      int const first_own = task.work.row0 + lane.own, first_walked = tile * Walked + lane.walked;
      ScoreMod const score_mod(params_, task.work.batch, query_head(task, head));
      int const offset =
          OfKeys ? visibility.offset(first_walked, first_own) : visibility.offset(first_own, first_walked);
      CUTE_UNROLL
      for (int e = 0; e < size(S_); ++e) S_(e) *= task.scale;
      score_mod.apply(S_, offset, offset_of);
      if (capped()) {
        CUTE_UNROLL
        for (int e = 0; e < size(S_); ++e) weight_[opaque(e)] = S_(e);
        CUTE_NO_UNROLL
        for (int e = 0; e < size(S_); ++e)
          weight_[e] = score_mod.derivative(weight_[e], offset + offset_of(e % Rows, e / Rows));
      }
    }
    if (Pairs && changes_scores(params_)) {
      put();
      change_pairs(head, tile, false, 1.f);
      Lane const lane;
      load_p<Products>(S_, own_p(lane), lane.place);
    }
  }

  /// The products in S become P, and go where the warp reads them back. Hidden pairs get exactly 0.
  CUTE_DEVICE void probabilities(int head, int tile) {
    if (changed()) change_scores(head, tile);
    Lane const lane;
    Task const& task = this->task();
    Visibility const& visibility = task.sequence.visibility;
    int const first_own = task.work.row0 + lane.own, first_walked = tile * Walked + lane.walked;
    if (!task.whole_tiles.contains(tile)) {
      if constexpr (OfKeys) {
        mask_transposed(S_, visibility.of_rows({first_walked, visibility.n_q}), first_own, own_of, walked_of);
      } else {
        mask(S_, visibility.counted_from(first_walked), first_own, own_of, walked_of);
      }
    }
    float const scale = changed() ? 1.f : task.scale;
    float lse[LaneRows];
    load_statistics(lse, shared_.lse, lane);
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Keys; ++j) S_(i, j) = exp2_approx(fmaf(S_(i, j), scale, -lse[OfKeys ? j : i]));
    }
    if constexpr (!OfKeys) {
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        float sum = S_(i, 0);
        CUTE_UNROLL
        for (int j = 1; j < Keys; ++j) sum += S_(i, j);
        row_sum_[i] += sum;
      }
    }
    if constexpr (Traits::AddsDq) {
      if (task.is_only_tile) normalize(head);
    }
    store_p<Products>(S_, own_p(lane), lane.place);
    if (drops()) {
      bool const with_derivative = capped();
      CUTE_UNROLL
      for (int e = 0; e < size(S_); ++e) {
        int const at = opaque(e);
        weight_[at] = with_derivative && S_(e) > 0.f ? S_(e) * weight_[at] : S_(e);
      }
    }
    if (OfKeys && drops()) change_pairs(head, tile, true, 1.f);
  }

  /// Takes out of P what it lacks to sum to 1, where the tile has all keys of its rows; its warps have a part of them
  /// each.
  CUTE_DEVICE void normalize(int head) {
    Lane const lane;
    float* const sums = shared_.p + lane.walked;  // dS of the tile before has been read
    float sum[Keys];
    CUTE_UNROLL
    for (int j = 0; j < Keys; ++j) {
      sum[j] = S_(0, j);
      CUTE_UNROLL
      for (int i = 1; i < Rows; ++i) sum[j] += S_(i, j);
      sum[j] = sum_of_lane_rows(sum[j]);
      if (is_first_lane_row(lane.thread)) sums[lane.thread / 32 * Walked + walked_of(j)] = sum[j];
    }
    __syncthreads();
    float const sink_log2 = ScoreMod(params_, task().work.batch, query_head(task(), head)).sink_log2;
    CUTE_UNROLL
    for (int j = 0; j < Keys; ++j) {
      sum[j] = 0.f;
      CUTE_UNROLL
      for (int warp = 0; warp < Traits::RowWarps; ++warp) sum[j] += sums[warp * Walked + walked_of(j)];
      float const factor = reciprocal(sum_for_one(sum[j], sink_log2, shared_.lse[lane.walked + walked_of(j)]));
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) S_(i, j) *= factor;
    }
    __syncthreads();
  }

  /// With dP in S, dS takes the place of P, which other lanes have read for dV.
  CUTE_DEVICE void score_gradients(int head, int tile) {
    if constexpr (OfKeys) Traits::ColWarps > 1 ? __syncthreads() : __syncwarp();
    if (drops()) {
      put();
      change_pairs(head, tile, true, params_.dropout.scale);
    }
    Lane const lane;
    float delta[LaneRows];
    load_statistics(delta, shared_.delta, lane);
    if (drops()) {
      change_p<Products>(own_p(lane), lane.place, [&](int i, int j, float dp) {
        float const of_score = weight_[opaque(j * Rows + i)];
        return of_score == 0.f ? 0.f : of_score * (dp - delta[OfKeys ? j : i]);
      });
      return;
    }
    bool const with_derivative = capped();
    change_p<Products>(own_p(lane), lane.place, [&](int i, int j, float p) {
      float const dp = S_(i, j) - delta[OfKeys ? j : i];
      float const of_score = with_derivative ? p * weight_[opaque(j * Rows + i)] : p;
      return p == 0.f ? 0.f : of_score * dp;  // dP and the derivative of a hidden pair may be anything
    });
  }

  /// Adds the tile's part of dQ, dS^T K, to memory, of some rows of a lane at a time. dS of all warps is there since
  /// the last item came, and stays until the next does.
  CUTE_DEVICE void add_dq(int head, int tile) const {
    CUTE_NO_UNROLL  // a turn's instructions are to stay in the cache of 128 KB
        for (int first = 0; first < Traits::DqRows; first += kVector * Traits::DqFours)
            add_rows_of_dq(head, tile, first);
  }

  CUTE_DEVICE void add_rows_of_dq(int head, int tile, int first) const {
    constexpr int kTurn = 4;  // chunks of own rows that are unrolled
    constexpr int Fours = Traits::DqFours, kFourRows = kVector * kLaneRows;
    // The next chunk's are loaded ahead: with few sums a load is waited for longer than it is worked on.
    constexpr bool LoadsAhead = Fours == 1;
    Lane const lane;
    int const warp = lane.thread / 32, col = warp % Traits::DqColWarps * kPanel + dq_col(lane.thread),
              row = (warp / Traits::DqColWarps * Traits::DqRows + first) * kLaneRows + dq_row(lane.thread);
    float4 ds[1 + LoadsAhead][kVector], own[1 + LoadsAhead][kVector];
    auto const load = [&](float4(&to)[kVector], float const* from) {
      CUTE_UNROLL
      for (int x = 0; x < kVector; ++x) to[x] = load_vector(from + x * kPanel);
    };
    auto const load_own = [&](int chunk, int buffer) {
      load(own[buffer], shared_.own[0] + own_chunk_offset<Traits::HeadDim>(chunk, col));
    };
    auto const load_ds = [&](int chunk, int four, int buffer) {
      load(ds[buffer], shared_.p + own_chunk_offset<Walked>(chunk, row + four * kFourRows));
    };
    float sums[Fours * kVector][kVector] = {};
    if constexpr (LoadsAhead) load_ds(0, 0, 0), load_own(0, 0);
    CUTE_NO_UNROLL
    for (int turn = 0; turn < Own / kVector; turn += kTurn) {
      CUTE_UNROLL
      for (int c = 0; c < kTurn; ++c) {
        int const buffer = LoadsAhead ? c % 2 : 0, next = c < kTurn - 1 ? turn + c + 1 : turn + kTurn;
        if constexpr (!LoadsAhead) {
          load_own(turn + c, 0);
        } else if (c < kTurn - 1 || next < Own / kVector) {
          load_ds(next, 0, 1 - buffer), load_own(next, 1 - buffer);
        }
        CUTE_UNROLL
        for (int four = 0; four < Fours; ++four) {
          if constexpr (!LoadsAhead) load_ds(turn + c, four, 0);
          CUTE_UNROLL
          for (int e = 0; e < kVector; ++e) {
            CUTE_UNROLL
            for (int j = 0; j < kVector; ++j) {
              CUTE_UNROLL
              for (int step = 0; step < kVector; ++step) {
                int const i = j % 2 == 0 ? step : kVector - 1 - step;
                float& sum = sums[four * kVector + j][i];
                sum = fmaf(component(ds[buffer][j], e), component(own[buffer][i], e), sum);
              }
            }
          }
        }
      }
    }
    Task const& task = this->task();
    int64_t const row0 = int64_t(task.sequence.q_row0) + task.first_row + tile * Walked + row;
    int const rows = task.sequence.visibility.n_q - (tile * Walked + row);
    // Where the lane adds once it has transposed: every eighth column.
    int const first_col = col / kPanel * kPanel + (lane.thread >> 3 & 1) * kVector + (lane.thread >> 1 & 3);
    float* const to =
        row_at<float>(params_.dq, params_.dq_stride, task.sequence.batch, row0, query_head(task, head)) + first_col;
    CUTE_UNROLL
    for (int j = 0; j < Fours * kVector; ++j) {
      transpose(sums[j], lane.thread);
      int const of_lane = j / kVector * kFourRows + j % kVector;
      if (of_lane >= rows) continue;
      CUTE_UNROLL
      for (int k = 0; k < kVector; ++k) {
        if (first_col + 8 * k < params_.head_dim)
          add_in_memory(to + of_lane * params_.dq_stride.row + 8 * k, sums[j][k] * ScoreMod::gradient_scale(params_));
      }
    }
  }

  /// Of four lanes that differ in bits 1 and 2, each with four numbers: number k of lane i becomes number i of lane k.
  CUTE_DEVICE static void transpose(float (&x)[kVector], int thread) {
    CUTE_UNROLL
    for (int bit = 1; bit < kVector; bit *= 2) {
      bool const is_set = thread & 2 * bit;
      CUTE_UNROLL
      for (int k = 0; k < kVector; ++k) {
        if (k & bit) continue;
        float const other = __shfl_xor_sync(0xffffffffu, is_set ? x[k] : x[k | bit], 2 * bit);
        (is_set ? x[k] : x[k | bit]) = other;
      }
    }
  }

  // ---- The end.

  /// What P lacks to sum to 1: dQ gets it here, dK and dV from the lse that is left for their launch. Of a split's part
  /// of the keys the sums are left for the launch that adds up splits (postprocess.hpp).
  CUTE_DEVICE void finish_rows() {
    Lane const lane;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) row_sum_[i] = warp_sum<kLaneCols, kLaneColStride>(row_sum_[i]);
    if constexpr (Traits::ColWarps > 1) {  // the other warps of the rows have seen other keys
      __syncthreads();
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        if (lane.place.col == 0) shared_.p[lane.part * Own + lane.own + own_of(i)] = row_sum_[i];
      }
      __syncthreads();
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        row_sum_[i] = 0.f;
        CUTE_UNROLL
        for (int part = 0; part < Traits::ColWarps; ++part) row_sum_[i] += shared_.p[part * Own + lane.own + own_of(i)];
      }
    }
    Task const& task = this->task();
    if (task.is_split()) return;
    float const sink_log2 = ScoreMod(params_, task.work.batch, task.work.head).sink_log2;
    RowStatistics* const rows =
        params_.row_statistics + statistics_row(task, task.work.head, task.work.row0) + lane.own;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      float const lse_log2 = shared_.lse[lane.own + own_of(i)];
      float const sum = sum_for_one(row_sum_[i], sink_log2, lse_log2), factor = reciprocal(sum);
      // Rows that do not exist have a place, too.
      if (lane.place.col == 0 && lane.part == 0) rows[own_of(i)].lse_log2 = lse_log2 + log2f(sum);
      CUTE_UNROLL
      for (int e = 0; e < OutCols * Pieces; ++e) dX_(i, e % OutCols, e / OutCols) *= factor;
    }
  }

  CUTE_DEVICE void store_gradients() const {
    if (task().is_split()) return leave_sums();
    float const scale = ScoreMod::gradient_scale(params_);
    auto const rows_of = [&](void* data, Strides const& stride) {
      Task const& task = this->task();
      int64_t const row0 = (OfKeys ? task.sequence.k_row0 : task.sequence.q_row0) + task.work.row0;
      return row_at<float>(data, stride, task.sequence.batch, row0, task.work.head);
    };
    if constexpr (OfKeys) {
      store(dX_, rows_of(params_.dk, params_.dk_stride), params_.dk_stride.row, params_.head_dim, scale);
      store(dV_, rows_of(params_.dv, params_.dv_stride), params_.dv_stride.row, params_.head_dim_v,
            params_.dropout.scale);
    } else {
      store(dX_, rows_of(params_.dq, params_.dq_stride), params_.dq_stride.row, params_.head_dim, scale);
    }
  }

  /// Of a split, for the launch that adds them up: rows side by side, of the kernel's columns.
  CUTE_DEVICE void leave_sums() const {
    Task const& task = this->task();
    float* const sums = params_.shared_tiles.sums;
    float* const second = sums + split_sums().size(Traits::HeadDim);
    store(dX_, sums + task.split_row0 * Traits::HeadDim, Traits::HeadDim, params_.head_dim, 1.f);
    if constexpr (OfKeys) {
      store(dV_, second + task.split_row0 * Traits::HeadDimV, Traits::HeadDimV, params_.head_dim_v, 1.f);
    } else {
      Lane const lane;
      float* const of_rows = second + task.split_row0 + lane.own;
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        if (lane.place.col == 0 && lane.part == 0) of_rows[own_of(i)] = row_sum_[i];
      }
    }
  }

  /// The tile's own rows of a gradient, times `factor`: its first row lies at `to`.
  CUTE_DEVICE void store(Gradient const& gradient, float* to, int64_t row_stride, int cols, float factor) const {
    Lane const lane;
    Task const& task = this->task();
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      int const row = lane.own + own_of(i), of_sequence = task.work.row0 + row;
      if (of_sequence >= task.own_length) continue;
      Visibility const& visibility = task.sequence.visibility;
      bool const sees = (OfKeys ? visibility.rows_of_key(of_sequence) : visibility.keys_of_row(of_sequence)).size() > 0;
      float* const out = to + row * row_stride;
      CUTE_UNROLL
      for (int piece = 0; piece < Pieces; ++piece) {
        CUTE_UNROLL
        for (int j = 0; j < OutCols; j += kVector) {
          int const col =
              piece * PieceCols + lane.part * Traits::WarpPieceCols + j / kVector * kPanel + lane.place.col * kVector;
          auto const value = [&](int e) { return sees ? gradient(i, j + e, piece) * factor : 0.f; };
          if (col < cols) *reinterpret_cast<float4*>(out + col) = make_float4(value(0), value(1), value(2), value(3));
        }
      }
    }
  }

  BackwardParams const& params_;
  typename Traits::SharedStorage& shared_;
  Gradient &dX_, &dV_;
  Scores& S_;
  Weights& weight_;
  RowSums& row_sum_;
  int slot_ = 0;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::MinCtas)
    backward_kernel(__grid_constant__ BackwardParams const params) {
  using Tile = BackwardTile<Traits>;
  extern __shared__ __align__(128) unsigned char smem[];
  if (params.is_skipped()) return;
  typename Tile::Gradient dX, dV;
  typename Tile::Scores S;
  typename Tile::Weights weight;
  typename Tile::RowSums row_sum = {};
  Tile tile(params, *reinterpret_cast<typename Traits::SharedStorage*>(smem), dX, dV, S, weight, row_sum);
  if (tile.begin()) tile.run();
}

/// The kernel of one tile shape: a CTA for each tile of keys, or of query rows.
template <Kind Kind_, int B_r, int B_c, int HeadDim, class Element, int Threads, class Way>
struct Backward {
  using Traits = BackwardTraits<Kind_, B_r, B_c, HeadDim, Element, Threads, Way>;
  static constexpr char const* kFamily = "simt";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &backward_kernel<Traits>;
  static constexpr Kind kKind = Kind_;
  static constexpr Features kTakes = feature::kScoreMods | (Traits::Pairs ? feature::kPairs : 0) | feature::Sink |
                                     feature::Packed | feature::kUnlike | feature::UnalignedRows;
  static constexpr TileLoop kLoop{false, true};  // splits
};

/// The same of calls whose keys one tile has.
template <Kind Kind_, int B_r, int B_c, int HeadDim, class Element, int Threads, class Way>
struct BackwardOfOneTile : Backward<Kind_, B_r, B_c, HeadDim, Element, Threads, Way> {
  static bool takes_shape(Params const& params) { return params.n_kv <= B_c; }
};

}  // namespace cutlass_ext::simt

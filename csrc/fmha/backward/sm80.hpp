// The backward pass on mma.sync tensor cores: dK and dV of a tile of keys, or dQ of a tile of query rows, by one main
// loop that sees the tile from either side. No two CTAs add to one number: gradients have the same bits in every run.
// Where bits may differ, tiles of keys add to sums of dQ besides (FlashAttention-2, arXiv:2307.08691, section 3.1.2):
// five products for seven; at head_dim 128 and more several warps then share keys. Several CTAs may share a tile.
// Instantiated by csrc/kernels/sm80_backward_*.cu.
//
//   X1, X2   what the CTA owns        K, V         Q, dO
//   Y1, Y2   what passes by           Q, dO        K, V
//   S        X1 Y1^T                  (Q K^T)^T    Q K^T
//   dP       X2 Y2^T                  (dO V^T)^T   dO V^T
//   dS       P (dP - delta)           P = exp2(S - lse)
//   dX1     += dS Y1                  dK           dQ
//   dX2     += P Y2                   dV           -
//   sums    += dS^T X1                dQ           -
//
// Of float32 all operands are in two fp16 parts, P and dS among them, and dX1 and dX2 are added up in float32
// registers.
#pragma once

#include "../copy/cp_async.hpp"
#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../sm80/warp.hpp"
#include "../softmax.hpp"
#include "add_in_memory.hpp"
#include "parts.hpp"
#include "sm80_traits.hpp"

namespace cutlass_ext::sm80 {

/// What passes by: a query head (of keys: each that shares their KV head) after the other, the tiles of each from the
/// last to the first, which leaves whole tiles to all copies of a head but the first. With two stages the next tiles of
/// Y1 and Y2 are under way all along. With one, `Early` of them, which only a first product wants, is under way while
/// the other is worked on, and that one during the first product.
template <class Traits, int Early>
class Streams {
  using Element = typename Traits::Part;
  using Shared = typename Traits::SharedStorage;
  static constexpr int Streamed = Traits::Streamed, Columns = Traits::Columns, Threads = Traits::Threads;
  static constexpr int Late = 1 - Early;
  static constexpr bool OfKeys = Traits::OfKeys, Two = Traits::Stages == 2, kAligned = Traits::Parts > 1;
  static constexpr uint32_t TileBytes = Streamed * Columns * sizeof(Element);
  static constexpr auto moved = [](int row) { return row; };

 public:
  CUTE_DEVICE Streams(BackwardParams const& params, Shared& shared) : params_(params), shared_(shared) {}

  /// Whether 16-byte vectors may be copied, as of parts, which are made of them.
  CUTE_DEVICE static bool aligned(BackwardParams const& p) {
    return kAligned || (is_aligned<Element>(data<0>(p), stride<0>(p)) && is_aligned<Element>(data<1>(p), stride<1>(p)));
  }

  /// Starts the first copies.
  CUTE_DEVICE void start(int head) {
    int const last = shared_.tiles.end - 1;
    copy_checked<Early>(head, last, 0);
    if (Two) copy_checked<Late>(head, last, 0);
    aim_before(head, last);
  }

  /// What plain copies are made of, where `tile` has just been copied, or its early part.
  CUTE_DEVICE void aim_before(int head, int tile) {
    early_next_ = part_of_thread(source<Early>(head, tile - 1));
    late_next_ = part_of_thread(source<Late>(head, Two ? tile - 1 : tile));
  }

  /// Until what is under way has landed and every warp is done with what it will be followed by.
  CUTE_DEVICE static void wait() {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }

  /// Zeroes the rows of Y1 and Y2 of `tile`, which have landed, that see no key, by what pairs have or as the first.
  CUTE_DEVICE void zero_empty_rows(int head, int tile) const {
    int const thread = this->thread(), of_head = tile * Streamed + thread;
    if (thread < Streamed && of_head < shared_.view.len_kv) {
      int64_t const row = statistics_row(head, tile) + thread;
      if (of_head < shared_.hidden || (params_.empty_rows && __ldg(params_.empty_rows + row / 32) >> row % 32 & 1)) {
        CUTE_NO_UNROLL
        for (int chunk = 0; chunk < 2 * Columns / kVector; ++chunk) {
          int const in_tile = chunk % (Columns / kVector), panel = in_tile / 8;
          Element* const tile = shared_.y[chunk / (Columns / kVector)][stage()];
          reinterpret_cast<uint4*>(tile + (panel * Streamed + thread) * kPanel)[in_tile % 8] = make_uint4(0, 0, 0, 0);
        }
      }
    }
    __syncthreads();
  }

  /// The stage in use, and its byte offset.
  CUTE_DEVICE uint32_t stage() const { return Two ? stage_ : 0; }
  CUTE_DEVICE uint32_t here() const { return Two ? stage_ * TileBytes : 0; }
  /// 0 and 1 by turns, from tile to tile.
  CUTE_DEVICE uint32_t turn() const { return stage_; }

  /// The copies beside the first product of `tile`, those between it and the next, and the step to the next tile.
  /// `Plain`: the tile is whole, and so is the next, of the same head.
  template <bool Plain>
  CUTE_DEVICE void during_first(int head, int tile) {
    if constexpr (Two) {
      copy_next<Plain>(head, tile);
    } else if constexpr (Plain) {
      copy_plain<Late>(late_next_, head, tile);
    } else {
      copy_checked<Late>(head, tile, 0);
    }
  }
  template <bool Plain>
  CUTE_DEVICE void between(int head, int tile) {
    if constexpr (!Two) {
      wait();
      copy_next<Plain>(head, tile);
    }
  }
  CUTE_DEVICE void next() {
    stage_ ^= 1;
    wait();
  }
  /// With one stage and sharers: until what is under way beside the first product has landed; and the early part of
  /// the next tile, once all warps have multiplied by this one's.
  CUTE_DEVICE void finish_first() {
    if constexpr (!Two) wait();
  }
  template <bool Plain>
  CUTE_DEVICE void release_early(int head, int tile) {
    if constexpr (!Two) {
      __syncthreads();
      copy_next<Plain>(head, tile);
    }
  }

 private:
  template <int Y>
  CUTE_DEVICE static void const* data(BackwardParams const& p) {
    return OfKeys ? (Y == 0 ? p.q : p.dout) : (Y == 0 ? p.k : p.v);
  }
  template <int Y>
  CUTE_DEVICE static Strides const& stride(BackwardParams const& p) {
    return OfKeys ? (Y == 0 ? p.q_stride : p.dout_stride) : (Y == 0 ? p.k_stride : p.v_stride);
  }
  template <int Y>
  CUTE_DEVICE int cols() const {
    return Traits::Parts > 1 ? Columns : Y == 0 ? params_.head_dim : params_.head_dim_v;
  }
  CUTE_DEVICE static int thread() {
    int const x = opaque(threadIdx.x);
    __builtin_assume(0 <= x && x < Threads);  // so that parts of it cost an instruction
    return x;
  }
  CUTE_DEVICE uint32_t stage_to_fill() const { return Two ? stage_ ^ 1 : 0; }

  template <int Y>
  CUTE_DEVICE GlobalTile<Element> source(int head, int tile) const {
    auto source = global_tile<Element>(
        data<Y>(params_), stride<Y>(params_), shared_.sequence.batch, OfKeys ? head : params_.heads_per_kv.div(head),
        int64_t(shared_.streamed_row0) + tile * Streamed, shared_.view.len_kv - tile * Streamed, cols<Y>());
    if constexpr (kAligned) source.aligned = true;
    return source;
  }
  /// Of the tile's first row, where rows pass by.
  CUTE_DEVICE int64_t statistics_row(int head, int tile) const {
    return shared_.statistics_row0 + head * StatisticsRows(params_).of_a_head + tile * Streamed;
  }
  CUTE_DEVICE RowStatistics const* statistics(int head, int tile) const {
    return params_.row_statistics + statistics_row(head, tile) + int(threadIdx.x);
  }

  /// With two stages both of what follows `tile`, with one its early part.
  template <bool Plain>
  CUTE_DEVICE void copy_next(int head, int tile) {
    if constexpr (Plain) {
      copy_plain<Early>(early_next_, head, tile - 1);
      if (Two) copy_plain<Late>(late_next_, head, tile - 1);
    } else {
      if (tile-- == shared_.tiles.begin) {
        if (++head == shared_.heads.end) return;
        tile = shared_.tiles.end - 1;
      }
      copy_checked<Early>(head, tile, stage_to_fill());
      if (Two) copy_checked<Late>(head, tile, stage_to_fill());
      aim_before(head, tile);
    }
  }
  CUTE_DEVICE static Element const* part_of_thread(GlobalTile<Element> const& tile) {
    return tile.row(thread() / 8) + thread() % 8 * kVector;
  }

  /// A whole tile of rows that begin at multiples of 16 bytes.
  template <int Y>
  CUTE_DEVICE void copy_plain(Element const*& from, int head, int tile) {
    int64_t row_stride = stride<Y>(params_).row;
    materialize(row_stride);  // multiples of it would be kept around the main loop
    uint32_t const at = cast_smem_ptr_to_uint(shared_.y) + 2 * chunk_offset<Streamed>(thread() / 8, thread() % 8);
    copy_whole_tile<Streamed, Columns, Threads>(from, row_stride, cols<Y>(),
                                                at + (Y * Traits::Stages + stage_to_fill()) * TileBytes);
    from -= Streamed * row_stride;
    if constexpr (OfKeys && Y == Late) copy_statistics(statistics(opaque(head), tile), true, stage_to_fill());
  }

  template <int Y>
  CUTE_DEVICE void copy_checked(int head, int tile, int stage) const {
    GlobalTile<Element> const from = source<Y>(head, tile);
    copy_tile<Streamed, Columns, Threads>(from, shared_.y[Y][stage], moved, thread());
    if constexpr (OfKeys && Y == Late) copy_statistics(statistics(head, tile), int(threadIdx.x) < from.rows, stage);
  }

  /// Of rows that do not exist zeros: masks hide them.
  CUTE_DEVICE void copy_statistics(RowStatistics const* from, bool exists, int stage) const {
    if (threadIdx.x < Streamed)
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint64_t>::copy(
          *reinterpret_cast<uint64_t const*>(from),
          *reinterpret_cast<uint64_t*>(&shared_.statistics[stage][threadIdx.x]), exists);
  }

  BackwardParams const& params_;
  Shared& shared_;
  uint32_t stage_ = 0;
  Element const *early_next_, *late_next_;  // the thread's part of the tiles to be copied next
};

/// The main loop: dX1 += dS Y1 where `First`, dX2 += P Y2 where `Second`, over all that passes by. A plain tile is one
/// basic block, so that the compiler hides the exponentials behind the products.
template <class Traits, bool First, bool Second>
class GradientLoop {
  using Element = typename Traits::Part;
  static constexpr bool OfKeys = Traits::OfKeys, Two = Traits::Stages == 2, AddsDq = Traits::AddsDq && First;
  static constexpr int Own = Traits::Own, Streamed = Traits::Streamed;
  template <int X, int Columns>
  using Products = typename Traits::template Products<(Traits::Held > X), Columns>;
  using Whole = Products<0, Streamed>;
  static constexpr int RowAtoms = Whole::RowAtoms, Rows = Whole::Rows;
  static constexpr bool kInParts = Traits::Parts > 1;
  // Of a tile that is not plain, at a time: all where they are few registers and nothing spills.
  static constexpr bool kAtOnce = RowAtoms == 1 && (!kInParts || (Traits::Pairs && Traits::OneAfterTheOther));
  static constexpr bool kShares = Traits::Sharers > 1;
  static constexpr int kColumns = kShares ? Traits::WarpStreamed : kAtOnce ? Streamed : kAtom;
  static constexpr uint32_t X2 = sizeof(Traits::SharedStorage::x[0]), Y2 = sizeof(Traits::SharedStorage::y[0]);

 public:
  static constexpr int Early = First ? 1 : 0;
  using Gradient = float[RowAtoms][Whole::OutAtoms][4];
  using Held1 = typename Queries<Whole>::Held;
  using Held2 = typename Queries<Products<1, Streamed>, X2>::Held;

  /// Of parts, what P of the thread's own rows sums up to, times 2^kShiftP, where these are query rows.
  using Sums = float[kInParts && !OfKeys ? Rows : 1];

  /// The arrays are the kernel's own variables, as those of the forward pass are.
  CUTE_DEVICE GradientLoop(BackwardParams const& params, typename Traits::SharedStorage& shared,
                           Streams<Traits, Early>& streams, Held1& held1, Held2& held2, Gradient& dX1, Gradient& dX2,
                           Sums& sums)
      : params_(params),
        shared_(shared),
        streams_(streams),
        place_(),
        own_at_(cast_smem_ptr_to_uint(shared.x) +
                2 * chunk_offset<Own>(place_.warp_row + place_.lane % kAtom, place_.lane / kAtom)),
        columns_at_(
            cast_smem_ptr_to_uint(shared.y) +
            2 * chunk_offset<Streamed>(place_.part * Traits::WarpStreamed + place_.lane % 8 + place_.lane / 16 * 8,
                                       place_.lane / 8 % 2)),
        rows_at_(
            cast_smem_ptr_to_uint(shared.y) +
            2 * chunk_offset<Streamed>(place_.lane % kAtom, place_.part * Whole::PartChunks + place_.lane / kAtom)),
        held1_(held1),
        held2_(held2),
        dX1_(dX1),
        dX2_(dX2),
        sums_(sums) {}

  /// Over the query heads from `head` on; the copies of the own tiles have been started.
  CUTE_DEVICE void run(int head) {
    streams_.start(head);
    streams_.wait();
    Queries<Whole>{held1_, own_at_}.take();
    if (First) Queries<Products<1, Streamed>, X2>{held2_, own_at_}.take();
    while (true) {
      if (has_mask()) prepare_mask();
      int tile = shared_.tiles.end - 1;
      while (tile >= shared_.tiles.begin) {
        if (!shared_.plain.contains(tile) || !seen(tile).all) {
          if constexpr (kShares) {
            shared_step<false>(head, tile--);
          } else {
            checked_step(head, tile--);
          }
        } else {
          do {
            if constexpr (kShares) {
              shared_step<true>(head, tile--);
            } else {
              plain_step(head, tile--);
            }
          } while (Traits::PlainLoop && tile >= shared_.plain.begin);
        }
      }
      bool const more = ++head < shared_.heads.end;
      // All threads are done with the head before. Behind the last one comes the first.
      if (OfKeys && has_pairs() && threadIdx.x == 0)
        shared_.pairs.advance(params_, more ? 1 : 1 - params_.heads_per_kv.divisor);
      if (!more) return add_dq();
      __syncthreads();
    }
  }

 private:
  /// Scores, or dP, of `Columns` streamed rows.
  template <int Columns>
  using Scores = float[RowAtoms][Columns / kAtomN][4];

  /// S = X1 Y1^T, dP = X2 Y2^T of the streamed rows from `columns_at` on.
  template <int Columns, class Meanwhile>
  CUTE_DEVICE void product1(Scores<Columns>& S, uint32_t columns_at, Meanwhile const& meanwhile) {
    using P = Products<0, Columns>;
    gemm_qk<P>(S, Queries<P>{held1_, uint32_t(opaque(own_at_))}, columns_at, meanwhile);
  }
  template <int Columns, class Meanwhile>
  CUTE_DEVICE void product2(Scores<Columns>& dP, uint32_t columns_at, Meanwhile const& meanwhile) {
    using P = Products<1, Columns>;
    Queries<P, X2> const own{held2_, uint32_t(opaque(own_at_))};
    // Of parts a panel after the other: where all terms have one sign dP - delta would err more than on CUDA cores.
    gemm_qk_in_pieces<P, (kInParts ? kPanel : Traits::HeadDim) / kAtom, Y2>(dP, own, columns_at, meanwhile);
  }

  /// Addresses that follow from the lane's are worked out anew for each tile: around the loop they spilled.
  CUTE_DEVICE uint32_t columns_at() const { return opaque(columns_at_) + streams_.here(); }
  CUTE_DEVICE uint32_t rows_at() const { return opaque(rows_at_) + streams_.here(); }

  CUTE_DEVICE void plain_step(int head, int tile) {
    // dQ of the tile before comes behind the products of this one, where nobody waits for it, which is 3% faster than
    // in front of them; but for 8.0, where 36 bytes spilled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr bool DqFirst = true;
#else
    constexpr bool DqFirst = false;
#endif
    if constexpr (DqFirst) add_dq<Traits::PlainLoop>();
    Scores<Streamed> S, dP;
    auto const copies = [&] { streams_.template during_first<true>(head, tile); };
    auto const nothing = [] {};
    uint32_t const columns_at = this->columns_at();
    if constexpr (First && !Two) {  // what comes early is multiplied first
      product2<Streamed>(dP, columns_at, copies);
      streams_.template between<true>(head, tile);
      product1<Streamed>(S, columns_at, nothing);
    } else {
      product1<Streamed>(S, columns_at, copies);
      streams_.template between<true>(head, tile);
      if constexpr (First) product2<Streamed>(dP, columns_at, nothing);
    }
    add_products<true, Streamed>(S, dP, of_parts(ScoreMod::gradient_scale(params_) * kLog2e), 0, rows_at());
    if constexpr (!DqFirst) add_dq<Traits::PlainLoop>();
    if (AddsDq && !Traits::PlainLoop && shared_.own_rows < Own) clear_ds_of_no_keys();
    leave_ds(head, tile);
    streams_.next();
  }

  CUTE_DEVICE void checked_step(int head, int tile) {
    streams_.template during_first<false>(head, tile);
    if (!Two) streams_.wait();
    if (OfKeys && (params_.empty_rows || tile * Streamed < shared_.hidden)) streams_.zero_empty_rows(head, tile);
    add_dq();
    Seen const here = seen(tile);
    if (here.some) has_pairs() ? add_tile<Traits::Pairs>(head, tile, here) : add_tile<false>(head, tile, here);
    if (AddsDq && shared_.own_rows < Own) clear_ds_of_no_keys();
    leave_ds(head, tile);
    streams_.template between<false>(head, tile);
    streams_.next();
  }

  // ---------------------------------------------------------------------------------------------- rows that are shared
  /// A tile of which the warp has the scores of a part of its rows, and the gradients of a part of the columns. P, and
  /// then dS, of all of them come from the warps that share its own rows. dQ of the tile before is made where it was
  /// measured to be fastest: at head_dim 256 behind the products (10.1 ms for 10.4 in front of them), at 128 and 192 in
  /// front (8.6 for 9.0, 10.4 for 10.6).
  template <bool Plain>
  CUTE_DEVICE void shared_step(int head, int tile) {
    constexpr int Columns = Traits::WarpStreamed, Steps = Columns / kAtom;
    constexpr bool DqLast = Two && Traits::HeadDim > 192;
    Scores<Columns> S, dP;
    uint32_t p[Steps][RowAtoms][4], ds[Steps][RowAtoms][4];
    int const column = opaque(place_.part) * Columns;
    auto const copies = [&] { streams_.template during_first<Plain>(head, tile); };
    auto const nothing = [] {};
    if constexpr (!Plain) {
      copies();
      streams_.finish_first();
      if (params_.empty_rows || tile * Streamed < shared_.hidden) streams_.zero_empty_rows(head, tile);
      add_dq();
      product2<Columns>(dP, columns_at(), nothing);
      product1<Columns>(S, columns_at(), nothing);
      float const scale = finish_scores<false>(S, dP, S, head, tile, column, ~0u, ~0u, shared_.unmasked.contains(tile));
      if (shared_.own_rows < Own) hide_keys_that_are_not(S);
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) operands<false>(p[k], ds[k], S, dP, k, scale, column, ~0u);
    } else {
      if constexpr (Two && !DqLast) add_dq<Traits::PlainLoop>();
      product2<Columns>(dP, columns_at(), copies);
      streams_.finish_first();
      if constexpr (!Two) add_dq<Traits::PlainLoop>();
      product1<Columns>(S, columns_at(), nothing);
      float const scale = ScoreMod::gradient_scale(params_) * kLog2e;
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) operands<true>(p[k], ds[k], S, dP, k, scale, column, ~0u);
    }
    add_shared<Y2>(dX2_, p, column);
    streams_.template release_early<Plain>(head, tile);
    meet_sharer<Whole>();  // P has been read
    add_shared<0>(dX1_, ds, column);
    if constexpr (Plain && DqLast) add_dq<Traits::PlainLoop>();
    leave_ds(head, tile);
    streams_.next();
  }

  /// dX += P Y, where P of the warp's part is in registers, from `column` on, and that of its sharers where they leave
  /// it, which is waited for behind the first products.
  template <uint32_t Beyond, int Steps>
  CUTE_DEVICE void add_shared(Gradient& dX, uint32_t const (&own)[Steps][RowAtoms][4], int column) {
    CUTE_UNROLL
    for (int k = 0; k < Steps; ++k) store_ds(own[k], column + k * kAtom);
    int const lane = opaque(place_.lane);
    uint32_t const from = ds_at(cast_smem_ptr_to_uint(shared_.ds) +
                                    2 * chunk_offset<Own>(place_.warp_row + lane % kAtom, lane / kAtom),
                                streams_.turn()),
                   rows_at = this->rows_at();
    CUTE_UNROLL
    for (int part = 0; part < Traits::Sharers; ++part) {
      if (part == 1) meet_sharer<Whole>();
      int const first = (column + part * Traits::WarpStreamed) % Streamed;
      uint32_t const operand_at = chunk_at<Own>(from, 0, first / kVector),
                     rows_of_part = chunk_at<Streamed>(rows_at, first, 0);
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) {
        uint32_t operand[RowAtoms][4];
        CUTE_UNROLL
        for (int a = 0; a < RowAtoms; ++a) {
          if (part > 0) {
            load_matrices(operand[a], chunk_at<Own>(operand_at, a * kAtom, 2 * k));
          } else {
            CUTE_UNROLL
            for (int x = 0; x < 4; ++x) operand[a][x] = own[k][a][x];
          }
        }
        gemm_pv_step<Whole, Beyond>(dX, operand, chunk_at<Streamed>(rows_of_part, k * kAtom, 0));
      }
    }
  }

  /// 0 times what the exponential of keys that do not exist may be is not 0.
  template <class ScoreArray>
  CUTE_DEVICE void hide_keys_that_are_not(ScoreArray& scores) const {
    Tensor S = rows_and_columns(scores);
    int const first = place_.warp_row + opaque(place_.lane) / 4;
    CUTE_UNROLL
    for (int i = 0; i < size<0>(S); ++i) {
      if (first + row_of(i) < shared_.own_rows) continue;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(S); ++j) S(i, j) = -INFINITY;
    }
  }

  // ---------------------------------------------------------------------------------------------------- sums of dQ
  /// Where the dS of every other tile lies, `address` being of the first: tiles of 32 rows side by side in one panel.
  CUTE_DEVICE static uint32_t ds_at(uint32_t address, uint32_t turn) {
    return Streamed < kPanel ? address ^ turn * Streamed * 2 : address + turn * Own * kPanel * 2;
  }

  /// Leaves 16 columns of the warp's dS for all warps, from `column` of the tile on.
  CUTE_DEVICE void store_ds(uint32_t const (&ds)[RowAtoms][4], int column) const {
    if constexpr (AddsDq) {
      int const lane = opaque(place_.lane);
      uint32_t at = ds_at(
          cast_smem_ptr_to_uint(shared_.ds) + 2 * (chunk_offset<Own>(place_.warp_row + lane / 4, 0) + lane % 4 * 2),
          streams_.turn());
      if constexpr (kShares) at = chunk_at<Own>(at, 0, column / kVector), column = 0;
      CUTE_UNROLL
      for (int a = 0; a < RowAtoms; ++a) {
        CUTE_UNROLL
        for (int x = 0; x < 4; ++x)
          store_shared(chunk_at<Own>(at, a * kAtom + x % 2 * 8, column / kVector + x / 2), ds[a][x]);
      }
    }
  }

  /// Makes it 0 of keys that do not exist: 0 times what their exponential may be is not.
  CUTE_DEVICE void clear_ds_of_no_keys() const {
    constexpr int Chunks = Streamed / kVector;
    __syncwarp();  // other lanes have stored some of it
    CUTE_NO_UNROLL
    for (int i = opaque(place_.lane); i < RowAtoms * kAtom * Chunks; i += 32) {
      int const row = place_.warp_row + i / Chunks;
      if (row < shared_.own_rows) continue;
      uint32_t const at = cast_smem_ptr_to_uint(shared_.ds) + 2 * chunk_offset<Own>(row, i % Chunks);
      CUTE_UNROLL
      for (int x = 0; x < 4; ++x) store_shared(ds_at(at, streams_.turn()) + 4 * x, 0);
    }
  }

  /// The dS of `tile`, and where dQ is added to, are there once all threads have come to the next.
  CUTE_DEVICE void leave_ds(int head, int tile) {
    if constexpr (AddsDq) {
      if (threadIdx.x == 0) {
        int64_t const row = shared_.statistics_row0 + head * StatisticsRows(params_).of_a_head + tile * Streamed;
        int const of_sums = row % SumsOfTile::kRows;
        shared_.dq_sums[streams_.turn()] = params_.dq_sums + (row - of_sums) * Traits::HeadDim +
                                           of_sums * SumsOfTile::columns_of_part(Traits::HeadDim);
      }
    }
  }

  /// Adds dS^T X1 of the tile before, if there was one, or where it is known that there was: 32 rows and some columns a
  /// warp.
  template <bool IsThere = false>
  CUTE_DEVICE void add_dq() {
    if constexpr (AddsDq) {
      if (!IsThere && !shared_.dq_sums[streams_.turn() ^ 1]) return;
      constexpr int WarpsOfRows = Streamed / 32, Columns = Traits::HeadDim * WarpsOfRows * 32 / Traits::Threads;
      // (2, 8192) at head_dim 128 takes 8.6 ms with 32 at once and 9.4 with 16, at 256 10.5 and 10.4.
      constexpr int AtOnce = Traits::HeadDim == 128 ? 32 : kAtom;
      static_assert(Columns % AtOnce == 0 && SumsOfTile::kPanel % AtOnce == 0, "columns that lie beside each other");
      int const warp = opaque(threadIdx.x) / 32, sixteen = warp % WarpsOfRows * 2;
      CUTE_NO_UNROLL
      for (int column = 0; column < Columns; column += AtOnce)
        add_dq<AtOnce / kAtomN>(sixteen, warp / WarpsOfRows * Columns + column);
    }
  }

  /// The same of 32 rows, from 16 times `sixteen` on, and of `Atoms` atoms of columns.
  template <int Atoms>
  CUTE_DEVICE void add_dq(int sixteen, int column) {
    constexpr int ColumnsOfPart = SumsOfTile::columns_of_part(Traits::HeadDim);
    int const lane = opaque(place_.lane);
    uint32_t const ds_rows = chunk_at<Own>(ds_at(cast_smem_ptr_to_uint(shared_.ds) +
                                                     2 * chunk_offset<Own>(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                                                 streams_.turn() ^ 1),
                                           0, sixteen * 2),
                   own_tile = cast_smem_ptr_to_uint(shared_.x) + 2 * chunk_offset<Own>(lane % kAtom, lane / kAtom);
    uint32_t const first = chunk_at<Own>(own_tile, 0, column / kVector);
    float dQ[2][Atoms][4];
    clear(dQ);
    CUTE_UNROLL
    for (int k = 0; k < Own; k += kAtom) {
      uint32_t ds[2][4];
      CUTE_UNROLL
      for (int a = 0; a < 2; ++a) load_matrices_transposed(ds[a], chunk_at<Own>(ds_rows, k, 2 * a));
      CUTE_UNROLL
      for (int n = 0; n < Atoms; n += 2) {
        uint32_t own[4];
        load_matrices_transposed(own, chunk_at<Own>(first, k, n));
        multiply<Element>(dQ, n, ds, own);
      }
    }
    float* const sums = *const_cast<float* volatile*>(&shared_.dq_sums[streams_.turn() ^ 1]);
    float* const to = sums + ((column / ColumnsOfPart * 4 + sixteen) * ColumnsOfPart + column % ColumnsOfPart) * kAtom;
    CUTE_UNROLL
    for (int n = 0; n < Atoms; ++n) {
      CUTE_UNROLL
      for (int a = 0; a < 2; ++a) add_in_memory(to + (a * ColumnsOfPart + n * kAtomN) * kAtom, lane, dQ[a][n]);
    }
  }
  // -----------------------------------------------------------------------------------------------------------------

  /// The products of a tile, some columns at a time. `Pairs`: what pairs have costs a call without it nothing.
  template <bool Pairs>
  CUTE_DEVICE void add_tile(int head, int tile, Seen const& here) {
    uint32_t seen = ~0u, kept = ~0u;  // of columns that follow bits are higher up
    if (Pairs && !here.all) seen = seen_of_tile(tile);
    if (Pairs && has_dropout(params_)) kept = kept_of_tile(tile);
    bool const unmasked = shared_.unmasked.contains(tile);
    CUTE_NO_UNROLL
    for (int column = 0; column < Streamed; column += kColumns, seen >>= kAtom, kept >>= kAtom) {
      if (!unmasked && !is_seen((tile * Streamed + column) / kColumns)) {
        CUTE_UNROLL
        for (int k = 0; k < kColumns; k += kAtom) store_ds({}, column + k);
        continue;
      }
      Scores<kColumns> S, dP, added;
      if (Pairs && has_bias(params_)) read_bias(added, tile, column);
      auto const nothing = [] {};
      uint32_t const from = column * kPanel * sizeof(Element);
      product1<kColumns>(S, columns_at() + from, nothing);
      if constexpr (First) product2<kColumns>(dP, columns_at() + from, nothing);
      float const scale = finish_scores<Pairs>(S, dP, added, head, tile, column, seen, kept, unmasked);
      add_products<false, kColumns>(S, dP, scale, column, rows_at() + from, Pairs ? kept : ~0u);
    }
  }

  CUTE_DEVICE bool has_pairs() const { return Traits::Pairs && cutlass_ext::has_pairs(params_); }
  CUTE_DEVICE bool has_mask() const { return Traits::Pairs && cutlass_ext::has_mask(params_); }

  CUTE_DEVICE Seen seen(int tile) const { return shared_.seen.of(has_mask(), tile); }

  /// Which tiles the mask of a query head hides or leaves whole. All threads are done with the head before.
  CUTE_DEVICE void prepare_mask() const {
    shared_.seen.look(shared_.tiles, [&](int tile) {
      int const own = shared_.work.row0, streamed = tile * Streamed,
                row = shared_.first_query + (OfKeys ? streamed : own), key = OfKeys ? own : streamed;
      return shared_.pairs.seen_of(params_, {row, row + (OfKeys ? Streamed : Own)},
                                   {key, key + (OfKeys ? Own : Streamed)});
    });
    __syncthreads();
  }

  /// What scores are multiplied by, and dP, where operands are in parts.
  CUTE_DEVICE float of_parts(float query_scale) const {
    if constexpr (kInParts) query_scale *= (1.f + kCutOffScores) * shared_.scales[0].scores;
    return query_scale;
  }
  CUTE_DEVICE float scale_of_dp() const {
    if constexpr (kInParts) return (1.f + kCutOffScores) * shared_.scales[0].dp;
    return 1.f;
  }

  /// Whether some row of this warp sees some of the `kColumns` rows that pass by as part `part`.
  CUTE_DEVICE bool is_seen(int part) const {
    Visibility const view = shared_.view;
    return view.tiles_of(shared_.work.row0 + place_.warp_row, RowAtoms * kAtom, kColumns).contains(part);
  }

  /// Statistics of what two elements of accumulators lie in: of keys streamed rows of column atom `n`; of rows the own
  /// row `i`, twice.
  struct OfTwo {
    float lse_log2[2], delta[2];
  };
  CUTE_DEVICE OfTwo statistics(int n, int i, int lane) const {
    if constexpr (OfKeys) {
      auto const& x = reinterpret_cast<float4 const&>(shared_.statistics[streams_.stage()][n * kAtomN + lane % 4 * 2]);
      return {{x.x, x.z}, {x.y, x.w}};
    } else {
      auto const& x = reinterpret_cast<float2 const&>(shared_.statistics[0][place_.warp_row + row_of(i) + lane / 4]);
      return {{x.x, x.x}, {x.y, x.y}};
    }
  }

  /// Of a tile the query row and the key of the warp's first pair.
  CUTE_DEVICE int first_row(int tile) const { return shared_.first_query + (OfKeys ? tile * Streamed : own_row()); }
  CUTE_DEVICE int first_key(int tile) const { return OfKeys ? own_row() : tile * Streamed; }
  CUTE_DEVICE int own_row() const { return shared_.work.row0 + opaque(place_.warp_row); }

  /// Which of the thread's pairs of a tile dropout keeps: of element (i, j) bit `bit_of(i, j)`.
  CUTE_DEVICE uint32_t kept_of_tile(int tile) const {
    PairMod const& pairs = shared_.pairs;
    int const lane = opaque(place_.lane), row = first_row(tile), key = first_key(tile);
    if constexpr (OfKeys) return pairs.template kept_of_keys<Streamed>(threshold_of(params_), row, key, lane);
    return pairs.template kept_of_rows<Streamed>(threshold_of(params_), row, key, lane);
  }
  CUTE_DEVICE static constexpr uint32_t bit_of(int i, int j) {
    return 1u << (OfKeys ? PairMod::bit_of_keys(j / 2, j % 2, i) : PairMod::bit_of_rows(j / 2, j % 2, i));
  }

  /// Which of them the mask leaves, likewise.
  CUTE_DEVICE uint32_t seen_of_tile(int tile) const {
    int const lane = opaque(place_.lane), row = first_row(tile), key = first_key(tile);
    auto const word_of = [&](int row) { return shared_.pairs.seen(params_, shared_.sequence.visibility, row, key); };
    uint32_t seen = 0;
    if constexpr (OfKeys) {  // of each row the bits of four keys that are eight apart
      CUTE_UNROLL
      for (int j = 0; j < Streamed / 4; ++j) {
        uint32_t const of_lane = word_of(row + lane % 4 * 2 + key_of(j)) >> lane / 4 & 0x01010101u;
        seen |= (of_lane * 0x01041040u >> 24 & 0x55u) << (j / 2 * 8 + j % 2);
      }
    } else {  // of each row the bits of four pairs of keys
      CUTE_UNROLL
      for (int i = 0; i < 2 * RowAtoms; ++i) {
        uint32_t const of_lane = word_of(row + lane / 4 + row_of(i)) >> lane % 4 * 2 & 0x03030303u;
        uint32_t const twos = (of_lane & 0x00030003u) | (of_lane >> 6 & 0x000c000cu);
        seen |= ((twos & 0x00050005u) | (twos & 0x000a000au) << 7) << (i / 2 * 4 + i % 2);
      }
    }
    return seen;
  }

  /// The bias of some columns, in the log2 domain.
  CUTE_DEVICE void read_bias(Scores<kColumns>& added, int tile, int column) const {
    Tensor B = rows_and_columns(added);
    int const lane = opaque(place_.lane), held = lane / 4, streamed = column + lane % 4 * 2;
    int const row = first_row(tile) + (OfKeys ? streamed : held), key = first_key(tile) + (OfKeys ? held : streamed);
    if constexpr (OfKeys) {
      Tensor of_rows = make_tensor(B.data(), select<1, 0>(B.layout()));
      load_bias<false>(of_rows, kLog2e, shared_.pairs, params_, shared_.sequence.visibility, row, key, key_of, row_of);
    } else {
      load_bias(B, kLog2e, shared_.pairs, params_, shared_.sequence.visibility, row, key, row_of, key_of);
    }
  }

  /// Score modifications with their derivatives, and masks; dP becomes dP - delta, of what dropout keeps. Returns what
  /// is left to multiply scores by.
  template <bool Pairs, class ScoreArray>
  CUTE_DEVICE float finish_scores(ScoreArray& scores, ScoreArray& gradients, ScoreArray& added, int head, int tile,
                                  int column, uint32_t seen, uint32_t kept, bool unmasked) {
    Tensor S = rows_and_columns(scores), dP = rows_and_columns(gradients);
    if constexpr (First) {
      int const lane = opaque(place_.lane);  // what is read here is not kept until P is made
      if (Pairs && has_dropout(params_)) {
        CUTE_UNROLL
        for (int i = 0; i < size<0>(dP); ++i) {
          CUTE_UNROLL
          for (int j = 0; j < size<1>(dP); ++j) dP(i, j) = kept & bit_of(i, j) ? dP(i, j) * params_.dropout.scale : 0.f;
        }
      }
      float const factor = scale_of_dp();
      CUTE_UNROLL
      for (int n = 0; n < size<1>(S) / 2; ++n) {
        CUTE_UNROLL
        for (int a = 0; a < RowAtoms; ++a) {
          CUTE_UNROLL
          for (int x = 0; x < 4; ++x)
            gradients[a][n][x] =
                fmaf(gradients[a][n][x], factor, -statistics(column / kAtomN + n, 2 * a + x / 2, lane).delta[x % 2]);
        }
      }
    }
    float scale = of_parts(ScoreMod::query_scale(params_));
    Visibility const view = shared_.view;
    int const lane = opaque(place_.lane), first_row = own_row() + lane / 4;
    int const first_column = tile * Streamed + column + lane % 4 * 2;
    if (ScoreMod::changes(params_)) {
      ScoreMod const score_mod(params_, shared_.work.batch, head);
      constexpr int Sign = OfKeys ? -1 : 1;  // the view of keys counts positions the other way
      int const first_offset = Sign * view.offset(first_row, first_column);
      auto const offset = [](int i, int j) { return Sign * (row_of(i) - key_of(j)); };
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= scale;
      scale = 1.f;
      // float32 has the hyperbolic tangent that CUDA cores have.
      score_mod.template apply<!kInParts>(S, first_offset, offset);
      if constexpr (First) score_mod.differentiate(dP, S, first_offset, offset);
    }
    if (Pairs && has_bias(params_)) {
      Tensor B = rows_and_columns(added);
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) = fmaf(S(e), scale, B(e));
      scale = 1.f;
    }
    if (Pairs && has_mask()) {
      CUTE_UNROLL
      for (int i = 0; i < size<0>(S); ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(S); ++j) {
          if (!(seen & bit_of(i, j))) S(i, j) = -INFINITY;
        }
      }
    }
    if (!unmasked) mask(S, view.counted_from(first_column).with_finite_windows(), first_row, row_of, key_of);
    return scale;
  }

  /// P and dS of 16 columns as operands. `Plain`: nothing is hidden or dropped, and delta is still to be taken from dP.
  template <bool Plain, class ScoreArray>
  CUTE_DEVICE void operands(uint32_t (&p)[RowAtoms][4], uint32_t (&ds)[RowAtoms][4], ScoreArray const& S,
                            ScoreArray const& dP, int k, float scale, int column, uint32_t kept) const {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const n = 2 * k + half;
      CUTE_UNROLL
      for (int a = 0; a < RowAtoms; ++a) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          OfTwo const of = statistics(column / kAtomN + n, 2 * a + r, place_.lane);
          float p_of[2], ds_of[2] = {};
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float const s = S[a][n][2 * r + c];
            p_of[c] = exp2_approx(fmaf(s, scale, -of.lse_log2[c]));
            if constexpr (First) {
              float const dp = dP[a][n][2 * r + c];
              if (Plain) {
                ds_of[c] = p_of[c] * (dp - of.delta[c]);
              } else {
                ds_of[c] = s == -INFINITY ? 0.f : p_of[c] * dp;  // a row that sees no key may hold anything
              }
            }
          }
          if constexpr (Traits::Pairs && !Plain && Second) {
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              if (!(kept & bit_of(2 * a + r, 2 * n + c))) p_of[c] = 0.f;
            }
          }
          if (Second) put_operand<Element>(p[a], r, 2 * half, p_of[0], p_of[1]);
          if (First) put_operand<Element>(ds[a], r, 2 * half, ds_of[0], ds_of[1]);
        }
      }
    }
  }

  /// dX2 += P Y2, dX1 += dS Y1: operands of 16 streamed rows are made ahead of the 16 that are multiplied.
  template <bool Plain, int Columns>
  CUTE_DEVICE void add_products(Scores<Columns>& S, Scores<Columns> const& dP, float scale, int column,
                                uint32_t rows_at, uint32_t kept = ~0u) {
    if constexpr (kInParts) {
      add_products_of_parts<Plain, Columns>(S, dP, scale, column, rows_at, kept);
    } else {
      constexpr int Steps = Columns / kAtom;
      uint32_t p[Steps][RowAtoms][4], ds[Steps][RowAtoms][4];
      auto const make = [&](int k) {
        operands<Plain>(p[k], ds[k], S, dP, k, scale, column, kept);
        store_ds(ds[k], column + k * kAtom);
      };
      make(0);
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) {
        if (k + 1 < Steps) make(k + 1);
        uint32_t const at = chunk_at<Streamed>(rows_at, k * kAtom, 0);
        if constexpr (Second) gemm_pv_step<Whole, Y2>(dX2_, p[k], at);
        if constexpr (First) gemm_pv_step<Whole>(dX1_, ds[k], at);
      }
    }
  }

  /// The same of operands in parts. Each row of dS has a power of two of its own: gradients of a sequence's rows differ
  /// in size as their weights do, and nothing bounds delta.
  template <bool Plain, int Columns>
  CUTE_DEVICE void add_products_of_parts(Scores<Columns>& S, Scores<Columns> const& dP, float scale, int column,
                                         uint32_t rows_at, uint32_t kept) {
    constexpr int Steps = Columns / kAtom;
    typename Whole::Rows16 operand[Steps];
    auto const rows_of = [&](int k) { return chunk_at<Streamed>(rows_at, k * kAtom, 0); };
    // `x_of(n, i, x)`: the two elements x of column atom n that become the operand's of row i.
    auto const make_operand = [&](auto const& x_of) {
      CUTE_UNROLL
      for (int n = 0; n < 2 * Steps; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < Rows; ++i) {
          float x[2];
          x_of(n, i, x);
          auto& words = operand[n / 2];
          split_operand(x[0], x[1], words[0][i / 2][n % 2 * 2 + i % 2], words[1][i / 2][n % 2 * 2 + i % 2]);
        }
      }
    };
    CUTE_UNROLL
    for (int n = 0; n < 2 * Steps; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        OfTwo const of = statistics(column / kAtomN + n, i, place_.lane);
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& s = S[i / 2][n][i % 2 * 2 + c];
          float const p = exp2_approx(fmaf(s, scale, kShiftP - of.lse_log2[c]));
          if constexpr (!OfKeys) sums_[i] += p;
          // A row that sees no key may hold anything.
          s = Plain || s > -INFINITY ? p : 0.f;
        }
      }
    }
    if constexpr (Second) {
      make_operand([&](int n, int i, float (&x)[2]) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) x[c] = Plain || kept & bit_of(i, 2 * n + c) ? S[i / 2][n][i % 2 * 2 + c] : 0.f;
      });
      gemm_pv_in_parts<Whole, Y2>(dX2_, operand, rows_of, Ones{});
    }
    if constexpr (First) {
      float const of_dp = scale_of_dp();
      float factors[Rows];
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        float largest = 0.f;
        CUTE_UNROLL
        for (int n = 0; n < 2 * Steps; ++n) {
          OfTwo const of = statistics(column / kAtomN + n, i, place_.lane);
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& s = S[i / 2][n][i % 2 * 2 + c];
            float const dp = dP[i / 2][n][i % 2 * 2 + c];
            s = Plain ? s * fmaf(dp, of_dp, -of.delta[c]) : s == 0.f ? 0.f : s * dp;
            largest = fmaxf(largest, fabsf(s));
          }
        }
        RowScale const of_row(warp_max<4, 1>(largest));
        factors[i] = of_row.back;
        CUTE_UNROLL
        for (int n = 0; n < 2 * Steps; ++n)
          S[i / 2][n][i % 2 * 2] *= of_row.to, S[i / 2][n][i % 2 * 2 + 1] *= of_row.to;
      }
      make_operand(
          [&](int n, int i, float (&x)[2]) { x[0] = S[i / 2][n][i % 2 * 2], x[1] = S[i / 2][n][i % 2 * 2 + 1]; });
      gemm_pv_in_parts<Whole>(dX1_, operand, rows_of, factors);
    }
  }

  BackwardParams const& params_;
  typename Traits::SharedStorage& shared_;
  Streams<Traits, Early>& streams_;
  Place<Whole> const place_;
  uint32_t const own_at_;                // where the lane's rows of fragments of X1 begin
  uint32_t const columns_at_, rows_at_;  // and those of Y1, for Y1^T and for Y1
  Held1& held1_;
  Held2& held2_;
  Gradient &dX1_, &dX2_;
  Sums& sums_;
};

/// One side of the backward pass of one work item.
template <class Traits>
class BackwardTile {
  using Element = typename Traits::Part;
  static constexpr bool OfKeys = Traits::OfKeys, kInParts = Traits::Parts > 1;
  static constexpr int Own = Traits::Own, Streamed = Traits::Streamed;
  using Products = typename Traits::template Products<false, Streamed>;
  using Gradient = float[Products::RowAtoms][Products::OutAtoms][4];

 public:
  CUTE_DEVICE BackwardTile(BackwardParams const& params, typename Traits::SharedStorage& shared)
      : params_(params), shared_(shared) {}

  /// Leaves in shared memory what the work item is; false where it has no rows.
  CUTE_DEVICE bool begin() {
    SharedTiles::Item const item =
        Traits::Splits ? params_.shared_tiles(blockIdx.x) : SharedTiles::Item{int(blockIdx.x), -1};
    WorkItem const work = params_.scheduler(item.index);
    Sequence const sequence = sequence_of(params_, work.batch);
    Visibility seen = sequence.visibility;
    // Query rows that see no key count nowhere, whatever they hold: for keys they do not exist, or are hidden.
    Range rows = OfKeys ? seen.rows_with_keys() : Range{0, seen.n_q};
    // Sums of dQ are of whole tiles of their own.
    int const hidden = Traits::AddsDq && rows.size() > 0 ? rows.begin % SumsOfTile::kRows : 0;
    rows.begin -= hidden;
    seen = seen.of_rows(rows);
    Visibility const view = OfKeys ? seen.transposed() : seen;
    if (work.row0 >= view.n_q) return false;  // packed: the launch counts the tiles of the longest sequence for each
    if (threadIdx.x == 0) {
      int const heads = OfKeys ? params_.heads_per_kv.divisor : 1, first_head = work.head * heads;
      shared_.work = work;
      shared_.heads = {first_head, first_head + heads};
      shared_.view = view;
      shared_.own_rows = view.n_q - work.row0;
      shared_.tiles = view.tiles_of(work.row0, Own, Streamed);
      shared_.split_row0 = -1;
      if (Traits::Splits && item.split >= 0) {
        Range const of_split = params_.shared_tiles.turns(item.split, heads, &shared_.tiles);
        shared_.heads = {first_head + of_split.begin, first_head + of_split.end};
        shared_.split_row0 =
            Traits::split_sums(params_).first_row(item, false, sequence, work.batch, work.head, work.row0);
      }
      shared_.unmasked = view.unmasked_tiles_of(work.row0, Own, Streamed);
      // Behind the first tile of a head comes the last one of another, of which rows may be missing. In a loop that
      // adds to dQ there is always a tile before, and all keys exist.
      constexpr bool AddsInLoop = Traits::AddsDq && Traits::PlainLoop;
      shared_.plain = {cute::max(shared_.unmasked.begin, shared_.tiles.begin + 1),
                       cute::min(shared_.unmasked.end, shared_.tiles.end - AddsInLoop)};
      if (AddsInLoop && shared_.own_rows < Own) shared_.plain = {0, 0};
      if (ScoreMod::changes(params_) || !Streams<Traits, 0>::aligned(params_) ||
          (Traits::Pairs && (has_bias(params_) || has_dropout(params_))))
        shared_.plain = {0, 0};
      shared_.sequence = sequence;
      if (Traits::Pairs && has_pairs(params_))
        shared_.pairs = PairMod(params_, sequence, work.batch, shared_.heads.begin);
      shared_.own_row0 = (OfKeys ? sequence.k_row0 : sequence.q_row0) + work.row0;
      shared_.first_query = rows.begin;
      shared_.hidden = hidden;
      shared_.dq_sums[0] = shared_.dq_sums[1] = nullptr;
      shared_.streamed_row0 = OfKeys ? sequence.q_row0 + rows.begin : sequence.k_row0;
      shared_.statistics_row0 = StatisticsRows(params_).first(params_, sequence, work.batch, 0) + rows.begin;
      if constexpr (kInParts) {  // sequences without keys have none
        int const head_kv = OfKeys ? work.head : params_.heads_per_kv.div(work.head);
        shared_.scales[0] = shared_.tiles.size() > 0 ? params_.gradient_scales[work.batch * params_.heads_kv + head_kv]
                                                     : GradientScales{1.f, 1.f, 1.f, 1.f, 1.f};
      }
    }
    __syncthreads();
    return true;
  }

  CUTE_DEVICE void run() {
    if constexpr (Traits::OneAfterTheOther) {
      pass<false, true>();
      __syncthreads();  // V comes where dV has left from
      pass<true, false>();
    } else {
      pass<true, OfKeys>();
    }
  }

 private:
  /// dX1, dX2 or both.
  template <bool First, bool Second>
  CUTE_DEVICE void pass() {
    using Loop = GradientLoop<Traits, First, Second>;
    Gradient dX1 = {}, dX2 = {};
    typename Loop::Sums sums = {};
    if (shared_.tiles.size() > 0) {
      if (Second || !Traits::OneAfterTheOther) copy_own<0>();
      if (First) copy_own<1>();
      if (!OfKeys && threadIdx.x < Own) shared_.statistics[0][threadIdx.x] = own_statistics()[threadIdx.x];
      typename Loop::Held1 held1;
      typename Loop::Held2 held2;
      Streams<Traits, Loop::Early> streams(params_, shared_);
      Loop(params_, shared_, streams, held1, held2, dX1, dX2, sums).run(shared_.heads.begin);
      if (Traits::AddsDq && First) __syncthreads();  // the own tiles have been read by all warps
    }
    if constexpr (kInParts) {
      store_in_parts<First, Second>(dX1, dX2, sums);
    } else {
      if constexpr (Second)
        store(dX2, shared_.x[1], params_.dv, params_.dv_stride, params_.head_dim_v, params_.dropout.scale);
      if constexpr (First) {
        store(dX1, shared_.x[0], OfKeys ? params_.dk : params_.dq, OfKeys ? params_.dk_stride : params_.dq_stride,
              params_.head_dim, ScoreMod::gradient_scale(params_));
      }
    }
  }

  CUTE_DEVICE int own_rows() const { return shared_.view.n_q - shared_.work.row0; }

  /// Where the own rows are query rows; of those that do not exist, too.
  CUTE_DEVICE RowStatistics* own_statistics() const {
    return params_.row_statistics + shared_.statistics_row0 + shared_.work.head * StatisticsRows(params_).of_a_head +
           shared_.work.row0;
  }

  template <int X>
  CUTE_DEVICE void copy_own() const {
    void const* const data = OfKeys ? (X == 0 ? params_.k : params_.v) : (X == 0 ? params_.q : params_.dout);
    Strides const& stride =
        OfKeys ? (X == 0 ? params_.k_stride : params_.v_stride) : (X == 0 ? params_.q_stride : params_.dout_stride);
    auto own =
        global_tile<Element>(data, stride, shared_.sequence.batch, shared_.work.head, shared_.own_row0, own_rows(),
                             kInParts ? Traits::Columns
                             : X == 0 ? params_.head_dim
                                      : params_.head_dim_v);
    if constexpr (kInParts) own.aligned = true;
    auto const moved = [](int row) { return row; };
    if constexpr (OfKeys) {
      copy_tile<Own, Traits::Columns, Traits::Threads>(own, shared_.x[X], moved);
    } else {
      int64_t const first = own_statistics() - params_.row_statistics;
      copy_tile<Own, Traits::Columns, Traits::Threads>(SiftedTile<Element>{own, params_.empty_rows, first},
                                                       shared_.x[X], moved);
    }
  }

  /// Writes a gradient of the own rows. It leaves through the warp's own part of `tile`, which nobody reads any more.
  CUTE_DEVICE void store(Gradient& gradient, Element const* tile, void* to, Strides const& stride, int cols,
                         float scale) const {
    Tensor out = rows_and_columns(gradient);
    CUTE_UNROLL
    for (int e = 0; e < size(out); ++e) out(e) *= scale;
    if constexpr (Traits::Splits) {
      if (shared_.split_row0 >= 0)
        return leave(gradient, OfKeys && tile == shared_.x[1] ? Traits::split_sums(params_).size(Traits::HeadDim) : 0);
    }
    auto const to_of = [&](int row, int chunk) {
      return row_at<Element>(to, stride, shared_.sequence.batch, shared_.own_row0, shared_.work.head) +
             row * stride.row + chunk * kVector;
    };
    Place<Products> const place;
    store_rows<Element, Own, Products::PanelChunks>(
        out, tile, place.lane, place.warp_row, place.part * Products::PartChunks, to_of, stride.row, own_rows(), cols);
  }

  /// Leaves a split's part of a gradient for the launch that adds them up (postprocess.hpp), `from` numbers into their
  /// sums.
  CUTE_DEVICE void leave(Gradient const& gradient, int64_t from) const {
    constexpr int kColumns = Traits::HeadDim, kRows = SumsOfTile::kRows;
    Place<Products> const place;
    CUTE_UNROLL
    for (int a = 0; a < Products::RowAtoms; ++a) {
      int const row = place.warp_row + a * kAtom;
      if (row >= own_rows()) return;
      auto* const to = reinterpret_cast<float4*>(params_.shared_tiles.sums + from +
                                                 (shared_.split_row0 + row / kRows * kRows) * kColumns);
      CUTE_UNROLL
      for (int n = 0; n < Products::OutAtoms; ++n) {
        int const chunk = place.part * Products::PartChunks + Products::chunk_of(n);
        to[SumsOfTile::first(kColumns, chunk / 8, row % kRows / kAtom) + chunk % 8 * 32 + place.lane] =
            *reinterpret_cast<float4 const*>(gradient[a][n]);
      }
    }
  }

  /// Writes what operands in parts have summed up, of float32.
  template <bool First, bool Second, class Sums>
  CUTE_DEVICE void store_in_parts(Gradient& dX1, Gradient& dX2, Sums const& sums) const {
    constexpr int Rows = Products::Rows;
    Place<Products> const place;
    int const lane = place.lane, warp_row = place.warp_row, head = shared_.work.head;
    auto const store = [&](Gradient& gradient, void* to, Strides const& stride, int cols, float scale,
                           auto const& factor_of_row) {
      Tensor out = rows_and_columns(gradient);
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        int const partners = shared_.view.keys_of_row(shared_.work.row0 + warp_row + row_of(i) + lane / 4).size();
        float const factor = factor_of_sums<Streamed>(scale, partners) * factor_of_row(i);
        CUTE_UNROLL
        for (int j = 0; j < size<1>(out); ++j) out(i, j) *= factor;
      }
      auto const to_of = [&](int row) {
        return row_at<float>(to, stride, shared_.sequence.batch, shared_.own_row0, head) + row * stride.row;
      };
      store_floats(out, lane, warp_row, 0, to_of, own_rows(), cols);
    };
    float const scale = ScoreMod::gradient_scale(params_);
    GradientScales const& scales = shared_.scales[0];
    auto const one = [](int) { return 1.f; };
    if constexpr (Second)
      store(dX2, params_.dv, params_.dv_stride, params_.head_dim_v, scales.dv * params_.dropout.scale, one);
    if constexpr (First && OfKeys) store(dX1, params_.dk, params_.dk_stride, params_.head_dim, scales.dk * scale, one);
    if constexpr (!OfKeys) {
      float of_row[Rows];
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        int const row = warp_row + row_of(i) + lane / 4;
        float const lse_log2 = shared_.statistics[0][row].lse_log2,
                    sum = sum_of_weights(params_, warp_sum<4, 1>(sums[i]), head, lse_log2);
        of_row[i] = reciprocal(sum);
        if (lane % 4 == 0 && row < own_rows()) own_statistics()[row].lse_log2 = lse_log2 + log2f(sum);
      }
      store(dX1, params_.dq, params_.dq_stride, params_.head_dim, scales.dq * scale, [&](int i) { return of_row[i]; });
    }
  }

  BackwardParams const& params_;
  typename Traits::SharedStorage& shared_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads) backward_kernel(__grid_constant__ BackwardParams const params) {
  if constexpr (Traits::Parts > 1) {
    if (params.is_skipped()) return;
  }
  extern __shared__ __align__(128) unsigned char smem[];
  BackwardTile<Traits> tile(params, *reinterpret_cast<typename Traits::SharedStorage*>(smem));
  if (tile.begin()) tile.run();
}

/// The kernel of a kind and tile shape, launched for every tile of its side.
template <Kind Kind_, bool Pairs, int B_r, int B_c, int HeadDim, class Element, int Threads, int Stages = 2,
          int Held = 0, int Sharers = 1>
struct Backward {
  using Traits = BackwardTraits<Kind_, B_r, B_c, HeadDim, Element, Threads, Stages, Held, Sharers, Pairs>;
  static constexpr char const* kFamily = "sm80";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &backward_kernel<Traits>;
  static constexpr Kind kKind = Kind_;
  // Sums of dQ become rows of whole vectors.
  static constexpr Features kTakes = feature::kScoreMods | feature::Sink | feature::Packed | feature::kUnlike |
                                     (Pairs ? feature::kPairs : 0) |
                                     (Traits::Parts == 1 && !Traits::AddsDq ? feature::UnalignedRows : 0);
  static constexpr TileLoop kLoop{false, Traits::Splits};
};

}  // namespace cutlass_ext::sm80

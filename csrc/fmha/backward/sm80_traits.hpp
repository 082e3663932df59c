// Tile shapes and shared memory of the backward kernels on mma.sync tensor cores. Used by sm80.hpp.
#pragma once

#include "../sm80/traits.hpp"
#include "params.hpp"

namespace cutlass_ext::sm80 {

/// A CTA owns the tiles X1 and X2 and lets Y1 and Y2 pass by: of keys, K and V past Q and dO; of rows, Q and dO past K
/// and V. Of the own tiles, the first `Held` are operands in registers. Tiles of operands in two parts (operand.hpp)
/// have twice the columns, the high parts first. `Kind`: which gradients are made; of all of them the own tiles are
/// keys, and dS goes through shared memory to those warps that add its part of dQ to sums in memory. `Sharers` warps
/// share own rows: each has the scores of its part of the streamed rows, and its part of the gradients' columns, so
/// that P goes through shared memory, too. Where none do, gradients of keys with more than 128 columns are made one
/// after the other: dK and dV of 16 keys fill the registers of a warp.
template <Kind Kind_, int B_r_, int B_c_, int HeadDim_, class Element_, int Threads_, int Stages_, int Held_,
          int Sharers_, bool Pairs_>
struct BackwardTraits {
  static constexpr int Sharers = Sharers_;
  static constexpr bool Pairs = Pairs_;
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDim_, Threads = Threads_;
  static constexpr int Stages = Stages_, Held = Held_;
  using Element = Element_;
  using Part = typename Operand<Element>::Part;
  static constexpr int Parts = Operand<Element>::Parts, Columns = HeadDim * Parts;  // in shared memory
  static constexpr bool OfKeys = Kind_ != Kind::QueryGradients, AddsDq = Kind_ == Kind::AllGradients;
  static constexpr int Own = OfKeys ? B_c : B_r, Streamed = OfKeys ? B_r : B_c;  // rows of a tile
  static constexpr bool OneAfterTheOther = OfKeys && Columns > 128 && Sharers == 1;
  static constexpr int WarpStreamed = Streamed / Sharers;  // streamed rows of a warp's scores
  // Whether plain tiles have a loop of their own: a mask may hide the next one. With all accumulators of keys, or of
  // float32, it spilled; elsewhere plain calls take 10% less.
  static constexpr bool PlainLoop = !Pairs && (!OfKeys || Sharers > 1 || (Own / (Threads / 32) == kAtom && Parts == 1));

  /// The products as warp.hpp knows them, of `Columns` streamed rows: own rows stand in the place of query rows,
  /// streamed ones in that of keys.
  template <bool InRegisters, int Columns>
  struct Products : Traits<Own, Streamed, HeadDim, Element, Threads, Stages, Sharers> {
    static constexpr bool QueriesInRegisters = InRegisters;
    static constexpr int KeyAtoms = Columns / kAtomN;
  };

  CUTE_DEVICE static SplitSums split_sums(BackwardParams const& params) {
    return {params, OfKeys ? Axis::Keys : Axis::Rows, Own};
  }
  static constexpr bool Splits = Parts == 1 && !Pairs;  // several CTAs may share a tile; with pairs 12 bytes spilled

  static_assert(OfKeys || StatisticsRows::kTile % Own == 0,
                "statistics of rows that do not exist are there to the end of a tile");
  static_assert(Stages == 2 || (Stages == 1 && (!OfKeys || OneAfterTheOther || Sharers > 1)),
                "with one stage, one of the streamed tiles is wanted only once");
  static_assert(Sharers == 1 || (AddsDq && Streamed == kPanel), "P lies where dS does, in whole panels");
  static_assert(B_r <= Threads, "a thread copies the statistics of one row");
  static_assert(Streamed == 32 || !Pairs, "a word has the bits of a thread's pairs");
  static_assert(!AddsDq || (Parts == 1 && !Pairs), "dS has 16 bits, and dropout's scale, which sums of dQ get later");
  static_assert(!AddsDq || SumsOfTile::kRows % Streamed == 0, "a tile has its sums in one of theirs");

  struct SharedStorage {
    alignas(128) Part x[2][Own * Columns];
    alignas(128) Part y[2][Stages][Streamed * Columns];
    // dS of two tiles, own rows of 64 streamed ones: the last one is multiplied while the next one is written.
    alignas(128) Part ds[AddsDq ? 2 * Streamed / kPanel : 0][Own * kPanel];
    alignas(16) RowStatistics statistics[OfKeys ? Stages : 1][B_r];
    // Of the work item, what is wanted now and then: in registers it would spill.
    WorkItem work;
    Range heads;                               // query heads that are gone through
    int64_t split_row0;                        // of the sums of splits, the first of the tile's; -1: it has none
    PairMod pairs;                             // of the query head in work, where it has any
    SeenTiles seen;                            // likewise
    Visibility view;                           // own rows in the place of query rows, streamed ones in that of keys
    Range tiles, unmasked;                     // streamed tiles that some own row sees, and those that all see whole
    Range plain;                               // of these those that but for a mask have nothing more to be looked at
    Sequence sequence;                         // with all of its query rows
    int own_row0;                              // row of X1 and X2 that the first own row is
    int streamed_row0;                         // row of Y1 and Y2 that the first streamed row is
    int first_query;                           // of the sequence's query rows the first that is looked at
    int own_rows;                              // that exist
    int hidden;                                // of these how many come before the first that sees a key
    int64_t statistics_row0;                   // of the first query row of head 0
    float* dq_sums[2];                         // where dQ is added to, of every other tile; null: of none
    GradientScales scales[Parts > 1 ? 1 : 0];  // where operands are in parts
  };
};

}  // namespace cutlass_ext::sm80

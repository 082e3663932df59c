// Tile shapes and shared memory of the backward kernels on CUDA cores, in the words of the forward's products
// (simt/products.hpp): the rows that a CTA owns stand where query rows do, the rows that it walks over where keys do.
// Used by simt.hpp; tests/cpp computes the bank of every shared-memory access from what stands here.
//
// A lane reads 4 / rows + 4 / columns bytes of shared memory for each FFMA: 1 where it has 8 x 8 sums, 1.5 at 8 x 4, 2
// at 4 x 4. From head_dim 64 on dK and dV are 128 sums a thread; what registers are left decides the width of
// everything else.
#pragma once

#include "../features.hpp"
#include "../scheduler.hpp"
#include "../sequence.hpp"
#include "../simt/traits.hpp"

namespace cutlass_ext::simt {

/// How a backward kernel goes about its tile.
/// `PieceCols`: columns of a piece, which is what a slot of the ring holds of the rows that are walked over.
/// `Stages`: slots of the ring; with 1 nothing is copied while anything is multiplied.
/// `ColWarps`: warps that share the same rows, each with its part of the scores' columns and of the gradients'.
template <int PieceCols_, int Stages_ = 2, int ColWarps_ = 1>
struct Walk {
  static constexpr int PieceCols = PieceCols_, Stages = Stages_, ColWarps = ColWarps_;
};

/// What all threads of a CTA know of its work. It lies in shared memory, and is read where it is wanted: registers are
/// for sums.
struct Task {
  WorkItem work;
  int64_t split_row0;  // of the sums of splits, the first of the tile's; -1: no other CTA has a part of it
  Sequence sequence;   // of its visibility rows that see no key are cut off where rows are walked over
  int first_row;       // of the sequence's query rows the first that is left
  int own_length;      // own rows are those of the sequence below this
  bool is_only_tile;   // whether the sequence has no other own rows
  Range heads;         // of those that share the own rows, which the CTA's split goes through
  Range tiles;         // that are walked over for each
  Range whole_tiles;   // those without masks
  float scale;         // ScoreMod::query_scale
  bool changed;        // whether anything changes scores, or P
  bool capped;         // whether softcap does
  bool drops;          // whether dropout does

  CUTE_DEVICE bool is_split() const { return split_row0 >= 0; }
};

// ---- Places in the product dS^T K, by hand as those of ../simt/traits.hpp. A warp has 16 rows at a time, by 32
// columns. A lane has four of each: of the rows those of lanes that share own rows, of the columns what makes eight
// lanes add to columns side by side once four of them have transposed what they have.

CUTE_HOST_DEVICE constexpr int dq_row(int thread) { return ((thread & 1) << 1 | (thread >> 4 & 1)) * kVector; }
CUTE_HOST_DEVICE constexpr int dq_col(int thread) { return ((thread >> 1 & 3) << 1 | (thread >> 3 & 1)) * kVector; }

/// Chunk `chunk` of own rows, of row or column `row` of `Rows`.
template <int Rows>
CUTE_HOST_DEVICE int own_chunk_offset(int chunk, int row) {
  return (chunk / kPanelChunks * Rows + row) * kPanel + chunk_offset(chunk % kPanelChunks, row / kVector);
}

/// `Kind`: which gradients are made; of all of them the own rows are keys, and dQ is added to in memory.
template <Kind Kind_, int B_r_, int B_c_, int HeadDim_, class Element_, int Threads_, class Walk_>
struct BackwardTraits {
  static constexpr bool OfKeys = Kind_ != Kind::QueryGradients, AddsDq = Kind_ == Kind::AllGradients;
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDim_, Threads = Threads_;
  using Element = Element_;
  static constexpr int Own = OfKeys ? B_c : B_r, Walked = OfKeys ? B_r : B_c;
  static constexpr int PieceCols = Walk_::PieceCols, Pieces = HeadDim / PieceCols, Stages = Walk_::Stages,
                       ColWarps = Walk_::ColWarps;
  static constexpr int RowWarps = Threads / 32 / ColWarps;
  static constexpr int Halves = Own / RowWarps / kHalfPanel;        // half panels of a warp's own rows
  static constexpr int PanelsApart = RowWarps / 2;                  // from one half panel of a warp to its next
  static constexpr int Rows = Halves * kVector;                     // own rows of a thread
  static constexpr int WarpWalked = Walked / ColWarps;              // columns of the scores of a warp
  static constexpr int Keys = WarpWalked / kLaneCols;               // of a thread
  static constexpr int WarpPieceCols = PieceCols / ColWarps;        // columns of a piece's gradients of a warp
  static constexpr int OutCols = WarpPieceCols / kLaneCols;         // of a thread
  static constexpr int Gradients = OfKeys ? 2 : 1;                  // dK and dV, or dQ
  static constexpr int Sums = Gradients * Rows * OutCols * Pieces;  // of gradients, of a thread
  static constexpr int GroupCols = group_cols(Rows, OutCols);       // columns of a thread in one product with P or dS
  static constexpr int ChunksATurn = Keys > 8 ? 8 : 4;
  static constexpr bool SumTurnsApart = Rows * Keys <= 32 && Rows * 2 * Keys + Sums <= 160;
  // Of the product dS^T K: warps side by side, and how many rows a thread has.
  static constexpr int DqColWarps = HeadDim / kPanel, DqRowWarps = Threads / 32 / DqColWarps,
                       DqRows = AddsDq ? Walked * DqColWarps * 8 / Threads : 0;
  static constexpr int DqFours = DqRows % (2 * kVector) == 0 ? 2 : 1;  // of these at a time

  static_assert(std::is_same_v<Element, float>, "the CUDA-core family computes in fp32");
  static_assert(RowWarps * ColWarps * 32 == Threads && RowWarps % 2 == 0 && Own % (RowWarps * kHalfPanel) == 0 &&
                    Own % kPanel == 0,
                "two warps share a panel, and each owns whole half panels of 16 rows");
  static_assert(WarpWalked % kPanel == 0 && WarpWalked * ColWarps == Walked, "8 lanes with a 16-byte vector each");
  static_assert(HeadDim % PieceCols == 0 && WarpPieceCols % kPanel == 0, "pieces and warps have whole panels");
  static_assert(Own % (Threads / kPanelChunks) == 0 && Walked % (Threads / kPanelChunks) == 0,
                "a pass of the block copies whole rows of a panel");
  static_assert(!AddsDq || (ColWarps == 1 && DqColWarps * DqRowWarps * 32 == Threads && DqRows % kVector == 0),
                "a warp has whole blocks of dQ");
  static_assert(Stages == 1 || Stages == 2,
                "statistics of walked rows have one place, which three slots would overtake");

  /// What the rows that a CTA owns are to `copy_q`, and the rows that it walks over to the products.
  struct Products {
    static constexpr int B_r = Own, B_c = Walked, HeadDim = BackwardTraits::HeadDim, Threads = BackwardTraits::Threads;
    static constexpr int Halves = BackwardTraits::Halves, PanelsApart = BackwardTraits::PanelsApart,
                         Rows = BackwardTraits::Rows, Keys = BackwardTraits::Keys, OutCols = BackwardTraits::OutCols,
                         GroupCols = BackwardTraits::GroupCols, ChunksATurn = BackwardTraits::ChunksATurn,
                         ProductKeys = Walked;
    static constexpr bool SumTurnsApart = BackwardTraits::SumTurnsApart;
  };

  using LayoutOwn = PanelLayout<HeadDim, Own>;  // transposed
  using LayoutWalked = PanelLayout<Walked, PieceCols>;
  using LayoutP = PanelLayout<Walked, Own>;  // transposed

  struct SharedStorage {
    alignas(128) Element own[2][cosize_v<LayoutOwn>];  // K and V, or Q and dO
    alignas(128) Element ring[Stages][cosize_v<LayoutWalked>];
    alignas(128) Element p[cosize_v<LayoutP>];  // P, then dS
    alignas(128) float lse[B_r];                // of the rows that are walked over, or owned: log2
    alignas(128) float delta[B_r];
    Task task;
  };

  // Whether what pairs have is taken: for dK and dV of wider heads by the tiles that fit 99 KB alone, and not at all by
  // those past 128, nor by those of 64, whose calls the tiles of 128 take. The others spill with it (24 to 250 bytes).
  static constexpr bool Pairs =
      !AddsDq && (!OfKeys || HeadDim <= 32 || (HeadDim == 128 && sizeof(SharedStorage) <= 99 * 1024));

  // CTAs that a multiprocessor of 228 KB and 64 K registers is to hold: all registers that a thread can have.
  static constexpr int CtasByShared = 228 * 1024 / (sizeof(SharedStorage) + 1024),
                       CtasByRegisters = 65536 / 256 / Threads;
  static constexpr int MinCtas = CtasByShared < CtasByRegisters ? CtasByShared : CtasByRegisters;
  static_assert(MinCtas > 0, "the tile is too large for any multiprocessor");
};

}  // namespace cutlass_ext::simt

// Tile shapes, shared-memory layouts and fragment addresses for the mma.sync kernels (compute capability 8.0 and
// newer). Used by fmha.hpp and the backward pass; tests/cpp computes the banks of every ldmatrix phase from what stands
// here.
#pragma once

#include <type_traits>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include <cutlass/numeric_types.h>

#include "../operand.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../swizzle.hpp"
#include "seen_tiles.hpp"

namespace cutlass_ext::sm80 {

using namespace cute;

constexpr int kVector = 8;  // 16-bit elements of one 16-byte chunk
constexpr int kPanel = 64;  // columns of a panel: one row of it is 128 bytes, all 32 banks once
constexpr int kAtom = 16;   // rows of an mma.m16n8k16, and its depth
constexpr int kAtomN = 8;   // its columns

/// A tile of `Rows` x `Cols` elements as panels of 64 columns; chunk ^= row, both within 8, so that the eight rows of
/// an ldmatrix phase fall in different banks.
template <int Rows, int Cols>
using PanelLayout =
    decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<Int<Rows>, Shape<Int<kPanel>, Int<Cols / kPanel>>>,
                                                    Stride<Int<kPanel>, Stride<_1, Int<Rows * kPanel>>>>{}));

/// Element offset of chunk `chunk` of row `row` in a tile of `Rows` rows.
template <int Rows>
CUTE_HOST_DEVICE int chunk_offset(int row, int chunk) {
  return (chunk / 8 * Rows + row) * kPanel + swizzled_chunk<half_t>(chunk % 8, row);
}

/// Byte address of the chunk that lies `rows` rows (a multiple of 8) and `chunks` chunks on from the one at `address`,
/// in a tile of `Rows` rows that begins at a multiple of 128 bytes. The two chunks' numbers have no bit in common.
template <int Rows>
CUTE_HOST_DEVICE uint32_t chunk_at(uint32_t address, int rows, int chunks) {
  return (address ^ (chunks % 8 * 16)) + (chunks / 8 * Rows + rows) * kPanel * 2;
}

/// `Sharers` warps share query rows: each takes its part of the tile's keys in Q K^T, and of the columns of O.
/// Tiles of operands in two parts (operand.hpp) have twice the columns, the high parts first.
/// `Pairs`: whether there may be a bias, a mask or dropout. In one kernel with these plain calls took 3 to 10% more.
template <int B_r_, int B_c_, int HeadDim_, class Element_, int Threads_, int Stages_ = 2, int Sharers_ = 1,
          bool Pairs_ = false>
struct Traits {
  static constexpr bool Pairs = Pairs_;
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDim_, Threads = Threads_;
  static constexpr int Stages = Stages_, Sharers = Sharers_;
  using Element = Element_;
  using Part = typename Operand<Element>::Part;
  static constexpr int Parts = Operand<Element>::Parts;
  static constexpr int Columns = HeadDim * Parts;  // in shared memory
  static constexpr int Warps = Threads / 32;
  static constexpr int WarpKeys = B_c / Sharers, WarpColumns = HeadDim / Sharers;
  static constexpr int RowAtoms = B_r / (Warps / Sharers) / kAtom;  // 16-row atoms of a warp
  static constexpr int Rows = 2 * RowAtoms;                         // rows of a thread
  static constexpr int KeyAtoms = WarpKeys / kAtomN;                // 8-column atoms of S
  static constexpr int OutAtoms = WarpColumns / kAtomN;             // and of O
  // Chunks of O that a warp has of each of its panels: of whole panels all, else its part of every panel.
  static constexpr int PanelChunks = WarpColumns % kPanel == 0 ? 8 : 8 / Sharers;
  static constexpr int PartChunks = PanelChunks < 8 ? PanelChunks : WarpColumns / kVector;  // to the next part's first
  /// The chunk of an atom of O, counted from the warp's first.
  CUTE_HOST_DEVICE static constexpr int chunk_of(int atom) { return atom / PanelChunks * 8 + atom % PanelChunks; }
  static constexpr bool QueriesInRegisters = HeadDim <= 64 && Parts * RowAtoms <= 2;
  static constexpr bool Shared = Sharers > 1;

  // How many times 16 columns of Q K^T go into one sum.
  static constexpr int StepsAtOnce = (Parts > 1 && HeadDim > 128 ? 128 : HeadDim) / kAtom;

  /// Operand A, 16 deep: the warp's rows. Operand B likewise: two atoms of 8 columns.
  using Rows16 = uint32_t[Parts][RowAtoms][4];
  using Columns16 = uint32_t[Parts][4];

  static_assert(std::is_same_v<Part, half_t> || std::is_same_v<Part, bfloat16_t>, "mma.sync takes 16-bit operands");
  static_assert(Sharers == 1 || (Sharers <= 4 && Parts * B_c <= kPanel && PanelChunks % 2 == 0),
                "parts of a panel of P, and pairs of atoms of O");
  static_assert(B_r % (Warps / Sharers * kAtom) == 0, "every warp owns whole atoms of 16 query rows");
  static_assert(WarpKeys % kAtom == 0, "P V runs through the keys 16 at a time");
  static_assert(HeadDim % kPanel == 0, "head_dim is padded to whole panels of 64 columns");
  static_assert(B_r % (Threads / 8) == 0 && B_c % (Threads / 8) == 0,
                "a pass of the block copies whole rows of a panel");

  using LayoutQ = PanelLayout<B_r, Columns>;
  using LayoutKV = PanelLayout<B_c, Columns>;

  struct SharedStorage {
    alignas(128) Part q[cosize_v<LayoutQ>];
    alignas(128) Part k[Stages][cosize_v<LayoutKV>];
    alignas(128) Part v[Stages][cosize_v<LayoutKV>];
    // Where two warps share rows: P of both, and the maxima and sums that each has found.
    alignas(128) Part p[Shared ? B_r * kPanel : 1];
    float statistics[Shared ? 2 : 1][Shared ? B_r : 1];
    // Of the work item, what is wanted now and then: in registers it would spill.
    Sequence sequence;
    ScoreMod score_mod;
    PairMod pairs;
    SeenTiles seen;
    bool checked;         // every tile has more to be looked at than a mask, or rows that are copied in another way
    bool copies_checked;  // that
    Part const *keys, *values;             // of row 0 of the sequence's batch index, or of page 0
    int const* table;                      // of pages, the sequence's row of it; else null
    PartScales scales[Parts > 1 ? 1 : 0];  // where operands are in parts
  };
};

}  // namespace cutlass_ext::sm80

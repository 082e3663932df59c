// Tile shapes, shared-memory layouts and the place of each lane in a warp's tile for the CUDA-core kernels.
// Used by fmha.hpp; tests/cpp computes the bank of every shared-memory access from what stands here.
#pragma once

#include <type_traits>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

#include "../swizzle.hpp"

namespace cutlass_ext::simt {

using namespace cute;

constexpr int kVector = 4;  // floats of one 16-byte access: a "chunk", the unit of every swizzle
constexpr int kPanel = 32;  // columns of a panel: one row of it is 128 bytes, all 32 banks once
constexpr int kPanelChunks = kPanel / kVector;

/// A tile of `Rows` x `Cols` floats as panels of 32 columns, so that the bank of an element depends on its chunk alone.
/// The swizzle (chunk ^= row / 4, both within 8) then spreads over the banks the rows four apart that a warp touches at
/// once.
template <int Rows, int Cols>
using PanelLayout =
    decltype(composition(Swizzle<3, 2, 5>{}, Layout<Shape<Int<Rows>, Shape<Int<kPanel>, Int<Cols / kPanel>>>,
                                                    Stride<Int<kPanel>, Stride<_1, Int<Rows * kPanel>>>>{}));

/// A warp is a grid of 4 x 8 lanes. A lane owns, of S, P and O alike, whole groups of 4 rows and of 4 columns: rows
/// `row + 0..3` of every half panel of its warp, columns `32 j + 4 col + 0..3`. So P passes between the two products
/// within the warp. Neighbouring lanes share a column and lanes two apart share a row, which lets the hardware serve
/// both kinds of broadcast 16-byte load in one pass. The warp's half panels lie a fixed number of panels apart, so that
/// one swizzled offset serves them all.
struct LanePlace {
  int panel;      // of the warp's first half panel
  int row_chunk;  // chunk (of 8 in a panel) of the lane's four rows
  int col;        // 0..7
  CUTE_HOST_DEVICE explicit LanePlace(int thread)
      : panel(thread / 64),
        row_chunk(((thread & 1) << 2) | ((thread >> 5 & 1) << 1) | (thread >> 4 & 1)),
        col(thread >> 1 & 7) {}
};
constexpr int kLaneRows = 4;
constexpr int kLaneCols = 8;  // lanes that share a row: bits 1..3 of the lane
constexpr int kLaneColStride = 2;
constexpr int kHalfPanel = kLaneRows * kVector;

// ---- The same layouts by hand: element offsets from what a lane knows (its place) and what the unrolled loops know.
// The compiler cannot see through the swizzle of PanelLayout; tests/cpp holds each of these against it, for every lane,
// and counts the banks.

/// Offset, in its row of a panel, of chunk `chunk` of a row whose index / 4 is `row_quad`.
CUTE_HOST_DEVICE constexpr int chunk_offset(int chunk, int row_quad) { return swizzled_chunk<float>(chunk, row_quad); }

/// Q and P, transposed, `Columns` columns of the query tile's rows: the lane's four rows of column `column_quad * 4 +
/// e`, in its first half panel.
template <int Columns>
CUTE_HOST_DEVICE int rows_offset(LanePlace place, int column_quad, int e) {
  return (place.panel * Columns + column_quad * 4 + e) * kPanel + chunk_offset(place.row_chunk, column_quad);
}

/// Where element (row, col) of the query tile is stored; columns col + 1 .. col + 3 follow a panel row apart.
template <int Columns>
CUTE_HOST_DEVICE int query_store_offset(int row, int col) {
  return (row / kPanel * Columns + col) * kPanel + chunk_offset(row % kPanel / kVector, col / kVector) + row % kVector;
}

/// K: chunk `chunk` of columns of the lane's first key.
template <int B_c>
CUTE_HOST_DEVICE int key_offset(LanePlace place, int chunk) {
  return (chunk / kPanelChunks * B_c + place.col * kVector) * kPanel + chunk_offset(chunk % kPanelChunks, place.col);
}

/// V: the lane's first four columns of key `key_quad * 4 + e`.
CUTE_HOST_DEVICE int value_offset(LanePlace place, int key_quad, int e) {
  return (key_quad * 4 + e) * kPanel + chunk_offset(place.col, key_quad);
}

/// Columns of O that a thread multiplies at a time, so that sums of their own fit next to O: whole vectors, a divisor
/// of `out_cols`.
constexpr int group_cols(int rows, int out_cols) {
  int cols = out_cols;
  while (out_cols % cols != 0 || cols % kVector != 0 || rows * cols > (rows * out_cols > 96 ? 32 : 64)) --cols;
  return cols;
}

/// `ColWarps`: sets of warps that have the same query rows and share the keys of a tile, each with m, l and O of its
/// own.
template <int B_r_, int B_c_, int HeadDim_, class Element_, int Threads_, int ColWarps_ = 1>
struct Traits {
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDim_, Threads = Threads_;
  using Element = Element_;
  static constexpr int ColWarps = ColWarps_, Warps = Threads / 32 / ColWarps;  // that share out the rows
  static constexpr int Halves = B_r / Warps / kHalfPanel;                      // half panels of query rows of a warp
  static constexpr int PanelsApart = Warps / 2;                // from one half panel of a warp to its next
  static constexpr int Rows = Halves * kVector;                // rows of a thread
  static constexpr int WarpKeys = B_c / ColWarps;              // columns of a warp in S and P
  static constexpr int ProductKeys = WarpKeys;                 // that a warp's product P V is over
  static constexpr int Keys = WarpKeys / kLaneCols;            // columns of a thread in S and P
  static constexpr int OutCols = HeadDim / kLaneCols;          // columns of a thread in O
  static constexpr int GroupCols = group_cols(Rows, OutCols);  // columns of a thread in one product P V
  // Unrolled columns of a product Q K^T, in chunks: 16 columns are 16 KB of instructions at 8 x 8. Tiles of 12 keys a
  // thread run on 32 (44.0 instead of 43.4 TFLOP/s at B_r 128, B_c 96, head_dim 128).
  static constexpr int ChunksATurn = Keys > 8 ? 8 : 4;
  static constexpr bool SumTurnsApart = Rows * Keys <= 32 && Rows * (2 * Keys + OutCols) <= 128;
  static constexpr int Stages = 2;  // ring slots that K and V tiles take in turn

  static_assert(std::is_same_v<Element, float>, "the CUDA-core family computes in fp32");
  static_assert(Threads % (64 * ColWarps) == 0 && B_r % (Warps * kHalfPanel) == 0,
                "two warps share a panel, and each owns whole half panels of 16 query rows");
  static_assert(B_r % kPanel == 0, "the query rows fill whole panels of 32");
  static_assert(WarpKeys % kPanel == 0, "a warp's keys must be a multiple of 32: 8 lanes with a 16-byte vector each");
  static_assert(HeadDim % kPanel == 0, "head_dim is padded to whole panels of 32 columns");
  static_assert(B_r % (Threads / kPanelChunks) == 0 && B_c % (Threads / kPanelChunks) == 0,
                "a pass of the block copies whole rows of a panel");

  // Q and P lie transposed: a lane then reads four rows of one column in a vector, and the two operands of a product
  // that change from FFMA to FFMA come from registers of different parity (see gemm_qk).
  using LayoutQ = PanelLayout<HeadDim, B_r>;
  using LayoutKV = PanelLayout<B_c, HeadDim>;
  using LayoutP = PanelLayout<B_c, B_r>;

  struct SharedStorage {
    alignas(128) Element q[cosize_v<LayoutQ>];
    alignas(128) Element kv[Stages][cosize_v<LayoutKV>];
    alignas(128) Element p[cosize_v<LayoutP>];
  };

  // CTAs that a multiprocessor of 228 KB is to hold: as many as shared memory allows, and no more than the registers
  // do. 64 accumulators a thread need 168 registers, more of them spill with fewer than all, and so do column warps.
  static constexpr int Registers =
      ColWarps == 1 && Rows * (OutCols + (Keys > GroupCols ? Keys : GroupCols)) <= 64 ? 168 : 256;
  static constexpr int CtasByShared = 228 * 1024 / (sizeof(SharedStorage) + 1024),
                       CtasByRegisters = 65536 / Registers / Threads;
  static constexpr int MinCtas = CtasByShared < CtasByRegisters ? CtasByShared : CtasByRegisters;
};

}  // namespace cutlass_ext::simt

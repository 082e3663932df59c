// Tile shapes and shared memory of the decode kernels. Used by fmha.hpp, its two ways to multiply and narrow.hpp;
// tests/cpp checks where things lie.
#pragma once

#include <cute/config.hpp>
#include <cutlass/numeric_types.h>

#include "../pack_gqa.hpp"
#include "walk.hpp"

namespace cutlass_ext::decode {

constexpr int kWarpRows = 16;  // packed query rows of a warp: the rows of an mma.m16n8k16

/// RowWarps warps have 16 query rows each and read the same keys; each of KeyWarps sets of them has keys of its own, in
/// a ring of `Stages` tiles of its own, and meets the others once a sequence. 96 KB of ring for four warps: two CTAs
/// fit a multiprocessor of compute capability 9.0, one the 99 KB that a block has on 8.6 and 8.9.
template <int HeadDim_, class Element_, int RowWarps_, int KeyWarps_, int TileKeys_, int Stages_>
struct Traits {
  using Element = Element_;
  static constexpr int HeadDim = HeadDim_, RowWarps = RowWarps_, KeyWarps = KeyWarps_, TileKeys = TileKeys_,
                       Stages = Stages_;
  static constexpr int Warps = RowWarps * KeyWarps, Threads = 32 * Warps;
  static constexpr int CtasAMultiprocessor = Warps <= 4 ? 2 : 1;
  static constexpr int Rows = kWarpRows * RowWarps;  // packed query rows of a CTA
  static constexpr int B_r = Rows, B_c = TileKeys, HeadDimV = HeadDim;
  static constexpr bool TensorCores = sizeof(Element) == 2;

  static constexpr int Vector = 16 / sizeof(Element);  // elements of a 16-byte chunk
  static constexpr int PanelCols = 8 * Vector;         // a panel's row is 128 bytes, all 32 banks once
  static constexpr int Panels = HeadDim / PanelCols;
  static constexpr int TileElements = TileKeys * HeadDim;               // of K, and of V
  static constexpr int LoadRows = TileKeys / RowWarps;                  // rows of a tile that a warp copies
  static constexpr int Chunks = HeadDim / Vector, Units = HeadDim / 4;  // of a row: 16 bytes; float4 of O
  static constexpr bool QueryInRegisters = TensorCores && HeadDim <= 128;

  static_assert(Stages >= 2, "one is read while another is copied");
  static_assert(RowWarps == 1 || KeyWarps == 1, "the warps of a CTA share out the rows or the keys");
  static_assert(HeadDim % PanelCols == 0 && LoadRows % 4 == 0 && LoadRows <= 32);
  static_assert(TensorCores ? TileKeys % 16 == 0 : TileKeys % 8 == 0);
  static_assert(!QueryInRegisters || TileKeys >= Rows, "Q passes through a tile of K on its way");
  static_assert(KeyWarps == 1 || TileElements * sizeof(Element) * 2 >= kWarpRows * HeadDim * sizeof(float),
                "a warp's O passes through the tile that it was done with last");

  struct Stage {
    alignas(128) Element k[TileElements];
    alignas(128) Element v[TileElements];
  };
  struct SharedStorage {
    Stage ring[KeyWarps][Stages];
    alignas(128) Element q[QueryInRegisters ? 8 : Rows * HeadDim];
    float2 ml[KeyWarps][kWarpRows];
    int free_stage[KeyWarps];
    Place place;
    Walk<TileKeys> walk, next, ahead[Warps];  // where the CTA works, and will next, and where each warp's copies are
    unsigned scan[Warps];
    unsigned found_batch, found_first;
    bool is_last;
  };

  /// The first row of a tile that warp `warp` copies.
  CUTE_HOST_DEVICE static int row0_of(int warp) { return RowWarps == 1 ? 0 : warp * LoadRows; }

  /// Where the warp's tile of Q that holds row `row` begins.
  CUTE_HOST_DEVICE static constexpr int query_tile(int row) { return row / kWarpRows * kWarpRows * HeadDim; }

  /// How many of a sequence's rows the CTA's tile has, and which row of Q and O is row `row` of it.
  CUTE_HOST_DEVICE static int rows_of(Params const& params, Place const& place, QueryRows const& of_sequence) {
    int const rows = packed_rows(params, of_sequence) - place.row_tile * Rows;
    return rows < Rows ? rows : Rows;
  }
  CUTE_HOST_DEVICE static PackedRow packed_row(Params const& params, Place const& place, int row) {
    return PackedRow(params, place.head, place.row_tile * Rows + row);
  }
};

/// Element offset of 16-byte chunk `chunk` of row `row` in a tile of `Rows` rows: panels of 128 bytes, chunk ^= row, so
/// that the eight rows of an ldmatrix phase fall in different banks.
template <class Element, int Rows>
CUTE_HOST_DEVICE int chunk_offset(int row, int chunk) {
  return ((chunk / 8 * Rows + row) * 8 + (chunk % 8 ^ row % 8)) * int(16 / sizeof(Element));
}

/// Of the narrow kernels: where chunk `chunk` of a row lies, so that the eight lanes that read at a time find theirs in
/// different banks: of Q and K they read four chunks of two rows, of V two chunks of four even or odd rows.
CUTE_HOST_DEVICE int key_place(int row, int chunk) { return chunk ^ row % 2 * 4; }
CUTE_HOST_DEVICE int value_place(int row, int chunk) { return chunk ^ (row & 6); }

/// The same for float4 `unit` of a row of O, of which the lanes write two of four even or odd rows.
CUTE_HOST_DEVICE int output_place(int row, int unit) { return unit ^ (row / 2 % 2 + row / 4 * 4); }

}  // namespace cutlass_ext::decode

// Tiles from global to shared memory by cp.async, swizzled, rows and columns that do not exist filled with zeros.
// Called by the main loops of the families without TMA, and by the small launches of the backward pass.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "../cache.hpp"
#include "../cute_tensor.hpp"
#include "../optimization_barriers.hpp"
#include "../swizzle.hpp"

namespace cutlass_ext {

/// A [rows, cols] matrix in global memory with a contiguous last dimension, of which a tile is copied.
template <class Element>
struct GlobalTile {
  Element const* data;
  int64_t row_stride;
  int rows;      // rows at or past this are filled with zeros
  int cols;      // so are columns
  bool aligned;  // 16-byte vectors allowed

  CUTE_DEVICE Element const* row(int row) const { return data + row * row_stride; }
  CUTE_DEVICE bool has(int row) const { return row < rows; }
};

/// The same without some of its rows, which are filled with zeros too.
template <class Element>
struct SiftedTile : GlobalTile<Element> {
  uint32_t const* left_out;  // a bit for each row; null: none
  int64_t first;             // bit of the tile's first row

  CUTE_DEVICE bool has(int row) const {
    int64_t const bit = first + row;
    return row < this->rows && !(left_out && __ldg(left_out + bit / 32) >> bit % 32 & 1);
  }
};

/// The same of keys or values that may lie in pages: where a row is, is looked up.
template <class Element>
struct LookedUpTile {
  Element const* data;  // row 0, or that of page 0
  Strides const& stride;
  Cache const& cache;
  int const* table;  // the sequence's row of it; null: no pages
  int first_row;     // of the tile, counted in the sequence
  int rows, cols;
  bool aligned;

  CUTE_DEVICE bool has(int row) const { return row < rows; }

  /// Of a row that does not exist the table says nothing.
  CUTE_DEVICE Element const* row(int row) const {
    if (row >= rows) return data;
    int const key_row = first_row + row;
    if (!table) return data + key_row * stride.row;
    return data + nearest_page(table[cache.page_rows.div(key_row)], cache.pages) * stride.batch +
           row_in_page(cache, key_row) * stride.row;
  }
};

/// Whether the rows of a tensor begin at multiples of 16 bytes.
template <class Element>
CUTE_DEVICE bool is_aligned(void const* base, Strides const& stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 &&
         (stride.batch | stride.row | stride.head) % int(16 / sizeof(Element)) == 0;
}

/// Rows `row` and on of one head of a [batch, row, head, head_dim] tensor.
template <class Element>
CUTE_DEVICE GlobalTile<Element> global_tile(void const* base, Strides const& stride, int batch, int head, int64_t row,
                                            int rows, int cols) {
  return {static_cast<Element const*>(base) + batch * stride.batch + head * stride.head + row * stride.row, stride.row,
          rows, cols, is_aligned<Element>(base, stride)};
}

/// `row_of(pass)` is the row that `thread` copies a part of in that pass, of `Threads / 8` rows.
template <int TileRows, int TileCols, int Threads, bool Predicated, class Tile, class RowOf, class Element, class Moved>
CUTE_DEVICE void copy_tile_vectors(Tile const& src, RowOf const& row_of, Element* dst, Moved moved,
                                   int thread = threadIdx.x) {
  constexpr int Vector = 16 / sizeof(Element), Panel = 8 * Vector, RowsAPass = Threads / 8;
  static_assert(TileRows % RowsAPass == 0 && TileCols % Panel == 0);
  int const chunk = thread % 8, row0 = thread / 8;
  CUTE_UNROLL
  for (int pass = 0; pass < TileRows / RowsAPass; ++pass) {
    int const row = pass * RowsAPass + row0;
    bool const row_exists = !Predicated || src.has(row);
    Element const* src_row = row_of(pass) + chunk * Vector;
    CUTE_UNROLL
    for (int panel = 0; panel < TileCols / Panel; ++panel) {
      bool const exists = row_exists && panel * Panel + chunk * Vector < src.cols;
      Element const* from = src_row + panel * Panel;  // not read where nothing exists
      Element* to = dst + (panel * TileRows + row) * Panel + swizzled_chunk<Element>(chunk, moved(row));
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(from),
                                                                   *reinterpret_cast<cute::uint128_t*>(to), exists);
    }
  }
}

/// The same for tensors whose rows do not start at multiples of 16 bytes: an element a copy, and a plain one where it
/// has 2 bytes.
template <int TileRows, int TileCols, int Threads, class Tile, class Element, class Moved>
CUTE_DEVICE void copy_tile_elements(Tile const& src, Element* dst, Moved moved, int thread = threadIdx.x) {
  constexpr int Vector = 16 / sizeof(Element), Panel = 8 * Vector;
  CUTE_NO_UNROLL
  for (int i = thread; i < TileRows * TileCols; i += Threads) {
    int const row = i / TileCols, col = i % TileCols;
    bool const exists = col < src.cols && src.has(row);
    Element const* from = exists ? src.row(row) + col : src.data;
    Element* to = dst + (col / Panel * TileRows + row) * Panel +
                  swizzled_chunk<Element>(col % Panel / Vector, moved(row)) + col % Vector;
    if constexpr (sizeof(Element) == 4) {
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Element>::copy(*from, *to, exists);
    } else {
      *to = exists ? *from : Element(0);
    }
  }
}

/// Starts the copy of a tile to panels of 128-byte rows. `moved(row)` is what the swizzle moves a row's chunks by. A
/// tile whose rows all exist is copied without looking at them.
template <int TileRows, int TileCols, int Threads, class Element, class Moved>
CUTE_DEVICE void copy_tile(GlobalTile<Element> const& src, Element* dst, Moved moved, unsigned thread = threadIdx.x) {
  Element const* const first = src.row(thread / 8);
  auto const row_of = [&](int pass) { return first + pass * (Threads / 8) * src.row_stride; };
  if (!src.aligned) {
    copy_tile_elements<TileRows, TileCols, Threads>(src, dst, moved, thread);
  } else if (src.rows < TileRows) {
    copy_tile_vectors<TileRows, TileCols, Threads, true>(src, row_of, dst, moved, thread);
  } else {
    copy_tile_vectors<TileRows, TileCols, Threads, false>(src, row_of, dst, moved, thread);
  }
}

template <int TileRows, int TileCols, int Threads, class Element, class Moved>
CUTE_DEVICE void copy_tile(SiftedTile<Element> const& src, Element* dst, Moved moved, unsigned thread = threadIdx.x) {
  Element const* const first = src.row(thread / 8);
  auto const row_of = [&](int pass) { return first + pass * (Threads / 8) * src.row_stride; };
  if (src.aligned) {
    copy_tile_vectors<TileRows, TileCols, Threads, true>(src, row_of, dst, moved, thread);
  } else {
    copy_tile_elements<TileRows, TileCols, Threads>(src, dst, moved, thread);
  }
}

/// Each lane looks up one of its warp's rows: all answers are then under way at once, and cost two registers.
template <int TileRows, int TileCols, int Threads, class Element, class Moved>
CUTE_DEVICE void copy_tile(LookedUpTile<Element> const& src, Element* dst, Moved moved) {
  static_assert(TileRows <= Threads, "a warp copies at most as many rows as it has lanes");
  if (!src.aligned) {
    copy_tile_elements<TileRows, TileCols, Threads>(src, dst, moved);
    return;
  }
  int const thread = opaque(threadIdx.x), lane = thread % 32;
  auto const lanes_row =
      reinterpret_cast<unsigned long long>(src.row(lane / 4 * (Threads / 8) + thread / 32 * 4 + lane % 4));
  auto const row_of = [&](int pass) {
    return reinterpret_cast<Element const*>(__shfl_sync(0xffffffffu, lanes_row, pass * 4 + lane / 8));
  };
  copy_tile_vectors<TileRows, TileCols, Threads, true>(src, row_of, dst, moved, thread);
}

/// A tile whose rows all exist, of 16-byte vectors: `src` is what this thread copies first, `to` the byte address of
/// its place in shared memory. What depends on the thread is then worked out once, not for each tile.
template <int TileRows, int TileCols, int Threads, class Element>
CUTE_DEVICE void copy_whole_tile(Element const* src, int64_t row_stride, int cols, uint32_t to) {
  constexpr int Vector = 16 / sizeof(Element), Panel = 8 * Vector, RowsAPass = Threads / 8;
  static_assert(RowsAPass % 8 == 0, "every pass has the same swizzle");
  CUTE_UNROLL
  for (int pass = 0; pass < TileRows / RowsAPass; ++pass, src += RowsAPass * row_stride) {
    CUTE_UNROLL
    for (int panel = 0; panel < TileCols / Panel; ++panel) {
      bool const exists = panel * Panel + int(threadIdx.x) % 8 * Vector < cols;
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       to + (panel * TileRows + pass * RowsAPass) * 128),
                   "l"(src + panel * Panel), "r"(exists ? 16 : 0));
    }
  }
}

}  // namespace cutlass_ext

// Which keys a query row sees, which key tiles a query tile therefore visits, and which of those need element masks;
// the same from the side of the keys. Called by every main loop on the device, and by the tests on the host.
#pragma once

#include <cmath>

#include <cutlass/fast_math.h>

#include "cute_tensor.hpp"

namespace cutlass_ext {

/// A half-open range [begin, end) of keys, of rows, or of tiles.
struct Range {
  int begin;
  int end;
  CUTE_HOST_DEVICE int size() const { return end > begin ? end - begin : 0; }
  CUTE_HOST_DEVICE bool contains(int i) const { return begin <= i && i < end; }
};

/// The keys of one sequence, counted from its first real key: left padding is cut off by moving the origin, so that
/// only the far end of the keys can fall inside a tile.
struct Visibility {
  int n_q;           // query rows
  int len_kv;        // keys after the left padding
  int start_pos;     // position of query row 0, relative to the first real key
  int window_left;   // < 0: unbounded
  int window_right;  // < 0: unbounded; causal is 0

  /// Keys that query row `row` sees. Both ends grow with `row`: everything below leans on it.
  CUTE_HOST_DEVICE Range keys_of_row(int row) const {
    int const p = start_pos + row;
    return {window_left < 0 ? 0 : clamp_to_keys(p - window_left),
            window_right < 0 ? len_kv : clamp_to_keys(p + window_right + 1)};
  }

  /// Whether every row sees every key.
  CUTE_HOST_DEVICE bool sees_all() const { return window_left < 0 && window_right < 0; }

  /// p - j: how far query row `row` stands behind key `key`.
  CUTE_HOST_DEVICE int offset(int row, int key) const { return start_pos + row - key; }

  /// The same with keys counted from `first_key`. Ranges then depend on the tile, and the compiler cannot keep those of
  /// every row in registers around the main loop (25 spilled registers at B_r 128, B_c 64, head_dim 64).
  CUTE_HOST_DEVICE Visibility counted_from(int first_key) const {
    return {n_q, len_kv - first_key, start_pos - first_key, window_left, window_right};
  }

  /// The same with unbounded windows as numbers that reach past every key. The compiler sees that they are not negative
  /// and leaves out the branches of `keys_of_row`.
  CUTE_HOST_DEVICE Visibility with_finite_windows() const {
    auto reach = [](int window) { return static_cast<int>(unsigned(window) < 1u << 30 ? unsigned(window) : 1u << 30); };
    return {n_q, len_kv, start_pos, reach(window_left), reach(window_right)};
  }

  CUTE_HOST_DEVICE int last_row(int row0, int block_r) const {
    return (row0 + block_r < n_q ? row0 + block_r : n_q) - 1;
  }

  /// Key tiles of `block_c` keys that some row of the query tile [row0, row0 + block_r) sees.
  CUTE_HOST_DEVICE Range tiles_of(int row0, int block_r, int block_c) const {
    int const begin = keys_of_row(row0).begin;
    int const end = keys_of_row(last_row(row0, block_r)).end;
    if (begin >= end) return {0, 0};
    return {begin / block_c, (end + block_c - 1) / block_c};
  }

  /// Key tiles that every row of the query tile sees whole: the others that `tiles_of` names need element masks.
  CUTE_HOST_DEVICE Range unmasked_tiles_of(int row0, int block_r, int block_c) const {
    return {(keys_of_row(last_row(row0, block_r)).begin + block_c - 1) / block_c, keys_of_row(row0).end / block_c};
  }

  /// Whether some row of the query tile does not see the whole of key tile `tile`.
  CUTE_HOST_DEVICE bool needs_mask(int tile, int row0, int block_r, int block_c) const {
    return !unmasked_tiles_of(row0, block_r, block_c).contains(tile);
  }

  /// The same pairs with rows and keys in each other's place: key j stands at -start_pos + j among the rows, and the
  /// rows that see it reach as far to the left of it as its row's window does to the right.
  CUTE_HOST_DEVICE Visibility transposed() const { return {len_kv, n_q, -start_pos, window_right, window_left}; }

  /// Query rows that see key `key`.
  CUTE_HOST_DEVICE Range rows_of_key(int key) const {
    return key < len_kv ? transposed().keys_of_row(key) : Range{0, 0};
  }

  /// Query tiles of `block_r` rows of which some row sees a key of the key tile [key0, key0 + block_c).
  CUTE_HOST_DEVICE Range row_tiles_of(int key0, int block_c, int block_r) const {
    return transposed().tiles_of(key0, block_c, block_r);
  }

  /// Query tiles of which every row exists and sees the whole of the key tile: the others need element masks.
  CUTE_HOST_DEVICE Range unmasked_row_tiles_of(int key0, int block_c, int block_r) const {
    return key0 + block_c <= len_kv ? transposed().unmasked_tiles_of(key0, block_c, block_r) : Range{0, 0};
  }

  /// Query rows that see some key: all between the first and the last of them do.
  CUTE_HOST_DEVICE Range rows_with_keys() const {
    return len_kv > 0 ? Range{rows_of_key(0).begin, rows_of_key(len_kv - 1).end} : Range{0, 0};
  }

  /// The same with `rows` alone, counted from the first of them.
  CUTE_HOST_DEVICE Visibility of_rows(Range rows) const {
    return {rows.size(), len_kv, start_pos + rows.begin, window_left, window_right};
  }

 private:
  CUTE_HOST_DEVICE int clamp_to_keys(int key) const { return key < 0 ? 0 : key > len_kv ? len_kv : key; }
};

/// The part of `tiles` that split `split` of `splits.divisor` works on; the parts are contiguous and differ by one tile
/// at most.
CUTE_HOST_DEVICE Range split_range(Range tiles, cutlass::FastDivmod const& splits, int split) {
  int of_each, rest;
  splits(of_each, rest, tiles.size());
  int const begin = tiles.begin + split * of_each + (split < rest ? split : rest);
  return {begin, begin + of_each + (split < rest)};
}

/// Hides from each row of `S` the keys that it does not see: element (i, j) is row `first_row + row_of(i)` and key
/// `key_of(j)` of `visibility`.
template <class ScoreTensor, class View, class RowOf, class KeyOf>
CUTE_HOST_DEVICE void mask(ScoreTensor& S, View const& visibility, int first_row, RowOf row_of, KeyOf key_of) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size<0>(S); ++i) {
    Range const visible = visibility.keys_of_row(first_row + row_of(i));
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(S); ++j) {
      if (key_of(j) < visible.begin || key_of(j) >= visible.end) S(i, j) = -INFINITY;
    }
  }
}

/// The same of S^T, keys and rows that do not exist included: element (i, j) is key `first_key + key_of(i)` and row
/// `row_of(j)`.
template <class ScoreTensor, class KeyOf, class RowOf>
CUTE_HOST_DEVICE void mask_transposed(ScoreTensor& S, Visibility const& visibility, int first_key, KeyOf key_of,
                                      RowOf row_of) {
  struct FromTheKeys {
    Visibility const& visibility;
    CUTE_HOST_DEVICE Range keys_of_row(int key) const { return visibility.rows_of_key(key); }
  };
  mask(S, FromTheKeys{visibility}, first_key, key_of, row_of);
}

}  // namespace cutlass_ext

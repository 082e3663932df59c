// Keys and values that lie in pages or come with the call: which page holds a row, rotary embedding, writing to the
// cache. Called by the kernels that read or write a cache, and by the tests on the host.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace cutlass_ext {

/// The table of pages belongs to the caller, and an idle slot may hold anything, -1 say. What is read comes from the
/// nearest page that there is, what is written outside is dropped. Of no pages the host makes room for no keys.
CUTE_HOST_DEVICE int nearest_page(int page, int pages) {
  int const below = page < pages ? page : pages - 1;
  return below > 0 ? below : 0;
}
CUTE_HOST_DEVICE bool has_page(int pages, int page) { return 0 <= page && page < pages; }

/// Where row `row` of a sequence lies: the page, or the batch index of a contiguous cache. -1 where the cache has none.
CUTE_HOST_DEVICE int page_of_row(Cache const& cache, int batch, int row) {
  if (!cache.paged() && !cache.batch_idx) return batch;
  int const page = cache.paged() ? cache.pages_of(batch)[cache.page_rows.div(row)] : cache.batch_idx[batch];
  return has_page(cache.pages, page) ? page : -1;
}
/// `cache` is Cache, or has its numbers.
template <class C>
CUTE_HOST_DEVICE int row_in_page(C const& cache, int row) {
  return row - cache.page_rows.div(row) * cache.page_rows.divisor;
}

/// Where query row `token` stands for rotary embedding, if the new keys begin at `first_new`: with them under a causal
/// mask or a window, else, as flash-attn has it, all rows at the first one's place.
CUTE_HOST_DEVICE int rotary_position(Rotary const& rotary, int first_new, int token) {
  return first_new + (rotary.rows_move ? token : 0);
}

/// Where the table has the cosines of a position.
CUTE_HOST_DEVICE int64_t rotary_entry(Rotary const& rotary, int position) {
  return (position < rotary.rows ? position : rotary.rows - 1) * rotary.row_stride;
}

#if defined(__CUDACC__)
/// A number of a pair, turned with the other one: by `sin` of the second of them, and by -sin of the first.
CUTE_DEVICE float turned(float x, float other, float cos, float sin) { return fmaf(x, cos, sin * other); }

/// A warp turns a row at `position` in shared memory; `chunk(c)` are its 16 bytes of that number.
template <class Element, class Chunk>
CUTE_DEVICE void rotate_row(Rotary const& rotary, int position, Chunk const& chunk) {
  constexpr int Vector = 16 / sizeof(Element);
  auto const at = [&](int col) -> Element& { return reinterpret_cast<Element*>(&chunk(col / Vector))[col % Vector]; };
  int const half = rotary.dim / 2;
  int64_t const entry = rotary_entry(rotary, position);
#pragma unroll 2
  for (int pair = threadIdx.x % 32; pair < half; pair += 32) {
    Element &x = at(rotary.interleaved ? 2 * pair : pair), &y = at(rotary.interleaved ? 2 * pair + 1 : pair + half);
    float const c = static_cast<Element const*>(rotary.cos)[entry + pair],
                s = static_cast<Element const*>(rotary.sin)[entry + pair], first = x, second = y;
    x = static_cast<Element>(turned(first, second, c, -s));
    y = static_cast<Element>(turned(second, first, c, s));
  }
}

/// 16 bytes of a row in global memory, element by element where rows begin anywhere.
template <class Element>
CUTE_DEVICE uint4 load_chunk(Element const* from, bool aligned) {
  if (aligned) return *reinterpret_cast<uint4 const*>(from);
  alignas(16) Element x[16 / sizeof(Element)];
  CUTE_UNROLL
  for (int i = 0; i < int(16 / sizeof(Element)); ++i) x[i] = from[i];
  return reinterpret_cast<uint4 const&>(x);
}
template <class Element>
CUTE_DEVICE void store_chunk(Element* to, uint4 const& chunk, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = chunk;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < int(16 / sizeof(Element)); ++i) to[i] = reinterpret_cast<Element const*>(&chunk)[i];
  }
}

/// A row of K and the one of V; null where there is none.
template <class Element>
struct KvRow {
  Element *k = nullptr, *v = nullptr;
};

/// New rows [begin, end) of a tile in shared memory, a warp's: its keys are turned where they lie, `position` is row
/// 0's, and if `writes`, keys and values go to the cache. `k(row, c)` and `v(row, c)` are chunks of the tile, of at
/// most HeadDim columns; `cache_row(row)` is where a row goes.
template <int HeadDim, class Element, class K, class V, class CacheRow>
CUTE_DEVICE void take_new_rows(int begin, int end, Rotary const& rotary, int position, bool writes, bool aligned,
                               int head_dim, int head_dim_v, K const& k, V const& v, CacheRow const& cache_row) {
  constexpr int Vector = 16 / sizeof(Element), Chunks = HeadDim / Vector;
  if (rotary.cos) {
    CUTE_NO_UNROLL
    for (int row = begin; row < end; ++row)
      rotate_row<Element>(rotary, position + row, [&](int c) -> uint4& { return k(row, c); });
    __syncwarp();
  }
  if (!writes) return;
  CUTE_NO_UNROLL
  for (int index = begin * Chunks + threadIdx.x % 32; index < end * Chunks; index += 32) {
    int const row = index / Chunks, chunk = index % Chunks, col = chunk * Vector;
    KvRow<Element> const to = cache_row(row);
    if (to.k && col < head_dim) store_chunk(to.k + col, k(row, chunk), aligned);
    if (to.v && col < head_dim_v) store_chunk(to.v + col, v(row, chunk), aligned);
  }
}
#endif

}  // namespace cutlass_ext

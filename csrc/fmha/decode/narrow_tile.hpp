// What the decode kernels of at most eight packed query rows share: their parameters, and a tile of 16 keys, which one
// warp copies and multiplies by itself. Used by narrow.hpp and cluster.hpp.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include <cute/arch/copy_sm80.hpp>
#include <cutlass/fast_math.h>

#include "../cache.hpp"
#include "../features.hpp"
#include "../mma/mma_sync.hpp"
#include "../operand.hpp"
#include "../pack_gqa.hpp"
#include "../sequence.hpp"
#include "../softmax.hpp"
#include "params.hpp"
#include "partition.hpp"
#include "traits.hpp"

namespace cutlass_ext::decode {

/// What the kernels are told of a call, in the order in which they ask: 64 bytes of parameters come from memory at a
/// time, and each time a warp waits for them. `lengths()` says what the numbers mean.
struct NarrowParams {
  int const* seqused_k;
  int const* start_positions;
  int n_q, keys, n_new, start_pos;  // `keys`: that a sequence has at most, before new ones
  StartPos start_pos_kind;
  int window_left, window_right, batch, groups;
  // For narrow.hpp, where the host knows the lengths: the tiles of a group, those of a sequence. Else 0.
  unsigned chunk = 0;
  cutlass::FastDivmod tiles;

  void const *k, *v;
  Strides k_stride, v_stride;
  int const* block_table;
  int64_t block_table_stride;
  cutlass::FastDivmod page_rows;
  int pages;

  RowDivisor heads_per_kv;
  float scale;  // from products to scores in the log2 domain
  void const* q;
  Strides q_stride;

  int heads_q, heads_kv;
  void* o;
  Strides o_stride;
  float* lse;  // null: not asked for
  float *o_partial, *lse_partial;
  unsigned* counters;

  CUTE_HOST_DEVICE bool paged() const { return block_table; }
  CUTE_HOST_DEVICE int const* pages_of(int b) const { return block_table + b * block_table_stride; }

  explicit NarrowParams(Params const& p)
      : seqused_k(p.seqused_k),
        start_positions(p.start_positions),
        n_q(p.n_q),
        keys(p.seqused_k ? p.n_kv : std::min(p.n_cached, p.n_kv)),
        n_new(p.seqused_k ? p.n_new : std::min(p.n_new, p.n_kv - keys)),
        start_pos(p.start_pos),
        start_pos_kind(p.start_pos_kind),
        window_left(p.window_left),
        window_right(p.window_right),
        batch(p.batch),
        groups(p.groups),
        k(p.k),
        v(p.v),
        k_stride(p.k_stride),
        v_stride(p.v_stride),
        block_table(p.block_table),
        block_table_stride(p.block_table_stride),
        page_rows(p.page_rows),
        pages(p.pages),
        heads_per_kv(p.heads_per_kv.divisor),
        scale(p.softmax_scale * kLog2e),
        q(p.q),
        q_stride(p.q_stride),
        heads_q(p.heads_q),
        heads_kv(p.heads_kv),
        o(p.o),
        o_stride(p.o_stride),
        lse(p.lse),
        o_partial(p.o_partial),
        lse_partial(p.lse_partial),
        counters(p.counters) {
    if (!all_alike(p)) return;  // then no sequence needs the device
    unsigned const of_each = sequence_of(lengths(), 0).visibility.tiles_of(0, n_q, 1 << kNarrowTileShift).size();
    if (of_each == 0) return;
    tiles = cutlass::FastDivmod(of_each);
    chunk = Partition(batch * of_each, groups, kMinChunkKeys >> kNarrowTileShift).chunk;
  }

  static constexpr bool packed() { return false; }
  CUTE_HOST_DEVICE int stored_rows() const { return n_q; }

  CUTE_HOST_DEVICE Lengths lengths() const {
    Lengths lengths;
    lengths.batch = batch;
    lengths.n_q = n_q;
    lengths.n_cached = keys;
    lengths.n_kv = seqused_k ? keys : keys + n_new;
    lengths.n_new = n_new;
    lengths.start_pos = start_pos;
    lengths.start_pos_kind = start_pos_kind;
    lengths.window_left = window_left;
    lengths.window_right = window_right;
    lengths.seqused_k = seqused_k;
    lengths.start_positions = start_positions;
    return lengths;
  }
};

/// The same of a packed call, which asks for the ends of its rows first.
struct PackedNarrowParams : QueryEnds, NarrowParams {
  explicit PackedNarrowParams(Params const& p) : QueryEnds(p), NarrowParams(p) {}

  static constexpr bool packed() { return true; }
  CUTE_HOST_DEVICE int stored_rows() const { return total_q; }

  CUTE_HOST_DEVICE Lengths lengths() const {
    Lengths lengths = NarrowParams::lengths();
    put(&lengths);
    return lengths;
  }
};

/// Sizes, and the shared memory of a tile.
template <int HeadDim_, class Element_>
struct NarrowTile {
  using Element = Element_;
  static constexpr int HeadDim = HeadDim_, TileKeys = 16;
  static constexpr int Rows = kNarrowRows;  // packed query rows: the narrow side of an mma.m16n8k16
  static constexpr int B_r = Rows, B_c = TileKeys, HeadDimV = HeadDim;
  static constexpr int Chunks = HeadDim / 8;  // of 16 bytes in a row
  static constexpr int Units = HeadDim / 4;   // float4 in a row of O
  static_assert(HeadDim == 64 || HeadDim == 128);
  static_assert(TileKeys == 1 << kNarrowTileShift);

  struct Stage {
    alignas(128) uint4 k[TileKeys][Chunks], v[TileKeys][Chunks];
  };
};

/// Starts a warp's copy of a tile of K or of V: `row_of(i)` is row i, those from `rows` on become zeros, and `place`
/// says where chunks lie.
template <class Tile, int Unroll, class Place, class RowOf>
CUTE_DEVICE void copy_rows(uint4 (&to)[Tile::TileKeys][Tile::Chunks], Place place, int rows, RowOf row_of) {
  // Eight lanes copy 128 bytes of a row.
  int const row = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
#pragma unroll Unroll
  for (int i = 0; i < Tile::TileKeys; i += 4) {
    auto const* from = reinterpret_cast<uint4 const*>(row_of(row + i)) + chunk;
    CUTE_UNROLL
    for (int panel = 0; panel < Tile::Chunks; panel += 8) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(from[panel], to[row + i][panel + place(row + i, chunk)],
                                                         row + i < rows);
    }
  }
}

/// The same of both: `rows` rows of `page`, or sequence, from row `row` on.
template <class Tile>
CUTE_DEVICE void copy_tile(typename Tile::Stage& stage, NarrowParams const& params, int head, int page, int row,
                           int rows) {
  using Element = typename Tile::Element;
  auto const rows_of = [&](void const* cache, Strides const& stride) {
    return [=, &stride](int i) { return row_at<Element const>(cache, stride, page, row + i, head); };
  };
  copy_rows<Tile, 4>(stage.k, key_place, rows, rows_of(params.k, params.k_stride));
  copy_rows<Tile, 4>(stage.v, value_place, rows, rows_of(params.v, params.v_stride));
}

CUTE_DEVICE uint32_t word(uint4 const& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

/// Chunk `chunk` of packed row `row` of Q, zeros past the last row.
template <class Tile>
CUTE_DEVICE uint4 query_chunk(NarrowParams const& params, int head, QueryRows const& rows, int row, int chunk) {
  if (row >= packed_rows(params, rows)) return make_uint4(0, 0, 0, 0);
  PackedRow const packed(params, head, row);
  auto const* from = row_at<typename Tile::Element const>(params.q, params.q_stride, rows.batch,
                                                          rows.row0 + packed.token, packed.head);
  return __ldg(reinterpret_cast<uint4 const*>(from) + chunk);
}

/// Words 1 and 2 of a chunk of Q change places, as NarrowSums wants them.
CUTE_DEVICE uint4 crossed(uint4 const& x) { return make_uint4(x.x, x.z, x.y, x.w); }

/// The keys that every row sees.
CUTE_DEVICE Range keys_of_all_rows(Visibility const& visibility) {
  return {visibility.keys_of_row(visibility.n_q - 1).begin, visibility.keys_of_row(0).end};
}

/// What a warp has of all rows: of its lane 4g + t, maximum and sum of row g, and O of rows 2t and 2t + 1.
template <class Tile>
struct NarrowSums {
  using Element = typename Tile::Element;
  static constexpr int HeadDim = Tile::HeadDim, Chunks = Tile::Chunks, Units = Tile::Units, TileKeys = Tile::TileKeys;
  float O[HeadDim / 16][4], m, l;

  CUTE_DEVICE void clear() {
    m = -INFINITY, l = 0.f;
    CUTE_UNROLL
    for (int j = 0; j < HeadDim / 16; ++j) O[j][0] = O[j][1] = O[j][2] = O[j][3] = 0.f;
  }

  /// Adds the keys from `first_key` on, in `tile`. `query(c)` is chunk c + t of row g of Q, crossed; keys outside
  /// `seen_by_all` are masked.
  template <class Query>
  CUTE_DEVICE void add(typename Tile::Stage const& tile, Query const& query, NarrowParams const& params,
                       Visibility const& visibility, Range const& seen_by_all, int first_key) {
    constexpr unsigned kAll = 0xffffffffu;
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float const scale = params.scale;
    // S = Q K^T: of row g a lane has keys 2t, 2t + 1, and both + 8. Columns are counted in the order in which they lie
    // in the lanes' chunks of K. Words 0 and 1 of a chunk meet those of Q as rows g of a product of 16, words 2 and 3
    // as rows g + 8, so that each operand is read as it lies; the product's other halves mean nothing.
    float S[4];
    {
      float low[2][4] = {}, high[2][4] = {};
      CUTE_UNROLL
      for (int c = 0; c < Chunks; c += 4) {
        uint4 const x = query(c);
        uint32_t const q[4] = {x.x, x.y, x.z, x.w};
        CUTE_UNROLL
        for (int n = 0; n < 2; ++n) {
          uint4 const k = tile.k[n * 8 + g][key_place(g, c + t)];
          sm80::mma<Element>(low[n], q, k.x, k.y);
          sm80::mma<Element>(high[n], q, k.z, k.w);
        }
      }
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) S[e] = low[e / 2][e % 2] + high[e / 2][2 + e % 2];
    }
    if (first_key < seen_by_all.begin || first_key + TileKeys > seen_by_all.end) {
      Range const seen = visibility.keys_of_row(params.heads_per_kv.div(g));
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (!seen.contains(first_key + 2 * t + e % 2 + e / 2 * 8)) S[e] = -INFINITY;
      }
    }
    float const tile_max = scale * warp_max<4, 1>(fmaxf(fmaxf(S[0], S[1]), fmaxf(S[2], S[3])));
    float const m_new = fmaxf(m, tile_max), base = base_of(m_new);
    float const rescale = exp2_approx(m - base);
    m = m_new;
    CUTE_UNROLL
    for (int e = 0; e < 4; ++e) S[e] = exp2_approx(fmaf(S[e], scale, -base));
    l = fmaf(l, rescale, (S[0] + S[1]) + (S[2] + S[3]));
    uint32_t const P[2] = {pack<Element>(S[0], S[1]), pack<Element>(S[2], S[3])};
    if (__any_sync(kAll, rescale != 1.f)) {  // the maxima settle after a few tiles
      float const rescales[2] = {__shfl_sync(kAll, rescale, 8 * t), __shfl_sync(kAll, rescale, 8 * t + 4)};
      CUTE_UNROLL
      for (int j = 0; j < HeadDim / 16; ++j) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) O[j][e] *= rescales[e % 2];
      }
    }
    // O^T += V^T P^T: a lane has the columns of chunk g of V, and of those 8 on; columns 2j and 2j + 1 of a chunk are
    // rows g and g + 8 of a product.
    CUTE_UNROLL
    for (int c = 0; c < Chunks / 8; ++c) {
      uint4 v[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = tile.v[2 * t + i % 2 + i / 2 * 8][value_place(2 * t, c * 8 + g)];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        uint32_t const pairs[4] = {
            __byte_perm(word(v[0], j), word(v[1], j), 0x5410), __byte_perm(word(v[0], j), word(v[1], j), 0x7632),
            __byte_perm(word(v[2], j), word(v[3], j), 0x5410), __byte_perm(word(v[2], j), word(v[3], j), 0x7632)};
        sm80::mma<Element>(O[c * 4 + j], pairs, P[0], P[1]);
      }
    }
  }

  /// Writes O of the first `count` rows to `scratch`, where unit `unit` of row `row` lies at `scratch_place`, and each
  /// row's maximum and sum to `ml`.
  CUTE_DEVICE void put(float4* scratch, float2 (&ml)[Tile::Rows], int count) const {
    int const lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float const whole = warp_sum<4, 1>(l);
    if (t == 0) ml[g] = make_float2(m, whole);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = 2 * t + i;
      if (row < count) {
        CUTE_UNROLL
        for (int j = 0; j < HeadDim / 32; ++j) {
          scratch[scratch_place(row, j / 2 * 16 + g * 2 + j % 2)] =
              make_float4(O[2 * j][i], O[2 * j][2 + i], O[2 * j + 1][i], O[2 * j + 1][2 + i]);
        }
      }
    }
  }
  CUTE_DEVICE static int scratch_place(int row, int unit) { return row * Units + output_place(row, unit); }
};

}  // namespace cutlass_ext::decode

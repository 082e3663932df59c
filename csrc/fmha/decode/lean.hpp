// The decode kernel of the commonest call: a cache that is read and nothing more, at most eight packed query rows of
// fp16 or bf16, head_dim 64 or 128. It shares the work out and merges as fmha.hpp does, in less than half of the
// instructions (2,400 for 5,200): a kernel of a few microseconds finds them in device memory. Instantiated by
// csrc/kernels/decode_*.cu; launched through decode_dispatch.cu.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include <cute/arch/copy_sm80.hpp>
#include <cutlass/fast_math.h>

#include "../online_softmax.hpp"
#include "../sm80/mma.hpp"
#include "merge.hpp"
#include "partition.hpp"
#include "sequence.hpp"
#include "traits.hpp"

namespace cutlass_ext::decode {

/// What the kernel is told of a call, in the order in which it asks: 64 bytes of parameters come from memory at a time,
/// and each time a warp waits for them.
struct LeanParams {
  int const* seqused_k;        // null: every sequence has `keys`
  int const* start_positions;  // null: `start_pos`, or the end
  int n_q, keys, start_pos;
  StartPos start_pos_kind;
  int window_left, window_right, batch, groups;
  // Where the host knows the lengths: the tiles of a group, those of a sequence. Else 0.
  unsigned chunk = 0;
  cutlass::FastDivmod tiles;

  void const *k, *v;
  Strides k_stride, v_stride;
  int const* block_table;
  int64_t block_table_stride;
  int page_shift;

  unsigned group_heads, group_magic;
  float scale;  // from products to scores in the log2 domain
  void const* q;
  Strides q_stride;

  int heads_q, heads_kv;
  void* o;
  Strides o_stride;
  float *lse, *o_partial, *lse_partial;
  unsigned* counters;

  LeanParams(DecodeParams const& p, int tile_keys)
      : seqused_k(p.seqused_k),
        start_positions(p.start_positions),
        n_q(p.n_q),
        keys(p.seqused_k ? p.n_kv : std::min(p.cached, p.n_kv)),
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
        page_shift(p.page_shift),
        group_heads(p.group_heads),
        group_magic(p.group_magic),
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
    if (!all_alike(p)) return;
    unsigned const of_each = visibility_of(0).tiles_of(0, n_q, tile_keys).size();
    if (of_each == 0) return;
    tiles = cutlass::FastDivmod(of_each);
    chunk = Partition(batch * of_each, groups, kMinChunkKeys / tile_keys).chunk;
  }

  /// Reads the length of sequence `b`. Whatever the device holds stays in bounds.
  CUTE_HOST_DEVICE Visibility visibility_of(int b) const {
    auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
    int const len = seqused_k ? clamp(seqused_k[b], 0, keys) : keys;
    int const start = start_pos_kind == StartPos::Scalar     ? start_pos
                      : start_pos_kind == StartPos::PerBatch ? clamp(start_positions[b], -kMaxPosition, kMaxPosition)
                                                             : len - n_q;
    return {n_q, len, start, window_left, window_right};
  }
};

/// What a CTA knows of a sequence.
struct Segment {
  int len_kv, start_pos;
  unsigned first, end;  // its tiles, counted over the batch
  int shift;            // from those to its own
};

/// Four warps have tiles of 16 keys in turn, each in a ring of its own, and meet once a sequence.
template <int HeadDim_, class Element_>
struct LeanTraits {
  using Element = Element_;
  static constexpr int HeadDim = HeadDim_, Rows = kLeanRows;  // packed query rows: the narrow side of an mma.m16n8k16
  static constexpr int Warps = 4, Threads = 32 * Warps, Stages = 3, TileKeys = 16;
  static constexpr int Chunks = HeadDim / 8;  // of 16 bytes in a row
  static constexpr int Units = HeadDim / 4;   // float4 in a row of O
  static_assert(HeadDim == 64 || HeadDim == 128);
  static_assert(TileKeys == 1 << kLeanPageShift && kLeanBatch % 32 == 0);

  struct Stage {
    alignas(128) uint4 k[TileKeys][Chunks], v[TileKeys][Chunks];
  };
  struct SharedStorage {
    Stage ring[Warps][Stages];
    alignas(128) uint4 q[Rows][Chunks];
    float2 ml[Warps][Rows];
    int scratch_stage[Warps];
    Segment segments[kLeanBatch];
    unsigned chunk;        // tiles of a CTA
    int batch, batch_end;  // its sequences, with those between them that have no tile
    bool is_last;

    /// The CTA's next sequence behind `b`, or batch_end.
    CUTE_DEVICE int next(int b) const {
      do ++b;
      while (b < batch_end && segments[b].first == segments[b].end);
      return b;
    }
  };
};

CUTE_DEVICE uint32_t word(uint4 const& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

/// A warp's way through the tiles ahead of those that it works on.
template <class Traits>
struct LeanLoader {
  using Element = typename Traits::Element;
  LeanParams const& params;
  typename Traits::SharedStorage const& shared;
  int head, warp, lane;
  unsigned begin, end;  // the CTA's tiles
  int batch, tile = 0;  // of the tile asked for last; shared.batch_end: there is no other
  int tile_end = 0, asked = 0;
  int pages = 0, more_pages = 0;

  /// Starts the copy of the next tile, if there is one, and commits a group either way.
  CUTE_DEVICE void load(typename Traits::Stage& stage) {
    tile += Traits::Warps;
    ++asked;
    while (batch < shared.batch_end && tile >= tile_end) {
      batch = shared.next(batch);
      if (batch == shared.batch_end) break;
      Segment const& s = shared.segments[batch];
      tile = static_cast<int>(max(s.first, begin)) + s.shift + warp;
      tile_end = static_cast<int>(min(s.end, end)) + s.shift;
      asked = 0;
    }
    if (batch < shared.batch_end) {
      int page = batch, row = tile * Traits::TileKeys;
      int const keys = shared.segments[batch].len_kv - row;
      if (params.block_table) {
        page = page_of_tile();
        row &= (1 << params.page_shift) - 1;
      }
      copy<key_place>(stage.k, params.k, params.k_stride, page, row, keys);
      copy<value_place>(stage.v, params.v, params.v_stride, page, row, keys);
    }
    cute::cp_async_fence();
  }

 private:
  /// Eight lanes copy 128 bytes of a row; rows from `keys` on are zeros.
  template <int Place(int, int)>
  CUTE_DEVICE void copy(uint4 (&to)[Traits::TileKeys][Traits::Chunks], void const* cache, Strides const& stride,
                        int page, int row, int keys) const {
    int const key = lane / 8, chunk = lane % 8;
    Element const* from = static_cast<Element const*>(cache) + page * stride.batch + (row + key) * stride.row +
                          head * stride.head + chunk * 8;
    CUTE_UNROLL
    for (int i = 0; i < Traits::TileKeys; i += 4) {
      CUTE_UNROLL
      for (int panel = 0; panel < Traits::Chunks / 8; ++panel) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(from + i * stride.row + panel * 64),
            reinterpret_cast<cute::uint128_t&>(to[key + i][panel * 8 + Place(key + i, chunk)]), key + i < keys);
      }
    }
  }

  /// A tile lies in one page. The lanes hold those of the warp's next 32 tiles, and of the 32 behind.
  CUTE_DEVICE int page_of_tile() {
    if (asked % 32 == 0) {
      auto const entry_of = [&](int t) {
        return t < tile_end ? __ldg(params.block_table + batch * params.block_table_stride +
                                    (t * Traits::TileKeys >> params.page_shift))
                            : 0;
      };
      pages = asked == 0 ? entry_of(tile + lane * Traits::Warps) : more_pages;
      more_pages = entry_of(tile + (lane + 32) * Traits::Warps);
    }
    return __shfl_sync(0xffffffffu, pages, asked % 32);
  }
};

/// What of Q, O and lse belongs to key head `head`: packed row r is query row r / G of query head `head` * G + r % G.
template <class Traits>
struct LeanRows {
  using Element = typename Traits::Element;
  LeanParams const& params;
  unsigned head;

  CUTE_DEVICE unsigned count() const { return params.n_q * params.group_heads; }
  CUTE_DEVICE unsigned token(unsigned row) const {
    return params.group_magic == 0 ? row : __umulhi(row, params.group_magic);
  }
  CUTE_DEVICE unsigned query_head(unsigned row) const { return (head - token(row)) * params.group_heads + row; }

  /// The thread's chunk of Q.
  CUTE_DEVICE uint4 query(int batch) const {
    static_assert(Traits::Rows * Traits::Chunks <= Traits::Threads);
    unsigned const row = threadIdx.x / Traits::Chunks, chunk = threadIdx.x % Traits::Chunks;
    if (row >= count()) return make_uint4(0, 0, 0, 0);
    Element const* const from = static_cast<Element const*>(params.q) + batch * params.q_stride.batch +
                                token(row) * params.q_stride.row + query_head(row) * params.q_stride.head;
    return __ldg(reinterpret_cast<uint4 const*>(from) + chunk);
  }

  /// Normalises float4 `unit` of a row, sums relative to maximum `m`, and writes it, and with unit 0 the row's lse.
  CUTE_DEVICE void write(int batch, unsigned row, unsigned unit, float4 const& o, float m, float l) const {
    float const factor = l == 0.f ? 0.f : reciprocal(l);
    Element* const to = static_cast<Element*>(params.o) + batch * params.o_stride.batch +
                        token(row) * params.o_stride.row + query_head(row) * params.o_stride.head;
    reinterpret_cast<uint2*>(to)[unit] =
        make_uint2(pack<Element>(o.x * factor, o.y * factor), pack<Element>(o.z * factor, o.w * factor));
    if (unit == 0) {
      params.lse[(int64_t(batch) * params.heads_q + query_head(row)) * params.n_q + token(row)] =
          l == 0.f ? -INFINITY : (m + log2_approx(l)) * kLn2;
    }
  }
};

/// Where the parts of a sequence lie in the workspace.
template <class Traits>
struct LeanParts {
  LeanParams const& params;
  unsigned head;
  Sharing sharing;

  CUTE_DEVICE int64_t row(unsigned part, unsigned row) const {
    int64_t const cta = int64_t(sharing.first_group + part) * params.heads_kv + head;
    return (cta * kSlots + slot_of(sharing, part)) * Traits::Rows + row;
  }
  CUTE_DEVICE float4* o(unsigned part, unsigned row) const {
    return reinterpret_cast<float4*>(params.o_partial) + this->row(part, row) * Traits::Units;
  }
  CUTE_DEVICE float2& ml(unsigned part, unsigned row) const {
    return reinterpret_cast<float2*>(params.lse_partial)[this->row(part, row)];
  }

  /// Merges all parts in their order, a warp a row. A round of them is under way before the first is waited for.
  CUTE_DEVICE void merge(LeanRows<Traits> const& rows, int batch) const {
    constexpr unsigned Round = 16;
    unsigned const lane = threadIdx.x % 32, unit = lane % Traits::Units;
    for (unsigned row = threadIdx.x / 32; row < rows.count(); row += Traits::Warps) {
      int64_t const step = int64_t(params.heads_kv) * kSlots * Traits::Rows;  // from part 1 on
      float2 const *const first_ml = &ml(0, row), *const other_ml = &ml(1, row);
      auto const ml_of = [&](unsigned part) {
        return part < sharing.parts ? __ldcg(part == 0 ? first_ml : other_ml + (part - 1) * step)
                                    : make_float2(-INFINITY, 0.f);
      };
      float4 const *from = o(0, row) + unit, *next = o(1, row) + unit;
      float2 lanes_ml = ml_of(lane);
      float m = -INFINITY, base = 0.f, l = 0.f, weight = 0.f;
      float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
      CUTE_NO_UNROLL
      for (unsigned part0 = 0; part0 < sharing.parts; part0 += Round) {
        float4 x[Round];
        CUTE_UNROLL
        for (unsigned i = 0; i < Round; ++i) {
          x[i] = part0 + i < sharing.parts ? __ldcg(from) : make_float4(0.f, 0.f, 0.f, 0.f);
          from = next;
          next += step * Traits::Units;
        }
        if (part0 == 0) {
          m = lanes_ml.x;
          for (unsigned part = 32 + lane; part < sharing.parts; part += 32) m = fmaxf(m, ml_of(part).x);
          m = warp_max<32, 1>(m);
          base = m == -INFINITY ? 0.f : m;
        }
        if (part0 % 32 == 0) {
          if (part0 > 0) lanes_ml = ml_of(part0 + lane);
          weight = exp2_approx(lanes_ml.x - base);
          l = fmaf(lanes_ml.y, weight, l);
        }
        CUTE_UNROLL
        for (unsigned i = 0; i < Round; ++i) acc = fma(x[i], __shfl_sync(0xffffffffu, weight, (part0 + i) % 32), acc);
      }
      l = warp_sum<32, 1>(l);
      if (lane < Traits::Units) rows.write(batch, row, unit, acc, base, l);
    }
  }
};

/// Shares out the tiles of sequences whose lengths the host knows, by all threads.
template <class Traits>
CUTE_DEVICE void share_alike(LeanParams const& params, typename Traits::SharedStorage& shared, unsigned group) {
  unsigned const of_each = params.tiles.divisor, total = params.batch * of_each;
  unsigned const at = min(group * params.chunk, total), stop = min((group + 1) * params.chunk, total);
  Visibility const visibility = params.visibility_of(0);
  int const begin = params.tiles.div(at), behind = params.tiles.div(stop + of_each - 1);
  int const first_tile = visibility.tiles_of(0, params.n_q, Traits::TileKeys).begin;
  for (int b = begin + threadIdx.x; b < behind; b += Traits::Threads) {
    unsigned const first = b * of_each;
    shared.segments[b] = {visibility.len_kv, visibility.start_pos, first, first + of_each,
                          first_tile - static_cast<int>(first)};
  }
  if (threadIdx.x == 0) {
    shared.chunk = params.chunk;
    shared.batch = begin;
    shared.batch_end = behind;
  }
}

/// The same of others, by one warp, which reads their lengths: lane i has sequence b0 + i, and the batch's tiles are
/// counted from the first sequence on.
template <class Traits>
CUTE_DEVICE void share_by_lengths(LeanParams const& params, typename Traits::SharedStorage& shared, unsigned group) {
  constexpr unsigned kAll = 0xffffffffu;
  int const lane = threadIdx.x % 32;
  unsigned total = 0, first, end;
  int b0 = 0;
  while (true) {
    Visibility visibility{};
    Range tiles{0, 0};
    if (b0 + lane < params.batch) {
      visibility = params.visibility_of(b0 + lane);
      tiles = visibility.tiles_of(0, params.n_q, Traits::TileKeys);
    }
    end = tiles.size();
    if (params.batch > 1) {
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        unsigned const lower = __shfl_up_sync(kAll, end, step);
        if (lane >= step) end += lower;
      }
    }
    end += total;
    first = end - tiles.size();
    shared.segments[b0 + lane] = {visibility.len_kv, visibility.start_pos, first, end,
                                  tiles.begin - static_cast<int>(first)};
    total = __shfl_sync(kAll, end, min(params.batch - 1 - b0, 31));
    if (b0 + 32 >= params.batch) break;
    b0 += 32;
  }
  Partition const partition(total, params.groups, kMinChunkKeys / Traits::TileKeys);
  unsigned const at = partition.begin_of(group), stop = partition.end_of(group);
  // The CTA's sequences are searched for from the last 32 down, which the lanes still have.
  int begin = params.batch, behind = params.batch;
  while (at < stop) {
    unsigned const here = __ballot_sync(kAll, b0 + lane < params.batch && end > at),
                   later = __ballot_sync(kAll, b0 + lane < params.batch && first >= stop);
    if (later) behind = b0 + __ffs(later) - 1;
    if (here) begin = b0 + __ffs(here) - 1;
    if (b0 == 0 || (here & 1) == 0) break;
    b0 -= 32;
    first = shared.segments[b0 + lane].first;
    end = shared.segments[b0 + lane].end;
  }
  if (lane == 0) {
    shared.chunk = partition.chunk;
    shared.batch = begin;
    shared.batch_end = behind;
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 2) lean_kernel(__grid_constant__ LeanParams const params) {
  using Element = typename Traits::Element;
  constexpr int HeadDim = Traits::HeadDim, Chunks = Traits::Chunks, Units = Traits::Units, Warps = Traits::Warps,
                Stages = Traits::Stages, TileKeys = Traits::TileKeys;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const g = lane / 4, t = lane % 4;  // the lane's place in the fragments of a product
  unsigned const head = blockIdx.x, group = blockIdx.y;

  if (params.chunk > 0) {
    share_alike<Traits>(params, shared, group);
  } else if (warp == 0) {
    share_by_lengths<Traits>(params, shared, group);
  }
  __syncthreads();

  unsigned const chunk = shared.chunk;
  int const batch_end = shared.batch_end;
  LeanRows<Traits> const rows{params, head};
  LeanLoader<Traits> loader{params, shared,        int(head),           warp,
                            lane,   group * chunk, (group + 1) * chunk, shared.batch - 1};
  auto& ring = shared.ring[warp];
  float const scale = params.scale;

  int const before_all = shared.batch - 1;
  int batch = before_all;  // the sequence in work
  Visibility visibility{};
  Range seen_by_all{0, 0};
  Sharing sharing(Partition(0, 1, 1), 0, 0);
  uint4 query{};
  float O[HeadDim / 16][4], m = -INFINITY, l = 0.f;  // m and l of row g; O of rows 2t and 2t + 1
  int coming = 0, coming_tile = 0;                   // the tile that was asked for before the last
  // A turn asks for tile i of the warp's and works on tile i - 2.
  for (int turn = 0, stage = 0;; ++turn) {
    int const tile = coming_tile;
    coming = loader.batch, coming_tile = loader.tile;
    loader.load(ring[stage]);
    stage = stage + 1 == Stages ? 0 : stage + 1;  // that of tile i - 2, free for tile i + 1 after it
    if (turn == 0) {
      if (shared.batch < batch_end) query = rows.query(shared.batch);
      // Has the parameters of the end come from memory now, beside the keys.
      asm volatile("" ::"l"(params.o), "l"(params.o_partial), "l"(params.counters));
      continue;
    }
    if (turn > 1) {
      auto const& now = ring[stage];
      cute::cp_async_wait<Stages - 1>();
      __syncwarp();

      // S = Q K^T: of row g a lane has keys 2t, 2t + 1, and both + 8. Columns are counted in the order in which they
      // lie in the lanes' chunks of K. Words 0 and 1 of a chunk meet those of Q as rows g of a product of 16, words 2
      // and 3 as rows g + 8, so that each operand is read as it lies; the product's other halves mean nothing.
      float S[4];
      {
        float low[2][4] = {}, high[2][4] = {};
        CUTE_UNROLL
        for (int c = 0; c < Chunks; c += 4) {
          uint4 const x = shared.q[g][key_place(g, c + t)];
          uint32_t const q[4] = {x.x, x.y, x.z, x.w};
          CUTE_UNROLL
          for (int n = 0; n < 2; ++n) {
            uint4 const k = now.k[n * 8 + g][key_place(g, c + t)];
            sm80::mma<Element>(low[n], q, k.x, k.y);
            sm80::mma<Element>(high[n], q, k.z, k.w);
          }
        }
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) S[e] = low[e / 2][e % 2] + high[e / 2][2 + e % 2];
      }
      int const first_key = tile * TileKeys;
      if (first_key < seen_by_all.begin || first_key + TileKeys > seen_by_all.end) {
        Range const seen = visibility.keys_of_row(rows.token(g));
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (!seen.contains(first_key + 2 * t + e % 2 + e / 2 * 8)) S[e] = -INFINITY;
        }
      }
      float const tile_max = scale * warp_max<4, 1>(fmaxf(fmaxf(S[0], S[1]), fmaxf(S[2], S[3])));
      float const m_new = fmaxf(m, tile_max), base = m_new == -INFINITY ? 0.f : m_new;
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
        for (int i = 0; i < 4; ++i) v[i] = now.v[2 * t + i % 2 + i / 2 * 8][value_place(2 * t, c * 8 + g)];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          uint32_t const pairs[4] = {
              __byte_perm(word(v[0], j), word(v[1], j), 0x5410), __byte_perm(word(v[0], j), word(v[1], j), 0x7632),
              __byte_perm(word(v[2], j), word(v[3], j), 0x5410), __byte_perm(word(v[2], j), word(v[3], j), 0x7632)};
          sm80::mma<Element>(O[c * 4 + j], pairs, P[0], P[1]);
        }
      }
    }

    // Where the warp's next tile belongs to another sequence, all warps end the one in work, and those before it.
    while (batch != coming) {
      int const next = shared.next(batch);
      if (batch != before_all) {
        if (next < batch_end) query = rows.query(next);
        LeanParts<Traits> const parts{params, head, sharing};
        auto const scratch_of = [&](int w, int s) { return reinterpret_cast<float4*>(&shared.ring[w][s]); };
        l = warp_sum<4, 1>(l);
        __syncwarp();  // V of the last tile has been read where O is now written
        if (t == 0) shared.ml[warp][g] = make_float2(m, l);
        if (lane == 0) shared.scratch_stage[warp] = stage;
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          unsigned const row = 2 * t + i;
          if (row < rows.count()) {
            CUTE_UNROLL
            for (int j = 0; j < HeadDim / 32; ++j) {
              scratch_of(warp, stage)[row * Units + output_place(row, j / 2 * 16 + g * 2 + j % 2)] =
                  make_float4(O[2 * j][i], O[2 * j][2 + i], O[2 * j + 1][i], O[2 * j + 1][2 + i]);
            }
          }
        }
        __syncthreads();
        for (unsigned index = threadIdx.x; index < rows.count() * Units; index += Traits::Threads) {
          unsigned const row = index / Units, unit = index % Units;
          float m_all = -INFINITY, l_all = 0.f;
          CUTE_UNROLL
          for (int w = 0; w < Warps; ++w) m_all = fmaxf(m_all, shared.ml[w][row].x);
          float const base = m_all == -INFINITY ? 0.f : m_all;
          float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
          CUTE_UNROLL
          for (int w = 0; w < Warps; ++w) {
            float2 const ml = shared.ml[w][row];
            float const weight = exp2_approx(ml.x - base);
            l_all = fmaf(ml.y, weight, l_all);
            acc = fma(scratch_of(w, shared.scratch_stage[w])[row * Units + output_place(row, unit)], weight, acc);
          }
          if (sharing.parts == 1) {
            rows.write(batch, row, unit, acc, base, l_all);
          } else {
            unsigned const part = group - sharing.first_group;
            parts.o(part, row)[unit] = acc;
            if (unit == 0) parts.ml(part, row) = make_float2(m_all, l_all);
          }
        }
        if (sharing.parts > 1) {
          __syncthreads();
          if (threadIdx.x == 0) {
            shared.is_last =
                count_up(params.counters + batch * params.heads_kv + head, sharing.parts) == sharing.parts - 1;
          }
          __syncthreads();
          if (shared.is_last) parts.merge(rows, batch);
        }
      }
      batch = next;
      if (batch == batch_end) break;
      __syncthreads();  // nobody reads the last sequence's Q and O any more
      // Words 1 and 2 of Q's chunks change places, see above.
      if (threadIdx.x < Traits::Rows * Chunks) {
        unsigned const row = threadIdx.x / Chunks;
        shared.q[row][key_place(row, threadIdx.x % Chunks)] = make_uint4(query.x, query.z, query.y, query.w);
      }
      __syncthreads();
      Segment const& segment = shared.segments[batch];
      visibility = {params.n_q, segment.len_kv, segment.start_pos, params.window_left, params.window_right};
      seen_by_all = {visibility.keys_of_row(params.n_q - 1).begin, visibility.keys_of_row(0).end};
      sharing = Sharing(Partition(0, 1, chunk), segment.first, segment.end - segment.first);
      m = -INFINITY;
      l = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < HeadDim / 16; ++j) O[j][0] = O[j][1] = O[j][2] = O[j][3] = 0.f;
    }
    if (batch == batch_end) break;
    __syncwarp();  // the stage that the warp was done with may be copied to
  }
  cute::cp_async_wait<0>();

  // Sequences of which no query row sees a key are nobody's work.
  for (int b = params.chunk > 0 ? params.batch : group; b < params.batch; b += params.groups) {
    if (shared.segments[b].first < shared.segments[b].end) continue;
    for (unsigned index = threadIdx.x; index < rows.count() * Units; index += Traits::Threads)
      rows.write(b, index / Units, index % Units, make_float4(0.f, 0.f, 0.f, 0.f), 0.f, 0.f);
  }
}

}  // namespace cutlass_ext::decode

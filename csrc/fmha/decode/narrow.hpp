// The decode kernel of the commonest call: a cache that is read and nothing more, at most eight packed query rows of
// fp16 or bf16, head_dim 64 or 128. It shares the work out and merges as fmha.hpp does, in little more than half of
// the instructions (2,400 for 4,300): a kernel of a few microseconds finds them in device memory. Instantiated by
// csrc/kernels/decode_*.cu; called where cluster.hpp does not serve.
#pragma once

#include "narrow_tile.hpp"
#include "parts.hpp"

namespace cutlass_ext::decode {

/// What a CTA knows of a sequence.
struct Segment {
  int len_kv, start_pos;
  unsigned first, end;  // its tiles, counted over the batch
  int shift;            // from those to its own
};

/// The query rows of its sequences.
struct AlikeRows {
  CUTE_DEVICE void set_rows(int, Sequence const&) {}
  CUTE_DEVICE QueryRows rows_of(NarrowParams const& params, int b) const { return {b, 0, params.n_q}; }
};

/// The same where calls are packed.
struct PackedRows {
  int row0[kNarrowBatch], count[kNarrowBatch];

  CUTE_DEVICE void set_rows(int b, Sequence const& s) { row0[b] = s.q_row0, count[b] = s.visibility.n_q; }
  CUTE_DEVICE QueryRows rows_of(NarrowParams const&, int b) const { return {0, row0[b], count[b]}; }
};

/// Four warps have tiles of 16 keys in turn, each in a ring of its own, and meet once a sequence. `Params` is
/// NarrowParams or PackedNarrowParams.
template <int HeadDim, class Element, class Params_>
struct NarrowTraits : NarrowTile<HeadDim, Element> {
  using Params = Params_;
  using Tile = NarrowTile<HeadDim, Element>;
  static constexpr int Warps = 4, Threads = 32 * Warps, Stages = 3;
  static_assert(kNarrowBatch % 32 == 0);

  struct SharedStorage : std::conditional_t<Params::packed(), PackedRows, AlikeRows> {
    typename Tile::Stage ring[Warps][Stages];
    alignas(128) uint4 q[Tile::Rows][Tile::Chunks];
    float2 ml[Warps][Tile::Rows];
    int scratch_stage[Warps];
    Segment segments[kNarrowBatch];
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

/// A warp's way through the tiles ahead of those that it works on.
template <class Traits>
struct NarrowLoader {
  NarrowParams const& params;
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
      if (params.paged()) {
        page = page_of_tile();
        row = row_in_page(params, row);
      }
      copy_tile<typename Traits::Tile>(stage, params, head, page, row, keys);
    }
    cute::cp_async_fence();
  }

 private:
  /// A tile lies in one page. The lanes hold those of the warp's next 32 tiles, and of the 32 behind.
  CUTE_DEVICE int page_of_tile() {
    if (asked % 32 == 0) {
      auto const entry_of = [&](int t) {
        return t < tile_end ? __ldg(params.pages_of(batch) + params.page_rows.div(t * Traits::TileKeys)) : 0;
      };
      pages = asked == 0 ? entry_of(tile + lane * Traits::Warps) : more_pages;
      more_pages = entry_of(tile + (lane + 32) * Traits::Warps);
    }
    return nearest_page(__shfl_sync(0xffffffffu, pages, asked % 32), params.pages);
  }
};

/// Shares out the tiles of sequences whose lengths the host knows, by all threads.
template <class Traits>
CUTE_DEVICE void share_alike(NarrowParams const& params, typename Traits::SharedStorage& shared, unsigned group) {
  unsigned const of_each = params.tiles.divisor, total = params.batch * of_each;
  unsigned const at = min(group * params.chunk, total), stop = min((group + 1) * params.chunk, total);
  Visibility const visibility = sequence_of(params.lengths(), 0).visibility;
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
CUTE_DEVICE void share_by_lengths(typename Traits::Params const& params, typename Traits::SharedStorage& shared,
                                  unsigned group) {
  constexpr unsigned kAll = 0xffffffffu;
  int const lane = threadIdx.x % 32;
  unsigned total = 0, first, end;
  int b0 = 0;
  while (true) {
    Sequence sequence{};
    Visibility const& visibility = sequence.visibility;
    Range tiles{0, 0};
    if (b0 + lane < params.batch) {
      sequence = sequence_of(params.lengths(), b0 + lane);
      if (!params.packed() || visibility.n_q > 0) tiles = visibility.tiles_of(0, params.n_q, Traits::TileKeys);
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
    shared.set_rows(b0 + lane, sequence);
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
__global__ void __launch_bounds__(Traits::Threads, 2)
    narrow_kernel(__grid_constant__ typename Traits::Params const params) {
  using Tile = typename Traits::Tile;
  using Sums = NarrowSums<Tile>;
  constexpr int Chunks = Tile::Chunks, Units = Tile::Units, Warps = Traits::Warps, Stages = Traits::Stages;
  static_assert(Tile::Rows * Chunks <= Traits::Threads);
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned const q_row = threadIdx.x / Chunks, q_chunk = threadIdx.x % Chunks;  // what the thread copies of Q
  unsigned const head = blockIdx.x, group = blockIdx.y;

  if (!params.packed() && params.chunk > 0) {
    share_alike<Traits>(params, shared, group);
  } else if (warp == 0) {
    share_by_lengths<Traits>(params, shared, group);
  }
  __syncthreads();

  unsigned const chunk = shared.chunk;
  int const batch_end = shared.batch_end;
  NarrowLoader<Traits> loader{params, shared,        int(head),           warp,
                              lane,   group * chunk, (group + 1) * chunk, shared.batch - 1};
  auto& ring = shared.ring[warp];
  auto const rows_of = [&](int b) { return shared.rows_of(params, b); };
  auto const query_of = [&](int b) { return crossed(query_chunk<Tile>(params, head, rows_of(b), q_row, q_chunk)); };
  auto const write = [&](QueryRows const& queries, int row, int unit, UnitPart const& x) {
    using Element = typename Traits::Element;
    write_unit<Element>(params, queries, PackedRow(params, head, row), unit, x.o, finish<Element>(x.row));
  };

  int const before_all = shared.batch - 1;
  int batch = before_all;  // the sequence in work
  Visibility visibility{};
  Range seen_by_all{0, 0};
  Sharing sharing(Partition(0, 1, 1), 0, 0);
  uint4 query{};
  Sums sums;
  sums.clear();
  int coming = 0, coming_tile = 0;  // the tile that was asked for before the last
  // A turn asks for tile i of the warp's and works on tile i - 2.
  for (int turn = 0, stage = 0;; ++turn) {
    int const tile = coming_tile;
    coming = loader.batch, coming_tile = loader.tile;
    loader.load(ring[stage]);
    stage = stage + 1 == Stages ? 0 : stage + 1;  // that of tile i - 2, free for tile i + 1 after it
    if (turn == 0) {
      if (shared.batch < batch_end) query = query_of(shared.batch);
      // Has the parameters of the end come from memory now, beside the keys.
      asm volatile("" ::"l"(params.o), "l"(params.o_partial), "l"(params.counters));
      continue;
    }
    if (turn > 1) {
      cute::cp_async_wait<Stages - 1>();
      __syncwarp();
      auto const chunk_of = [&](int c) { return shared.q[lane / 4][key_place(lane / 4, c + lane % 4)]; };
      sums.add(ring[stage], chunk_of, params, visibility, seen_by_all, tile * Tile::TileKeys);
    }

    // Where the warp's next tile belongs to another sequence, all warps end the one in work, and those before it.
    while (batch != coming) {
      int const next = shared.next(batch);
      if (batch != before_all) {
        if (next < batch_end) query = query_of(next);
        QueryRows const queries = rows_of(batch);
        int const rows = packed_rows(params, queries);
        Partials const partials(params, int64_t(sharing.first_group) * params.heads_kv + head, params.heads_kv,
                                kPartialsOfCta, sharing.begins_inside, Tile::Rows, Units);
        auto const scratch_of = [&](int w, int s) { return reinterpret_cast<float4*>(&shared.ring[w][s]); };
        __syncwarp();  // V of the last tile has been read where O is now written
        sums.put(scratch_of(warp, stage), shared.ml[warp], rows);
        if (lane == 0) shared.scratch_stage[warp] = stage;
        __syncthreads();
        end_part<Warps, Units>(
            partials, group - sharing.first_group, sharing.parts, params.counters + batch * params.heads_kv + head,
            shared.is_last, rows,
            [&](int row, int unit) {
              return merge_units<Warps>(
                  Warps, [&](int w) { return shared.ml[w][row]; },
                  [&](int w) { return scratch_of(w, shared.scratch_stage[w])[Sums::scratch_place(row, unit)]; });
            },
            [&](int row, int unit, UnitPart const& x) { write(queries, row, unit, x); });
      }
      batch = next;
      if (batch == batch_end) break;
      __syncthreads();  // nobody reads the last sequence's Q and O any more
      if (q_row < Tile::Rows) shared.q[q_row][key_place(q_row, q_chunk)] = query;
      __syncthreads();
      Segment const& segment = shared.segments[batch];
      visibility = {rows_of(batch).count, segment.len_kv, segment.start_pos, params.window_left, params.window_right};
      seen_by_all = keys_of_all_rows(visibility);
      sharing = Sharing(Partition(0, 1, chunk), segment.first, segment.end - segment.first);
      sums.clear();
    }
    if (batch == batch_end) break;
    __syncwarp();  // the stage that the warp was done with may be copied to
  }
  cute::cp_async_wait<0>();

  // Sequences of which no query row sees a key are nobody's work.
  for (int b = params.chunk > 0 ? params.batch : group; b < params.batch; b += params.groups) {
    if (shared.segments[b].first < shared.segments[b].end) continue;
    QueryRows const queries = rows_of(b);
    CUTE_NO_UNROLL
    for (unsigned index = threadIdx.x; index < packed_rows(params, queries) * Units; index += Traits::Threads)
      write(queries, index / Units, index % Units, {});
  }
}

/// The kernel of one head_dim, of packed calls alone or of others: at 128 one for both has 2,671 instructions, where
/// these have 2,400 and 2,564.
template <int HeadDim, class Element, bool Packed>
struct NarrowDecode {
  using Traits = NarrowTraits<HeadDim, Element, std::conditional_t<Packed, PackedNarrowParams, NarrowParams>>;
  static constexpr char const* kFamily = "sm80";
  static constexpr Kind kKind = Kind::Narrow;
  static constexpr Features kTakes = feature::KeyLengths | feature::StartPositions | feature::FewerKeys |
                                     feature::Pages | (Packed ? feature::Packed : 0);
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &narrow_kernel<Traits>;

  static bool takes_shape(Params const& p) {
    return is_narrow(p, HeadDim) && p.batch <= kNarrowBatch && p.packed() == Packed;
  }
};

}  // namespace cutlass_ext::decode

// What a CTA works on: a tile of one side of the scores at a time, and how its warps pass from one to the next. Used by
// all of Hopper's backward kernels.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/barrier.h>

#include "../../score.hpp"
#include "../../sm90/pipeline.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../params.hpp"
#include "sections.hpp"

namespace cutlass_ext::sm90 {

/// Tiles of rows that there is room for in shared memory, those of all query heads of a KV head; and how many a head
/// has.
constexpr int kMostHeldTiles = 8;
CUTE_HOST_DEVICE int tiles_of_head(int rows, int block) { return (rows + block - 1) / block; }

/// What pairs of a tile have, of its first head, where kernels ask for it.
template <bool Asked>
struct PairsOfTile {
  PairMod pairs;
  bool bias_in_chunks;  // whether eight keys of a row are a vector of 16 bytes, which is copied ahead
  float bias_unit;      // of the bias in scores
};
template <>
struct PairsOfTile<false> {};

/// Tiles of rows that the next keys of a head see, and those before, which sums of dQ come from and go to; and the CTAs
/// of the cluster that have these keys. In a launch of mirrored tiles they have every other head the other way round,
/// so that each has keys that many rows see after keys that few do.
template <bool Asked>
struct Neighbours {
  Range behind{0, 0}, before{0, 0};
  bool way;  // 1: the next keys are the CTA's before
  CUTE_DEVICE uint32_t rank_behind() const { return cute::block_rank_in_cluster() + (way ? -1 : 1); }
  CUTE_DEVICE uint32_t rank_before() const { return cute::block_rank_in_cluster() + (way ? 1 : -1); }
};
template <>
struct Neighbours<false> {};

/// Whether a map has the bit of a tile; null: it has all.
CUTE_DEVICE bool is_in(uint32_t const* map, int tile) { return !map || __ldg(map + tile / 32) >> tile % 32 & 1; }

/// What a CTA works on at a time: a tile of one side, and the tiles of the other that it goes through, once for each
/// head.
template <class Traits>
struct GradientTile : PairsOfTile<Traits::Pairs && !Traits::IsPlain>, Neighbours<Traits::DqThroughCluster> {
  WorkItem work;  // row0: first row in hand
  Sequence sequence;
  Visibility view;  // from the side in hand: what is held are its rows, what is streamed its keys
  Range tiles, unmasked;
  bool is_empty;         // packed: the launch counts the tiles of the longest sequence for each
  bool descends;         // whether the tiles pass by from the last one on
  bool last_keys_first;  // whether tiles of later keys add to dQ before (dq_semaphore.hpp)
  int heads;             // query heads that are gone through
  int head_q, head_kv;
  int held_row0, streamed_row0;  // rows of the tensors that hold the side's first
  int64_t sums_row0;             // of the sums of dQ, the first of the first head
  int64_t split_row0 = -1;       // of the sums of splits, the first of the tile's; -1: no other CTA has a part of it
  int section = 0;               // of the launch's, where it goes by sections
  int seen_tiles;                // turns, where a mask hides tiles
  uint32_t held_phase = 0;       // of the barriers of the tile in hand

  GradientTile() = default;
  /// Tile `index` of the launch, or a split of it, or its mirror image.
  CUTE_DEVICE GradientTile(BackwardParams const& params, SharedTiles::Item item, bool is_image = false)
      : work(params.scheduler(item.index)), sequence(sequence_of(params, work.batch)) {
    last_keys_first = Traits::InOrder && params.comes_from_the_end(item.index);
    if constexpr (Traits::AnyOrder) work.row0 = params.row0_of(item.index, work.row0, is_image);
    is_empty = work.row0 >= (Traits::OfKeys ? sequence.visibility.len_kv : sequence.visibility.n_q);
    descends = Traits::AnyOrder &&
               (params.is_mirrored ? !is_image : params.by_rows && !last_keys_first && !sequence.visibility.sees_all());
    Visibility const& visibility = sequence.visibility;
    if constexpr (Traits::OfKeys) {
      view = visibility.transposed();
      tiles = visibility.row_tiles_of(work.row0, Traits::B_c, Traits::B_r);
      if constexpr (Traits::Cluster > 1) work.row0 += cute::block_rank_in_cluster() * Traits::Held;
      unmasked = visibility.unmasked_row_tiles_of(work.row0, Traits::Held, Traits::B_r);
      heads = params.heads_per_kv.divisor;
      head_q = work.head * heads, head_kv = work.head;
      held_row0 = sequence.k_row0, streamed_row0 = sequence.q_row0;
    } else {
      view = visibility;
      tiles = visibility.tiles_of(work.row0, Traits::B_r, Traits::B_c);
      unmasked = visibility.unmasked_tiles_of(work.row0, Traits::B_r, Traits::B_c);
      heads = 1;
      head_q = work.head, head_kv = params.heads_per_kv.div(work.head);
      held_row0 = sequence.q_row0, streamed_row0 = sequence.k_row0;
    }
    if constexpr (Traits::Splits) {
      if (item.split >= 0) {
        Range const own = params.shared_tiles.turns(item.split, heads, &tiles);
        head_q += own.begin, heads = own.size();
        int const rank = Traits::Cluster > 1 ? cute::block_rank_in_cluster() : 0, own_row0 = rank * Traits::Held;
        split_row0 = Traits::split_sums(params).first_row(item, is_image, sequence, work.batch, work.head,
                                                          work.row0 - own_row0) +
                     own_row0;
      }
    }
    if constexpr (Traits::DqThroughCluster) {
      this->way = is_image;
      int const next = work.row0 + Traits::Held;
      if (work.row0 > 0) this->before = row_tiles_of(work.row0 - Traits::Held);
      if (next < keys_of_launch(params)) this->behind = row_tiles_of(next);
    } else if constexpr (Traits::AccumulatesDq && !Traits::DqInShared) {
      sums_row0 = StatisticsRows(params).first(params, sequence, work.batch, head_q);
    }
    if constexpr (Traits::FusesPostprocess) {
      if (params.sections) {
        section = params.scheduler.section_of(item.index);
        int const of_section = params.scheduler.pairs_a_section(),
                  pair = work.batch * params.heads_kv + work.head - section * of_section;
        sums_row0 = (int64_t(section % kSectionsOfSums) * of_section + pair) * heads * params.rows_a_head;
      }
    }
    if constexpr (Traits::Pairs && !Traits::IsPlain) {
      if (!has_pairs(params)) return;
      this->pairs = PairMod(specialised<Traits::Mods>(params), sequence, work.batch, head_q);
      if constexpr (Traits::Mods & feature::Bias) {
        this->bias_in_chunks =
            this->pairs.bias_in_chunks(params, heads) && !(Traits::OfKeys && bias_of(params).row == 0);
        this->bias_unit = ScoreMod::changes(params) ? kLog2e : 1.f / ScoreMod::gradient_scale(params);
      }
    }
  }

  /// Keys of the sequence for which the launch has tiles: a packed one may have more than its caller says.
  CUTE_DEVICE int keys_of_launch(BackwardParams const& params) const { return min(view.n_q, params.n_kv); }
  /// Tiles of rows that the keys of a tile see.
  CUTE_DEVICE Range row_tiles_of(int row0) const {
    return sequence.visibility.row_tiles_of(row0, Traits::B_c, Traits::B_r);
  }
  /// In hand that exist; of a cluster's last tile the second CTA may have none.
  CUTE_DEVICE int rows() const { return view.n_q - work.row0; }
  /// The thread's first row in hand, counted in the sequence, of which the second lies 8 further.
  CUTE_DEVICE int first_row(GradientThread const& thread) const {
    return work.row0 + thread.warp_row % Traits::Held + thread.lane / 4;
  }
  // Over keys, whether the tile is a head's first, and whether it is its last.
  CUTE_DEVICE bool begins_head() const { return work.row0 == 0; }
  CUTE_DEVICE bool ends_head(BackwardParams const& params) const {
    return keys_of_launch(params) - work.row0 <= Traits::Held;
  }
  CUTE_DEVICE int turns(BackwardParams const& params) const {
    return Traits::SkipsTiles && params.tile_map ? seen_tiles : heads * tiles.size();
  }

  /// Bits of the tiles that are gone through for a head, by this tile or by tile `held`; null: all are seen.
  CUTE_DEVICE uint32_t const* map(BackwardParams const& params, int head, TileMap::Plane plane, int held) const {
    if (!Traits::SkipsTiles || !params.tile_map) return nullptr;
    TileMap const of(params, Traits::OfKeys, Traits::Held, Traits::Step);
    return params.tile_map + of.first(work.batch, head, held, plane);
  }
  CUTE_DEVICE uint32_t const* map(BackwardParams const& params, int head, TileMap::Plane plane) const {
    return map(params, head, plane, work.row0 / Traits::Held);
  }
  /// Counts them, a warp for all.
  CUTE_DEVICE void count_seen(BackwardParams const& params) {
    if (!params.tile_map) return;
    int count = 0;
    for (int g = 0; g < heads; ++g) {
      uint32_t const* const seen = map(params, head_q + g, TileMap::Seen);
      for (int t = tiles.begin + threadIdx.x % 32; t < tiles.end; t += 32) count += is_in(seen, t);
    }
    count = __reduce_add_sync(0xffffffffu, count);
    if (threadIdx.x % 32 == 0) seen_tiles = count;
    __syncwarp();
  }
};

/// Where the sums of dQ of a streamed tile begin.
template <class Traits>
CUTE_DEVICE float* sums_of_tile(BackwardParams const& params, GradientTile<Traits> const& tile, int head, int t) {
  int64_t const row = tile.sums_row0 + int64_t(head - tile.head_q) * params.rows_a_head + t * Traits::Step;
  return params.dq_sums + row * Traits::HeadDim;
}

/// Where a CTA stands in the tiles that pass by the one in hand: all of a head from the first on, head after head; or,
/// of mirrored tiles and where they add to dQ in order, one of each head, from the last rows on or up to them. `tiles`
/// are the tile's, which whoever goes through them has in registers.
template <class Traits>
struct StreamIterator {
  int at, head;

  CUTE_DEVICE StreamIterator(GradientTile<Traits> const& tile, Range const& tiles)
      : at(Traits::AnyOrder && tile.descends ? 1 - tiles.end : tiles.begin), head(tile.head_q) {}

  /// The tile's number: from the last on it is counted below zero, so that one register has the way, too.
  CUTE_DEVICE int t() const { return Traits::AnyOrder ? abs(at) : at; }
  CUTE_DEVICE static bool by_rows(BackwardParams const& params) { return Traits::AnyOrder && params.by_rows; }
  /// To the next tile; how many rows of a workspace of query rows lie between both.
  CUTE_DEVICE int advance(BackwardParams const& params, GradientTile<Traits> const& tile, Range const& tiles) {
    if (!by_rows(params)) {
      if (++at < tiles.end) return Traits::Step;
      at = tiles.begin, ++head;
      return params.rows_a_head - (tiles.size() - 1) * Traits::Step;
    }
    if (++head < tile.head_q + tile.heads) return params.rows_a_head;
    int const before = t();
    head = tile.head_q, ++at;
    return (t() - before) * Traits::Step - (tile.heads - 1) * params.rows_a_head;
  }
  /// To where the first tile is the next one, from it; what `advance` says then.
  CUTE_DEVICE int step_back(BackwardParams const& params) {
    by_rows(params) ? --head : --at;
    return by_rows(params) ? params.rows_a_head : Traits::Step;
  }
};

/// A tile that passes by the one in hand: of which head, how many are left with it, whether a mask hides some of its
/// pairs, and how many rows of workspace lie between the first head's first and it.
struct StreamStep {
  int head, t, left;
  bool mixed;
  int rows;
};

/// Has each of them copied, in turn: of those that a mask may hide, the ones that it does not.
template <class Traits, class Copy>
CUTE_DEVICE void for_each_step(BackwardParams const& params, GradientTile<Traits> const& tile, Copy const& copy) {
  int left = tile.turns(params);
  if constexpr (!Traits::SkipsTiles) {
    StreamIterator<Traits> order(tile, tile.tiles);
    for (int rows = order.t() * Traits::Step; left > 0; --left, rows += order.advance(params, tile, tile.tiles))
      copy(StreamStep{order.head, order.t(), left, false, rows});
  } else {
    for (int head = tile.head_q; left > 0; ++head) {
      uint32_t const *const seen = tile.map(params, head, TileMap::Seen), *const whole =
                                                                              tile.map(params, head, TileMap::Whole);
      for (int t = tile.tiles.begin; t < tile.tiles.end; ++t) {
        if (!is_in(seen, t)) continue;
        int const rows = (head - tile.head_q) * params.rows_a_head + t * Traits::Step;
        copy(StreamStep{head, t, left--, !is_in(whole, t), rows});
      }
    }
  }
}

/// The CTA's tiles in turn, as all warps but the one that takes them see them.
template <class Traits>
struct TileReader {
  typename Traits::SharedStorage& shared;
  RingPosition<Traits::TilesKnown> at{};

  /// The current tile; null: there is none.
  CUTE_DEVICE GradientTile<Traits> const* here() const {
    if constexpr (Traits::Persistent) {
      shared.tile_full[at.stage].wait_for(at.phase);
      if (shared.is_last[at.stage]) return nullptr;
    }
    return &shared.tiles[at.stage];
  }
  /// By a whole warp, once it has read the current tile for the last time; whether there may be another.
  CUTE_DEVICE bool release() {
    if constexpr (Traits::Persistent) {
      __syncwarp();
      if (elect_one_sync()) shared.tile_empty[at.stage].arrive();
      at.advance();
    }
    return Traits::Persistent;
  }
  /// By a whole warp: `work_on` each of them.
  template <class WorkOn>
  CUTE_DEVICE __attribute__((always_inline)) void for_each(WorkOn&& work_on) {
    do {
      auto const* const tile = here();
      if (!tile) break;
      work_on(*tile);
    } while (release());
  }
};

/// Takes the CTA's tiles: the first by its index, unless others wait for what tiles add, then the next one that nobody
/// has; or, where sums of dQ are passed on, those of every so many heads. By a whole warp.
template <class Traits>
struct TileScheduler {
  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  RingPosition<Traits::TilesKnown> at{};
  bool took_first = false, goes_on = false;  // with a head
  bool at_image = false;                     // of a tile, or at one of a head whose tiles are the other way round
  unsigned index = 0, next_head = 0;         // of the tile, and of the first one of the next head
  uint32_t held_phase = 0, rows_phase = 0, index_phase = 0;

  /// What no CTA has: a tile, or a head. The first of each is that of its index.
  CUTE_DEVICE unsigned draw_next() const { return gridDim.x + draw(params.counters); }
  /// The index of the next tile.
  CUTE_DEVICE unsigned take(bool leader) {
    // Others wait for what a tile adds: no CTA may have one before it runs.
    if (Traits::FusesPostprocess && params.is_waited_for) return draw(params.counters);
    bool const is_first = !took_first;
    took_first = true;
    if (Traits::AnyOrder && params.is_mirrored && !is_first) {
      at_image = !at_image;
      if (at_image) return index;
    }
    if constexpr (Traits::DqThroughCluster) {
      // Those of a head lie side by side, as the CTAs of a cluster.
      if (is_first) return blockIdx.x;
      int const mirrored = static_cast<int>(cute::cluster_shape().x) - 1 - 2 * cute::block_rank_in_cluster();
      if (!params.is_mirrored) return index + gridDim.x;
      at_image = !at_image;
      return index + gridDim.x + (at_image ? mirrored : -mirrored);
    } else if constexpr (Traits::DqInShared) {
      return goes_on ? index + 1 : take_head(leader, is_first);
    } else if constexpr (Traits::Cluster > 1) {
      return is_first ? blockIdx.x / Traits::Cluster : draw_together(leader);
    } else {
      return is_first ? blockIdx.x : draw_next();
    }
  }
  /// A cluster's next tile, which its first CTA draws for both.
  CUTE_DEVICE unsigned draw_together(bool leader) {
    unsigned drawn;
    if (cute::block_rank_in_cluster() == 0) {
      drawn = gridDim.x / Traits::Cluster + draw(params.counters);
      shared.cluster.index_read.wait_for(index_phase ^ 1);
      if (leader) push(address_in(1, &shared.cluster.index), drawn, address_in(1, &shared.cluster.index_full));
    } else {
      if (leader) shared.cluster.index_full.arrive_and_expect_tx(sizeof(shared.cluster.index));
      shared.cluster.index_full.wait_for(index_phase);
      drawn = __shfl_sync(0xffffffffu, shared.cluster.index, 0);  // is there before the other CTA may write it again
      if (leader) shared.cluster.index_read.arrive_at(0);
    }
    index_phase ^= 1;
    return drawn;
  }
  /// That of the next head's first tile, once the statistics of its rows are there: then the head behind it is drawn,
  /// so that those of its rows are made meanwhile.
  CUTE_DEVICE unsigned take_head(bool leader, bool is_first) {
    unsigned const tiles = tiles_of_head(params.n_kv, Traits::Held);
    unsigned first = blockIdx.x * tiles;
    if (!is_first) {
      shared.rows_preprocessed.wait_for(rows_phase);
      rows_phase ^= 1;
      first = next_head;
    }
    next_head = draw_next() * tiles;
    if (leader) {
      shared.next_head = next_head;
      shared.head_taken.arrive();
    }
    return first;
  }

  /// Tells the others of a tile that has rows, or that there is none, and returns it.
  CUTE_DEVICE GradientTile<Traits> const* next() {
    bool const leader = threadIdx.x % 32 == 0;
    auto& slot = shared.tiles[at.stage];
    shared.tile_empty[at.stage].wait_for(at.phase ^ 1);
    bool exists;
    do {
      index = take(leader);
      exists = index < static_cast<unsigned>(params.shared_tiles.ctas(params.scheduler.size()));
      if (exists && leader) {
        new (&slot) GradientTile<Traits>(params, params.shared_tiles(index),
                                         at_image);  // in place: 50 bytes less spilled beside dropout
        slot.held_phase = held_phase;
        if (Traits::OwnsHeads && slot.is_empty) slot.tiles = {0, 0};  // a head without keys, whose dQ is 0
      }
      __syncwarp();
      if (Traits::SkipsTiles && exists) slot.count_seen(params);
      if (Traits::DqInShared && exists) goes_on = !slot.ends_head(params);
    } while (exists && slot.is_empty && !Traits::OwnsHeads);
    if (leader) {
      shared.is_last[at.stage] = !exists;
      shared.tile_full[at.stage].arrive();
    }
    if (exists && slot.turns(params) > 0) held_phase ^= 1;
    at.advance();
    return exists ? &slot : nullptr;
  }
};

}  // namespace cutlass_ext::sm90

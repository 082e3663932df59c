// The order in which tiles of keys add to the sums of dQ of a tile of rows, where its bits are to be fixed: the order
// in which CTAs take them. Each waits for those before it, which running CTAs took earlier: a launch ends, however few
// of its CTAs have room. Used by kernel.hpp and producer.hpp.
//
// A sum is in memory, and known to be, a turn or two after it was made. Where rows that keys see move on with the keys,
// as under a causal mask, the last keys come first and go through rows upwards: a tile comes by a row two turns after
// the tile of the next keys, and none waits (a shortest-first order, as FlashAttention-3 has it). The first keys of the
// last section come first and go through rows downwards, so that the launch ends with short tiles; those of all
// sections where L2 does not hold what passes by until then. Else, and there, tiles of a head that are under way at
// once follow each other. Those that add wait for no memory: one warp beside them lets them add, one counts.
#pragma once

#include "dq_gemm.hpp"
#include "sections.hpp"
#include "tile_scheduler.hpp"

namespace cutlass_ext::sm90 {

/// The number of a tile of rows among those that there is workspace for.
template <class Traits>
CUTE_DEVICE int index_of_rows(GradientTile<Traits> const& tile, StreamStep const& of) {
  return static_cast<int>(tile.sums_row0 / Traits::Step) + of.rows / Traits::Step;
}

/// By a whole warp: how many tiles of keys that see tile `t` of the rows of a head add to it before this one.
template <class Traits>
CUTE_DEVICE unsigned tiles_before(BackwardParams const& params, GradientTile<Traits> const& tile, int head, int t) {
  Range const keys = tile.sequence.visibility.tiles_of(t * Traits::Step, Traits::Step, Traits::B_c);
  int const own = tile.work.row0 / Traits::B_c,
            end = min(keys.end, tiles_of_head(params.n_kv, Traits::B_c));  // a packed sequence may have more
  if constexpr (Traits::SkipsTiles) {
    if (params.tile_map) {
      unsigned before = 0;
      for (int first = keys.begin; first < own; first += 32) {
        int const other = first + threadIdx.x % 32;
        bool const is_seen = other < own && is_in(tile.map(params, head, TileMap::Seen, other), t);
        before += __popc(__ballot_sync(0xffffffffu, is_seen));
      }
      return before;
    }
  }
  return tile.last_keys_first ? end - 1 - own : own - keys.begin;
}

/// Waits until a tile of rows has what others add to it before, then lets the consumers add: by one arrival more where
/// they wait for all of dS. By the warp that copies dout: as soon as it has copied that of a turn it lets them add what
/// the turn before leaves, and they do so in the turn's middle.
template <class Traits>
struct DqSemaphoreAcquire {
  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  int rows = -1;  // the tile that is still to be waited for
  unsigned before = 0;
  RingPosition<Traits::StagesDS> ds{};

  /// Acquires the tile before, and remembers this one.
  CUTE_DEVICE void operator()(GradientTile<Traits> const& tile, StreamStep const& of) {
    acquire();
    rows = index_of_rows(tile, of);
    before = tiles_before(params, tile, of.head, of.t);
  }
  CUTE_DEVICE void acquire() {
    if (rows < 0) return;
    while (!__all_sync(0xffffffffu, load_count(params.dq_semaphore[rows]) >= before)) {
    }
    auto& full = shared.ds_full[ds.stage];
    // What the buffer had before has been left there: else the copy in front has waited for that turn.
    if constexpr (Traits::StagesV > Traits::StagesDS) full.wait_for(ds.phase ^ 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();
    ds.advance();
    rows = -1;
  }
};

/// Counts a tile of rows as soon as what the consumers have added to it is in memory, which takes half a turn: others
/// wait for it. By a whole warp that does nothing else.
template <class Traits>
struct DqSemaphoreRelease {
  BackwardParams const& params;
  typename Traits::SharedStorage& shared;

  CUTE_DEVICE void operator()() const {
    // Turns between that in which dS of a tile is left and that after which what it adds is in memory, or on its way.
    constexpr int kLater = Traits::StagesSums ? 2 : 1;
    bool const leader = threadIdx.x % 32 == 0;
    RingPosition<Traits::Stages> ring{};
    uint32_t added_phase = 0;
    // No turn begins before this warp has seen the one that had its stage before, and no tile ends before it is there:
    // it misses none.
    if (leader) {
      for (auto& full : shared.full) full.arrive();
    }
    TileReader<Traits> tiles{shared};
    tiles.for_each([&](auto const& tile) {
      if (tile.turns(params) == 0) return;
      if (leader) shared.dq_added.arrive();
      int due[kLater];  // tiles of rows that have been added to since
      CUTE_UNROLL
      for (int& rows : due) rows = -1;
      auto const count = [&](int rows) {
        if (leader && due[0] >= 0) count_done(params.dq_semaphore[due[0]]);
        CUTE_UNROLL
        for (int i = 0; i + 1 < kLater; ++i) due[i] = due[i + 1];
        due[kLater - 1] = rows;
      };
      for_each_step(params, tile, [&](StreamStep const& of) {
        shared.empty[ring.stage].wait_for(ring.phase);
        if (leader) shared.full[ring.stage].arrive();
        count(index_of_rows(tile, of));
        ring.advance();
      });
      shared.dq_added.wait_for(added_phase);
      added_phase ^= 1;
      CUTE_UNROLL
      for (int i = 0; i < kLater; ++i) count(-1);
    });
  }
};

}  // namespace cutlass_ext::sm90

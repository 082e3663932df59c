// The order in which tiles of keys add to the sums of dQ of a tile of rows, where its bits are to be fixed: the order
// in which CTAs take them. Each waits for those before it, which running CTAs took earlier: a launch ends, however few
// of its CTAs have room. Used by kernel.hpp.
//
// A sum is in memory, and known to be, a turn or two after it was made. Where rows that keys see move on with the keys,
// as under a causal mask, the last keys come first and go through rows upwards: a tile comes by a row two turns after
// the tile of the next keys, and none waits (a shortest-first order, as FlashAttention-3 has it). The first keys of the
// last section come first and go through rows downwards, so that the launch ends with short tiles; those of all
// sections where L2 does not hold what passes by until then. Else, and there, tiles of a head that are under way at
// once follow each other. A spare warp sees to the order: those that add wait for no memory.
#pragma once

#include "query_sums.hpp"
#include "sections.hpp"
#include "tiles.hpp"

namespace cutlass_ext::sm90 {

/// The number of a tile of rows among those that there is workspace for.
template <class Traits>
CUTE_DEVICE int index_of_rows(BackwardParams const& params, GradientTile<Traits> const& tile, int head, int t) {
  constexpr int kStep = Traits::Step;
  return static_cast<int>(tile.sums_row0 / kStep) + (head - tile.head_q) * (params.rows_a_head / kStep) + t;
}

/// How many tiles of keys that see tile `t` of rows add to it before this one.
template <class Traits>
CUTE_DEVICE unsigned tiles_before(BackwardParams const& params, GradientTile<Traits> const& tile, int t) {
  Range const keys = tile.sequence.visibility.tiles_of(t * Traits::Step, Traits::Step, Traits::B_c);
  int const own = tile.work.row0 / Traits::B_c,
            end = min(keys.end, tiles_of_head(params.n_kv, Traits::B_c));  // a packed sequence may have more
  return tile.last_keys_first ? end - 1 - own : own - keys.begin;
}

/// Lets the consumers add to one tile of rows after the other, and counts what they have added as soon as it is in
/// memory. By a whole warp that does nothing else, of which each lane looks after one of the tiles that pass by: beside
/// the others it issues an instruction in twenty clocks, and a turn takes two to four thousand.
template <class Traits>
struct OrderOfSums {
  // Turns between that in which dS of a tile is left and that after which what it adds is in memory, or on its way; and
  // turns that lanes look after at once, behind those of which something is still to be counted.
  static constexpr int kLater = Traits::StagesSums ? 2 : 1, kTurns = 32 - kLater;
  static constexpr bool kOneForDS = Traits::BuffersDS == Traits::Stages;  // positions that are always the same

  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  RingPosition<Traits::Stages> ring{};
  RingPosition<Traits::BuffersDS> ds{};
  uint32_t added_phase = 0;

  CUTE_DEVICE void operator()() {
    // No turn begins before this warp has seen the one that had its stage before: it misses none.
    if (lane() == 0) {
      for (auto& full : shared.full) full.arrive();
    }
    TileReader<Traits> tiles{shared};
    tiles.for_each([&](auto const& tile) {
      int left = tile.turns(params);
      if (left == 0) return;
      int here = 0;
      for (int first = lane() - kLater; left > 0; first += here, left -= here) {
        here = min(left, kTurns);
        PassingTile const own = passing_by_rows(params, tile, min(max(first, 0), tile.turns(params) - 1));
        int const rows = first < 0 ? -1 : index_of_rows(params, tile, own.head, own.t);
        take_turns(here, rows, tiles_before(params, tile, own.t));
        if (left > here) continue;
        shared.added.wait_for(added_phase);
        added_phase ^= 1;
        CUTE_UNROLL
        for (int i = 0; i < kLater; ++i) count(here + i, rows);
        __syncwarp();
      }
    });
  }

 private:
  CUTE_DEVICE auto& of_ds() {
    if constexpr (kOneForDS) {
      return ring;
    } else {
      return ds;
    }
  }
  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }
  /// What has been added to the tile of rows of a lane.
  CUTE_DEVICE void count(int of_lane, int rows) const {
    if (lane() == of_lane && rows >= 0) count_done(params.added[rows]);
  }

  /// The next turns. `rows`: of the lane's tile, in a turn `kLater` before it; `before`: how many add to it first.
  CUTE_DEVICE void take_turns(int turns, int rows, unsigned before) {
    uint32_t open = 0;  // lanes to whose tiles of rows those have added
    CUTE_NO_UNROLL
    for (int turn = 0; turn < turns; ++turn) {
      bool may_add = false, has_ended = false;
      // What they have added is counted as soon as the turn has ended: others wait for it.
      do {
        if (!may_add) {
          if (!(open >> (turn + kLater) & 1))
            open = __ballot_sync(0xffffffffu, load_count(params.added[max(rows, 0)]) >= before);
          may_add = open >> (turn + kLater) & 1;
          __syncwarp();
          if (may_add) {
            auto& full = shared.ds_full[of_ds().stage];
            full.wait_for(of_ds().phase ^ 1);
            if (lane() == 0) full.arrive();
          }
        }
        if (!has_ended && __all_sync(0xffffffffu, shared.empty[ring.stage].test_wait(ring.phase))) {
          has_ended = true;
          if (lane() == 0) shared.full[ring.stage].arrive();
          count(turn, rows);
          __syncwarp();
        }
      } while (!may_add || !has_ended);
      ring.advance();
      if constexpr (!kOneForDS) ds.advance();
    }
  }
};

}  // namespace cutlass_ext::sm90

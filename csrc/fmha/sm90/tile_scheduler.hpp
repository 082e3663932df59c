// Which work items a persistent CTA takes, and what it has to know of each. Used by the other files here.
#pragma once

#include <cstdint>

#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../params.hpp"
#include "../score.hpp"
#include "../sequence.hpp"

namespace cutlass_ext::sm90 {

constexpr int kAtomRows = 64;  // query rows of a WGMMA, and of a consumer warpgroup

/// How many key tiles before the last of a job the next one is asked for; 1 is 4% slower at b1 N1024 d64, 4 no faster.
constexpr int kTilesAhead = 2;

/// Which tiles of a job are visited: all of its range, the last first.
template <int Consumers, bool Pairs>
struct Visited {
  CUTE_DEVICE int count(Range const& tiles) const { return tiles.size(); }
  /// The tile after `tile`; below the range after the last.
  CUTE_DEVICE int below(int tile) const { return tile - 1; }
  /// Where the next job is asked for.
  CUTE_DEVICE int ask_at(Range const& tiles) const {
    return tiles.size() > kTilesAhead ? tiles.begin + kTilesAhead - 1 : tiles.end - 1;
  }
};

/// The same under a mask: those of which it shows something.
template <int Consumers>
struct Visited<Consumers, true> {
  static constexpr int kWords = 32;  // of a bit for each tile; a range of more is visited whole

  bool is_mapped;
  int first, visited, asks_at;      // the tile of the first bit, also where there is no map; how many are visited
  uint32_t some[kWords];            // of which some pair is seen
  uint32_t all[Consumers][kWords];  // of which no pair of a warpgroup's rows is hidden

  CUTE_DEVICE int count(Range const& tiles) const { return is_mapped ? visited : tiles.size(); }
  CUTE_DEVICE int below(int tile) const {
    if (!is_mapped || tile <= first) return tile - 1;
    int const last = tile - 1 - first;
    int word = last / 32;
    uint32_t bits = some[word] & ~0u >> (31 - last % 32);
    while (bits == 0 && word > 0) bits = some[--word];
    return first + word * 32 + 31 - __clz(bits);
  }
  CUTE_DEVICE int ask_at(Range const& tiles) const {
    return is_mapped ? asks_at : Visited<Consumers, false>{}.ask_at(tiles);
  }
};

/// A work item, as the producer hands it to the consumer warpgroups in shared memory.
template <int Consumers, bool Pairs>
struct Job : Visited<Consumers, Pairs> {
  bool exists;                // false: there is no more work
  int batch, q_row0, k_row0;  // where its tiles lie in the tensors
  int head, head_kv;          // of Q: as its tensor map counts them, in packs of those that share a tile
  int const* pages;           // of the sequence; null: its keys lie in the tensor one after the other
  int token0;                 // its first query row, counted in its sequence
  int rows;                   // of the tile that exist
  Visibility visibility;
  ScoreMod score_mod;
  PairMod pairs;
  Range tiles;          // of keys, from the first to the last that is visited
  int64_t out_row0;     // element of o: column 0 of the tile's first row (pack_gqa.hpp has the others)
  int64_t result_row0;  // element of lse (of lse_partial; times d_v, of o_partial) for that row
  struct {
    int end;         // key tiles from here on are hidden from all of its rows
    Range unmasked;  // these need no mask
  } of_warpgroup[Consumers];
};

/// What hides keys of a tile from a consumer warpgroup's rows, from some at least.
struct Hiding {
  bool mask, ends;  // the mask; windows and the last key
  CUTE_DEVICE bool any() const { return mask || ends; }
};

/// The tiles of a job as a consumer warpgroup takes them, from the one before `end` down.
template <int Consumers, bool Pairs>
struct Walk {
  CUTE_DEVICE Walk(Job<Consumers, Pairs> const&, int, int, bool) {}
  CUTE_DEVICE int below(int tile) const { return tile - 1; }
  CUTE_DEVICE void look_below() {}
  CUTE_DEVICE Hiding hiding() const { return {false, false}; }
};

/// The same under a mask. Of the job's bits it has 32 tiles at a time in registers: looked up in shared memory for
/// every tile, they cost several loads one after the other where nothing runs beside them.
template <int Consumers>
class Walk<Consumers, true> {
 public:
  CUTE_DEVICE Walk(Job<Consumers, true> const& job, int warpgroup, int end, bool has_mask)
      : job_(job), warpgroup_(warpgroup), has_mask_(has_mask) {
    int const last = end - 1 - job.first;
    first_ = job.first + last / 32 * 32;
    read();
    seen_ &= ~0u >> (31 - last % 32);
    look_below();
  }

  /// What hides keys of the tile that was found last.
  CUTE_DEVICE Hiding hiding() const { return {!(whole_ & bit_), !(inner_ & bit_)}; }
  /// It; below the job's range after the last.
  CUTE_DEVICE int below(int) const { return tile_; }
  /// Finds the next one.
  CUTE_DEVICE void look_below() {
    while (seen_ == 0 && first_ > job_.first) {
      first_ -= 32;
      read();
    }
    int const at = 31 - __clz(seen_);  // -1: none
    tile_ = first_ + at;
    bit_ = seen_ == 0 ? 0 : 1u << at;
    seen_ ^= bit_;
  }

 private:
  CUTE_DEVICE void read() {
    int const word = (first_ - job_.first) / 32;
    Range const inner = job_.of_warpgroup[warpgroup_].unmasked;
    auto const low_bits = [](int n) { return n <= 0 ? 0u : n < 32 ? (1u << n) - 1 : ~0u; };
    bool const is_mapped = job_.is_mapped;
    seen_ = is_mapped ? job_.some[word] : ~0u;
    whole_ = is_mapped ? job_.all[warpgroup_][word] : has_mask_ ? 0 : ~0u;
    inner_ = low_bits(inner.end - first_) & ~low_bits(inner.begin - first_);
  }

  Job<Consumers, true> const& job_;
  int warpgroup_;
  bool has_mask_;
  int tile_, first_;  // of bit 0
  uint32_t bit_;      // of `tile_`
  uint32_t seen_, whole_, inner_;
};

/// Looks at the mask's map for a job that is complete but for what comes of it, by a whole warp.
template <int B_c, int Consumers>
CUTE_DEVICE void look(Params const& params, Job<Consumers, true>& job) {
  constexpr int kTiles = 32 * Visited<Consumers, true>::kWords;
  int const lane = threadIdx.x % 32, first = job.tiles.begin, tiles = job.tiles.size();
  if (lane == 0) job.is_mapped = tiles <= kTiles;
  if (tiles > kTiles) return;
  int begin = first, end = first, asks = first, found = 0;
  CUTE_NO_UNROLL
  for (int word = 0; word * 32 < tiles; ++word) {
    int const tile0 = first + word * 32;
    uint32_t seen_here = 0, whole_here = 0;
    CUTE_NO_UNROLL
    for (int warpgroup = 0; warpgroup < Consumers; ++warpgroup) {
      if (warpgroup == 0 || params.mask.row != 0) {  // else all rows see the same
        int const row = job.token0 + warpgroup * kAtomRows, key = (tile0 + lane) * B_c;
        Seen seen{false, false};
        if (word * 32 + lane < tiles) seen = job.pairs.seen_of(params, {row, row + kAtomRows}, {key, key + B_c});
        seen_here |= __ballot_sync(0xffffffffu, seen.some);
        whole_here = __ballot_sync(0xffffffffu, seen.all);
      }
      if (lane == 0) job.all[warpgroup][word] = whole_here;
    }
    if (lane == 0) job.some[word] = seen_here;
    if (seen_here == 0) continue;
    if (found == 0) begin = tile0 + __ffs(seen_here) - 1;
    end = tile0 + 32 - __clz(seen_here);
    uint32_t rest = seen_here;
    for (int i = found; rest != 0 && i < kTilesAhead; ++i, rest &= rest - 1) asks = tile0 + __ffs(rest) - 1;
    found += __popc(seen_here);
  }
  __syncwarp();  // all lanes have read the range
  if (lane == 0) {
    job.visited = found, job.asks_at = asks;
    // Warpgroups skip no tiles of their own.
    for (auto& rows : job.of_warpgroup) rows.end = rows.end > first ? end : begin;
    job.tiles = {begin, end};
  }
}

/// Deals work items to the CTAs of a launch: the first of each by its index, since nothing else runs beside the atomic
/// operation there; from then on the next one to whoever is free, a CTA of a relief (plan.hpp) among them. Called by a
/// whole warp.
class WorkQueue {
 public:
  /// Of tiles that lie `step` packed rows apart.
  CUTE_DEVICE WorkQueue(Params const& params, int step)
      : params_(params), step_(step), dealt_first_(params.is_relief) {}

  /// The next work item of this CTA and its sequence; false once there is none.
  CUTE_DEVICE bool next(WorkItem* work, Sequence* sequence) {
    bool const leader = threadIdx.x % 32 == 0;
    unsigned index = blockIdx.x;
    if (dealt_first_)
      index = params_.dealt_ctas + __shfl_sync(0xffffffffu, leader ? atomicAdd(params_.counters, 1u) : 0, 0);
    dealt_first_ = true;
    if (!(params_.packed() ? find_packed(index, work) : find(index, work))) {
      // The last CTA to be told so leaves the counters as it found them.
      unsigned const last = params_.queue_ctas - 1;
      if (leader && atomicInc(params_.counters + 1, last) == last) *params_.counters = 0;
      return false;
    }
    *sequence = sequence_of(params_, work->batch);
    return true;
  }

 private:
  CUTE_DEVICE bool find(unsigned index, WorkItem* work) const {
    if (index >= static_cast<unsigned>(params_.scheduler.size())) return false;  // the launch holds it to 31 bits
    *work = params_.scheduler(index);
    return true;
  }

  /// Packed sequences have as many query tiles as their own lengths ask for: a warp counts those of 32 sequences at a
  /// time. Numbers only grow, so the count goes on from where it was.
  CUTE_DEVICE bool find_packed(unsigned index, WorkItem* work) {
    int const lane = threadIdx.x % 32;
    int const heads_a_tile = params_.heads_a_tile.divisor;
    unsigned const heads = params_.heads_a_tile.div(params_.heads_q);
    unsigned const a_tile = heads * params_.num_splits;  // work items of a query tile
    while (first_sequence_ < params_.batch) {
      int const b = first_sequence_ + lane;
      int const rows = b < params_.batch ? query_rows_of(params_, b).size() : 0;
      int const tiles = ((rows < params_.n_q ? rows : params_.n_q) * heads_a_tile + step_ - 1) / step_;
      unsigned end = tiles * a_tile;
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        unsigned const below = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += below;
      }
      if (index - first_index_ < __shfl_sync(0xffffffffu, end, 31)) {
        int const owner = __popc(__ballot_sync(0xffffffffu, end <= index - first_index_));
        int const its_tiles = __shfl_sync(0xffffffffu, tiles, owner);
        unsigned const within = index - first_index_ - (__shfl_sync(0xffffffffu, end, owner) - its_tiles * a_tile);
        unsigned const rest = within / heads;
        *work = {first_sequence_ + owner, int(within % heads), (its_tiles - 1 - int(rest / params_.num_splits)) * step_,
                 int(rest % params_.num_splits)};
        return true;
      }
      first_index_ += __shfl_sync(0xffffffffu, end, 31);
      first_sequence_ += 32;
    }
    return false;
  }

  Params const& params_;
  int step_;
  bool dealt_first_;
  int first_sequence_ = 0;
  unsigned first_index_ = 0;  // of its first work item
};

}  // namespace cutlass_ext::sm90

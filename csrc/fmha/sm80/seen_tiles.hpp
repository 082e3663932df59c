// Which tiles a mask hides or leaves whole, of those that a CTA goes through. Used by fmha.hpp and backward/sm80.hpp.
#pragma once

#include "../pairs.hpp"
#include "../sequence.hpp"

namespace cutlass_ext::sm80 {

/// In shared memory: two bits a tile, from the mask's map. Of more tiles than there is room for, and of calls without a
/// mask, nothing is looked at.
struct SeenTiles {
  static constexpr int kMost = 2048, kWords = kMost / 32;
  Range looked_at;
  uint32_t some[kWords], all[kWords];

#if defined(__CUDACC__)
  /// By all threads of the CTA, which meet before the tiles are asked for: `seen_of(tile)` is the map's answer.
  template <class SeenOf>
  CUTE_DEVICE void look(Range const& tiles, SeenOf const& seen_of) {
    if (threadIdx.x == 0) looked_at = tiles.size() > kMost ? Range{0, 0} : tiles;
    if (tiles.size() > kMost) return;
    int const thread = threadIdx.x, lane = thread % 32;
    CUTE_NO_UNROLL
    for (int word = thread / 32; word * 32 < tiles.size(); word += blockDim.x / 32) {
      int const at = word * 32 + lane;
      Seen seen{false, false};
      if (at < tiles.size()) seen = seen_of(tiles.begin + at);
      uint32_t const some_here = __ballot_sync(0xffffffffu, seen.some), all_here = __ballot_sync(0xffffffffu, seen.all);
      if (lane == 0) some[word] = some_here, all[word] = all_here;
    }
  }

  /// Of a tile that was to be looked at, where there `is` a mask.
  CUTE_DEVICE Seen of(bool is, int tile) const {
    if (!is) return {true, true};
    if (!looked_at.contains(tile)) return {true, false};
    int const at = tile - looked_at.begin;
    return {bool(some[at / 32] >> at % 32 & 1), bool(all[at / 32] >> at % 32 & 1)};
  }
#endif
};

}  // namespace cutlass_ext::sm80

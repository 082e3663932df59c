// Dropout in the persistent Hopper kernel: what is kept of a tile is drawn while its products are on their way, and
// waits in shared memory until P is there. Used by fmha.hpp and producer.hpp.
#pragma once

#include "../pairs.hpp"

namespace cutlass_ext::sm90 {

/// Which of 128 keys of a warp's 16 rows dropout keeps: for the lanes of a quad, which share two rows in accumulators, a
/// word each of either row.
class DrawnBits {
  static constexpr int kSixteens = 8;

 public:
  static constexpr int kKeys = kSixteens * kBlockKeys, kWords = 16 * 4;

  /// Draws for the 16 rows from `row` on and the keys from `key` on, and leaves what is kept in `to`: each lane for two
  /// blocks, eight rows apart, whose bits it trades with seven others for those of its own rows.
  CUTE_DEVICE static void draw(uint32_t threshold, PairMod const& pairs, int row, int key, int lane, uint32_t* to) {
    CUTE_NO_UNROLL  // both at once take more registers than drawers have
    for (int r = 0; r < 2; ++r) {
      uint32_t const block = pairs.kept_of_two(threshold, row + r * 8 + lane / 8 * kBlockRows, key + lane % 8 * kBlockKeys);
      to[r * 32 + lane] = trade<0, 4>(trade<1, 2>(trade<2, 0>(block, lane), lane), lane);
    }
  }

  /// Of the lane's rows and columns.
  CUTE_DEVICE DrawnBits(uint32_t const* from, int lane) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) bits_[r] = from[r * 32 + lane];
  }

  /// Makes 0 of what is not kept of P, an operand.
  template <class WordTensor>
  CUTE_DEVICE void drop(WordTensor& words) const {
    CUTE_UNROLL
    for (int i = 0; i < kSixteens; ++i) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {  // of sixteen keys
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          // As the draws leave them: of two neighbouring keys a bit in each of two bytes.
          uint32_t const x = bits_[r] << (7 - (i / 2 % 2 * 4 + half * 2 + i / 4));
          words(i * 4 + half * 2 + r) &= signs(x, x, i % 2 == 0 ? 0x9988 : 0xbbaa);
        }
      }
    }
  }

 private:
  uint32_t bits_[2];
};

}  // namespace cutlass_ext::sm90

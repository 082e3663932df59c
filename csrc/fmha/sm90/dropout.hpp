// Dropout in Hopper's forward kernels, and in that of dBias. In the persistent ones what is kept of a tile is drawn
// while its products are on their way, and waits in shared memory until P is there; in the short ones while its keys
// are. Used by traits.hpp, fmha.hpp, producer.hpp, short.hpp and ../backward/sm90/dbias.hpp.
#pragma once

#include "../pairs.hpp"

namespace cutlass_ext::sm90 {

/// Of P, an operand, the four words of sixteen keys and a thread's two rows: all bits of what is kept. `kept`: a word
/// for each row, as draws leave them: of two neighbouring keys a bit in each of two bytes, the lower ones or the
/// `upper` ones, at `place_of(row, half)` there, `half`: which eight of the keys.
template <class PlaceOf>
CUTE_DEVICE uint4 mask_of_sixteen(uint32_t const (&kept)[2], bool upper, PlaceOf const& place_of) {
  auto const of = [&](int r, int half) {
    uint32_t const x = kept[r] << (7 - place_of(r, half));
    return bytes_of(x, x, upper ? 0xbbaa : 0x9988);
  };
  return make_uint4(of(0, 0), of(1, 0), of(0, 1), of(1, 1));
}

/// Which of 128 keys of a warp's 16 rows dropout keeps: for the lanes of a quad, which share two rows in accumulators,
/// a word each of either row.
class DropoutBits {
 public:
  static constexpr int kSixteens = 8, kKeys = kSixteens * kBlockKeys;

  /// Draws for the 16 rows from `row` on and the keys from `key` on: each lane for two blocks, eight rows apart, whose
  /// bits it trades with seven others for those of its own rows.
  CUTE_DEVICE DropoutBits(Threshold const& threshold, PairMod const& pairs, int row, int key, int lane) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t const block =
          pairs.kept_of_two(threshold, row + r * 8 + lane / 8 * kBlockRows, key + lane % 8 * kBlockKeys);
      bits_[r] = trade<0, 4>(trade<1, 2>(trade<2, 0>(block, lane), lane), lane);
    }
  }

  CUTE_DEVICE DropoutBits(uint2 bits) : bits_{bits.x, bits.y} {}
  CUTE_DEVICE uint2 bits() const { return make_uint2(bits_[0], bits_[1]); }

  /// Of P, an operand, the four words of sixteen keys `i`: all bits of what is kept.
  CUTE_DEVICE uint4 mask(int i) const {
    return mask_of_sixteen(bits_, i % 2, [&](int, int half) { return i / 2 % 2 * 4 + half * 2 + i / 4; });
  }

 private:
  uint32_t bits_[2];
};

/// The same in shared memory, a vector for each lane: bits, or masks where warps of their own draw.
struct BitsOfWarp {
  uint2 of_lane[32];
};
struct MasksOfWarp {
  uint4 of_sixteen[DropoutBits::kSixteens][32];
};

/// Makes 0 of what is not kept of P, an operand.
template <class WordTensor, class MaskOf>
CUTE_DEVICE void drop(WordTensor& words, MaskOf const& mask_of) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(words) / 4; ++i) {
    uint4 const mask = mask_of(i);
    words(i * 4) &= mask.x, words(i * 4 + 1) &= mask.y, words(i * 4 + 2) &= mask.z, words(i * 4 + 3) &= mask.w;
  }
}

}  // namespace cutlass_ext::sm90

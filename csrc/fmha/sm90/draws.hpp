// Dropout in the persistent Hopper kernel: what is kept of a tile is drawn while its products are on their way, and
// waits in shared memory until P is there. Used by fmha.hpp and producer.hpp.
#pragma once

#include "../pairs.hpp"

namespace cutlass_ext::sm90 {

/// Which of `Keys` keys of a warp's 16 rows dropout keeps: for the lanes of a quad, which share two rows in
/// accumulators, a word each of either row. Of each of its bytes a bit is of a sixteen, the lowest of the first: word w
/// of a draw has the keys of lane w.
template <int Keys>
class DrawnBits {
  static constexpr int kSixteens = Keys / 16;

 public:
  static constexpr int kWords = 16 * 4;

  /// Draws for the 16 rows from `row` on and the keys from `key` on, and leaves what is kept in `to`: two lanes for a
  /// row, of its first and last sixteens.
  CUTE_DEVICE static void draw(PairMod const& pairs, int row, int key, int lane, uint32_t* to) {
    static_assert(kSixteens <= 8 && kSixteens % 2 == 0, "a bit of each byte for a sixteen");
    int const half = lane % 2;
    row += lane / 2;
    key += half * (Keys / 2);
    uint32_t bits[4] = {};
    auto const gather = [&](uint32_t const(&x)[4]) {
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) bits[w] = bits[w] >> 1 | x[w];
    };
    uint32_t x[4];
    if (pairs.draws_begin_at(key)) {
      // Of the whole grid, and so in registers of the warp's: in those of its threads they and what rounds add to them
      // leave head_dim 128 too few.
      uint32_t const seed[] = {__shfl_sync(0xffffffffu, pairs.seed[0], 0), __shfl_sync(0xffffffffu, pairs.seed[1], 0)};
      KeptOfSixteen const keep(__shfl_sync(0xffffffffu, pairs.threshold, 0));
      Philox const philox(seed, pairs.head, pairs.sequence);
      Philox::OfRow const of_row = philox.of_row(pairs.position + row);
      int const first = (key + pairs.origin) >> 4;
      CUTE_UNROLL
      for (int i = 0; i < kSixteens / 2; ++i) {
        philox.draw(of_row, philox.of_sixteen(first + i), x);
        keep(x);
        gather(x);
      }
    } else {
      CUTE_NO_UNROLL
      for (int i = 0; i < kSixteens / 2; ++i) {
        uint32_t const kept = pairs.kept(row, key + i * 16, 16);
        CUTE_UNROLL
        for (int w = 0; w < 4; ++w) {
          uint32_t const of_word = kept >> 2 * w;  // keys 0, 1, 8 and 9, from here on
          x[w] = (of_word << 7 & 0x80) | (of_word << 14 & 0x8000) | (of_word << 15 & 0x800000) |
                 (of_word << 22 & ~0x7fffffffu);
        }
        gather(x);
      }
    }
    // Each takes two words of the row.
    uint2 own = make_uint2(bits[0], bits[1]), others = make_uint2(bits[2], bits[3]);
    if (half == 1) {
      uint2 const first = own;
      own = others, others = first;
    }
    others.x = __shfl_xor_sync(0xffffffffu, others.x, 1);
    others.y = __shfl_xor_sync(0xffffffffu, others.y, 1);
    uint2 const &first = half == 0 ? own : others, &last = half == 0 ? others : own;
    constexpr int kBits = kSixteens / 2;
    reinterpret_cast<uint2*>(to)[lane] = make_uint2(first.x >> kBits | last.x, first.y >> kBits | last.y);
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
      for (int r = 0; r < 2; ++r) {
        uint32_t const x = bits_[r] << (kSixteens - 1 - i);
        words(i * 4 + r) &= signs(x, x, 0x9988);
        words(i * 4 + 2 + r) &= signs(x, x, 0xbbaa);
      }
    }
  }

 private:
  uint32_t bits_[2];
};

}  // namespace cutlass_ext::sm90

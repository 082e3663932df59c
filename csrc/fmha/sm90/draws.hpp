// Dropout in the persistent Hopper kernel: what is kept of a tile is drawn while its products are on their way, and
// waits in shared memory until P is there. Used by fmha.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "../pairs.hpp"

namespace cutlass_ext::sm90 {

/// Which of 32 keys of 8 rows dropout keeps, as masks for the 16-bit halves of P. A lane draws for a row eight keys,
/// which are neighbours; of its accumulators it wants two of every eight, and those are the 32 bits that a matrix load
/// gives it. So each draw is written once, 16 bytes a lane, and read as a row of a matrix.
struct DrawnMatrices {
  static constexpr int kWords = 32 * 4;  // 8 rows of 4 matrices

  /// Where a lane writes what it drew, and where it reads: the eights of two rows share 128 bytes, in another order in
  /// every other two rows, so that neither way two lanes meet in a bank.
  CUTE_DEVICE static int written_at(int lane) { return at(lane / 4, lane % 4); }
  CUTE_DEVICE static int read_at(int lane) { return at(lane % 8, lane / 8); }

 private:
  CUTE_DEVICE static int at(int row, int eight) { return row * 16 + (eight ^ row / 2) * 4; }
};

/// Draws for `Eights` times four eights of keys, `eight` being the lane's first, of the rows `row` and `row` + 8, and
/// leaves what is kept in `to`: of every four eights DrawnMatrices for either row.
template <int Eights>
CUTE_DEVICE void draw(PairMod const& pairs, uint32_t threshold, int row, int eight, int lane, uint32_t* to) {
  Philox const philox(pairs.seed, pairs.head, pairs.sequence);
  Philox::OfRow const rows[] = {philox.of_row(pairs.position + row), philox.of_row(pairs.position + row + 8)};
  threshold *= 0x10001u;
  to += DrawnMatrices::written_at(lane);
  __syncwarp();  // nobody reads the last tile's any more
  CUTE_NO_UNROLL
  for (int i = 0; i < Eights; ++i) {
    Philox::OfEight const keys = philox.of_eight(eight + 4 * i);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t x[4];
      philox.draw(rows[r], keys, x);
      CUTE_UNROLL
      for (uint32_t& word : x) word = halves_from(word, threshold);
      *reinterpret_cast<uint4*>(to + (2 * i + r) * DrawnMatrices::kWords) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  __syncwarp();
}

/// Makes 0 of what is not kept of P, an operand.
template <int Eights, class WordTensor>
CUTE_DEVICE void keep(WordTensor& words, uint32_t const* from, int lane) {
  from += DrawnMatrices::read_at(lane);
  CUTE_UNROLL
  for (int i = 0; i < Eights; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t kept[4];
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<cute::uint128_t const*>(from + (2 * i + r) * DrawnMatrices::kWords), kept[0], kept[1],
          kept[2], kept[3]);
      CUTE_UNROLL
      for (int atom = 0; atom < 4; ++atom) words(i * kQuadColumns + 2 * atom + r) &= kept[atom];
    }
  }
}

}  // namespace cutlass_ext::sm90

// Dropout in the persistent Hopper kernel: what is kept of a tile is drawn while its products are on their way, and
// waits in shared memory until P is there. Used by fmha.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "../pairs.hpp"
#include "warpgroup.hpp"

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

/// Draws for the rows `row` and `row` + 8 and the `Keys` keys from `key` on, which all lanes of a quad share, and
/// leaves what is kept in `to`: of every 32 keys DrawnMatrices for either row.
template <int Keys>
CUTE_DEVICE void draw(PairMod const& pairs, uint32_t threshold, int row, int key, int lane, uint32_t* to) {
  bool const aligned = ((key + pairs.origin) & 7) == 0;  // as positions, which may be negative
  key += lane % 4 * 8;
  to += DrawnMatrices::written_at(lane);
  __syncwarp();  // nobody reads the last tile's any more
  auto const put = [&](int part, int r, uint32_t const(&x)[4]) {
    *reinterpret_cast<uint4*>(to + (2 * part + r) * DrawnMatrices::kWords) = make_uint4(x[0], x[1], x[2], x[3]);
  };
  auto const draw_eights = [&](auto const& halves_from) {
    // Of the whole grid, and so in registers of the warp's: in those of its threads they and what rounds add to them
    // leave head_dim 128 too few.
    uint32_t const seed[] = {__shfl_sync(0xffffffffu, pairs.seed[0], 0), __shfl_sync(0xffffffffu, pairs.seed[1], 0)};
    Philox const philox(seed, pairs.head, pairs.sequence);
    Philox::OfRow const rows[] = {philox.of_row(pairs.position + row), philox.of_row(pairs.position + row + 8)};
    int const first = (key + pairs.origin) >> 3;
    CUTE_UNROLL
    for (int part = 0; part < Keys / 32; ++part) {
      Philox::OfEight const keys = philox.of_eight(first + part * 4);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        uint32_t x[4];
        philox.draw(rows[r], keys, x);
        CUTE_UNROLL
        for (uint32_t& word : x) word = halves_from(word);
        put(part, r, x);
      }
    }
  };
  if (!aligned) {
    CUTE_NO_UNROLL
    for (int i = 0; i < Keys / 16; ++i) {
      uint32_t const kept = pairs.kept(row + i % 2 * 8, key + i / 2 * 32, 8);
      uint32_t x[4];
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) x[w] = (kept & 1u << 2 * w ? 0xffffu : 0) | (kept & 2u << 2 * w ? 0xffff0000u : 0);
      put(i / 2, i % 2, x);
    }
  } else if (threshold <= 0x8000u) {
    draw_eights(HalvesFrom<true>(threshold));
  } else {
    draw_eights(HalvesFrom<false>(threshold));
  }
  __syncwarp();
}

/// Makes 0 of what is not kept of P, an operand.
template <int Keys, class WordTensor>
CUTE_DEVICE void keep(WordTensor& words, uint32_t const* from, int lane) {
  from += DrawnMatrices::read_at(lane);
  CUTE_UNROLL
  for (int i = 0; i < Keys / 32; ++i) {
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

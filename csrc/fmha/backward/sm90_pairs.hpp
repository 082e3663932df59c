// What pairs have, in the scores of Hopper's backward kernels: their accumulators see pairs from the side of the rows
// or from that of the keys. Used by sm90.hpp.
#pragma once

#include <cute/tensor.hpp>

#include "../mma/wgmma.hpp"
#include "../pairs.hpp"

namespace cutlass_ext::sm90 {

/// Bias and mask of scores, of which the thread's first has row `row` and key `key`. `OfKeys`: the rows of the
/// accumulators are keys.
template <bool OfKeys, class ScoreTensor>
CUTE_DEVICE void apply_pairs(ScoreTensor& S, PairMod const& pairs, Params const& params, Visibility const& visibility,
                             int row, int key) {
  if constexpr (!OfKeys) {
    change_in_memory(S, [&](float (&x)[kQuadColumns], int i, int j) {
      pairs.apply(x, params, visibility, row + row_of(i), key + key_of(j), key_of_quad);
    });
  } else {
    constexpr int Columns = decltype(size<1>(S))::value;
    float scores[Columns][2];  // in local memory, as there
    CUTE_UNROLL
    for (int j = 0; j < Columns; ++j) scores[j][0] = S(0, j), scores[j][1] = S(1, j);
    CUTE_NO_UNROLL
    for (int j = 0; j < Columns; ++j) pairs.apply(scores[j], params, visibility, row + key_of(j), key, row_of);
    CUTE_UNROLL
    for (int j = 0; j < Columns; ++j) S(0, j) = scores[j][0], S(1, j) = scores[j][1];
  }
}

/// Which of a thread's pairs dropout keeps, of scores with `Columns` columns a thread: bit j of word i is element (i,
/// j).
struct Kept {
  uint32_t word[2];

  /// `row` and `key` of the warp's first score. The lanes that share a row share the work.
  template <bool OfKeys, int Columns>
  CUTE_DEVICE static Kept of(PairMod const& pairs, int row, int key) {
    static_assert(Columns <= 32 && Columns % (OfKeys ? 4 : kQuadColumns) == 0);
    int const lane = threadIdx.x % 32;
    Kept kept{};
    if constexpr (OfKeys) {
      // 16 rows of 16 keys at a time: a lane has eight keys of one of the four rows that its quad place has in common.
      int const half = lane / 4 % 2, odd = lane / 8 % 2, atom = lane / 16;
      CUTE_NO_UNROLL
      for (int j = 0; j < Columns; j += 4) {
        int const mine = row + j * 4 + atom * 8 + lane % 4 * 2 + odd;
        uint32_t of_row = pairs.kept_of_half(mine, key, half);
        of_row |= __shfl_xor_sync(0xffffffffu, of_row, 4);
        uint32_t const neighbour = __shfl_xor_sync(0xffffffffu, of_row, 8),
                       two_rows = odd ? neighbour | of_row << 16 : of_row | neighbour << 16,
                       other_rows = __shfl_xor_sync(0xffffffffu, two_rows, 16);
        CUTE_UNROLL
        for (int column = 0; column < 4; ++column) {
          uint32_t const rows = column / 2 == atom ? two_rows : other_rows;
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i)
            kept.word[i] |= (rows >> (column % 2 * 16 + lane / 4 + row_of(i)) & 1) << (j + column);
        }
      }
    } else {
      CUTE_NO_UNROLL
      for (int j = 0; j < Columns; j += kQuadColumns) {
        CUTE_NO_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t x = pairs.kept_by_quad(row + lane / 4 + row_of(i), key + key_of(j), lane) >> lane % 4 * 2;
          x &= 0x03030303u;
          x |= x >> 6;
          x |= x >> 12;
          x = (x & 0xffu) << j;
          kept.word[0] |= i == 0 ? x : 0;
          kept.word[1] |= i == 1 ? x : 0;
        }
      }
    }
    return kept;
  }

  CUTE_DEVICE bool has(int i, int j) const { return word[i] >> j & 1; }

  /// dP as dropout has it.
  template <class GradientTensor>
  CUTE_DEVICE void drop(GradientTensor& dP, float scale) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(dP); ++j) dP(i, j) = has(i, j) ? dP(i, j) * scale : 0.f;
    }
  }

  /// P, an operand of 16-bit pairs.
  template <int Columns, class Words>
  CUTE_DEVICE void drop_operand(Words& words) const {
    CUTE_UNROLL
    for (int j = 0; j < Columns; j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) words(j + i) &= (has(i, j) ? 0xffffu : 0u) | (has(i, j + 1) ? 0xffff0000u : 0u);
    }
  }
};

}  // namespace cutlass_ext::sm90

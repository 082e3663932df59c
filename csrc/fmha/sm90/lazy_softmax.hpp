// The online softmax of the Hopper kernels, which looks for a tile's maximum only where the running one will not do: of
// the persistent ones (fmha.hpp), and of those for short launches (short.hpp).
#pragma once

#include "../cute_tensor.hpp"
#include "../softmax.hpp"
#include "../operand.hpp"

namespace cutlass_ext::sm90 {

/// m, l of the two rows that a thread shares with three others. Any m gives the same quotient as long as no exponential
/// overflows, and the sums, which are needed anyway, tell whether one is too large for comfort. So a tile is first
/// taken with the m that there is, without a look at its maximum; only where a sum passes kMaxSum (the first tile of a
/// job, a row that has not seen a key yet, a NaN) m is raised, O and l follow, and the tile is taken again. On an H200
/// a maximum of a warp costs 3.7 cycles beside WGMMA (2 alone), an exponential 10.2 (8 alone), and full attention over
/// 8192 keys is 10 to 13% faster without the maxima.
///
/// `Headroom`: m is put so many powers of two below a maximum. P in two fp16 parts is held to 2^-25, which is to be
/// little beside the largest. l is then summed with what its additions round off (Kahan): of 8192 keys that takes 5%
/// from the error of O.
template <int Columns, int Early, int Headroom = 0>
struct LazySoftmax : OnlineSoftmax<2, 4, 1> {
  static_assert(Columns % 2 == 0 && Early % 2 == 0 && Early <= Columns, "columns go in pairs");
  // Of a thread's part of a row; no P passes it, and fp16 holds it.
  static constexpr float kMaxSum = 1 << (Headroom > 0 ? 15 : 14);
  static_assert(Columns * (1 << Headroom) <= kMaxSum, "where m has just been raised the sum fits");

  /// Where no key has been seen m is so low that any score that counts overflows against it.
  CUTE_DEVICE LazySoftmax() { m[0] = m[1] = kLeastMaximum; }

  /// The first tile: `words` gets P in pairs of 16 bits, in the order of the scores.
  template <class Element, class ScoreTensor, class WordTensor>
  CUTE_DEVICE void start(ScoreTensor const& S, WordTensor& words, float scale) {
    float rescale[2], sum[2] = {0.f, 0.f};
    raise_maximum(S, rescale, scale);
    exponentiate<0, Columns>(S, sum, scale, into<Element>(words));
    for (int i = 0; i < 2; ++i) l[i] += sum[i];
  }

  /// The next tile, first part: the exponentials that registers hold beside the last tile's P, which is in use still.
  /// False where m will have to be raised.
  template <class ScoreTensor>
  CUTE_DEVICE bool begin_update(ScoreTensor const& S, float scale) {
    sum_[0] = sum_[1] = 0.f;
    exponentiate<0, Early>(S, sum_, scale, [&](int i, int j, float p0, float p1) {
      early_[i][j] = p0;
      early_[i][j + 1] = p1;
    });
    return fits(sum_);
  }

  /// The rest; O is what the tiles before it add up to.
  template <class Element, class ScoreTensor, class WordTensor, class OutTensor>
  CUTE_DEVICE void update(ScoreTensor const& S, WordTensor& words, OutTensor& O, float scale) {
    CUTE_UNROLL
    for (int j = 0; j < Early; j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) put_operand<Element>(words, i, j, early_[i][j], early_[i][j + 1]);
    }
    exponentiate<Early, Columns>(S, sum_, scale, into<Element>(words));
    if (!fits(sum_)) {
      float rescale[2];
      raise_maximum(S, rescale, scale);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        l[i] *= rescale[i];
        rounded_[i] *= rescale[i];
        sum_[i] = 0.f;
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(O); ++j) O(i, j) *= rescale[i];
      }
      exponentiate<0, Columns>(S, sum_, scale, into<Element>(words));
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (Headroom > 0) {
        float const sum = sum_[i] - rounded_[i], l_new = l[i] + sum;
        rounded_[i] = l_new - l[i] - sum;
        l[i] = l_new;
      } else {
        l[i] += sum_[i];
      }
    }
  }

 private:
  template <class ScoreTensor>
  CUTE_DEVICE void raise_maximum(ScoreTensor const& S, float (&rescale)[2], float scale) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const m_new = fmaxf(m[i], max_of_row(i, S, scale) - Headroom);
      rescale[i] = exp2_approx(m[i] - m_new);
      m[i] = m_new;
    }
  }

  CUTE_DEVICE static bool fits(float const (&sum)[2]) {
    return __all_sync(0xffffffffu, sum[0] <= kMaxSum && sum[1] <= kMaxSum);
  }

  template <class Element, class WordTensor>
  CUTE_DEVICE static auto into(WordTensor& words) {
    return [&](int i, int j, float p0, float p1) { put_operand<Element>(words, i, j, p0, p1); };
  }

  /// P = exp2(scale S - m) of some columns to `take(row, column, p, p of the next column)`, and their sums. Row by row
  /// and by pairs: ptxas makes 2 to 3% faster code of it than of column after column, each added by itself.
  template <int Begin, int End, class ScoreTensor, class Take>
  CUTE_DEVICE void exponentiate(ScoreTensor const& S, float (&sum)[2], float scale, Take take) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = Begin; j < End; j += 2) {
        float const p0 = exp2_approx(fmaf(S(i, j), scale, -m[i])), p1 = exp2_approx(fmaf(S(i, j + 1), scale, -m[i]));
        take(i, j, p0, p1);
        sum[i] += p0 + p1;
      }
    }
  }

  float sum_[2];
  float rounded_[2] = {0.f, 0.f};  // by how much l is too large
  float early_[2][Early];
};

/// The same where no registers are left to take a tile twice: exponents take the place of scores, and are looked at
/// there. Their greatest is wanted only where one is above kSlack, and of positive numbers the order is that of their
/// bits: half as many instructions as a maximum of floats, of three operands, and no exchange with other lanes.
///
/// Exponents are counted from m. From an m far below the scores they would have lost what these differ by (-1e9 of a
/// bias that stands for a mask), so from one below kLow they are counted from 0, and m follows. What a row gets does
/// not depend on the other rows of its warp.
struct LazySoftmaxInPlace : OnlineSoftmax<2, 4, 1> {
  static constexpr float kSlack = 8.f;  // P stays below 256, which fp16 holds
  static constexpr float kLow = -64.f;

  CUTE_DEVICE LazySoftmaxInPlace() { m[0] = m[1] = kLeastMaximum; }

  /// S becomes P; l and O follow m where it rises. Both are 0 in front of the `first` tile.
  template <class ScoreTensor, class OutTensor>
  CUTE_DEVICE void update(ScoreTensor& S, OutTensor& O, float scale, bool first) {
    float base[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (first) m[i] = fmaxf(m[i], max_of_row(i, S, scale));
      base[i] = first || !is_low(i) ? m[i] : 0.f;
    }
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(S); ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) S(i, j) = fmaf(S(i, j), scale, -base[i]);
    }
    if (!first && rises(S)) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float const greatest = max_of_row(i, S, 1.f);
        float const m_new = is_low(i) ? fmaxf(m[i], greatest) : greatest > kSlack ? m[i] + greatest : m[i];
        float const rescale = exp2_approx(m[i] - m_new), by = m_new - base[i];
        m[i] = m_new;
        l[i] *= rescale;
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(S); ++j) S(i, j) -= by;
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(O); ++j) O(i, j) *= rescale;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float sum = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(S); j += 2) {
        S(i, j) = exp2_approx(S(i, j));
        S(i, j + 1) = exp2_approx(S(i, j + 1));
        sum += S(i, j) + S(i, j + 1);
      }
      l[i] += sum;
      materialize(l[i]);  // behind the next product it would keep all of P beside the operand made of it
    }
  }

 private:
  CUTE_DEVICE bool is_low(int i) const { return m[i] < kLow; }

  /// Whether some row of the warp has an exponent above kSlack, or an m that is to be looked for.
  template <class ScoreTensor>
  CUTE_DEVICE bool rises(ScoreTensor const& exponents) const {
    int greatest[4] = {};  // of one each waits for the last
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(exponents); ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int& of = greatest[i * 2 + j / 2 % 2];
        of = max(of, __float_as_int(exponents(i, j)));
      }
    }
    int const of_all = max(max(greatest[0], greatest[1]), max(greatest[2], greatest[3]));
    return __any_sync(0xffffffffu, of_all > __float_as_int(kSlack) || is_low(0) || is_low(1));
  }
};

}  // namespace cutlass_ext::sm90

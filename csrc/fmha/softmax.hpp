// The online softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, section 3.1) in the
// exp2 domain: running maximum m, running sum l, rescaling of O, and the one finish. Called by every main loop on the
// rows that a thread holds, and by whatever merges parts (merge.hpp).
#pragma once

#include "cute_tensor.hpp"
#include "score.hpp"

namespace cutlass_ext {

/// ex2.approx: 2 ulp of fp32, one instruction of the special-function unit; 0 for -inf.
CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// lg2.approx: 2^-22 of error, absolute between 1/2 and 2 and relative elsewhere, one instruction; -inf for 0.
CUTE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x to the last bit or next to it: an approximation and a step of Newton's, without the slow path of a division.
CUTE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(fmaf(-x, y, 1.f), y, y);
}

/// Maximum over the `Lanes` lanes of a warp that differ in the bits from `Stride` up; every one of them gets it.
template <int Lanes, int Stride>
CUTE_DEVICE float warp_max(float x) {
  CUTE_UNROLL
  for (int mask = Stride; mask < Lanes * Stride; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

/// Sum over the same lanes, in an order that is the same in every run.
template <int Lanes, int Stride>
CUTE_DEVICE float warp_sum(float x) {
  CUTE_UNROLL
  for (int mask = Stride; mask < Lanes * Stride; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

/// What the P of a row come to that is to be 1, as softmax's sum is: `sum` is that of all keys but the sink. lse is a
/// float32 that has been rounded three times on its way here, an error that all of a row's P have in common and that
/// nothing else takes out: of 50 keys it made the errors of gradients up to 2.3 times those of the formula written out.
/// A sum that is further from 1 than rounding explains is that of a part of the keys that lse is of: it stays.
CUTE_DEVICE float sum_for_one(float sum, float sink_log2, float lse_log2) {
  float const all = sum + exp2_approx(sink_log2 - lse_log2);
  float const rounding = fminf(0x1p-22f * (4.f + fabsf(lse_log2)), 0x1p-10f);
  return fabsf(all - 1.f) <= rounding ? all : 1.f;
}

/// The least maximum, in the log2 domain, that P of 16 bits is counted from. Scores below it count as hidden: those of
/// a bias that stands for a mask, such as -1e9, of which products and maxima are rounded to multiples of 128. Counted
/// from such a maximum P was up to 2^64, and fp16 has no such number.
constexpr float kLeastMaximum = -0x1p24f;

/// What is known of a row over some keys: m, and l, the sum of exp2(score - m). The sums of P V go with l.
struct Part {
  float m = -INFINITY;
  float l = 0.f;
};

/// What exponents are counted from where the maximum is `m`: m, or 0 where no key has been seen and every weight is 0.
CUTE_DEVICE float base_of(float m) { return m == -INFINITY ? 0.f : m; }

/// Of a row: what normalises its O, and its lse.
struct Finish {
  float factor;
  float lse_log2;
  CUTE_DEVICE float lse() const { return lse_log2 * kLn2; }  // natural log
};

/// Ends a row of all its keys; without one it gives 0. The logarithm is exact for fp32 alone.
template <class Element>
CUTE_DEVICE Finish finish(Part row) {
  if (row.l == 0.f) return {0.f, -INFINITY};
  return {reciprocal(row.l), row.m + (sizeof(Element) == 2 ? log2_approx(row.l) : log2f(row.l))};
}

/// The same with the sink, one more key whose value is 0.
template <class Element>
CUTE_DEVICE Finish finish(Part row, float sink_log2) {
  float const base = base_of(fmaxf(row.m, sink_log2)), rescale = exp2_approx(row.m - base);
  Finish finished = finish<Element>({base, row.l * rescale + exp2_approx(sink_log2 - base)});
  finished.factor *= rescale;
  return finished;
}

/// Writes the lse of row `row` of lse, if it was asked for; or a split's, to be merged, to row `row` of lse_partial.
CUTE_DEVICE void store_lse(Params const& params, int64_t row, Finish const& finished) {
  bool const split = params.is_split();
  float* const lse = split ? params.lse_partial : params.lse;
  if (lse) lse[row] = split ? finished.lse_log2 : finished.lse();
}

/// m and l of the `Rows` rows that a thread shares with `Lanes` lanes at `Stride`. l stays a sum over the thread's own
/// columns until `finish`: one shuffle tree a row instead of one a tile. m stays where it is until a row's maximum
/// passes it by more than `Slack` (log2 units): P is then up to 2^Slack instead of 1, the division at the end takes
/// that out again, and O is hardly ever rescaled (as FlashAttention-4 does). It rises to `Headroom` below the maximum,
/// and with slack, as P of 16 bits has it, from kLeastMaximum on.
template <int Rows, int Lanes, int Stride, int Slack = 0, int Headroom = 0>
struct OnlineSoftmax {
  float m[Rows];
  float l[Rows];

  CUTE_DEVICE OnlineSoftmax() {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      m[i] = -INFINITY;
      l[i] = 0.f;
    }
  }

  /// The first half of `update`: m rises to what S asks for, l and O are to be multiplied by `rescale`, and P is to be
  /// exp2(scale S - base). `exchange` may raise the maxima of S, in the log2 domain, to those of more columns.
  template <class ScoreTensor, class RowTensor, class Exchange>
  CUTE_DEVICE void raise(ScoreTensor const& S, RowTensor& rescale, RowTensor& base, float scale,
                         Exchange const& exchange) {
    float tile_max[Rows];
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) tile_max[i] = max_of_row(i, S, scale);
    exchange(tile_max);
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) raise_row(i, tile_max[i], rescale(i), base(i));
  }

  /// S becomes P, l follows the new maximum, and so must O: `rescale(i)` is what its row i is to be multiplied by.
  /// `scale` goes into the instruction that subtracts m.
  template <class ScoreTensor, class RowTensor>
  CUTE_DEVICE void update(ScoreTensor& S, RowTensor& rescale, float scale) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      float base;
      raise_row(i, max_of_row(i, S, scale), rescale(i), base);
      float sum = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(S); ++j) {
        S(i, j) = exp2_approx(fmaf(S(i, j), scale, -base));
        sum += S(i, j);
      }
      l[i] = l[i] * rescale(i) + sum;
    }
  }

  /// Ends row `i`; all its lanes get the same.
  template <class Element>
  CUTE_DEVICE Finish finish(int i, float sink_log2) const {
    return cutlass_ext::finish<Element>({m[i], warp_sum<Lanes, Stride>(l[i])}, sink_log2);
  }

  /// The same, with row `i` of O, and times `scale`.
  template <class Element, class OutTensor>
  CUTE_DEVICE Finish finish(int i, float sink_log2, OutTensor& O, float scale = 1.f) const {
    Finish const row = finish<Element>(i, sink_log2);
    float const factor = row.factor * scale;
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(O); ++j) O(i, j) *= factor;
    return row;
  }

 protected:
  template <class ScoreTensor>
  CUTE_DEVICE static float max_of_row(int i, ScoreTensor const& S, float scale) {
    float tile_max = S(i, 0);
    CUTE_UNROLL
    for (int j = 1; j < cute::size<1>(S); ++j) tile_max = fmaxf(tile_max, S(i, j));
    return scale * warp_max<Lanes, Stride>(tile_max);
  }

 private:
  CUTE_DEVICE void raise_row(int i, float tile_max, float& rescale, float& base) {
    float const passed = Slack > 0 ? fmaxf(m[i] + Slack, kLeastMaximum) : m[i];
    float const m_new = tile_max > passed ? tile_max - Headroom : m[i];
    base = base_of(m_new);
    rescale = exp2_approx(m[i] - base);
    m[i] = m_new;
  }
};

}  // namespace cutlass_ext

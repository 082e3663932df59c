// The online softmax (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, section 3.1) in the
// exp2 domain: running maximum m, running sum l, rescaling of O. Called by every main loop on the rows that a thread
// holds.
#pragma once

#include <cute/tensor.hpp>

#include "score_mod.hpp"

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

/// m and l of the `Rows` rows that a thread shares with `Lanes` lanes at `Stride`. l stays a sum over the thread's own
/// columns until `finish`: one shuffle tree a row instead of one a tile. m stays where it is until a row's maximum
/// passes it by more than `Slack` (log2 units): P is then up to 2^Slack instead of 1, the division at the end takes
/// that out again, and O is hardly ever rescaled (as FlashAttention-4 does).
template <int Rows, int Lanes, int Stride, int Slack = 0>
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

  /// What normalises row `i` of O, the sink included, and the row's lse (natural log); a row without keys gives 0 and
  /// the sink. `ApproximateLog` is for 16-bit inputs.
  template <bool ApproximateLog = false>
  CUTE_DEVICE float factor(int i, float sink_log2, float* lse) const {
    float const m_all = fmaxf(m[i], sink_log2);
    float const base = m_all == -INFINITY ? 0.f : m_all;
    float const rescale = exp2_approx(m[i] - base);
    float const sum = warp_sum<Lanes, Stride>(l[i]) * rescale + exp2_approx(sink_log2 - base);
    *lse = sum == 0.f ? -INFINITY : (base + (ApproximateLog ? log2_approx(sum) : log2f(sum))) * kLn2;
    return sum == 0.f ? 0.f : rescale * reciprocal(sum);
  }

  /// Normalises row `i` of O and returns its lse.
  template <bool ApproximateLog = false, class OutTensor>
  CUTE_DEVICE float finish(int i, OutTensor& O, float sink_log2) const {
    float lse;
    float const factor_of_row = factor<ApproximateLog>(i, sink_log2, &lse);
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(O); ++j) O(i, j) *= factor_of_row;
    return lse;
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
    float const m_new = tile_max > m[i] + Slack ? tile_max : m[i];
    base = m_new == -INFINITY ? 0.f : m_new;  // a row without a visible key so far: all of P is 0
    rescale = exp2_approx(m[i] - base);
    m[i] = m_new;
  }
};

}  // namespace cutlass_ext

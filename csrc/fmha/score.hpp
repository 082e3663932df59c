// Scale, softcap, ALiBi: from Q K^T to scores in the log2 domain, which is what the online softmax exponentiates, and
// what they do to gradients. Called by every main loop. The sink joins in `finish` (softmax.hpp).
#pragma once

#include "cute_tensor.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// tanh(x); approximately to 2e-7 of its value in two instructions of the special-function unit, for 16-bit inputs:
/// near 0, where 1 - 2 / (1 + e^2x) loses its digits, a minimax polynomial.
template <bool Approximate>
CUTE_HOST_DEVICE float tanh_of(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (Approximate) {
    float exp_2x, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exp_2x) : "f"(2.f * kLog2e * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exp_2x));
    float const y = x * x;
    float const series =
        fmaf(fmaf(fmaf(fmaf(0.01561257f, y, -0.05221177f), y, 0.13313116f), y, -0.33332597f), y * x, x);
    return fabsf(x) < 0.6f ? series : fmaf(-2.f, inverse, 1.f);
  }
#endif
  return tanhf(x);
}

struct ScoreMod {
  float softcap_log2;      // softcap * log2(e); 0: off
  float alibi_slope_log2;  // slope * log2(e); 0: off
  float sink_log2;         // sink * log2(e); -inf: none

  CUTE_HOST_DEVICE ScoreMod(Scores const& scores, int batch, int head)
      : softcap_log2(scores.softcap * kLog2e),
        alibi_slope_log2(scores.alibi_slopes ? scores.alibi_slopes[batch * scores.alibi_batch_stride + head] * kLog2e
                                             : 0.f),
        sink_log2(scores.sink_of(head) * kLog2e) {}

  /// Whether a call has scores changed between the two products.
  CUTE_HOST_DEVICE static bool changes(Scores const& scores) { return scores.softcap > 0.f || scores.alibi_slopes; }

  CUTE_HOST_DEVICE static bool caps(Scores const& scores) { return scores.softcap > 0.f; }

  /// What Q is multiplied by before the product, so that a plain score needs no instruction of its own: Q K^T then is
  /// the score in the log2 domain, or the argument of tanh.
  CUTE_HOST_DEVICE static float query_scale(Scores const& scores) {
    return scores.softcap > 0.f ? scores.softmax_scale / scores.softcap : scores.softmax_scale * kLog2e;
  }

  /// The argument that an error of this factor names.
  static char const* argument_of_scale(Scores const& scores) { return caps(scores) ? "softcap" : "softmax_scale"; }

  /// What sums of gradients of scores times keys, or rows, are to be multiplied by.
  CUTE_HOST_DEVICE static float gradient_scale(Scores const& scores) { return scores.softmax_scale; }

  /// Turns the products in `S` into scores. `p - j` of element (i, j) is `first_offset + offset(i, j)`, the latter
  /// known when unrolled.
  template <bool ApproximateTanh = false, class ScoreTensor, class Offset>
  CUTE_HOST_DEVICE void apply(ScoreTensor& S, int first_offset, Offset offset) const {
    if (softcap_log2 != 0.f) {
      CUTE_UNROLL
      for (int e = 0; e < cute::size(S); ++e) S(e) = softcap_log2 * tanh_of<ApproximateTanh>(S(e));
    }
    if (alibi_slope_log2 != 0.f) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size<0>(S); ++i) {
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(S); ++j) S(i, j) -= alibi(first_offset + offset(i, j));
      }
    }
  }

  /// The derivative of a score that `apply` made, not hidden, by softmax_scale <q, k>: of softcap 1 - (s / softcap)^2,
  /// of ALiBi, which shifts s, 1. `offset` is its p - j.
  CUTE_HOST_DEVICE float derivative(float score, int offset) const {
    if (softcap_log2 == 0.f) return 1.f;
    float const tanh = (score + alibi(offset)) / softcap_log2;
    return 1.f - tanh * tanh;
  }

  /// The same where there is softcap alone, without a division or a branch: `per_softcap_log2` is 1 over softcap_log2.
  /// Of a score that has been hidden since it is 0.
  CUTE_HOST_DEVICE static float derivative_of_softcap(float score, float per_softcap_log2) {
    float const tanh = score * per_softcap_log2;
    return fmaxf(fmaf(-tanh, tanh, 1.f), 0.f);
  }

  /// Multiplies `dS` by the derivatives of the scores `S`: those of `derivative` with one division for all.
  template <class GradientTensor, class ScoreTensor, class Offset>
  CUTE_HOST_DEVICE void differentiate(GradientTensor& dS, ScoreTensor const& S, int first_offset, Offset offset) const {
    if (softcap_log2 == 0.f) return;
    float const inverse = 1.f / softcap_log2;
    CUTE_UNROLL
    for (int i = 0; i < cute::size<0>(S); ++i) {
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(S); ++j) {
        float const tanh = (S(i, j) + alibi(first_offset + offset(i, j))) * inverse;
        dS(i, j) *= 1.f - tanh * tanh;
      }
    }
  }

 private:
  CUTE_HOST_DEVICE float alibi(int offset) const { return alibi_slope_log2 * fabsf(static_cast<float>(offset)); }
};

}  // namespace cutlass_ext

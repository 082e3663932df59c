// What backward kernels do otherwise where operands are float32 in two fp16 parts (../operand_parts.hpp), whatever the
// family: powers of two that P and dS are multiplied by, and rows whose P is to sum to 1. Used by sm80.hpp and
// sm90/parts.hpp.
#pragma once

#include "../operand.hpp"
#include "../softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

/// P is computed times 2^kShiftP: of rows with up to 2^16 equal weights its parts then err by 2^-23 of it or less, and
/// exponents lie near 0, where float32 rounds them least. An lse of other rows than these may let P be up to 4.
constexpr int kShiftP = 14;

/// The power of two with which the largest magnitude of a row of dS lies in [2^14, 2^15), and what undoes it.
struct RowScale {
  float to, back;

  CUTE_DEVICE explicit RowScale(float largest) {
    constexpr uint32_t kLeast = 24u << 23, kOne = 127u << 23, kTop = 14u << 23;
    uint32_t const exponent = max(__float_as_uint(largest) & 0x7f800000u, kLeast);  // 0 and what is next to it stay
    to = __uint_as_float(2 * kOne + kTop - exponent);
    back = __uint_as_float(exponent - kTop);
  }
};

/// What P of a row in parts comes to that is to be 1 (sum_for_one); `sum` is that of all keys, times 2^kShiftP. dQ is
/// divided by it; dK and dV get it from the lse that is left for their launch.
CUTE_DEVICE float sum_of_weights(BackwardParams const& params, float sum, int head, float lse_log2) {
  return sum_for_one(sum * (1.f / (1 << kShiftP)), params.sink_of(head) * kLog2e, lse_log2);
}

/// What sums of products of parts are multiplied by at last, where each has the terms of a tile of `Step` rows, and P
/// was times 2^kShiftP: what the tensor cores cut off is made up for. `scale` is that of the operands; of a row that is
/// in hand with fewer partners less was cut off.
template <int Step>
CUTE_DEVICE float factor_of_sums(float scale, int partners) {
  constexpr float kCutOff = kCutOffSum * Step / kKeysOfCutOff;
  return (partners >= Step ? fmaf(scale, kCutOff, scale) : scale) * (1.f / (1 << kShiftP));
}

}  // namespace cutlass_ext

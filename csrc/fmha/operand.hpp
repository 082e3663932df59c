// What operands are made of, what P, an accumulator of fp32, becomes as operand A of the next product on the tensor
// cores, and O on its way out. Called by the families that use them.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cutlass/numeric_types.h>

#include "cute_tensor.hpp"

namespace cutlass_ext {

/// What the tensor cores are given of an operand: a 16-bit one itself; of fp32 two parts, x = high + low, of 11 bits
/// each. A product of two is then three, what both low parts have together being 2^-22 of it or less (Ootomo and
/// Yokota, arXiv:2203.03341).
template <class Element>
struct Operand {
  using Part = Element;
  static constexpr int Parts = 1;
};
template <>
struct Operand<float> {
  using Part = cutlass::half_t;
  static constexpr int Parts = 2;
};

/// What Hopper's tensor cores cut off of a sum of products of parts, the small ones first or apart, relative to it:
/// every step of 16 makes it smaller by what the accumulator has no bits for. By an emulation of the tensor cores a sum
/// lacks 0.9e-7 after 4 steps and 1.6e-7 after 8 where its terms have both signs, as those of scores that differ have;
/// where they have one, 2.0e-7 after 4 steps.
constexpr float kCutOffScores = 1e-7f, kCutOffSum = 1.5e-7f;
constexpr int kKeysOfCutOff = 64;  // of that sum, or, of gradients, rows

/// Two floats rounded to the two halves of a register.
template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    __half2 const x = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  } else {
    __nv_bfloat162 const x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  }
}

/// The same of floats in two parts.
CUTE_DEVICE void split_operand(float left, float right, uint32_t& high, uint32_t& low) {
  using Part = Operand<float>::Part;
  high = pack<Part>(left, right);
  float2 const rounded = __half22float2(reinterpret_cast<__half2 const&>(high));
  low = pack<Part>(left - rounded.x, right - rounded.y);
}

/// Puts columns j (even) and j + 1 of a thread's row i, of two rows 8 apart, in the words of operand A. mma.sync and
/// WGMMA alike have 16 columns of both rows in four words, in the order in which the accumulators of 8 columns lie. The
/// low parts of all columns follow their high parts.
template <class Element, class Words>
CUTE_DEVICE void put_operand(Words& words, int i, int j, float left, float right) {
  if constexpr (Operand<Element>::Parts == 2) {
    split_operand(left, right, words[j + i], words[cute::size(words) / 2 + j + i]);
  } else {
    words[j + i] = pack<Element>(left, right);
  }
}

}  // namespace cutlass_ext

// What Hopper's backward kernels do otherwise where operands are float32 in two fp16 parts (../operand_parts.hpp):
// scores, and gradients of scores, as operands; sums of one tile, which are added up in float32 registers; and
// gradients to memory. Used by turns.hpp and epilogue.hpp.
#pragma once

#include "../../cute_tensor.hpp"
#include "../../mma/wgmma.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../../softmax.hpp"
#include "../parts.hpp"

namespace cutlass_ext::sm90 {

/// S, which holds P times 2^kShiftP, becomes dS in parts, each row scaled by a power of two of its own: gradients
/// of a sequence's rows differ in size as their weights do, and nothing bounds delta. `back` undoes the scales.
/// `difference(i, j, delta)`: dP - delta of element (i, j); `delta_of(i, j)`: of the rows of elements (i, j) and
/// (i, j + 1).
template <class ScoreTensor, class Words, class Difference, class DeltaOf>
CUTE_DEVICE void split_gradients(ScoreTensor& S, Words& words, Difference const& difference, DeltaOf const& delta_of,
                                 float (&back)[2]) {
  constexpr int kColumns = decltype(size<1>(S))::value;
  float largest[2] = {};
  CUTE_UNROLL
  for (int j = 0; j < kColumns; j += 2) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float2 const delta = delta_of(i, j);
      S(i, j) *= difference(i, j, delta.x);
      S(i, j + 1) *= difference(i, j + 1, delta.y);
      largest[i] = fmaxf(largest[i], fmaxf(fabsf(S(i, j)), fabsf(S(i, j + 1))));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    RowScale const scale(warp_max<4, 1>(largest[i]));
    back[i] = scale.back;
    CUTE_UNROLL
    for (int j = 0; j < kColumns; j += 2) put_operand<float>(words, i, j, S(i, j) * scale.to, S(i, j + 1) * scale.to);
  }
}

/// Adds to `sums` the product of one tile in parts, A in registers and B the tile of `stage` of `data`, of `Columns`
/// columns in both parts, read along its rows; a panel of columns at a time, whose sum the tensor cores have alone:
/// longer ones would lose bits. Rows are multiplied by `factors`. `meanwhile` runs when the first panel is under way;
/// `Issues`: whether it issues a product of its own.
template <class Traits, int Columns, bool Issues, class Sums, class A, class Meanwhile>
CUTE_DEVICE void add_product(Sums& sums, A const& a, typename Traits::Part* data, int stage, float const (&factors)[2],
                             Meanwhile const& meanwhile) {
  constexpr int Step = Traits::Step, kPanels = Columns / kPanel / 2, kSteps = Step / 16;
  using Mma = typename Traits::template MmaGradient<kPanel>;
  auto const panel_of = [&](int panel) {
    auto* const at = data + (stage * (Columns / kPanel) + panel) * Step * kPanel;
    return Mma::operand_b(make_tensor(make_smem_ptr(at), LayoutAlongRows<typename Traits::Part, Step, kPanel>{}));
  };
  for_each(make_int_sequence<kPanels>{}, [&](auto panel) {
    Tensor cT = Mma::template sums<kPanel>();
    Tensor high = panel_of(panel), low = panel_of(panel + kPanels);
    gemm_async<0, kSteps, kSteps>(Mma{}, a, high, low, cT, true);
    constexpr bool kFirst = decltype(panel)::value == 0;
    if constexpr (kFirst) meanwhile();
    warpgroup_wait<kFirst && Issues ? 1 : 0>();
    warpgroup_fence_operand(cT);
    Tensor of_tile = rows_and_columns(cT);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kPanel / 4; ++j)
        sums(i, panel * (kPanel / 4) + j) = fmaf(of_tile(i, j), factors[i], sums(i, panel * (kPanel / 4) + j));
    }
  });
}

/// Writes the thread's two rows of float32 gradients, as far as they exist; `to` is column 0 of the warp's first row.
template <class Sums>
CUTE_DEVICE void store_floats(float* to, int64_t stride, int rows, int cols, Sums const& sums,
                              float const (&factors)[2], int lane) {
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = lane / 4 + row_of(i);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(sums); j += 2) {
      int const col = key_of(j) + lane % 4 * 2;
      if (row < rows && col < cols)
        *reinterpret_cast<float2*>(to + row * stride + col) =
            make_float2(sums(i, j) * factors[i], sums(i, j + 1) * factors[i]);
    }
  }
}

}  // namespace cutlass_ext::sm90

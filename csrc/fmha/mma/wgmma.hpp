// Products by WGMMA, their operands in shared memory, where a thread's elements of an accumulator of 64 rows lie. Used
// by the Hopper kernels.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace cutlass_ext::sm90 {

using namespace cute;

/// A tile in panels of 128 bytes, row after row, swizzled: as the operand of a product that runs along its columns (Q
/// and K), and, the same bytes, of one that runs along its rows (V).
template <class Element, int Rows, int Columns>
using LayoutAlongColumns =
    decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<Rows>, Int<Columns>>{}));
template <class Element, int Rows, int Columns>
using LayoutAlongRows =
    decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{}, Shape<Int<Columns>, Int<Rows>>{}, Step<_2, _1>{}));

/// Products of tiles of `Columns` columns by instruction `Op`, which CuTe has chosen for them: by one. Of other widths
/// than 8, 16, 32, 64, 96, 128, 192 and 256 it chooses pieces, which take 1.4 times as long, unless
/// CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED is defined before it is included: then a file takes 28 s longer to compile.
template <int Columns, class Op>
constexpr auto make_product(Op op) {
  static_assert(size<1>(typename MMA_Traits<Op>::Shape_MNK{}) == Columns,
                "define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED in front of what the file includes");
  return make_tiled_mma(op);
}

/// C += A B (C = A B where `zero`) over `Steps` times 16, issued and not waited for.
template <int Steps, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma mma, A const& a, B const& b, C& c, bool zero) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int i = 0; i < Steps; ++i) {
    cute::gemm(mma, a(_, _, i), b(_, _, i), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// C = A B where B is in two places, `Steps` times 16 each.
template <int Steps, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma mma, A const& a, B const& b, B const& second, C& c) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int i = 0; i < 2 * Steps; ++i) {
    cute::gemm(mma, a(_, _, i), i < Steps ? b(_, _, i) : second(_, _, i - Steps), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// The same of operands in two parts, the small products first, from step `First` on: A has its low parts `Apart` steps
/// behind the high ones.
template <int First, int Steps, int Apart, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma mma, A const& a, B const& b, B const& b_low, C& c, bool zero) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  auto const add = [&](int first, B const& of_b) {
    CUTE_UNROLL
    for (int i = First; i < First + Steps; ++i) {
      cute::gemm(mma, a(_, _, first + i), of_b(_, _, i), c);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  };
  add(0, b_low);
  add(Apart, b);
  add(0, b);
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// The rows and columns that a thread holds of an accumulator of 64 x N.
template <class Accumulator>
CUTE_DEVICE auto rows_and_columns(Accumulator& c) {
  constexpr int N = decltype(size(c))::value / 4;
  return make_tensor(c.data(), Layout<Shape<_2, Shape<_2, Int<N>>>, Stride<_2, Stride<_1, _4>>>{});
}

/// Where element (i, j) of a thread's scores lies, counted from its first row and key.
CUTE_HOST_DEVICE constexpr int row_of(int i) { return i * 8; }
CUTE_HOST_DEVICE constexpr int key_of(int j) { return j / 2 * 8 + j % 2; }

/// How many of a thread's columns lie before `key`, counted from its first.
CUTE_HOST_DEVICE constexpr int columns_before(int key) {
  return key <= 0 ? 0 : key / 8 * 2 + (key % 8 < 2 ? key % 8 : 2);
}

}  // namespace cutlass_ext::sm90

// Products by WGMMA, their operands in shared memory, where a thread's elements of an accumulator of 64 rows lie. Used
// by the Hopper kernels.
#pragma once

#include <utility>

#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "../cute_tensor.hpp"
#include "wgmma_widths.hpp"

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

/// Where operand A of a product lies.
enum class SourceOfA { Shared, Registers };

/// WGMMA of 64 rows, `Columns` columns and 16 steps, of 16 bits and with sums of 32; A and B lie along their columns
/// (Major::K) or along their rows. CuTe's instruction: `fma(a..., b, c..., scale)`.
template <int Columns, class Element, SourceOfA Source, GMMA::Major MajorA, GMMA::Major MajorB>
struct InstructionOf;

#define CUTLASS_EXT_INSTRUCTION(N, ELEMENT, TYPE, SOURCE, ENDING)     \
  template <GMMA::Major MajorA, GMMA::Major MajorB>                   \
  struct InstructionOf<N, ELEMENT, SourceOfA::SOURCE, MajorA, MajorB> \
      : SM90::GMMA::MMA_64x##N##x16_F32##TYPE##TYPE##_##ENDING<MajorA, MajorB> {};
#define CUTLASS_EXT_INSTRUCTIONS(N)                        \
  CUTLASS_EXT_INSTRUCTION(N, half_t, F16, Shared, SS)      \
  CUTLASS_EXT_INSTRUCTION(N, half_t, F16, Registers, RS)   \
  CUTLASS_EXT_INSTRUCTION(N, bfloat16_t, BF16, Shared, SS) \
  CUTLASS_EXT_INSTRUCTION(N, bfloat16_t, BF16, Registers, RS)
CUTLASS_EXT_INSTRUCTIONS(32)
CUTLASS_EXT_INSTRUCTIONS(64)
CUTLASS_EXT_INSTRUCTIONS(96)
CUTLASS_EXT_INSTRUCTIONS(128)
CUTLASS_EXT_INSTRUCTIONS(192)
CUTLASS_EXT_INSTRUCTIONS(256)
#undef CUTLASS_EXT_INSTRUCTIONS
#undef CUTLASS_EXT_INSTRUCTION

/// Whether these are among them; the others are those of wgmma_widths.hpp.
template <int Columns>
constexpr bool is_usual_width = Columns == 32 || Columns == 96 || (Columns % 64 == 0 && Columns <= 256);

/// Products by one instruction of 64 rows and `Columns` columns. CuTe's instructions, descriptors and layouts, without
/// its TiledMMA, with which a file of one kernel took a compiler 25 s for 19.
template <int Columns, class Element, SourceOfA Source, GMMA::Major MajorA = GMMA::Major::K,
          GMMA::Major MajorB = GMMA::Major::K>
struct Product {
  /// A tile of shared memory as an operand: descriptors of (1, blocks of 64 rows or `Columns` columns, steps, and what
  /// further modes the tile has).
  template <class Tile>
  CUTE_DEVICE static auto operand_a(Tile const& rows) {
    return make_tensor<GMMA::smem_desc<MajorA>>(tiled_divide(rows, Shape<_64, _16>{}));
  }
  template <class Tile>
  CUTE_DEVICE static auto operand_b(Tile const& columns) {
    return make_tensor<GMMA::smem_desc<MajorB>>(tiled_divide(columns, Shape<Int<Columns>, _16>{}));
  }
  /// A thread's part of 64 rows of `N` columns: of operand A, and of sums.
  template <int N>
  using ShapeOfA = Shape<Shape<_2, _2, _2>, _1, Int<N / 16>>;
  template <int N>
  using ShapeOfSums = Shape<Shape<_2, _2, Int<Columns / 8>>, _1, Int<N / Columns>>;
  template <int N>
  CUTE_DEVICE static auto registers_a() {
    static_assert(N % 16 == 0, "whole steps");
    return make_tensor<Element>(ShapeOfA<N>{});
  }
  template <int N>
  CUTE_DEVICE static auto sums() {
    static_assert(N % Columns == 0, "whole instructions");
    return make_tensor<float>(ShapeOfSums<N>{});
  }

  /// C += A B (C = A B where `scale` is Zero) of one step, issued and not waited for.
  template <class A, class B, class C>
  CUTE_DEVICE static void issue(A const& a, B const& b, C& c, GMMA::ScaleOut scale) {
    CUTE_UNROLL
    for (int n = 0; n < size<2>(c); ++n) {
      Tensor sums = c(_, _0{}, n);
      GmmaDescriptor const of_b = b(_0{}, n);
      if constexpr (Source == SourceOfA::Registers) {
        Tensor words = recast<uint32_t>(a);
        if constexpr (is_usual_width<Columns>) {
          fma(sums, scale, kSums, of_b.desc_, words(0), words(1), words(2), words(3));
        } else {
          static_assert(MajorB == GMMA::Major::MN, "what there is");
          InstructionOfRegisters<Columns, Element>::fma(words(0), words(1), words(2), words(3), of_b.desc_, &sums(0),
                                                        scale);
        }
      } else {
        static_assert(decltype(size<1>(a))::value == 1, "64 rows");
        GmmaDescriptor const of_a = a(_0{}, _0{});
        if constexpr (is_usual_width<Columns>) {
          fma(sums, scale, kSums, of_b.desc_, of_a.desc_);
        } else {
          static_assert(MajorA == GMMA::Major::K && MajorB == GMMA::Major::K, "what there is");
          InstructionOfOtherWidth<Columns, Element>::fma(of_a.desc_, of_b.desc_, &sums(0), scale);
        }
      }
    }
  }

 private:
  static constexpr std::make_index_sequence<Columns / 2> kSums{};

  template <class Sums, size_t... E, class... A>
  CUTE_DEVICE static void fma(Sums& sums, GMMA::ScaleOut scale, std::index_sequence<E...>, uint64_t b, A... a) {
    InstructionOf<Columns, Element, Source, MajorA, MajorB>::fma(a..., b, sums(E)..., scale);
  }
};

/// C += A B (C = A B where `zero`) over `Steps` times 16, issued and not waited for.
template <int Steps, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma, A const& a, B const& b, C& c, bool zero) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  auto scale = zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int i = 0; i < Steps; ++i) {
    Mma::issue(a(_, _, i), b(_, _, i), c, scale);
    scale = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// C = A B where B is in two places, `Steps` times 16 each.
template <int Steps, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma, A const& a, B const& b, B const& second, C& c) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  auto scale = GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int i = 0; i < 2 * Steps; ++i) {
    Mma::issue(a(_, _, i), i < Steps ? b(_, _, i) : second(_, _, i - Steps), c, scale);
    scale = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// The same of operands in two parts, the small products first, from step `First` on: A has its low parts `Apart` steps
/// behind the high ones.
template <int First, int Steps, int Apart, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma, A const& a, B const& b, B const& b_low, C& c, bool zero) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  auto scale = zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  auto const add = [&](int first, B const& of_b) {
    CUTE_UNROLL
    for (int i = First; i < First + Steps; ++i) {
      Mma::issue(a(_, _, first + i), of_b(_, _, i), c, scale);
      scale = GMMA::ScaleOut::One;
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

// What the Hopper kernels do with tiles: copies by the tensor memory accelerator, products by WGMMA, masks, and rows of
// O to memory. Used by fmha.hpp and short.hpp.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "../operand.hpp"
#include "../swizzle.hpp"
#include "../visibility.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// Copies `Rows` rows of one head, in panels; `barrier` counts the bytes as they land.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_panels(CUtensorMap const& map, Barrier& barrier, Element* smem, int row, int head, int batch,
                             TMA::CacheHintSm90 hint) {
  barrier.arrive_and_expect_tx(Rows * Cols * sizeof(Element));
  CUTE_UNROLL
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), static_cast<uint64_t>(hint),
                           smem + panel * Rows * kPanel, panel * kPanel, row, head, batch);
  }
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

/// The operands of a warpgroup's products: 64 rows of Q, K and V in all their stages, P in registers.
template <class Traits>
CUTE_DEVICE auto operand_q(typename Traits::Element* q, int row_block) {
  Tensor rows = local_tile(make_tensor(make_smem_ptr(q), typename Traits::LayoutQ{}),
                           Shape<Int<kAtomRows>, Int<Traits::ColumnsQK>>{}, make_coord(row_block, _0{}));
  return typename Traits::MmaQK{}.get_slice(0).partition_fragment_A(rows);  // no thread index in a descriptor
}
template <class Traits>
CUTE_DEVICE auto operand_k(typename Traits::Element* k) {
  return typename Traits::MmaQK{}.get_slice(0).partition_fragment_B(
      make_tensor(make_smem_ptr(k), typename Traits::LayoutK{}));
}
template <class Traits>
CUTE_DEVICE auto operand_v(typename Traits::Element* v) {
  return typename Traits::MmaOfV{}.get_slice(0).partition_fragment_B(
      make_tensor(make_smem_ptr(v), typename Traits::LayoutV{}));
}
template <class Traits>
CUTE_DEVICE auto operand_p() {
  typename Traits::MmaPV mma;
  return make_tensor<typename Traits::Element>(partition_shape_A(mma, Shape<Int<kAtomRows>, Int<Traits::B_c>>{}));
}

/// Their accumulators.
template <class Traits>
CUTE_DEVICE auto accumulator_s() {
  typename Traits::MmaQK mma;
  return partition_fragment_C(mma, Shape<Int<kAtomRows>, Int<Traits::B_c>>{});
}
template <class Traits>
CUTE_DEVICE auto accumulator_o() {
  typename Traits::MmaPV mma;
  return partition_fragment_C(mma, Shape<Int<kAtomRows>, Int<Traits::HeadDimV>>{});
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

/// Which keys of a tile the two rows of a thread see, a bit for each of its columns.
template <int Columns>
struct TileMask {
  static constexpr int Words = (Columns + 31) / 32;
  uint32_t visible[2][Words];

  TileMask() = default;
  /// Of the thread's first row; keys are counted from the tile's first.
  CUTE_DEVICE TileMask(Visibility const& visibility, int row, int lane) {
    Visibility const mine = visibility.counted_from(lane % 4 * 2).with_finite_windows();
    auto low_bits = [](int n) { return n < 32 ? (1u << (n < 0 ? 0 : n)) - 1 : ~0u; };
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Range const keys = mine.keys_of_row(row + row_of(i));
      int const begin = columns_before(keys.begin), end = columns_before(keys.end);
      CUTE_UNROLL
      for (int word = 0; word < Words; ++word)
        visible[i][word] = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
    }
  }

  /// Hides the others. By bits, seven of which one instruction makes predicates of: comparisons are dear beside WGMMA.
  template <class ScoreTensor>
  CUTE_DEVICE void apply(ScoreTensor& S) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Columns; ++j) {
        if (!(visible[i][j / 32] & (1u << j % 32))) S(i, j) = -INFINITY;
      }
    }
  }
};

/// Writes a warp's 16 rows of O, as far as they exist, in 16 bits to `to`. Through 16 rows of shared memory that are
/// the warp's own, so that global memory is written 16 bytes a lane.
template <class Traits, class OutTensor>
CUTE_DEVICE void store_rows(typename Traits::Element* to, int64_t row_stride, int rows, int head_dim_v,
                            OutTensor const& O, typename Traits::Element* staging, int lane) {
  using Element = typename Traits::Element;
  to += lane / 8 * row_stride;
  auto chunk_at = [&](int panel, int row, int chunk) {
    return staging + (panel % Traits::StagedPanels * 16 + row) * kPanel + swizzled_chunk<Element>(chunk, row);
  };
  CUTE_UNROLL
  for (int first = 0; first < Traits::PanelsV; first += Traits::StagedPanels) {
    constexpr auto end_of = [](int first) {
      return first + Traits::StagedPanels < Traits::PanelsV ? first + Traits::StagedPanels : Traits::PanelsV;
    };
    CUTE_UNROLL
    for (int panel = first; panel < end_of(first); ++panel) {
      CUTE_UNROLL
      for (int n = 0; n < kPanel / 16 && panel * kPanel + n * 16 < Traits::HeadDimV; ++n) {
        int const j = panel * kPanel / 4 + n * 4;
        SM90_U32x4_STSM_N::copy(pack<Element>(O(0, j), O(0, j + 1)), pack<Element>(O(1, j), O(1, j + 1)),
                                pack<Element>(O(0, j + 2), O(0, j + 3)), pack<Element>(O(1, j + 2), O(1, j + 3)),
                                *reinterpret_cast<uint128_t*>(chunk_at(panel, lane % 16, 2 * n + lane / 16)));
      }
    }
    __syncwarp();
    CUTE_UNROLL
    for (int panel = first; panel < end_of(first); ++panel) {
      int const col = panel * kPanel + lane % 8 * 8;
      CUTE_UNROLL
      for (int pass = 0; pass < 4; ++pass) {
        int const row = pass * 4 + lane / 8;
        if (row < rows && col < head_dim_v) {
          *reinterpret_cast<uint4*>(to + pass * 4 * row_stride + col) =
              *reinterpret_cast<uint4 const*>(chunk_at(panel, row, lane % 8));
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace cutlass_ext::sm90

// What a consumer warpgroup of the Hopper kernels does with tiles: operands and accumulators of its products, masks,
// rows of O to memory. Used by fmha.hpp, short.hpp and the backward pass (../backward/sm90/).
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "../cute_tensor.hpp"
#include "../mma/load_matrices.hpp"
#include "../mma/wgmma.hpp"
#include "../operand.hpp"
#include "../optimization_barriers.hpp"
#include "../params.hpp"
#include "../swizzle.hpp"
#include "../visibility.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// A thread's place among the consumers, read when it is asked for: kept in registers around the main loop it would
/// take those of the accumulators. `Index`: whether the compiler knows that it is not negative. Then a remainder is one
/// instruction for four; forward kernels with a bias, a mask or dropout spill 8 to 36 bytes more for it, backward ones
/// up to 16 less.
template <class Index>
struct ThreadOf {
  int lane, warp_row;  // first row of the warp, counted in the query tile

  CUTE_DEVICE ThreadOf() {
    Index thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread % 32;
    warp_row = (static_cast<int>(thread / 32) - kWarpgroup / 32) * 16;
  }
};
using ConsumerThread = ThreadOf<int>;
using GradientThread = ThreadOf<unsigned>;

/// The operands of a warpgroup's products: 64 rows of Q, K and V in all their stages, P in registers.
template <class Traits>
CUTE_DEVICE auto operand_q(typename Traits::Part* q, int row_block) {
  Tensor rows = local_tile(make_tensor(make_smem_ptr(q), typename Traits::LayoutQ{}),
                           Shape<Int<kAtomRows>, Int<Traits::ColumnsQK>>{}, make_coord(row_block, _0{}));
  return Traits::MmaQK::operand_a(rows);  // no thread index in a descriptor
}
template <class Traits>
CUTE_DEVICE auto operand_k(typename Traits::Part* k) {
  return Traits::MmaQK::operand_b(make_tensor(make_smem_ptr(k), typename Traits::LayoutK{}));
}
template <class Traits>
CUTE_DEVICE auto operand_v(typename Traits::Part* v) {
  return Traits::MmaOfV::operand_b(make_tensor(make_smem_ptr(v), typename Traits::LayoutV{}));
}
template <class Traits>
CUTE_DEVICE auto operand_p() {
  return Traits::MmaPV::template registers_a<Traits::Parts * Traits::B_c>();
}

/// Their accumulators.
template <class Traits>
CUTE_DEVICE auto accumulator_s() {
  return Traits::MmaQK::template sums<Traits::B_c>();
}
template <class Traits>
CUTE_DEVICE auto accumulator_o() {
  return Traits::MmaPV::template sums<Traits::HeadDimV>();
}

/// Which keys of a tile the two rows of a thread see, a bit for each of its columns.
template <int Columns>
struct TileMask {
  static constexpr int Words = (Columns + 31) / 32;
  uint32_t visible[2][Words];

  TileMask() = default;
  /// Of the thread's rows, which are of query rows `tokens`; keys are counted from the tile's first.
  CUTE_DEVICE TileMask(Visibility const& visibility, int const (&tokens)[2], int lane) {
    Visibility const mine = visibility.counted_from(lane % 4 * 2).with_finite_windows();
    auto low_bits = [](int n) { return n < 32 ? (1u << (n < 0 ? 0 : n)) - 1 : ~0u; };
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Range const keys = mine.keys_of_row(tokens[i]);
      int const begin = columns_before(keys.begin), end = columns_before(keys.end);
      CUTE_UNROLL
      for (int word = 0; word < Words; ++word)
        visible[i][word] = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
    }
  }

  /// Makes those of `tokens` that do not exist see nothing.
  CUTE_DEVICE void hide_rows_from(int end, int const (&tokens)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int word = 0; word < Words; ++word) visible[i][word] = tokens[i] < end ? visible[i][word] : 0;
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

/// Adds the bias times `factor` to scores, of which `load` brings words of `Sixteens` times 16 columns: of the thread's
/// two rows, and of those 8 columns further.
template <int Sixteens, class ScoreTensor, class Load>
CUTE_DEVICE void add_bias_of_quads(ScoreTensor& S, float factor, BiasType type, Load const& load) {
  auto const add = [&](auto const& floats) {
    CUTE_UNROLL
    for (int m = 0; m < Sixteens; ++m) {
      uint32_t x[4];
      load(m, x);
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) {
        float2 const two = floats(x[r]);
        int const i = r % 2, j = 4 * m + r / 2 * 2;
        S(i, j) = fmaf(two.x, factor, S(i, j));
        S(i, j + 1) = fmaf(two.y, factor, S(i, j + 1));
      }
    }
  };
  if (type == BiasType::Float16) {
    add([](uint32_t x) { return floats_of(x, BiasType::Float16); });
  } else {
    add([](uint32_t x) { return floats_of(x, BiasType::BFloat16); });
  }
}

/// Writes a warp's 16 rows of O, as far as they exist, in 16 bits: in pass i of four a lane's row 4i + lane / 8 to
/// `to + offset_of(i)`. Through 16 rows of shared memory that are the warp's own, so that global memory is written 16
/// bytes a lane. O's first `lead` columns are left out: `to` is where they would go.
template <class Traits, class OutTensor, class OffsetOf>
CUTE_DEVICE void store_rows(typename Traits::Element* to, OffsetOf const& offset_of, int rows, int head_dim_v,
                            OutTensor const& O, typename Traits::Element* staging, int lane, int lead = 0) {
  using Element = typename Traits::Element;
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
        if (row < rows && static_cast<unsigned>(col - lead) < static_cast<unsigned>(head_dim_v)) {
          *reinterpret_cast<uint4*>(to + offset_of(pass) + col) =
              *reinterpret_cast<uint4 const*>(chunk_at(panel, row, lane % 8));
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace cutlass_ext::sm90

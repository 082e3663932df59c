// A tile of a bias that the copy engine has brought: from shared memory to scores. Used by fmha.hpp and short.hpp.
#pragma once

#include "../cute_tensor.hpp"
#include "../mma/load_matrices.hpp"
#include "../operand.hpp"
#include "../params.hpp"
#include "../swizzle.hpp"
#include "warpgroup.hpp"

namespace cutlass_ext::sm90 {

/// A warp's rows of a tile of `Keys` keys. `Ahead`: whether they are loaded when they are taken, which takes registers,
/// or when they are added.
template <class Element, int Keys, bool Ahead>
struct CopiedBias {
  static constexpr int kLoads = Keys / 16;  // of four matrices each: 16 rows of 16 keys
  static constexpr bool kAhead = Ahead;

  uint32_t from;  // where the lane's address of the first load lies in shared memory
  uint32_t words[kAhead ? kLoads : 1][4];

  /// Those from `warp_row` on of the 64 that begin at `biases`.
  CUTE_DEVICE void take(Element const* biases, int warp_row, int lane) {
    int const row = warp_row + lane % 16, half = lane / 16;
    from = cute::cast_smem_ptr_to_uint(biases + row * kPanel + swizzled_chunk<Element>(half, row));
    if constexpr (kAhead) {
      CUTE_UNROLL
      for (int n = 0; n < kLoads; ++n) load(n, words[n]);
    }
  }

  /// Adds `factor` times as much to scores.
  template <class ScoreTensor>
  CUTE_DEVICE void add(ScoreTensor& S, BiasType type, float factor) const {
    add_bias_of_quads<kLoads>(S, factor, type, [&](int n, uint32_t (&x)[4]) {
      if constexpr (kAhead) {
        CUTE_UNROLL
        for (int w = 0; w < 4; ++w) x[w] = words[n][w];
      } else {
        load(n, x);
      }
    });
  }

 private:
  CUTE_DEVICE void load(int n, uint32_t (&to)[4]) const {
    // Chunks of 16 bytes are swizzled by exclusive or within 128, so that those of load n are off by its bits.
    load_matrices(to, (from ^ n * 16 % kPanel * 2) + n * 16 / kPanel * kAtomRows * kPanel * 2);
  }
};

}  // namespace cutlass_ext::sm90

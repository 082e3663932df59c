// A bias that is all that changes scores, in kernels that add to dQ: the copy engine brings a tile of it, and consumers
// have theirs in registers a turn ahead, so that neither they nor the next copy wait. Used by traits.hpp, producer.hpp
// and consumer.hpp.
#pragma once

#include <cute/tensor.hpp>

#include "../../mma/wgmma.hpp"
#include "../../pairs.hpp"
#include "../../sm90/pipeline.hpp"
#include "../../swizzle.hpp"
#include "../params.hpp"
#include "pairs.hpp"

namespace cutlass_ext::sm90 {

/// Where a tile of it lies in shared memory, in panels of 64 keys: rows of 128 bytes, swizzled.
template <int kElements>
struct TileOfBias {
  alignas(1024) uint16_t bias[kElements];
  Barrier bias_full, bias_empty;
};
template <>
struct TileOfBias<0> {};

/// A thread's part of a tile: words of two rows of a key. Up to head_dim 64 it has those of the next tile in registers
/// while it works on this one; wider heads have no room for them (520 bytes spilled).
template <class Traits>
class BiasAhead {
  static constexpr int kSixteens = Traits::Step / 16;
  static constexpr bool kAhead = Traits::HeadDim <= 64;
  uint32_t words_[kAhead ? kSixteens : 1][4];

 public:
  /// Of the next tile, once it is there; lets its place go.
  template <class Shared>
  CUTE_DEVICE void take(Shared& shared, int row_block, uint32_t& phase) {
    if constexpr (!kAhead) return;
    read(shared, row_block, phase, [&](auto const& load) {
      CUTE_UNROLL
      for (int m = 0; m < kSixteens; ++m) load(m, words_[m % std::size(words_)]);
    });
  }
  /// Adds the bias of this one times `factor` to scores.
  template <class ScoreTensor, class Shared>
  CUTE_DEVICE void add(ScoreTensor& S, float factor, BiasType type, Shared& shared, int row_block, uint32_t& phase) const {
    if constexpr (kAhead) {
      add_bias_of_quads<kSixteens>(S, factor, type, [&](int m, uint32_t (&x)[4]) {
        CUTE_UNROLL
        for (int r = 0; r < 4; ++r) x[r] = words_[m][r];
      });
    } else {
      read(shared, row_block, phase, [&](auto const& load) { add_bias_of_quads<kSixteens>(S, factor, type, load); });
    }
  }

 private:
  /// By a warp of warpgroup `row_block`.
  template <class Shared, class Take>
  CUTE_DEVICE static void read(Shared& shared, int row_block, uint32_t& phase, Take const& take) {
    ConsumerThread const thread;
    int const row = thread.lane / 16 * 8 + thread.lane % 8, chunk = thread.warp_row % kAtomRows / 8 + thread.lane / 8 % 2;
    uint32_t const from = cast_smem_ptr_to_uint(shared.bias + row_block * Traits::Step * kPanel + row * kPanel +
                                                swizzled_chunk<uint16_t>(chunk, row));
    shared.bias_full.wait_for(phase);
    phase ^= 1;
    take([&](int m, uint32_t (&x)[4]) { load_across(from + m * (16 * kPanel * sizeof(uint16_t)), x); });
    __syncwarp();
    if (elect_one_sync()) shared.bias_empty.arrive();
  }
};

}  // namespace cutlass_ext::sm90

// A bias that with a mask, or alone, is all that changes scores (Traits::PlainBias): the copy engine brings a tile of
// it, consumers read it, up to head_dim 64 a turn ahead, and write its gradient where that is dS. Used by traits.hpp,
// producer.hpp, mainloop.hpp and turns.hpp.
#pragma once

#include <iterator>

#include "../../cute_tensor.hpp"
#include "../../mma/wgmma.hpp"
#include "../../pairs.hpp"
#include "../../sm90/pipeline.hpp"
#include "../../swizzle.hpp"
#include "../params.hpp"
#include "pairs.hpp"
#include "tile_scheduler.hpp"

namespace cutlass_ext::sm90 {

/// Where a tile of it lies in shared memory, in panels of 64 keys: rows of 128 bytes, swizzled.
template <int kElements>
struct TileOfBias {
  alignas(1024) uint16_t biases[kElements];
  Barrier bias_full, bias_empty;
};
template <>
struct TileOfBias<0> {};

/// A thread's part of a tile: words of two rows of a key. `stage`: where the tile's rows of dout are, up to head_dim
/// 64 those of q, too; of an even number of stages, so that it has the phase of the one place for tiles of the bias. Up
/// to head_dim 64 it has those of the next tile in registers while it works on this one; wider heads have no room for
/// them (520 bytes spilled).
template <class Traits>
class BiasAhead {
  static constexpr int kSixteens = Traits::Step / 16;
  static constexpr bool kAhead = Traits::HeadDim <= 64;
  static_assert(!kAhead || Traits::Stages == Traits::StagesV, "the stage of a tile's rows is that of its rows of dout");
  uint32_t words_[kAhead ? kSixteens : 1][4];

 public:
  /// Of the next tile, once it is there; lets its place go.
  template <class Shared>
  CUTE_DEVICE void take(Shared& shared, int row_block, int stage) {
    if constexpr (!kAhead) return;
    read(shared, row_block, stage, [&](auto const& load) {
      CUTE_UNROLL
      for (int m = 0; m < kSixteens; ++m) load(m, words_[m % std::size(words_)]);
    });
  }
  /// Adds the bias of this one times `factor` to scores.
  template <class ScoreTensor, class Shared>
  CUTE_DEVICE void add(ScoreTensor& S, float factor, BiasType type, Shared& shared, int row_block, int stage) const {
    if constexpr (kAhead) {
      add_bias_of_quads<kSixteens>(S, factor, type, [&](int m, uint32_t (&x)[4]) {
        CUTE_UNROLL
        for (int r = 0; r < 4; ++r) x[r] = words_[m][r];
      });
    } else {
      read(shared, row_block, stage, [&](auto const& load) { add_bias_of_quads<kSixteens>(S, factor, type, load); });
    }
  }

 private:
  /// By a warp of warpgroup `row_block`.
  template <class Shared, class Take>
  CUTE_DEVICE static void read(Shared& shared, int row_block, int stage, Take const& take) {
    static_assert(Traits::StagesV % 2 == 0, "whose lowest bit is the phase");
    GradientThread const thread;
    int const row = thread.lane / 16 * 8 + thread.lane % 8,
              chunk = thread.warp_row % kAtomRows / 8 + thread.lane / 8 % 2;
    uint32_t const from = cast_smem_ptr_to_uint(shared.biases + row_block * Traits::Step * kPanel + row * kPanel +
                                                swizzled_chunk<uint16_t>(chunk, row));
    shared.bias_full.wait_for(stage % 2);
    take([&](int m, uint32_t (&x)[4]) { load_matrices_transposed(x, from + m * (16 * kPanel * sizeof(uint16_t))); });
    finish_loads_of_shared();
    if (elect_one_sync()) shared.bias_empty.arrive();
  }
};

/// A matrix of 8 by 8 numbers of 16 bits, a word of which each lane has, the other way round.
CUTE_DEVICE uint32_t transposed(uint32_t word) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

/// Writes dBias of a tile, where that is dS: `words` are the operand of its 16 keys that a warp has. Two keys of a row
/// at a time.
template <class Traits, class Words>
CUTE_DEVICE void store_dbias(BackwardParams const& params, GradientTile<Traits> const& tile, int t, int head,
                             Words const& words) {
  GradientThread const thread;
  int const row = t * Traits::Step + thread.lane / 4,
            key = tile.work.row0 + thread.warp_row % Traits::Held + thread.lane % 4 * 2;
  int const rows = params.n_q - row, keys = params.n_kv - key;
  auto* to = static_cast<uint16_t*>(params.dbias) + tile.work.batch * params.dbias_batch + head * params.dbias_head +
             row * params.dbias_row + key;
  CUTE_UNROLL
  for (int eight = 0; eight < Traits::Step / 8; ++eight, to += 8 * params.dbias_row) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const two_keys = transposed(words(2 * eight + i));
      if (eight * 8 < rows && i * 8 < keys) *reinterpret_cast<uint32_t*>(to + i * 8) = two_keys;
    }
  }
}

}  // namespace cutlass_ext::sm90

// A packed mask as the backward kernels want it: from the side of keys, and which tiles it hides, shows or cuts.
// Launched by kernels/backward_preprocess.cu.
#pragma once

#include "../pairs.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kSideThreads = 128;

/// `params.transposed_mask`, a CTA for 128 rows of 32 keys.
inline __global__ void __launch_bounds__(kSideThreads)
    transposed_mask_kernel(__grid_constant__ BackwardParams const params) {
  TransposedMask const to(params);
  int const words = Mask::words_of(params.n_kv), blocks = to.words / 4, lane = threadIdx.x % 32;
  int64_t rest = blockIdx.x / words;
  int const word = static_cast<int>(blockIdx.x - rest * words), block = static_cast<int>(rest % blocks);
  rest /= blocks;
  int const head = static_cast<int>(rest % to.heads), b = static_cast<int>(rest / to.heads);
  int const row = block * kSideThreads + threadIdx.x, key = word * 32 + lane;
  Mask const& mask = params.mask;
  uint32_t const of_row =
      row < params.n_q ? __ldg(mask.bits + b * mask.batch + head * mask.head + row * mask.row + word) : 0;
  uint32_t of_key = 0;
  CUTE_UNROLL
  for (int i = 0; i < 32; ++i) {
    uint32_t const rows = __ballot_sync(0xffffffffu, of_row >> i & 1);
    of_key = lane == i ? rows : of_key;
  }
  if (key < params.n_kv) params.transposed_mask[to.first(params, b, head, key) + block * 4 + threadIdx.x / 32] = of_key;
}

/// `params.tile_map`, a warp for 32 streamed tiles.
inline __global__ void __launch_bounds__(32)
    tile_map_kernel(__grid_constant__ BackwardParams const params, bool of_keys, int held, int step) {
  TileMap const map(params, of_keys, held, step);
  int64_t rest = blockIdx.x / map.words;
  int const word = static_cast<int>(blockIdx.x - rest * map.words), held_tile = static_cast<int>(rest % map.held_tiles);
  rest /= map.held_tiles;
  int const head = static_cast<int>(rest % map.heads), b = static_cast<int>(rest / map.heads);
  int const first = (word * 32 + static_cast<int>(threadIdx.x)) * step;
  Range const streamed{first, first + step}, in_hand{held_tile * held, (held_tile + 1) * held};
  Seen seen{false, false};
  if (first < (of_keys ? params.n_q : params.n_kv))
    seen = PairMod(params, sequence_of(params, b), b, head)
               .seen_of(params, of_keys ? streamed : in_hand, of_keys ? in_hand : streamed);
  uint32_t const some = __ballot_sync(0xffffffffu, seen.some), all = __ballot_sync(0xffffffffu, seen.all);
  if (threadIdx.x != 0) return;
  params.tile_map[map.first(b, head, held_tile, TileMap::Seen) + word] = some;
  params.tile_map[map.first(b, head, held_tile, TileMap::Whole) + word] = all;
}

}  // namespace cutlass_ext

// The first work of a CTA of the decode kernel: where its share of the batch's keys begins. Called by fmha.hpp.
#pragma once

#include "params.hpp"
#include "traits.hpp"

namespace cutlass_ext::decode {

/// The lengths are on the device: every CTA sums up the tiles of all sequences before its own.
template <class Traits>
CUTE_DEVICE Walk<Traits::TileKeys> first_walk(Params const& params, unsigned group, Tokens const& tokens,
                                              typename Traits::SharedStorage& shared) {
  constexpr int TileKeys = Traits::TileKeys;
  constexpr unsigned MinChunk = kMinChunkKeys > TileKeys ? kMinChunkKeys / TileKeys : 1;
  if (params.fixed_splits) return Walk<TileKeys>::of_split(params, group, tokens);
  if (all_alike(params)) {
    unsigned const tiles = tiles_of(params, sequence_of(params, 0), tokens, TileKeys).size();
    Partition const partition(params.batch * tiles, params.groups, MinChunk);
    unsigned const batch = tiles > 0 ? partition.begin_of(group) / tiles : 0;
    return Walk<TileKeys>::of_chunk(params, partition, group, batch, batch * tiles, tokens);
  }

  unsigned const each = (params.batch + Traits::Threads - 1) / Traits::Threads, lane = threadIdx.x % 32;
  unsigned const begin = threadIdx.x * each, end = min(begin + each, unsigned(params.batch));
  auto const tiles_of_batch = [&](unsigned b) -> unsigned {
    return tiles_of(params, sequence_of(params, b), tokens, TileKeys).size();
  };
  unsigned sum = 0;
  for (unsigned b = begin; b < end; ++b) sum += tiles_of_batch(b);
  unsigned before = sum;  // tiles of the lower lanes' sequences, with the lane's own
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    unsigned const lower = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += lower;
  }
  if (lane == 31) shared.scan[threadIdx.x / 32] = before;
  __syncthreads();
  before -= sum;
  unsigned total = 0;
  CUTE_UNROLL
  for (int w = 0; w < Traits::Warps; ++w) {
    if (w < threadIdx.x / 32) before += shared.scan[w];
    total += shared.scan[w];
  }
  Partition const partition(total, params.groups, MinChunk);
  unsigned const at = partition.begin_of(group);
  if (at >= before && at < before + sum) {
    for (unsigned b = begin; b < end; ++b) {
      unsigned const tiles = tiles_of_batch(b);
      if (at < before + tiles) {
        shared.found_batch = b;
        shared.found_first = before;
        break;
      }
      before += tiles;
    }
  }
  __syncthreads();
  bool const found = at < total;
  return Walk<TileKeys>::of_chunk(params, partition, group, found ? shared.found_batch : 0,
                                  found ? shared.found_first : 0, tokens);
}

}  // namespace cutlass_ext::decode

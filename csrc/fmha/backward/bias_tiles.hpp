// The tiles of dBias: which rows, heads and sequences share one, in which order they are gone through, where its
// elements lie. Used by dbias.hpp and sm90/dbias.hpp, and by kernels/dbias.cu for their grids.
#pragma once

#include "../pairs.hpp"
#include "params.hpp"

namespace cutlass_ext {

constexpr int kBiasCluster = 2;  // tiles of keys, on Hopper

/// A tile of dBias.
struct BiasTile {
  int batch, head, row0, key0;  // of dBias: 0 where it has one for all
};

/// One of those whose dS a tile adds up.
struct BiasTurn {
  int batch, head, row0;
};

struct BiasTiles {
  int rows, keys;                            // of a tile
  int cluster = 1;                           // tiles side by side that CTAs go through together
  int batches, heads, row_tiles, key_tiles;  // of dBias
  int of_batches, of_heads, of_row_tiles;    // that share one
  int64_t elements;

  /// `most`: of a cluster, a power of two.
  BiasTiles(BackwardParams const& p, int rows, int keys, int most = 1)
      : rows(rows),
        keys(keys),
        batches(p.dbias_batch ? p.batch : 1),
        heads(p.dbias_head ? p.heads_q : 1),
        row_tiles(p.dbias_row ? Scheduler::tiles_of(p.n_q, rows) : 1),
        key_tiles(Scheduler::tiles_of(p.n_kv, keys)),
        of_batches(p.dbias_batch ? 1 : p.batch),
        of_heads(p.dbias_head ? 1 : p.heads_q),
        of_row_tiles(p.dbias_row ? 1 : Scheduler::tiles_of(p.n_q, rows)),
        elements(int64_t(batches) * heads * (p.dbias_row ? p.n_q : 1) * p.n_kv) {
    while (cluster < most && cluster < key_tiles) cluster *= 2;
  }

  /// Those of a row of tiles, the last of which may have tiles behind the last key.
  CUTE_HOST_DEVICE int clusters_a_row() const { return (key_tiles + cluster - 1) / cluster; }
  CUTE_HOST_DEVICE int64_t clusters() const { return int64_t(batches) * heads * row_tiles * clusters_a_row(); }
  CUTE_HOST_DEVICE int64_t turns() const { return int64_t(of_batches) * of_heads * of_row_tiles; }

  /// Tile `rank` of a cluster.
  CUTE_HOST_DEVICE BiasTile tile(int of_cluster, int rank) const {
    int rest = of_cluster / clusters_a_row();
    int const key_tile = (of_cluster - rest * clusters_a_row()) * cluster + rank, row_tile = rest % row_tiles;
    rest /= row_tiles;
    return {rest / heads, rest % heads, row_tile * rows, key_tile * keys};
  }

  CUTE_HOST_DEVICE BiasTurn turn(BiasTile const& of, int turn) const {
    int const pair = turn / of_row_tiles;
    return {of.batch + pair / of_heads, of.head + pair % of_heads, of.row0 + (turn - pair * of_row_tiles) * rows};
  }

  /// The turns of part `part` of `parts`.
  CUTE_HOST_DEVICE Range turns_of(int part, int parts) const {
    int const of_each = static_cast<int>(turns()) / parts, rest = static_cast<int>(turns()) - of_each * parts;
    int const begin = part * of_each + (part < rest ? part : rest);
    return {begin, begin + of_each + (part < rest)};
  }
};

#if defined(__CUDACC__)

/// Writes element `at` of dbias in its dtype.
CUTE_DEVICE void write_bias(BackwardParams const& params, int64_t at, float value) {
  if (dtype_of_bias(params) == BiasType::Float32) static_cast<float*>(params.dbias)[at] = value;
  if (dtype_of_bias(params) == BiasType::Float16) static_cast<__half*>(params.dbias)[at] = __float2half(value);
  if (dtype_of_bias(params) == BiasType::BFloat16)
    static_cast<__nv_bfloat16*>(params.dbias)[at] = __float2bfloat16(value);
}

/// Where a row of a tile's dBias begins.
CUTE_DEVICE int64_t bias_row_at(BackwardParams const& params, BiasTile const& tile, int row) {
  return tile.batch * params.dbias_batch + tile.head * params.dbias_head + row * params.dbias_row;
}

/// Writes what part `part` of a tile's turns makes of an element.
CUTE_DEVICE void store_bias(BackwardParams const& params, BiasTiles const& tiles, BiasTile const& tile, int part,
                            int row, int key, float value) {
  if (key >= params.n_kv) return;
  int64_t const at = bias_row_at(params, tile, row) + key;
  if (params.dbias_parts > 1) {
    params.dbias_sums[part * tiles.elements + at] = value;
  } else {
    write_bias(params, at, value);
  }
}

#endif

}  // namespace cutlass_ext

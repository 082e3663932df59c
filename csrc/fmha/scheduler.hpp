// Work item -> (batch, head, query tile, split), and how many splits a launch gets. Called by the kernels with their
// block index, by dispatch.cu for the grid, by the tests on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cute/config.hpp>

#include "params.hpp"

namespace cutlass_ext {

struct WorkItem {
  int batch;
  int head;
  int row0;  // first query row of the tile
  int split;
};

/// Order of work. The (batch, head) pairs are taken in sections whose keys and values stay in L2 together. Within a
/// section the last query tile of every pair comes first, since under a causal mask it sees the most keys and the tail
/// is then made of short tiles; heads fastest, so that the query heads of one key head run together.
struct Scheduler {
  int heads_q;
  unsigned pairs;
  unsigned section;  // pairs of a section
  int query_tiles;
  int num_splits;

  CUTE_HOST_DEVICE Scheduler(int batch, int heads_q, int n_q, int block_r, int num_splits, int section)
      : heads_q(heads_q),
        pairs(unsigned(batch) * heads_q),
        section(section < int(pairs) ? section : pairs),
        query_tiles((n_q + block_r - 1) / block_r),
        num_splits(num_splits) {}

  CUTE_HOST_DEVICE int64_t size() const { return int64_t(pairs) * query_tiles * num_splits; }

  CUTE_HOST_DEVICE WorkItem operator()(unsigned index, int block_r) const {
    unsigned const first_pair = index / (section * query_tiles * num_splits) * section;
    unsigned const width = pairs - first_pair < section ? pairs - first_pair : section;
    index -= first_pair * query_tiles * num_splits;
    unsigned const pair = first_pair + index % width;
    index /= width;
    unsigned const split = index % num_splits;
    int const tile = query_tiles - 1 - int(index / num_splits);
    return {int(pair / heads_q), int(pair % heads_q), tile * block_r, int(split)};
  }
};

CUTE_HOST_DEVICE Scheduler scheduler_of(ForwardParams const& params, int block_r) {
  return {params.batch, params.heads_q, params.n_q, block_r, params.num_splits, params.section};
}

/// Pairs of (batch, query head) that `limit` allows, where each key head takes `cost` of it; whole groups that share a
/// key head, and at least one.
CUTE_HOST_DEVICE int section_of(int64_t limit, int64_t cost, int heads_per_kv) {
  int64_t const key_heads = cost > 0 ? limit / cost : limit;
  return heads_per_kv * static_cast<int>(key_heads < 1 ? 1 : key_heads < (1 << 16) ? key_heads : 1 << 16);
}

/// `section` pairs or fewer, at least half as many, so that `pairs` fall into sections of one size where whole groups
/// of `heads_per_kv` allow it; else `section`. A short last section begins its longest tiles when little else is left
/// to do beside them: causal (2, 8192, 16, 128) took 7% longer in sections of 7, 7, 7, 7, 4 than in eight of 4.
CUTE_HOST_DEVICE int even_section(int pairs, int section, int heads_per_kv) {
  for (int s = section; 2 * s >= section && s > 0; s -= heads_per_kv) {
    if (pairs % s == 0) return s;
  }
  return section;
}

/// The section of a launch on a GPU that holds `params.slots` CTAs at once and has `l2_bytes` of L2: what fits an
/// eighth of L2, since b8 N2048 d128 is 5% slower with half of it (an H200's 60 MB). Under a causal mask, where the
/// last tiles of the last section are to be short of the whole work, three waves of tiles, at most five eighths of L2.
/// Causal rows of an H200 at head_dim 256: two heads of N 16384 at a time are 10% faster than one, four of N 8192 9%
/// faster than two; at 128, two are as fast as four, four 3% faster than eight.
inline int section_for(ForwardParams const& params, int block_r, int64_t l2_bytes, int element_bytes) {
  int64_t const bytes_a_head = int64_t(params.n_kv) * (params.head_dim + params.head_dim_v) * element_bytes;
  int const heads_per_kv = params.heads_q / params.heads_kv;
  int section = section_of(l2_bytes / 8, bytes_a_head, heads_per_kv);
  if (params.window_right >= 0) {
    int64_t const tiles_a_group = Scheduler(1, heads_per_kv, params.n_q, block_r, params.num_splits, 1).size();
    section = std::min(section_of(l2_bytes / 8 * 5, bytes_a_head, heads_per_kv),
                       section_of(3 * params.slots, tiles_a_group, heads_per_kv));
  }
  return even_section(params.batch * params.heads_q, section, heads_per_kv);
}

/// Splits of the keys that fill `slots` (CTAs that the GPU holds at once) when `work_tiles` query tiles do not: 1 while
/// they fill three quarters of them; never fewer than two key tiles a split, since the merge costs about as much; no
/// split count that only makes tails shorter.
inline int choose_num_splits(int64_t work_tiles, int64_t key_tiles, int64_t slots) {
  if (work_tiles == 0 || key_tiles < 4 || 4 * work_tiles >= 3 * slots) return 1;
  int64_t const wanted = slots / work_tiles < key_tiles / 2 ? slots / work_tiles : key_tiles / 2;
  int64_t const tiles_per_split = (key_tiles + wanted - 1) / wanted;
  return static_cast<int>((key_tiles + tiles_per_split - 1) / tiles_per_split);
}

}  // namespace cutlass_ext

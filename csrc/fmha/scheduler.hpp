// Work item -> (batch, head, query tile, split), and how many splits a launch gets. Called by the kernels with their
// block index, by dispatch.cu for the grid, by the tests on the host.
#pragma once

#include <cstdint>

#include <cute/config.hpp>

namespace cutlass_ext {

struct WorkItem {
  int batch;
  int head;
  int row0;  // first query row of the tile
  int split;
};

/// Launch order: the last query tile first, since under a causal mask it sees the most keys and the GPU's tail is then
/// made of short tiles; heads fastest, so that the query heads of one key head run together and share K and V in L2.
struct Scheduler {
  int batch;
  int heads_q;
  int query_tiles;
  int num_splits;

  CUTE_HOST_DEVICE Scheduler(int batch, int heads_q, int n_q, int block_r, int num_splits)
      : batch(batch), heads_q(heads_q), query_tiles((n_q + block_r - 1) / block_r), num_splits(num_splits) {}

  CUTE_HOST_DEVICE int64_t size() const { return int64_t(batch) * heads_q * query_tiles * num_splits; }

  CUTE_HOST_DEVICE WorkItem operator()(unsigned index, int block_r) const {
    unsigned const head = index % heads_q;
    index /= heads_q;
    unsigned const b = index % batch;
    index /= batch;
    unsigned const split = index % num_splits;
    int const tile = query_tiles - 1 - int(index / num_splits);
    return {int(b), int(head), tile * block_r, int(split)};
  }
};

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

// Work item -> (batch, head, query tile, split). Called by the kernels with their block index, by the tests on the
// host.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cute/config.hpp>
#include <cutlass/fast_math.h>

namespace cutlass_ext {

struct WorkItem {
  int batch;
  int head;
  int row0;  // first query row of the tile
  int split;
};

/// Order of work. The (batch, head) pairs are taken in sections whose keys and values stay in L2 together. Within a
/// section the last query tile of every pair comes first, since under a causal mask it sees the most keys and the tail
/// is then made of short tiles; heads fastest, so that the query heads of one key head run together. Built on the host,
/// so that kernels multiply by reciprocals instead of dividing.
class Scheduler {
 public:
  Scheduler() = default;

  Scheduler(int batch, int heads_q, int n_q, int block_r, int num_splits, int section)
      : size_(int64_t(batch) * heads_q * tiles_of(n_q, block_r) * num_splits), block_r_(block_r), heads_(heads_q) {
    int const pairs = batch * heads_q, tiles = tiles_of(n_q, block_r);
    section = std::max(std::min(section, pairs), 1);
    section_ = divisor(section);
    last_section_ = divisor(pairs % section ? pairs % section : section);
    full_sections_ = pairs / section;
    items_of_section_ = divisor(int64_t(section) * tiles * num_splits);
    splits_ = divisor(num_splits);
    query_tiles_ = tiles;
  }

  static int tiles_of(int n_q, int block_r) { return (n_q + block_r - 1) / block_r; }

  CUTE_HOST_DEVICE int64_t size() const { return size_; }

  CUTE_HOST_DEVICE cutlass::FastDivmod const& splits() const { return splits_; }

  /// `index` below `size()`, which launches hold to 31 bits.
  CUTE_HOST_DEVICE WorkItem operator()(int index) const {
    int of_section, pair, tile, split, batch, head;
    items_of_section_(of_section, index, index);
    (of_section < full_sections_ ? section_ : last_section_)(index, pair, index);
    splits_(tile, split, index);
    heads_(batch, head, of_section * section_.divisor + pair);
    return {batch, head, (query_tiles_ - 1 - tile) * block_r_, split};
  }

 private:
  static cutlass::FastDivmod divisor(int64_t n) {
    return cutlass::FastDivmod(static_cast<int>(std::clamp<int64_t>(n, 1, INT32_MAX)));
  }

  int64_t size_ = 0;
  int block_r_ = 1, query_tiles_ = 0, full_sections_ = 0;
  cutlass::FastDivmod items_of_section_, section_, last_section_, splits_, heads_;
};

}  // namespace cutlass_ext

// Work item -> (batch, head, query tile or key tile, split). Called by the kernels with their block index, by the tests
// on the host.
#pragma once

#include <cstdint>

#include <cute/config.hpp>
#include <cutlass/fast_math.h>

namespace cutlass_ext {

struct WorkItem {
  int batch;
  int head;
  int row0;  // first query row of the tile; over key tiles, its first key
  int split;
};

/// What the tiles of a scheduler are of.
enum class Axis { Rows, Keys };

/// Order of work. The (batch, head) pairs are taken in sections whose keys and values stay in L2 together. Within a
/// section the tile of every pair that a causal mask leaves the most work comes first, the last of the rows or the
/// first of the keys, so that the tail is made of short ones; heads fastest, so that the query heads of one KV head
/// run together. Built on the host, so that kernels multiply by reciprocals instead of dividing.
class Scheduler {
 public:
  Scheduler() = default;

  /// Over tiles of `block` of `length` rows or keys of each pair.
  Scheduler(int batch, int heads, int length, int block, int num_splits, int section, Axis axis = Axis::Rows)
      : size_(int64_t(batch) * heads * tiles_of(length, block) * num_splits) {
    int64_t const pairs = int64_t(batch) * heads, tiles = tiles_of(length, block);
    int64_t const of_section = section < 1 || pairs < 1 ? 1 : section < pairs ? section : pairs;
    section_ = divisor(of_section);
    last_section_ = divisor(pairs % of_section ? pairs % of_section : of_section);
    full_sections_ = static_cast<int>(pairs / of_section);
    items_of_section_ = divisor(of_section * tiles * num_splits);
    splits_ = divisor(num_splits);
    heads_ = divisor(heads);
    first_ = axis == Axis::Rows ? static_cast<int>(tiles - 1) * block : 0;
    step_ = axis == Axis::Rows ? -block : block;
  }

  static int tiles_of(int length, int block) { return length / block + (length % block != 0); }

  CUTE_HOST_DEVICE int64_t size() const { return size_; }

  CUTE_HOST_DEVICE cutlass::FastDivmod const& splits() const { return splits_; }

  /// `index` below `size()`, which launches hold to 31 bits.
  CUTE_HOST_DEVICE WorkItem operator()(int index) const {
    int of_section, pair, tile, split, batch, head;
    items_of_section_(of_section, index, index);
    (of_section < full_sections_ ? section_ : last_section_)(index, pair, index);
    splits_(tile, split, index);
    heads_(batch, head, of_section * section_.divisor + pair);
    return {batch, head, first_ + tile * step_, split};
  }

  /// How many sections there are, and how many pairs and items each but the last has.
  CUTE_HOST_DEVICE int sections() const {
    return full_sections_ + (last_section_.divisor != section_.divisor && size_ > 0);
  }
  CUTE_HOST_DEVICE int pairs_a_section() const { return section_.divisor; }
  CUTE_HOST_DEVICE int items_a_section() const { return items_of_section_.divisor; }
  CUTE_HOST_DEVICE int section_of(int index) const { return items_of_section_.div(index); }

 private:
  static cutlass::FastDivmod divisor(int64_t n) {
    return cutlass::FastDivmod(static_cast<int>(n < 1 ? 1 : n < INT32_MAX ? n : INT32_MAX));
  }

  int64_t size_ = 0;
  int first_ = 0, step_ = 0, full_sections_ = 0;
  cutlass::FastDivmod items_of_section_, section_, last_section_, splits_, heads_;
};

}  // namespace cutlass_ext

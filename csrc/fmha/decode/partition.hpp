// How the key tiles of a batch are shared out among groups of CTAs. Called by the decode kernels on the device, where
// the lengths are, and by the tests on the host.
#pragma once

#include <cstdint>

#include <cute/config.hpp>

namespace cutlass_ext::decode {

/// The key tiles of all sequences in a row, cut into one chunk for each group of CTAs, equal up to the last. A group
/// has a CTA for each KV head (and row tile), so that the heads of the same keys, neighbours in memory, are read at
/// the same time. Stream-K's division (arXiv:2301.03598, section 4) with the batch as the accumulated dimension.
struct Partition {
  unsigned total;  // tiles
  unsigned chunk;  // tiles of a group

  CUTE_HOST_DEVICE Partition(unsigned total, unsigned groups, unsigned min_chunk)
      : total(total), chunk((total + groups - 1) / groups) {
    if (chunk < min_chunk) chunk = min_chunk;
  }
  CUTE_HOST_DEVICE unsigned begin_of(unsigned group) const { return cut(uint64_t(group) * chunk); }
  CUTE_HOST_DEVICE unsigned end_of(unsigned group) const { return cut(uint64_t(group + 1) * chunk); }

 private:
  CUTE_HOST_DEVICE unsigned cut(uint64_t tile) const { return tile < total ? static_cast<unsigned>(tile) : total; }
};

/// The groups that share a sequence of `tiles` > 0 tiles, the first of which is tile `first` of the batch.
struct Sharing {
  unsigned first_group;
  unsigned parts;
  bool begins_inside;  // the first group has worked on another sequence before

  CUTE_HOST_DEVICE Sharing(Partition const& partition, unsigned first, unsigned tiles)
      : first_group(first / partition.chunk),
        parts((first + tiles - 1) / partition.chunk - first_group + 1),
        begins_inside(first % partition.chunk != 0) {}
};

}  // namespace cutlass_ext::decode

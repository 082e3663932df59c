// Who owns which counters of a device's pool. Used by counters.cu; knows no CUDA.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

namespace cutlass_ext {

/// Streams are known by their ids, which no other stream of the process gets (handles come back, and
/// cudaStreamPerThread is one for many); those of a capture, where the id may not be asked for, by their handles, which
/// are theirs alone as long as it lasts.
struct Owner {
  int device = 0;
  unsigned long long capture = 0;  // 0: none
  unsigned long long stream = 0;

  bool operator<(Owner const& other) const {
    return std::tie(device, capture, stream) < std::tie(other.device, other.capture, other.stream);
  }
};

/// Slices of a pool of counters that every device has. What an owner was given stays its own.
class Slices {
 public:
  static constexpr size_t kLeast = 1024;  // counters that a stream is given, so that its next calls need no more

  explicit Slices(size_t pool) : pool_(pool) {}

  /// The first of `count` counters that are the owner's; the size of the pool where there are too few left.
  size_t place_of(Owner const& owner, size_t count) {
    std::lock_guard<std::mutex> const lock(mutex_);
    Slice& slice = slices_[owner];
    if (slice.count < count) {
      size_t& used = used_[owner.device];
      size_t const wanted = owner.capture ? count : std::max(2 * count, kLeast);
      if (wanted > pool_ - used) return pool_;
      slice = {used, wanted};
      used += wanted;
    }
    return slice.begin;
  }

 private:
  struct Slice {
    size_t begin = 0, count = 0;
  };
  size_t const pool_;
  std::mutex mutex_;
  std::map<Owner, Slice> slices_;
  std::map<int, size_t> used_;  // of each device's pool
};

}  // namespace cutlass_ext

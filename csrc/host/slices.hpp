// Who owns which slice of the pool of counters. Used by counters.cu; knows no CUDA.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace cutlass_ext {

/// Which slice of a device's pool of counters is whose. Streams are known by their ids, which no other stream of the
/// process gets (handles come back, and cudaStreamPerThread is one for many); those of a capture, where the id may not
/// be asked for, by their handles, which are theirs alone as long as it lasts.
class SliceOwners {
 public:
  using Key = std::tuple<int, unsigned long long, unsigned long long>;  // device, capture or 0, stream

  explicit SliceOwners(int slices) : slices_(slices) {}

  /// The slice of `key`; -1 where none is left. `fresh` says whether it has just become so.
  int slice_of(Key const& key, bool* fresh) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = owned_.find(key);
    *fresh = found == owned_.end();
    if (!*fresh) return found->second;
    Free& free = free_[std::get<0>(key)];
    if (free.returned.empty() && free.next == slices_) return -1;
    int const slice = free.returned.empty() ? free.next++ : free.returned.back();
    if (!free.returned.empty()) free.returned.pop_back();
    owned_.emplace(key, slice);
    return slice;
  }

  /// Of a slice that is owned.
  void give_back(Key const& key) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = owned_.find(key);
    free_[std::get<0>(key)].returned.push_back(found->second);
    owned_.erase(found);
  }

 private:
  struct Free {
    int next = 0;
    std::vector<int> returned;
  };
  int const slices_;
  std::mutex mutex_;
  std::map<Key, int> owned_;
  std::map<int, Free> free_;
};

}  // namespace cutlass_ext

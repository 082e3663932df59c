// See counters.hpp. The counters are the module's own device memory, which is zero from its load on.
#include "counters.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "error.hpp"

namespace cutlass_ext {
namespace {

constexpr size_t kSliceCounters = 2048;  // of a stream; decoding wants one for each sequence, key head and row tile
constexpr int kSlices = 256;             // streams and captures of a process; what comes later goes without

__device__ unsigned pool[kSlices * kSliceCounters];

/// Which slice of a device's pool is whose. Streams are known by their ids, which no other stream of the process gets
/// (handles come back, and cudaStreamPerThread is one for many); those of a capture, where the id may not be asked for,
/// by their handles, which are theirs alone as long as it lasts.
class Owners {
 public:
  using Key = std::tuple<int, unsigned long long, unsigned long long>;  // device, capture or 0, stream

  /// The slice of `key`; -1 where none is left. `fresh` says whether it has just become so.
  int slice_of(Key const& key, bool* fresh) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = owned_.find(key);
    *fresh = found == owned_.end();
    if (!*fresh) return found->second;
    Free& free = free_[std::get<0>(key)];
    if (free.returned.empty() && free.next == kSlices) return -1;
    int const slice = free.returned.empty() ? free.next++ : free.returned.back();
    if (!free.returned.empty()) free.returned.pop_back();
    owned_.emplace(key, slice);
    return slice;
  }

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
  std::mutex mutex_;
  std::map<Key, int> owned_;
  std::map<int, Free> free_;
};

Owners& owners() {
  static Owners* const all = new Owners;  // graphs may outlive every static object
  return *all;
}

/// Has the graph give the slice back when it and its instances are gone.
void tie_to_graph(cudaGraph_t graph, Owners::Key const& key) {
  cudaUserObject_t object;
  auto const give_back = [](void* mine) {
    auto* const key = static_cast<Owners::Key*>(mine);
    owners().give_back(*key);
    delete key;
  };
  check_cuda(cudaUserObjectCreate(&object, new Owners::Key(key), give_back, 1, cudaUserObjectNoDestructorSync),
             "tying counters to a captured graph");
  check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
             "tying counters to a captured graph");
}

/// Where the current device has the pool.
unsigned* begin_of_pool(int device) {
  static std::mutex mutex;
  static std::map<int, unsigned*> found;
  std::lock_guard<std::mutex> const lock(mutex);
  unsigned*& begin = found[device];
  if (!begin) check_cuda(cudaGetSymbolAddress(reinterpret_cast<void**>(&begin), pool), "finding the counters");
  return begin;
}

}  // namespace

unsigned* zero_counters(int device, cudaStream_t stream, size_t count) {
  if (count > kSliceCounters) return nullptr;
  cudaStreamCaptureStatus capturing;
  unsigned long long capture = 0, id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  check_cuda(cudaStreamGetCaptureInfo(stream, &capturing, &capture, &graph), "asking whether the stream is captured");
#else
  check_cuda(cudaStreamGetCaptureInfo_v2(stream, &capturing, &capture, &graph),
             "asking whether the stream is captured");
#endif
  if (capturing == cudaStreamCaptureStatusActive) {
    id = reinterpret_cast<uintptr_t>(stream);
  } else {
    capture = 0;
    check_cuda(cudaStreamGetId(stream, &id), "asking for the stream's id");
  }
  Owners::Key const key{device, capture, id};
  bool fresh;
  int const slice = owners().slice_of(key, &fresh);
  if (slice < 0) return nullptr;
  if (fresh && capture != 0) tie_to_graph(graph, key);
  return begin_of_pool(device) + slice * kSliceCounters;
}

}  // namespace cutlass_ext

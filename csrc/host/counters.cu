// See counters.hpp. The counters are the module's own device memory, which is zero from its load on.
#include "counters.hpp"

#include <cstdint>
#include <map>
#include <mutex>

#include "error.hpp"
#include "slices.hpp"

namespace cutlass_ext {
namespace {

constexpr size_t kSliceCounters = 8192;  // of a stream; decoding wants one for each sequence, key head and row tile
constexpr int kSlices = 128;             // streams and captures at a time; 4 MB in all

__device__ unsigned pool[kSlices * kSliceCounters];

SliceOwners& owners() {
  static auto* const all = new SliceOwners(kSlices);  // graphs may outlive every static object
  return *all;
}

/// Has the graph give the slice back when it and its instances are gone; false where it will not.
bool tie_to_graph(cudaGraph_t graph, SliceOwners::Key const& key) {
  auto const give_back = [](void* mine) {
    auto* const key = static_cast<SliceOwners::Key*>(mine);
    owners().give_back(*key);
    delete key;
  };
  auto* const mine = new SliceOwners::Key(key);
  cudaUserObject_t object;
  if (cudaUserObjectCreate(&object, mine, give_back, 1, cudaUserObjectNoDestructorSync) != cudaSuccess) {
    cudaGetLastError();
    give_back(mine);
    return false;
  }
  if (cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess) return true;
  cudaGetLastError();
  cudaUserObjectRelease(object, 1);
  return false;
}

/// Where the current device has the pool. To be told so may load the module, which an open capture forbids otherwise.
unsigned* begin_of_pool(int device) {
  static std::mutex mutex;
  static auto* const found = new std::map<int, unsigned*>;
  std::lock_guard<std::mutex> const lock(mutex);
  unsigned*& begin = (*found)[device];
  if (!begin) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "relaxing the capture mode");
    cudaError_t const error = cudaGetSymbolAddress(reinterpret_cast<void**>(&begin), pool);
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "restoring the capture mode");
    check_cuda(error, "finding the counters");
  }
  return begin;
}

/// Of the pool; null where there are none left.
unsigned* pooled_counters(int device, cudaStream_t stream) {
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
  SliceOwners::Key const key{device, capture, id};
  bool fresh;
  int const slice = owners().slice_of(key, &fresh);
  if (slice < 0 || (fresh && capture != 0 && !tie_to_graph(graph, key))) return nullptr;
  return begin_of_pool(device) + slice * kSliceCounters;
}

}  // namespace

unsigned* zero_counters(int device, cudaStream_t stream, size_t count, std::function<void*(size_t)> const& allocate) {
  unsigned* counters = count <= kSliceCounters ? pooled_counters(device, stream) : nullptr;
  if (!counters) {
    counters = static_cast<unsigned*>(allocate(count * sizeof(unsigned)));
    check_cuda(cudaMemsetAsync(counters, 0, count * sizeof(unsigned), stream), "zeroing counters");
  }
  return counters;
}

}  // namespace cutlass_ext

// See counters.hpp. The counters are the module's own device memory, which is zero from its load on.
#include "counters.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "error.hpp"

namespace cutlass_ext {
namespace {

constexpr size_t kPool = size_t(1) << 20;  // counters; decoding wants one for each sequence, key head and row tile
constexpr size_t kLeast = 1024;            // that a stream is given, so that its next calls need no more

__device__ unsigned pool[kPool];

/// Which counters of a device's pool are whose. Streams are known by their ids, which no other stream of the process
/// gets (handles come back, and cudaStreamPerThread is one for many); those of a capture, where the id may not be asked
/// for, by their handles, which are theirs alone as long as it lasts.
struct Owner {
  int device;
  unsigned long long capture;  // 0: none
  unsigned long long stream;
  bool operator<(Owner const& other) const {
    return std::tie(device, capture, stream) < std::tie(other.device, other.capture, other.stream);
  }
};

/// The first of `count` counters of the pool that are `owner`'s; kPool where there are too few left.
size_t place_of(Owner const& owner, size_t count) {
  struct Slice {
    size_t begin = kPool, count = 0;
  };
  static std::mutex mutex;
  static auto& slices = *new std::map<Owner, Slice>;
  static auto& used = *new std::map<int, size_t>;
  std::lock_guard<std::mutex> const lock(mutex);
  Slice& slice = slices[owner];
  if (slice.count < count) {
    size_t& end = used[owner.device];
    size_t const wanted = owner.capture ? count : std::max(2 * count, kLeast);
    if (wanted > kPool - end) return kPool;
    slice = {end, wanted};
    end += wanted;
  }
  return slice.begin;
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

/// Of the pool; null where there are too few left.
unsigned* pooled_counters(int device, cudaStream_t stream, size_t count) {
  cudaStreamCaptureStatus capturing;
  Owner owner{device, 0, 0};
#if CUDART_VERSION >= 13000
  cudaError_t const error = cudaStreamGetCaptureInfo(stream, &capturing, &owner.capture);
#else
  cudaError_t const error = cudaStreamGetCaptureInfo_v2(stream, &capturing, &owner.capture);
#endif
  check_cuda(error, "asking whether the stream is captured");
  if (capturing == cudaStreamCaptureStatusActive) {
    owner.stream = reinterpret_cast<uintptr_t>(stream);
  } else {
    owner.capture = 0;
    check_cuda(cudaStreamGetId(stream, &owner.stream), "asking for the stream's id");
  }
  size_t const place = place_of(owner, count);
  return place < kPool ? begin_of_pool(device) + place : nullptr;
}

}  // namespace

unsigned* zero_counters(int device, cudaStream_t stream, size_t count, std::function<void*(size_t)> const& allocate) {
  unsigned* counters = pooled_counters(device, stream, count);
  if (!counters) {
    counters = static_cast<unsigned*>(allocate(count * sizeof(unsigned)));
    check_cuda(cudaMemsetAsync(counters, 0, count * sizeof(unsigned), stream), "zeroing counters");
  }
  return counters;
}

}  // namespace cutlass_ext

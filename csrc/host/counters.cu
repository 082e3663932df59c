// See counters.hpp. The counters are the module's own device memory, which is zero from its load on.
#include "counters.hpp"

#include <cstdint>
#include <map>
#include <mutex>

#include "capture.hpp"
#include "error.hpp"
#include "slices.hpp"

namespace cutlass_ext {
namespace {

constexpr size_t kPool = size_t(1) << 20;  // counters; decoding wants one for each sequence, KV head and row tile

__device__ unsigned pool[kPool];

/// Where the current device has the pool. To be told so may load the module.
unsigned* begin_of_pool(int device) {
  static std::mutex mutex;
  static auto* const found = new std::map<int, unsigned*>;
  std::lock_guard<std::mutex> const lock(mutex);
  unsigned*& begin = (*found)[device];
  if (!begin) {
    RelaxedCapture const relaxed;
    check_cuda(cudaGetSymbolAddress(reinterpret_cast<void**>(&begin), pool), "finding the counters");
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
  static auto& slices = *new Slices(kPool);  // graphs may outlive static objects
  size_t const place = slices.place_of(owner, count);
  return place < kPool ? begin_of_pool(device) + place : nullptr;
}

}  // namespace

unsigned* zero_counters(int device, cudaStream_t stream, size_t count, Allocate const& allocate) {
  unsigned* counters = pooled_counters(device, stream, count);
  if (!counters) {
    counters = static_cast<unsigned*>(allocate(count * sizeof(unsigned)));
    check_cuda(cudaMemsetAsync(counters, 0, count * sizeof(unsigned), stream), "zeroing counters");
  }
  return counters;
}

void zero_again(unsigned* counters, size_t count, cudaStream_t stream) {
  if (cudaMemsetAsync(counters, 0, count * sizeof(unsigned), stream) != cudaSuccess) cudaGetLastError();
}

}  // namespace cutlass_ext

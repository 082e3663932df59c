// Device counters that the CTAs of a launch share: work to be taken, parts that are done. Used by the dispatch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include <cuda_runtime.h>

namespace cutlass_ext {

/// Counters that are zero when a kernel begins and that it leaves zero. Calls on one stream follow each other and share
/// a slice; a call that a graph captures gets one of its own, since the graph may run beside anything. Slices are never
/// taken back: what is still under way may count in them.
class Counters {
 public:
  cudaError_t take(int device, cudaStream_t stream, size_t count, unsigned** slice) {
    cudaStreamCaptureStatus capturing;
    if (cudaError_t e = cudaStreamIsCapturing(stream, &capturing)) return e;
    std::lock_guard<std::mutex> const lock(mutex_);
    if (capturing != cudaStreamCaptureStatusNone) return cut(device, count, slice);
    Slice& of_stream = of_stream_[{device, stream}];
    if (of_stream.count < count) {
      size_t const roomy = std::max<size_t>(2 * count, 1024);
      if (cudaError_t e = cut(device, roomy, &of_stream.data)) return e;
      of_stream.count = roomy;
    }
    *slice = of_stream.data;
    return cudaSuccess;
  }

 private:
  struct Slice {
    unsigned* data = nullptr;
    size_t count = 0;
  };

  cudaError_t cut(int device, size_t count, unsigned** slice) {
    Slice& rest = rest_[device];
    if (rest.count < count) {
      size_t const block = std::max<size_t>(count, size_t(1) << 18);
      if (cudaError_t e = allocate_zeroed(block, &rest.data)) return e;
      rest.count = block;
    }
    *slice = rest.data;
    rest.data += count;
    rest.count -= count;
    return cudaSuccess;
  }

  /// On a stream of its own, so that it may happen while another is captured.
  static cudaError_t allocate_zeroed(size_t count, unsigned** data) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (cudaError_t e = cudaThreadExchangeStreamCaptureMode(&mode)) return e;
    cudaStream_t stream = nullptr;
    cudaError_t e = cudaMalloc(data, count * sizeof(unsigned));
    if (!e) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!e) e = cudaMemsetAsync(*data, 0, count * sizeof(unsigned), stream);
    if (!e) e = cudaStreamSynchronize(stream);
    if (stream) cudaStreamDestroy(stream);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return e;
  }

  std::mutex mutex_;
  std::map<std::pair<int, cudaStream_t>, Slice> of_stream_;
  std::map<int, Slice> rest_;  // of the device's last block
};

/// The process's one set.
inline Counters& counters() {
  static Counters all;
  return all;
}

}  // namespace cutlass_ext

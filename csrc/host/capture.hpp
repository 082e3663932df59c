// Calls that an open capture of a CUDA graph forbids otherwise: those that load a module, or make streams and events.
// Used by counters.cu and side_stream.cpp, for what they look up or make once.
#pragma once

#include <cuda_runtime.h>

#include "error.hpp"

namespace cutlass_ext {

/// While it lives, the calling thread may make them.
class RelaxedCapture {
 public:
  RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "relaxing the capture mode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(RelaxedCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // of the thread before
};

}  // namespace cutlass_ext

// Failures of the host: an exception whose text says which Python exception it stands for. Thrown by host/ and torch/,
// translated by cutlass_ext/_ops.py (torch's stable ABI raises RuntimeError alone).
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

#include <cuda_runtime.h>

namespace cutlass_ext {

template <class... Parts>
[[noreturn]] void fail(char const* exception, Parts const&... parts) {
  std::ostringstream text;
  text << "cutlass_ext." << exception << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

/// Throws where `error` says so, and takes the error off the runtime, which else reports it again at the next launch.
inline void check_cuda(cudaError_t error, char const* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail("RuntimeError", doing, ": ", cudaGetErrorString(error));
}

/// `ctas` of a launch whose size follows from argument `name`, which is refused where they are too many.
inline unsigned grid_of(int64_t ctas, char const* name) {
  if (ctas > INT32_MAX) fail("ValueError", name, ": asks for ", ctas, " CTAs; a launch has room for fewer than 2^31");
  return static_cast<unsigned>(ctas);
}

}  // namespace cutlass_ext

// A launch beside others: a stream whose work begins when what its stream has been given before is done, and ends
// before what follows there. Called by plan.cpp.
#pragma once

#include <cuda_runtime.h>

namespace cutlass_ext {

/// While it lives, work on `beside` may run beside that on `stream`, which goes on after both. In a captured graph they
/// are branches. No call waits.
class SideStream {
 public:
  SideStream(int device, cudaStream_t stream);
  ~SideStream();
  SideStream(SideStream const&) = delete;

  cudaStream_t beside() const { return beside_; }

 private:
  cudaStream_t stream_, beside_;
  cudaEvent_t joined_;
};

}  // namespace cutlass_ext

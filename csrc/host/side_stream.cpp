// See side_stream.hpp. Streams and events are a thread's own, one set for each device, kept until the process ends.
#include "side_stream.hpp"

#include <map>

#include "capture.hpp"
#include "error.hpp"

namespace cutlass_ext {
namespace {

struct Branch {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, joined = nullptr;
};

/// Of the current device.
Branch const& branch_of(int device) {
  thread_local auto& branches = *new std::map<int, Branch>;  // graphs and streams may outlive a thread's objects
  Branch& branch = branches[device];
  if (branch.joined) return branch;
  RelaxedCapture const relaxed;
  int least, greatest;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  // What a failure leaves is there for the next call. The stream comes ahead of the launch beside it, which takes
  // whatever multiprocessors it leaves.
  if (!branch.stream)
    check_cuda(cudaStreamCreateWithPriority(&branch.stream, cudaStreamNonBlocking, greatest), "making a stream");
  for (cudaEvent_t* event : {&branch.forked, &branch.joined})
    if (!*event) check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
  return branch;
}

}  // namespace

SideStream::SideStream(int device, cudaStream_t stream) : stream_(stream) {
  Branch const& branch = branch_of(device);
  beside_ = branch.stream;
  joined_ = branch.joined;
  check_cuda(cudaEventRecord(branch.forked, stream), "forking a stream");
  check_cuda(cudaStreamWaitEvent(beside_, branch.forked, 0), "forking a stream");
}

SideStream::~SideStream() {
  cudaEventRecord(joined_, beside_);
  cudaStreamWaitEvent(stream_, joined_, 0);
}

}  // namespace cutlass_ext

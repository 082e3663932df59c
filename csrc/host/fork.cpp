// See fork.hpp. Streams and events are a thread's own, one set for each device, kept until the process ends.
#include "fork.hpp"

#include <map>

#include "capture.hpp"
#include "error.hpp"

namespace cutlass_ext {
namespace {

struct Branch {
  cudaStream_t stream;
  cudaEvent_t forked, joined;
};

/// Of the current device.
Branch const& branch_of(int device) {
  thread_local auto& branches = *new std::map<int, Branch>;  // graphs and streams may outlive a thread's objects
  auto found = branches.find(device);
  if (found != branches.end()) return found->second;
  RelaxedCapture const relaxed;
  Branch branch;
  int least, greatest;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  // Ahead of the launch beside it, which takes whatever multiprocessors it leaves.
  check_cuda(cudaStreamCreateWithPriority(&branch.stream, cudaStreamNonBlocking, greatest), "making a stream");
  check_cuda(cudaEventCreateWithFlags(&branch.forked, cudaEventDisableTiming), "making an event");
  check_cuda(cudaEventCreateWithFlags(&branch.joined, cudaEventDisableTiming), "making an event");
  return branches.emplace(device, branch).first->second;
}

}  // namespace

Fork::Fork(int device, cudaStream_t stream) : stream_(stream) {
  Branch const& branch = branch_of(device);
  beside_ = branch.stream;
  joined_ = branch.joined;
  check_cuda(cudaEventRecord(branch.forked, stream), "forking a stream");
  check_cuda(cudaStreamWaitEvent(beside_, branch.forked, 0), "forking a stream");
}

Fork::~Fork() {
  cudaEventRecord(joined_, beside_);
  cudaStreamWaitEvent(stream_, joined_, 0);
}

}  // namespace cutlass_ext

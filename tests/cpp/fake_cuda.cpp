// See fake_cuda.hpp.
#include "fake_cuda.hpp"

#include <algorithm>

#include <cuda_runtime.h>

namespace {

struct Answers {
  int multiprocessors;
  int block_kb, multiprocessor_kb;  // of shared memory: what a block may opt in to, and all there is
  int l2_mb;
  int major, minor;
};
constexpr Answers kAnswers[] = {
    {132, 227, 228, 60, 9, 0}, {108, 163, 164, 40, 8, 0}, {84, 99, 100, 6, 8, 6}, {7, 227, 228, 60, 9, 0}};

/// Registers that every kernel is taken to have a thread; most are held back by shared memory first.
constexpr int kRegisters = 128;

int current = cutlass_ext::fake::kH200;

}  // namespace

void cutlass_ext::fake::use(Gpu gpu) { current = gpu; }
size_t cutlass_ext::fake::cleared_bytes = 0;
int cutlass_ext::fake::biases_seen = 0;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Answers const& gpu = kAnswers[device];
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = gpu.block_kb << 10;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = gpu.l2_mb << 20;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = gpu.minor;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int shared_bytes) {
  return shared_bytes <= kAnswers[current].block_kb << 10 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*) {
  attributes->ptxVersion = 10 * kAnswers[current].major;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void const*, int threads, size_t shared_bytes) {
  int const by_shared = (kAnswers[current].multiprocessor_kb << 10) / (static_cast<int>(shared_bytes) + 1024);
  *blocks = std::min({by_shared, 2048 / threads, 65536 / kRegisters / threads});
  return cudaSuccess;
}

/// As if clusters could be of any multiprocessors.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const* kernel, cudaLaunchConfig_t const* launch) {
  int ctas;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, launch->blockDim.x, launch->dynamicSmemBytes);
  *clusters = ctas * kAnswers[current].multiprocessors / launch->attrs[0].val.clusterDim.x;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void*, int value, size_t bytes, cudaStream_t) {
  cutlass_ext::fake::cleared_bytes += bytes;
  return value == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }

}  // extern "C"

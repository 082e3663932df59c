// The CUDA runtime of the emulator: what csrc/'s objects want of libcudart, and of the driver cuTensorMapEncodeTiled.
// Kernels are found by their names in the PTX that the build kept; what the objects hold is machine code. Launches run
// at once and to their end, in the order of the calls, so that streams and events have nothing to do. Environment:
// CUTLASS_EXT_EMULATOR_SMS, the multiprocessors that the GPU says it has (4); CUTLASS_EXT_EMULATOR_L2, the bytes of
// its L2 (60 MB), which small calls do not fill; CUTLASS_EXT_EMULATOR_TRACE=1 writes a line for each launch.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include "machine.hpp"
#include "memory.hpp"
#include "tensor_map.hpp"

namespace cutlass_ext::emulator {
namespace {

// An H200, but for its multiprocessors and its L2, or a GPU before it.
constexpr int kSharedUnlessRaised = 48 << 10, kReservedShared = 1024, kRegisters = 65536, kThreads = 2048;
constexpr int kRegistersOfAThread = 128;  // as if; most kernels are held back by shared memory

int number_from(char const* variable, int else_this) {
  char const* text = std::getenv(variable);
  return text ? std::max(std::atoi(text), 1) : else_this;
}
int multiprocessors() {
  static int const count = number_from("CUTLASS_EXT_EMULATOR_SMS", 4);
  return count;
}
int capability() {  // 90 for 9.0
  static int const number = number_from("CUTLASS_EXT_EMULATOR_CAPABILITY", 90);
  return number;
}
int block_shared() { return (capability() >= 90 ? 227 : capability() == 80 ? 163 : 99) << 10; }
int l2_bytes() {
  static int const bytes = number_from("CUTLASS_EXT_EMULATOR_L2", 60 << 20);
  return bytes;
}

struct Function {
  std::string name;
  int shared_limit = kSharedUnlessRaised;  // of dynamic shared memory
};

/// What the objects enter before main, by the addresses that stand for it on the host.
struct Registry {
  std::recursive_mutex mutex;  // held while a kernel runs, too: launches of several threads take turns
  std::map<void const*, Function> functions;
  std::map<void const*, std::string> variables;  // their names
  std::vector<std::unique_ptr<Module>> modules;  // every .ptx of the build
};

Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

/// The module that has a kernel or a variable.
Module& module_of(bool (Module::*has)(std::string const&) const, std::string const& name) {
  for (auto const& module : registry().modules) {
    if ((*module.*has)(name)) return *module;
  }
  throw std::runtime_error("build/ptx has no " + name + ": run `make build`");
}

void* address_of(std::string const& variable) {
  return module_of(&Module::has_variable, variable).address_of(variable);
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text;

cudaError_t failed(cudaError_t error, std::string text) {
  last_text = std::move(text);
  return last_error = error;
}

/// Runs `action`, which may throw.
template <class Action>
cudaError_t attempt(Action const& action) {
  try {
    action();
    return cudaSuccess;
  } catch (std::exception const& error) {
    return failed(cudaErrorLaunchFailure, error.what());
  }
}

Function* function_of(void const* entry) {
  auto& functions = registry().functions;
  auto const found = functions.find(entry);
  if (found != functions.end()) return &found->second;
  for (auto& [host, function] : functions) {
    if (&function == entry) return &function;  // a cudaKernel_t
  }
  return nullptr;
}

std::string readable(std::string const& mangled) {
  int status;
  std::unique_ptr<char, decltype(&std::free)> const text(
      abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), &std::free);
  return text ? text.get() : mangled;
}

std::atomic<int> launches_before_failure{-1};  // negative: none fails

cudaError_t launch(void const* entry, dim3 grid, dim3 block, dim3 cluster, size_t shared_bytes, void** arguments) {
  static bool const traces = std::getenv("CUTLASS_EXT_EMULATOR_TRACE") != nullptr;
  std::lock_guard const lock(registry().mutex);
  if (launches_before_failure >= 0 && launches_before_failure-- == 0)
    return failed(cudaErrorLaunchOutOfResources, "the launch that was to fail");
  Function* const function = function_of(entry);
  if (!function) return failed(cudaErrorInvalidDeviceFunction, "a launch of no kernel that was registered");
  uint64_t const threads = uint64_t(block.x) * block.y * block.z;
  bool const empty = threads == 0 || grid.x == 0 || grid.y == 0 || grid.z == 0;
  if (empty || threads > 1024 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
    return failed(cudaErrorInvalidConfiguration, "a grid or block of a size that there is not");
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z || cluster.x * cluster.y * cluster.z > 8)
    return failed(cudaErrorInvalidConfiguration, "a cluster that does not divide the grid, or of more than 8 CTAs");
  if (shared_bytes > size_t(function->shared_limit))
    return failed(cudaErrorInvalidValue, "more shared memory than cudaFuncSetAttribute allowed");
  Launch const launch{function->name,
                      {grid.x, grid.y, grid.z},
                      {block.x, block.y, block.z},
                      {cluster.x, cluster.y, cluster.z},
                      static_cast<unsigned>(shared_bytes),
                      arguments};
  auto const start = std::chrono::steady_clock::now();
  cudaError_t const error = attempt([&] { module_of(&Module::has_kernel, function->name).launch(launch); });
  if (error != cudaSuccess) {
    last_text += " [in " + readable(function->name) + "]";
    // What it left in the modules' memory is not for the next one.
    for (auto const& module : registry().modules) module->zero_variables();
  }
  if (traces) {
    std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - start;
    std::fprintf(stderr, "emulator: %s <<<(%u, %u, %u), (%u, %u, %u), %zu>>> in clusters of %u: %.2f s\n",
                 readable(function->name).c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes,
                 cluster.x * cluster.y * cluster.z, seconds.count());
  }
  return error;
}

/// What the driver checks of a tiled map, as the documentation of cuTensorMapEncodeTiled has it.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* data, cuuint64_t const* sizes,
                      cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  constexpr uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // of the dtypes, without the packed ones
  constexpr unsigned kSpans[] = {0, 32, 64, 128, 128, 128, 128};         // of the swizzles
  auto const address = reinterpret_cast<uintptr_t>(data);
  unsigned const dtype_index = dtype, swizzle_index = swizzle;
  if (reinterpret_cast<uintptr_t>(map) % 64 || rank < 1 || rank > 5 || dtype_index >= std::size(kBytes) ||
      swizzle_index >= std::size(kSpans) || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || address % 16)
    return CUDA_ERROR_INVALID_VALUE;
  TensorMap encoded{};
  unsigned const element = kBytes[dtype_index];
  encoded.strides[0] = element;
  for (cuuint32_t i = 0; i < rank; ++i) {
    bool const fits = sizes[i] >= 1 && sizes[i] <= uint64_t(1) << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] >= 1 &&
                      steps[i] <= 8;
    if (!fits) return CUDA_ERROR_INVALID_VALUE;
    encoded.sizes[i] = sizes[i];
    encoded.box[i] = static_cast<uint16_t>(box[i]);
    encoded.steps[i] = static_cast<uint8_t>(steps[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= uint64_t(1) << 40) return CUDA_ERROR_INVALID_VALUE;
    encoded.strides[i] = strides[i - 1];
  }
  unsigned const row = box[0] * element;
  if (row % 16 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row > kSpans[swizzle_index]))
    return CUDA_ERROR_INVALID_VALUE;
  encoded.magic = TensorMap::kMagic;
  encoded.data = static_cast<char*>(data);
  encoded.rank = static_cast<uint8_t>(rank);
  encoded.dtype = static_cast<uint8_t>(dtype);
  encoded.element_bytes = static_cast<uint8_t>(element);
  encoded.interleave = static_cast<uint8_t>(interleave);
  encoded.swizzle = static_cast<uint8_t>(swizzle);
  encoded.fill = static_cast<uint8_t>(fill);
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &encoded, sizeof(encoded));
  return CUDA_SUCCESS;
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local CallConfiguration pushed;

}  // namespace
}  // namespace cutlass_ext::emulator

using namespace cutlass_ext::emulator;

extern "C" {

/// Reads every .ptx of a folder, before the first launch. A kernel that is there already stays as it is.
void emulator_read_ptx(char const* folder) {
  for (auto const& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".ptx") continue;
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    registry().modules.push_back(std::make_unique<Module>(text.str()));
  }
}

/// Has a launch fail once `launches` more have been made: one of a call's, as for want of resources.
void emulator_fail_launch(int launches) { launches_before_failure = launches; }

// ------------------------------------------------------------------------------ what nvcc's host code calls
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}  // at the process' end, when torch may still hold tensors

void __cudaRegisterFunction(void**, char const* host, char*, char const* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  registry().functions[host] = {name};
}

void __cudaRegisterVar(void**, char* host, char*, char const* name, int, size_t, int, int) {
  registry().variables[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* entry) {
  *kernel = reinterpret_cast<cudaKernel_t>(function_of(entry));
  return *kernel ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction, "no kernel that was registered");
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t) {
  return launch(kernel, grid, block, dim3(1, 1, 1), shared_bytes, arguments);
}

cudaError_t cudaLaunchKernel(void const* entry, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
  return launch(entry, grid, block, dim3(1, 1, 1), shared_bytes, arguments);
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* entry, void** arguments) {
  dim3 cluster(1, 1, 1);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    auto const& [x, y, z] = config->attrs[i].val.clusterDim;
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = dim3(x, y, z);
  }
  return launch(entry, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, arguments);
}

// ------------------------------------------------------------------------------ devices and kernels
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  std::map<cudaDeviceAttr, int> const values = {{cudaDevAttrMultiProcessorCount, multiprocessors()},
                                                {cudaDevAttrMaxSharedMemoryPerBlockOptin, block_shared()},
                                                {cudaDevAttrL2CacheSize, l2_bytes()},
                                                {cudaDevAttrComputeCapabilityMajor, capability() / 10},
                                                {cudaDevAttrComputeCapabilityMinor, capability() % 10}};
  auto const found = values.find(attribute);
  if (found == values.end()) return failed(cudaErrorInvalidValue, "a device attribute that the emulator does not know");
  *value = found->second;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(void const* entry, cudaFuncAttribute attribute, int value) {
  Function* const function = function_of(entry);
  if (!function) return failed(cudaErrorInvalidDeviceFunction, "no kernel that was registered");
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > block_shared())
    return failed(cudaErrorInvalidValue, "an attribute that the emulator does not know, or too much shared memory");
  function->shared_limit = value;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const* entry) {
  std::lock_guard const lock(registry().mutex);
  Function* const function = function_of(entry);
  if (!function) return failed(cudaErrorInvalidDeviceFunction, "no kernel that was registered");
  return attempt([&] { attributes->ptxVersion = module_of(&Module::has_kernel, function->name).target(); });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, void const*, int threads, size_t shared_bytes) {
  int const of_multiprocessor = block_shared() + kReservedShared,
            by_shared = of_multiprocessor / (static_cast<int>(shared_bytes) + kReservedShared);
  *ctas = std::min({by_shared, kThreads / threads, kRegisters / kRegistersOfAThread / threads});
  return cudaSuccess;
}

/// As if a cluster could be of any multiprocessors.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const* entry, cudaLaunchConfig_t const* config) {
  int ctas;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, entry, config->blockDim.x, config->dynamicSmemBytes);
  *clusters = ctas * multiprocessors() / config->attrs[0].val.clusterDim.x;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, void const* host) {
  std::lock_guard const lock(registry().mutex);
  auto const found = registry().variables.find(host);
  if (found == registry().variables.end()) return failed(cudaErrorInvalidSymbol, "no variable that was registered");
  return attempt([&] { *address = address_of(found->second); });
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  bool const known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *found = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------ memory, streams, events, errors
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (!is_allocated(to, bytes)) return failed(cudaErrorInvalidValue, "memory that is not the GPU's is set");
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     cudaGraphNode_t const**, cudaGraphEdgeData const**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
char const* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : last_text.c_str(); }

}  // extern "C"

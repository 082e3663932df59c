// See device.hpp and kernel_table.hpp.
#include "device.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "error.hpp"

namespace cutlass_ext {
namespace {

std::vector<Kernel>& table() {
  static std::vector<Kernel> entered;
  return entered;
}

Device asked(int index) {
  Device device;
  device.index = index;
  int major, minor;
  std::pair<int*, cudaDeviceAttr> const attributes[] = {{&device.multiprocessors, cudaDevAttrMultiProcessorCount},
                                                        {&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                                        {&device.l2_bytes, cudaDevAttrL2CacheSize},
                                                        {&major, cudaDevAttrComputeCapabilityMajor},
                                                        {&minor, cudaDevAttrComputeCapabilityMinor}};
  for (auto const& [value, attribute] : attributes)
    check_cuda(cudaDeviceGetAttribute(value, attribute, index), "reading a device's attributes");
  device.capability = 10 * major + minor;
  return device;
}

Occupancy asked(Kernel const& kernel) {
  Occupancy found;
  check_cuda(cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
             "raising a kernel's limit of shared memory");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.ctas_a_multiprocessor, kernel.entry, kernel.threads,
                                                           kernel.shared_bytes),
             "counting a kernel's CTAs");
  found.ctas_a_multiprocessor = std::max(found.ctas_a_multiprocessor, 1);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel.entry), "reading a kernel's attributes");
  found.compiled_for = attributes.ptxVersion;
  if (kernel.kind != Kind::Cluster && !kernel.loop.dq_through_cluster) return found;
  for (unsigned size = 2; size <= kMostInCluster; ++size) {
    LaunchConfig const launch(Grid{dim3(size), size}, kernel.threads, kernel.shared_bytes, nullptr);
    check_cuda(cudaOccupancyMaxActiveClusters(&found.clusters[size], kernel.entry, &launch.config),
               "counting a kernel's clusters");
  }
  return found;
}

/// What was asked once is known for the life of the process, its end included.
template <class Key, class T>
class Known {
 public:
  template <class Ask>
  T const& operator()(Key const& key, Ask const& ask) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = all_.find(key);
    return found != all_.end() ? found->second : all_.emplace(key, ask()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, T> all_;
};

}  // namespace

std::vector<Kernel> const& kernels() { return table(); }

std::vector<Kernel const*> const& kernels_of(Kind kind, DType dtype) {
  using Lists = std::array<std::array<std::vector<Kernel const*>, 3>, kKinds>;
  static Lists const lists = [] {  // of the whole table: the objects that fill it are built before any call
    Lists sorted;
    for (Kernel const& kernel : table()) sorted[int(kernel.kind)][int(kernel.dtype)].push_back(&kernel);
    return sorted;
  }();
  return lists[int(kind)][int(dtype)];
}

RegisteredKernels::RegisteredKernels(std::initializer_list<Kernel> entered) { table().insert(table().end(), entered); }

Device const& current_device() {
  static auto& devices = *new Known<int, Device>;
  int index;
  check_cuda(cudaGetDevice(&index), "reading the current CUDA device");
  return devices(index, [&] { return asked(index); });
}

Occupancy const& occupancy_of(Kernel const& kernel, Device const& device) {
  static auto& occupancies = *new Known<std::pair<void const*, int>, Occupancy>;
  return occupancies({kernel.entry, device.index}, [&] { return asked(kernel); });
}

}  // namespace cutlass_ext

// What the host knows of a GPU, asked once, and how many CTAs of a kernel it holds. Used by whatever plans launches.
#pragma once

#include <cstring>

#include "kernel_table.hpp"

namespace cutlass_ext {

struct Device {
  int index = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block may opt in to
  int l2_bytes = 0;
  int capability = 0;  // 90 for 9.0
};

/// The current device.
Device const& current_device();

/// Whether a kernel wants Hopper's instructions, which run on compute capability 9.0 and nowhere else.
inline bool wants_hopper(Kernel const& kernel) { return std::strcmp(kernel.family, "sm90") == 0; }

/// Whether the kernel's instructions and shared memory are there.
inline bool runs_on(Kernel const& kernel, Device const& device) {
  return (!wants_hopper(kernel) || device.capability == 90) && kernel.shared_bytes <= device.shared_bytes;
}

/// What a device holds of a kernel that runs on it, and in which form.
struct Occupancy {
  int ctas_a_multiprocessor = 0;
  int compiled_for = 0;                   // the compute capability of the PTX that it comes from; 90 for 9.0
  int clusters[kMostInCluster + 1] = {};  // at once, by their CTAs; of kernels that run in clusters of several sizes
};

/// The first call for a kernel and a device raises the kernel's shared-memory limit there.
Occupancy const& occupancy_of(Kernel const& kernel, Device const& device);

}  // namespace cutlass_ext

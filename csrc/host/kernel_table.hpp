// The table of kernels. Each file of csrc/kernels/ enters its own, so that a kernel is named where it is instantiated
// and nowhere else. Read by plan.cpp, bench/ and the tests.
#pragma once

#include <initializer_list>
#include <vector>

#include <cuda_runtime.h>

#include "../fmha/features.hpp"

namespace cutlass_ext {

enum class DType { Float32, Float16, BFloat16 };

inline char const* name_of(DType dtype) {
  return dtype == DType::Float32 ? "float32" : dtype == DType::Float16 ? "float16" : "bfloat16";
}

inline char const* name_of(Kind kind) {
  constexpr char const* kNames[] = {"persistent",      "tiles",         "short",          "heads",
                                    "decode",          "narrow",        "cluster",        "key_gradients",
                                    "query_gradients", "all_gradients", "head_gradients", "bias_gradients"};
  return kNames[static_cast<int>(kind)];
}

struct Grid {
  dim3 ctas;
  unsigned cluster = 1;  // CTAs of a cluster, along x
};

/// A launch as the runtime wants it described. `waits`: whether the kernel waits for the launch before it by itself
/// (fmha/launch_order.hpp), and may begin before that has ended.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  LaunchConfig(Grid const& grid, int threads, int shared_bytes, cudaStream_t stream, bool waits = false) {
    config.gridDim = grid.ctas;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (grid.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {grid.cluster, 1, 1};
    }
    if (waits) {
      cudaLaunchAttribute& order = attributes[config.numAttrs++];
      order.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      order.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(LaunchConfig const&) = delete;
};

/// One compiled kernel: a family's way of carrying attention out at one tile shape.
struct Kernel {
  char const* family;  // "simt", "sm80", "sm90"
  Kind kind;
  DType dtype;
  int head_dim, head_dim_v;  // of the tile: the largest d and d_v that it takes
  int block_r, block_c;      // rows are packed query rows in the kinds that decode
  Features takes;
  int threads;
  int shared_bytes;
  void const* entry;                   // for occupancy and the shared-memory limit
  bool (*takes_shape)(Params const&);  // what it asks of a call's sizes beyond the tile's, or null
  void (*launch)(Params const&, Grid const&, cudaStream_t);  // gradients: of BackwardParams
  Features wants = 0;                                        // what it is for: it takes no call without
  TileLoop loop = {};

  /// Whether the tile holds a call's head dims and the kernel takes its sizes.
  bool takes_sizes(Params const& params) const {
    return params.head_dim <= head_dim && params.head_dim_v <= head_dim_v && (!takes_shape || takes_shape(params));
  }
  /// Whether a call with `features` has what the kernel is for; and whether that is all that it has, beside what the
  /// kernel takes.
  bool is_for(Features features) const { return (wants & ~features) == 0; }
  bool takes_features(Features features) const { return is_for(features) && (features & ~takes) == 0; }
};

/// Every kernel there is, in no order, and those of one kind and dtype.
std::vector<Kernel> const& kernels();
std::vector<Kernel const*> const& kernels_of(Kind kind, DType dtype);

/// Enters kernels into the table; a static object of each file of csrc/kernels/.
struct RegisteredKernels {
  RegisteredKernels(std::initializer_list<Kernel> entered);
};

}  // namespace cutlass_ext

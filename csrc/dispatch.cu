// The table of kernels, the choice among them, and the launch with its merge. See dispatch.hpp.
#include "dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <sstream>

#include <cutlass/numeric_types.h>

#include "fmha/merge.hpp"
#include "fmha/scheduler.hpp"

namespace cutlass_ext {

extern Kernel const simt_f32_d32_large, simt_f32_d32_small, simt_f32_d64_large, simt_f32_d64_medium, simt_f32_d64_small,
    simt_f32_d96_large, simt_f32_d96_small, simt_f32_d128_large, simt_f32_d128_medium, simt_f32_d128_small,
    simt_f32_d192_large, simt_f32_d192_small, simt_f32_d224_small, simt_f32_d256_large, simt_f32_d256_small;

extern Kernel const sm80_f16_d64_large, sm80_f16_d64_small, sm80_bf16_d64_large, sm80_bf16_d64_small,
    sm80_f16_d128_large, sm80_f16_d128_small, sm80_bf16_d128_large, sm80_bf16_d128_small, sm80_f16_d192_large,
    sm80_f16_d192_small, sm80_bf16_d192_large, sm80_bf16_d192_small, sm80_f16_d256_large, sm80_f16_d256_small,
    sm80_bf16_d256_large, sm80_bf16_d256_small;

namespace {

/// Every kernel there is. Of one family, dtype and head_dim the larger tile comes first: it is taken where its query
/// tiles fill the GPU.
Kernel const* const kKernels[] = {
    &simt_f32_d32_large,   &simt_f32_d32_small,   &simt_f32_d64_large,   &simt_f32_d64_medium,  &simt_f32_d64_small,
    &simt_f32_d96_large,   &simt_f32_d96_small,   &simt_f32_d128_large,  &simt_f32_d128_medium, &simt_f32_d128_small,
    &simt_f32_d192_large,  &simt_f32_d192_small,  &simt_f32_d224_small,  &simt_f32_d256_large,  &simt_f32_d256_small,
    &sm80_f16_d64_large,   &sm80_f16_d64_small,   &sm80_bf16_d64_large,  &sm80_bf16_d64_small,  &sm80_f16_d128_large,
    &sm80_f16_d128_small,  &sm80_bf16_d128_large, &sm80_bf16_d128_small, &sm80_f16_d192_large,  &sm80_f16_d192_small,
    &sm80_bf16_d192_large, &sm80_bf16_d192_small, &sm80_f16_d256_large,  &sm80_f16_d256_small,  &sm80_bf16_d256_large,
    &sm80_bf16_d256_small,
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);
constexpr int kMaxDevices = 64;

struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block may opt in to
};

cudaError_t device_of(int index, Device* device) {
  static std::atomic<int> multiprocessors[kMaxDevices], shared_bytes[kMaxDevices];
  if (index >= kMaxDevices) return cudaErrorInvalidDevice;
  if (multiprocessors[index].load() == 0) {
    int count, bytes;
    if (cudaError_t e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index)) return e;
    shared_bytes[index].store(bytes);
    multiprocessors[index].store(count);
  }
  *device = {multiprocessors[index].load(), shared_bytes[index].load()};
  return cudaSuccess;
}

/// CTAs of kernel `k` that a multiprocessor holds; the first call for a device also raises the kernel's shared-memory
/// limit there.
cudaError_t prepare(int k, int device, int* ctas) {
  static std::atomic<int> prepared[kKernelCount][kMaxDevices];
  int n = prepared[k][device].load();
  if (n == 0) {
    Kernel const& kernel = *kKernels[k];
    if (cudaError_t e =
            cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes))
      return e;
    if (cudaError_t e =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel.entry, kernel.threads, kernel.shared_bytes))
      return e;
    n = std::max(n, 1);
    prepared[k][device].store(n);
  }
  *ctas = n;
  return cudaSuccess;
}

char const* name_of(DType dtype) {
  return dtype == DType::Float32 ? "float32" : dtype == DType::Float16 ? "float16" : "bfloat16";
}

/// Whether `tiles` query tiles fill the `slots` CTAs that the GPU holds at once. Under a causal mask the tiles differ
/// in length, and a single wave lasts as long as its longest: (1, 2048, 16, 64) took 341 us in 256 tiles of 128 rows
/// for 264 slots, 266 in 1024 of 32 for 528.
bool fills(ForwardParams const& params, int64_t tiles, int64_t slots) {
  return params.window_right >= 0 && params.n_q > 1 ? 4 * tiles >= 5 * slots : 4 * tiles >= 3 * slots;
}

/// Key tiles that the busiest query tile visits, as far as the host knows.
int64_t key_tiles(ForwardParams const& p, Kernel const& kernel) {
  int64_t keys = p.n_kv;
  if (p.window_left >= 0 && p.window_right >= 0)
    keys = std::min<int64_t>(keys, int64_t(p.window_left) + p.window_right + kernel.block_r);
  return (keys + kernel.block_c - 1) / kernel.block_c;
}

}  // namespace

cudaError_t plan_forward(ForwardParams const& params, DType dtype, std::string const& backend, int num_splits,
                         bool want_reason, Plan* plan) {
  *plan = {};
  int index;
  Device device;
  if (cudaError_t e = cudaGetDevice(&index)) return e;
  if (cudaError_t e = device_of(index, &device)) return e;

  int const wanted = std::max(params.head_dim, params.head_dim_v);
  bool family_known = backend == "auto";
  int head_dim = 0;  // of the smallest tiles that hold the call's
  for (Kernel const* k : kKernels) {
    family_known |= backend == k->family;
    if ((backend == "auto" || backend == k->family) && k->dtype == dtype && k->head_dim >= wanted &&
        k->shared_bytes <= device.shared_bytes && (head_dim == 0 || k->head_dim < head_dim)) {
      head_dim = k->head_dim;
    }
  }
  if (head_dim == 0) {
    plan->reason = family_known
                       ? std::string("q: ") + name_of(dtype) + " with head_dim " + std::to_string(wanted) +
                             " has no kernel" + (backend == "auto" ? "" : " in backend \"" + backend + "\"") +
                             "; use backend=\"auto\", or backend=\"torch\""
                       : "backend: \"" + backend + "\" is not built yet; use \"auto\", \"simt\", \"sm80\" or \"torch\"";
    return cudaSuccess;
  }
  int64_t tiles = 0;
  int ctas = 0;
  for (int k = 0; k < kKernelCount; ++k) {
    Kernel const& kernel = *kKernels[k];
    if ((backend != "auto" && backend != kernel.family) || kernel.dtype != dtype || kernel.head_dim != head_dim ||
        kernel.shared_bytes > device.shared_bytes) {
      continue;
    }
    if (cudaError_t e = prepare(k, index, &ctas)) return e;
    tiles = Scheduler(params.batch, params.heads_q, params.n_q, kernel.block_r, 1, 1).size();
    plan->kernel = &kernel;
    bool const tall = 2 * params.n_q > kernel.block_r;  // else half of the tile or more would be empty
    // With the number of splits fixed a sequence's bits must not depend on the batch that it comes in: then the choice
    // rests on N_q alone, and on nothing where sequences are packed, since each has an N_q of its own.
    if (num_splits > 0 ? tall || params.packed()
                       : tall && fills(params, tiles, int64_t(ctas) * device.multiprocessors)) {
      break;
    }
  }
  Kernel const& kernel = *plan->kernel;
  int64_t const slots = int64_t(ctas) * device.multiprocessors;
  plan->num_splits = num_splits > 0 ? num_splits : choose_num_splits(tiles, key_tiles(params, kernel), slots);
  if (want_reason) {
    std::ostringstream text;
    text << kernel.family << ": " << name_of(dtype) << ", head_dim " << wanted << " in tiles of B_r " << kernel.block_r
         << ", B_c " << kernel.block_c << ", head_dim " << kernel.head_dim << "; " << tiles << " query tiles for "
         << slots << " CTAs at once, " << plan->num_splits << (plan->num_splits == 1 ? " split" : " splits")
         << " of the keys" << (num_splits > 0 ? " as asked" : "");
    plan->reason = text.str();
  }
  return cudaSuccess;
}

cudaError_t run_forward(Plan const& plan, ForwardParams const& params, cudaStream_t stream) {
  if (cudaError_t e = plan.kernel->launch(params, stream)) return e;
  if (params.num_splits <= 1) return cudaSuccess;
  switch (plan.kernel->dtype) {
    case DType::Float32:
      return merge_splits<float>(params, stream);
    case DType::Float16:
      return merge_splits<cutlass::half_t>(params, stream);
    default:
      return merge_splits<cutlass::bfloat16_t>(params, stream);
  }
}

}  // namespace cutlass_ext

// The table of kernels, the choice among them, and the launch with its merge. See dispatch.hpp.
#include "dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>
#include <utility>

#include <cutlass/numeric_types.h>

#include "counters.hpp"
#include "fmha/merge.hpp"
#include "fmha/sequence.hpp"
#include "fmha/work_order.hpp"

namespace cutlass_ext {

extern Kernel const simt_f32_d32_large, simt_f32_d32_small, simt_f32_d64_large, simt_f32_d64_medium, simt_f32_d64_small,
    simt_f32_d96_large, simt_f32_d96_small, simt_f32_d128_large, simt_f32_d128_medium, simt_f32_d128_small,
    simt_f32_d192_large, simt_f32_d192_small, simt_f32_d224_small, simt_f32_d256_large, simt_f32_d256_small;

extern Kernel const sm80_f16_d64_large, sm80_f16_d64_small, sm80_bf16_d64_large, sm80_bf16_d64_small,
    sm80_f16_d128_large, sm80_f16_d128_small, sm80_bf16_d128_large, sm80_bf16_d128_small, sm80_f16_d192_large,
    sm80_f16_d192_small, sm80_bf16_d192_large, sm80_bf16_d192_small, sm80_f16_d256_large, sm80_f16_d256_small,
    sm80_bf16_d256_large, sm80_bf16_d256_small;

extern Kernel const sm90_f16_d64_large, sm90_f16_d64_small, sm90_f16_d64_mods, sm90_bf16_d64_large, sm90_bf16_d64_small,
    sm90_bf16_d64_mods, sm90_f16_d96, sm90_f16_d96_mods, sm90_bf16_d96, sm90_bf16_d96_mods, sm90_f16_d128,
    sm90_f16_d128_mods, sm90_bf16_d128, sm90_bf16_d128_mods, sm90_f16_d192, sm90_f16_d192_mods, sm90_bf16_d192,
    sm90_bf16_d192_mods, sm90_f16_d192_128, sm90_f16_d192_128_mods, sm90_bf16_d192_128, sm90_bf16_d192_128_mods,
    sm90_f16_d256, sm90_f16_d256_mods, sm90_bf16_d256, sm90_bf16_d256_mods, sm90_f16_d64_short_1, sm90_f16_d64_short_2,
    sm90_bf16_d64_short_1, sm90_bf16_d64_short_2, sm90_f16_d128_short_1, sm90_f16_d128_short_2, sm90_bf16_d128_short_1,
    sm90_bf16_d128_short_2;

namespace {

/// Every kernel there is. The families come in the order of preference; of one family, dtype and head_dim the larger
/// tile comes first: it is taken where its query tiles fill the GPU.
Kernel const* const kKernels[] = {
    &sm90_f16_d64_large,     &sm90_f16_d64_small,      &sm90_f16_d64_mods,     &sm90_bf16_d64_large,
    &sm90_bf16_d64_small,    &sm90_bf16_d64_mods,      &sm90_f16_d96,          &sm90_f16_d96_mods,
    &sm90_bf16_d96,          &sm90_bf16_d96_mods,      &sm90_f16_d128,         &sm90_f16_d128_mods,
    &sm90_bf16_d128,         &sm90_bf16_d128_mods,     &sm90_f16_d192,         &sm90_f16_d192_mods,
    &sm90_bf16_d192,         &sm90_bf16_d192_mods,     &sm90_f16_d192_128,     &sm90_f16_d192_128_mods,
    &sm90_bf16_d192_128,     &sm90_bf16_d192_128_mods, &sm90_f16_d256,         &sm90_f16_d256_mods,
    &sm90_bf16_d256,         &sm90_bf16_d256_mods,     &simt_f32_d32_large,    &simt_f32_d32_small,
    &simt_f32_d64_large,     &simt_f32_d64_medium,     &simt_f32_d64_small,    &simt_f32_d96_large,
    &simt_f32_d96_small,     &simt_f32_d128_large,     &simt_f32_d128_medium,  &simt_f32_d128_small,
    &simt_f32_d192_large,    &simt_f32_d192_small,     &simt_f32_d224_small,   &simt_f32_d256_large,
    &simt_f32_d256_small,    &sm80_f16_d64_large,      &sm80_f16_d64_small,    &sm80_bf16_d64_large,
    &sm80_bf16_d64_small,    &sm80_f16_d128_large,     &sm80_f16_d128_small,   &sm80_bf16_d128_large,
    &sm80_bf16_d128_small,   &sm80_f16_d192_large,     &sm80_f16_d192_small,   &sm80_bf16_d192_large,
    &sm80_bf16_d192_small,   &sm80_f16_d256_large,     &sm80_f16_d256_small,   &sm80_bf16_d256_large,
    &sm80_bf16_d256_small,   &sm90_f16_d64_short_1,    &sm90_f16_d64_short_2,  &sm90_bf16_d64_short_1,
    &sm90_bf16_d64_short_2,  &sm90_f16_d128_short_1,   &sm90_f16_d128_short_2, &sm90_bf16_d128_short_1,
    &sm90_bf16_d128_short_2,
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);
constexpr int kMaxDevices = 64;

struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block may opt in to
  int l2_bytes = 0;
  int capability = 0;  // 90 for 9.0
};

cudaError_t device_of(int index, Device* device) {
  static std::atomic<Device const*> known[kMaxDevices];
  if (index >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!known[index].load()) {
    Device found;
    int major, minor;
    std::pair<int*, cudaDeviceAttr> const asked[] = {{&found.multiprocessors, cudaDevAttrMultiProcessorCount},
                                                     {&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                                     {&found.l2_bytes, cudaDevAttrL2CacheSize},
                                                     {&major, cudaDevAttrComputeCapabilityMajor},
                                                     {&minor, cudaDevAttrComputeCapabilityMinor}};
    for (auto const& [value, attribute] : asked) {
      if (cudaError_t e = cudaDeviceGetAttribute(value, attribute, index)) return e;
    }
    found.capability = 10 * major + minor;
    known[index].store(new Device(found));  // kept for the life of the process
  }
  *device = *known[index].load();
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

/// Whether `tiles` query tiles fill the `slots` CTAs that the GPU holds at once. Under a causal mask the tiles of a
/// sequence differ in length, and a single wave lasts as long as its longest: (1, 2048, 16, 64) took 341 us in 256
/// tiles of 128 rows for 264 slots, 266 in 1024 of 32 for 528.
bool fills(ForwardParams const& params, int block_r, int64_t tiles, int64_t slots) {
  return params.window_right >= 0 && params.n_q > block_r ? 4 * tiles >= 5 * slots : 4 * tiles >= 3 * slots;
}

/// Key tiles that the busiest query tile visits, as far as the host knows.
int64_t key_tiles(ForwardParams const& p, Kernel const& kernel) {
  int64_t keys = p.n_kv;
  if (p.window_left >= 0 && p.window_right >= 0)
    keys = std::min<int64_t>(keys, int64_t(p.window_left) + p.window_right + kernel.block_r);
  return (keys + kernel.block_c - 1) / kernel.block_c;
}

bool is_hopper(Kernel const& kernel) { return !std::strcmp(kernel.family, "sm90"); }

/// The Hopper family's instructions run on compute capability 9.0 and nowhere else.
bool runs_on(Kernel const& kernel, Device const& device) { return !is_hopper(kernel) || device.capability == 90; }

/// Whether a call that the short kernels do not take is done before the pipeline of Hopper's others is full.
/// Microseconds there and in sm80, 32 heads on 8: 11.2 and 9.3 at (8, 64, 64), 10.4 and 10.0 at (1, 128, 128), 15.4
/// and 19.4 at (8, 128, 128).
bool is_tiny(ForwardParams const& p, Device const& device) {
  auto blocks = [](int n) { return (n + 63) / 64; };
  return std::max(p.n_q, p.n_kv) <= 128 && std::max(p.head_dim, p.head_dim_v) <= 128 &&
         int64_t(p.batch) * p.heads_q * blocks(p.n_q) * blocks(p.n_kv) <= 4 * device.multiprocessors;
}

/// Whether all that tells the sequences of a call apart is known to the host, and nothing changes the scores.
bool is_plain(ForwardParams const& p) { return !p.packed() && all_alike(p) && p.softcap == 0.f && !p.alibi_slopes; }

/// How many warpgroups a query tile gets in the short kernels of Hopper; 0 where the persistent ones are faster. Blocks
/// are of 64 rows and keys, figures (batch, N) in us there and in the persistent kernels, 32 heads on 8 where no others
/// are named.
/// Two where every query tile has a multiprocessor of its own: causal (1, 256) at head_dim 128 8.9 for 11.2, (1, 2048,
/// 4 heads) 23.0 for 26.5. From 16 blocks a tile on splits are faster where they find multiprocessors idle: (1, 2048, 1
/// head) 22.1 for 20.8. One, on several CTAs a multiprocessor, while this has few blocks. At head_dim 128 up to 6, or 9
/// where a causal mask makes the tiles unequal, which several CTAs level out: (1, 512) causal, 8.7 blocks, 14.2
/// for 14.5, (1, 384) in full, as many, 13.5 for 12.4. At 64 up to 80 of query tiles that see no more than four, up to
/// 18 of others: (32, 197) causal, 77 blocks, 43 for 53, (2, 512) causal, 17.5, 14.3 for 16.0, (1, 1024) causal,
/// 33, 21.2 for 20.2. The figures of one at 128 are of two CTAs with three stages.
int warpgroups_of_short(ForwardParams const& p, Device const& device) {
  constexpr int kBlock = 64, kMaxTiles = 64;
  int const head_dim = std::max(p.head_dim, p.head_dim_v), query_tiles = Scheduler::tiles_of(p.n_q, kBlock);
  if (device.capability != 90 || !is_plain(p) || head_dim > 128 || query_tiles > kMaxTiles) return 0;
  Visibility const visibility = sequence_of(p, 0).visibility;
  int64_t blocks_of_head = 0, longest = 0;
  for (int tile = 0; tile < query_tiles; ++tile) {
    int64_t const blocks = std::max(1, visibility.tiles_of(tile * kBlock, kBlock, kBlock).size());  // a CTA at least
    blocks_of_head += blocks;
    longest = std::max(longest, blocks);
  }
  int64_t const heads = int64_t(p.batch) * p.heads_q, tiles = heads * query_tiles, slots = device.multiprocessors;
  if (1 < longest && longest <= (2 * tiles > slots ? 32 : 16) && tiles <= slots) return 2;
  bool const unequal = 4 * blocks_of_head < 3 * longest * query_tiles;
  int64_t const most = head_dim <= 64 ? (longest <= 4 ? 80 : 18) : unequal ? 9 : 6;
  return heads * blocks_of_head <= most * slots ? 1 : 0;
}

/// Key tiles that a split has at least, since the merge costs about as much: on Hopper (1, 1024, 8, 128) takes 19.4 us
/// in one split and 22.4 in two, (1, 2048, 4, 128) 28.6 and 27.1.
int least_key_tiles(Kernel const& kernel) { return is_hopper(kernel) ? 640 / kernel.block_c : 2; }

/// Orders the kernels of a family that could run a call: smaller tiles of head_dim first, then those without what the
/// call does not need.
int cost_of(Kernel const& kernel) { return 2 * (kernel.head_dim + kernel.head_dim_v) + kernel.score_mods; }

int size_of(DType dtype) { return dtype == DType::Float32 ? 4 : 2; }

}  // namespace

cudaError_t plan_forward(ForwardParams const& params, DType dtype, std::string const& backend, int num_splits,
                         bool want_reason, Plan* plan) {
  *plan = {};
  int index;
  Device device;
  if (cudaError_t e = cudaGetDevice(&index)) return e;
  if (cudaError_t e = device_of(index, &device)) return e;

  bool const score_mods = params.softcap > 0.f || params.alibi_slopes;
  // With the number of splits fixed nothing may depend on the batch.
  bool const tiny = backend == "auto" && num_splits == 0 && is_tiny(params, device);
  int const warpgroups = num_splits == 0 && dtype != DType::Float32 ? warpgroups_of_short(params, device) : 0;
  std::string passed_over;  // families that would have come first, and why they do not run this call
  Kernel const* best = nullptr;
  bool family_known = backend == "auto";
  auto const choose = [&](int short_warpgroups) {
    for (Kernel const* k : kKernels) {
      bool const asked_for = backend == "auto" || !std::strcmp(backend.c_str(), k->family);
      family_known |= asked_for;
      if (!asked_for || k->dtype != dtype || k->short_warpgroups != short_warpgroups || k->head_dim < params.head_dim ||
          k->head_dim_v < params.head_dim_v || k->shared_bytes > device.shared_bytes ||
          (score_mods && !k->score_mods) || !runs_on(*k, device) ||
          (best && (std::strcmp(best->family, k->family) || cost_of(*best) <= cost_of(*k)))) {
        continue;
      }
      char const* why = k->refuses ? k->refuses(params) : nullptr;
      if (!why && tiny && is_hopper(*k) && short_warpgroups == 0)
        why = "its pipeline would not be full before so few scores are done";
      if (why) {
        if (want_reason) passed_over = std::string(k->family) + " does not run it: " + why;
        continue;
      }
      best = k;
    }
  };
  choose(warpgroups);
  if (!best && warpgroups > 0) choose(0);
  int const wanted = std::max(params.head_dim, params.head_dim_v);
  if (!best) {
    plan->reason = !family_known ? "backend: \"" + backend +
                                       "\" is not built; use \"auto\", \"simt\", \"sm80\", "
                                       "\"sm90\" or \"torch\""
                   : !passed_over.empty()
                       ? "q, k, v: " + passed_over + "; use backend=\"auto\", or copy them with .contiguous()"
                       : std::string("q: ") + name_of(dtype) + " with head_dim " + std::to_string(wanted) +
                             " has no kernel for this GPU" +
                             (backend == "auto" ? "" : " in backend \"" + backend + "\"") +
                             "; use backend=\"auto\", or backend=\"torch\"";
    return cudaSuccess;
  }
  int64_t tiles = 0;
  int ctas = 0;
  for (int k = 0; k < kKernelCount; ++k) {
    Kernel const& kernel = *kKernels[k];
    if (std::strcmp(kernel.family, best->family) || kernel.dtype != dtype || cost_of(kernel) != cost_of(*best) ||
        kernel.head_dim != best->head_dim || kernel.score_mods != best->score_mods ||
        kernel.short_warpgroups != best->short_warpgroups || kernel.shared_bytes > device.shared_bytes) {
      continue;
    }
    if (cudaError_t e = prepare(k, index, &ctas)) return e;
    tiles = int64_t(params.batch) * params.heads_q * Scheduler::tiles_of(params.n_q, kernel.block_r);
    plan->kernel = &kernel;
    bool const tall = 2 * params.n_q > kernel.block_r;  // else half of the tile or more would be empty
    // With the number of splits fixed a sequence's bits must not depend on the batch that it comes in: then the choice
    // rests on N_q alone, and on nothing where sequences are packed, since each has an N_q of its own.
    if (num_splits > 0 ? tall || params.packed()
                       : tall && fills(params, kernel.block_r, tiles, int64_t(ctas) * device.multiprocessors)) {
      break;
    }
  }
  Kernel const& kernel = *plan->kernel;
  int const slots = ctas * device.multiprocessors;
  plan->slots = slots;
  if (num_splits > 0) {
    plan->num_splits = num_splits;
  } else if (kernel.short_warpgroups == 0) {
    plan->num_splits = choose_num_splits(tiles, key_tiles(params, kernel), slots, least_key_tiles(kernel));
  }
  if (want_reason) {
    std::ostringstream text;
    text << kernel.family << ": " << (kernel.short_warpgroups > 0 ? "short launch, " : "") << name_of(dtype)
         << ", head_dim " << wanted << " in tiles of B_r " << kernel.block_r << ", B_c " << kernel.block_c
         << ", head_dim " << kernel.head_dim << "; " << tiles << " query tiles for " << slots << " CTAs at once, "
         << plan->num_splits << (plan->num_splits == 1 ? " split" : " splits") << " of the keys"
         << (num_splits > 0 ? " as asked" : "");
    if (!passed_over.empty()) text << "; " << passed_over;
    plan->reason = text.str();
  }
  return cudaSuccess;
}

cudaError_t run_forward(Plan const& plan, ForwardParams params, cudaStream_t stream) {
  int index;
  Device device;
  if (cudaError_t e = cudaGetDevice(&index)) return e;
  if (cudaError_t e = device_of(index, &device)) return e;
  if (plan.kernel->short_warpgroups > 0) return plan.kernel->launch(params, stream);
  order_work(&params, plan.kernel->block_r, plan.slots, device.l2_bytes, size_of(plan.kernel->dtype));
  if (is_hopper(*plan.kernel)) {
    if (cudaError_t e = counters().take(index, stream, 2, &params.work_counter)) return e;
  }
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

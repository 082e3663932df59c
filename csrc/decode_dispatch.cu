// The table of decode kernels, the choice among them, and the grid. See decode_dispatch.hpp.
#include "decode_dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>

#include "counters.hpp"
#include "fmha/decode/partition.hpp"
#include "fmha/decode/sequence.hpp"

namespace cutlass_ext::decode {

extern Kernel const f16_d64_rows16, f16_d64_rows64, bf16_d64_rows16, bf16_d64_rows64, f16_d128_rows16, f16_d128_rows64,
    bf16_d128_rows16, bf16_d128_rows64, f16_d192_rows16, f16_d192_rows64, bf16_d192_rows16, bf16_d192_rows64,
    f16_d256_rows16, f16_d256_rows64, bf16_d256_rows16, bf16_d256_rows64, f32_d64_rows16, f32_d128_rows16,
    f32_d256_rows16;
extern ClusterKernel const f16_d64_cluster, f16_d128_cluster, bf16_d64_cluster, bf16_d128_cluster;

namespace {

/// Every kernel there is; of one dtype the smaller tile first.
Kernel const* const kKernels[] = {
    &f16_d64_rows16,   &f16_d64_rows64,   &f16_d128_rows16,  &f16_d128_rows64,  &f16_d192_rows16,
    &f16_d192_rows64,  &f16_d256_rows16,  &f16_d256_rows64,  &bf16_d64_rows16,  &bf16_d64_rows64,
    &bf16_d128_rows16, &bf16_d128_rows64, &bf16_d192_rows16, &bf16_d192_rows64, &bf16_d256_rows16,
    &bf16_d256_rows64, &f32_d64_rows16,   &f32_d128_rows16,  &f32_d256_rows16,
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);
constexpr int kMaxDevices = 64;
// Shared memory of a multiprocessor that is worth filling with copies. Twice as much, in twice the CTAs, is slower on
// an H200 where sequences are shared by groups (130 us for 126 at 16 x 8192 keys of 8 heads, 19.3 for 17.5 at 1 x 8192:
// more parts to merge), and faster where a group has several: one CTA then copies while another ends a sequence (the
// lean kernel: 235 us for 238 at 64 ragged sequences; but 243 for 240 at 64 x 4096, where all end at the same time).
constexpr int kWantedBytes = 96 * 1024;
ClusterKernel const* const kClusterKernels[] = {&f16_d64_cluster, &f16_d128_cluster, &bf16_d64_cluster,
                                                &bf16_d128_cluster};
// Tiles for each warp up to which clusters win. Where the sequences differ, the longest decides how long theirs take,
// and lean.hpp shares them out evenly; where they are alike, clusters win what its counter and merge cost (H200,
// head_dim 128: 7.5 us for 9.9 at 1024 keys of 8 heads, 14.0 for 15.9 at 8192; 14.0 for 15.6 at 2 x 4096 keys of 8),
// and lose in long ones where their CTAs do not fill the GPU's (73.5 for 67.9 at 16,384 keys of 32 heads, 30.2 for 24.9
// at 32,768 of 4, which have 64 and 32 CTAs).
constexpr int kTurnsOfUnlike = 8, kEnoughClusterCtas = 48;
constexpr int kMaxRows = 16;  // query rows of a call of `fmha` up to which it decodes: speculative decoding's

/// CTAs of a kernel that fill a device's wanted bytes, and all that it holds at once; 0 where it does not fit.
struct Slots {
  int enough, all;
};

/// What a device holds of kernel `k`, of its lean one, and of its clusters of 2, 4 and 8 CTAs.
struct Room {
  Slots ctas{}, lean{};
  int clusters[3]{};
};

ClusterKernel const* cluster_kernel_of(Kernel const& kernel) {
  for (ClusterKernel const* c : kClusterKernels) {
    if (c->dtype == kernel.dtype && c->head_dim == kernel.head_dim && kernel.lean_entry) return c;
  }
  return nullptr;
}

cudaError_t count_clusters(ClusterKernel const& kernel, int (&clusters)[3]) {
  for (int i = 0; i < 3; ++i) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {2u << i, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = 2u << i;
    config.blockDim = kernel.threads;
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters[i], kernel.entries[0], &config)) return e;
  }
  return cudaSuccess;
}

/// The first call for a device also raises the kernels' shared-memory limits there.
cudaError_t room_of(int k, int device, Room const** room) {
  static std::atomic<bool> known[kKernelCount][kMaxDevices];
  static Room rooms[kKernelCount][kMaxDevices];
  static std::mutex mutex;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  *room = &rooms[k][device];
  if (known[k][device].load(std::memory_order_acquire)) return cudaSuccess;

  std::lock_guard<std::mutex> const lock(mutex);
  int multiprocessors, limit, major, minor;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return e;
  auto const allow = [](void const* entry, int bytes) {
    return cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  auto const count = [&](void const* entry, int threads, int bytes, Slots* found) {
    if (cudaError_t e = allow(entry, bytes)) return e;
    int ctas;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, entry, threads, bytes)) return e;
    ctas = std::max(ctas, 1);
    *found = {std::clamp((kWantedBytes + bytes - 1) / bytes, 1, ctas) * multiprocessors, ctas * multiprocessors};
    return cudaSuccess;
  };
  Kernel const& kernel = *kKernels[k];
  Room found;
  for (void const* entry : {kernel.entries[1], kernel.entries[0]}) {
    if (cudaError_t e = count(entry, kernel.threads, kernel.shared_bytes, &found.ctas)) return e;
  }
  if (kernel.lean_entry && kernel.lean_shared_bytes <= limit) {
    if (cudaError_t e = count(kernel.lean_entry, kernel.threads, kernel.lean_shared_bytes, &found.lean)) return e;
  }
  ClusterKernel const* const cluster = cluster_kernel_of(kernel);
  if (cluster && major == 9 && minor == 0) {
    for (void const* entry : cluster->entries) {
      if (cudaError_t e = allow(entry, cluster->shared_bytes)) return e;
    }
    if (cudaError_t e = count_clusters(*cluster, found.clusters)) return e;
  }
  rooms[k][device] = found;
  known[k][device].store(true, std::memory_order_release);
  return cudaSuccess;
}

/// Whether the kernels of lean.hpp and cluster.hpp can do the call, if it is plain or, cluster.hpp's, appends.
bool has_few_rows(DecodeParams const& p, Kernel const& kernel, int64_t rows) {
  return p.head_dim == kernel.head_dim && p.head_dim_v == kernel.head_dim && rows <= kLeanRows &&
         p.batch <= kLeanBatch && (!p.block_table || p.page_shift >= kLeanPageShift);
}

/// CTAs of a cluster for each sequence and key head: as many as all of them can have at once. 0 for lean.hpp.
int cluster_of(DecodeParams const& p, int const (&clusters)[3]) {
  int64_t const wanted = int64_t(p.batch) * p.heads_kv;
  int size = 0;
  for (int i = 0; i < 3; ++i) {
    if (wanted <= clusters[i]) size = 2 << i;
  }
  if (size == 0) return 0;
  int64_t keys = p.n_kv;
  // Beside what a window shows a cluster goes through the new keys, which lie next to it, or anywhere.
  if (p.window_left >= 0 && p.window_right >= 0 && (p.n_new == 0 || p.start_pos_kind == StartPos::End))
    keys = std::min<int64_t>(keys, int64_t(p.window_left) + p.window_right + p.n_q + p.n_new);
  bool const alike = (p.batch == 1 || all_alike(p)) && wanted * size >= kEnoughClusterCtas;
  return keys <= int64_t(alike ? kClusterTurns : kTurnsOfUnlike) * size * kClusterWarps << kLeanPageShift ? size : 0;
}

}  // namespace

char const* family_of(DType dtype) { return dtype == DType::Float32 ? "simt" : "sm80"; }

DecodeParams params_of(ForwardParams const& params) {
  DecodeParams decoding;
  static_cast<ForwardParams&>(decoding) = params;
  decoding.cached = params.n_kv;
  return decoding;
}

bool takes(DecodeParams const& p, DType dtype) { return !p.packed() && p.n_q <= kMaxRows && aligned(p, dtype); }

bool aligned(DecodeParams const& p, DType dtype) {
  int const vector = dtype == DType::Float32 ? 4 : 8;
  auto const fits = [&](void const* data, Strides const& s) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (s.batch | s.row | s.head) % vector == 0;
  };
  return fits(p.q, p.q_stride) && fits(p.k, p.k_stride) && fits(p.v, p.v_stride) && fits(p.k_new, p.k_new_stride) &&
         fits(p.v_new, p.v_new_stride);
}

cudaError_t plan(DecodeParams* params, DType dtype, std::string const& backend, int num_splits, bool want_reason,
                 Plan* plan) {
  *plan = {};
  bool const portable = backend == "auto" || backend == family_of(dtype),
             hopper = backend == "auto" || backend == "sm90";
  if (!portable && !hopper) return cudaSuccess;
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  int const head_dim = std::max(params->head_dim, params->head_dim_v);
  unsigned const group_heads = params->heads_q / params->heads_kv;
  int64_t const rows = int64_t(params->n_q) * group_heads;
  int k = 0;  // the smallest tile that holds the call's head_dim, and its rows if one does
  while (kKernels[k]->dtype != dtype || kKernels[k]->head_dim < head_dim) ++k;
  if (rows > kKernels[k]->rows && k + 1 < kKernelCount && kKernels[k + 1]->dtype == dtype &&
      kKernels[k + 1]->head_dim == kKernels[k]->head_dim) {
    ++k;
  }
  Kernel const& kernel = *kKernels[k];
  Room const* room;
  if (cudaError_t e = room_of(k, device, &room)) return e;

  params->group_heads = group_heads;
  params->group_magic = group_magic(group_heads);
  params->row_tiles = static_cast<int>(std::max<int64_t>(1, (rows + kernel.rows - 1) / kernel.rows));
  int64_t const lanes = int64_t(params->row_tiles) * params->heads_kv;
  params->fixed_splits = num_splits > 0;
  params->num_splits = std::max(num_splits, 1);
  bool const few_rows = has_few_rows(*params, kernel, rows);
  params->cluster = hopper && few_rows && is_plain_or_appends(*params) ? cluster_of(*params, room->clusters) : 0;
  if (!portable && params->cluster == 0) return cudaSuccess;
  params->lean = few_rows && is_plain(*params) && params->cluster == 0 && room->lean.all > 0;
  plan->launch = params->cluster > 0 ? cluster_kernel_of(kernel)->launch : kernel.launch;
  Slots const& slots = params->lean ? room->lean : room->ctas;
  auto const groups_of = [&](int64_t slots) { return static_cast<int>(std::max<int64_t>(1, slots / lanes)); };
  params->groups = groups_of(slots.enough);
  if (params->batch > params->groups && !(params->lean && all_alike(*params))) params->groups = groups_of(slots.all);
  if (params->cluster > 0) {
    plan->partial_rows = 0;
  } else if (params->fixed_splits) {
    plan->partial_rows = num_splits > 1 ? int64_t(params->batch) * num_splits * lanes * kernel.rows : 0;
  } else {
    plan->partial_rows = params->groups > 1 ? kSlots * params->groups * lanes * kernel.rows : 0;
  }
  if (want_reason) {
    std::ostringstream text;
    text << (params->cluster > 0 ? "sm90" : family_of(dtype)) << ": "
         << (params->cluster > 0 ? "cluster "
             : params->lean      ? "lean "
                                 : "")
         << "decode kernel, head_dim " << head_dim << " in tiles of "
         << (params->cluster > 0 || params->lean ? kLeanRows : kernel.rows) << " packed query rows and head_dim "
         << kernel.head_dim << "; ";
    if (params->cluster > 0) {
      text << "the keys of each sequence shared out among " << params->cluster << " CTAs a key head";
    } else if (params->fixed_splits) {
      text << num_splits << (num_splits == 1 ? " split" : " splits") << " of the keys as asked";
    } else {
      text << "the keys of the batch shared out among " << params->groups << " x " << lanes << " CTAs";
    }
    plan->reason = text.str();
  }
  return cudaSuccess;
}

cudaError_t run(Plan const& plan, DecodeParams* params, cudaStream_t stream) {
  if (plan.partial_rows > 0) {
    int device;
    if (cudaError_t e = cudaGetDevice(&device)) return e;
    size_t const count = size_t(params->batch) * params->row_tiles * params->heads_kv;
    if (cudaError_t e = counters().take(device, stream, count, &params->counters)) return e;
  }
  return plan.launch(*params, stream);
}

}  // namespace cutlass_ext::decode

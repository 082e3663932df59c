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
constexpr int kMaxRows = 16;  // query rows of a call of `fmha` up to which it decodes: speculative decoding's

/// CTAs of a kernel that fill a device's wanted bytes, and all that it holds at once; 0 where it does not fit.
struct Slots {
  int enough, all;
};

/// Those of kernel `k`, and of its lean one. The first call for a device also raises the kernels' shared-memory limits
/// there.
cudaError_t slots_of(int k, int device, Slots* slots, Slots* lean) {
  static std::atomic<bool> known[kKernelCount][kMaxDevices];
  static Slots known_slots[kKernelCount][kMaxDevices], known_lean[kKernelCount][kMaxDevices];
  static std::mutex mutex;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!known[k][device].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> const lock(mutex);
    int multiprocessors, limit;
    if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
    auto const count = [&](void const* entry, int threads, int bytes, Slots* found) {
      if (cudaError_t e = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
      int ctas;
      if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, entry, threads, bytes)) return e;
      ctas = std::max(ctas, 1);
      *found = {std::clamp((kWantedBytes + bytes - 1) / bytes, 1, ctas) * multiprocessors, ctas * multiprocessors};
      return cudaSuccess;
    };
    Kernel const& kernel = *kKernels[k];
    for (void const* entry : {kernel.entries[1], kernel.entries[0]}) {
      if (cudaError_t e = count(entry, kernel.threads, kernel.shared_bytes, &known_slots[k][device])) return e;
    }
    known_lean[k][device] = {0, 0};
    if (kernel.lean_entry && kernel.lean_shared_bytes <= limit) {
      if (cudaError_t e = count(kernel.lean_entry, kernel.threads, kernel.lean_shared_bytes, &known_lean[k][device]))
        return e;
    }
    known[k][device].store(true, std::memory_order_release);
  }
  *slots = known_slots[k][device];
  *lean = known_lean[k][device];
  return cudaSuccess;
}

/// Whether lean.hpp's kernel can do the call.
bool is_lean(DecodeParams const& p, Kernel const& kernel, int64_t rows) {
  return is_plain(p) && p.head_dim == kernel.head_dim && p.head_dim_v == kernel.head_dim && rows <= kLeanRows &&
         p.batch <= kLeanBatch && (!p.block_table || p.page_shift >= kLeanPageShift);
}

}  // namespace

char const* family_of(DType dtype) { return dtype == DType::Float32 ? "simt" : "sm80"; }

DecodeParams params_of(ForwardParams const& params) {
  DecodeParams decoding;
  static_cast<ForwardParams&>(decoding) = params;
  decoding.cached = params.n_kv;
  return decoding;
}

bool takes(DecodeParams const& p, DType dtype, std::string const& backend) {
  return !p.packed() && p.n_q <= kMaxRows && (backend == "auto" || backend == family_of(dtype)) && aligned(p, dtype);
}

bool aligned(DecodeParams const& p, DType dtype) {
  int const vector = dtype == DType::Float32 ? 4 : 8;
  auto const fits = [&](void const* data, Strides const& s) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (s.batch | s.row | s.head) % vector == 0;
  };
  return fits(p.q, p.q_stride) && fits(p.k, p.k_stride) && fits(p.v, p.v_stride) && fits(p.k_new, p.k_new_stride) &&
         fits(p.v_new, p.v_new_stride);
}

cudaError_t plan(DecodeParams* params, DType dtype, int num_splits, bool want_reason, Plan* plan) {
  *plan = {};
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
  Slots slots, lean;
  if (cudaError_t e = slots_of(k, device, &slots, &lean)) return e;

  plan->kernel = &kernel;
  params->group_heads = group_heads;
  params->group_magic = group_magic(group_heads);
  params->row_tiles = static_cast<int>((rows + kernel.rows - 1) / kernel.rows);
  int64_t const lanes = int64_t(params->row_tiles) * params->heads_kv;
  params->fixed_splits = num_splits > 0;
  params->num_splits = std::max(num_splits, 1);
  params->lean = lean.all > 0 && is_lean(*params, kernel, rows);
  if (params->lean) slots = lean;
  auto const groups_of = [&](int64_t slots) { return static_cast<int>(std::max<int64_t>(1, slots / lanes)); };
  params->groups = groups_of(slots.enough);
  if (params->batch > params->groups && !(params->lean && all_alike(*params))) params->groups = groups_of(slots.all);
  if (params->fixed_splits) {
    plan->partial_rows = num_splits > 1 ? int64_t(params->batch) * num_splits * lanes * kernel.rows : 0;
  } else {
    plan->partial_rows = params->groups > 1 ? kSlots * params->groups * lanes * kernel.rows : 0;
  }
  if (want_reason) {
    std::ostringstream text;
    text << family_of(dtype) << ": " << (params->lean ? "lean " : "") << "decode kernel, head_dim " << head_dim
         << " in tiles of " << (params->lean ? kLeanRows : kernel.rows) << " packed query rows and head_dim "
         << kernel.head_dim << "; ";
    if (params->fixed_splits) {
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
  return plan.kernel->launch(*params, stream);
}

}  // namespace cutlass_ext::decode

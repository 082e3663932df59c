// The table of decode kernels, the choice among them, and the grid. See decode_dispatch.hpp.
#include "decode_dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <sstream>

#include "counters.hpp"
#include "fmha/decode/partition.hpp"

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
// more parts to merge), and faster where a group has several: one CTA then copies while another ends a sequence.
constexpr int kWantedBytes = 96 * 1024;
constexpr int kMaxRows = 16;  // query rows of a call of `fmha` up to which it decodes: speculative decoding's

/// CTAs of kernel `k` that fill the device's wanted bytes, and all that it holds at once; the first call for a device
/// also raises the kernel's shared-memory limit there.
cudaError_t slots_of(int k, int device, int* enough, int* all) {
  static std::atomic<int> known[kKernelCount][kMaxDevices], known_enough[kKernelCount][kMaxDevices];
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  *all = known[k][device].load();
  *enough = known_enough[k][device].load();
  if (*all > 0) return cudaSuccess;
  Kernel const& kernel = *kKernels[k];
  int ctas, multiprocessors;
  for (void const* entry : kernel.entries) {
    if (cudaError_t e = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes))
      return e;
  }
  if (cudaError_t e =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel.entries[0], kernel.threads, kernel.shared_bytes))
    return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  ctas = std::max(ctas, 1);
  *enough = std::clamp((kWantedBytes + kernel.shared_bytes - 1) / kernel.shared_bytes, 1, ctas) * multiprocessors;
  *all = ctas * multiprocessors;
  known_enough[k][device].store(*enough);
  known[k][device].store(*all);
  return cudaSuccess;
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
  int enough, all;
  if (cudaError_t e = slots_of(k, device, &enough, &all)) return e;

  plan->kernel = &kernel;
  params->group_heads = group_heads;
  params->group_magic = group_magic(group_heads);
  params->row_tiles = static_cast<int>((rows + kernel.rows - 1) / kernel.rows);
  int64_t const lanes = int64_t(params->row_tiles) * params->heads_kv;
  params->fixed_splits = num_splits > 0;
  params->num_splits = std::max(num_splits, 1);
  auto const groups_of = [&](int64_t slots) { return static_cast<int>(std::max<int64_t>(1, slots / lanes)); };
  params->groups = groups_of(enough);
  if (params->batch > params->groups) params->groups = groups_of(all);
  if (params->fixed_splits) {
    plan->partial_rows = num_splits > 1 ? int64_t(params->batch) * num_splits * lanes * kernel.rows : 0;
  } else {
    plan->partial_rows = params->groups > 1 ? kSlots * params->groups * lanes * kernel.rows : 0;
  }
  if (want_reason) {
    std::ostringstream text;
    text << family_of(dtype) << ": decode kernel, head_dim " << head_dim << " in tiles of " << kernel.rows
         << " packed query rows and head_dim " << kernel.head_dim << "; ";
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

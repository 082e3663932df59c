// What the CTAs of a sequence need to merge their parts: who is last, and weighted sums. Called by the decode kernels.
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace cutlass_ext::decode {

/// Counts to `n` and around to 0; returns the count before. What the CTA wrote before its last barrier is visible to
/// the CTA that sees the count, behind a barrier of its own.
CUTE_DEVICE unsigned count_up(unsigned* counter, unsigned n) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n - 1) : "memory");
  return before;
}

CUTE_DEVICE float4 fma(float4 const& x, float f, float4 const& sum) {
  return make_float4(fmaf(x.x, f, sum.x), fmaf(x.y, f, sum.y), fmaf(x.z, f, sum.z), fmaf(x.w, f, sum.w));
}

}  // namespace cutlass_ext::decode

// A mask of bytes, a bool tensor of any strides, to bits (Mask in params.hpp). Launched by kernels/pack_mask.cu.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace cutlass_ext {

/// [batch, heads, rows, keys]; a byte is 0 or 1. Element strides.
struct ByteMask {
  uint8_t const* data = nullptr;
  int batch = 0, heads = 0, rows = 0, keys = 0;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

constexpr int kPackThreads = 256;

#if defined(__CUDACC__)
/// The low bits of four bytes.
CUTE_DEVICE uint32_t bits_of_bytes(uint32_t bytes) { return bytes * 0x10204080u >> 28; }

/// A thread makes a word of 32 keys.
inline __global__ void __launch_bounds__(kPackThreads) pack_mask_kernel(ByteMask const mask, uint32_t* bits) {
  int const words = Mask::words_of(mask.keys);
  int64_t const index = int64_t(blockIdx.x) * kPackThreads + threadIdx.x;
  if (index >= int64_t(mask.batch) * mask.heads * mask.rows * words) return;
  int64_t rest = index / words;
  int const first_key = static_cast<int>(index - rest * words) * 32, row = static_cast<int>(rest % mask.rows);
  rest /= mask.rows;
  uint8_t const* const from = mask.data + rest / mask.heads * mask.batch_stride + rest % mask.heads * mask.head_stride +
                              row * mask.row_stride + first_key * mask.key_stride;
  int const keys = min(mask.keys - first_key, 32);
  uint32_t word = 0;
  if (mask.key_stride == 1 && keys == 32 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    uint4 const* const bytes = reinterpret_cast<uint4 const*>(from);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint4 const x = __ldg(bytes + half);
      word |= (bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12)
              << half * 16;
    }
  } else {
    for (int key = 0; key < keys; ++key) word |= uint32_t(from[key * mask.key_stride] != 0) << key;
  }
  bits[index] = word;
}
#endif

}  // namespace cutlass_ext

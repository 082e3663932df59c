// A mask of bytes, a bool tensor of any strides, to bits and a map of their blocks (Mask in params.hpp). Launched by
// kernels/pack_mask.cu.
#pragma once

#include <cstdint>

#include "launch_order.hpp"
#include "params.hpp"

namespace cutlass_ext {

/// [batch, heads, rows, keys]; a byte is 0 or 1. Element strides.
struct ByteMask {
  uint8_t const* data = nullptr;
  int batch = 0, heads = 0, rows = 0, keys = 0;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

constexpr int kPackThreads = 256;
/// CTAs of a multiprocessor: with registers for more ptxas has some of a thread's loads wait for others.
constexpr int kPackCtas = 4;
constexpr int kPackKeys = 8 * Mask::kBlock;  // of a CTA, which has a byte of the map's words

/// CTAs along the keys: those past the last key write what the map's words have there.
CUTE_HOST_DEVICE int pack_ctas(int keys) { return (Mask::blocks_of(keys) + 31) / 32 * 4; }

#if defined(__CUDACC__)
/// The low bits of four bytes.
CUTE_DEVICE uint32_t bits_of_bytes(uint32_t bytes) { return bytes * 0x10204080u >> 28; }

/// The even ones of 16 bits.
CUTE_DEVICE uint32_t even_bits(uint32_t x) {
  x &= 0x5555u;
  x = (x | x >> 1) & 0x3333u;
  x = (x | x >> 2) & 0x0f0fu;
  return (x | x >> 4) & 0xffu;
}

/// A word of 32 keys from their bytes, one after the other.
CUTE_DEVICE uint32_t pack_word(uint4 const (&bytes)[2]) {
  uint32_t word = 0;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint4 const& x = bytes[half];
    word |= (bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12)
            << half * 16;
  }
  return word;
}

/// The same of `keys` keys whose bytes lie anywhere.
CUTE_DEVICE uint32_t pack_word(uint8_t const* from, int64_t key_stride, int keys) {
  uint32_t word = 0;
  for (int key = 0; key < keys; ++key) word |= uint32_t(from[key * key_stride] != 0) << key;
  return word;
}

/// A CTA makes the words of 64 rows and 512 keys, a thread those of 32 keys of every 16th row, and their part of the
/// map; the first of a row of CTAs also zeros behind the map, which nobody reads: equal masks then have equal bits.
inline __global__ void __launch_bounds__(kPackThreads, kPackCtas)
    pack_mask_kernel(ByteMask const mask, uint32_t* bits) {
  let_next_launch_begin();
  constexpr int kWords = kPackKeys / 32, kRows = kPackThreads / kWords, kPasses = Mask::kBlock / kRows,
                kWarps = kPackThreads / 32;
  __shared__ uint32_t some_of_warp[kWarps], all_of_warp[kWarps];
  int const words = Mask::words_of(mask.keys), along = pack_ctas(mask.keys), row_blocks = Mask::blocks_of(mask.rows);
  int const chunk = blockIdx.x % along, of_head = blockIdx.x / along;
  int const block = of_head % row_blocks, head = of_head / row_blocks;
  int const word = chunk * kWords + threadIdx.x % kWords, keys = max(min(mask.keys - word * 32, 32), 0);
  uint8_t const* const from = mask.data + head / mask.heads * mask.batch_stride + head % mask.heads * mask.head_stride +
                              word * 32 * mask.key_stride;
  uint32_t* const to = bits + head * Mask::stored_rows(mask.rows) * words;
  uint32_t const every = keys == 32 ? ~0u : (1u << keys) - 1;
  int const first_row = block * Mask::kBlock + threadIdx.x / kWords;
  uint8_t const* const of_first_row = from + first_row * mask.row_stride;
  static_assert(kRows % 16 == 0, "all rows of a thread begin at multiples of 16 bytes if the first one does");
  uint32_t packed[kPasses];
  if (first_row < mask.rows && keys == 32 && mask.key_stride == 1 &&
      reinterpret_cast<uintptr_t>(of_first_row) % 16 == 0) {
    uint4 bytes[kPasses][2];  // of rows that there are not, those of the first one: all are under way at once
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      bool const exists = first_row + pass * kRows < mask.rows;
      auto const* const row =
          reinterpret_cast<uint4 const*>(of_first_row + (exists ? pass * kRows * mask.row_stride : 0));
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) bytes[pass][half] = __ldg(row + half);
    }
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) packed[pass] = pack_word(bytes[pass]);
  } else {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      bool const exists = first_row + pass * kRows < mask.rows;
      packed[pass] = exists ? pack_word(of_first_row + pass * kRows * mask.row_stride, mask.key_stride, keys) : 0;
    }
  }
  bool some = false, all = true;
  CUTE_UNROLL
  for (int pass = 0; pass < kPasses; ++pass) {
    int const row = first_row + pass * kRows;
    if (row < mask.rows && word < words) {
      to[int64_t(row) * words + word] = packed[pass];
      some |= packed[pass] != 0;
      all &= packed[pass] == every;
    }
  }
  // The halves of a warp have other rows, neighbours the halves of a block of keys.
  uint32_t x = __ballot_sync(0xffffffffu, some), y = __ballot_sync(0xffffffffu, all);
  x |= x >> 16, y &= y >> 16;
  if (threadIdx.x % 32 == 0) {
    some_of_warp[threadIdx.x / 32] = even_bits(x | x >> 1);
    all_of_warp[threadIdx.x / 32] = even_bits(y & y >> 1);
  }
  uint32_t* const map = to + (int64_t(mask.rows) + block) * words;
  if (chunk == 0) {
    for (int i = along / 4 * 2 + threadIdx.x; i < words; i += kPackThreads) map[i] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    x = 0, y = ~0u;
    for (int warp = 0; warp < kWarps; ++warp) x |= some_of_warp[warp], y &= all_of_warp[warp];
    auto* const of_chunk = reinterpret_cast<uint8_t*>(map + chunk / 4 * 2) + chunk % 4;
    of_chunk[0] = static_cast<uint8_t>(x);
    of_chunk[4] = static_cast<uint8_t>(y);
  }
}
#endif

}  // namespace cutlass_ext

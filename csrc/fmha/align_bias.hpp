// A bias of 16 bits whose rows are no whole vectors, or lie across, to one whose rows are: kernels that read eight keys
// of a row at a time take it then. Launched by kernels/align_bias.cu.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace cutlass_ext {

constexpr int kBiasVector = 8;                           // keys: 16 bytes
constexpr int kAlignThreads = 256, kAlignTile = 64;      // rows and keys of a CTA
constexpr int kAlignVectors = kAlignTile / kBiasVector;  // of a row of that

/// What is copied: [batch, heads, rows, keys], as many as lie in memory for themselves.
struct BiasCopy {
  Bias from;
  int batch, heads, rows, keys;
  int down, along;  // tiles of the rows, and of the keys

  BiasCopy(Bias const& from, Params const& p)
      : from(from),
        batch(from.batch == 0 ? 1 : p.batch),
        heads(from.head == 0 ? 1 : p.heads_q),
        rows(p.n_q),
        keys(p.n_kv),
        down(Scheduler::tiles_of(rows, kAlignTile)),
        along(Scheduler::tiles_of(keys, kAlignTile)) {}

  /// Elements of a row of the copy, with zeros behind the last key.
  CUTE_HOST_DEVICE int64_t row() const { return (int64_t(keys) + kBiasVector - 1) / kBiasVector * kBiasVector; }
  int64_t size() const { return int64_t(batch) * heads * rows * row(); }
  int64_t ctas() const { return int64_t(batch) * heads * down * along; }

  /// The copy, where that lies at `data`.
  Bias at(void const* data) const {
    Bias copied = from;
    copied.data = data;
    copied.key = 1;
    copied.row = row();
    copied.head = from.head == 0 ? 0 : rows * row();
    copied.batch = from.batch == 0 ? 0 : heads * rows * row();
    return copied;
  }
};

#if defined(__CUDACC__)
/// A thread makes vectors. Its neighbours have those of the same row, or where keys lie farther apart than rows those
/// of the next rows: either way a warp reads elements that lie together.
inline __global__ void __launch_bounds__(kAlignThreads) align_bias_kernel(BiasCopy const copy, uint16_t* to) {
  int const key0 = blockIdx.x % copy.along * kAlignTile, above = blockIdx.x / copy.along,
            row0 = above % copy.down * kAlignTile;
  int const of_head = above / copy.down, head = of_head % copy.heads, batch = of_head / copy.heads;
  Bias const& from = copy.from;
  auto const* const source = static_cast<uint16_t const*>(from.data) + batch * from.batch + head * from.head +
                             row0 * from.row + key0 * from.key;
  uint16_t* const result = to + (int64_t(of_head) * copy.rows + row0) * copy.row() + key0;
  bool const by_rows = from.key > from.row;
  for (int i = threadIdx.x; i < kAlignTile * kAlignVectors; i += kAlignThreads) {
    int const row = by_rows ? i % kAlignTile : i / kAlignVectors,
              key = (by_rows ? i / kAlignTile : i % kAlignVectors) * kBiasVector, keys = copy.keys - key0 - key;
    if (row0 + row >= copy.rows || keys <= 0) continue;
    uint32_t words[kBiasVector / 2];
    CUTE_UNROLL
    for (int word = 0; word < kBiasVector / 2; ++word) {
      uint32_t x[2];
      CUTE_UNROLL
      for (int e = 0; e < 2; ++e) {
        int const of_vector = word * 2 + e;
        x[e] = of_vector < keys ? __ldg(source + row * from.row + (key + of_vector) * from.key) : 0;
      }
      words[word] = x[0] | x[1] << 16;
    }
    *reinterpret_cast<uint4*>(result + row * copy.row() + key) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
#endif

}  // namespace cutlass_ext

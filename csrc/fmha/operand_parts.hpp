// fp32 tensors in two fp16 parts, x * 2^s = high + low, for kernels of tensor cores: what is known of the range of q, k
// and v, the powers of two that follow from it, and the parts. Launched by kernels/operand_parts.cu.
//
// Of every sequence and key head, q (of all its query heads), k and v have a power of two each, with which the largest
// element lies in [2^14, 2^15). An element then errs by 2^-23 of itself or by 2^-25, half of fp16's smallest number,
// whichever is more. A row or a column whose largest element is 2^-15 of the head's or more so errs by 2^-24 of its own
// largest, as fp32 does. Where one is smaller and not 0, where something is not finite, or where powers of two might
// leave fp32, the call is computed on CUDA cores.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "rows.hpp"
#include "score.hpp"
#include "sequence.hpp"

namespace cutlass_ext::operand_parts {

constexpr int kThreads = 256, kRows = 128;  // of a CTA
constexpr int kTop = 14;                    // log2 of the largest element, scaled and rounded down
constexpr int kSpread = 15;                 // by which the largest of a row or a column may be smaller
constexpr int kMostExponent = 64;           // of the largest element: factors of scores stay finite (kMostScale)
constexpr float kMostScale = 1 << 20;       // ScoreMod::query_scale

/// What is read, and where parts go. [batch, head, row, column]: high parts of `Cols` columns, then their low parts.
struct Parts {
  __half *q, *k, *v;
  uint32_t* maxima;    // [B, H_kv, 3, Cols + 1]: see `Measured`; zeros before
  int* out_of_range;   // 0 before
  PartScales* scales;  // [B, H_kv]
};

/// Strides of a tensor of parts, in elements.
CUTE_HOST_DEVICE Strides strides_of(int rows, int heads, int cols) {
  return {int64_t(heads) * rows * 2 * cols, 2 * cols, int64_t(rows) * 2 * cols};
}

/// Which rows a CTA works on: up to kRows of a head of q, k or v.
struct Chunks {
  int heads_q, heads_kv, of_q, of_k;  // chunks of a head

  CUTE_HOST_DEVICE explicit Chunks(Params const& p)
      : heads_q(p.heads_q), heads_kv(p.heads_kv), of_q(chunks_of(p.n_q)), of_k(chunks_of(p.n_kv)) {}
  CUTE_HOST_DEVICE int64_t of_sequence() const { return int64_t(heads_q) * of_q + 2 * int64_t(heads_kv) * of_k; }

 private:
  CUTE_HOST_DEVICE static int chunks_of(int rows) { return rows / kRows + (rows % kRows != 0); }
};

#if defined(__CUDACC__)

enum Which { Q, K, V };

/// The rows of a CTA, as they exist.
struct Chunk {
  Which which;
  int batch, head, head_kv, index;
  float const* from;  // the first row
  int64_t stride;     // from row to row, in elements
  int rows, cols;
  int64_t to;  // element of the tensor of parts

  CUTE_DEVICE Chunk(Params const& p, int padded_cols) {
    Chunks const chunks(p);
    int const of_sequence = static_cast<int>(chunks.of_sequence()), b = blockIdx.x / of_sequence;
    int rest = blockIdx.x - b * of_sequence;
    batch = b;
    int const of_all_q = chunks.heads_q * chunks.of_q, of_all_k = chunks.heads_kv * chunks.of_k;
    which = rest < of_all_q ? Q : rest < of_all_q + of_all_k ? K : V;
    rest -= which == Q ? 0 : which == K ? of_all_q : of_all_q + of_all_k;
    int const of_head = which == Q ? chunks.of_q : chunks.of_k;
    head = rest / of_head;
    index = rest - head * of_head;
    head_kv = which == Q ? p.heads_per_kv.div(head) : head;

    Sequence const sequence = sequence_of(p, b);
    int const row0 = index * kRows, row = (which == Q ? sequence.q_row0 : sequence.k_row0) + row0,
              exist = which == Q ? sequence.visibility.n_q : sequence.visibility.len_kv;
    rows = min(exist - row0, kRows);
    cols = which == V ? p.head_dim_v : p.head_dim;
    Strides const& strides = which == Q ? p.q_stride : which == K ? p.k_stride : p.v_stride;
    from = row_at<float const>(which == Q ? p.q : which == K ? p.k : p.v, strides, sequence.batch, row, head);
    stride = strides.row;
    Strides const of_parts =
        strides_of(which == Q ? p.stored_rows() : p.stored_keys(), which == Q ? p.heads_q : p.heads_kv, padded_cols);
    to = sequence.batch * of_parts.batch + row * of_parts.row + head * of_parts.head;
  }
};

/// A thread's place: four columns of every `Threads / Lanes`th row.
template <int Cols>
struct Place {
  static constexpr int Lanes = Cols / 4, RowsApart = kThreads / Lanes, Turns = kRows / RowsApart;
  int col = threadIdx.x % Lanes * 4, row = threadIdx.x / Lanes;
};

CUTE_DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // in order, NaN last

/// The largest magnitude of each column, and of the rows' largest that are not 0 the least, inverted: all grow.
template <int Cols>
__global__ void __launch_bounds__(kThreads) measure(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, Cols);
  if (chunk.rows <= 0) return;
  __shared__ uint32_t largest[Cols + 1];
  for (int i = threadIdx.x; i <= Cols; i += kThreads) largest[i] = 0;
  __syncthreads();

  Place<Cols> const place;
  uint4 of_column = make_uint4(0, 0, 0, 0);
  uint32_t inverted = 0;
  float4 x[Place<Cols>::Turns];
  CUTE_UNROLL
  for (int i = 0; i < Place<Cols>::Turns; ++i) {
    int const row = place.row + i * Place<Cols>::RowsApart;
    x[i] = row < chunk.rows && place.col < chunk.cols
               ? *reinterpret_cast<float4 const*>(chunk.from + row * chunk.stride + place.col)
               : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  CUTE_UNROLL
  for (int i = 0; i < Place<Cols>::Turns; ++i) {
    uint4 const m = make_uint4(magnitude(x[i].x), magnitude(x[i].y), magnitude(x[i].z), magnitude(x[i].w));
    of_column = make_uint4(max(of_column.x, m.x), max(of_column.y, m.y), max(of_column.z, m.z), max(of_column.w, m.w));
    uint32_t of_row = max(max(m.x, m.y), max(m.z, m.w));
    CUTE_UNROLL
    for (int lanes = 1; lanes < Place<Cols>::Lanes; lanes *= 2)
      of_row = max(of_row, __shfl_xor_sync(0xffffffffu, of_row, lanes));
    if (of_row > 0) inverted = max(inverted, ~of_row);
  }
  atomicMax(largest + place.col, of_column.x);
  atomicMax(largest + place.col + 1, of_column.y);
  atomicMax(largest + place.col + 2, of_column.z);
  atomicMax(largest + place.col + 3, of_column.w);
  if (place.col == 0) atomicMax(largest + Cols, inverted);
  __syncthreads();
  uint32_t* const to =
      parts.maxima + ((int64_t(chunk.batch) * params.heads_kv + chunk.head_kv) * 3 + chunk.which) * (Cols + 1);
  for (int i = threadIdx.x; i <= Cols; i += kThreads) {
    if (largest[i] > 0) atomicMax(to + i, largest[i]);
  }
}

/// What `measure` found of q, k or v of a head. By a whole warp.
template <int Cols>
struct Measured {
  uint32_t largest = 0, least = 0xffffffffu;  // of all elements; of rows and columns that have something

  CUTE_DEVICE explicit Measured(uint32_t const* maxima) {
    for (int i = threadIdx.x % 32; i < Cols; i += 32) {
      uint32_t const of_column = maxima[i];
      largest = max(largest, of_column);
      if (of_column > 0) least = min(least, of_column);
    }
    least = min(least, ~maxima[Cols]);
    CUTE_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      least = min(least, __shfl_xor_sync(0xffffffffu, least, lanes));
    }
  }

  CUTE_DEVICE static int exponent_of(uint32_t bits) { return static_cast<int>(bits >> 23) - 127; }
  CUTE_DEVICE int exponent() const { return largest > 0 ? exponent_of(largest) : kTop; }
  CUTE_DEVICE bool is_held() const {
    return largest == 0 ||
           (exponent() <= kMostExponent && exponent() >= -kMostExponent && exponent_of(least) >= exponent() - kSpread);
  }
};

/// The parts of what exists. The first chunk of a head says whether they hold it, and that of k what its products are
/// to be multiplied by.
template <int Cols>
__global__ void __launch_bounds__(kThreads) split(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, Cols);
  if (chunk.rows <= 0) return;
  int64_t const pair = int64_t(chunk.batch) * params.heads_kv + chunk.head_kv;
  uint32_t const* const maxima = parts.maxima + pair * 3 * (Cols + 1);
  Measured<Cols> const measured(maxima + chunk.which * (Cols + 1));
  if (chunk.index == 0 && threadIdx.x < 32) {
    if (!measured.is_held()) *parts.out_of_range = 1;
    if (chunk.which == K) {
      Measured<Cols> const q(maxima), v(maxima + V * (Cols + 1));
      if (threadIdx.x == 0) {
        parts.scales[pair] = {ldexpf(1.f, q.exponent() + measured.exponent() - 2 * kTop),
                              ldexpf(1.f, v.exponent() - kTop)};
      }
    }
  }
  float const scale = ldexpf(1.f, kTop - measured.exponent());

  Place<Cols> const place;
  __half* const to = (chunk.which == Q ? parts.q : chunk.which == K ? parts.k : parts.v) + chunk.to + place.col;
  float4 x[Place<Cols>::Turns];
  CUTE_UNROLL
  for (int i = 0; i < Place<Cols>::Turns; ++i) {
    int const row = place.row + i * Place<Cols>::RowsApart;
    x[i] = row < chunk.rows && place.col < chunk.cols
               ? *reinterpret_cast<float4 const*>(chunk.from + row * chunk.stride + place.col)
               : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  CUTE_UNROLL
  for (int i = 0; i < Place<Cols>::Turns; ++i) {
    int const row = place.row + i * Place<Cols>::RowsApart;
    if (row >= chunk.rows) break;
    float const of[] = {x[i].x * scale, x[i].y * scale, x[i].z * scale, x[i].w * scale};
    alignas(8) __half2 high[2], low[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      high[j] = __floats2half2_rn(of[2 * j], of[2 * j + 1]);
      float2 const rounded = __half22float2(high[j]);
      low[j] = __floats2half2_rn(of[2 * j] - rounded.x, of[2 * j + 1] - rounded.y);
    }
    *reinterpret_cast<uint2*>(to + row * 2 * Cols) = reinterpret_cast<uint2 const&>(high);
    *reinterpret_cast<uint2*>(to + row * 2 * Cols + Cols) = reinterpret_cast<uint2 const&>(low);
  }
}
#endif

}  // namespace cutlass_ext::operand_parts

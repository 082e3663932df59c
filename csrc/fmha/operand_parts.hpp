// fp32 tensors in two fp16 parts, x * 2^s = high + low, for kernels of tensor cores: what is known of the range of q, k
// and v, and of dout in a backward pass, the powers of two that follow from it, and the parts. Launched by
// kernels/operand_parts.cu.
//
// Of every sequence and key head, q (of all its query heads), k, v and dout have a power of two each, with which the
// largest element lies in [2^14, 2^15). An element then errs by 2^-23 of itself or by 2^-25, half of fp16's smallest
// number, whichever is more. A row or a column whose largest element is 2^-15 of the head's or more so errs by 2^-24 of
// its own largest, as fp32 does. Where one is smaller and not 0, where something is not finite, or where powers of two
// might leave fp32, the call is computed on CUDA cores.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "operand.hpp"
#include "rows.hpp"
#include "score.hpp"
#include "sequence.hpp"

namespace cutlass_ext::operand_parts {

constexpr int kThreads = 256, kRows = 128;  // of a CTA
constexpr int kTop = 14;                    // log2 of the largest element, scaled and rounded down
constexpr int kSpread = 15;                 // by which the largest of a row or a column may be smaller
constexpr int kMostExponent = 64;           // of the largest element: factors of scores stay finite (kMostScale)
constexpr float kMostScale = 1 << 20;       // ScoreMod::query_scale
// Of a backward pass the exponents of the largest scores' factors together: scores then stay below 2^22, and P, of an
// lse that float32 has rounded, in fp16's range.
constexpr int kMostOfScores = 12;

/// What is read, and where parts go. [batch, head, row, column]: high parts of `Cols` columns, then their low parts.
struct Parts {
  __half *q, *k, *v;
  uint32_t* maxima;    // [B, H_kv, kTensors, Cols + 1]: see `Measured`; zeros before
  int* out_of_range;   // 0 before
  PartScales* scales;  // [B, H_kv]
  // Of a backward pass; else null.
  __half* dout;
  float const* dout_from;
  Strides dout_stride;
  GradientScales* gradient_scales;  // [B, H_kv]
};

constexpr int kTensors = 4;

/// Strides of a tensor of parts, in elements.
CUTE_HOST_DEVICE Strides strides_of(int rows, int heads, int cols) {
  return {int64_t(heads) * rows * 2 * cols, 2 * cols, int64_t(rows) * 2 * cols};
}

/// CTAs, each for kRows of a head of q, k or v, as far as the host knows; of packed keys there may be more, which the
/// CTAs of a head then take in turn.
struct Chunks {
  int heads_q, heads_kv, of_q, of_k;  // of a head
  bool with_dout;

  CUTE_HOST_DEVICE Chunks(Params const& p, bool with_dout)
      : heads_q(p.heads_q),
        heads_kv(p.heads_kv),
        of_q(chunks_of(p.n_q)),
        of_k(chunks_of(p.n_kv)),
        with_dout(with_dout) {}
  CUTE_HOST_DEVICE int64_t of_sequence() const {
    return (1 + with_dout) * int64_t(heads_q) * of_q + 2 * int64_t(heads_kv) * of_k;
  }

 private:
  CUTE_HOST_DEVICE static int chunks_of(int rows) { return rows > 0 ? (rows - 1) / kRows + 1 : 1; }
};

#if defined(__CUDACC__)

enum Which { Q, K, V, DOut };

/// What a CTA works on.
struct Chunk {
  Which which;
  int batch, head, head_kv;
  int first, step, end;  // rows of the sequence: kRows from `first`, then from `first + step`, ...
  int cols;
  float const* from;  // row 0 of the sequence
  int64_t stride;     // from row to row, in elements
  int64_t to;         // of row 0, element of the tensor of parts

  CUTE_DEVICE Chunk(Params const& p, Parts const& parts, int padded_cols, int index) {
    Chunks const chunks(p, parts.dout);
    int const of_sequence = static_cast<int>(chunks.of_sequence()), b = index / of_sequence;
    int rest = index - b * of_sequence;
    batch = b;
    int const of_all_q = chunks.heads_q * chunks.of_q, of_all_k = chunks.heads_kv * chunks.of_k;
    which = rest < of_all_q ? Q : rest < of_all_q + of_all_k ? K : rest < of_all_q + 2 * of_all_k ? V : DOut;
    rest -= which == Q ? 0 : which == K ? of_all_q : which == V ? of_all_q + of_all_k : of_all_q + 2 * of_all_k;
    bool const of_rows = which == Q || which == DOut;
    int const of_head = of_rows ? chunks.of_q : chunks.of_k;
    head = rest / of_head;
    head_kv = of_rows ? p.heads_per_kv.div(head) : head;
    first = (rest - head * of_head) * kRows;
    step = of_head * kRows;

    Sequence const sequence = sequence_of(p, b);
    int const row = of_rows ? sequence.q_row0 : sequence.k_row0;
    end = of_rows ? sequence.visibility.n_q : sequence.visibility.len_kv;
    cols = which == V || which == DOut ? p.head_dim_v : p.head_dim;
    Strides const& strides = which == Q   ? p.q_stride
                             : which == K ? p.k_stride
                             : which == V ? p.v_stride
                                          : parts.dout_stride;
    void const* const data = which == Q ? p.q : which == K ? p.k : which == V ? p.v : parts.dout_from;
    from = row_at<float const>(data, strides, sequence.batch, row, head);
    stride = strides.row;
    Strides const of_parts =
        strides_of(of_rows ? p.stored_rows() : p.stored_keys(), of_rows ? p.heads_q : p.heads_kv, padded_cols);
    to = sequence.batch * of_parts.batch + row * of_parts.row + head * of_parts.head;
  }
};

/// Four columns of some of kRows rows: what a thread has of a chunk.
template <int Cols>
struct Part {
  static constexpr int Lanes = Cols / 4, RowsApart = kThreads / Lanes, Turns = kRows / RowsApart;
  int const col = threadIdx.x % Lanes * 4;
  float4 x[Turns];

  CUTE_DEVICE static int row(int i) { return threadIdx.x / Lanes + i * RowsApart; }

  /// Those from row `row0` on; zeros where there are none.
  CUTE_DEVICE void load(Chunk const& chunk, int row0) {
    CUTE_UNROLL
    for (int i = 0; i < Turns; ++i) {
      x[i] = row0 + row(i) < chunk.end && col < chunk.cols
                 ? *reinterpret_cast<float4 const*>(chunk.from + (row0 + row(i)) * chunk.stride + col)
                 : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
};

CUTE_DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // in order, NaN last

/// The largest magnitude of each column, and of the rows' largest that are not 0 the least, inverted: all grow.
template <int Cols>
__global__ void __launch_bounds__(kThreads) measure(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, parts, Cols, blockIdx.x);
  if (chunk.first >= chunk.end) return;
  __shared__ uint32_t largest[Cols + 1];
  for (int i = threadIdx.x; i <= Cols; i += kThreads) largest[i] = 0;
  __syncthreads();

  using Mine = Part<Cols>;
  Mine mine;
  uint4 of_column = make_uint4(0, 0, 0, 0);
  uint32_t inverted = 0;
  for (int row0 = chunk.first; row0 < chunk.end; row0 += chunk.step) {
    mine.load(chunk, row0);
    CUTE_UNROLL
    for (float4 const& x : mine.x) {
      uint4 const m = make_uint4(magnitude(x.x), magnitude(x.y), magnitude(x.z), magnitude(x.w));
      of_column =
          make_uint4(max(of_column.x, m.x), max(of_column.y, m.y), max(of_column.z, m.z), max(of_column.w, m.w));
      uint32_t of_row = max(max(m.x, m.y), max(m.z, m.w));
      CUTE_UNROLL
      for (int lanes = 1; lanes < Mine::Lanes; lanes *= 2)
        of_row = max(of_row, __shfl_xor_sync(0xffffffffu, of_row, lanes));
      if (of_row > 0) inverted = max(inverted, ~of_row);
    }
  }
  atomicMax(largest + mine.col, of_column.x);
  atomicMax(largest + mine.col + 1, of_column.y);
  atomicMax(largest + mine.col + 2, of_column.z);
  atomicMax(largest + mine.col + 3, of_column.w);
  if (mine.col == 0) atomicMax(largest + Cols, inverted);
  __syncthreads();
  uint32_t* const to =
      parts.maxima + ((int64_t(chunk.batch) * params.heads_kv + chunk.head_kv) * kTensors + chunk.which) * (Cols + 1);
  for (int i = threadIdx.x; i <= Cols; i += kThreads) {
    if (largest[i] > 0) atomicMax(to + i, largest[i]);
  }
}

/// What `measure` found of q, k, v or dout of a head. By a whole warp.
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
/// to be multiplied by. The last comes first: `measure` has just read it, and what the next launch wants first is then
/// written last.
template <int Cols>
__global__ void __launch_bounds__(kThreads) split(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, parts, Cols, gridDim.x - 1 - blockIdx.x);
  if (chunk.first >= chunk.end) return;
  using Mine = Part<Cols>;
  Mine mine;
  mine.load(chunk, chunk.first);  // on its way while what was measured is read
  int64_t const pair = int64_t(chunk.batch) * params.heads_kv + chunk.head_kv;
  uint32_t const* const maxima = parts.maxima + pair * kTensors * (Cols + 1);
  Measured<Cols> const measured(maxima + chunk.which * (Cols + 1));
  if (chunk.first == 0 && threadIdx.x < 32) {
    if (!measured.is_held()) *parts.out_of_range = 1;
    if (chunk.which == K) {
      Measured<Cols> const q(maxima), v(maxima + V * (Cols + 1));
      // Factors are to stay finite, and not 0; of P in parts dP is multiplied by a power of two.
      if (abs(q.exponent() + measured.exponent()) > kMostExponent) *parts.out_of_range = 1;
      if (threadIdx.x == 0) {
        parts.scales[pair] = {ldexpf(1.f, q.exponent() + measured.exponent() - 2 * kTop),
                              ldexpf(1.f, v.exponent() - kTop)};
      }
      if (parts.dout) {
        Measured<Cols> const dout(maxima + DOut * (Cols + 1));
        int const of_dp = v.exponent() + dout.exponent();
        int const of_scores = q.exponent() + measured.exponent() + ilogbf(ScoreMod::query_scale(params));
        if (abs(of_dp) > kMostExponent || of_scores > kMostOfScores) *parts.out_of_range = 1;
        if (threadIdx.x == 0) {
          parts.gradient_scales[pair] = {parts.scales[pair].scores, ldexpf(1.f, of_dp - 2 * kTop),
                                         ldexpf(1.f, measured.exponent() - kTop), ldexpf(1.f, q.exponent() - kTop),
                                         ldexpf(1.f, dout.exponent() - kTop)};
        }
      }
    }
  }
  float const scale = ldexpf(1.f, kTop - measured.exponent());

  __half* const parts_of = chunk.which == Q   ? parts.q
                           : chunk.which == K ? parts.k
                           : chunk.which == V ? parts.v
                                              : parts.dout;
  __half* const to = parts_of + chunk.to + mine.col;
  for (int row0 = chunk.first; row0 < chunk.end; row0 += chunk.step) {
    if (row0 > chunk.first) mine.load(chunk, row0);
    CUTE_UNROLL
    for (int i = 0; i < Mine::Turns; ++i) {
      int64_t const row = row0 + Mine::row(i);
      if (row >= chunk.end) break;
      float4 const& x = mine.x[i];
      float const scaled[] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      uint32_t high[2], low[2];
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) split_operand(scaled[2 * j], scaled[2 * j + 1], high[j], low[j]);
      *reinterpret_cast<uint2*>(to + row * 2 * Cols) = make_uint2(high[0], high[1]);
      *reinterpret_cast<uint2*>(to + row * 2 * Cols + Cols) = make_uint2(low[0], low[1]);
    }
  }
}
#endif

}  // namespace cutlass_ext::operand_parts

// fp32 tensors in two fp16 parts, x * 2^s = high + low, for kernels of tensor cores: what is known of the range of q, k
// and v, and of dout in a backward pass, the powers of two that follow from it, and the parts. Launched by
// kernels/operand_parts.cu.
//
// Of every sequence and KV head, q (of all its query heads), k, v and dout have a power of two each, with which the
// largest element lies in [2^14, 2^15). An element then errs by 2^-23 of itself or by 2^-25, half of fp16's smallest
// number, whichever is more. A row or a column whose largest element is 2^-15 of the head's or more so errs by 2^-24 of
// its own largest, as fp32 does. Where one is smaller and not 0, where something is not finite, or where powers of two
// might leave fp32, the call is computed on CUDA cores.
//
// Keys in pages become parts that lie one after the other, each sequence's as if they were its only page, of as many
// rows as its row of the block table has room for.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "cache.hpp"
#include "operand.hpp"
#include "pack_gqa.hpp"
#include "score.hpp"
#include "sequence.hpp"

namespace cutlass_ext::operand_parts {

constexpr int kThreads = 256, kRows = 128;  // of a CTA
constexpr int kTop = 14;                    // log2 of the largest element, scaled and rounded down
constexpr int kSpread = 15;                 // by which the largest of a row or a column may be smaller
constexpr int kMostExponent = 64;           // of the largest element: factors of scores stay finite, and not 0, which
                                            // would make NaN of hidden scores (takes_scale)
// Of a backward pass the exponents of the largest scores' factors together: scores then stay below 2^22, and P, of an
// lse that float32 has rounded, in fp16's range.
constexpr int kMostOfScores = 12;

/// Whether what scores are multiplied by stays in fp32's range beside the operands' powers of two.
inline bool takes_scale(Scores const& scores) {
  constexpr float kLeast = 0x1p-32f, kMost = 0x1p20f;
  float const scale = ScoreMod::query_scale(scores);
  return kLeast <= scale && scale <= kMost;
}

/// What is read, and where parts go. [batch, head, row, column]: high parts of `Cols` columns (of v and dout `ColsV`),
/// as the kernel that multiplies them has, then their low parts; of keys in pages every sequence is one of the batch.
struct Parts {
  __half *q, *k, *v;
  uint32_t* maxima;    // [B, H_kv, kTensors, kMaxima]: see `Measured`; zeros before
  int* out_of_range;   // 0 before
  PartScales* scales;  // [B, H_kv]
  int* pages;          // [B]: which of the batch each sequence's are, where they were in pages
  // Of a backward pass; else null.
  __half* dout;
  float const* dout_from;
  Strides dout_stride;
  GradientScales* gradient_scales;  // [B, H_kv]
};

constexpr int kTensors = 4;
constexpr int kMaxima = 256 + 1;  // of one of them of a head: of each column, and one of rows

/// Strides of a tensor of parts, in elements.
CUTE_HOST_DEVICE Strides strides_of(int rows, int heads, int cols) {
  return {int64_t(heads) * rows * 2 * cols, 2 * cols, int64_t(rows) * 2 * cols};
}

/// CTAs, each for kRows of a head of q, k, v or dout, as far as the host knows; where sequences have more keys than it
/// was told of, the CTAs of a head take them in turn.
struct Chunks {
  int heads_q, heads_kv, of_q, of_k;  // of a head
  bool with_dout;

  CUTE_HOST_DEVICE Chunks(Params const& p, bool with_dout)
      : heads_q(p.heads_q),
        heads_kv(p.heads_kv),
        of_q(chunks_of(p.n_q)),
        of_k(chunks_of(p.longest_kv > 0 ? p.longest_kv : p.n_kv)),
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
  bool of_rows, of_values;  // whether it is of q or dout; of v or dout
  int batch, head, head_kv;
  int first, step, end;  // rows of the sequence: kRows from `first`, then from `first + step`, ...
  int cols;
  float const* from;  // row 0 of the sequence, or, of pages, of the first page
  Strides strides;
  int64_t to;        // of row 0, element of the tensor of parts
  int const* pages;  // null: one row after the other
  int row0;          // where they begin in the pages

  CUTE_DEVICE Chunk(Params const& p, Parts const& parts, int padded_cols, int padded_cols_v, int index) {
    Chunks const chunks(p, parts.dout);
    int const of_sequence = static_cast<int>(chunks.of_sequence()), b = index / of_sequence;
    int rest = index - b * of_sequence;
    batch = b;
    int const of_all_q = chunks.heads_q * chunks.of_q, of_all_k = chunks.heads_kv * chunks.of_k;
    which = rest < of_all_q ? Q : rest < of_all_q + of_all_k ? K : rest < of_all_q + 2 * of_all_k ? V : DOut;
    rest -= which == Q ? 0 : which == K ? of_all_q : which == V ? of_all_q + of_all_k : of_all_q + 2 * of_all_k;
    of_rows = which == Q || which == DOut, of_values = which == V || which == DOut;
    int const of_head = of_rows ? chunks.of_q : chunks.of_k;
    head = rest / of_head;
    head_kv = of_rows ? p.heads_per_kv.div(head) : head;
    first = (rest - head * of_head) * kRows;
    step = of_head * kRows;

    Sequence const sequence = sequence_of(p, b);
    bool const paged = !of_rows && p.paged();
    int const row = of_rows ? sequence.q_row0 : sequence.k_row0, place = paged ? b : sequence.batch;
    // Keys that no row asks for are left alone: in a batch that decodes and prefills those of the first are most.
    end = sequence.visibility.n_q == 0 ? 0 : of_rows ? sequence.visibility.n_q : sequence.visibility.len_kv;
    cols = of_values ? p.head_dim_v : p.head_dim;
    strides = which == Q ? p.q_stride : which == K ? p.k_stride : which == V ? p.v_stride : parts.dout_stride;
    pages = paged ? p.pages_of(b) : nullptr;
    row0 = row;
    void const* const data = which == Q ? p.q : which == K ? p.k : which == V ? p.v : parts.dout_from;
    from = row_at<float const>(data, strides, paged ? 0 : place, paged ? 0 : row, head);
    Strides const of_parts = strides_of(of_rows ? p.stored_rows() : p.stored_keys(), of_rows ? p.heads_q : p.heads_kv,
                                        of_values ? padded_cols_v : padded_cols);
    to = place * of_parts.batch + row * of_parts.row + head * of_parts.head;
  }

  /// Column 0 of row `row` of the sequence, which exists.
  CUTE_DEVICE float const* row_of(Cache const& cache, int row) const {
    if (!pages) return from + row * strides.row;
    int const page = nearest_page(pages[cache.page_rows.div(row0 + row)], cache.pages);
    return from + page * strides.batch + row_in_page(cache, row0 + row) * strides.row;
  }
};

/// Some columns, four by four, of some of kRows rows: what a thread has of a chunk.
template <int Cols>
struct Part {
  static constexpr int Lanes = Cols % 128 == 0 ? 32 : 16, Fours = Cols / 4 / Lanes, RowsApart = kThreads / Lanes,
                       Turns = kRows / RowsApart;
  static_assert(Fours * Lanes * 4 == Cols && Turns * RowsApart == kRows, "threads share a chunk evenly");
  float4 x[Turns][Fours];

  CUTE_DEVICE static int row(int i) { return threadIdx.x / Lanes + i * RowsApart; }
  CUTE_DEVICE static int col(int j) { return (threadIdx.x % Lanes + j * Lanes) * 4; }

  /// Those from row `row0` on; zeros where there are none.
  CUTE_DEVICE void load(Cache const& cache, Chunk const& chunk, int row0) {
    CUTE_UNROLL
    for (int i = 0; i < Turns; ++i) {
      bool const exists = row0 + row(i) < chunk.end;
      float const* const from = exists ? chunk.row_of(cache, row0 + row(i)) : nullptr;
      CUTE_UNROLL
      for (int j = 0; j < Fours; ++j) {
        x[i][j] = exists && col(j) < chunk.cols ? *reinterpret_cast<float4 const*>(from + col(j))
                                                : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  }
};

CUTE_DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // in order, NaN last

/// What was measured of q, k, v or dout of the chunk's KV head.
CUTE_DEVICE uint32_t* maxima_of(Params const& params, Parts const& parts, Chunk const& chunk, Which which) {
  return parts.maxima + ((int64_t(chunk.batch) * params.heads_kv + chunk.head_kv) * kTensors + which) * kMaxima;
}

template <int Cols>
CUTE_DEVICE void measure_chunk(Params const& params, Parts const& parts, Chunk const& chunk) {
  __shared__ uint32_t largest[Cols + 1];
  for (int i = threadIdx.x; i <= Cols; i += kThreads) largest[i] = 0;
  __syncthreads();

  using Mine = Part<Cols>;
  Mine mine;
  uint4 of_column[Mine::Fours] = {};
  uint32_t inverted = 0;
  for (int row0 = chunk.first; row0 < chunk.end; row0 += chunk.step) {
    mine.load(params, chunk, row0);
    CUTE_UNROLL
    for (auto const& row : mine.x) {
      uint32_t of_row = 0;
      CUTE_UNROLL
      for (int j = 0; j < Mine::Fours; ++j) {
        uint4 const m = make_uint4(magnitude(row[j].x), magnitude(row[j].y), magnitude(row[j].z), magnitude(row[j].w));
        uint4& column = of_column[j];
        column = make_uint4(max(column.x, m.x), max(column.y, m.y), max(column.z, m.z), max(column.w, m.w));
        of_row = max(of_row, max(max(m.x, m.y), max(m.z, m.w)));
      }
      CUTE_UNROLL
      for (int lanes = 1; lanes < Mine::Lanes; lanes *= 2)
        of_row = max(of_row, __shfl_xor_sync(0xffffffffu, of_row, lanes));
      if (of_row > 0) inverted = max(inverted, ~of_row);
    }
  }
  CUTE_UNROLL
  for (int j = 0; j < Mine::Fours; ++j) {
    uint32_t* const here = largest + Mine::col(j);
    atomicMax(here, of_column[j].x);
    atomicMax(here + 1, of_column[j].y);
    atomicMax(here + 2, of_column[j].z);
    atomicMax(here + 3, of_column[j].w);
  }
  if (Mine::col(0) == 0) atomicMax(largest + Cols, inverted);
  __syncthreads();
  uint32_t* const to = maxima_of(params, parts, chunk, chunk.which);
  for (int i = threadIdx.x; i <= Cols; i += kThreads) {
    if (largest[i] > 0) atomicMax(to + i, largest[i]);
  }
}

/// The largest magnitude of each column, and of the rows' largest that are not 0 the least, inverted: all grow.
template <int Cols, int ColsV>
__global__ void __launch_bounds__(kThreads) measure(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, parts, Cols, ColsV, blockIdx.x);
  if (chunk.first >= chunk.end) return;
  if (Cols == ColsV || !chunk.of_values) {
    measure_chunk<Cols>(params, parts, chunk);
  } else {
    measure_chunk<ColsV>(params, parts, chunk);
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

/// `Cols` columns of the chunk, of k beside `ColsV` of v and dout.
template <int Cols, int ColsV>
CUTE_DEVICE void split_chunk(Params const& params, Parts const& parts, Chunk const& chunk) {
  using Mine = Part<Cols>;
  Mine mine;
  mine.load(params, chunk, chunk.first);  // on its way while what was measured is read
  Measured<Cols> const measured(maxima_of(params, parts, chunk, chunk.which));
  if (chunk.first == 0 && threadIdx.x < 32) {
    if (!measured.is_held()) *parts.out_of_range = 1;
    if (chunk.which == K) {
      if (chunk.pages && chunk.head == 0 && threadIdx.x == 0) parts.pages[chunk.batch] = chunk.batch;
      Measured<Cols> const q(maxima_of(params, parts, chunk, Q));
      Measured<ColsV> const v(maxima_of(params, parts, chunk, V));
      // Factors are to stay finite, and not 0; of P in parts dP is multiplied by a power of two.
      if (abs(q.exponent() + measured.exponent()) > kMostExponent) *parts.out_of_range = 1;
      int64_t const pair = int64_t(chunk.batch) * params.heads_kv + chunk.head_kv;
      float const of_products = ldexpf(1.f, q.exponent() + measured.exponent() - 2 * kTop);
      if (threadIdx.x == 0) parts.scales[pair] = {of_products, ldexpf(1.f, v.exponent() - kTop)};
      if (parts.dout) {
        Measured<ColsV> const dout(maxima_of(params, parts, chunk, DOut));
        int const of_dp = v.exponent() + dout.exponent();
        int const of_scores = q.exponent() + measured.exponent() + ilogbf(ScoreMod::query_scale(params));
        if (abs(of_dp) > kMostExponent || of_scores > kMostOfScores) *parts.out_of_range = 1;
        if (threadIdx.x == 0) {
          parts.gradient_scales[pair] = {of_products, ldexpf(1.f, of_dp - 2 * kTop),
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
  __half* const to = parts_of + chunk.to;
  for (int row0 = chunk.first; row0 < chunk.end; row0 += chunk.step) {
    if (row0 > chunk.first) mine.load(params, chunk, row0);
    CUTE_UNROLL
    for (int i = 0; i < Mine::Turns; ++i) {
      int64_t const row = row0 + Mine::row(i);
      if (row >= chunk.end) break;
      CUTE_UNROLL
      for (int j = 0; j < Mine::Fours; ++j) {
        float4 const& x = mine.x[i][j];
        uint2 high, low;
        split_operand(x.x * scale, x.y * scale, high.x, low.x);
        split_operand(x.z * scale, x.w * scale, high.y, low.y);
        __half* const here = to + row * 2 * Cols + Mine::col(j);
        *reinterpret_cast<uint2*>(here) = high;
        *reinterpret_cast<uint2*>(here + Cols) = low;
      }
    }
  }
}

/// The parts of what exists. The first chunk of a head says whether they hold it, and that of k what its products are
/// to be multiplied by. The last comes first: `measure` has just read it, and what the next launch wants first is then
/// written last.
template <int Cols, int ColsV>
__global__ void __launch_bounds__(kThreads) split(__grid_constant__ Params const params, Parts const parts) {
  Chunk const chunk(params, parts, Cols, ColsV, gridDim.x - 1 - blockIdx.x);
  if (chunk.first >= chunk.end) return;
  if (Cols == ColsV || !chunk.of_values) {
    split_chunk<Cols, ColsV>(params, parts, chunk);
  } else {
    split_chunk<ColsV, ColsV>(params, parts, chunk);
  }
}
#endif

}  // namespace cutlass_ext::operand_parts

// delta of a query row, rowsum(dO O), by the lanes that share it: of all rows in a launch (preprocess.hpp), of the
// CTA's next head by warps that have nothing else to do (sm90/producer.hpp), which add up in the same order, or of the
// CTA's only head (sm80_whole_heads.hpp).
#pragma once

#include <cstdint>

#include "../pack_gqa.hpp"
#include "../softmax.hpp"
#include "params.hpp"

namespace cutlass_ext {

CUTE_DEVICE void prefetch_to_l2(void const* data) { asm volatile("prefetch.global.L2 [%0];" ::"l"(data)); }

/// Lanes that share a row: each reads 16 bytes of it at a time.
constexpr int kLanesOfRow = 8;

/// `sum` and the products of 16 bytes of dO and O.
template <class Element>
CUTE_DEVICE float add_products(float sum, uint4 const& dout, uint4 const& out) {
  auto const *const x = reinterpret_cast<Element const*>(&dout), *const y = reinterpret_cast<Element const*>(&out);
  CUTE_UNROLL
  for (int i = 0; i < int(16 / sizeof(Element)); ++i) sum = fmaf(float(x[i]), float(y[i]), sum);
  return sum;
}

/// rowsum(dO O) of one row of up to `Vectors` vectors for each of `Lanes` lanes, which are all on their way at once:
/// every one of them gets it.
template <int Lanes, int Vectors, class Element>
CUTE_DEVICE float row_product(Element const* dout, Element const* out, int cols, bool aligned, int lane) {
  constexpr int kVector = 16 / sizeof(Element);
  uint4 x[Vectors] = {}, y[Vectors] = {};
  CUTE_UNROLL
  for (int v = 0; v < Vectors; ++v) {
    int const col = (v * Lanes + lane) * kVector;
    if (col >= cols) continue;
    if (aligned) {
      x[v] = *reinterpret_cast<uint4 const*>(dout + col);
      y[v] = *reinterpret_cast<uint4 const*>(out + col);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) {
        reinterpret_cast<Element*>(&x[v])[i] = dout[col + i];
        reinterpret_cast<Element*>(&y[v])[i] = out[col + i];
      }
    }
  }
  float sum = 0.f;
  CUTE_UNROLL
  for (int v = 0; v < Vectors; ++v) sum = add_products<Element>(sum, x[v], y[v]);
  return warp_sum<Lanes, 1>(sum);
}

/// The statistics of all rows of a sequence and head, by two warps, where preprocesses_in_kernel(); rows that only fill
/// up a tile of `Tile` rows are written, too.
template <int Tile, class Element>
CUTE_DEVICE void preprocess_head(BackwardParams const& params, Sequence const& sequence, int b, int head) {
  constexpr int kLanes = kLanesOfRow, kRows = 2 * 32 / kLanes, kAtOnce = 2;  // what 56 registers have room for
  static_assert(Tile % (kAtOnce * kRows) == 0 && sizeof(Element) == 2);      // of up to 64 columns a lane has a chunk
  int const lane = threadIdx.x % kLanes, row = threadIdx.x % 64 / kLanes, n_q = sequence.visibility.n_q;
  bool const has_columns = lane * int(16 / sizeof(Element)) < params.head_dim_v;
  // A pass has few loads on their way, and would wait for memory each time: what it reads is to be in L2.
  for (int each = threadIdx.x % 64; each < n_q; each += 64) {
    auto const prefetch_row = [&](void const* data, Strides const& stride) {
      prefetch_to_l2(row_at<Element>(data, stride, sequence.batch, sequence.q_row0 + each, head));
    };
    prefetch_row(params.dout, params.dout_stride), prefetch_row(params.o, params.o_stride);
    prefetch_to_l2(params.lse + sequence.result_row0(params, head, 0) + each);
  }
  auto const chunks_of = [&](void const* data, Strides const& stride) {
    return reinterpret_cast<uint4 const*>(row_at<Element const>(data, stride, sequence.batch, sequence.q_row0, head) +
                                          row * stride.row) +
           lane;
  };
  auto *dout = chunks_of(params.dout, params.dout_stride), *out = chunks_of(params.o, params.o_stride);
  int64_t const dout_step = params.dout_stride.row * kRows / 8, out_step = params.o_stride.row * kRows / 8;
  float const* lse = params.lse + sequence.result_row0(params, head, 0) + row;
  RowStatistics* to = params.row_statistics + StatisticsRows(params).first(params, sequence, b, head) + row;
  Range const seeing = sequence.visibility.rows_with_keys();
  int at = row - seeing.begin;  // of the first of the lane's rows among those that see a key
  uint4 x[kAtOnce], y[kAtOnce];
  float lses[kAtOnce];
  auto const ask = [&] {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      bool const sees = static_cast<unsigned>(at + i * kRows) < static_cast<unsigned>(seeing.size());
      lses[i] = sees ? lse[i * kRows] : -INFINITY;
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      if (sees && has_columns) x[i] = *dout, y[i] = *out;
      dout += dout_step, out += out_step;
    }
    lse += kAtOnce * kRows, at += kAtOnce * kRows;
  };
  // Asked for behind the sums of the rows before. In front of their own ptxas has loads wait for one another: products
  // of a head of 512 causal rows, 38 us, then waited for its statistics until 45.
  ask();
  CUTE_NO_UNROLL
  for (int passes = (n_q + Tile - 1) / Tile * (Tile / kRows / kAtOnce); passes > 0; --passes) {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      float const delta = warp_sum<kLanes, 1>(add_products<Element>(0.f, x[i], y[i]));
      // A row that sees no key counts nowhere, whatever its lse, which may be one of more keys.
      RowStatistics const statistics =
          lses[i] > -INFINITY ? RowStatistics{lses[i] * kLog2e, delta} : RowStatistics{INFINITY, 0.f};
      if (lane == 0) to[i * kRows] = statistics;
    }
    to += kAtOnce * kRows;
    ask();
  }
}

}  // namespace cutlass_ext

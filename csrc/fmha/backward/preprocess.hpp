// What the backward kernels have to know of each query row, before them, and the sink's gradient, which follows from
// the same. Launched by kernels/backward_preprocess.cu.
#pragma once

#include "../copy/cp_async.hpp"
#include "../launch_order.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../softmax.hpp"
#include "empty_rows.hpp"
#include "params.hpp"
#include "row_product.hpp"

namespace cutlass_ext {

constexpr int kStatisticsThreads = 256;

/// What other kernels want to be zero, workspace or dQ, in pieces of 16 bytes, and how many a CTA clears: writes beside
/// what the statistics read.
struct ToClear {
  float4* data = nullptr;
  int64_t size = 0, of_a_cta = 0;
};

/// Of a tile of rows of a head, those that a CTA has: as many as it has places for. The launch then reads and writes
/// 3.6 to 4 TB/s of an H200's 4.8; with passes over a whole tile 3.0 to 3.7, with all of their loads at once 2.2
/// to 2.9.
constexpr int kStatisticsRows = kStatisticsThreads / kLanesOfRow;
static_assert(StatisticsRows::kTile % kStatisticsRows == 0);

/// What a CTA sees to, of launches with so many for each tile of rows of each head.
struct RowsOfHead {
  int b, head, row0;
};
template <int Rows>
CUTE_DEVICE RowsOfHead rows_of_cta(Params const& params) {
  constexpr unsigned kTile = StatisticsRows::kTile;
  unsigned const of_head = (params.n_q + kTile - 1) / kTile * (kTile / Rows), head = blockIdx.x / of_head,
                 b = head / params.heads_q;
  return {int(b), int(head - b * params.heads_q), int((blockIdx.x - head * of_head) * Rows)};
}

/// The statistics of some rows of one head, with those that fill up its last tile. With `tiles_a_head` only of the
/// heads that the CTAs of a launch of whole heads begin with, which has so many tiles for each: these see to the others
/// while they work.
template <class Element, int Vectors>
__global__ void __launch_bounds__(kStatisticsThreads)
    row_statistics_kernel(__grid_constant__ BackwardParams const params, int const tiles_a_head,
                          ToClear const to_clear) {
  let_next_launch_begin();
  int64_t const begin = int64_t(blockIdx.x) * to_clear.of_a_cta, end = min(begin + to_clear.of_a_cta, to_clear.size);
  for (int64_t i = begin + threadIdx.x; i < end; i += kStatisticsThreads)
    to_clear.data[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  auto [b, head, row0] = rows_of_cta<kStatisticsRows>(params);
  int const lane = threadIdx.x % kLanesOfRow;
  if (tiles_a_head > 0) {
    int const group = params.heads_per_kv.divisor, of_launch = b * params.heads_q + head;
    WorkItem const work = params.scheduler(of_launch / group * tiles_a_head);
    b = work.batch, head = work.head * group + of_launch % group;
  }
  Sequence const sequence = sequence_of(params, b);
  int const n_q = sequence.visibility.n_q;
  if (row0 / StatisticsRows::kTile * StatisticsRows::kTile >= n_q) return;
  bool const aligned =
      is_aligned<Element>(params.dout, params.dout_stride) && is_aligned<Element>(params.o, params.o_stride);
  auto const* const dout =
      row_at<Element const>(params.dout, params.dout_stride, sequence.batch, sequence.q_row0, head);
  auto const* const out = row_at<Element const>(params.o, params.o_stride, sequence.batch, sequence.q_row0, head);
  int64_t const result_row0 = sequence.result_row0(params, head, 0);
  int const row = row0 + threadIdx.x / kLanesOfRow;
  RowStatistics statistics{INFINITY, 0.f};
  // All lanes of a warp take part in its sums: rows that do not exist have no columns.
  int const last = min(row, n_q - 1), cols = row < n_q && !params.delta ? params.head_dim_v : 0;
  float const lse = params.lse[result_row0 + last];
  float const product = row_product<kLanesOfRow, Vectors>(dout + last * params.dout_stride.row,
                                                          out + last * params.o_stride.row, cols, aligned, lane);
  if (row < n_q) {
    // Of a row that sees no key `out` is 0, and its gradient may be anything: it counts nowhere.
    bool const sees_keys = sequence.visibility.keys_of_row(row).size() > 0;
    float delta = params.delta ? params.delta[result_row0 + row] : sees_keys ? product : 0.f;
    if (params.dlse) delta -= params.dlse[result_row0 + row];
    if (lse > -INFINITY && (sees_keys || params.dsink)) statistics = {lse * kLog2e, delta};
  }
  if (lane == 0) params.row_statistics[StatisticsRows(params).first(params, sequence, b, head) + row] = statistics;
}

/// Whether bias and mask leave a row some of the keys that it sees, by the 16 lanes that share it. All lanes of a warp
/// take part; of rows that are not `asked` for they get true.
CUTE_DEVICE bool sees_some(BackwardParams const& params, Sequence const& sequence, int b, int head, int row, bool asked,
                           int lane) {
  bool found = !asked;
  if (asked) {
    PairMod const pairs(params, sequence, b, head);
    Range const keys = sequence.visibility.keys_of_row(row);
    for (int key = keys.begin + lane; key < keys.end && !found; key += 16) {
      float score[1] = {0.f};
      pairs.apply(score, params, sequence.visibility, row, key, [](int e) { return e; });
      found = score[0] != -INFINITY;
    }
  }
  return __ballot_sync(0xffffffffu, found) >> (threadIdx.x % 32 / 16 * 16) & 0xffffu;
}

/// `params.empty_rows` of a tile of rows of one head, a CTA each, behind their statistics: rows that see keys, but none
/// that bias and mask leave.
inline __global__ void __launch_bounds__(kStatisticsThreads)
    empty_rows_kernel(__grid_constant__ BackwardParams const params) {
  constexpr int kTile = StatisticsRows::kTile;
  auto const [b, head, row0] = rows_of_cta<kTile>(params);
  int const lane = threadIdx.x % 16;
  Sequence const sequence = sequence_of(params, b);
  int const n_q = sequence.visibility.n_q;
  if (row0 >= n_q) return;  // the place of such rows may be another sequence's
  int64_t const first = StatisticsRows(params).first(params, sequence, b, head) + row0,
                result_row0 = sequence.result_row0(params, head, 0);
  float const least = lse_without_keys(params, head);
  __shared__ uint32_t asked[kTile / 32], empty[kTile / 32];  // a bit for each row
  if (threadIdx.x < kTile) {
    int const row = row0 + threadIdx.x;
    bool const may_be_empty =
        row < n_q && !(params.lse[result_row0 + row] > least) && sequence.visibility.keys_of_row(row).size() > 0;
    uint32_t const rows = __ballot_sync(0xffffffffu, may_be_empty);
    if (threadIdx.x % 32 == 0) asked[threadIdx.x / 32] = rows, empty[threadIdx.x / 32] = 0;
  }
  __syncthreads();
  uint32_t any = 0;
  for (uint32_t const rows : asked) any |= rows;
  if (any) {  // of most tiles there is nothing to look at
    CUTE_NO_UNROLL
    for (int row = row0 + threadIdx.x / 16; row < row0 + kTile; row += kStatisticsThreads / 16) {
      bool const is_asked = asked[row % kTile / 32] >> row % 32 & 1;
      if (sees_some(params, sequence, b, head, row, is_asked, lane) || lane != 0) continue;
      atomicOr(&empty[row % kTile / 32], 1u << row % 32);
      // `out` is 0, and its gradient may be anything.
      if (params.lse[result_row0 + row] > -INFINITY && !params.delta)
        params.row_statistics[first + row - row0].delta = params.dlse ? -params.dlse[result_row0 + row] : 0.f;
    }
    __syncthreads();
  }
  if (threadIdx.x < kTile / 32) params.empty_rows[first / 32 + threadIdx.x] = empty[threadIdx.x];
}

constexpr int kSinkThreads = 512;

/// dsink = -sum over all rows of exp(sink - lse) delta, a CTA for each head, always in the same order.
inline __global__ void __launch_bounds__(kSinkThreads)
    sink_gradient_kernel(__grid_constant__ BackwardParams const params) {
  int const head = blockIdx.x;
  float const sink_log2 = params.sink_of(head) * kLog2e;
  float sum = 0.f;
  for (int b = 0; b < params.batch; ++b) {
    Sequence const sequence = sequence_of(params, b);
    auto const* const rows = params.row_statistics + StatisticsRows(params).first(params, sequence, b, head);
    for (int row = threadIdx.x; row < sequence.visibility.n_q; row += kSinkThreads)
      sum = fmaf(-exp2f(sink_log2 - rows[row].lse_log2), rows[row].delta, sum);
  }
  __shared__ float sums[kSinkThreads / 32];
  sum = warp_sum<32, 1>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_sum<32, 1>(threadIdx.x < kSinkThreads / 32 ? sums[threadIdx.x] : 0.f);
  if (threadIdx.x == 0) params.dsink[head] = sum;
}

}  // namespace cutlass_ext

// The one merge of parts: several (O, m, l) of a row, each over keys of its own, become one (Flash-Decoding's second
// step). Called by kernels whose warps, warpgroups or CTAs share a row's keys, and here, in a launch of its own, for
// splits.
#pragma once

#include "params.hpp"
#include "sequence.hpp"
#include "softmax.hpp"

namespace cutlass_ext {

/// How often what a part has summed up (l, O) counts beside parts whose common maximum has `base_of` it `base`.
CUTE_DEVICE float weight_of(Part const& part, float base) { return exp2_approx(part.m - base); }

/// All parts of a row as one, in their order; O is to be the sum of the parts' O times `weights`.
template <int Parts>
CUTE_DEVICE Part merge(Part const (&parts)[Parts], float (&weights)[Parts]) {
  Part all{parts[0].m, 0.f};
  CUTE_UNROLL
  for (int i = 1; i < Parts; ++i) all.m = fmaxf(all.m, parts[i].m);
  CUTE_UNROLL
  for (int i = 0; i < Parts; ++i) {
    weights[i] = weight_of(parts[i], base_of(all.m));
    all.l = fmaf(parts[i].l, weights[i], all.l);
  }
  return all;
}

constexpr int kMergeRows = 4;  // query rows of a block, a warp each

/// Merges the splits of each query row and lets the sink in, a warp a row. The bits depend on the number of splits
/// alone. Launched after a kernel that wrote parts. One part alone, in float32, lies where o does, and stays as it is
/// unless there is a sink.
template <class Element>
__global__ void __launch_bounds__(kMergeRows * 32) merge_splits_kernel(__grid_constant__ Params const params) {
  int const n = params.stored_rows(), blocks = (n + kMergeRows - 1) / kMergeRows;
  int const row = blockIdx.x % blocks * kMergeRows + threadIdx.x / 32;
  if (row >= n || params.is_skipped() || (params.packed() && !is_computed(params, row))) return;
  unsigned const batch_head = blockIdx.x / blocks;
  int64_t const rows = params.result_rows();
  int64_t const index = int64_t(batch_head) * n + row;  // as lse is laid out
  int const lane = threadIdx.x % 32, head = batch_head % params.heads_q;
  int64_t const b = batch_head / params.heads_q;

  // Asked for first, so that it does not come behind the others.
  float const sink_log2 = params.sink_of(head) * kLog2e;
  int const splits = params.num_splits;
  auto const lse_of = [&](int split) { return split < splits ? params.lse_partial[split * rows + index] : -INFINITY; };
  float const first_lse = lse_of(lane);  // a lane has every 32nd part
  constexpr int kRound = 8;              // parts under way at a time
  auto const ask = [&](float4(&part)[kRound], int col, int s0) {
    CUTE_UNROLL
    for (int i = 0; i < kRound; ++i) {
      part[i] =
          col < params.head_dim_v && s0 + i < splits
              ? *reinterpret_cast<float4 const*>(params.o_partial + ((s0 + i) * rows + index) * params.head_dim_v + col)
              : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  float4 part[kRound];
  bool const in_place = params.o_partial == params.o;
  if (!in_place) ask(part, lane * 4, 0);  // in front of their weights, which wait for lse
  Part all{first_lse, 0.f};
  for (int s = 32 + lane; s < splits; s += 32) all.m = fmaxf(all.m, lse_of(s));
  all.m = warp_max<32, 1>(all.m);
  float const base = base_of(all.m);
  for (int s = lane; s < splits; s += 32) all.l += weight_of({s < 32 ? first_lse : lse_of(s), 1.f}, base);
  all.l = warp_sum<32, 1>(all.l);
  Finish const finished = finish<Element>(all, sink_log2);

  Element* out = static_cast<Element*>(params.o) + b * params.o_stride.batch + row * params.o_stride.row +
                 head * params.o_stride.head;
  bool const stays = in_place && finished.factor == 1.f;
  for (int col0 = 0; !stays && col0 < params.head_dim_v; col0 += 32 * 4) {
    int const col = col0 + lane * 4;
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    float weight = 0.f;
    for (int s0 = 0; s0 < splits; s0 += kRound) {
      if (in_place || col0 + s0 > 0) ask(part, col, s0);
      if (s0 % 32 == 0) weight = weight_of({s0 == 0 ? first_lse : lse_of(s0 + lane), 1.f}, base) * finished.factor;
      CUTE_UNROLL
      for (int i = 0; i < kRound; ++i) {
        float const w = __shfl_sync(0xffffffffu, weight, (s0 + i) % 32);
        acc = make_float4(fmaf(w, part[i].x, acc.x), fmaf(w, part[i].y, acc.y), fmaf(w, part[i].z, acc.z),
                          fmaf(w, part[i].w, acc.w));
      }
    }
    if (col >= params.head_dim_v) continue;
    Element* to = out + col;
    to[0] = Element(acc.x), to[1] = Element(acc.y), to[2] = Element(acc.z), to[3] = Element(acc.w);
  }
  if (lane == 0 && params.lse) params.lse[index] = finished.lse();
}

}  // namespace cutlass_ext

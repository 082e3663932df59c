// FMHA on CUDA cores: exact fp32 attention for one query tile and its visible key tiles.
// Instantiated by csrc/kernels/simt_*.cu and by the tile sweep of bench/; launched through host/plan.cpp.
#pragma once

#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../merge.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../softmax.hpp"
#include "products.hpp"
#include "traits.hpp"

namespace cutlass_ext::simt {

/// The number of thread `thread` among those that have the same keys of a tile.
template <class Traits>
CUTE_DEVICE int thread_of_col_warps(int thread) {
  return Traits::ColWarps == 1 ? thread : thread % (Traits::Threads / Traits::ColWarps);
}

/// The first of the keys of a tile that the thread's column warps have. Worked out where it is wanted: registers are
/// for sums.
template <class Traits>
CUTE_DEVICE int first_key_of_warp() {
  if constexpr (Traits::ColWarps == 1) return 0;
  return opaque(threadIdx.x) / (Traits::Threads / Traits::ColWarps) * Traits::WarpKeys;
}

/// Adds what the second column warps have of m, l and O to what the first have: a thread to the one of its place. Every
/// thread calls it; false where nothing is left to do.
template <class Traits, class Softmax, class OutTensor>
CUTE_DEVICE bool merge_col_warps(Softmax& softmax, OutTensor& O, float* shared) {
  constexpr int kThreads = Traits::Threads / 2, Rows = Traits::Rows, OutCols = Traits::OutCols;
  static_assert(Traits::ColWarps == 2);
  float* const mine = shared + threadIdx.x % kThreads;
  bool const is_first = threadIdx.x < kThreads;
  auto const place_of = [&](int i, int value) -> float& { return mine[(i * (OutCols + 2) + value) * kThreads]; };
  __syncthreads();  // the last tile is read
  if (!is_first) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      place_of(i, OutCols) = softmax.m[i], place_of(i, OutCols + 1) = softmax.l[i];
      CUTE_UNROLL
      for (int j = 0; j < OutCols; ++j) place_of(i, j) = O(i, j);
    }
  }
  __syncthreads();
  if (!is_first) return false;
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    Part const parts[2] = {{softmax.m[i], softmax.l[i]}, {place_of(i, OutCols), place_of(i, OutCols + 1)}};
    float weights[2];
    Part const all = merge(parts, weights);
    softmax.m[i] = all.m, softmax.l[i] = all.l;
    CUTE_UNROLL
    for (int j = 0; j < OutCols; ++j) O(i, j) = fmaf(place_of(i, j), weights[1], O(i, j) * weights[0]);
  }
  return true;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::MinCtas) fmha_kernel(__grid_constant__ Params const params) {
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Rows = Traits::Rows, Stages = Traits::Stages;
  if (params.is_skipped()) return;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

  WorkItem const work = params.scheduler(blockIdx.x);
  Sequence const sequence = device_sequence_of(params, work.batch);
  Visibility const& visibility = sequence.visibility;
  if (work.row0 >= visibility.n_q) return;  // packed: the launch counts the tiles of the longest sequence for each
  Range const tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params.scheduler.splits(), work.split);
  int const head_kv = params.heads_per_kv.div(work.head);
  LanePlace const place(thread_of_col_warps<Traits>(threadIdx.x));
  int const first_row = work.row0 + place.panel * kPanel + place.row_chunk * kVector;
  // Rows and keys of the lane, counted from its first.
  auto row_of = [](int i) { return (i / kVector) * Traits::PanelsApart * kPanel + i % kVector; };
  auto key_of = [](int j) { return (j / kVector) * kPanel + j % kVector; };

  // A panel of K, V or P from the keys of the thread's column warps on: they begin where the swizzle does.
  auto const of_warp = [](auto* panel) { return panel + first_key_of_warp<Traits>() * kPanel; };

  // Items of the ring: K and V of the last tile, K and V of the tile before it, ... The last tile is the only one whose
  // rows may end inside it.
  auto load_item = [&](int item) {
    if (item < 2 * tiles.size()) {
      int const first_key = (tiles.end - 1 - item / 2) * B_c;
      int const rows = visibility.len_kv - first_key;
      bool const is_k = item % 2 == 0;
      void const* const data = is_k ? params.k : params.v;
      Strides const& stride = is_k ? params.k_stride : params.v_stride;
      // Tensors go the same way as pages: with one of their own the kernels of 64 columns spilled.
      bool const paged = params.paged();
      int const* const table = paged ? params.pages_of(params.scheduler(opaque(blockIdx.x)).batch) : nullptr;
      LookedUpTile<float> const src{row_at<float const>(data, stride, paged ? 0 : sequence.batch, 0, head_kv),
                                    stride,
                                    params,
                                    table,
                                    sequence.k_row0 + first_key,
                                    rows,
                                    is_k ? params.head_dim : params.head_dim_v,
                                    is_aligned<float>(data, stride)};
      copy_tile<B_c, Traits::HeadDim, Traits::Threads>(src, shared.kv[item % Stages], [](int row) { return row / 4; });
    }
    cp_async_fence();
  };
  int item = 0;
  // Waits for the next item, frees the slot of the item before it and starts the copy that goes there.
  auto next_item = [&]() -> float const* {
    cp_async_wait<Stages - 2>();
    __syncthreads();
    load_item(item + Stages - 1);
    return shared.kv[item++ % Stages];
  };

  Tensor O = make_tensor<float>(Shape<Int<Rows>, Int<Traits::OutCols>>{});
  Tensor S = make_tensor<float>(Shape<Int<Rows>, Int<Traits::Keys>>{});
  Tensor rescale = make_tensor<float>(Shape<Int<Rows>>{});
  OnlineSoftmax<Rows, kLaneCols, kLaneColStride> softmax;
  ScoreMod const score_mod(params, work.batch, work.head);
  // Bias and mask of what store_p has put of a tile; or dropout. What that takes is worked out anew: registers are for
  // sums.
  auto const change_pairs = [&](int tile, bool drops) {
    WorkItem const here = params.scheduler(opaque(blockIdx.x));
    Sequence const of = sequence_of(params, here.batch);
    PairMod const pairs(params, of, here.batch, here.head);
    LanePlace const at(thread_of_col_warps<Traits>(opaque(threadIdx.x)));
    int const row = here.row0 + at.panel * kPanel + at.row_chunk * kVector,
              key = tile * B_c + first_key_of_warp<Traits>() + at.col * kVector;
    change_fours<Traits, false>(of_warp(shared.p), at, [&](float (&x)[kVector], int i, int j) {
      if (drops) {
        pairs.drop(x, params.dropout.threshold, row + row_of(i), key + key_of(j));
      } else {
        pairs.apply(x, params, of.visibility, row + row_of(i), key + key_of(j), [](int e) { return e; });
      }
    });
  };
  clear(O);

  if (tiles.size() > 0) {
    CUTE_UNROLL
    for (int i = 0; i < Stages - 1; ++i) load_item(i);
    auto const q = global_tile<float>(params.q, params.q_stride, sequence.batch, work.head, sequence.q_row0 + work.row0,
                                      visibility.n_q - work.row0, params.head_dim);
    float const scale = ScoreMod::query_scale(params);
    q.aligned ? copy_q<Traits, true>(q, shared.q, scale) : copy_q<Traits, false>(q, shared.q, scale);
  }

  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    float const* sK = next_item();
    if constexpr (Traits::ColWarps > 1) {
      Range const seen = visibility.tiles_of(work.row0, B_r, Traits::WarpKeys);
      if (!seen.contains(tile * Traits::ColWarps + first_key_of_warp<Traits>() / Traits::WarpKeys)) {
        next_item();  // on the diagonal, or at the end
        continue;
      }
    }
    gemm_qk<Traits>(S, shared.q, of_warp(sK), place, params.head_dim);

    int const first_key = tile * B_c + first_key_of_warp<Traits>() + place.col * kVector;
    score_mod.apply(S, visibility.start_pos + first_row - first_key,
                    [&](int i, int j) { return row_of(i) - key_of(j); });
    if (changes_scores(params)) {
      store_p<Traits>(S, of_warp(shared.p), place);
      change_pairs(tile, false);
      load_p<Traits>(S, of_warp(shared.p), place);
    }
    if (visibility.needs_mask(tile, work.row0, B_r, B_c)) {
      mask(S, visibility.counted_from(first_key), first_row, row_of, key_of);
    }
    softmax.update(S, rescale, 1.f);
    store_p<Traits>(S, of_warp(shared.p), place);
    if (has_dropout(params)) change_pairs(tile, true);

    float const* sV = next_item();  // its barrier also orders this warp's stores of P before its loads
    gemm_pv<Traits>(O, rescale, of_warp(shared.p), of_warp(sV), place);
  }
  if constexpr (Traits::ColWarps > 1) {
    if (!merge_col_warps<Traits>(softmax, O, shared.kv[0])) return;
  }

  bool const is_split = params.is_split();
  int64_t const result_row0 = sequence.result_row0(params, work.head, work.split);
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    Finish const finished = softmax.template finish<float>(i, is_split ? -INFINITY : score_mod.sink_log2, O);
    int const row = first_row + row_of(i);
    if (row >= visibility.n_q) continue;
    float* out = is_split ? params.o_partial + (result_row0 + row) * params.head_dim_v
                          : row_at<float>(params.o, params.o_stride, sequence.batch, sequence.q_row0 + row, work.head);
    if (place.col == 0) store_lse(params, result_row0 + row, finished);
    auto const out_of = [&](int col) { return O(i, col) * params.dropout.scale; };
    CUTE_UNROLL
    for (int j = 0; j < Traits::OutCols / kVector; ++j) {
      int const col = j * kPanel + place.col * kVector;
      if (col < params.head_dim_v) {
        *reinterpret_cast<float4*>(out + col) =
            make_float4(out_of(4 * j), out_of(4 * j + 1), out_of(4 * j + 2), out_of(4 * j + 3));
      }
    }
  }
}

/// The kernel of one tile shape, a CTA for each query tile and split.
template <int B_r, int B_c, int HeadDim, class Element, int Threads, int ColWarps = 1>
struct FMHA {
  using Traits = simt::Traits<B_r, B_c, HeadDim, Element, Threads, ColWarps>;
  static constexpr char const* kFamily = "simt";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr Kind kKind = Kind::Tiles;
  static constexpr Features kTakes = feature::kScoreMods | feature::kPairs | feature::Sink | feature::Packed |
                                     feature::kUnlike | feature::FewerKeys | feature::Pages | feature::FixedSplits |
                                     feature::UnalignedRows;
};

/// The same for calls of few query tiles and few keys, which last as long as a warp works on its rows: two warps share
/// the keys of each tile. Of more keys than three tiles have, splits come to more warps. A fixed number of splits has
/// the other kernels, since a choice by the keys would be one by the batch.
template <int B_r, int B_c, int HeadDim, class Element, int Threads>
struct FewTiles : FMHA<B_r, B_c, HeadDim, Element, Threads, 2> {
  static bool takes_shape(Params const& p) {
    return !p.fixed_splits && (p.longest_kv > 0 ? p.longest_kv : p.n_kv) <= 3 * B_c;
  }
};

}  // namespace cutlass_ext::simt

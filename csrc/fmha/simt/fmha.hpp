// FMHA on CUDA cores: exact fp32 attention for one query tile and its visible key tiles.
// Instantiated by csrc/kernels/simt_*.cu and by the tile sweep of bench/; launched through host/plan.cpp.
#pragma once

#include <cute/tensor.hpp>

#include "../copy/cp_async.hpp"
#include "../softmax.hpp"
#include "../features.hpp"
#include "../rows.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "traits.hpp"

namespace cutlass_ext::simt {

CUTE_DEVICE float4 load_vector(float const* smem) { return *reinterpret_cast<float4 const*>(smem); }
CUTE_DEVICE float component(float4 const& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

/// Copies the query tile to shared memory, transposed and times `scale`: the scale then costs no instruction a score,
/// and P at a row's maximum is exactly 1. All loads are under way before the first store waits for one.
template <class Traits, bool Aligned>
CUTE_DEVICE void copy_q(GlobalTile<float> const& src, float* sQ, float scale) {
  constexpr int RowsAPass = Traits::Threads / kPanelChunks, Passes = Traits::B_r / RowsAPass,
                Panels = Traits::HeadDim / kPanel;
  int const row0 = threadIdx.x / kPanelChunks, col0 = threadIdx.x % kPanelChunks * kVector;
  float4 v[Panels][Passes];
  CUTE_UNROLL
  for (int panel = 0; panel < Panels; ++panel) {
    CUTE_UNROLL
    for (int pass = 0; pass < Passes; ++pass) {
      int const row = pass * RowsAPass + row0, col = panel * kPanel + col0;
      float const* from = src.data + row * src.row_stride + col;
      v[panel][pass] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row < src.rows && col < src.cols) {
        v[panel][pass] =
            Aligned ? *reinterpret_cast<float4 const*>(from) : make_float4(from[0], from[1], from[2], from[3]);
      }
    }
  }
  CUTE_UNROLL
  for (int panel = 0; panel < Panels; ++panel) {
    CUTE_UNROLL
    for (int pass = 0; pass < Passes; ++pass) {
      float* to = sQ + query_store_offset<Traits::HeadDim>(pass * RowsAPass + row0, panel * kPanel + col0);
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) to[e * kPanel] = component(v[panel][pass], e) * scale;
    }
  }
}

/// The lane's rows of one column of Q, or of one key of P: a chunk for each half panel of the warp.
template <class Traits, int Columns>
CUTE_DEVICE void load_rows(float (&x)[Traits::Rows], float const* smem, int column_quad, int e, LanePlace place) {
  float const* rows = smem + rows_offset<Columns>(place, column_quad, e);
  CUTE_UNROLL
  for (int h = 0; h < Traits::Halves; ++h) {
    float4 const v = load_vector(rows + h * Traits::PanelsApart * Columns * kPanel);
    CUTE_UNROLL
    for (int f = 0; f < kVector; ++f) x[h * kVector + f] = component(v, f);
  }
}

// Both products run through the lane's outer product in a serpentine: from one FFMA to the next one factor stays, where
// the register-reuse cache holds it. An FFMA whose three sources come from one of the two register banks waits a cycle;
// that was every second one of the product written along the reduced dimension (37 TFLOP/s at head_dim 64 on an H200,
// 43 in this order). Loading an operand ahead of its use costs: its load falls between two FFMAs and ends their reuse
// (42). bench/results/tuning.md has the figures.

/// S += the part of Q K^T that chunks `turn * Traits::ChunksATurn` and on of the columns make.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void gemm_qk_turn(ScoreTensor& S, float const* sQ, float const* sK, LanePlace place, int turn) {
  CUTE_UNROLL
  for (int c = 0; c < Traits::ChunksATurn; ++c) {
    int const chunk = turn * Traits::ChunksATurn + c;
    float const* keys = sK + key_offset<Traits::B_c>(place, chunk);
    float4 k[Traits::Keys];
    CUTE_UNROLL
    for (int j = 0; j < Traits::Keys; ++j) k[j] = load_vector(keys + (j / kVector * kPanel + j % kVector) * kPanel);
    CUTE_UNROLL
    for (int e = 0; e < kVector; ++e) {
      float q[Traits::Rows];
      load_rows<Traits, Traits::HeadDim>(q, sQ, chunk, e, place);
      CUTE_UNROLL
      for (int j = 0; j < Traits::Keys; ++j) {
        CUTE_UNROLL
        for (int step = 0; step < Traits::Rows; ++step) {
          int const i = j % 2 == 0 ? step : Traits::Rows - 1 - step;
          S(i, j) = fmaf(component(k[j], e), q[i], S(i, j));
        }
      }
    }
  }
}

/// S = Q K^T over the first `head_dim` columns, up to whole turns: the copies have zeroed what lies past head_dim.
/// Where registers allow, each turn is summed apart, as in gemm_pv.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void gemm_qk(ScoreTensor& S, float const* sQ, float const* sK, LanePlace place, int head_dim) {
  constexpr int Columns = Traits::ChunksATurn * kVector;
  clear(S);
  CUTE_NO_UNROLL
  for (int turn = 0; turn < (head_dim + Columns - 1) / Columns; ++turn) {
    if constexpr (Traits::SumTurnsApart) {
      auto T = make_tensor_like(S);
      clear(T);
      gemm_qk_turn<Traits>(T, sQ, sK, place, turn);
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) += T(e);
    } else {
      gemm_qk_turn<Traits>(S, sQ, sK, place, turn);
    }
  }
}

/// Puts the lane's part of P, transposed, where its warp reads it back.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void store_p(ScoreTensor const& P, float* sP, LanePlace place) {
  float* rows = sP + rows_offset<Traits::B_c>(place, place.col, 0);
  CUTE_UNROLL
  for (int h = 0; h < Traits::Halves; ++h) {
    CUTE_UNROLL
    for (int j = 0; j < Traits::Keys; ++j) {
      int const i = h * kVector;
      *reinterpret_cast<float4*>(rows + (h * Traits::PanelsApart * Traits::B_c + j / kVector * kPanel + j % kVector) *
                                            kPanel) = make_float4(P(i, j), P(i + 1, j), P(i + 2, j), P(i + 3, j));
    }
  }
}

/// O = rescale O + P V. The tile's product is summed apart and added once: the rounding error of O then grows with the
/// number of tiles and not of keys (2.4 times less at 2000 keys), and the addition rescales for nothing.
/// `Traits::GroupCols` columns at a time, as registers allow.
template <class Traits, class OutTensor, class RowTensor>
CUTE_DEVICE void gemm_pv(OutTensor& O, RowTensor const& rescale, float const* sP, float const* sV, LanePlace place) {
  constexpr int QuadsATurn = 4, Cols = Traits::GroupCols;
  CUTE_UNROLL
  for (int group = 0; group < Traits::OutCols / Cols; ++group) {
    Tensor T = make_tensor<float>(Shape<Int<Traits::Rows>, Int<Cols>>{});
    clear(T);
    CUTE_NO_UNROLL
    for (int turn = 0; turn < Traits::B_c / (QuadsATurn * 4); ++turn) {
      CUTE_UNROLL
      for (int c = 0; c < QuadsATurn; ++c) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          int const quad = turn * QuadsATurn + c;
          float p[Traits::Rows], v[Cols];
          load_rows<Traits, Traits::B_c>(p, sP, quad, e, place);
          float const* values = sV + value_offset(place, quad, e) + group * (Cols / kVector) * Traits::B_c * kPanel;
          CUTE_UNROLL
          for (int j = 0; j < Cols / kVector; ++j) {
            float4 const x = load_vector(values + j * Traits::B_c * kPanel);
            CUTE_UNROLL
            for (int f = 0; f < kVector; ++f) v[j * kVector + f] = component(x, f);
          }
          CUTE_UNROLL
          for (int i = 0; i < Traits::Rows; ++i) {
            CUTE_UNROLL
            for (int step = 0; step < Cols; ++step) {
              int const j = i % 2 == 0 ? step : Cols - 1 - step;
              T(i, j) = fmaf(p[i], v[j], T(i, j));
            }
          }
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < Traits::Rows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Cols; ++j) O(i, group * Cols + j) = fmaf(O(i, group * Cols + j), rescale(i), T(i, j));
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::MinCtas) fmha_kernel(__grid_constant__ Params const params) {
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Rows = Traits::Rows, Stages = Traits::Stages;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

  WorkItem const work = params.scheduler(blockIdx.x);
  Sequence const sequence = device_sequence_of(params, work.batch);
  Visibility const& visibility = sequence.visibility;
  if (work.row0 >= visibility.n_q) return;  // packed: the launch counts the tiles of the longest sequence for each
  Range const tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params.scheduler.splits(), work.split);
  int const head_kv = params.heads_per_kv.div(work.head);
  LanePlace const place(threadIdx.x);
  int const first_row = work.row0 + place.panel * kPanel + place.row_chunk * kVector;
  // Rows and keys of the lane, counted from its first.
  auto row_of = [](int i) { return (i / kVector) * Traits::PanelsApart * kPanel + i % kVector; };
  auto key_of = [](int j) { return (j / kVector) * kPanel + j % kVector; };

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
      int const* const table = paged ? params.pages_of(params.scheduler(anew(blockIdx.x)).batch) : nullptr;
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
    gemm_qk<Traits>(S, shared.q, next_item(), place, params.head_dim);

    int const first_key = tile * B_c + place.col * kVector;
    score_mod.apply(S, visibility.start_pos + first_row - first_key,
                    [&](int i, int j) { return row_of(i) - key_of(j); });
    if (visibility.needs_mask(tile, work.row0, B_r, B_c)) {
      mask(S, visibility.counted_from(first_key), first_row, row_of, key_of);
    }
    softmax.update(S, rescale, 1.f);
    store_p<Traits>(S, shared.p, place);

    float const* sV = next_item();  // its barrier also orders this warp's stores of P before its loads
    gemm_pv<Traits>(O, rescale, shared.p, sV, place);
  }

  bool const is_split = params.is_split();
  int64_t const result_row0 = sequence.result_row0(params, work.head, work.split);
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    Finish const finished = softmax.template finish<float>(i, is_split ? -INFINITY : score_mod.sink_log2, O);
    int const row = first_row + row_of(i);
    if (row >= visibility.n_q) continue;
    float* out = is_split ? params.o_partial + (result_row0 + row) * params.head_dim_v
                          : static_cast<float*>(params.o) + sequence.batch * params.o_stride.batch +
                                int64_t(sequence.q_row0 + row) * params.o_stride.row + work.head * params.o_stride.head;
    if (place.col == 0) store_lse(params, result_row0 + row, finished);
    CUTE_UNROLL
    for (int j = 0; j < Traits::OutCols / kVector; ++j) {
      int const col = j * kPanel + place.col * kVector;
      if (col < params.head_dim_v) {
        *reinterpret_cast<float4*>(out + col) =
            make_float4(O(i, 4 * j), O(i, 4 * j + 1), O(i, 4 * j + 2), O(i, 4 * j + 3));
      }
    }
  }
}

/// The kernel of one tile shape, a CTA for each query tile and split.
template <int B_r, int B_c, int HeadDim, class Element, int Threads>
struct FMHA {
  using Traits = simt::Traits<B_r, B_c, HeadDim, Element, Threads>;
  static constexpr char const* kFamily = "simt";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr Kind kKind = Kind::Tiles;
  static constexpr Features kTakes = feature::kScoreMods | feature::Sink | feature::Packed | feature::kUnlike |
                                     feature::FewerKeys | feature::Pages | feature::FixedSplits |
                                     feature::UnalignedRows;
};

}  // namespace cutlass_ext::simt

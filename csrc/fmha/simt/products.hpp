// What a CTA of CUDA cores does with tiles: the copy of the rows that it owns, and its two kinds of products. Called by
// fmha.hpp and by the backward kernels (backward/simt.hpp), whose words these are: a CTA owns the rows of Q and walks
// over keys. `Traits` says how many rows and columns a lane has.
#pragma once

#include "../copy/cp_async.hpp"
#include "../cute_tensor.hpp"
#include "traits.hpp"

namespace cutlass_ext::simt {

CUTE_DEVICE float4 load_vector(float const* smem) { return *reinterpret_cast<float4 const*>(smem); }
CUTE_DEVICE float component(float4 const& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

/// Copies the query tile to shared memory, transposed and times `scale`: the scale then costs no instruction a score,
/// and P at a row's maximum is exactly 1. All loads are under way before the first store waits for one.
template <class Traits, bool Aligned, class Tile>
CUTE_DEVICE void copy_q(Tile const& src, float* sQ, float scale) {
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
      if (col < src.cols && src.has(row)) {
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

/// S += Q K^T over the first `head_dim` columns, up to whole turns: the copies have zeroed what lies past head_dim.
/// Where registers allow, each turn is summed apart, as in gemm_pv.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void add_qk(ScoreTensor& S, float const* sQ, float const* sK, LanePlace place, int head_dim) {
  constexpr int Columns = Traits::ChunksATurn * kVector;
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

/// S = Q K^T.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void gemm_qk(ScoreTensor& S, float const* sQ, float const* sK, LanePlace place, int head_dim) {
  clear(S);
  add_qk<Traits>(S, sQ, sK, place, head_dim);
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

/// The inverse: takes back what store_p has put.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void load_p(ScoreTensor& P, float const* sP, LanePlace place) {
  float const* rows = sP + rows_offset<Traits::B_c>(place, place.col, 0);
  CUTE_UNROLL
  for (int h = 0; h < Traits::Halves; ++h) {
    CUTE_UNROLL
    for (int j = 0; j < Traits::Keys; ++j) {
      float4 const four =
          load_vector(rows + (h * Traits::PanelsApart * Traits::B_c + j / kVector * kPanel + j % kVector) * kPanel);
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) P(h * kVector + e, j) = component(four, e);
    }
  }
}

/// Changes what store_p has put four neighbouring columns of a row at a time, or four rows of a column where it goes
/// `Across`: `change(scores, row, column)` of the first. Unrolled, the changes would spill what sums are in registers.
template <class Traits, bool Across, class Change>
CUTE_DEVICE void change_fours(float* sP, LanePlace place, Change const& change) {
  constexpr int kStep = Across ? 1 : kPanel;
  float* rows = sP + rows_offset<Traits::B_c>(place, place.col, 0);
  CUTE_NO_UNROLL
  for (int four = 0; four < Traits::Rows * Traits::Keys / kVector; ++four) {
    int const i = Across ? four % Traits::Halves * kVector : four % Traits::Rows,
              j = Across ? four / Traits::Halves : four / Traits::Rows * kVector;
    float* const at = rows +
                      (i / kVector * Traits::PanelsApart * Traits::B_c + j / kVector * kPanel + j % kVector) * kPanel +
                      i % kVector;
    float x[kVector];
    CUTE_UNROLL
    for (int e = 0; e < kVector; ++e) x[e] = at[e * kStep];
    change(x, i, j);
    CUTE_UNROLL
    for (int e = 0; e < kVector; ++e) at[e * kStep] = x[e];
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
    for (int turn = 0; turn < Traits::ProductKeys / (QuadsATurn * 4); ++turn) {
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

}  // namespace cutlass_ext::simt

// FMHA on mma.sync tensor cores: fp16 and bf16 attention for one query tile and its visible key tiles, fp32
// accumulation and softmax. FlashAttention-2's division of work (arXiv:2307.08691, section 3.3): warps share out the
// query rows, and P passes from the accumulator of the first product to the A operand of the second in registers.
// Instantiated by csrc/kernels/sm80_*.cu; launched through dispatch.cu.
#pragma once

#include <cute/tensor.hpp>

#include "../copy_tile.hpp"
#include "../launch.hpp"
#include "../online_softmax.hpp"
#include "../params.hpp"
#include "../scheduler.hpp"
#include "../score_mod.hpp"
#include "../sequence.hpp"
#include "mma.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm80 {

/// S = Q K^T of the warp's rows, over all columns of the tile: the copies have zeroed those past head_dim.
template <class Traits>
CUTE_DEVICE void gemm_qk(float (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], typename Traits::Element const* sQ,
                         typename Traits::Element const* sK, int warp_row, int lane) {
  using Element = typename Traits::Element;
  CUTE_UNROLL
  for (int a = 0; a < Traits::RowAtoms; ++a) {
    CUTE_UNROLL
    for (int n = 0; n < Traits::KeyAtoms; ++n) S[a][n][0] = S[a][n][1] = S[a][n][2] = S[a][n][3] = 0.f;
  }
  CUTE_UNROLL
  for (int k = 0; k < Traits::HeadDim / kAtom; ++k) {
    uint32_t q[Traits::RowAtoms][4];
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      load_matrices(q[a], sQ + chunk_offset<Traits::B_r>(warp_row + a * kAtom + lane % 16, 2 * k + lane / 16));
    }
    CUTE_UNROLL
    for (int n = 0; n < Traits::KeyAtoms; n += 2) {
      uint32_t keys[4];  // two atoms of 8 keys, both halves of the 16 columns
      load_matrices(keys, sK + chunk_offset<Traits::B_c>(n * kAtomN + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a) {
        mma<Element>(S[a][n], q[a], keys[0], keys[1]);
        mma<Element>(S[a][n + 1], q[a], keys[2], keys[3]);
      }
    }
  }
}

/// O = rescale O + P V, P from the accumulators of Q K^T.
template <class Traits, class RowTensor>
CUTE_DEVICE void gemm_pv(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                         float const (&P)[Traits::RowAtoms][Traits::KeyAtoms][4], RowTensor const& rescale,
                         typename Traits::Element const* sV, int lane) {
  using Element = typename Traits::Element;
  bool moved = false;
  CUTE_UNROLL
  for (int i = 0; i < Traits::Rows; ++i) moved |= rescale(i) != 1.f;
  if (__any_sync(0xffffffffu, moved)) {  // the maxima settle after a few tiles
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      CUTE_UNROLL
      for (int n = 0; n < Traits::OutAtoms; ++n) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) O[a][n][e] *= rescale(2 * a + e / 2);
      }
    }
  }
  CUTE_UNROLL
  for (int k = 0; k < Traits::B_c / kAtom; ++k) {
    uint32_t p[Traits::RowAtoms][4];
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      float const(&left)[4] = P[a][2 * k], (&right)[4] = P[a][2 * k + 1];
      p[a][0] = pack<Element>(left[0], left[1]);
      p[a][1] = pack<Element>(left[2], left[3]);
      p[a][2] = pack<Element>(right[0], right[1]);
      p[a][3] = pack<Element>(right[2], right[3]);
    }
    CUTE_UNROLL
    for (int n = 0; n < Traits::OutAtoms; n += 2) {
      uint32_t values[4];  // both halves of the 16 keys, two atoms of 8 columns
      load_matrices_transposed(values, sV + chunk_offset<Traits::B_c>(k * kAtom + lane % 16, n + lane / 16));
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a) {
        mma<Element>(O[a][n], p[a], values[0], values[1]);
        mma<Element>(O[a][n + 1], p[a], values[2], values[3]);
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads) fmha_kernel(__grid_constant__ ForwardParams const params) {
  using Element = typename Traits::Element;
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Rows = Traits::Rows;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

  WorkItem const work = scheduler_of(params, B_r)(blockIdx.x, B_r);
  Sequence const sequence = device_sequence_of(params, work.batch);
  Visibility const& visibility = sequence.visibility;
  if (work.row0 >= visibility.n_q) return;  // packed: the launch counts the tiles of the longest sequence for each
  Range const tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params.num_splits, work.split);
  int const head_kv = work.head / (params.heads_q / params.heads_kv);
  int const lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Traits::RowAtoms * kAtom;
  // Rows and keys of the thread, counted from its first: an accumulator holds two rows 8 apart and two columns.
  int const first_row = work.row0 + warp_row + lane / 4;
  auto row_of = [](int i) { return i / 2 * kAtom + i % 2 * 8; };
  auto key_of = [](int j) { return j / 2 * kAtomN + j % 2; };

  auto moved = [](int row) { return row; };
  // Starts the copy of key tile `tile` of K or V. One of them is under way while the other is multiplied.
  auto load = [&](void const* base, Strides const& stride, int tile, int cols, Element* dst) {
    int const first_key = tile * B_c;
    copy_tile<B_c, Traits::HeadDim, Traits::Threads>(
        global_tile<Element>(base, stride, sequence.batch, head_kv, sequence.k_row0 + first_key,
                             visibility.len_kv - first_key, cols),
        dst, moved);
    cp_async_fence();
  };
  // Until the copy under way has landed and every warp is done with the tile before it.
  auto wait = [] {
    cp_async_wait<0>();
    __syncthreads();
  };

  float O[Traits::RowAtoms][Traits::OutAtoms][4] = {};
  float scores[Traits::RowAtoms][Traits::KeyAtoms][4];
  // The thread's rows and columns of the accumulators.
  Tensor S = make_tensor(make_rmem_ptr(&scores[0][0][0]),
                         make_layout(make_shape(Shape<_2, Int<Traits::RowAtoms>>{}, Shape<_2, Int<Traits::KeyAtoms>>{}),
                                     make_stride(Stride<_2, Int<4 * Traits::KeyAtoms>>{}, Stride<_1, _4>{})));
  Tensor out =
      make_tensor(make_rmem_ptr(&O[0][0][0]),
                  make_layout(make_shape(Shape<_2, Int<Traits::RowAtoms>>{}, Shape<_2, Int<Traits::OutAtoms>>{}),
                              make_stride(Stride<_2, Int<4 * Traits::OutAtoms>>{}, Stride<_1, _4>{})));
  Tensor rescale = make_tensor<float>(Shape<Int<Rows>>{});
  OnlineSoftmax<Rows, 4, 1> softmax;
  ScoreMod const score_mod(params, work.batch, work.head);
  float const query_scale = ScoreMod::query_scale(params);

  if (tiles.size() > 0) {
    auto const q = global_tile<Element>(params.q, params.q_stride, sequence.batch, work.head,
                                        sequence.q_row0 + work.row0, visibility.n_q - work.row0, params.head_dim);
    copy_tile<B_r, Traits::HeadDim, Traits::Threads>(q, shared.q, moved);
    load(params.k, params.k_stride, tiles.end - 1, params.head_dim, shared.k);
  }

  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    wait();
    load(params.v, params.v_stride, tile, params.head_dim_v, shared.v);
    gemm_qk<Traits>(scores, shared.q, shared.k, warp_row, lane);

    int const first_key = tile * B_c + lane % 4 * 2;
    if (score_mod.active()) {
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
      score_mod.apply(S, visibility.start_pos + first_row - first_key,
                      [&](int i, int j) { return row_of(i) - key_of(j); });
    }
    if (visibility.needs_mask(tile, work.row0, B_r, B_c))
      mask(S, visibility.counted_from(first_key), first_row, row_of, key_of);
    softmax.update(S, rescale, score_mod.active() ? 1.f : query_scale);

    wait();
    if (tile > tiles.begin) load(params.k, params.k_stride, tile - 1, params.head_dim, shared.k);
    gemm_pv<Traits>(O, scores, rescale, shared.v, lane);
  }

  // O leaves through the warp's own rows of the query tile, which nobody reads any more, so that it is written 16 bytes
  // at a time.
  bool const is_split = params.num_splits > 1;
  // Read again: rows kept since the beginning cost the main loop its last register (a spill at 128 x 48, head_dim 128).
  Sequence const stored = device_sequence_of(params, work.batch);
  int64_t const result_row0 = stored.result_row0(params, work.head, work.split);
  float* lse = (is_split ? params.lse_partial : params.lse) + result_row0;
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    float const row_lse = softmax.finish(i, out, is_split ? -INFINITY : score_mod.sink_log2);
    int const row = first_row + row_of(i);
    if (lane % 4 == 0 && row < visibility.n_q) lse[row] = row_lse;
    float* partial = params.o_partial + (result_row0 + row) * params.head_dim_v;
    CUTE_UNROLL
    for (int n = 0; n < Traits::OutAtoms; ++n) {
      int const col = n * kAtomN + lane % 4 * 2;
      if (!is_split) {
        *reinterpret_cast<uint32_t*>(shared.q + chunk_offset<B_r>(row - work.row0, n) + lane % 4 * 2) =
            pack<Element>(out(i, 2 * n), out(i, 2 * n + 1));
      } else if (row < visibility.n_q && col < params.head_dim_v) {
        *reinterpret_cast<float2*>(partial + col) = make_float2(out(i, 2 * n), out(i, 2 * n + 1));
      }
    }
  }
  if (is_split) return;
  __syncwarp();
  Element* o = static_cast<Element*>(params.o) + stored.batch * params.o_stride.batch +
               int64_t(stored.q_row0 + work.row0) * params.o_stride.row + work.head * params.o_stride.head;
  CUTE_UNROLL
  for (int panel = 0; panel < Traits::HeadDim / kPanel; ++panel) {
    CUTE_UNROLL
    for (int pass = 0; pass < Traits::RowAtoms * kAtom / 4; ++pass) {
      int const row = warp_row + pass * 4 + lane / 8, chunk = panel * 8 + lane % 8;
      if (work.row0 + row < visibility.n_q && chunk * kVector < params.head_dim_v) {
        *reinterpret_cast<uint4*>(o + row * params.o_stride.row + chunk * kVector) =
            *reinterpret_cast<uint4 const*>(shared.q + chunk_offset<B_r>(row, chunk));
      }
    }
  }
}

/// The kernel of one tile shape: `FMHA<...>{}(params, stream)` launches it for every query tile and split of `params`.
template <int B_r, int B_c, int HeadDim, class Element, int Threads>
struct FMHA {
  using Traits = sm80::Traits<B_r, B_c, HeadDim, Element, Threads>;
  static constexpr char const* kFamily = "sm80";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr bool kScoreMods = true;
  static constexpr char const* (*refuses)(ForwardParams const&) = nullptr;

  cudaError_t operator()(ForwardParams const& params, cudaStream_t stream) const {
    return launch_work_items<FMHA>(params, stream);
  }
};

}  // namespace cutlass_ext::sm80

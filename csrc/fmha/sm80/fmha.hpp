// FMHA on mma.sync tensor cores: fp16 and bf16 attention for one query tile and its visible key tiles, fp32
// accumulation and softmax. FlashAttention-2's division of work (arXiv:2307.08691, section 3.3): warps share out the
// query rows, and P passes from the accumulator of the first product to the A operand of the second in registers. The
// loop over tiles without masks is one basic block, so that the compiler hides the exponentials behind the products.
// Instantiated by csrc/kernels/sm80_*.cu; launched through dispatch.cu.
#pragma once

#include <cute/tensor.hpp>

#include "../copy/cp_async.hpp"
#include "../softmax.hpp"
#include "../operand.hpp"
#include "../features.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../mma/mma_sync.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm80 {

constexpr int kMaxSlack = 8;  // log2: P stays below 256, which fp16 holds with room for rounding to even

/// S = Q K^T of the warp's rows, over all columns of the tile: the copies have zeroed those past head_dim. `queries(q,
/// k)` gives 16 columns of Q; `meanwhile` is issued behind the first products.
template <class Traits, class Queries, class Meanwhile>
CUTE_DEVICE void gemm_qk(float (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], Queries const& queries, uint32_t keys_at,
                         Meanwhile const& meanwhile) {
  using Element = typename Traits::Element;
  CUTE_UNROLL
  for (int a = 0; a < Traits::RowAtoms; ++a) {
    CUTE_UNROLL
    for (int n = 0; n < Traits::KeyAtoms; ++n) S[a][n][0] = S[a][n][1] = S[a][n][2] = S[a][n][3] = 0.f;
  }
  auto multiply = [&](uint32_t const(&q)[Traits::RowAtoms][4], int k, int n) {
    uint32_t keys[4];  // two atoms of 8 keys, both halves of the 16 columns
    load_matrices(keys, chunk_at<Traits::B_c>(keys_at, n * kAtomN, 2 * k));
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      mma<Element>(S[a][n], q[a], keys[0], keys[1]);
      mma<Element>(S[a][n + 1], q[a], keys[2], keys[3]);
    }
  };
  // The last steps go keys first, so that the maxima of some scores are taken while others are still being summed.
  constexpr int Steps = Traits::HeadDim / kAtom, Last = Traits::QueriesInRegisters ? Steps : 2;
  CUTE_UNROLL
  for (int k = 0; k < Steps - Last; ++k) {
    uint32_t q[Traits::RowAtoms][4];
    queries(q, k);
    CUTE_UNROLL
    for (int n = 0; n < Traits::KeyAtoms; n += 2) multiply(q, k, n);
    if (k == 0) meanwhile();
  }
  uint32_t q[Last][Traits::RowAtoms][4];
  CUTE_UNROLL
  for (int k = 0; k < Last; ++k) queries(q[k], Steps - Last + k);
  CUTE_UNROLL
  for (int n = 0; n < Traits::KeyAtoms; n += 2) {
    CUTE_UNROLL
    for (int k = 0; k < Last; ++k) multiply(q[k], Steps - Last + k, n);
    if (Last == Steps && n == 0) meanwhile();
  }
}

/// O += P V over 16 keys, the first of which `values_at` points to. Loads come before products: the other order took 4%
/// more at head_dim 128.
template <class Traits>
CUTE_DEVICE void gemm_pv_step(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                              uint32_t const (&p)[Traits::RowAtoms][4], uint32_t values_at) {
  uint32_t values[Traits::OutAtoms / 2][4];  // both halves of the 16 keys, two atoms of 8 columns
  CUTE_UNROLL
  for (int n = 0; n < Traits::OutAtoms; n += 2)
    load_matrices_transposed(values[n / 2], chunk_at<Traits::B_c>(values_at, 0, n));
  CUTE_UNROLL
  for (int n = 0; n < Traits::OutAtoms; n += 2) {
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      mma<typename Traits::Element>(O[a][n], p[a], values[n / 2][0], values[n / 2][1]);
      mma<typename Traits::Element>(O[a][n + 1], p[a], values[n / 2][2], values[n / 2][3]);
    }
  }
}

/// P of 16 keys as an operand: `p_of(i, s)` of a score of row i.
template <class Traits, class POf>
CUTE_DEVICE void operand_p(uint32_t (&p)[Traits::RowAtoms][4], float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4],
                           int k, POf const& p_of) {
  CUTE_UNROLL
  for (int a = 0; a < Traits::RowAtoms; ++a) {
    CUTE_UNROLL
    for (int x = 0; x < 4; ++x) {
      float const* const s = &S[a][2 * k + x / 2][x % 2 * 2];
      float const left = p_of(2 * a + x % 2, s[0]), right = p_of(2 * a + x % 2, s[1]);
      put_operand<typename Traits::Element>(p[a], x % 2, x / 2 * 2, left, right);
    }
  }
}

/// O += P V: P of 16 keys is made ahead of the 16 that are multiplied.
template <class Traits, class POf>
CUTE_DEVICE void gemm_pv(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                         float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], POf const& p_of, uint32_t values_at) {
  constexpr int Steps = Traits::B_c / kAtom;
  uint32_t p[Steps][Traits::RowAtoms][4];
  operand_p<Traits>(p[0], S, 0, p_of);
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    if (k + 1 < Steps) operand_p<Traits>(p[k + 1], S, k + 1, p_of);
    gemm_pv_step<Traits>(O, p[k], chunk_at<Traits::B_c>(values_at, k * kAtom, 0));
  }
}

/// Until both warps that share the rows have come here: what they wrote to shared memory before is there.
template <class Traits>
CUTE_DEVICE void meet_sharer() {
  int const barrier = 1 + threadIdx.x / 32 / Traits::Sharers;  // 0 is __syncthreads
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * Traits::Sharers) : "memory");
}

/// The same where two warps share the rows: each multiplies P of its own keys first, then that of the other's, which
/// comes through shared memory. `own_at` and `other_at` point to the first 16 keys of V of either; `p_to` and `p_from`
/// to the lane's place in what this warp writes of P, and to its rows of the other's fragments.
template <class Traits, class POf>
CUTE_DEVICE void gemm_pv_shared(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                                float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], POf const& p_of,
                                uint32_t own_at, uint32_t other_at, uint32_t p_to, uint32_t p_from) {
  constexpr int Steps = Traits::WarpKeys / kAtom;
  uint32_t p[Steps][Traits::RowAtoms][4];
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    operand_p<Traits>(p[k], S, k, p_of);
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      CUTE_UNROLL
      for (int x = 0; x < 4; ++x)
        store_shared(chunk_at<Traits::B_r>(p_to, a * kAtom + x % 2 * 8, 2 * k + x / 2), p[k][a][x]);
    }
  }
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) gemm_pv_step<Traits>(O, p[k], chunk_at<Traits::B_c>(own_at, k * kAtom, 0));
  meet_sharer<Traits>();
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) load_matrices(p[k][a], chunk_at<Traits::B_r>(p_from, a * kAtom, 2 * k));
    gemm_pv_step<Traits>(O, p[k], chunk_at<Traits::B_c>(other_at, k * kAtom, 0));
  }
}

/// Row i of a thread, counted from its first: an accumulator holds two rows 8 apart.
CUTE_HOST_DEVICE constexpr int row_of_accumulator(int i) { return i / 2 * kAtom + i % 2 * 8; }

/// Writes the warp's part of O and lse, or of a split's.
template <class Traits, class OutTensor, class Softmax>
CUTE_DEVICE void store(Params const& params, typename Traits::SharedStorage& shared, WorkItem const& work,
                       OutTensor& out, Softmax& softmax, int warp_row, int part, int lane) {
  using Element = typename Traits::Element;
  constexpr int B_r = Traits::B_r, Rows = Traits::Rows;
  bool const is_split = params.num_splits > 1;
  Sequence const sequence = shared.sequence;
  int const rows = sequence.visibility.n_q - work.row0, first_column = part * Traits::WarpColumns;
  int64_t const result_row0 = sequence.result_row0(params, work.head, work.split) + work.row0;
  float const sink_log2 = is_split ? -INFINITY : shared.score_mod.sink_log2;
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    Finish const finished = softmax.template finish<Element>(i, sink_log2, out);
    int const row = warp_row + row_of_accumulator(i) + lane / 4;
    if (lane % 4 == 0 && part == 0 && row < rows) store_lse(params, result_row0 + row, finished);
  }
  if (is_split) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      int const row = warp_row + row_of_accumulator(i) + lane / 4;
      float* const partial = params.o_partial + (result_row0 + row) * params.head_dim_v;
      CUTE_UNROLL
      for (int n = 0; n < Traits::OutAtoms; ++n) {
        int const col = first_column + n * kAtomN + lane % 4 * 2;
        if (row < rows && col < params.head_dim_v)
          *reinterpret_cast<float2*>(partial + col) = make_float2(out(i, 2 * n), out(i, 2 * n + 1));
      }
    }
    return;
  }
  // O leaves through the warp's own part of the query tile, which nobody reads any more, so that it is written 16 bytes
  // at a time.
  uint32_t const o_at = cast_smem_ptr_to_uint(shared.q);
  uint32_t const o_to = o_at + 2 * (chunk_offset<B_r>(warp_row + lane / 4, first_column / kVector) + lane % 4 * 2);
  __syncwarp();  // where no key is seen, Q was loaded a moment ago
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int n = 0; n < Traits::OutAtoms; ++n)
      store_shared(chunk_at<B_r>(o_to, row_of_accumulator(i), n), pack<Element>(out(i, 2 * n), out(i, 2 * n + 1)));
  }
  __syncwarp();
  int const row = warp_row + lane / 8, chunk = first_column / kVector + lane % 8;
  Element* to = static_cast<Element*>(params.o) + sequence.batch * params.o_stride.batch +
                int64_t(sequence.q_row0 + work.row0 + row) * params.o_stride.row + work.head * params.o_stride.head +
                chunk * kVector;
  uint32_t const o_from[2] = {o_at + 2 * chunk_offset<B_r>(row, chunk), o_at + 2 * chunk_offset<B_r>(row + 4, chunk)};
  CUTE_UNROLL
  for (int pass = 0; pass < Traits::RowAtoms * kAtom / 4; ++pass, to += 4 * params.o_stride.row) {
    CUTE_UNROLL
    for (int panel = 0; panel < Traits::WarpColumns / kPanel; ++panel) {
      if (row + pass * 4 < rows && (panel * 8 + chunk) * kVector < params.head_dim_v)
        *reinterpret_cast<uint4*>(to + panel * kPanel) =
            load_shared(o_from[pass % 2] + (panel * B_r + pass / 2 * 8) * kPanel * uint32_t(sizeof(Element)));
    }
  }
}

/// What a tile of keys asks of the main loop.
enum class KeyTile {
  Plain,   // nothing
  Masked,  // element masks
  Any,     // perhaps masks, score modifications, copies of single elements
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads) fmha_kernel(__grid_constant__ Params const params) {
  using Element = typename Traits::Element;
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Rows = Traits::Rows, Threads = Traits::Threads;
  constexpr uint32_t TileBytes = B_c * Traits::HeadDim * sizeof(Element);
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

  WorkItem const work = params.scheduler(blockIdx.x);
  int const lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 / Traits::Sharers * Traits::RowAtoms * kAtom;
  int const part = threadIdx.x / 32 % Traits::Sharers;  // of the keys of a tile, and of the columns of O
  bool const score_mods = params.softcap > 0.f || params.alibi_slopes;
  bool const aligned = is_aligned<Element>(params.k, params.k_stride) && is_aligned<Element>(params.v, params.v_stride);
  auto moved = [](int row) { return row; };

  Range tiles, unmasked;
  // The thread's part of the tile of K and of V to be copied next.
  Element const *keys_next, *values_next;
  {
    Sequence const sequence = sequence_of(params, work.batch);
    Visibility const& visibility = sequence.visibility;
    if (work.row0 >= visibility.n_q) return;  // packed: the launch counts the tiles of the longest sequence for each
    tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params.scheduler.splits(), work.split);
    unmasked = visibility.unmasked_tiles_of(work.row0, B_r, B_c);
    int const head_kv = params.heads_per_kv.div(work.head), last_key = (tiles.end - 1) * B_c;
    auto const q = global_tile<Element>(params.q, params.q_stride, sequence.batch, work.head,
                                        sequence.q_row0 + work.row0, visibility.n_q - work.row0, params.head_dim);
    auto const k = global_tile<Element>(params.k, params.k_stride, sequence.batch, head_kv, sequence.k_row0 + last_key,
                                        visibility.len_kv - last_key, params.head_dim);
    auto const v = global_tile<Element>(params.v, params.v_stride, sequence.batch, head_kv, sequence.k_row0 + last_key,
                                        visibility.len_kv - last_key, params.head_dim_v);
    if (tiles.size() > 0) {
      copy_tile<B_r, Traits::HeadDim, Threads>(q, shared.q, moved);
      copy_tile<B_c, Traits::HeadDim, Threads>(k, shared.k[0], moved);
      if (Traits::Stages == 2) copy_tile<B_c, Traits::HeadDim, Threads>(v, shared.v[0], moved);
    }
    keys_next = k.data + (int(threadIdx.x / 8) - B_c) * k.row_stride + threadIdx.x % 8 * kVector;
    values_next =
        v.data + (int(threadIdx.x / 8) - (Traits::Stages == 2 ? B_c : 0)) * v.row_stride + threadIdx.x % 8 * kVector;
    if (threadIdx.x == 0) {
      shared.sequence = sequence;
      shared.score_mod = ScoreMod(params, work.batch, work.head);
      shared.keys = k.data - last_key * k.row_stride;
      shared.values = v.data - last_key * v.row_stride;
    }
  }
  // Until what is under way has landed and every warp is done with the tile before it.
  auto wait = [] {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  };

  // Keys of the thread, counted from its first: an accumulator holds two columns.
  int const first_row = work.row0 + warp_row + lane / 4;
  auto row_of = [](int i) { return row_of_accumulator(i); };
  auto key_of = [](int j) { return j / 2 * kAtomN + j % 2; };
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
  Tensor base = make_tensor<float>(Shape<Int<Rows>>{});
  OnlineSoftmax<Rows, 4, 1, kMaxSlack> softmax;
  float const query_scale = ScoreMod::query_scale(params);

  // Where the lane's rows of fragments begin, and the thread's part of a tile of K.
  uint32_t const queries_at =
      cast_smem_ptr_to_uint(shared.q) + 2 * chunk_offset<B_r>(warp_row + lane % kAtom, lane / kAtom);
  uint32_t const keys_at = cast_smem_ptr_to_uint(shared.k) +
                           2 * chunk_offset<B_c>(part * Traits::WarpKeys + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t const values_at = cast_smem_ptr_to_uint(shared.v) +
                             2 * chunk_offset<B_c>(lane % kAtom, part * (Traits::WarpColumns / kVector) + lane / kAtom);
  uint32_t const copy_at = cast_smem_ptr_to_uint(shared.k) + 2 * chunk_offset<B_c>(threadIdx.x / 8, threadIdx.x % 8);
  uint32_t stage = 0;

  wait();
  auto load_queries = [&](uint32_t (&q)[Traits::RowAtoms][4], int k) {
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) load_matrices(q[a], chunk_at<B_r>(queries_at, a * kAtom, 2 * k));
  };
  uint32_t held[Traits::HeadDim / kAtom][Traits::RowAtoms][4];  // Q, where registers suffice
  if constexpr (Traits::QueriesInRegisters) {
    CUTE_UNROLL
    for (int k = 0; k < Traits::HeadDim / kAtom; ++k) load_queries(held[k], k);
  }
  auto queries = [&](uint32_t (&q)[Traits::RowAtoms][4], int k) {
    if constexpr (Traits::QueriesInRegisters) {
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a) {
        CUTE_UNROLL
        for (int x = 0; x < 4; ++x) q[a][x] = held[k][a][x];
      }
    } else {
      load_queries(q, k);
    }
  };

  // Between two warps that share rows: a number a row, and P.
  auto publish = [&](float const(&x)[Rows]) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      if (lane % 4 == 0) shared.statistics[part][warp_row + row_of(i) + lane / 4] = x[i];
    }
    meet_sharer<Traits>();
  };
  auto of_sharer = [&](int i) { return shared.statistics[1 - part][warp_row + row_of(i) + lane / 4]; };
  constexpr int HalfChunks = Traits::WarpKeys / kVector;
  uint32_t const p_to =
      cast_smem_ptr_to_uint(shared.p) + 2 * (chunk_offset<B_r>(warp_row + lane / 4, part * HalfChunks) + lane % 4 * 2);
  uint32_t const p_from = cast_smem_ptr_to_uint(shared.p) +
                          2 * chunk_offset<B_r>(warp_row + lane % kAtom, (1 - part) * HalfChunks + lane / kAtom);

  // Tile `tile` of K or V where rows may be missing or not begin at multiples of 16 bytes.
  auto copy_checked = [&](Element const* data, Strides const& stride, int cols, int tile, Element* to) {
    copy_tile<B_c, Traits::HeadDim, Threads>(
        GlobalTile<Element>{data + int64_t(tile) * B_c * stride.row, stride.row,
                            shared.sequence.visibility.len_kv - tile * B_c, cols, aligned},
        to, moved);
  };

  auto step = [&](auto kind, int tile) {
    constexpr KeyTile Kind = decltype(kind)::value;
    constexpr bool Two = Traits::Stages == 2;
    uint32_t const here = Two ? stage * TileBytes : 0, there = Two ? TileBytes - here : 0;
    bool const more = tile > tiles.begin;
    // With two stages the next tiles of K and V are under way all along; with one V is while Q K^T is made, the next K
    // while P V is.
    auto copy_key_tile = [&] {
      if constexpr (Kind == KeyTile::Any) {
        if (more) copy_checked(shared.keys, params.k_stride, params.head_dim, tile - 1, shared.k[Two ? stage ^ 1 : 0]);
      } else {
        copy_whole_tile<B_c, Traits::HeadDim, Threads>(keys_next, params.k_stride.row, more ? params.head_dim : 0,
                                                       copy_at + there);
        keys_next -= B_c * params.k_stride.row;
      }
    };
    auto copy_value_tile = [&] {
      constexpr uint32_t FromKeys = Traits::Stages * TileBytes;
      if constexpr (Kind == KeyTile::Any || (Kind == KeyTile::Masked && !Two)) {
        if (more || !Two)
          copy_checked(shared.values, params.v_stride, params.head_dim_v, Two ? tile - 1 : tile,
                       shared.v[Two ? stage ^ 1 : 0]);
      } else {
        copy_whole_tile<B_c, Traits::HeadDim, Threads>(
            values_next, params.v_stride.row, more || !Two ? params.head_dim_v : 0, copy_at + FromKeys + there);
      }
      if constexpr (Kind != KeyTile::Any) values_next -= B_c * params.v_stride.row;
    };
    auto copy_during_qk = [&] {
      if (Two) copy_key_tile();
      copy_value_tile();
    };
    auto between = [&] {
      if constexpr (!Two) {
        wait();
        copy_key_tile();
      }
    };
    // At head_dim 64 this took 3% of (32, 512, 32, 64) and brought nothing.
    if constexpr (Kind == KeyTile::Masked && Traits::HeadDim > 64) {
      Visibility const visibility = shared.sequence.visibility;
      if (!visibility.tiles_of(work.row0 + warp_row, Traits::RowAtoms * kAtom, B_c).contains(tile)) {
        copy_during_qk();  // hidden from all rows of this warp
        between();
        stage ^= 1;
        wait();
        return;
      }
    }
    gemm_qk<Traits>(scores, queries, keys_at + here, [&] {
      if (Kind != KeyTile::Any) copy_during_qk();
    });
    if (Kind == KeyTile::Any) copy_during_qk();
    int const first_key = tile * B_c + part * Traits::WarpKeys + lane % 4 * 2;
    if constexpr (Kind == KeyTile::Any) {
      if (score_mods) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
        ScoreMod const score_mod = shared.score_mod;
        score_mod.template apply<true>(S, shared.sequence.visibility.start_pos + first_row - first_key,
                                       [&](int i, int j) { return row_of(i) - key_of(j); });
      }
    }
    if (Kind == KeyTile::Masked || (Kind == KeyTile::Any && !unmasked.contains(tile)))
      mask(S, shared.sequence.visibility.counted_from(first_key).with_finite_windows(), first_row, row_of, key_of);
    float const scale = Kind == KeyTile::Any && score_mods ? 1.f : query_scale;
    softmax.raise(S, rescale, base, scale, [&](float (&tile_max)[Rows]) {
      if constexpr (Traits::Shared) {
        publish(tile_max);
        CUTE_UNROLL
        for (int i = 0; i < Rows; ++i) tile_max[i] = fmaxf(tile_max[i], of_sharer(i));
      }
    });
    bool raised = false;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) raised |= rescale(i) != 1.f;
    if (__any_sync(0xffffffffu, raised)) {  // the maxima settle after a few tiles
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        softmax.l[i] *= rescale(i);
        CUTE_UNROLL
        for (int j = 0; j < size<1>(out); ++j) out(i, j) *= rescale(i);
      }
    }
    between();
    float sum[Rows] = {};
    auto p_of = [&](int i, float s) {
      float const p = exp2_approx(fmaf(s, scale, -base(i)));
      sum[i] += p;
      return p;
    };
    if constexpr (Traits::Shared) {
      constexpr uint32_t Half = Traits::WarpKeys * kPanel * sizeof(Element);
      gemm_pv_shared<Traits>(O, scores, p_of, values_at + here + part * Half, values_at + here + (1 - part) * Half,
                             p_to, p_from);
    } else {
      gemm_pv<Traits>(O, scores, p_of, values_at + here);
    }
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) softmax.l[i] += sum[i];
    stage ^= 1;
    wait();
  };
  int tile = tiles.end - 1;
  int const plain_begin = unmasked.begin > tiles.begin ? unmasked.begin : tiles.begin;
  while (tile >= tiles.begin) {
    if (score_mods || !aligned) {
      step(std::integral_constant<KeyTile, KeyTile::Any>{}, tile--);
    } else if (!unmasked.contains(tile)) {
      step(std::integral_constant<KeyTile, KeyTile::Masked>{}, tile--);
    } else {
      do step(std::integral_constant<KeyTile, KeyTile::Plain>{}, tile--);
      while (tile >= plain_begin);
    }
  }

  if constexpr (Traits::Shared) {  // l of all keys, in the one lane of four whose part is counted
    float sum[Rows];
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) sum[i] = warp_sum<4, 1>(softmax.l[i]);
    publish(sum);
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) softmax.l[i] = lane % 4 == 0 ? sum[i] + of_sharer(i) : 0.f;
  }
  store<Traits>(params, shared, work, out, softmax, warp_row, part, lane);
}

/// The kernel of one tile shape: `FMHA<...>{}(params, stream)` launches it for every query tile and split of `params`.
template <int B_r, int B_c, int HeadDim, class Element, int Threads, int Stages = 2, int Sharers = 1>
struct FMHA {
  using Traits = sm80::Traits<B_r, B_c, HeadDim, Element, Threads, Stages, Sharers>;
  static constexpr char const* kFamily = "sm80";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr Kind kKind = Kind::Tiles;
  static constexpr Features kTakes = feature::kScoreMods | feature::Sink | feature::Packed | feature::kUnlike |
                                     feature::FixedSplits | feature::UnalignedRows;
};

}  // namespace cutlass_ext::sm80

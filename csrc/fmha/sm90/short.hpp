// FMHA on Hopper for launches that are over before a pipeline would be full: a CTA for each 64 query rows, with one
// warp that copies and one or two warpgroups that multiply. What counts there is the way to the first product and back
// from the last, so a CTA knows its work from its block index, its parameters lie together, and there is nothing in the
// code that plain calls do not need: what pairs have (a bias, a mask, dropout), and sequences that only the device
// knows, have kernels of their own. With dropout longer rows go here, too: of several CTAs on a multiprocessor some
// draw while others wait or multiply. Instantiated by csrc/kernels/sm90_short.cu.
#pragma once

#include <cutlass/arch/barrier.h>

#include "../copy/tma.hpp"
#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../launch_order.hpp"
#include "../merge.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../visibility.hpp"
#include "copied_bias.hpp"
#include "dropout.hpp"
#include "lazy_softmax.hpp"
#include "tensor_maps.hpp"
#include "traits.hpp"
#include "warpgroup.hpp"

namespace cutlass_ext::sm90 {

/// What the kernel is told, in the order in which it asks. 64 bytes of parameters come from memory at a time, and each
/// time a warp waits: with Params as they are, whose first copy wants six such lines, causal (1, 512, 32 heads
/// on 8, 128) took 14.8 us for 14.4.
struct ShortParams {
  int n_q, n_kv, start_pos, window_left, window_right;
  int query_tiles, head_dim_v;
  bool at_once;  // whether multiprocessors hold all CTAs of the launch
  float scale;   // from products to scores in the log2 domain
  cutlass::FastDivmod heads_per_kv;
  int heads_q;
  void* o;
  Strides o_stride;
  float* lse;
  float const* sink;

  explicit ShortParams(Params const& p)
      : n_q(p.n_q),
        n_kv(p.n_kv),
        start_pos(all_alike(p) ? visibility_of_all(p).start_pos : 0),
        window_left(p.window_left),
        window_right(p.window_right),
        query_tiles(Scheduler::tiles_of(p.n_q, kAtomRows)),
        head_dim_v(p.head_dim_v),
        at_once(int64_t(p.batch) * p.heads_q * query_tiles <= p.resident_ctas),
        scale(p.softmax_scale * kLog2e),
        heads_per_kv(p.heads_q / p.heads_kv),
        heads_q(p.heads_q),
        o(p.o),
        o_stride(p.o_stride),
        lse(p.lse),
        sink(p.sink) {}
};

/// With what pairs have; and with packed sequences, lengths, padding in front or positions, which `start_pos` and
/// `n_kv` of ShortParams do not hold for.
struct ShortParamsOfPairs : ShortParams, Pairs {
  float bias_unit;      // of the bias, in products
  Threshold threshold;  // of dropout, made by the host: a tenth of what a draw takes
  explicit ShortParamsOfPairs(Params const& p)
      : ShortParams(p), Pairs(p), bias_unit(kLog2e / scale), threshold(threshold_of(p)) {}
};
struct ShortParamsOfUnlike : ShortParams {
  Lengths lengths;
  explicit ShortParamsOfUnlike(Params const& p) : ShortParams(p), lengths(p) {}
};

/// `Warpgroups` take the key tiles of the same 64 query rows in turn; `Stages` tiles of K and of V are in flight. With
/// one warpgroup a multiprocessor has as many CTAs as its registers allow, and they hide each other's copies: at
/// head_dim 128 (3, 256, 32 heads on 8) takes 14.0 us in three CTAs of one stage and 15.3 in two of three stages.
/// `Mods`: what pairs have, or what tells sequences apart, or nothing.
template <int B_c_, int HeadDim_, class Element_, int Stages_, int Warpgroups_, Features Mods_>
struct ShortTraits : Traits<kAtomRows, B_c_, HeadDim_, HeadDim_, Element_, Stages_, 1, 0> {
  using Base = Traits<kAtomRows, B_c_, HeadDim_, HeadDim_, Element_, Stages_, 1, 0>;
  static constexpr int Warpgroups = Warpgroups_, Threads = Warpgroups * kWarpgroup + 32;
  static constexpr int CtasAtOnce = Warpgroups == 2 ? 1 : HeadDim_ <= 64 ? 4 : 3;
  static_assert(Warpgroups == 1 || Warpgroups == 2);
  static_assert(Stages_ % Warpgroups == 0, "a stage is always the same warpgroup's");
  static constexpr Features Mods = Mods_;
  static constexpr bool Pairs = Mods & feature::kPairs, Unlike = Mods != 0 && !Pairs;
  // All calls of a kernel that takes a bias have one; of one that takes dropout beside a mask, dropout.
  static constexpr bool HasBias = Mods & feature::Bias, HasMask = Mods & feature::Mask;
  static constexpr bool HasDropout = Mods & feature::Dropout, AlwaysDrops = HasDropout && !HasBias;
  static constexpr Features Wants = HasBias       ? feature::Bias
                                    : AlwaysDrops ? feature::Dropout
                                    : Pairs       ? feature::Mask
                                                  : 0;
  using Params =
      std::conditional_t<Pairs, ShortParamsOfPairs, std::conditional_t<Unlike, ShortParamsOfUnlike, ShortParams>>;
  using Maps = std::conditional_t<HasBias, TensorMapsOfPairs, TensorMaps>;
  static constexpr int kTilesOfMap = 32;  // in a word of a mask's map
  static_assert(!Pairs || (B_c_ == Mask::kBlock && Warpgroups == 1), "a tile of keys is a block of the mask's map");

  /// What a call has, where the kernel takes it.
  CUTE_HOST_DEVICE static bool copies_bias(cutlass_ext::Params const&) { return HasBias; }
  CUTE_DEVICE static bool has_mask(ShortParamsOfPairs const& params) {
    return Wants == feature::Mask || (HasMask && cutlass_ext::has_mask(params));
  }
  CUTE_DEVICE static bool has_dropout(ShortParamsOfPairs const& params) {
    return AlwaysDrops || (HasDropout && cutlass_ext::has_dropout(params));
  }

  /// What a warpgroup hands over, a float4 a thread.
  struct Sums {
    float4 ml[kWarpgroup];  // m of the thread's two rows, l of both
    float4 o[HeadDim_ / 8][kWarpgroup];
  };
  struct SharedStorage {
    alignas(1024) Element_ q[cosize_v<typename Base::LayoutQ>];  // in the end, the output
    alignas(1024) Element_ k[cosize_v<typename Base::LayoutK>];
    alignas(1024) Element_ v[cosize_v<typename Base::LayoutV>];
    alignas(1024) Element_ biases[HasBias ? Stages_ * kAtomRows * B_c_ : 0];
    Sums second[Warpgroups - 1];  // of the second warpgroup
    Barrier q_full, k_full[Stages_], k_empty[Stages_], v_full[Stages_], v_empty[Stages_];
    Barrier v_tail;  // the copy of a tile whose rows past the sequence's last are to be zeroed
  };
};

/// The query tile of a CTA.
struct ShortTile {
  bool exists;
  int head, batch;     // of q and o
  int q_row0, k_row0;  // rows of the tensors: its own first one, and that of its sequence's first key
  int row0;            // the first one, counted in its sequence
  Visibility visibility;
};

/// The first row of a query tile. The longest tiles of a causal mask come first. Where all are there at once the
/// shortest come next, so that two that share a multiprocessor make about the same work everywhere: causal (1, 512, 32
/// heads on 8, 128), in tiles of 128 keys, took 15.6 us from the longest to the shortest and 15.0 so. Elsewhere they
/// come last, and the launch ends with them.
CUTE_DEVICE int row0_of(int order, int query_tiles, bool at_once) {
  int const long_tiles = at_once ? query_tiles - query_tiles / 2 : query_tiles;
  return kAtomRows * (order < long_tiles ? query_tiles - 1 - order : order - long_tiles);
}

template <class Traits>
CUTE_DEVICE ShortTile tile_of_cta(typename Traits::Params const& params) {
  int const head = blockIdx.x, order = blockIdx.y, b = blockIdx.z;
  if constexpr (Traits::Unlike) {
    Sequence const sequence = sequence_of(params.lengths, b);
    int const tiles = (sequence.visibility.n_q + kAtomRows - 1) / kAtomRows,
              row0 = row0_of(order, tiles, params.at_once);
    return {order < tiles, head, sequence.batch, sequence.q_row0 + row0, sequence.k_row0, row0, sequence.visibility};
  } else {
    int const row0 = row0_of(order, params.query_tiles, params.at_once);
    return {true,
            head,
            b,
            row0,
            0,
            row0,
            {params.n_q, params.n_kv, params.start_pos, params.window_left, params.window_right}};
  }
}

/// What a mask's map says of the key tiles of a CTA's rows, a bit each; of a call without one nothing. The launch that
/// writes it may have run beside this one: it is not read as what never changes.
template <class Traits>
struct SeenTiles {
  uint32_t some, all;  // whether some pair is seen, and all

  SeenTiles() = default;
  CUTE_DEVICE SeenTiles(ShortParamsOfPairs const& params, int row0) {
    Mask const& mask = params.mask;
    if (!Traits::has_mask(params)) return;
    int const block = mask.row == 0 ? 0 : row0 / Mask::kBlock;
    uint2 const map =
        __ldcg(reinterpret_cast<uint2 const*>(bits_of(mask) + (mask.rows + block) * Mask::words_of(params.n_kv)));
    some = map.x, all = map.y;
  }

  CUTE_DEVICE bool sees(ShortParamsOfPairs const& params, int tile) const {
    return !Traits::has_mask(params) || (some >> tile & 1);
  }
  CUTE_DEVICE bool hides(ShortParamsOfPairs const& params, int tile) const {
    return Traits::has_mask(params) && !(all >> tile & 1);
  }

  /// From the first to the last of `tiles` that is seen.
  CUTE_DEVICE Range within(ShortParamsOfPairs const& params, Range const& tiles) const {
    if (!Traits::has_mask(params) || tiles.size() == 0) return tiles;
    uint32_t const seen = some & ~0u << tiles.begin & ~0u >> (32 - tiles.end);
    return seen == 0 ? Range{0, 0} : Range{__ffs(seen) - 1, 32 - __clz(seen)};
  }

  /// Which of the lane's columns of a tile a row sees.
  CUTE_DEVICE static uint32_t columns(ShortParamsOfPairs const& params, int row, int tile, int lane) {
    auto const* const of_row = bits_of(params.mask) + min(row, params.n_q - 1) * params.mask.row;
    return columns_of_words(__ldcg(reinterpret_cast<uint2 const*>(of_row) + tile), lane);
  }

 private:
  /// Those of the head's first row, worked out where they are asked for: no register is left to keep where they are.
  CUTE_DEVICE static uint32_t const* bits_of(Mask const& mask) {
    return mask.bits + int(blockIdx.z) * mask.batch + int(blockIdx.x) * mask.head;
  }
};

/// The warp that copies: sets up the barriers, asks for Q and the first keys, and keeps the rings of K and V full.
template <class Traits>
CUTE_DEVICE void copy_short(typename Traits::Params const& params, typename Traits::Maps const& maps,
                            typename Traits::SharedStorage& shared, ShortTile const& here, Range tiles) {
  constexpr int B_c = Traits::B_c, Stages = Traits::Stages;
  bool const leader = threadIdx.x % 32 == 0;
  int const head_kv = params.heads_per_kv.div(here.head);
  RingPosition<Stages> at;
  auto const load_k = [&](int tile) {
    if constexpr (Traits::HasBias) {  // comes with them
      auto& full = shared.k_full[at.stage];
      auto* const to = shared.biases + at.stage * kAtomRows * B_c;
      auto const& of = bias_of(params);
      full.arrive_and_expect_tx(kAtomRows * B_c * sizeof(*to));
      SM90_TMA_LOAD_4D::copy(&maps.biases, reinterpret_cast<uint64_t*>(&full),
                             static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL), to, tile * B_c, here.row0,
                             of.head == 0 ? 0 : here.head, of.batch == 0 ? 0 : here.batch);
    }
    copy_panels<B_c, Traits::ColumnsQK>(maps.k, shared.k_full[at.stage], shared.k + at.stage * B_c * Traits::ColumnsQK,
                                        here.k_row0 + tile * B_c, head_kv, here.batch, TMA::CacheHintSm90::EVICT_LAST);
  };
  [[maybe_unused]] SeenTiles<Traits> seen;
  if (leader) {
    auto const init = [](Barrier(&full)[Stages], Barrier(&empty)[Stages], int writers = 1) {
      for (auto& barrier : full) barrier.init(writers);
      for (auto& barrier : empty) barrier.init(kWarpgroup / 32);
    };
    shared.q_full.init(1);
    if constexpr (Traits::Unlike) shared.v_tail.init(1);
    init(shared.k_full, shared.k_empty, Traits::HasBias ? 2 : 1);
    init(shared.v_full, shared.v_empty);
    cutlass::arch::fence_barrier_init();
    if (tiles.size() > 0) {
      copy_packed_panels<kAtomRows, Traits::ColumnsQK>(maps.q, shared.q_full, shared.q, kAtomRows, here.q_row0,
                                                       here.head, here.batch, TMA::CacheHintSm90::EVICT_FIRST);
      if constexpr (Traits::HasMask) {
        wait_for_launch_before();  // which packs the mask, or copies the bias; q, k and v were there before
        seen = {params, here.row0};
        tiles = seen.within(params, tiles);
      }
      if (tiles.size() > 0) load_k(tiles.end - 1);
    }
  }
  __syncthreads();
  if (!Traits::Unlike && !leader) return;
  CUTE_NO_UNROLL
  for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    if constexpr (Traits::HasMask) {
      if (!seen.sees(params, tile)) continue;
    }
    if (tile < tiles.end - 1) {
      shared.k_empty[at.stage].wait_for(at.phase ^ 1);
      if (leader) load_k(tile);
    }
    shared.v_empty[at.stage].wait_for(at.phase ^ 1);
    auto* const to = shared.v + at.stage * B_c * Traits::ColumnsV;
    auto const load_v = [&](Barrier& barrier) {
      if (leader)
        copy_panels<B_c, Traits::ColumnsV>(maps.v, barrier, to, here.k_row0 + tile * B_c, head_kv, here.batch,
                                           TMA::CacheHintSm90::EVICT_LAST);
    };
    if constexpr (Traits::Unlike) {
      int const len_kv = here.visibility.len_kv, keys = len_kv - tile * B_c;
      bool const cut = keys < B_c && here.k_row0 + len_kv < params.lengths.stored_keys();  // one tile of a CTA
      TailCopy{shared.v_tail}.template tile<B_c, Traits::ColumnsV>(shared.v_full[at.stage], to, cut, {0, keys}, load_v);
    } else {
      load_v(shared.v_full[at.stage]);
    }
    at.advance();
  }
}

/// Brings what both warpgroups have summed up together in the first; true in the second, which is done then. Where
/// there is one key tile, or none, the second has nothing.
template <class Traits, class Softmax, class OutTensor>
CUTE_DEVICE bool merge_warpgroups(typename Traits::SharedStorage& shared, int warpgroup, int tiles, Softmax& softmax,
                                  OutTensor& O) {
  auto& second = shared.second[0];
  int const thread = threadIdx.x % kWarpgroup;
  if (warpgroup == 1 && tiles > 1) {
    second.ml[thread] = make_float4(softmax.m[0], softmax.m[1], softmax.l[0], softmax.l[1]);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(O); j += 2)
      second.o[j / 2][thread] = make_float4(O(0, j), O(1, j), O(0, j + 1), O(1, j + 1));
  }
  if (tiles > 1) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, 1);
  if (warpgroup == 1) return true;
  if (tiles > 1) {
    float4 const ml = second.ml[thread];
    float weights[2][2];  // of both warpgroups' sums, for each row
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Part const parts[] = {{softmax.m[i], softmax.l[i]}, {i ? ml.y : ml.x, i ? ml.w : ml.z}};
      Part const all = merge(parts, weights[i]);
      softmax.m[i] = all.m;
      softmax.l[i] = all.l;
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(O); j += 2) {
      float4 const x = second.o[j / 2][thread];
      O(0, j) = O(0, j) * weights[0][0] + x.x * weights[0][1];
      O(1, j) = O(1, j) * weights[1][0] + x.y * weights[1][1];
      O(0, j + 1) = O(0, j + 1) * weights[0][0] + x.z * weights[0][1];
      O(1, j + 1) = O(1, j + 1) * weights[1][0] + x.w * weights[1][1];
    }
  }
  return false;
}

/// Where the results of a warp's 16 rows go, and what ends them.
template <class Element>
struct ShortResults {
  float sink_log2;
  int rows, head_dim_v;  // rows that exist
  int64_t row_stride;
  Element* o;
  float* lse;  // null: not asked for
};
template <class Traits>
CUTE_DEVICE ShortResults<typename Traits::Element> results_of(typename Traits::Params const& params,
                                                              ShortTile const& here, int warp_row) {
  using Element = typename Traits::Element;
  int const head = here.head, row_of_q = here.q_row0 + warp_row;
  ShortResults<Element> of;
  of.sink_log2 = params.sink ? params.sink[head] * kLog2e : -INFINITY;
  of.rows = here.visibility.n_q - here.row0 - warp_row;
  of.head_dim_v = params.head_dim_v;
  of.row_stride = params.o_stride.row;
  of.o = static_cast<Element*>(params.o) + here.batch * params.o_stride.batch + row_of_q * of.row_stride +
         head * params.o_stride.head;
  of.lse = params.lse;
  if (of.lse) {
    int stored_rows = params.n_q;
    if constexpr (Traits::Unlike) stored_rows = params.lengths.stored_rows();
    of.lse += (int64_t(here.batch) * params.heads_q + head) * stored_rows + row_of_q;
  }
  return of;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::CtasAtOnce)
    short_kernel(__grid_constant__ typename Traits::Params const params,
                 __grid_constant__ typename Traits::Maps const maps) {
  using Element = typename Traits::Element;
  constexpr int B_c = Traits::B_c, Warpgroups = Traits::Warpgroups;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  ShortTile const here = tile_of_cta<Traits>(params);
  if (Traits::Unlike && !here.exists) return;
  int const row0 = here.row0;
  Visibility const& visibility = here.visibility;
  Range tiles = visibility.tiles_of(row0, kAtomRows, B_c);
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == Warpgroups) return copy_short<Traits>(params, maps, shared, here, tiles);

  int const lane = threadIdx.x % 32, warp_row = threadIdx.x % kWarpgroup / 32 * 16;
  Tensor fQ = operand_q<Traits>(shared.q, 0);
  Tensor fK = operand_k<Traits>(shared.k);
  Tensor fV = operand_v<Traits>(shared.v);
  Tensor fP = operand_p<Traits>();
  Tensor cS = accumulator_s<Traits>();
  Tensor cO = accumulator_o<Traits>();
  // The thread's rows, 8 apart, and columns, counted from its first.
  Tensor S = rows_and_columns(cS);
  Tensor O = rows_and_columns(cO);
  Tensor words = recast<uint32_t>(fP);
  auto release = [&](Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };

  Range const unmasked = visibility.unmasked_tiles_of(row0, kAtomRows, B_c);
  float scale = params.scale;
  ShortResults<Element> results;
  if constexpr (!Traits::Pairs) {  // while the first tiles are on their way; beside pairs no registers are left
    results = results_of<Traits>(params, here, warp_row);
    materialize(scale), materialize(results.sink_log2), materialize(results.rows), materialize(results.head_dim_v),
        materialize(results.row_stride), materialize(results.o), materialize(results.lse);
  }

  LazySoftmaxInPlace softmax;
  clear(cO);
  bool const has_q = tiles.size() > 0;
  [[maybe_unused]] SeenTiles<Traits> seen;
  [[maybe_unused]] PairMod pairs;
  [[maybe_unused]] bool drops = false;
  if constexpr (Traits::HasDropout) {
    drops = Traits::has_dropout(params);
    if (drops) pairs = {params.dropout, visibility, here.batch, here.head};
  }
  if constexpr (Traits::HasMask) {
    wait_for_launch_before();
    seen = {params, row0};
    tiles = seen.within(params, tiles);
  }
  int const first = tiles.end - 1 - warpgroup;
  int stage = warpgroup;
  uint32_t phase = 0;
  __syncthreads();  // the barriers are set up
  if (has_q) shared.q_full.wait_for(0);
  CUTE_NO_UNROLL
  for (int tile = first; tile >= tiles.begin; tile -= Warpgroups) {
    bool masked = !unmasked.contains(tile);
    if constexpr (Traits::HasMask) {
      if (!seen.sees(params, tile)) continue;
      masked |= seen.hides(params, tile);
    }
    TileMask<B_c / 4> mask;
    if (masked) {
      int const row = row0 + warp_row + lane / 4;
      mask = {visibility.counted_from(tile * B_c), {row, row + row_of(1)}, lane};
      if constexpr (Traits::HasMask) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (Traits::has_mask(params)) mask.visible[i][0] &= seen.columns(params, row + row_of(i), tile, lane);
        }
      }
      for (auto& words : mask.visible) materialize(words[0]);
    }
    [[maybe_unused]] uint32_t kept;  // by dropout, of the thread's pairs
    if constexpr (Traits::HasDropout) {
      if (drops) kept = pairs.kept_of_rows(params.threshold, row0 + warp_row, tile * B_c, lane);
    }
    shared.k_full[stage].wait_for(phase);
    gemm_async<Traits::HeadDim / 16>(typename Traits::MmaQK{}, fQ(_, _, _, 0), fK(_, _, _, stage), cS, true);
    warpgroup_wait<0>();
    warpgroup_fence_operand(cS);
    if constexpr (Traits::HasBias) {
      CopiedBias<Element, B_c, false> copied;
      copied.take(shared.biases + stage * kAtomRows * B_c, warp_row, lane);
      copied.add(S, dtype_of_bias(params), params.bias_unit);
      finish_loads_of_shared();
    }
    release(shared.k_empty[stage]);
    if (masked) mask.apply(S);
    softmax.update(S, O, scale, tile == first);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(S); j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) put_operand<Element>(words, i, j, S(i, j), S(i, j + 1));
    }
    if constexpr (Traits::HasDropout) {
      uint32_t const of_rows[] = {kept, kept};
      auto const mask_of = [&](int i) {
        return mask_of_sixteen(of_rows, i % 2,
                               [&](int r, int half) { return PairMod::bit_of_rows(2 * i + half, 0, r) % 8; });
      };
      if (drops) drop(words, mask_of);
    }
    shared.v_full[stage].wait_for(phase);
    gemm_async<B_c / 16>(typename Traits::MmaPV{}, fP, fV(_, _, _, stage), cO, false);
    warpgroup_wait<0>();
    warpgroup_fence_operand(cO);
    release(shared.v_empty[stage]);
    stage += Warpgroups;
    if (stage >= Traits::Stages) stage = warpgroup, phase ^= 1;
  }

  if constexpr (Warpgroups == 2) {
    if (merge_warpgroups<Traits>(shared, warpgroup, tiles.size(), softmax, O)) return;
  }

  if constexpr (Traits::Pairs) results = results_of<Traits>(params, here, warp_row);
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = lane / 4 + i * 8;
    float scale_of_kept = 1.f;
    if constexpr (Traits::HasDropout) scale_of_kept = drops ? params.dropout.scale : 1.f;
    Finish const finished = softmax.template finish<Element>(i, results.sink_log2, O, scale_of_kept);
    if (row < results.rows && lane % 4 == 0 && results.lse) results.lse[row] = finished.lse();
  }
  cutlass::arch::NamedBarrier::sync(kWarpgroup, 2);  // nobody reads Q any more
  store_rows<Traits>(
      results.o + lane / 8 * results.row_stride, [&](int pass) { return pass * 4 * results.row_stride; }, results.rows,
      results.head_dim_v, O, shared.q + warp_row * Traits::StagedPanels * kPanel, lane);
}

/// The kernel of one tile shape, launched for every query tile.
template <int B_c, int HeadDim, class Element, int Stages, int Warpgroups, Features Mods = 0>
struct ShortFMHA {
  using Traits = ShortTraits<B_c, HeadDim, Element, Stages, Warpgroups, Mods>;
  static constexpr char const* kFamily = "sm90";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &short_kernel<Traits>;
  static constexpr Kind kKind = Kind::Short;
  static constexpr Features kTakes = feature::Sink | Mods, kWants = Traits::Wants;
  static bool takes_shape(Params const& params) {
    if (Traits::HasBias && !is_copyable(bias_of(params)) && !shares_bias(params)) return false;
    return !cutlass_ext::has_mask(params) || params.n_kv <= Traits::kTilesOfMap * B_c;
  }
  static bool waits(Params const& params) {
    return Traits::HasMask && cutlass_ext::has_mask(params) && params.mask.packed_before;
  }
  static_assert(Traits::CtasAtOnce * (kSharedBytes + 1024) <= 228 * 1024, "what a multiprocessor of Hopper has");
};

}  // namespace cutlass_ext::sm90

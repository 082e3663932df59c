// FMHA on Hopper: one warp deals out the work, three copy tiles with the tensor memory accelerator (TMA), consumer
// warpgroups of 64 query rows each multiply them with WGMMA. Warpgroups take turns on the tensor cores, so that the
// softmax of one runs beside the products of another (FlashAttention-3, arXiv:2407.08608, section 3.1); within one,
// Q K^T of a tile and P V of the tile before are issued together, and part of the softmax runs beside P V.
// Instantiated by csrc/kernels/sm90_*.cu.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "copied_bias.hpp"
#include "producer.hpp"
#include "tensor_maps.hpp"
#include "tile_scheduler.hpp"
#include "traits.hpp"
#include "warpgroup.hpp"

namespace cutlass_ext::sm90 {

/// Whose turn it is on the tensor cores: each consumer warpgroup hands it to the next by named barriers.
template <class Traits>
struct WarpgroupOrder {
  int warpgroup;
  CUTE_DEVICE void begin() const {
    if (warpgroup == Traits::Consumers - 1) pass();
  }
  CUTE_DEVICE void wait() const { cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup); }
  CUTE_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, warpgroup + 1 == Traits::Consumers ? 0 : warpgroup + 1);
  }
};

/// The warp's rows of a job's O: how many there are, where they go, and what brings O there.
struct EpilogueRows {
  int rows;         // that exist, of the warp's 16
  int lead;         // columns of O in front of those that there are
  int64_t to;       // element of o, or of o_partial, where the first of these would go, in the tile's first row
  float factor[2];  // of the thread's rows of O
};

/// The same of a job whose sums are complete; writes lse.
template <class Traits>
CUTE_DEVICE EpilogueRows finish(Params const& params, typename Traits::Job const& job,
                                typename Traits::Softmax const& softmax) {
  bool const split = params.is_split();
  TileRows const tile_rows(params, Traits::B_r);
  auto const [lane, warp_row] = ConsumerThread();
  int const lead = params.lead_v(job.head_kv);
  EpilogueRows results{job.rows - warp_row, lead, (split ? job.result_row0 * params.head_dim_v : job.out_row0) - lead};
  float const sink_log2 = split ? -INFINITY : job.score_mod.sink_log2;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = lane / 4 + i * 8;
    bool const exists = row < results.rows;
    float logit = sink_log2;
    int64_t at = warp_row + row;  // of lse, from the tile's first row on
    if (tile_rows.heads.divisor > 1) {
      if (!split && exists)
        logit = params.sink_of(job.head * tile_rows.heads.divisor + tile_rows.head(warp_row + row)) * kLog2e;
      at = tile_rows.offset<int64_t>(warp_row + row, 1, params.stored_rows());
    }
    Finish const finished = softmax.template finish<typename Traits::Element>(i, logit);
    results.factor[i] = Traits::Pairs ? finished.factor * params.dropout.scale : finished.factor;
    if constexpr (Traits::Parts > 1) {
      // Of sums of fewer keys less is cut off, down to nothing.
      Range const keys = job.visibility.keys_of_row(job.token0 + tile_rows.token(warp_row + row));
      constexpr float kCutOff = kCutOffSum * Traits::KeysOfSum / kKeysOfCutOff;
      if (keys.size() >= Traits::KeysOfSum) results.factor[i] = fmaf(results.factor[i], kCutOff, results.factor[i]);
    }
    if (exists && lane % 4 == 0) store_lse(params, job.result_row0 + at, finished);
  }
  return results;
}

/// Writes the warp's part of O, or of a split's.
template <class Traits, class OutTensor>
CUTE_DEVICE void store(Params const& params, EpilogueRows const& results, OutTensor& O,
                       typename Traits::SharedStorage& shared) {
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(O); ++j) O(i, j) *= results.factor[i];
  }
  int const rows = results.rows;
  auto const thread = ConsumerThread();
  int const lane = thread.lane, warp_row = thread.warp_row;
  TileRows const tile_rows(params, Traits::B_r);
  // 16 bits go through shared memory; fp32, all of O or a split's part, straight from registers.
  constexpr bool fp32 = std::is_same_v<typename Traits::Element, float>;
  if constexpr (!fp32) {
    if (!params.is_split()) {
      auto* const staging = shared.o + warp_row * Traits::StagedColumns;
      auto* const to = static_cast<typename Traits::Element*>(params.o) + results.to;
      // Two paths, since the divisions of packed rows took 12% of (32, 512, 16, 128).
      if (tile_rows.heads.divisor == 1) {
        int64_t const stride = params.o_stride.row;
        return store_rows<Traits>(
            to + (warp_row + lane / 8) * stride, [=](int pass) { return pass * 4 * stride; }, rows, params.head_dim_v,
            O, staging, lane, results.lead);
      }
      // Of a tile they fit 32 bits (heuristics.hpp), and are worked out where they are used: that leaves registers to
      // the accumulators.
      auto const offset_of = [&](int pass) {
        int here = warp_row + pass * 4 + lane / 8;
        materialize(here);
        return tile_rows.offset(here, static_cast<int>(params.o_stride.row), static_cast<int>(params.o_stride.head));
      };
      return store_rows<Traits>(to, offset_of, rows, params.head_dim_v, O, staging, lane, results.lead);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = lane / 4 + i * 8;
    auto const of_tile = tile_rows.offset<int64_t>(warp_row + row, 1, params.stored_rows());
    float* to = params.o_partial + results.to + of_tile * params.head_dim_v;
    if (fp32 && !params.is_split()) {
      to = static_cast<float*>(params.o) + results.to +
           tile_rows.offset<int64_t>(warp_row + row, params.o_stride.row, params.o_stride.head);
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(O); j += 2) {
      int const col = j / 2 * 8 + lane % 4 * 2;
      if (row >= rows || static_cast<unsigned>(col - results.lead) >= static_cast<unsigned>(params.head_dim_v))
        continue;
      float2 const two = make_float2(O(i, j), O(i, j + 1));
      if constexpr (Traits::Pairs) {  // which 44 bytes would spill in
        *reinterpret_cast<float2*>(to + col) = two;
      } else {
        __stcg(reinterpret_cast<float2*>(to + col), two);  // else it is two stores, of half a sector each
      }
    }
  }
}

/// The same where no key is visible.
template <class Traits>
CUTE_DEVICE void store_empty(Params const& params, typename Traits::Job const& job,
                             typename Traits::SharedStorage& shared) {
  Tensor O = make_tensor<float>(Shape<_2, Int<Traits::HeadDimV / 4>>{});
  clear(O);
  store<Traits>(params, finish<Traits>(params, job, typename Traits::Softmax{}), O, shared);
}

/// What a consumer warpgroup keeps at hand of a job.
struct TilesOfRows {
  Range tiles;  // of its own rows; empty if there are none, if they see no key, or if there is no job
  int skipped;  // tiles of the job past these
  Range unmasked;

  template <class Job>
  CUTE_DEVICE TilesOfRows(Job const& job, int warpgroup) {
    bool const any = job.exists && job.tiles.size() > 0;
    int const end = any ? job.of_warpgroup[warpgroup].end : job.tiles.begin;
    tiles = {job.tiles.begin, end};
    skipped = job.tiles.end - end;
    unmasked = job.of_warpgroup[warpgroup].unmasked;
  }
};

/// A warp's rows of a tile of the bias, loaded while the products run where there are registers for it.
template <class Traits>
using BiasOfTile = CopiedBias<typename Traits::Element, Traits::B_c, (Traits::StagesBias > 1)>;

/// A consumer warp's place in the rings of Q, K and V: it waits for tiles and lets them go.
template <class Traits>
struct Rings {
  typename Traits::SharedStorage& shared;
  WarpgroupOrder<Traits> const& order;
  int lane;
  RingPosition<Traits::StagesQ> q{};
  RingPosition<Traits::Stages> k{}, v{};
  RingPosition<Traits::StagesBias> biases{};

  CUTE_DEVICE void wait_q() const { shared.q_full[q.stage].wait_for(q.phase); }
  CUTE_DEVICE void wait_k() const { shared.k_full[k.stage].wait_for(k.phase); }
  CUTE_DEVICE void wait_v() const { shared.v_full[v.stage].wait_for(v.phase); }
  CUTE_DEVICE void release_q() { release(shared.q_empty[q.stage], q); }
  CUTE_DEVICE void release_k() { release(shared.k_empty[k.stage], k); }
  CUTE_DEVICE void release_v() { release(shared.v_empty[v.stage], v); }

  /// The warpgroup's part of a tile of the bias.
  CUTE_DEVICE typename Traits::Element const* wait_bias() const {
    shared.bias_full[order.warpgroup][biases.stage].wait_for(biases.phase);
    return shared.biases_of(order.warpgroup, biases.stage);
  }
  CUTE_DEVICE void take_bias(BiasOfTile<Traits>& copied) const {
    auto const* const biases = wait_bias();
    ConsumerThread const thread;
    copied.take(biases, thread.warp_row % kAtomRows, thread.lane);
  }
  /// Also after O was staged where the next one goes.
  CUTE_DEVICE void release_bias() {
    finish_loads_of_shared();
    release(shared.bias_empty[order.warpgroup][biases.stage], biases);
  }

  /// Let a tile of K or V go that this warpgroup does not use, K in its turn.
  CUTE_DEVICE void skip_k() {
    wait_k();
    release_k();
    order.wait();
    order.pass();
  }
  CUTE_DEVICE void skip_v() {
    wait_v();
    release_v();
  }

  /// A job of which this warpgroup has no rows: lets go, in its turn, what the others use.
  CUTE_DEVICE void stand_by(typename Traits::Job const& job, bool copies_bias) {
    wait_q();
    release_q();
    CUTE_NO_UNROLL
    for (int i = 0; i < job.count(job.tiles); ++i) {
      skip_k();
      skip_v();
      if constexpr (Traits::Pairs) {
        if (copies_bias) wait_bias(), release_bias();
      }
    }
  }

 private:
  template <class Position>
  CUTE_DEVICE void release(Barrier& barrier, Position& position) {
    if (lane == 0) barrier.arrive();
    position.advance();
  }
};

/// Which of the thread's columns of a tile its rows see by windows and the last key.
template <class Traits>
CUTE_DEVICE TileMask<Traits::B_c / 4> within_ends(Params const& params, typename Traits::Job const& job, int tile,
                                                  int lane) {
  int tokens[2];  // of the thread's rows
  int const row = ConsumerThread().warp_row + lane / 4;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) tokens[i] = job.token0 + params.heads_a_tile.div(row + row_of(i));
  return TileMask<Traits::B_c / 4>(job.visibility.counted_from(tile * Traits::B_c), tokens, lane);
}

/// The same, and by the mask.
template <class Traits>
CUTE_DEVICE TileMask<Traits::B_c / 4> seen_of(Params const& params, typename Traits::Job const& job, int tile,
                                              Hiding const& hiding, int lane) {
  static_assert(Traits::B_c == 128, "the keys that are asked for");
  TileMask<Traits::B_c / 4> seen;
  if (hiding.ends) {
    seen = within_ends<Traits>(params, job, tile, lane);
  } else {
    seen.visible[0][0] = seen.visible[1][0] = ~0u;
  }
  if (hiding.mask) {
    int const row = job.token0 + ConsumerThread().warp_row + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      seen.visible[i][0] &= job.pairs.columns_seen(params, job.visibility, row + row_of(i), tile * Traits::B_c, lane);
  }
  return seen;
}

/// From products with the keys of `tile` to scores: score modifications, and masks where `masked`, which `seen` has
/// where there are pairs.
template <class Traits, class ScoreTensor>
CUTE_DEVICE void finish_scores(Params const& params, ScoreTensor& S, typename Traits::Job const& job, int tile,
                               bool masked, TileMask<Traits::B_c / 4> const& seen, bool copies_bias,
                               BiasOfTile<Traits> const& copied, float query_scale, int lane) {
  constexpr int B_c = Traits::B_c;
  if constexpr (Traits::ScoreMods) {
    if (ScoreMod::changes(params)) {
      // Distances are ALiBi's, under which heads are not packed, nor where pairs have something: rows are tokens.
      int const first_key = tile * B_c + lane % 4 * 2, token = job.token0 + ConsumerThread().warp_row + lane / 4;
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
      // float32 has the hyperbolic tangent that CUDA cores have.
      job.score_mod.template apply<Traits::Parts == 1>(S, job.visibility.start_pos + token - first_key,
                                                       [&](int i, int j) { return row_of(i) - key_of(j); });
      if (Traits::has_bias(params) && ScoreMod::caps(params) && !copies_bias) {
        change_by_columns<false>(S, [&](float (&x)[kQuadColumns], int i, int j) {
          job.pairs.add_bias(x, params, job.visibility, token + row_of(i), first_key + key_of(j), key_of_quad);
        });
      }
    }
  }
  if constexpr (Traits::Pairs) {
    if (copies_bias)
      copied.add(S, dtype_of_bias(params),
                 Traits::ScoreMods && ScoreMod::changes(params) ? kLog2e : kLog2e / query_scale);
  }
  if (masked) (Traits::Pairs ? seen : within_ends<Traits>(params, job, tile, lane)).apply(S);
}

/// What dropout keeps of P: drawn by the warp itself while products are on their way, or ahead of it by a warp of the
/// warpgroups that draw (producer.hpp).
template <class Traits>
struct Dropping {
  typename Traits::SharedStorage& shared;
  RingPosition<1> slot{};

  CUTE_DEVICE void draw(Params const& params, typename Traits::Job const& job, int tile) const {
    if constexpr (Traits::DropoutWarpgroups == 0) {
      ConsumerThread const thread;
      __syncwarp();  // O, which lies there too, has been read
      shared.drawn_of(thread.warp_row).of_lane[thread.lane] =
          DropoutBits(threshold_of(params), job.pairs, job.token0 + thread.warp_row, tile * Traits::B_c, thread.lane)
              .bits();
    }
  }

  /// Makes 0 of what is not kept of P, an operand.
  template <class WordTensor>
  CUTE_DEVICE void drop(WordTensor& words) {
    ConsumerThread const thread;
    int const warp = thread.warp_row / 16;
    auto const& drawn = shared.drawn_of(thread.warp_row);
    if constexpr (Traits::DropoutWarpgroups > 0) {
      shared.drawn_full[warp].wait_for(slot.phase);
      sm90::drop(words, [&](int i) { return drawn.of_sixteen[i][thread.lane]; });
      shared.drawn_empty[warp].arrive();
      slot.advance();
    } else {
      DropoutBits const bits(drawn.of_lane[thread.lane]);
      sm90::drop(words, [&](int i) { return bits.mask(i); });
    }
  }
};

/// A consumer warpgroup: S = Q K^T, softmax, O += P V for its 64 query rows of every job.
template <class Traits>
CUTE_DEVICE void consume(Params const& params, typename Traits::SharedStorage& shared, int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int B_c = Traits::B_c;
  constexpr bool in_parts = Traits::Parts > 1, in_halves = Traits::KeysOfSum < B_c;
  int const lane = threadIdx.x % 32;

  Tensor fQ = operand_q<Traits>(shared.q, warpgroup);
  Tensor fK = operand_k<Traits>(shared.k);
  Tensor fV = operand_v<Traits>(shared.v);
  // Their low parts, where they are in parts: the second half of a tile's columns.
  Tensor fK_low = operand_k<Traits>(shared.k + B_c * Traits::ColumnsQK / 2);
  Tensor fV_low = operand_v<Traits>(shared.v + B_c * Traits::ColumnsV / 2);
  Tensor fP = operand_p<Traits>();
  Tensor cS = accumulator_s<Traits>();
  Tensor cO = accumulator_o<Traits>();
  Tensor cPV = accumulator_o<Traits>();  // of operands in parts, some of the keys: a long sum would lose their bits
  // The thread's rows, 8 apart, and columns, counted from its first.
  Tensor S = rows_and_columns(cS);
  Tensor O = rows_and_columns(cO);
  Tensor words = recast<uint32_t>(fP);

  JobReader<Traits> jobs{shared, shared.job_full};
  WarpgroupOrder<Traits> const order{warpgroup};
  Rings<Traits> rings{shared, order, lane};
  float query_scale = ScoreMod::query_scale(params);

  // What pairs add to scores is there before the product, unless a softcap comes between.
  bool const copies_bias = Traits::copies_bias(params), drops = Traits::has_dropout(params);
  bool const starts_loaded = Traits::has_bias(params) && !copies_bias && !(Traits::ScoreMods && ScoreMod::caps(params));
  [[maybe_unused]] Dropping<Traits> dropping{shared};
  bool const masks = Traits::has_mask(params);
  // Whether nothing but the mask comes between the products.
  bool const mask_alone = !Traits::has_bias(params) && !drops && !(Traits::ScoreMods && ScoreMod::changes(params));
  auto begin_scores = [&](typename Traits::Job const& job, int tile) {
    if (!starts_loaded) return;
    auto const [lane, warp_row] = ConsumerThread();
    load_bias(S, kLog2e / query_scale, job.pairs, params, job.visibility, job.token0 + warp_row + lane / 4,
              tile * B_c + lane % 4 * 2, row_of, key_of);
  };
  auto issue_qk = [&] {
    if constexpr (in_parts) {
      int const stage = rings.k.stage;
      // Worked out here, or all addresses of Q's parts are kept in registers.
      Tensor fQ_here = operand_q<Traits>(shared.q, ConsumerThread().warp_row / kAtomRows);
      constexpr int kSteps = Traits::HeadDim / 16;
      return gemm_async<0, kSteps, kSteps>(typename Traits::MmaQK{}, fQ_here(_, _, _, rings.q.stage),
                                           fK(_, _, _, stage), fK_low(_, _, _, stage), cS, true);
    }
    gemm_async<Traits::HeadDim / 16>(typename Traits::MmaQK{}, fQ(_, _, _, rings.q.stage), fK(_, _, _, rings.k.stage),
                                     cS, !starts_loaded);
  };
  auto issue_pv = [&](auto half) {
    int const stage = rings.v.stage;
    if constexpr (in_parts) {
      constexpr int kSteps = Traits::KeysOfSum / 16;
      return gemm_async<half * kSteps, kSteps, B_c / 16>(typename Traits::MmaPV{}, fP, fV(_, _, _, stage),
                                                         fV_low(_, _, _, stage), cPV, true);
    }
    gemm_async<B_c / 16>(typename Traits::MmaPV{}, fP, fV(_, _, _, stage), cO, false);
  };
  auto add_pv = [&] {
    CUTE_UNROLL
    for (int e = 0; e < size(cO); ++e) cO(e) += cPV(e);
  };
  // The first half of P V has arrived: adds it and issues the second.
  auto issue_second_half = [&] {
    warpgroup_fence_operand(cPV);
    add_pv();
    issue_pv(_1{});
  };
  auto release_v = [&] {
    warpgroup_fence_operand(in_parts ? cPV : cO);
    rings.release_v();
    if constexpr (in_parts) add_pv();
  };
  auto finish_pv = [&] {
    warpgroup_wait<0>();
    release_v();
  };
  // Whether P V is done before scores are changed: beside both parts of P, O and the sum under way that would take more
  // registers than there are (24 to 32 bytes spilled, in the loop).
  constexpr bool changes_alone = in_parts && Traits::ScoreMods;
  // Issues the first Q K^T of a job, past the tiles that are hidden from this warpgroup alone. Where the job sees no
  // key or there is none, of whatever the buffers hold: WGMMAs in flight forbid a branch here.
  auto begin_job = [&](typename Traits::Job const& job, TilesOfRows const& mine) {
    if (mine.tiles.size() > 0) {
      begin_scores(job, mine.tiles.end - 1);
      CUTE_NO_UNROLL
      for (int i = 0; i < mine.skipped; ++i) rings.skip_k();
      rings.wait_q();
      rings.wait_k();
    }
    order.wait();
    issue_qk();
    order.pass();
  };

  // At head_dim 256 no register is left to keep `warpgroup` around the main loop: 24 bytes spilled.
  auto const tiles_of = [&](typename Traits::Job const& job) {
    return TilesOfRows(job, Traits::HeadDimV <= 192 ? warpgroup : ConsumerThread().warp_row / kAtomRows);
  };

  order.begin();
  for (bool exists = true; exists;) {
    auto const* next = jobs.next();
    TilesOfRows mine = tiles_of(*next);
    begin_job(*next, mine);
    warpgroup_wait<0>();
    while (mine.tiles.size() > 0) {
      auto const& job = *next;
      int const begin = mine.tiles.begin, end = mine.tiles.end;
      Range const unmasked = mine.unmasked;
      if constexpr (in_parts) {
        float const of_call = ScoreMod::query_scale(params);
        query_scale = fmaf(of_call, kCutOffScores, of_call) * shared.scales[&job - shared.jobs].scores;
      }
      // That scores still want.
      float const scale = Traits::ScoreMods && ScoreMod::changes(params) ? 1.f : query_scale;
      typename Traits::Softmax softmax;
      // What is known of a tile's pairs before their products have arrived.
      [[maybe_unused]] TileMask<B_c / 4> seen;
      [[maybe_unused]] BiasOfTile<Traits> copied;
      auto look_at = [&](int tile, Hiding const& hiding) {
        if constexpr (Traits::Pairs) {
          if (drops) dropping.draw(params, job, tile);
          if (BiasOfTile<Traits>::kAhead && copies_bias) {
            rings.take_bias(copied);
            rings.release_bias();
          }
          if (hiding.any()) seen = seen_of<Traits>(params, job, tile, hiding, lane);
        }
      };
      // The products of Q and the keys of `tile` have arrived: lets K go, and Q after the last.
      auto take_products = [&](int tile) {
        warpgroup_fence_operand(cS);
        rings.release_k();
        if (tile == begin) rings.release_q();
      };
      // They become scores.
      auto to_scores = [&](int tile, Hiding const& hiding) {
        bool const masked = Traits::Pairs ? hiding.any() : !unmasked.contains(tile);
        if constexpr (Traits::Pairs && !BiasOfTile<Traits>::kAhead) {
          if (copies_bias) rings.take_bias(copied);
        }
        finish_scores<Traits>(params, S, job, tile, masked, seen, copies_bias, copied, query_scale, lane);
        if constexpr (Traits::Pairs && !BiasOfTile<Traits>::kAhead) {
          if (copies_bias && !(Traits::BiasInO && tile == begin)) rings.release_bias();
        }
      };
      Walk<Traits::Consumers, Traits::Pairs> walk(job, warpgroup, end, masks);
      Hiding hiding = walk.hiding();
      look_at(end - 1, hiding);
      take_products(end - 1);
      to_scores(end - 1, hiding);
      softmax.template start<Element>(S, words, scale);
      if constexpr (Traits::Pairs) {
        if (drops) dropping.drop(words);
      }
      clear(cO);
      CUTE_NO_UNROLL
      for (int i = 0; i < mine.skipped; ++i) rings.skip_v();
      walk.look_below();
      // A tile with the products before it. `Plain`: nothing but they makes its scores.
      auto take_tile = [&](int tile, auto plain) __attribute__((always_inline)) {
        begin_scores(job, tile);
        rings.wait_k();
        if constexpr (in_halves) {
          // Q K^T between the halves: the first is added while it runs.
          rings.wait_v();
          order.wait();
          issue_pv(_0{});
          issue_qk();
          warpgroup_wait<1>();
          issue_second_half();
        } else {
          order.wait();
          issue_qk();
          rings.wait_v();
          issue_pv(_0{});
        }
        order.pass();
        walk.look_below();
        if (!plain) look_at(tile, hiding);
        warpgroup_wait<1>();
        take_products(tile);
        if constexpr (changes_alone) finish_pv();
        if (!plain) to_scores(tile, hiding);
        // The branch keeps the compiler from moving all exponentials past the wait for P V, beside which they are free.
        if (!softmax.begin_update(S, scale)) warpgroup_wait<0>();
        if constexpr (!changes_alone) finish_pv();
        softmax.template update<Element>(S, words, O, scale);
        if constexpr (Traits::Pairs) {
          if (drops) dropping.drop(words);
        }
      };
      for (int tile = walk.below(end - 1); tile >= begin; tile = walk.below(tile)) {
        hiding = walk.hiding();
        // Of a call with pairs, whether they say nothing of the tile, which is then taken as without them.
        bool const plain = Traits::Pairs && mask_alone && !hiding.any();
        if constexpr (Traits::MaskAlone) {
          if (plain) {
            take_tile(tile, std::true_type{});
          } else {
            take_tile(tile, std::false_type{});
          }
        } else {
          take_tile(tile, plain);
        }
      }
      rings.wait_v();
      order.wait();
      issue_pv(_0{});
      if constexpr (in_halves) {
        warpgroup_wait<0>();
        issue_second_half();
      }
      order.pass();
      // While the last P V runs: the sums, and then the next job's first product, which runs while O is stored.
      EpilogueRows results = finish<Traits>(params, job, softmax);
      if constexpr (in_parts) {
        float const out_scale = shared.scales[&job - shared.jobs].out;
        results.factor[0] *= out_scale;
        results.factor[1] *= out_scale;
      }
      __syncwarp();
      if (lane == 0) jobs.release(&job);
      next = jobs.next();
      mine = tiles_of(*next);
      begin_job(*next, mine);
      warpgroup_wait<1>();
      release_v();
      store<Traits>(params, results, O, shared);
      if constexpr (Traits::Pairs) {
        if (copies_bias && Traits::BiasInO) rings.release_bias();
      }
      warpgroup_wait<0>();
    }
    exists = next->exists;
    if (exists) {
      if (next->tiles.size() > 0) {
        rings.stand_by(*next, copies_bias);
      } else {
        bool const waits = Traits::BiasInO && copies_bias;
        if constexpr (Traits::Pairs) {
          if (waits) rings.wait_bias();
        }
        store_empty<Traits>(params, *next, shared);
        if constexpr (Traits::Pairs) {
          if (waits) rings.release_bias();
        }
      }
      __syncwarp();
      if (lane == 0) jobs.release(next);
    }
  }
}

/// By one warp, before any other uses the barriers or the tensor maps.
template <class Traits>
CUTE_DEVICE void set_up_barriers(TensorMaps const& maps, typename Traits::SharedStorage& shared) {
  constexpr int kReaders = 4 * Traits::Consumers;  // every consumer warp says when it is done with a buffer
  for (CUtensorMap const* map : {&maps.q, &maps.k, &maps.v}) cute::prefetch_tma_descriptor(map);
  if (threadIdx.x % 32 == 0) {
    auto init = [](auto& full, int writers, auto& empty, int readers) {
      for (auto& barrier : full) barrier.init(writers);
      for (auto& barrier : empty) barrier.init(readers);
    };
    // And the copying warps, and those that draw.
    init(shared.job_full, Traits::Consumers, shared.job_empty, kReaders + 3 + 4 * Traits::DropoutWarpgroups);
    init(shared.q_full, 1, shared.q_empty, kReaders);
    init(shared.k_full, 1, shared.k_empty, kReaders);
    init(shared.v_full, 1, shared.v_empty, kReaders);
    if constexpr (Traits::Pairs) {
      for (int i = 0; i < Traits::Consumers; ++i) init(shared.bias_full[i], 1, shared.bias_empty[i], 4);
    }
    init(shared.drawn_full, 32, shared.drawn_empty, 32);
    for (auto& barrier : shared.job_placed) barrier.init(1);
    shared.job_asked.init(1);
    shared.q_tail.init(1);
    shared.v_tail.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    fmha_kernel(__grid_constant__ Params const params, __grid_constant__ typename Traits::Maps const maps) {
  if constexpr (Traits::Parts > 1) {
    if (params.is_skipped()) return;
  }
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  // The first consumers come by the producer too: the assembler then places it in front of them, next to the entry.
  // Where it lay behind them, jumps to instructions that come from DRAM took 2.5 us in front of a call's first tile,
  // one after the other. Between its two changes of registers a warpgroup synchronises below, as PTX wants it.
  if (warpgroup <= 1) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (warpgroup == 0) {
      int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
      if (warp == 0) {
        schedule<Traits>(params, shared);  // works out the first job before it waits for the barriers
      } else {
        if (warp == 3) set_up_barriers<Traits>(maps, shared);
        __syncthreads();
        if (warp == 1) copy_queries<Traits>(params, maps, shared);
        if (warp == 2) copy_keys<Traits>(params, maps.k, shared);
        if (warp == 3) copy_values<Traits>(params, maps.v, shared);
      }
      return;
    }
  }
  __syncthreads();
  if constexpr (Traits::DropoutWarpgroups > 0) {
    if (warpgroup > Traits::Consumers) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::DropoutRegisters>();
      produce_dropout<Traits>(params, shared, warpgroup - 1 - Traits::Consumers);
      return;
    }
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
  consume<Traits>(params, shared, warpgroup - 1);
}

/// The kernel of one tile shape, launched persistent for all query tiles and splits.
template <int B_r, int B_c, int HeadDim, int HeadDimV, class Element, int Stages, int StagesQ, Features Mods = 0>
struct FMHA {
  using Traits = sm90::Traits<B_r, B_c, HeadDim, HeadDimV, Element, Stages, StagesQ, Mods>;
  static constexpr char const* kFamily = "sm90";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr Kind kKind = Kind::Persistent;
  // Whether parts hold a sequence may depend on the others of the batch.
  static constexpr Features kTakes = Traits::Mods | feature::Sink | feature::Packed |
                                     (feature::kUnlike & ~(Traits::PlainBias ? feature::LeftPadding : 0)) |
                                     feature::FewerKeys | feature::Pages |
                                     (Traits::Parts == 1 ? feature::FixedSplits | feature::Float32Results : 0),
                            kWants = Traits::PlainBias || Traits::MaskAlone ? Traits::Mods
                                     : Traits::AlwaysDrops                  ? feature::Dropout
                                                                            : 0;
  static bool takes_shape(Params const& params) {
    if (Traits::OfKeysAlone && params.mask.row != 0) return false;
    return !Traits::PlainBias || is_copyable(bias_of(params)) || shares_bias(params);
  }
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have on Hopper");
  static_assert(Traits::Consumers > 1, "warpgroups take turns with each other");
};

}  // namespace cutlass_ext::sm90

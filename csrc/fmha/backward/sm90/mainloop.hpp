// The main loop of a consumer warpgroup of a backward kernel: accumulators, operands and products of a tile in hand,
// and what becomes of the scores of a tile that passes by. Its turns are in turns.hpp. Used by turns.hpp and
// consumer.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "../../cute_tensor.hpp"
#include "../../score.hpp"
#include "../../softmax.hpp"
#include "dq_gemm.hpp"
#include "statistics.hpp"

namespace cutlass_ext::sm90 {

/// Where a consumer warpgroup stands in the stages of shared memory, from tile to tile.
template <class Traits>
struct PipelineState {
  RingPosition<Traits::Stages> ring{};
  RingPosition<Traits::StagesV> ring_v{};  // of dout, where it has stages of its own, or values in hand pass there, too
  RingPosition<Traits::StagesDS> ds{}, last_ds{};
  uint32_t sent_phase = 0;  // of dS for, or of, the other CTA of a cluster
  unsigned taken = 0;       // tiles of dS, by a warpgroup that does nothing else
  PhasesOfSums phases;

  // Positions that are always the same are one: at head_dim 256 each more cost 20 to 40 bytes of spills.
  static constexpr bool kOneForValues = !Traits::DqInShared && Traits::StagesV == Traits::Stages,
                        kOneForDS = Traits::HasDqWarpgroup && Traits::StagesDS == Traits::Stages;
  CUTE_DEVICE auto& of_values() {
    if constexpr (kOneForValues) {
      return ring;
    } else {
      return ring_v;
    }
  }
  CUTE_DEVICE auto& of_ds() {
    if constexpr (kOneForDS) {
      return ring;
    } else {
      return ds;
    }
  }
};

/// The warp's 16 of `Rows` rows of a panel that are in hand, to registers: operand A.
template <int Rows, class Operand, class Element>
CUTE_DEVICE void load_held(Operand& operand, Element const* held) {
  auto const [lane, warp_row] = GradientThread();
  Tensor words = recast<uint32_t>(operand);
  int const row = warp_row % Rows + lane % 16;
  CUTE_UNROLL
  for (int m = 0; m < kPanel / 16; ++m) {
    auto const* const from = held + row * kPanel + swizzled_chunk<Element>(2 * m + lane / 16, row);
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(from), words(4 * m), words(4 * m + 1), words(4 * m + 2),
                            words(4 * m + 3));
  }
}

/// 64 rows in hand, of `Columns` columns, as operand A, where they lie in shared memory.
template <class Traits, int Columns, class Mma>
CUTE_DEVICE auto operand_in_shared(Mma, typename Traits::Part* data, int row_block) {
  using Layout = typename Traits::template LayoutHeld<Columns>;
  Tensor rows = local_tile(make_tensor(make_smem_ptr(data), Layout{}), Shape<Int<kAtomRows>, Int<Columns>>{},
                           make_coord(row_block, _0{}));
  return Mma::operand_a(rows);
}

/// The same where the kernel has them: registers, or shared memory.
template <class Traits, int Columns, class Mma>
CUTE_DEVICE auto operand_held(Mma mma, typename Traits::Part* data, int row_block) {
  if constexpr (Traits::HoldsInRegisters) {
    return Mma::template registers_a<Columns>();
  } else {
    return operand_in_shared<Traits, Columns>(mma, data, row_block);
  }
}

/// Rows that pass by, in all of their stages, as operand B.
template <class Layout, class Mma, class Part>
CUTE_DEVICE auto operand_streamed(Mma, Part* data) {
  return Mma::operand_b(make_tensor(make_smem_ptr(data), Layout{}));
}

/// The sums of 64 rows' products.
template <int Columns, class Mma>
CUTE_DEVICE auto accumulator_of(Mma) {
  return Mma::template sums<Columns>();
}

/// What a consumer warpgroup makes of one tile in hand, X: of keys, or of query rows. Y passes by, the other of q and
/// k; Xv and Yv are v and dout likewise.
template <class Traits, Accumulates What>
struct Mainloop {
  using Element = typename Traits::Element;
  using Part = typename Traits::Part;
  static constexpr int Step = Traits::Step, ColumnsQK = Traits::ColumnsQK, ColumnsV = Traits::ColumnsV;
  static constexpr bool SumsP = sums_p(What), SumsS = sums_ds(What);
  static constexpr bool AddsQ = What == Accumulates::All;
  // Whether dP is computed in the place of S: P is another warpgroup's.
  static constexpr bool kGetsP = Traits::HasDqWarpgroup && What == Accumulates::Keys;
  // Wide heads have no registers to spare: dK's product reads dS from shared memory, where it lies for dQ.
  static constexpr bool kReadsDS = AddsQ && Traits::HeadDim > 64;
  static constexpr bool kInParts = Traits::Parts > 1;
  using MmaS = typename Traits::MmaScores;
  using MmaG = typename Traits::template MmaGradient<Traits::HeadDim>;
  using MmaV = typename Traits::template MmaGradient<Traits::HeadDimV>;
  template <class Mma, int Columns>
  using Held = decltype(operand_held<Traits, Columns>(Mma{}, static_cast<Part*>(nullptr), 0));
  template <class Mma, int Columns>
  using Accumulator = decltype(accumulator_of<Columns>(Mma{}));
  template <class Mma>
  using Weights = decltype(Mma::template registers_a<Traits::Parts * Step>());

  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  GradientTile<Traits> const& tile;
  PipelineState<Traits>& state;
  int const row_block, turns;
  Range const tiles, unmasked;

  Held<MmaS, ColumnsQK> fX;
  Held<MmaS, ColumnsV> fXv;
  Accumulator<MmaS, Step> cS;
  Accumulator<MmaG, Traits::HeadDim> cA;   // dK, or dQ
  Accumulator<MmaV, Traits::HeadDimV> cV;  // dV
  Weights<MmaV> fP;
  Weights<MmaG> fdS;
  // What products are to be multiplied by where operands were scaled; made where there are keys.
  GradientScales scales{};
  float query_scale;
  StatisticsAtHand<Traits, AddsQ> statistics;
  OnesOfColumns const ones;
  StreamIterator<Traits> order;
  DqAccumulator<Traits> due;
  TilePairs<Traits> tile_pairs;
  BiasAhead<Traits> bias_ahead;
  // What the copying warp says of the tile that passes by, and of the next one: where nothing but a mask, and a bias,
  // changes scores, in registers before the turn begins, which takes 1 to 4% less time.
  StreamedTileInfo current_tile, next_tile;
  int changes_next = 0;   // whether the next tile has more than visibility to change scores
  float row_sum[2] = {};  // of P in parts, where rows are in hand

  CUTE_DEVICE Mainloop(BackwardParams const& params, typename Traits::SharedStorage& shared,
                       GradientTile<Traits> const& tile, int row_block, PipelineState<Traits>& state)
      : params(params),
        shared(shared),
        tile(tile),
        state(state),
        row_block(row_block),
        turns(tile.turns(params)),
        tiles(tile.tiles),
        unmasked(tile.unmasked),
        fX(operand_held<Traits, ColumnsQK>(MmaS{}, shared.held, row_block)),
        fXv(operand_held<Traits, ColumnsV>(MmaS{}, shared.held_v, row_block)),
        query_scale(Traits::ScoreMods ? ScoreMod::query_scale(params) : kLog2e * ScoreMod::gradient_scale(params)),
        statistics(params, shared, tile),
        order(tile, tiles),
        due(params, shared, tile, row_block, state.phases) {
    clear(cA);
    clear(cV);
    warpgroup_fence_operand(cA);  // zeros that the compiler moved behind the first product would end the pipeline
    warpgroup_fence_operand(cV);
    if constexpr (kInParts) {
      if (turns > 0) scales = params.gradient_scales[tile.work.batch * params.heads_kv + tile.head_kv];
      query_scale = fmaf(query_scale, kCutOffScores, query_scale) * scales.scores;
      scales.dp = fmaf(scales.dp, kCutOffScores, scales.dp);
    }
  }

  // Views.
  CUTE_DEVICE auto& ring_v() { return state.of_values(); }
  CUTE_DEVICE auto& ds() { return state.of_ds(); }
  CUTE_DEVICE auto words_p() { return recast<uint32_t>(fP); }
  CUTE_DEVICE auto words_ds() { return recast<uint32_t>(fdS); }
  /// Of P that passes from one thread to that of the same number: what both hold lies in the same order.
  CUTE_DEVICE float4* passed_p() const {
    return shared.p + threadIdx.x / 32 % 4 * Traits::VectorsOfP * 32 + threadIdx.x % 32;
  }
  CUTE_DEVICE StreamedTileInfo const& streamed_tile(int stage) const {
    if constexpr (Traits::PlainMask) return current_tile;
    return shared.at[stage];
  }
  CUTE_DEVICE static auto accumulator_of_dp() { return accumulator_of<Step>(MmaS{}); }

  // Operands of what passes by; their low parts, where they are in parts, are the second half of a tile's columns.
  CUTE_DEVICE auto fY(int low = 0) const {
    return operand_streamed<typename Traits::template LayoutStreamed<ColumnsQK>>(
        MmaS{}, shared.streamed + low * Step * ColumnsQK / 2);
  }
  CUTE_DEVICE auto fYv(int low = 0) const {
    return operand_streamed<typename Traits::template LayoutStreamed<ColumnsV>>(
        MmaS{}, shared.streamed_v + low * Step * ColumnsV / 2);
  }
  CUTE_DEVICE auto fYt() const {
    return operand_streamed<typename Traits::template LayoutAcross<ColumnsQK>>(
        typename Traits::template MmaGradient<ColumnsQK>{}, shared.streamed);
  }
  CUTE_DEVICE auto fYvt() const {
    return operand_streamed<typename Traits::template LayoutAcross<ColumnsV>>(
        typename Traits::template MmaGradient<ColumnsV>{}, shared.streamed_v);
  }

  // Products, issued and not waited for: S, dP, and the sums of dV and of dK or dQ.
  CUTE_DEVICE void issue_s(int stage) {
    if constexpr (kInParts) {
      constexpr int kSteps = Traits::HeadDim / 16;
      // Rows in hand in parts: worked out where they are wanted, or all addresses are kept in registers.
      gemm_async<0, kSteps, kSteps>(MmaS{},
                                    operand_in_shared<Traits, ColumnsQK>(MmaS{}, shared.held + opaque(0), row_block),
                                    fY()(_, _, _, stage), fY(1)(_, _, _, stage), cS, true);
    } else if constexpr (Traits::FoldsStatistics) {
      gemm_async<Traits::HeadDim / 16>(MmaS{}, fX, fY()(_, _, _, stage), cS, ones, shared.lse_columns[stage]);
    } else {
      gemm_async<Traits::HeadDim / 16>(MmaS{}, fX, fY()(_, _, _, stage), cS, true);
    }
  }
  template <class Sums>
  CUTE_DEVICE void issue_dp(Sums& cdP, int stage_v, int stage) {
    if constexpr (Traits::FoldsStatistics) {
      gemm_async<Traits::HeadDimV / 16>(MmaS{}, fXv, fYv()(_, _, _, stage_v), cdP, ones, shared.delta_columns[stage]);
    } else {
      gemm_async<Traits::HeadDimV / 16>(MmaS{}, fXv, fYv()(_, _, _, stage_v), cdP, true);
    }
  }
  /// The same of a panel of columns in parts: of longer sums the tensor cores cut off so much that where all terms have
  /// one sign dP - delta errs more than on CUDA cores.
  template <int Panel, class Sums>
  CUTE_DEVICE void issue_panel_of_dp(Sums& cdP, int stage) {
    constexpr int kSteps = kPanel / 16;
    gemm_async<Panel * kSteps, kSteps, Traits::HeadDimV / 16>(
        MmaS{}, operand_in_shared<Traits, ColumnsV>(MmaS{}, shared.held_v + opaque(0), row_block),
        fYv()(_, _, _, stage), fYv(1)(_, _, _, stage), cdP, true);
  }
  CUTE_DEVICE void issue_dv(int stage) { gemm_async<Step / 16>(MmaV{}, fP, fYvt()(_, _, _, stage), cV, false); }
  CUTE_DEVICE void issue_gradient(int stage) { gemm_async<Step / 16>(MmaG{}, fdS, fYt()(_, _, _, stage), cA, false); }
  /// dK, of dS in shared memory.
  CUTE_DEVICE void issue_dk_of_shared(int stage) {
    gemm_async<Step / 16>(typename Traits::MmaKeys{}, due.sums.own_ds(ds().stage), fYt()(_, _, _, stage), cA, false);
  }

  // What has been read is let go.
  CUTE_DEVICE static void release(Barrier& barrier) {
    if (elect_one_sync()) barrier.arrive();
  }
  /// The same of what passes by, which CTAs of a cluster copy for each other.
  CUTE_DEVICE static void release_streamed(Barrier& barrier) {
    if constexpr (Traits::Cluster > 1) {
      if (threadIdx.x % 32 < Traits::Cluster) barrier.arrive_at(threadIdx.x % 32);
    } else {
      release(barrier);
    }
  }
  CUTE_DEVICE void release_rows(int stage) {
    if constexpr (Traits::ReadsStatistics && Traits::Cluster == 1) {
      shared.empty[stage].arrive();  // every lane for itself: each has read statistics
    } else {
      // All have read them, or added.
      if constexpr (Traits::ReadsStatistics || Traits::SkipsTiles || (Traits::InOrder && !Traits::StagesSums))
        __syncwarp();
      release_streamed(shared.empty[stage]);
    }
  }
  /// Until dS may be left where `ds` stands, and sent: all have read what was there.
  CUTE_DEVICE void wait_for_room() {
    shared.ds_empty[ds().stage].wait_for(ds().phase ^ 1);
    if constexpr (Traits::Cluster > 1) shared.cluster.sent_ds_empty.wait_for(state.sent_phase ^ 1);
  }
  /// In a launch of fixed order: what the warp has had the copy engine add a turn ago is there.
  CUTE_DEVICE void wait_for_added(int turn) {
    if constexpr (Traits::InOrder && Traits::StagesSums) {
      if (params.dq_semaphore && !due.is_own(turn) && elect_one_sync()) wait_for_bulk_writes();
    }
  }

  /// From the products in S to P, an operand, and in S to P times the derivative of the score. `Changed`: whether
  /// anything but visibility changes scores, or what becomes of them.
  template <bool Changed>
  CUTE_DEVICE void compute_p(std::bool_constant<Changed>, int stage, int t, int head) {
    constexpr bool kModified = Changed && Traits::ScoreMods;
    warpgroup_fence_operand(cS);
    Tensor S = rows_and_columns(cS);
    // p - j of an element of scores that are changed: rows in hand are query rows, or keys.
    auto const offset_of = [](int i, int j) { return Traits::OfKeys ? key_of(j) - row_of(i) : row_of(i) - key_of(j); };
    [[maybe_unused]] ScoreMod const score_mod = score_mod_of<kModified>(head);
    [[maybe_unused]] int offset = 0;
    float const scale = kModified && ScoreMod::changes(params) ? 1.f : query_scale;
    if constexpr (kModified) {
      GradientThread const thread;
      int const first_row = tile.first_row(thread), first_column = t * Step + thread.lane % 4 * 2;
      Visibility const& visibility = tile.sequence.visibility;
      offset = Traits::OfKeys ? visibility.offset(first_column, first_row) : visibility.offset(first_row, first_column);
      if (ScoreMod::changes(params)) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
        score_mod.template apply<true>(S, offset, offset_of);
      }
    }
    if constexpr (Traits::PlainBias) {
      bias_ahead.add(S, reciprocal(ScoreMod::gradient_scale(params)), dtype_of_bias(params), shared, row_block,
                     ring_v().stage);
    } else if constexpr (Changed && (Traits::Mods & feature::Bias)) {
      if (has_bias(params)) tile_pairs.add_bias(S, params, shared, tile, streamed_tile(stage));
    }
    if constexpr (Changed && (Traits::Mods & feature::Mask)) {
      if (tile_pairs.is_mixed(streamed_tile(stage))) tile_pairs.hide(S);
    }
    // Beside pairs it is read again each turn: 4 to 24 bytes less spilled.
    if (!(Traits::Pairs ? tile.unmasked : unmasked).contains(t)) {
      GradientThread const thread;
      int const first_row = tile.first_row(thread), rows[2] = {first_row, first_row + row_of(1)};
      TileMask<Step / 4> mask(tile.view.counted_from(t * Step), rows, thread.lane);
      // 0 times what their exponential may be is not 0.
      if constexpr (AddsQ || Traits::HasDqWarpgroup) mask.hide_rows_from(tile.view.n_q, rows);
      mask.apply(S);
    }
    using Capped = std::bool_constant<kModified && SumsS>;
    if (Capped::value && ScoreMod::caps(params)) {
      // Without a branch an element where there are registers for it: 20 bytes spilled beside 128 keys a tile, 44
      // beside dK and dV of wide heads.
      constexpr bool kUnbranched = Step <= 64 && (Traits::HeadDim <= 128 || !Traits::OfKeys);
      if (kUnbranched && !(features_of(params) & feature::Alibi)) {
        float const per_softcap = reciprocal(score_mod.softcap_log2);
        exponentiate<Changed, Capped::value>(
            scale, stage, [&](float score, int, int) { return ScoreMod::derivative_of_softcap(score, per_softcap); });
      } else {
        exponentiate<Changed, Capped::value>(scale, stage, [&](float score, int i, int j) {
          return score == -INFINITY ? 0.f : score_mod.derivative(score, offset + offset_of(i, j));
        });
      }
    } else {
      exponentiate<Changed, false>(scale, stage, nullptr);
    }
    if constexpr (SumsP && Changed && Traits::Pairs) {
      Tensor words = words_p();
      if (tile_pairs.has_dropout(params)) tile_pairs.drop(words);
    }
  }

  /// From weights and dP to dS, an operand.
  template <bool Changed, class Sums>
  CUTE_DEVICE void compute_ds(std::bool_constant<Changed>, Sums& cdP, int stage) {
    warpgroup_fence_operand(cdP);
    Tensor S = rows_and_columns(cS);
    Tensor dP = rows_and_columns(cdP);
    Tensor words_of_p = words_p();
    Tensor words = words_ds();
    auto const multiply = [&](auto const& ds_of) {
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2) {
        [[maybe_unused]] float4 p;
        if constexpr (kGetsP) p = passed_p()[j / 2 * 32];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const of_rows = statistics.deltas(stage, i, j);
          float left = S(i, j), right = S(i, j + 1);
          if constexpr (kGetsP) left = i == 0 ? p.x : p.z, right = i == 0 ? p.y : p.w;
          if constexpr (Traits::ThreeConsumers) put_operand<Element>(words_of_p, i, j, left, right);
          put_operand<Element>(words, i, j, ds_of(i, j, left, of_rows.x), ds_of(i, j + 1, right, of_rows.y));
        }
      }
    };
    if (Traits::Pairs && Changed && tile_pairs.has_dropout(params)) {
      float const share = -reciprocal(params.dropout.scale);
      multiply([&](int i, int j, float p, float delta) {
        return tile_pairs.add_if_kept(i, j, p, dP(i, j), p * (delta * share));
      });
    } else {
      multiply([&](int i, int j, float p, float delta) { return p * (dP(i, j) - delta); });
    }
  }

  /// Asks for what the next tile, that of `stage`, wants besides rows. `Changed`: of the turn that asks.
  template <bool Changed>
  CUTE_DEVICE void prefetch_pairs(std::bool_constant<Changed>, int stage, int t, int head) {
    if constexpr (Traits::PlainBias) bias_ahead.take(shared, row_block, stage);
    if constexpr (Traits::DropsAlone) {
      tile_pairs.draw_for(params, tile, t, head);
    } else if constexpr (Traits::SkipsTiles) {
      StreamedTileInfo const& next = shared.at[stage];
      if constexpr (Traits::PlainMask) next_tile = next;
      if constexpr (Traits::TwoBodies) changes_next = Changed && tile_pairs.changes_every_tile(params) ? 1 : next.mixed;
      tile_pairs.template ask<Changed>(params, shared, tile, next);
    }
  }

  // Defined in turns.hpp.
  template <bool Changed>
  CUTE_DEVICE void take_turn(std::bool_constant<Changed> changed, int turn);
  CUTE_DEVICE void take_turn_of_three(int turn);
  CUTE_DEVICE void take_turn_split(int turn);
  CUTE_DEVICE void take_turn_in_parts(int turn);

 private:
  template <bool Modified>
  CUTE_DEVICE ScoreMod score_mod_of(int head) const {
    if constexpr (Modified) return ScoreMod(params, tile.work.batch, head);
    return ScoreMod(cutlass_ext::Scores{}, 0, 0);
  }

  template <bool Changed, bool Capped, class Derivative>
  CUTE_DEVICE void exponentiate(float scale, int stage, Derivative const& derivative) {
    Tensor S = rows_and_columns(cS);
    [[maybe_unused]] Tensor words = words_p();
    [[maybe_unused]] float of_tile[2] = {};
    CUTE_UNROLL
    for (int j = 0; j < Step / 4; j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float2 const of_rows = statistics.template lses<Changed>(stage, i, j);
        auto const weight = [&](int j, float lse) {
          float const score = S(i, j), p = exp2_approx(fmaf(score, scale, kInParts ? kShiftP - lse : -lse));
          S(i, j) = p;
          if constexpr (Capped) S(i, j) *= derivative(score, i, j);
          return p;
        };
        float const left = weight(j, of_rows.x), right = weight(j + 1, of_rows.y);
        if constexpr (SumsP && !Traits::ThreeConsumers) put_operand<Element>(words, i, j, left, right);
        if constexpr (kInParts && !Traits::OfKeys) of_tile[i] += left + right;
      }
    }
    if constexpr (kInParts && !Traits::OfKeys) row_sum[0] += of_tile[0], row_sum[1] += of_tile[1];
  }
};

}  // namespace cutlass_ext::sm90

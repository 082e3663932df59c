// A consumer warpgroup of a backward kernel: goes through the tiles of the other side that see the tile in hand, and
// sums up its gradients. Used by kernel.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "../../score.hpp"
#include "../../softmax.hpp"
#include "query_sums.hpp"
#include "results.hpp"
#include "statistics.hpp"

namespace cutlass_ext::sm90 {

/// The warp's 16 of `Rows` rows of a panel that are in hand, to registers: operand A.
template <int Rows, class Operand, class Element>
CUTE_DEVICE void load_held(Operand& operand, Element const* held) {
  auto const [lane, warp_row] = ConsumerThread();
  Tensor words = recast<uint32_t>(operand);
  int const row = warp_row % Rows + lane % 16;
  CUTE_UNROLL
  for (int m = 0; m < kPanel / 16; ++m) {
    auto const* const from = held + row * kPanel + swizzled_chunk<Element>(2 * m + lane / 16, row);
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(from), words(4 * m), words(4 * m + 1), words(4 * m + 2),
                            words(4 * m + 3));
  }
}

/// Where a consumer warpgroup stands, from tile to tile.
template <class Traits>
struct Standing {
  RingPosition<Traits::Stages> ring{};
  RingPosition<Traits::StagesV> ring_v{};  // of dout, where it has stages of its own, or values in hand pass there, too
  RingPosition<Traits::BuffersDS> ds{}, last_ds{};
  uint32_t sent_phase = 0;  // of dS for, or of, the other CTA of a cluster
  unsigned taken = 0;       // tiles of dS, by a warpgroup that does nothing else
  PhasesOfSums phases;

  // Positions that are always the same are one: at head_dim 256 each more cost 20 to 40 bytes of spills.
  static constexpr bool kOneForValues = !Traits::HoldsSums && Traits::StagesV == Traits::Stages,
                        kOneForDS = Traits::AddsApart && Traits::BuffersDS == Traits::Stages;
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

/// A warpgroup that adds to dQ, of what those of dV and dK have left.
template <class Traits>
CUTE_DEVICE void add_to_queries(BackwardParams const& params, typename Traits::SharedStorage& shared,
                                GradientTile<Traits> const& tile, Standing<Traits>& standing) {
  if (tile.turns(params) == 0) return;
  QuerySums<Traits> const query_sums(shared, 0);
  Tensor fdS = QuerySums<Traits>::operand();
  shared.held_full.wait_for(tile.held_phase);
  StreamOrder<Traits> order(params, tile, tile.tiles);
  CUTE_NO_UNROLL
  for (int left = tile.turns(params); left > 0; --left, order.advance(params, tile, tile.tiles)) {
    int const buffer = standing.taken % Traits::BuffersDS;
    shared.ds_full[buffer].wait_for(standing.taken / Traits::BuffersDS % 2);
    if constexpr (Traits::Cluster > 1) {
      auto& full = shared.cluster.ds_full;
      if (threadIdx.x % kWarpgroup == 0) full.arrive_and_expect_tx(sizeof(shared.other_ds));
      full.wait_for(standing.sent_phase);
      standing.sent_phase ^= 1;
    }
    query_sums.take(fdS, buffer);
    query_sums.add_tile(fdS, sums_of_tile(params, tile, order.head, order.t()) + query_sums.first(),
                        [&] { query_sums.release(buffer); });
    ++standing.taken;
  }
  if (elect_one_sync()) shared.held_empty.arrive(), shared.held_v_empty.arrive();
}

/// A consumer warpgroup: goes through the tiles of the stream and sums up its gradients.
template <class Traits, Sums What>
CUTE_DEVICE void accumulate(BackwardParams const& params, typename Traits::SharedStorage& shared,
                            GradientTile<Traits> const& tile, int row_block, Standing<Traits>& standing) {
  using Element = typename Traits::Element;
  using Part = typename Traits::Part;
  constexpr int Step = Traits::Step, ColumnsQK = Traits::ColumnsQK, ColumnsV = Traits::ColumnsV;
  constexpr bool SumsP = sums_p(What), SumsS = sums_ds(What);
  constexpr bool AddsQ = What == Sums::All;
  // Whether dP is computed in the place of S: P is another warpgroup's.
  constexpr bool kGetsP = Traits::AddsApart && What == Sums::Keys;
  // Wide heads have no registers to spare: dK's product reads dS from shared memory, where it lies for dQ.
  [[maybe_unused]] constexpr bool kReadsDS = AddsQ && Traits::HeadDim > 64;
  constexpr bool kInParts = Traits::Parts > 1;
  using MmaS = typename Traits::template MmaScores<Traits::HeadDim>;
  using MmaP = typename Traits::template MmaScores<Traits::HeadDimV>;
  using MmaG = typename Traits::template MmaGradient<Traits::HeadDim>;
  using MmaV = typename Traits::template MmaGradient<Traits::HeadDimV>;

  auto const operand_held = [&](auto mma, Part* data, auto columns) {
    if constexpr (Traits::HoldsInRegisters)
      return make_tensor<Part>(partition_shape_A(mma, Shape<Int<kAtomRows>, decltype(columns)>{}));
    using Layout = typename Traits::template LayoutHeld<decltype(columns)::value>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(data), Layout{}), Shape<Int<kAtomRows>, decltype(columns)>{},
                             make_coord(row_block, _0{}));
    return mma.get_slice(0).partition_fragment_A(rows);
  };
  auto const operand_b = [&](auto mma, Part* data, auto layout) {
    return mma.get_slice(0).partition_fragment_B(make_tensor(make_smem_ptr(data), layout));
  };
  Tensor fX = operand_held(MmaS{}, shared.held, Int<ColumnsQK>{});
  Tensor fXv = operand_held(MmaP{}, shared.held_v, Int<ColumnsV>{});
  Tensor fY = operand_b(MmaS{}, shared.streamed, typename Traits::template LayoutStreamed<ColumnsQK>{});
  Tensor fYv = operand_b(MmaP{}, shared.streamed_v, typename Traits::template LayoutStreamed<ColumnsV>{});
  // Their low parts, where they are in parts: the second half of a tile's columns.
  Tensor fY_low =
      operand_b(MmaS{}, shared.streamed + Step * ColumnsQK / 2, typename Traits::template LayoutStreamed<ColumnsQK>{});
  Tensor fYv_low =
      operand_b(MmaP{}, shared.streamed_v + Step * ColumnsV / 2, typename Traits::template LayoutStreamed<ColumnsV>{});
  Tensor fYt = operand_b(typename Traits::template MmaGradient<ColumnsQK>{}, shared.streamed,
                         typename Traits::template LayoutAcross<ColumnsQK>{});
  Tensor fYvt = operand_b(typename Traits::template MmaGradient<ColumnsV>{}, shared.streamed_v,
                          typename Traits::template LayoutAcross<ColumnsV>{});
  Tensor cS = partition_fragment_C(MmaS{}, Shape<Int<kAtomRows>, Int<Step>>{});
  Tensor cA = partition_fragment_C(MmaG{}, Shape<Int<kAtomRows>, Int<Traits::HeadDim>>{});
  Tensor cV = partition_fragment_C(MmaV{}, Shape<Int<kAtomRows>, Int<Traits::HeadDimV>>{});
  Tensor fP = make_tensor<Part>(partition_shape_A(MmaV{}, Shape<Int<kAtomRows>, Int<Traits::Parts * Step>>{}));
  Tensor fdS = make_tensor<Part>(partition_shape_A(MmaG{}, Shape<Int<kAtomRows>, Int<Traits::Parts * Step>>{}));
  Tensor S = rows_and_columns(cS);
  Tensor A = rows_and_columns(cA);
  Tensor V = rows_and_columns(cV);
  // Of P that passes from one thread to that of the same number: what both hold lies in the same order.
  [[maybe_unused]] float4* const passed = shared.p + threadIdx.x / 32 % 4 * Traits::VectorsOfP * 32 + threadIdx.x % 32;
  Tensor words_p = recast<uint32_t>(fP);
  Tensor words_ds = recast<uint32_t>(fdS);
  clear(cA);
  clear(cV);
  warpgroup_fence_operand(cA);  // zeros that the compiler moved behind the first product would end the pipeline
  warpgroup_fence_operand(cV);

  int const turns = tile.turns(params);
  // What products are to be multiplied by where operands were scaled; made where there are keys.
  [[maybe_unused]] GradientScales scales{};
  if constexpr (kInParts) {
    if (turns > 0) scales = params.gradient_scales[tile.work.batch * params.heads_kv + tile.head_kv];
  }
  float query_scale = Traits::ScoreMods ? ScoreMod::query_scale(params) : kLog2e * ScoreMod::gradient_scale(params);
  if constexpr (kInParts) {
    query_scale = fmaf(query_scale, kCutOffScores, query_scale) * scales.scores;
    scales.dp = fmaf(scales.dp, kCutOffScores, scales.dp);
  }
  StatisticsAtHand<Traits, AddsQ> statistics(params, shared, tile);
  [[maybe_unused]] OnesOfColumns const ones;
  Range const tiles = tile.tiles, unmasked = tile.unmasked;
  auto& ring = standing.ring;
  auto& ring_v = standing.of_values();
  [[maybe_unused]] auto &ds = standing.of_ds(), &last_ds = standing.last_ds;
  // Until dS may be left where `ds` stands, and sent: all have read what was there.
  [[maybe_unused]] auto const wait_for_room = [&] {
    shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
    if constexpr (Traits::Cluster > 1) shared.cluster.sent_ds_empty.wait_for(standing.sent_phase ^ 1);
  };
  auto mods_of = [&](auto changed, int head) {
    if constexpr (decltype(changed)::value) return ScoreMod(params, tile.work.batch, head);
    return ScoreMod(cutlass_ext::Scores{}, 0, 0);
  };
  auto release = [&](Barrier& barrier) {
    if (elect_one_sync()) barrier.arrive();
  };
  // The same of what passes by, which CTAs of a cluster copy for each other.
  auto release_streamed = [&](Barrier& barrier) {
    if constexpr (Traits::Cluster > 1) {
      if (threadIdx.x % 32 < Traits::Cluster) barrier.arrive_at(threadIdx.x % 32);
    } else {
      release(barrier);
    }
  };
  auto release_rows = [&](int stage) {
    if constexpr (Traits::ReadsStatistics && Traits::Cluster == 1) {
      shared.empty[stage].arrive();  // every lane for itself: each has read statistics
    } else {
      // All have read them, or added.
      if constexpr (Traits::ReadsStatistics || Traits::SkipsTiles || (Traits::InOrder && !Traits::StagesSums))
        __syncwarp();
      release_streamed(shared.empty[stage]);
    }
  };
  // In a launch of fixed order: what the warp has had the copy engine add a turn ago is there.
  [[maybe_unused]] auto const wait_for_added = [&](auto const& due, int turn) {
    if constexpr (Traits::InOrder && Traits::StagesSums) {
      if (params.added && !due.is_own(turn) && elect_one_sync()) wait_for_bulk_writes();
    }
  };
  // What pairs have: bias and mask go into the scores, what dropout draws into P and dP.
  [[maybe_unused]] TilePairs<Traits> tile_pairs;
  [[maybe_unused]] BiasAhead<Traits> bias_ahead;
  // What the copying warp says of the tile that passes by, and of the next one: where nothing but a mask, and a bias,
  // changes scores, in registers before the turn begins, which takes 1 to 4% less time.
  [[maybe_unused]] StreamedTile here, next_here;
  [[maybe_unused]] auto const said_of = [&](int stage) -> StreamedTile const& {
    if constexpr (Traits::PlainMask) return here;
    return shared.at[stage];
  };

  [[maybe_unused]] float row_sum[2] = {};  // of P in parts, where rows are in hand
  // From the products in S to P, an operand, and in S to P times the derivative of the score.
  auto weigh = [&](auto changed, int stage, int t, int head) __attribute__((always_inline)) {
    constexpr bool kChanged = decltype(changed)::value, kModified = kChanged && Traits::ScoreMods;
    warpgroup_fence_operand(cS);
    // p - j of an element of scores that are changed: rows in hand are query rows, or keys.
    auto const offset_of = [](int i, int j) { return Traits::OfKeys ? key_of(j) - row_of(i) : row_of(i) - key_of(j); };
    [[maybe_unused]] ScoreMod const score_mod = mods_of(std::bool_constant<kModified>{}, head);
    [[maybe_unused]] int offset = 0;
    float const scale = kModified && ScoreMod::changes(params) ? 1.f : query_scale;
    if constexpr (kModified) {
      ConsumerThread const thread;
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
                     ring_v.stage);
    } else if constexpr (kChanged && (Traits::Mods & feature::Bias)) {
      if (has_bias(params)) tile_pairs.add_bias(S, params, shared, tile, said_of(stage));
    }
    if constexpr (kChanged && (Traits::Mods & feature::Mask)) {
      if (tile_pairs.is_mixed(said_of(stage))) tile_pairs.hide(S);
    }
    if (!unmasked.contains(t)) {
      ConsumerThread const thread;
      int const first_row = tile.first_row(thread), rows[2] = {first_row, first_row + row_of(1)};
      TileMask<Step / 4> mask(tile.view.counted_from(t * Step), rows, thread.lane);
      // 0 times what their exponential may be is not 0.
      if constexpr (AddsQ || Traits::AddsApart) mask.hide_rows_from(tile.view.n_q, rows);
      mask.apply(S);
    }
    auto const exponentiate = [&](auto capped, auto const& derivative) {
      [[maybe_unused]] float of_tile[2] = {};
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const of_rows = statistics.template lses<decltype(changed)::value>(stage, i, j);
          auto const weight = [&](int j, float lse) {
            float const score = S(i, j), p = exp2_approx(fmaf(score, scale, kInParts ? kShiftP - lse : -lse));
            S(i, j) = p;
            if constexpr (decltype(capped)::value) S(i, j) *= derivative(score, i, j);
            return p;
          };
          float const left = weight(j, of_rows.x), right = weight(j + 1, of_rows.y);
          if constexpr (SumsP && !Traits::Crowded) put_operand<Element>(words_p, i, j, left, right);
          if constexpr (kInParts && !Traits::OfKeys) of_tile[i] += left + right;
        }
      }
      if constexpr (kInParts && !Traits::OfKeys) row_sum[0] += of_tile[0], row_sum[1] += of_tile[1];
    };
    using Capped = std::bool_constant<kModified && SumsS>;
    if (Capped::value && ScoreMod::caps(params)) {
      // Without a branch an element where there are registers for it: 20 bytes spilled beside 128 keys a tile, 44
      // beside dK and dV of wide heads.
      constexpr bool kUnbranched = Step <= 64 && (Traits::HeadDim <= 128 || !Traits::OfKeys);
      if (kUnbranched && !(features_of(params) & feature::Alibi)) {
        float const per_softcap = reciprocal(score_mod.softcap_log2);
        exponentiate(Capped{},
                     [&](float score, int, int) { return ScoreMod::derivative_of_softcap(score, per_softcap); });
      } else {
        exponentiate(Capped{}, [&](float score, int i, int j) {
          return score == -INFINITY ? 0.f : score_mod.derivative(score, offset + offset_of(i, j));
        });
      }
    } else {
      exponentiate(std::false_type{}, nullptr);
    }
    if constexpr (SumsP && kChanged && Traits::Pairs) {
      if (tile_pairs.has_dropout(params)) tile_pairs.drop(words_p);
    }
  };
  // From weights and dP to dS, an operand.
  auto take_gradients = [&](auto changed, auto& cdP, int stage) __attribute__((always_inline)) {
    warpgroup_fence_operand(cdP);
    Tensor dP = rows_and_columns(cdP);
    auto const multiply = [&](auto const& ds_of) {
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2) {
        [[maybe_unused]] float4 p;
        if constexpr (kGetsP) p = passed[j / 2 * 32];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const of_rows = statistics.deltas(stage, i, j);
          float left = S(i, j), right = S(i, j + 1);
          if constexpr (kGetsP) left = i == 0 ? p.x : p.z, right = i == 0 ? p.y : p.w;
          if constexpr (Traits::Crowded) put_operand<Element>(words_p, i, j, left, right);
          put_operand<Element>(words_ds, i, j, ds_of(i, j, left, of_rows.x), ds_of(i, j + 1, right, of_rows.y));
        }
      }
    };
    if (Traits::Pairs && decltype(changed)::value && tile_pairs.has_dropout(params)) {
      float const share = -reciprocal(params.dropout.scale);
      multiply([&](int i, int j, float p, float delta) {
        return tile_pairs.add_if_kept(i, j, p, dP(i, j), p * (delta * share));
      });
    } else {
      multiply([&](int i, int j, float p, float delta) { return p * (dP(i, j) - delta); });
    }
  };
  // Of the rows in hand, in parts: worked out where it is wanted, or all addresses are kept in registers.
  [[maybe_unused]] auto const held_here = [&](auto mma, Part* data, auto columns) {
    using Layout = typename Traits::template LayoutHeld<decltype(columns)::value>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(data + anew(0)), Layout{}),
                             Shape<Int<kAtomRows>, decltype(columns)>{}, make_coord(row_block, _0{}));
    return mma.get_slice(0).partition_fragment_A(rows);
  };
  auto issue_s = [&](int stage) {
    if constexpr (kInParts) {
      constexpr int kSteps = Traits::HeadDim / 16;
      gemm_async<0, kSteps, kSteps>(MmaS{}, held_here(MmaS{}, shared.held, Int<ColumnsQK>{}), fY(_, _, _, stage),
                                    fY_low(_, _, _, stage), cS, true);
    } else if constexpr (Traits::FoldsStatistics) {
      gemm_async<Traits::HeadDim / 16>(MmaS{}, fX, fY(_, _, _, stage), cS, ones, shared.lse_columns[stage]);
    } else {
      gemm_async<Traits::HeadDim / 16>(MmaS{}, fX, fY(_, _, _, stage), cS, true);
    }
  };
  auto issue_dp = [&](auto& cdP, int stage_v, int stage) {
    if constexpr (Traits::FoldsStatistics) {
      gemm_async<Traits::HeadDimV / 16>(MmaP{}, fXv, fYv(_, _, _, stage_v), cdP, ones, shared.delta_columns[stage]);
    } else {
      gemm_async<Traits::HeadDimV / 16>(MmaP{}, fXv, fYv(_, _, _, stage_v), cdP, true);
    }
  };
  // The same of a panel of columns in parts: of longer sums the tensor cores cut off so much that where all terms have
  // one sign dP - delta errs more than on CUDA cores.
  [[maybe_unused]] auto const issue_panel_of_dp = [&](auto& cdP, int stage, auto panel) {
    constexpr int kSteps = kPanel / 16;
    gemm_async<decltype(panel)::value * kSteps, kSteps, Traits::HeadDimV / 16>(
        MmaP{}, held_here(MmaP{}, shared.held_v, Int<ColumnsV>{}), fYv(_, _, _, stage), fYv_low(_, _, _, stage), cdP,
        true);
  };
  auto issue_dv = [&](int stage) { gemm_async<Step / 16>(MmaV{}, fP, fYvt(_, _, _, stage), cV, false); };
  auto issue_gradient = [&](int stage) { gemm_async<Step / 16>(MmaG{}, fdS, fYt(_, _, _, stage), cA, false); };
  auto scores_of_a_tile = [] { return partition_fragment_C(MmaP{}, Shape<Int<kAtomRows>, Int<Step>>{}); };

  // WGMMAs in flight forbid a branch around their issue, and are not to be in flight at the end of a turn: what is
  // issued for a tile behind the last is of whatever lies there.
  StreamOrder<Traits> order(params, tile, tiles);
  [[maybe_unused]] DueSums<Traits> due(params, shared, tile, row_block, standing.phases);
  if (turns > 0) {
    if constexpr (!kGetsP) shared.held_full.wait_for(tile.held_phase);
    if constexpr (kGetsP) {
      shared.full_v[ring_v.stage].wait_for(ring_v.phase);
    } else {
      shared.full[ring.stage].wait_for(ring.phase);
    }
    if constexpr (SumsS && !Traits::HoldsSums) shared.held_v_full.wait_for(tile.held_phase);
  }
  if constexpr (Traits::HoldsInRegisters) {
    if (turns > 0) {  // else the next tile's copies may be on their way there
      load_held<Traits::Held>(fX, shared.held);
      if constexpr (Traits::HoldsSums) {
        CUTE_UNROLL
        for (int block = 0; block < Traits::Streaming; ++block) {
          shared.full_v[ring_v.stage].wait_for(ring_v.phase);
          if (block == row_block) load_held<Step>(fXv, shared.streamed_v + ring_v.stage * Step * ColumnsV);
          __syncwarp();
          release(shared.empty_v[ring_v.stage]);
          ring_v.advance();
        }
      } else {
        load_held<Traits::Held>(fXv, shared.held_v);
        __syncwarp();
        release(shared.held_v_empty);
      }
    }
  }
  if constexpr (kGetsP) {
    issue_dp(cS, ring_v.stage, ring.stage);
  } else {
    issue_s(ring.stage);
  }
  statistics.read(ring.stage);
  // What the tile of a stage, the next one, wants, by the body of a turn that comes before.
  [[maybe_unused]] int changed_next = 0;
  [[maybe_unused]] auto const ask_for = [&](auto changed, int stage, int t, int head) {
    if constexpr (Traits::PlainBias) bias_ahead.take(shared, row_block, stage);
    if constexpr (Traits::DropsAlone) {
      tile_pairs.draw_for(params, tile, t, head);
    } else if constexpr (Traits::SkipsTiles) {
      StreamedTile const& next = shared.at[stage];
      if constexpr (Traits::PlainMask) next_here = next;
      if constexpr (Traits::TwoBodies)
        changed_next = decltype(changed)::value && tile_pairs.changes_every_tile(params) ? 1 : next.mixed;
      tile_pairs.template ask<decltype(changed)::value>(params, shared, tile, next);
    }
  };
  if constexpr (Traits::Pairs) {
    if (turns > 0) ask_for(std::true_type{}, ring.stage, order.t(), order.head);
  }
  warpgroup_wait<0>();
  // `changed`: whether anything but visibility changes scores, or what becomes of them.
  auto const take_turn = [&](auto changed, int turn) __attribute__((always_inline)) {
    // Accumulators of one turn are made in it: WGMMA's zero is no write to the compiler, which would keep old sums.
    Tensor cdP = scores_of_a_tile();
    [[maybe_unused]] auto cQ = QuerySums<Traits>::accumulator();
    int const stage = ring.stage, stage_v = ring_v.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    auto const wait_for_next = [&] {
      if (turn + 1 < turns) shared.full[next.stage].wait_for(next.phase);
    };
    if constexpr (Traits::PlainMask) here = next_here;
    if constexpr (Traits::PassesSums) {
      if (turn > 0) due.find();
    }
    int const t = Traits::SkipsTiles ? said_of(stage).tile : order.t(),
              head = Traits::SkipsTiles ? said_of(stage).head : order.head;
    shared.full_v[stage_v].wait_for(ring_v.phase);
    if constexpr (SumsS) issue_dp(cdP, stage_v, stage);
    weigh(changed, stage, t, head);
    // The weights are worked out beside dP: the branches of a wait keep the assembler from moving the one for dP in
    // front of them.
    if constexpr (AddsQ) {
      warpgroup_fence_operand(cS);
      if constexpr (Traits::Pairs) statistics.read_deltas(stage);
      wait_for_next();
    }
    if constexpr (AddsQ && Traits::Pairs && Traits::Mods != feature::Mask) {
      // In front of the wait for dP: behind it the assembler puts most of the weights, too, and dV's product begins
      // when the gradients have been worked out. A mask alone makes no more of weights than visibility does.
      issue_dv(stage_v);
      warpgroup_wait<1>();
    } else {
      if constexpr (SumsS) warpgroup_wait<0>();
      if constexpr (SumsP) issue_dv(stage_v);
    }
    if constexpr (SumsS) take_gradients(changed, cdP, stage);
    if constexpr (Traits::PlainBias) {
      if (params.stores_dbias) store_dbias(params, tile, t, head, words_ds);
    }
    if constexpr (AddsQ) {
      if (turn > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
      if constexpr (Traits::EmptiesDS) shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
      due.sums.share(words_ds, ds.stage);
      if constexpr (kReadsDS || Traits::TakesTurns) {
        warpgroup_wait<0>();  // P's registers are wanted, or no WGMMA is to be in flight where the turns part
        warpgroup_fence_operand(cV);
        release(shared.empty_v[stage_v]);
      }
    }
    auto const go_on = [&]() __attribute__((always_inline)) {
      if constexpr (kReadsDS) {
        gemm_async<Step / 16>(typename Traits::MmaKeys{}, due.sums.own_ds(ds.stage), fYt(_, _, _, stage), cA, false);
      } else if constexpr (SumsS) {
        issue_gradient(stage);
      }
      if constexpr (!AddsQ) wait_for_next();
      // Behind the last tile of all, of what is there still: the next stage is another tile's.
      int const following = Traits::Persistent && turn + 1 == turns ? stage : next.stage;
      issue_s(following);
      statistics.read(following);
      if constexpr (Traits::Pairs) {
        bool const ends = t + 1 == tiles.end;
        if (turn + 1 < turns) ask_for(changed, next.stage, ends ? tiles.begin : t + 1, ends ? head + 1 : head);
      }
    };
    if constexpr (Traits::TakesTurns) {
      if (turn > 0 && !Traits::PassesSums) due.find();
      if (turn > 0 && due.is_own(turn)) {
        due.sums.issue(cQ, last_ds.stage);
        go_on();
        warpgroup_wait<2>();
        due.add(cQ, last_ds.stage);
        warpgroup_wait<0>();
      } else {
        go_on();
        warpgroup_wait<0>();
      }
    } else {
      if constexpr (AddsQ) due.sums.issue(cQ, last_ds.stage);
      go_on();
      if constexpr (SumsP) warpgroup_wait<SumsS ? 2 : 1>();
      if constexpr (SumsP && !kReadsDS) warpgroup_fence_operand(cV);
      if constexpr (!kReadsDS) release(shared.empty_v[stage_v]);
      if constexpr (AddsQ) {
        if (turn > 0) due.add(cQ, last_ds.stage);
      }
    }
    if constexpr (AddsQ) {
      last_ds = ds;
      ds.advance();
    }
    warpgroup_wait<0>();
    if constexpr (AddsQ && Traits::SkipsTiles) due.take(said_of(stage));
    wait_for_added(due, turn);
    release_rows(stage);
    ring = next;
    if constexpr (!Standing<Traits>::kOneForValues) ring_v.advance();
    if constexpr (!Traits::SkipsTiles) order.advance(params, tile, tiles);
  };
  // Of one warpgroup in three: there are registers for two accumulators of a turn beside those of dK and dV, so that P
  // and dS become operands together and what is added to dQ is multiplied when both have been read. While it waits the
  // others' products are under way.
  [[maybe_unused]] auto const take_turn_crowded = [&](auto changed, int turn) __attribute__((always_inline)) {
    bool const is_last = turn + 1 == turns;
    int const stage = ring.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    {
      Tensor cdP = scores_of_a_tile();
      shared.full_v[stage].wait_for(ring.phase);
      issue_dp(cdP, stage, stage);
      weigh(changed, stage, order.t(), order.head);
      warpgroup_fence_operand(cS);
      if (!is_last) shared.full[next.stage].wait_for(next.phase);  // the weights come first, as above
      warpgroup_wait<0>();
      take_gradients(changed, cdP, stage);
    }
    if (turn > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
    due.sums.share(words_ds, ds.stage);
    issue_dv(stage);
    issue_gradient(stage);
    issue_s(is_last ? stage : next.stage);  // behind the last tile, of what is there still
    if (turn > 0) due.find();
    warpgroup_wait<1>();
    warpgroup_fence_operand(cV);
    warpgroup_fence_operand(cA);
    release(shared.empty_v[stage]);
    warpgroup_wait<0>();
    wait_for_added(due, turn);
    release_rows(stage);
    if (turn > 0 && due.is_own(turn)) {
      Tensor cQ = QuerySums<Traits>::accumulator();
      due.sums.issue(cQ, last_ds.stage);
      warpgroup_wait<0>();
      due.add(cQ, last_ds.stage);
    }
    last_ds = ds;
    ds.advance();
    ring = next;
    order.advance(params, tile, tiles);
  };
  // Where dV and dK are two warpgroups', which pass P and dS on: the products of the next tile that wait for neither
  // are under way beside the last of this one.
  [[maybe_unused]] auto const take_turn_apart = [&](auto changed, int turn) __attribute__((always_inline)) {
    bool const is_last = turn + 1 == turns;
    int const stage = ring.stage, stage_v = ring_v.stage;
    RingPosition<Traits::Stages> next = ring;
    RingPosition<Traits::StagesV> next_v = ring_v;
    next.advance(), next_v.advance();
    auto const share_ds = [&] {
      wait_for_room();
      due.sums.share(words_ds, ds.stage);
      if constexpr (Traits::Cluster > 1) {
        due.sums.pass_on(ds.stage);
        standing.sent_phase ^= 1;
      }
    };
    if constexpr (What == Sums::Values) {
      weigh(changed, stage, order.t(), order.head);
      shared.p_empty.wait_for(ds.stage ^ 1);
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2)
        passed[j / 2 * 32] = make_float4(S(0, j), S(0, j + 1), S(1, j), S(1, j + 1));
      __syncwarp();
      release(shared.p_full);
      warpgroup_fence_operand(cS);
      shared.full_v[stage_v].wait_for(ring_v.phase);
      if (!is_last) shared.full[next.stage].wait_for(next.phase);
      issue_dv(stage_v);
      // At head_dim 256 there are no registers for P and the next S; at 192 to wait for neither makes no difference.
      warpgroup_wait<0>();
      issue_s(is_last ? stage : next.stage);  // behind the last tile, of what is there still
      warpgroup_wait<1>();
      warpgroup_fence_operand(cV);
      release_streamed(shared.empty_v[stage_v]);
      warpgroup_wait<0>();
    } else {
      if (!is_last) release_streamed(shared.empty_v[stage_v]);  // dP is there
      shared.full[stage].wait_for(ring.phase);
      shared.p_full.wait_for(ds.stage);
      take_gradients(changed, cS, stage);
      __syncwarp();
      release(shared.p_empty);
      share_ds();
      warpgroup_fence_operand(cS);
      if (!is_last) shared.full_v[next_v.stage].wait_for(next_v.phase);
      issue_gradient(stage);
      issue_dp(cS, is_last ? stage_v : next_v.stage, is_last ? stage : next.stage);
      warpgroup_wait<0>();
      if (is_last) release_streamed(shared.empty_v[stage_v]);
    }
    release_rows(stage);
    ring = next;
    if constexpr (!Standing<Traits>::kOneForValues) ring_v = next_v;
    if constexpr (!Standing<Traits>::kOneForDS) ds.advance();
    order.advance(params, tile, tiles);
  };
  [[maybe_unused]] auto const take_turn_in_parts = [&](int turn) __attribute__((always_inline)) {
    constexpr int kPanels = Traits::HeadDimV / kPanel;
    Tensor cdP = scores_of_a_tile();
    [[maybe_unused]] Tensor cdP_rest = scores_of_a_tile();
    int const stage = ring.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    float of_rows[2] = {1.f, 1.f};
    auto const wait_for_next = [&] {
      if (turn + 1 < turns) shared.full[next.stage].wait_for(next.phase);
    };
    auto const issue_next = [&] {
      if constexpr (!SumsS) wait_for_next();
      issue_s(next.stage);
    };
    auto const gradients = [&] {
      warpgroup_fence_operand(cdP);
      if constexpr (kPanels > 1) warpgroup_fence_operand(cdP_rest);
      Tensor dP = rows_and_columns(cdP), dP_rest = rows_and_columns(cdP_rest);
      auto const difference = [&](int i, int j, float delta) {
        float const first = fmaf(dP(i, j), scales.dp, -delta);
        return kPanels == 1 ? first : fmaf(dP_rest(i, j), scales.dp, first);
      };
      split_gradients(S, words_ds, difference, [&](int i, int j) { return statistics.deltas(stage, i, j); }, of_rows);
    };
    shared.full_v[stage].wait_for(ring.phase);
    if constexpr (SumsS) issue_panel_of_dp(cdP, stage, _0{});
    if constexpr (SumsS && kPanels > 1) issue_panel_of_dp(cdP_rest, stage, _1{});
    weigh(std::false_type{}, stage, order.t(), order.head);
    if constexpr (SumsS) {
      wait_for_next();  // here, where its branches keep the weights in front of the wait for dP
      warpgroup_wait<0>();
    }
    if constexpr (SumsP) {
      float const ones[2] = {1.f, 1.f};
      if constexpr (SumsS) {
        add_product<Traits, ColumnsV, false>(V, fP, shared.streamed_v, stage, ones, gradients);
      } else {
        add_product<Traits, ColumnsV, true>(V, fP, shared.streamed_v, stage, ones, issue_next);
      }
    } else {
      gradients();
    }
    release(shared.empty_v[stage]);
    if constexpr (SumsS) add_product<Traits, ColumnsQK, true>(A, fdS, shared.streamed, stage, of_rows, issue_next);
    warpgroup_wait<0>();
    release_rows(stage);
    ring = next;
    order.advance(params, tile, tiles);
  };
  CUTE_NO_UNROLL
  for (int turn = 0; turn < turns; ++turn) {
    if constexpr (kInParts) {
      take_turn_in_parts(turn);
    } else if constexpr (Traits::AddsApart) {
      take_turn_apart(std::false_type{}, turn);
    } else if constexpr (Traits::Crowded) {
      take_turn_crowded(std::false_type{}, turn);
    } else if constexpr (Traits::TwoBodies) {
      // No WGMMA is in flight here, and the assembler is to see that a warp does not part.
      if (__any_sync(0xffffffffu, changed_next)) {
        take_turn(std::true_type{}, turn);
      } else {
        take_turn(std::false_type{}, turn);
      }
    } else {
      take_turn(std::bool_constant < Traits::ScoreMods || Traits::Pairs > {}, turn);
    }
  }
  // What is in hand is let go as soon as it has been multiplied for the last time: the next tile's copies land while
  // the rest is added and stored.
  auto const release_held = [&](Barrier& barrier) {
    if (Traits::Persistent && turns > 0) release(barrier);
  };
  if constexpr (!Traits::HoldsInRegisters) release_held(shared.held_v_empty);
  if constexpr (AddsQ) {
    // Waited for by all: what is left next goes where the tile before this turn's dS has been read.
    if (turns > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
    if constexpr (Traits::PassesSums) {
      if (turns > 0) due.find();
    } else if constexpr (Traits::TakesTurns) {
      due.find();
    }
    if (turns > 0 && due.is_own(turns)) {
      Tensor cQ = QuerySums<Traits>::accumulator();
      due.sums.issue(cQ, last_ds.stage);
      warpgroup_wait<0>();
      release_held(shared.held_empty);
      due.add(cQ, last_ds.stage);
    } else {
      release_held(shared.held_empty);
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(cS);
  warpgroup_fence_operand(cA);
  warpgroup_fence_operand(cV);
  if constexpr (!AddsQ) release_held(shared.held_empty);
  if constexpr (Traits::StagesSums) {
    tma_store_wait<0>();  // `staging` is written again, and is to be there until it has been read
    __syncwarp();
  }

  if constexpr (kInParts) {
    store_in_parts<Traits, What>(params, tile, A, V, scales, statistics.of_rows(), row_sum);
  } else {
    int const warp_row = ConsumerThread().warp_row % Traits::Held;
    auto* staging = shared.staging + part_of_warp<Traits>() * Traits::Staged;
    if constexpr (Traits::StagesInDS) {
      if constexpr (Traits::HoldsSums) shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
      staging = shared.ds + (ds.stage * Traits::Held + warp_row) * kPanel;
    }
    if constexpr (Traits::StagesInSums) staging = due.sums.staging();
    if constexpr (Traits::AddsApart) {  // what the warp has passed on there has been taken
      if constexpr (SumsP) {
        shared.p_empty.wait_for(ds.stage ^ 1);
        staging = reinterpret_cast<Element*>(passed - threadIdx.x % 32);
      } else {
        wait_for_room();
        staging = shared.ds + (ds.stage * Traits::Held + warp_row) * kPanel;
      }
    }
    // All of what the tile adds to dQ is in memory, or on its way.
    auto const say_added = [&] {
      if constexpr (Traits::Sectioned) {
        if (!params.is_waited_for || turns == 0) return;
        if constexpr (Traits::StagesSums) wait_for_bulk_writes();
        __syncwarp();
        release(shared.added);
      }
    };
    if constexpr (!Traits::StagesSums) say_added();
    store_results<Traits, What>(params, tile, cA, cV, staging);
    if constexpr (Traits::StagesSums) say_added();
    if constexpr (Traits::HoldsSums) {
      if (tile.ends_head()) store_held_sums(params, due, tile);
    }
  }
}

}  // namespace cutlass_ext::sm90

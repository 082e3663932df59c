// Turns of the main loop: what a consumer warpgroup does while one tile passes by, from its scores to what it adds to
// gradients, and to the products of the next tile. There are four, for different kinds of kernels. Used by
// consumer.hpp.
//
// WGMMAs in flight forbid a branch around their issue, and are not to be in flight at the end of a turn: what is issued
// for a tile behind the last is of whatever lies there.
#pragma once

#include "mainloop.hpp"
#include "parts.hpp"

namespace cutlass_ext::sm90 {

template <class Traits, Accumulates What>
template <bool Changed>
CUTE_DEVICE void Mainloop<Traits, What>::take_turn(std::bool_constant<Changed> changed, int turn) {
  // Accumulators of one turn are made in it: WGMMA's zero is no write to the compiler, which would keep old sums.
  Tensor cdP = accumulator_of_dp();
  [[maybe_unused]] auto cQ = DqGemm<Traits>::accumulator();
  auto& ring = state.ring;
  auto& ring_v = state.of_values();
  [[maybe_unused]] auto &ds = state.of_ds(), &last_ds = state.last_ds;
  int const stage = ring.stage, stage_v = ring_v.stage;
  RingPosition<Traits::Stages> next = ring;
  next.advance();
  auto const wait_for_next = [&] {
    if (turn + 1 < turns) shared.full[next.stage].wait_for(next.phase);
  };
  if constexpr (Traits::PlainMask) current_tile = next_tile;
  if constexpr (Traits::DqThroughCluster) {
    if (turn > 0) due.advance();
  }
  int const t = Traits::SkipsTiles ? streamed_tile(stage).tile : order.t(),
            head = Traits::SkipsTiles ? streamed_tile(stage).head : order.head;
  shared.full_v[stage_v].wait_for(ring_v.phase);
  if constexpr (SumsS) issue_dp(cdP, stage_v, stage);
  compute_p(changed, stage, t, head);
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
  if constexpr (SumsS) compute_ds(changed, cdP, stage);
  if constexpr (Traits::PlainBias) {
    if (params.stores_dbias) store_dbias(params, tile, t, head, words_ds());
  }
  if constexpr (AddsQ) {
    if (turn > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
    if constexpr (Traits::HasDsEmpty) shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
    due.sums.store_ds(words_ds(), ds.stage);
    if constexpr (kReadsDS || Traits::AlternatesDq) {
      warpgroup_wait<0>();  // P's registers are wanted, or no WGMMA is to be in flight where the warpgroups' ways part
      warpgroup_fence_operand(cV);
      release(shared.empty_v[stage_v]);
    }
  }
  auto const go_on = [&]() __attribute__((always_inline)) {
    if constexpr (kReadsDS) {
      issue_dk_of_shared(stage);
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
      if (turn + 1 < turns) prefetch_pairs(changed, next.stage, ends ? tiles.begin : t + 1, ends ? head + 1 : head);
    }
  };
  if constexpr (Traits::AlternatesDq) {
    if (turn > 0 && !Traits::DqThroughCluster) due.advance();
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
  if constexpr (AddsQ && Traits::SkipsTiles) due.set(streamed_tile(stage));
  wait_for_added(turn);
  release_rows(stage);
  ring = next;
  if constexpr (!PipelineState<Traits>::kOneForValues) ring_v.advance();
  if constexpr (!Traits::SkipsTiles) order.advance(params, tile, tiles);
}

/// Of one warpgroup in three: there are registers for two accumulators of a turn beside those of dK and dV, so that P
/// and dS become operands together and what is added to dQ is multiplied when both have been read. While it waits the
/// others' products are under way.
template <class Traits, Accumulates What>
CUTE_DEVICE void Mainloop<Traits, What>::take_turn_of_three(int turn) {
  bool const is_last = turn + 1 == turns;
  auto& ring = state.ring;
  auto &ds = state.of_ds(), &last_ds = state.last_ds;
  int const stage = ring.stage;
  RingPosition<Traits::Stages> next = ring;
  next.advance();
  {
    Tensor cdP = accumulator_of_dp();
    shared.full_v[stage].wait_for(ring.phase);
    issue_dp(cdP, stage, stage);
    compute_p(std::false_type{}, stage, order.t(), order.head);
    warpgroup_fence_operand(cS);
    if (!is_last) shared.full[next.stage].wait_for(next.phase);  // the weights come first, as in take_turn
    warpgroup_wait<0>();
    compute_ds(std::false_type{}, cdP, stage);
  }
  if (turn > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
  due.sums.store_ds(words_ds(), ds.stage);
  issue_dv(stage);
  issue_gradient(stage);
  issue_s(is_last ? stage : next.stage);  // behind the last tile, of what is there still
  if (turn > 0) due.advance();
  warpgroup_wait<1>();
  warpgroup_fence_operand(cV);
  warpgroup_fence_operand(cA);
  release(shared.empty_v[stage]);
  warpgroup_wait<0>();
  wait_for_added(turn);
  release_rows(stage);
  if (turn > 0 && due.is_own(turn)) {
    Tensor cQ = DqGemm<Traits>::accumulator();
    due.sums.issue(cQ, last_ds.stage);
    warpgroup_wait<0>();
    due.add(cQ, last_ds.stage);
  }
  last_ds = ds;
  ds.advance();
  ring = next;
  order.advance(params, tile, tiles);
}

/// Where dV and dK are two warpgroups', which pass P and dS on: the products of the next tile that wait for neither
/// are under way beside the last of this one.
template <class Traits, Accumulates What>
CUTE_DEVICE void Mainloop<Traits, What>::take_turn_split(int turn) {
  bool const is_last = turn + 1 == turns;
  auto& ring = state.ring;
  auto& ring_v = state.of_values();
  auto& ds = state.of_ds();
  int const stage = ring.stage, stage_v = ring_v.stage;
  RingPosition<Traits::Stages> next = ring;
  RingPosition<Traits::StagesV> next_v = ring_v;
  next.advance(), next_v.advance();
  if constexpr (What == Accumulates::Values) {
    compute_p(std::false_type{}, stage, order.t(), order.head);
    shared.p_empty.wait_for(ds.stage ^ 1);
    Tensor S = rows_and_columns(cS);
    CUTE_UNROLL
    for (int j = 0; j < Step / 4; j += 2)
      passed_p()[j / 2 * 32] = make_float4(S(0, j), S(0, j + 1), S(1, j), S(1, j + 1));
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
    compute_ds(std::false_type{}, cS, stage);
    __syncwarp();
    release(shared.p_empty);
    wait_for_room();
    due.sums.store_ds(words_ds(), ds.stage);
    if constexpr (Traits::Cluster > 1) {
      due.sums.send_ds(ds.stage);
      state.sent_phase ^= 1;
    }
    warpgroup_fence_operand(cS);
    if (!is_last) shared.full_v[next_v.stage].wait_for(next_v.phase);
    issue_gradient(stage);
    issue_dp(cS, is_last ? stage_v : next_v.stage, is_last ? stage : next.stage);
    warpgroup_wait<0>();
    if (is_last) release_streamed(shared.empty_v[stage_v]);
  }
  release_rows(stage);
  ring = next;
  if constexpr (!PipelineState<Traits>::kOneForValues) ring_v = next_v;
  if constexpr (!PipelineState<Traits>::kOneForDS) ds.advance();
  order.advance(params, tile, tiles);
}

/// Of operands in parts, whose products are added up in float32 registers (parts.hpp).
template <class Traits, Accumulates What>
CUTE_DEVICE void Mainloop<Traits, What>::take_turn_in_parts(int turn) {
  constexpr int kPanels = Traits::HeadDimV / kPanel;
  Tensor cdP = accumulator_of_dp();
  [[maybe_unused]] Tensor cdP_rest = accumulator_of_dp();
  auto& ring = state.ring;
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
    Tensor S = rows_and_columns(cS);
    Tensor dP = rows_and_columns(cdP), dP_rest = rows_and_columns(cdP_rest);
    Tensor words = words_ds();
    auto const difference = [&](int i, int j, float delta) {
      float const first = fmaf(dP(i, j), scales.dp, -delta);
      return kPanels == 1 ? first : fmaf(dP_rest(i, j), scales.dp, first);
    };
    split_gradients(S, words, difference, [&](int i, int j) { return statistics.deltas(stage, i, j); }, of_rows);
  };
  shared.full_v[stage].wait_for(ring.phase);
  if constexpr (SumsS) issue_panel_of_dp<0>(cdP, stage);
  if constexpr (SumsS && kPanels > 1) issue_panel_of_dp<1>(cdP_rest, stage);
  compute_p(std::false_type{}, stage, order.t(), order.head);
  if constexpr (SumsS) {
    wait_for_next();  // here, where its branches keep the weights in front of the wait for dP
    warpgroup_wait<0>();
  }
  if constexpr (SumsP) {
    float const ones[2] = {1.f, 1.f};
    Tensor V = rows_and_columns(cV);
    if constexpr (SumsS) {
      add_product<Traits, ColumnsV, false>(V, fP, shared.streamed_v, stage, ones, gradients);
    } else {
      add_product<Traits, ColumnsV, true>(V, fP, shared.streamed_v, stage, ones, issue_next);
    }
  } else {
    gradients();
  }
  release(shared.empty_v[stage]);
  if constexpr (SumsS) {
    Tensor A = rows_and_columns(cA);
    add_product<Traits, ColumnsQK, true>(A, fdS, shared.streamed, stage, of_rows, issue_next);
  }
  warpgroup_wait<0>();
  release_rows(stage);
  ring = next;
  order.advance(params, tile, tiles);
}

}  // namespace cutlass_ext::sm90

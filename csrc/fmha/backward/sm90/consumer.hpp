// A consumer warpgroup of a backward kernel: goes through the tiles of the other side that see the tile in hand, and
// sums up its gradients. Used by kernel.hpp.
#pragma once

#include "../../cute_tensor.hpp"
#include "epilogue.hpp"
#include "mainloop.hpp"
#include "turns.hpp"

namespace cutlass_ext::sm90 {

/// A warpgroup that adds to dQ, of what those of dV and dK have left.
template <class Traits>
CUTE_DEVICE void dq_mainloop(BackwardParams const& params, typename Traits::SharedStorage& shared,
                             GradientTile<Traits> const& tile, PipelineState<Traits>& state) {
  if (tile.turns(params) == 0) return;
  DqGemm<Traits> const dq_gemm(shared, 0);
  Tensor fdS = DqGemm<Traits>::operand();
  shared.held_full.wait_for(tile.held_phase);
  StreamIterator<Traits> order(tile, tile.tiles);
  CUTE_NO_UNROLL
  for (int left = tile.turns(params); left > 0; --left, order.advance(params, tile, tile.tiles)) {
    int const buffer = state.taken % Traits::StagesDS;
    shared.ds_full[buffer].wait_for(state.taken / Traits::StagesDS % 2);
    if constexpr (Traits::Cluster > 1) {
      auto& full = shared.cluster.ds_full;
      if (threadIdx.x % kWarpgroup == 0) full.arrive_and_expect_tx(sizeof(shared.other_ds));
      full.wait_for(state.sent_phase);
      state.sent_phase ^= 1;
    }
    dq_gemm.load_ds(fdS, buffer);
    dq_gemm.add_tile(fdS, sums_of_tile(params, tile, order.head, order.t()) + dq_gemm.first(),
                     [&] { dq_gemm.release(buffer); });
    ++state.taken;
  }
  if (elect_one_sync()) shared.held_empty.arrive(), shared.held_v_empty.arrive();
}

/// In front of the first turn: waits for what it begins with, takes what is in hand to registers where it is kept
/// there, and computes the first scores.
template <class Traits, Accumulates What>
CUTE_DEVICE void begin(Mainloop<Traits, What>& loop) {
  using Loop = Mainloop<Traits, What>;
  auto& shared = loop.shared;
  auto const& tile = loop.tile;
  auto& ring = loop.state.ring;
  auto& ring_v = loop.ring_v();
  if (loop.turns > 0) {
    if constexpr (!Loop::kGetsP) shared.held_full.wait_for(tile.held_phase);
    if constexpr (Loop::kGetsP) {
      shared.full_v[ring_v.stage].wait_for(ring_v.phase);
    } else {
      shared.full[ring.stage].wait_for(ring.phase);
    }
    if constexpr (Loop::SumsS && !Traits::DqInShared) shared.held_v_full.wait_for(tile.held_phase);
  }
  if constexpr (Traits::HoldsInRegisters) {
    if (loop.turns > 0) {  // else the next tile's copies may be on their way there
      load_held<Traits::Held>(loop.fX, shared.held);
      if constexpr (Traits::DqInShared) {
        CUTE_UNROLL
        for (int block = 0; block < Traits::Streaming; ++block) {
          shared.full_v[ring_v.stage].wait_for(ring_v.phase);
          if (block == loop.row_block)
            load_held<Loop::Step>(loop.fXv, shared.streamed_v + ring_v.stage * Loop::Step * Loop::ColumnsV);
          finish_loads_of_shared();
          loop.release(shared.empty_v[ring_v.stage]);
          ring_v.advance();
        }
      } else {
        load_held<Traits::Held>(loop.fXv, shared.held_v);
        finish_loads_of_shared();
        loop.release(shared.held_v_empty);
      }
    }
  }
  if constexpr (Loop::kGetsP) {
    loop.issue_dp(loop.cS, ring_v.stage, ring.stage);
  } else {
    loop.issue_s(ring.stage);
  }
  loop.statistics.read(ring.stage);
  if constexpr (Traits::Pairs) {
    if (loop.turns > 0) loop.prefetch_pairs(std::true_type{}, ring.stage, loop.order.t(), loop.order.head);
  }
  warpgroup_wait<0>();
}

/// Behind the last turn: adds to dQ what that turn has left. What is in hand is let go as soon as it has been
/// multiplied for the last time: the next tile's copies land while the rest is added and stored.
template <class Traits, Accumulates What>
CUTE_DEVICE void finish_sums(Mainloop<Traits, What>& loop) {
  auto& shared = loop.shared;
  int const turns = loop.turns;
  auto const release_held = [&](Barrier& barrier) {
    if (Traits::Persistent && turns > 0) loop.release(barrier);
  };
  if constexpr (!Traits::HoldsInRegisters) release_held(shared.held_v_empty);
  if constexpr (Mainloop<Traits, What>::AddsQ) {
    auto& due = loop.due;
    auto& last_ds = loop.state.last_ds;
    // Waited for by all: what is left next goes where the tile before this turn's dS has been read.
    if (turns > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
    if constexpr (Traits::DqThroughCluster) {
      if (turns > 0) due.advance();
    } else if constexpr (Traits::AlternatesDq) {
      due.advance();
    }
    if (turns > 0 && due.is_own(turns)) {
      Tensor cQ = DqGemm<Traits>::accumulator();
      due.sums.issue(cQ, last_ds.stage);
      warpgroup_wait<0>();
      release_held(shared.held_empty);
      due.add(cQ, last_ds.stage);
    } else {
      release_held(shared.held_empty);
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(loop.cS);
  warpgroup_fence_operand(loop.cA);
  warpgroup_fence_operand(loop.cV);
  if constexpr (!Mainloop<Traits, What>::AddsQ) release_held(shared.held_empty);
  if constexpr (Traits::StagesSums) {
    tma_store_wait<0>();  // `staging` is written again, and is to be there until it has been read
    __syncwarp();
  }
}

/// Stores the gradients of the tile in hand.
template <class Traits, Accumulates What>
CUTE_DEVICE void store_gradients(Mainloop<Traits, What>& loop) {
  using Element = typename Traits::Element;
  BackwardParams const& params = loop.params;
  auto& shared = loop.shared;
  auto const& tile = loop.tile;
  if constexpr (Mainloop<Traits, What>::kInParts) {
    store_in_parts<Traits, What>(params, tile, rows_and_columns(loop.cA), rows_and_columns(loop.cV), loop.scales,
                                 loop.statistics.of_rows(), loop.row_sum);
  } else {
    auto& ds = loop.ds();
    int const warp_row = GradientThread().warp_row % Traits::Held;
    auto* staging = shared.staging + part_of_warp<Traits>() * Traits::Staged;
    if constexpr (Traits::StagesInDS) {
      if constexpr (Traits::DqInShared) shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
      staging = shared.ds + (ds.stage * Traits::Held + warp_row) * kPanel;
    }
    if constexpr (Traits::StagesInSums) staging = loop.due.sums.staging();
    if constexpr (Traits::HasDqWarpgroup) {  // what the warp has passed on there has been taken
      if constexpr (Mainloop<Traits, What>::SumsP) {
        shared.p_empty.wait_for(ds.stage ^ 1);
        staging = reinterpret_cast<Element*>(loop.passed_p() - threadIdx.x % 32);
      } else {
        loop.wait_for_room();
        staging = shared.ds + (ds.stage * Traits::Held + warp_row) * kPanel;
      }
    }
    // All of what the tile adds to dQ is in memory, or on its way.
    auto const say_added = [&] {
      if constexpr (Traits::FusesPostprocess) {
        if (!params.is_waited_for || loop.turns == 0) return;
        if constexpr (Traits::StagesSums) wait_for_bulk_writes();
        __syncwarp();
        loop.release(shared.dq_added);
      }
    };
    if constexpr (!Traits::StagesSums) say_added();
    store_results<Traits, What>(params, tile, loop.cA, loop.cV, staging);
    if constexpr (Traits::StagesSums) say_added();
    if constexpr (Traits::DqInShared) {
      if (tile.ends_head(params)) store_held_sums(params, loop.due, tile);
    }
  }
}

/// A consumer warpgroup: goes through the tiles of the stream and sums up its gradients.
template <class Traits, Accumulates What>
CUTE_DEVICE void accumulate(BackwardParams const& params, typename Traits::SharedStorage& shared,
                            GradientTile<Traits> const& tile, int row_block, PipelineState<Traits>& state) {
  Mainloop<Traits, What> loop(params, shared, tile, row_block, state);
  begin(loop);
  CUTE_NO_UNROLL
  for (int turn = 0; turn < loop.turns; ++turn) {
    if constexpr (loop.kInParts) {
      loop.take_turn_in_parts(turn);
    } else if constexpr (Traits::HasDqWarpgroup) {
      loop.take_turn_split(turn);
    } else if constexpr (Traits::ThreeConsumers) {
      loop.take_turn_of_three(turn);
    } else if constexpr (Traits::TwoBodies) {
      // No WGMMA is in flight here, and the assembler is to see that a warp does not part.
      if (__any_sync(0xffffffffu, loop.changes_next)) {
        loop.take_turn(std::true_type{}, turn);
      } else {
        loop.take_turn(std::false_type{}, turn);
      }
    } else {
      loop.take_turn(std::bool_constant < Traits::ScoreMods || Traits::Pairs > {}, turn);
    }
  }
  finish_sums(loop);
  store_gradients(loop);
}

}  // namespace cutlass_ext::sm90

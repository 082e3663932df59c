// The backward pass on Hopper, one loop from two sides. A CTA holds a tile of one side of the scores and goes through
// the tiles of the other that see it: with a tile of keys in hand it sums up dK and dV over the query rows (of all
// heads that share the KV head), with one of query rows dQ over the keys (FlashAttention-2, arXiv:2307.08691, section
// 3.1, algorithm 2, with the sums of dQ in a launch of their own). Every sum then has one owner, so that its order, and
// its bits, are fixed, and P and dS pass from accumulators to operands in registers: seven products. A third kernel, of
// five, goes by keys and adds what each tile makes of dQ to memory, in any order or in theirs: dS passes through shared
// memory, so that the warpgroups share out dS K; at head_dim 64 three of them are faster than two, with less in
// registers and more to do while one waits; at 192 two CTAs share a tile (Traits::Cluster). Two more have whole heads:
// one those of few rows, whose dQ shared memory holds while a CTA goes through all of their keys, and one those of few
// keys, whose tiles are those of a cluster's CTAs: what they add to dQ passes from one to the next. One warp copies
// each of the two streams by TMA. Instantiated by csrc/kernels/sm90_*backward*.cu.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../../cute_tensor.hpp"
#include "../../launch_order.hpp"
#include "consumer.hpp"
#include "dq_semaphore.hpp"
#include "postprocess.hpp"
#include "producer.hpp"

namespace cutlass_ext::sm90 {

/// The CTA's shared memory. Where a turn has two bodies its address comes from a lane of the warp: then the assembler
/// sees in both of them that it is the warp's, and works out descriptors and barriers once a warp (44 instructions of a
/// turn less). Under a mask alone 40 bytes less are spilled of the warps that copy.
template <class Traits>
CUTE_DEVICE typename Traits::SharedStorage& shared_of(unsigned char* smem) {
  void* at = smem;
  if constexpr (Traits::TwoBodies || Traits::PlainMask)
    at = __cvta_shared_to_generic(__shfl_sync(0xffffffffu, cast_smem_ptr_to_uint(smem), 0));
  return *static_cast<typename Traits::SharedStorage*>(at);
}

/// Waits for the other CTAs of a cluster, which arrive at barriers here until they are done.
template <class Traits>
CUTE_DEVICE void leave_cluster() {
  if constexpr (Traits::Cluster > 1 || Traits::DqThroughCluster) {
    __syncwarp();
    cute::cluster_sync();
  }
}

/// Before anything is read that others have written. A call of few tiles spends a tenth of its time between launches:
/// an H200's us with and without, (2, 512, 16, 128), causal, 39.7 and 45.2, (4, 47, 24, 192), causal, 25.3 and 29.9.
CUTE_DEVICE void start_in_order() {
  wait_for_launch_before();
  let_next_launch_begin();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    backward_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ typename Traits::Maps const maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = shared_of<Traits>(smem);
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if constexpr (!Traits::Persistent) {
    start_in_order();
    if constexpr (Traits::Parts > 1) {
      if (params.is_skipped()) return;
    }
    GradientTile<Traits> const here(params, params.shared_tiles(blockIdx.x));
    if (here.is_empty) return;
    if (threadIdx.x == 0) shared.tiles[0] = here;
    if constexpr (Traits::SkipsTiles) {
      __syncwarp();
      if (warp == 0) shared.tiles[0].count_seen(params);
    }
  }
  if (warp == 0) {
    for (CUtensorMap const* map : {&maps.held, &maps.held_v, &maps.streamed, &maps.streamed_v})
      cute::prefetch_tma_descriptor(map);
    if (threadIdx.x == 0) {
      constexpr int kReaders = 4 * Traits::Consumers;  // every consumer warp says when it is done with a tile
      for (auto* barrier : {&shared.held_v_full, &shared.tail, &shared.tail_v}) barrier->init(1);
      if constexpr (Traits::PlainBias) shared.bias_full.init(1), shared.bias_empty.init(kReaders);
      shared.held_full.init(Traits::Cluster);
      for (auto* barrier : {&shared.held_empty, &shared.held_v_empty}) barrier->init(kReaders);
      int const ordering = Traits::InOrder && params.dq_semaphore;  // warps that see to an order
      for (auto& barrier : shared.ds_full) barrier.init(Traits::HasDqWarpgroup ? 4 : kReaders + ordering);
      if constexpr (Traits::HasDsEmpty) {
        for (auto& barrier : shared.ds_empty) barrier.init(4);
      }
      if constexpr (Traits::HasDqWarpgroup) {
        for (auto* barrier : {&shared.p_full, &shared.p_empty}) barrier->init(4);
      }
      if constexpr (Traits::FusesPostprocess) {
        shared.dq_added.init(kReaders + ordering);
        for (auto& barrier : shared.postprocess_full) barrier.init(1);
      }
      if constexpr (Traits::DqInShared) shared.head_taken.init(1), shared.rows_preprocessed.init(2 * 32);
      if constexpr (Traits::DqThroughCluster) {
        for (auto& barrier : shared.sums_full) barrier.init(1);
        for (auto& way : shared.sums_empty) {
          for (auto& barrier : way) barrier.init(1);
        }
      }
      if constexpr (Traits::Cluster > 1) {
        auto& cluster = shared.cluster;
        for (auto* barrier : {&cluster.index_full, &cluster.index_read, &cluster.ds_full}) barrier->init(1);
        cluster.sent_ds_empty.init(4);
      }
      for (auto& barrier : shared.tile_full) barrier.init(1);
      for (auto& barrier : shared.tile_empty)
        barrier.init(kReaders + 1 + Traits::FoldsStatistics + ordering);   // and the other warps that copy
      constexpr int kStreaming = 4 * Traits::Streaming * Traits::Cluster;  // warps of the CTAs that it is copied to
      CUTE_UNROLL
      for (int i = 0; i < Traits::Stages; ++i) {
        shared.full[i].init(1 + (Traits::FoldsStatistics ? 32 : 0) + ordering);
        shared.empty[i].init(kStreaming * (Traits::ReadsStatistics && Traits::Cluster == 1 ? 32 : 1));
      }
      CUTE_UNROLL
      for (int i = 0; i < Traits::StagesV; ++i) shared.full_v[i].init(1), shared.empty_v[i].init(kStreaming);
      cutlass::arch::fence_barrier_init();
    }
  }
  if constexpr (Traits::Persistent) start_in_order();
  if constexpr (Traits::Cluster > 1 || Traits::DqThroughCluster) {
    cute::cluster_sync();  // the other CTAs' barriers are there, too
  } else {
    __syncthreads();
  }
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (warp == 0) {
      StreamProducer<Traits, false> copy(params, maps, shared);
      if constexpr (Traits::Persistent) {
        TileScheduler<Traits> tiles{params, shared};
        while (auto const* tile = tiles.next()) copy(*tile);
      } else {
        copy(shared.tiles[0]);
      }
    }
    TileReader<Traits> tiles{shared};
    if (warp == 1) {
      StreamProducer<Traits, true> copy(params, maps, shared);
      tiles.for_each(copy);
      if constexpr (Traits::FusesPostprocess) copy.count_ended();
    }
    if constexpr (Traits::FoldsStatistics) {
      if (warp == 2) tiles.for_each(StatisticsProducer<Traits>(params, maps, shared));
    }
    if constexpr (Traits::FusesPostprocess) {
      if (warp == 3 && params.sections) PostprocessWarp<Traits>(params, maps.dq, shared)();
    }
    if constexpr (Traits::InOrder) {
      if (warp == 3 && params.dq_semaphore) DqSemaphoreRelease<Traits>{params, shared}();
    }
    if constexpr (Traits::DqInShared) {
      if (warp >= 2) preprocess_heads<Traits>(params, shared);
    }
    leave_cluster<Traits>();
    return;
  }
  TileReader<Traits> tiles{shared};
  PipelineState<Traits> state;
  if constexpr (Traits::HasDqWarpgroup) {
    if (warpgroup == Traits::Consumers) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::DqRegisters>();
      tiles.for_each([&](auto const& tile) { dq_mainloop(params, shared, tile, state); });
    } else if (warpgroup == 1) {
      cutlass::arch::warpgroup_reg_alloc<Traits::RegistersOfValues>();
      tiles.for_each(
          [&](auto const& tile) { accumulate<Traits, Accumulates::Values>(params, shared, tile, 0, state); });
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
      tiles.for_each([&](auto const& tile) { accumulate<Traits, Accumulates::Keys>(params, shared, tile, 0, state); });
    }
    leave_cluster<Traits>();
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
  tiles.for_each([&](auto const& tile) __attribute__((always_inline)) {
    if constexpr (Traits::SplitsDkDv) {
      if (warpgroup == 1) {
        accumulate<Traits, Accumulates::Values>(params, shared, tile, 0, state);
      } else {
        accumulate<Traits, Accumulates::Keys>(params, shared, tile, 0, state);
      }
    } else {
      constexpr Accumulates kWhat = Traits::AccumulatesDq ? Accumulates::All
                                    : Traits::OfKeys      ? Accumulates::KeysAndValues
                                                          : Accumulates::Queries;
      accumulate<Traits, kWhat>(params, shared, tile, warpgroup - 1, state);
    }
  });
  leave_cluster<Traits>();
}

/// One side's kernel at one tile shape: a CTA for each tile of that side or, where it is persistent, as many as there
/// is room for.
template <Axis Of, int B_r, int B_c, int HeadDim, int HeadDimV, class Element, int Stages, Features Mods = 0,
          DqAccumulation OfQueries = DqAccumulation::None>
struct Backward {
  using Traits = BackwardTraits<Of, B_r, B_c, HeadDim, HeadDimV, Element, Stages, Mods, OfQueries>;
  static constexpr char const* kFamily = "sm90";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &backward_kernel<Traits>;
  static constexpr Kind kKind = Traits::OwnsHeads       ? Kind::HeadGradients
                                : Traits::AccumulatesDq ? Kind::AllGradients
                                : Traits::OfKeys        ? Kind::KeyGradients
                                                        : Kind::QueryGradients;
  // The copy engine faults on a first column that is off 16 bytes, as padding in front makes that of a bias.
  static constexpr Features kTakes = Traits::Mods | feature::Sink | feature::Packed |
                                     (feature::kUnlike & ~(Traits::PlainBias ? feature::LeftPadding : 0)),
                            kWants = Traits::IsPlain || Traits::DropsAlone ? Traits::Mods : 0;
  static constexpr TileLoop kLoop{
      Traits::Persistent,       Traits::Splits,     Traits::AnyOrder, Traits::FusesPostprocess,
      Traits::DqThroughCluster, Traits::DqInShared, Traits::InOrder,  true,
      Traits::Cluster};
  /// Softcap's derivative is found in scores, from which what has been added since is not taken again.
  static bool takes_shape(Params const& params) {
    int const heads = params.heads_q / params.heads_kv;
    if (Traits::DqInShared && int64_t(tiles_of_head(params.n_q, B_r)) * heads > kMostHeldTiles) return false;
    if (Traits::DqThroughCluster && (std::max(params.head_dim, params.head_dim_v) <= 64 ||  // of others, or none
                                     Scheduler::tiles_of(params.n_kv, B_c) > kMostInCluster))
      return false;
    if (Traits::FoldsStatistics && ScoreMod::query_scale(params) < kLeastFactor) return false;
    return !(ScoreMod::caps(params) && has_bias(params));
  }
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have on Hopper");
};

}  // namespace cutlass_ext::sm90

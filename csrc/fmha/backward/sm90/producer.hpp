// The warps that copy what the consumers of a backward kernel read, and those that make the statistics of rows of the
// CTA's next head meanwhile. Used by kernel.hpp.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../../cute_tensor.hpp"
#include "../../sm90/tensor_maps.hpp"
#include "../row_product.hpp"
#include "../rows_preprocessed.hpp"
#include "dq_semaphore.hpp"
#include "sections.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// One of two warps that make the statistics of rows of the CTA's next head, before the warp that copies them takes it.
template <class Traits>
CUTE_DEVICE void preprocess_heads(BackwardParams const& params, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  unsigned index = 0, size = static_cast<unsigned>(params.scheduler.size());
  for (uint32_t phase = 0; index < size; phase ^= 1) {
    shared.head_taken.wait_for(phase);
    index = shared.next_head;
    if (index < size && preprocesses_in_kernel(params)) {  // else all have been made before
      WorkItem const work = params.scheduler(index);
      Sequence const sequence = sequence_of(params, work.batch);
      int const heads = params.heads_per_kv.divisor;
      CUTE_NO_UNROLL
      for (int head = work.head * heads; head < (work.head + 1) * heads; ++head)
        preprocess_head<Traits::Step, Element>(params, sequence, work.batch, head);
      asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine reads them
    }
    shared.rows_preprocessed.arrive();  // every lane for itself
  }
}

/// By a whole warp without which nobody works on a tile: waits until its section's sums have a place, in a launch by
/// sections.
template <class Traits>
CUTE_DEVICE void wait_for_section(BackwardParams const& params, GradientTile<Traits> const& tile) {
  if (!params.sections) return;
  while (!is_ready(params, tile.section)) __nanosleep(100);
}

/// Has L2 fetch `bytes` of memory, a multiple of 16.
CUTE_DEVICE void prefetch_bulk(void const* data, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes) : "memory");
}

/// A warp that brings lse and delta of one streamed tile after the other, as products add them to S and dP. That of a
/// head's first keys has L2 fetch the sums of dQ meanwhile, which were cleared long before: other CTAs add to them at
/// the same time, and would all wait for memory. (16, 1024, 16, 128) takes 832 us for 845, causal 545 for 557; fetched
/// by every CTA 857, and at head_dim 256 2% more. It brings the tiles of a bias, too.
template <class Traits>
struct StatisticsProducer {
  BackwardParams const& params;
  typename Traits::Maps const& maps;
  typename Traits::SharedStorage& shared;
  float per_scale;
  RingPosition<Traits::Stages> ring{};
  uint32_t bias_phase = 0;

  CUTE_DEVICE StatisticsProducer(BackwardParams const& params, typename Traits::Maps const& maps,
                                 typename Traits::SharedStorage& shared)
      : params(params), maps(maps), shared(shared), per_scale(1.f / ScoreMod::query_scale(params)) {}

  CUTE_DEVICE void operator()(GradientTile<Traits> const& tile) {
    bool const is_first = !Traits::DqThroughCluster && !params.sections && !params.dq_semaphore && tile.begins_head() &&
                          threadIdx.x % 32 == 0;
    if constexpr (Traits::FusesPostprocess) wait_for_section(params, tile);
    for_each_step(params, tile, [&](StreamStep of) {
      int64_t const row =
          StatisticsRows(params).first(params, tile.sequence, tile.work.batch, of.head) + of.t * Traits::Step;
      if (is_first)
        prefetch_bulk(sums_of_tile(params, tile, of.head, of.t), Traits::Step * Traits::HeadDim * sizeof(float));
      bring(params.row_statistics + row);
      if constexpr (Traits::PlainBias) copy_bias(tile, of.head, of.t);
    });
  }

 private:
  CUTE_DEVICE void bring(RowStatistics const* rows) {
    static_assert(Traits::Step % 32 == 0);
    constexpr int kRows = Traits::Step / 32;  // of a lane
    int const lane = threadIdx.x % 32;
    RowStatistics of[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) of[i] = rows[i * 32 + lane];
    shared.empty[ring.stage].wait_for(ring.phase ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // In units of the products; as good as infinity where a row sees nothing, which times 0 would be NaN.
      float const lse = of[i].lse_log2 == INFINITY ? kHidesRows : of[i].lse_log2 * per_scale;
      shared.lse_columns[ring.stage][i * 32 + lane] = ColumnsOfRow(-lse);
      shared.delta_columns[ring.stage][i * 32 + lane] = ColumnsOfRow(-of[i].delta);
    }
    cutlass::arch::fence_view_async_shared();  // WGMMA reads them
    shared.full[ring.stage].arrive();          // every lane for itself
    ring.advance();
  }

  /// Copies a tile of the bias, a panel of keys for each warpgroup, once the one before is in registers.
  CUTE_DEVICE void copy_bias(GradientTile<Traits> const& tile, int head, int t) {
    Bias const& of = bias_of(params);
    shared.bias_empty.wait_for(bias_phase ^ 1);
    bias_phase ^= 1;
    if (threadIdx.x % 32 != 0) return;
    shared.bias_full.arrive_and_expect_tx(sizeof(shared.biases));
    CUTE_UNROLL
    for (int key = 0; key < Traits::Held; key += kPanel) {
      SM90_TMA_LOAD_4D::copy(&maps.biases, reinterpret_cast<uint64_t*>(&shared.bias_full),
                             static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL),
                             shared.biases + key * Traits::Step, tile.work.row0 + key, t * Traits::Step,
                             of.head == 0 ? 0 : head, of.batch == 0 ? 0 : tile.work.batch);
    }
  }
};

/// A warp that copies one tile in hand after the other, and the tiles of one stream: of q and k with the statistics of
/// rows, or of v and dout.
template <class Traits, bool OfValues>
struct StreamProducer {
  using Part = typename Traits::Part;
  using Shared = typename Traits::SharedStorage;
  static constexpr int Held = Traits::Held, Step = Traits::Step;
  static constexpr int Columns = OfValues ? Traits::ColumnsV : Traits::ColumnsQK;
  static constexpr bool WithStatistics = Traits::ReadsStatistics && !OfValues;

  BackwardParams const& params;
  GradientMaps const& maps;
  Shared& shared;
  TailCopy tail;
  RingPosition<OfValues ? Traits::StagesV : Traits::Stages> ring{};
  int ended = -1;  // the section of the tile before, until it is counted
  uint32_t added_phase = 0;
  DqSemaphoreAcquire<Traits> semaphore;

  CUTE_DEVICE StreamProducer(BackwardParams const& params, GradientMaps const& maps, Shared& shared)
      : params(params),
        maps(maps),
        shared(shared),
        tail{OfValues ? shared.tail_v : shared.tail},
        semaphore{params, shared} {}

  CUTE_DEVICE void operator()(GradientTile<Traits> const& tile) {
    int const turns = tile.turns(params);
    if (turns == 0) {
      if (Traits::FusesPostprocess && OfValues && params.sections && threadIdx.x % 32 == 0)
        count_done(params.sections[tile.section].tiles);
      return;
    }
    constexpr int StatisticsBytes = WithStatistics ? Step * sizeof(RowStatistics) : 0;
    CUtensorMap const& map_held = OfValues ? maps.held_v : maps.held;
    CUtensorMap const& map_streamed = OfValues ? maps.streamed_v : maps.streamed;
    Part* const held = OfValues ? shared.held_v : shared.held;
    Part* const streamed = OfValues ? shared.streamed_v : shared.streamed;
    Barrier& held_full = OfValues ? shared.held_v_full : shared.held_full;
    Barrier *const full = OfValues ? shared.full_v : shared.full, *const empty =
                                                                      OfValues ? shared.empty_v : shared.empty;
    bool const leader = threadIdx.x % 32 == 0;
    int const batch = tile.sequence.batch;
    int const held_stored = Traits::OfKeys ? params.stored_keys() : params.stored_rows(),
              streamed_stored = Traits::OfKeys ? params.stored_rows() : params.stored_keys();

    // What lies past a tensor's end arrives as zeros; what lies behind a sequence, and rows that see no key, are to be
    // zeroed: 0 times NaN is NaN.
    Visibility const& visibility = tile.sequence.visibility;
    Range const query_rows = visibility.rows_with_keys(), keys{0, visibility.len_kv};
    auto const counting = [](Range of_sequence, int first, int rows) {  // of a tile's rows, those that count
      return Range{max(of_sequence.begin - first, 0), max(min(of_sequence.end - first, rows), 0)};
    };
    auto const is_cut = [](Range rows, int all, int64_t at, int stored) {
      return rows.begin > 0 || (rows.end < all && at + rows.end < stored);
    };
    // And the query rows of a tile that see no key by what pairs have, in bits; null where there are none.
    auto const empty_rows = [&](bool of_rows, int head, int first, int rows) -> uint32_t const* {
      if (!Traits::Hides || !of_rows || !params.empty_rows) return nullptr;
      uint32_t const* const bits =
          params.empty_rows + (StatisticsRows(params).first(params, tile.sequence, tile.work.batch, head) + first) / 32;
      uint32_t any = 0;
      for (int word = 0; word < rows / 32; ++word) any |= __ldg(bits + word);
      return any ? bits : nullptr;
    };
    int const row = tile.held_row0 + tile.work.row0;
    Range const here = counting(Traits::OfKeys ? keys : query_rows, tile.work.row0, Held);
    auto const* const empty_held = empty_rows(!Traits::OfKeys, tile.head_q, tile.work.row0, Held);
    // Few rows pass by so fast that what the next tile begins with is fetched while the one before ends: (256, 128, 16,
    // 64) takes 257 us for 268, (32, 512, 32, 64) 457 for 462. Of longer heads 1 to 2% more, in full.
    constexpr int kFewTurns = 8;
    if constexpr (Traits::FusesPostprocess && !Traits::FoldsStatistics && !OfValues) wait_for_section(params, tile);
    if (Traits::OwnsHeads || (!Traits::Pairs && turns <= kFewTurns)) {
      auto const prefetch = [&](CUtensorMap const& map, int row, int head) {
        SM90_TMA_LOAD_4D::PREFETCH::copy(&map, 0, row, head, batch);
      };
      if (leader) {
        for (int first = 0; first < Held; first += Traits::HeldBox) prefetch(map_held, row + first, tile.work.head);
        prefetch(map_streamed, tile.streamed_row0 + tile.tiles.begin * Step, tile.head_q);
      }
    }
    if constexpr (Traits::Persistent && !(Traits::DqInShared && OfValues))
      (OfValues ? shared.held_v_empty : shared.held_empty).wait_for(tile.held_phase ^ 1);
    if constexpr (Traits::DqInShared && OfValues) {
      for (int first = 0; first < Held; first += Step) {
        Range const here = counting(keys, min(tile.work.row0 + first, keys.end), Step);
        auto* const to = streamed + ring.stage * Step * Columns;
        empty[ring.stage].wait_for(ring.phase ^ 1);
        tail.template tile<Step, Columns>(
            full[ring.stage], to, is_cut(here, Step, row + first, held_stored), here, [&](Barrier& barrier) {
              if (leader)
                copy_panels<Step, Columns>(map_held, barrier, to, row + first, tile.work.head, batch,
                                           TMA::CacheHintSm90::EVICT_FIRST);
            });
        ring.advance();
      }
    } else {
      tail.template tile<Held, Columns>(
          held_full, held, empty_held || is_cut(here, Held, row, held_stored), here,
          [&](Barrier& barrier) {
            if (!leader) return;
            barrier.arrive_and_expect_tx(Held * Columns * sizeof(Part));
            CUTE_UNROLL
            for (int first = 0; first < Held; first += Traits::HeldBox)
              copy_box<Held, Columns>(map_held, barrier, held + first * kPanel, row + first, tile.work.head, batch,
                                      TMA::CacheHintSm90::EVICT_FIRST);
          },
          empty_held);
    }
    if constexpr (Traits::Cluster > 1 && !OfValues) copy_others_keys(tile, keys);
    auto const statistics_of = [&](int head) -> int64_t {
      return WithStatistics ? StatisticsRows(params).first(params, tile.sequence, tile.work.batch, head) : 0;
    };
    // Of a cluster each CTA copies a part of the rows to all; of a tile that is cut, which it waits for, all to itself.
    auto const copy_rows = [&](Barrier& barrier, Part* to, int row, int head, bool cut) {
      constexpr auto kHint = TMA::CacheHintSm90::EVICT_LAST;
      constexpr int kBox = Step / Traits::Cluster;
      if constexpr (Traits::Cluster > 1) {
        if (!cut) {
          int const first = cute::block_rank_in_cluster() * kBox;
          return copy_box_to_all<Step, Columns>(map_streamed, barrier, to + first * kPanel, row + first, head, batch,
                                                (1 << Traits::Cluster) - 1, kHint);
        }
      }
      CUTE_UNROLL
      for (int first = 0; first < Step; first += kBox)
        copy_box<Step, Columns>(map_streamed, barrier, to + first * kPanel, row + first, head, batch, kHint);
    };
    auto const copy_streamed = [&](StreamStep of) {
      int const head_q = of.head, t = of.t;
      int64_t const statistics = statistics_of(Traits::OfKeys ? head_q : tile.head_kv);
      int const head = Traits::OfKeys ? head_q : tile.head_kv, first = t * Step, at = tile.streamed_row0 + first;
      Range const here = counting(Traits::OfKeys ? query_rows : keys, first, Step);
      auto* const to = streamed + ring.stage * Step * Columns;
      auto const* const empty_streamed = empty_rows(Traits::OfKeys, head, first, Step);
      bool const cut = empty_streamed || is_cut(here, Step, at, streamed_stored);
      empty[ring.stage].wait_for(ring.phase ^ 1);
      tail.template tile<Step, Columns>(
          full[ring.stage], to, cut, here,
          [&](Barrier& barrier) {
            if (!leader) return;
            if constexpr (Traits::SkipsTiles && !OfValues) {
              auto& says = shared.at[ring.stage];
              says.tile = t, says.head = head_q, says.mixed = of.mixed;
              if constexpr (Traits::OfKeys) {
                if (says.mixed) says.mask = TilePairs<Traits>::mask_of_tile(params, tile.work.batch, head_q, t);
                if constexpr (!Traits::IsPlain) {
                  if (has_bias(params) && tile.bias_in_chunks)
                    says.bias_row = tile.pairs.bias_row(params, head_q - tile.head_q, t * Step);
                }
              }
              if constexpr (Traits::AccumulatesDq && !Traits::DqInShared)
                says.sums = sums_of_tile(params, tile, head_q, t);
            }
            barrier.arrive_and_expect_tx(Step * Columns * sizeof(Part) + StatisticsBytes);
            copy_rows(barrier, to, at, head, cut);
            if constexpr (WithStatistics) {
              SM90_BULK_COPY_G2S::copy(params.row_statistics + statistics + first,
                                       reinterpret_cast<uint64_t*>(&barrier), shared.statistics[ring.stage],
                                       StatisticsBytes);
            }
          },
          empty_streamed);
      ring.advance();
    };
    for_each_step(params, tile, [&](StreamStep of) {
      // With one place left to fill, or one tile to fill it with: the tile in hand before has ended, or ends soon.
      if constexpr (Traits::FusesPostprocess && OfValues) {
        if (of.left - 1 == max(turns - Traits::StagesV, 0)) count_ended();
      }
      copy_streamed(of);
      if constexpr (Traits::InOrder && OfValues) {
        if (params.dq_semaphore) semaphore(tile, of);
      }
    });
    if constexpr (Traits::InOrder && OfValues) semaphore.acquire();
    if (Traits::FusesPostprocess && OfValues && params.sections) ended = tile.section;
  }

  /// Copies what of the keys of the cluster's other CTA the products of its dS want: two panels of columns.
  CUTE_DEVICE void copy_others_keys(GradientTile<Traits> const& tile, Range keys) {
    constexpr int kColumns = 2 * kPanel;
    int const rank = cute::block_rank_in_cluster(), first = tile.work.row0 + (rank == 0 ? Held : -Held),
              row = tile.held_row0 + first;
    Range const here{0, max(min(keys.end - first, Held), 0)};
    tail.template tile<Held, kColumns>(
        shared.held_full, shared.other_held, here.end < Held && row + here.end < params.stored_keys(), here,
        [&](Barrier& barrier) {
          if (threadIdx.x % 32 != 0) return;
          barrier.arrive_and_expect_tx(Held * kColumns * sizeof(Part));
          copy_box<Held, kColumns>(maps.held, barrier, shared.other_held, row, tile.work.head, tile.sequence.batch,
                                   TMA::CacheHintSm90::EVICT_FIRST, -rank * kPanel);
        });
  }

  /// Tells all CTAs of what the tile before has added to dQ, once it has.
  CUTE_DEVICE void count_ended() {
    if (ended < 0) return;
    shared.dq_added.wait_for(added_phase);
    added_phase ^= 1;
    if (threadIdx.x % 32 == 0) count_done(params.sections[ended].tiles);
    __syncwarp();
    ended = -1;
  }
};

}  // namespace cutlass_ext::sm90

// The producer warps of the persistent Hopper kernel: one works out the jobs, three copy Q, K and V, and those of
// drawing warpgroups draw what dropout keeps. Used by fmha.hpp.
#pragma once

#include "../cache.hpp"
#include "../copy/tma.hpp"
#include "../score.hpp"
#include "../visibility.hpp"
#include "tile_scheduler.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// The scheduling warp: works out the jobs of this CTA, each when the copying warps are ready for it, and lets them
/// know of it before the rest is worked out.
template <class Traits>
CUTE_DEVICE void schedule(Params const& params, typename Traits::SharedStorage& shared) {
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c;
  int const lane = threadIdx.x % 32;
  RingPosition<Traits::StagesJobs> slot;
  RingPosition<1> asked;
  TileRows const tile_rows(params, B_r);
  WorkQueue queue(params, tile_rows.step());
  for (bool first_job = true, exists = true; exists; slot.advance(), first_job = false) {
    if (!first_job) {
      shared.job_asked.wait_for(asked.phase);
      asked.advance();
    }
    WorkItem work{};
    Sequence sequence{};
    exists = queue.next(&work, &sequence);
    if (first_job) {
      __syncthreads();  // the barriers are set up
    } else {
      shared.job_empty[slot.stage].wait_for(slot.phase ^ 1);
    }
    Visibility const& visibility = sequence.visibility;
    int const token0 = tile_rows.token(work.row0), head0 = work.head * params.heads_a_tile.divisor;
    Range tiles =
        split_range(visibility.tiles_of(token0, tile_rows.tokens, B_c), params.scheduler.splits(), work.split);
    auto& job = shared.jobs[slot.stage];
    bool const looks = Traits::has_mask(params) && exists;  // which tiles there are is known in the end
    int const row = sequence.q_row0 + token0;
    if (lane == 0) {
      job.exists = exists;
      job.tiles = tiles;
      job.visibility = visibility;
      job.q_row0 = row;
      job.token0 = token0;
      job.rows = min(visibility.n_q - token0, tile_rows.tokens) * params.heads_a_tile.divisor;
      job.k_row0 = sequence.k_row0;
      job.batch = sequence.batch;
      job.head = work.head;
      job.head_kv = params.heads_per_kv.div(head0);
      job.pages = params.pages_of(work.batch);
      if constexpr (Traits::Pairs) job.is_mapped = false, job.first = tiles.begin;
      if (!looks) shared.job_placed[slot.stage].arrive();
    }
    if (lane < Traits::Consumers) {
      // The tokens of its rows, of which the last may be the next warpgroup's too.
      int const row0 = token0 + tile_rows.token(lane * kAtomRows),
                tokens = token0 + tile_rows.token(lane * kAtomRows + kAtomRows - 1) - row0 + 1,
                end = visibility.tiles_of(row0, tokens, B_c).end;
      // A warpgroup skips K ahead of V, so no more tiles than fit beside the one of V that it has not multiplied yet.
      int const first = tiles.end - (Traits::Stages - 1), least = first > tiles.begin ? first : tiles.begin + 1;
      int const seen = Traits::copies_bias(params) ? tiles.end : min(max(end, least), tiles.end);
      job.of_warpgroup[lane].end = row0 < visibility.n_q && tiles.size() > 0 ? seen : tiles.begin;
      job.of_warpgroup[lane].unmasked = visibility.unmasked_tiles_of(row0, tokens, B_c);
    }
    if (lane == 0) {
      job.result_row0 = sequence.result_row0(params, head0, work.split) + token0;
      job.out_row0 = sequence.batch * params.o_stride.batch + row * params.o_stride.row + head0 * params.o_stride.head;
      if constexpr (Traits::Mods != 0) {
        if (exists) job.score_mod = ScoreMod(params, work.batch, head0);
        if (Traits::Pairs && exists && has_pairs(params)) job.pairs = PairMod(params, sequence, work.batch, head0);
      } else {
        job.score_mod.sink_log2 = exists ? params.sink_of(head0) * kLog2e : -INFINITY;
      }
      if (Traits::Parts > 1 && exists && tiles.size() > 0)  // sequences without keys have none
        shared.scales[slot.stage] = params.part_scales[work.batch * params.heads_kv + params.heads_per_kv.div(head0)];
    }
    if constexpr (Traits::Pairs) {
      if (looks) {
        __syncwarp();
        look<B_c>(params, job);
        __syncwarp();
        if (lane == 0) shared.job_placed[slot.stage].arrive();
      }
    }
    if (lane < Traits::Consumers) shared.job_full[slot.stage].arrive();
  }
}

/// A reader of the jobs, one after the other, as soon as `full` says so.
template <class Traits>
struct JobReader {
  typename Traits::SharedStorage& shared;
  Barrier (&full)[Traits::StagesJobs];
  RingPosition<Traits::StagesJobs> slot{};

  CUTE_DEVICE typename Traits::Job const* next() {
    full[slot.stage].wait_for(slot.phase);
    auto const* const job = &shared.jobs[slot.stage];
    slot.advance();
    return job;
  }
  /// By one lane of each reading warp.
  CUTE_DEVICE void release(typename Traits::Job const* job) { shared.job_empty[job - shared.jobs].arrive(); }
};

/// Copies the bias of a job, tile after tile, each in parts for the warpgroups. By a whole warp.
template <class Traits>
CUTE_DEVICE void copy_bias(Params const& params, CUtensorMap const& map, typename Traits::SharedStorage& shared,
                           typename Traits::Job const& job, RingPosition<Traits::StagesBias>& at) {
  constexpr int B_c = Traits::B_c, kRows = kAtomRows;
  bool const leader = threadIdx.x % 32 == 0;
  int const head = bias_of(params).head == 0 ? 0 : job.head, batch = bias_of(params).batch == 0 ? 0 : job.batch;
  auto const fill = [&](auto const& copy) {
    CUTE_NO_UNROLL
    for (int warpgroup = 0; warpgroup < Traits::Consumers; ++warpgroup) {
      shared.bias_empty[warpgroup][at.stage].wait_for(at.phase ^ 1);
      if (leader) copy(warpgroup, shared.bias_full[warpgroup][at.stage]);
    }
    at.advance();
  };
  for (int tile = job.tiles.end - 1; tile >= job.tiles.begin; tile = job.below(tile)) {
    fill([&](int warpgroup, Barrier& full) {
      auto* const to = shared.biases_of(warpgroup, at.stage);
      full.arrive_and_expect_tx(Traits::BiasElements * sizeof(*to));
      CUTE_UNROLL
      for (int panel = 0; panel < B_c / kPanel; ++panel) {
        SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                               static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL), to + panel * kRows * kPanel,
                               tile * B_c + panel * kPanel, job.token0 + warpgroup * kRows, head, batch);
      }
    });
  }
  // A job without tiles, whose O is staged too, has the buffer in its turn.
  if (Traits::BiasInO && job.tiles.size() == 0) fill([](int, Barrier& full) { full.arrive(); });
}

/// The warp that copies Q, as soon as a job is known and a buffer free, and the bias.
template <class Traits>
CUTE_DEVICE void copy_queries(Params const& params, typename Traits::Maps const& maps,
                              typename Traits::SharedStorage& shared) {
  constexpr int B_r = Traits::B_r, Columns = Traits::ColumnsQK;
  TailCopy copy{shared.q_tail};
  bool const copies_bias = Traits::copies_bias(params);
  // What is told of the bias's place comes after what is told of Q's.
  JobReader<Traits> jobs{shared, copies_bias ? shared.job_full : shared.job_placed};
  RingPosition<Traits::StagesQ> q;
  [[maybe_unused]] RingPosition<Traits::StagesBias> biases;
  int const step = TileRows(params, B_r).step();
  for (auto const* job = jobs.next(); job->exists; job = jobs.next()) {
    if (job->tiles.size() > 0) {
      shared.q_empty[q.stage].wait_for(q.phase ^ 1);
      // What the tensor does not have arrives as zeros; what the box does not hold is to be zeroed.
      auto* const to = shared.q + q.stage * B_r * Columns;
      int const rows = job->rows, tokens = params.heads_a_tile.div(rows);
      bool const cut = rows < B_r && (step < B_r || job->q_row0 + tokens < params.stored_rows());
      copy.template tile<B_r, Columns>(shared.q_full[q.stage], to, cut, {0, rows}, [&](Barrier& barrier) {
        if (threadIdx.x % 32 == 0)
          copy_packed_panels<B_r, Columns>(maps.q, barrier, to, step, job->q_row0, job->head, job->batch,
                                           TMA::CacheHintSm90::EVICT_FIRST, params.lead_k(job->head_kv));
      });
      q.advance();
    }
    if constexpr (Traits::Pairs) {
      if (copies_bias) copy_bias<Traits>(params, maps.biases, shared, *job, biases);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) jobs.release(job);
  }
}

/// Where the rows of a tile of `B_c` keys come from: one box of a tensor, or boxes of pages, as many rows as are sure
/// to lie in one page, which the lanes of a warp copy.
template <int B_c>
class KeyRows {
 public:
  CUTE_DEVICE KeyRows(Params const& params) : params_(params) {}

  /// What the table says of the lane's first box of a tile: asked for before the warp waits for room.
  template <class Job>
  CUTE_DEVICE int page(Job const& job, int tile) const {
    return job.pages ? page_of(job, tile * B_c + min(threadIdx.x % 32 * params_.box_rows, B_c - 1)) : 0;
  }

  /// Starts the copies of tile `tile` of K or V, of which `barrier` is told, behind `lead` columns of zeros.
  template <int Cols, class Element, class Job>
  CUTE_DEVICE void copy(CUtensorMap const& map, Barrier& barrier, Element* to, Job const& job, int tile, int page,
                        int lead) const {
    bool const leader = threadIdx.x % 32 == 0;
    auto constexpr hint = TMA::CacheHintSm90::EVICT_LAST;
    if (!job.pages) {
      if (leader) copy_panels<B_c, Cols>(map, barrier, to, job.k_row0 + tile * B_c, job.head_kv, job.batch, hint, lead);
      return;
    }
    if (leader) barrier.arrive_and_expect_tx(B_c * Cols * sizeof(Element));
    __syncwarp();
    CUTE_NO_UNROLL
    for (int row = threadIdx.x % 32 * params_.box_rows; row < B_c; row += 32 * params_.box_rows) {
      if (row >= 32 * params_.box_rows) page = page_of(job, tile * B_c + row);
      copy_box<B_c, Cols>(map, barrier, to + row * kPanel, row_in_page(params_, job.k_row0 + tile * B_c + row),
                          job.head_kv, nearest_page(page, params_.pages), hint, lead);
    }
  }

 private:
  /// Past the keys, of their last.
  template <class Job>
  CUTE_DEVICE int page_of(Job const& job, int key) const {
    return __ldg(job.pages + params_.page_rows.div(job.k_row0 + min(key, job.visibility.len_kv - 1)));
  }

  Params const& params_;
};

/// The warp that keeps the ring of K full. It asks for the next job as late as its arrival in time allows: who takes
/// work early takes it from a CTA that will be idle.
template <class Traits>
CUTE_DEVICE void copy_keys(Params const& params, CUtensorMap const& map, typename Traits::SharedStorage& shared) {
  constexpr int B_c = Traits::B_c, Columns = Traits::ColumnsQK;
  bool const leader = threadIdx.x % 32 == 0;
  RingPosition<Traits::Stages> k;
  KeyRows<B_c> const rows(params);
  JobReader<Traits> jobs{shared, shared.job_placed};
  for (auto const* job = jobs.next(); job->exists; job = jobs.next()) {
    Range const tiles = job->tiles;
    int const ask_at = job->ask_at(tiles), lead = params.lead_k(job->head_kv);
    if (leader && tiles.size() == 0) shared.job_asked.arrive();
    for (int tile = tiles.end - 1; tile >= tiles.begin; tile = job->below(tile)) {
      int const page = rows.page(*job, tile);
      if (leader && tile == ask_at) shared.job_asked.arrive();
      shared.k_empty[k.stage].wait_for(k.phase ^ 1);
      rows.template copy<Columns>(map, shared.k_full[k.stage], shared.k + k.stage * B_c * Columns, *job, tile, page,
                                  lead);
      k.advance();
    }
    __syncwarp();
    if (leader) jobs.release(job);
  }
}

/// The warp that keeps the ring of V full.
template <class Traits>
CUTE_DEVICE void copy_values(Params const& params, CUtensorMap const& map, typename Traits::SharedStorage& shared) {
  constexpr int B_c = Traits::B_c, Columns = Traits::ColumnsV;
  RingPosition<Traits::Stages> v;
  TailCopy tail{shared.v_tail};
  KeyRows<B_c> const rows(params);
  JobReader<Traits> jobs{shared, shared.job_placed};
  for (auto const* job = jobs.next(); job->exists; job = jobs.next()) {
    int const len_kv = job->visibility.len_kv, lead = params.lead_v(job->head_kv);
    bool const goes_on = job->pages || job->k_row0 + len_kv < params.stored_keys();  // behind the sequence's last key
    for (int tile = job->tiles.end - 1; tile >= job->tiles.begin; tile = job->below(tile)) {
      int const page = rows.page(*job, tile), keys = len_kv - tile * B_c;
      shared.v_empty[v.stage].wait_for(v.phase ^ 1);
      auto* const to = shared.v + v.stage * B_c * Columns;
      tail.template tile<B_c, Columns>(
          shared.v_full[v.stage], to, keys < B_c && goes_on, {0, keys},
          [&](Barrier& barrier) { rows.template copy<Columns>(map, barrier, to, *job, tile, page, lead); });
      v.advance();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) jobs.release(job);
  }
}

/// The warps of drawing warpgroup `warpgroup`, each of which draws what dropout keeps for the consumer warp with its
/// number there: of every tile that it sees.
template <class Traits>
CUTE_DEVICE void produce_dropout(Params const& params, typename Traits::SharedStorage& shared, int warpgroup) {
  int const lane = threadIdx.x % 32, warp = warpgroup * 4 + threadIdx.x / 32 % 4;
  auto& masks = shared.drawn[warp].of_sixteen;
  JobReader<Traits> jobs{shared, shared.job_full};
  RingPosition<1> slot;
  for (auto const* job = jobs.next(); job->exists; job = jobs.next()) {
    CUTE_NO_UNROLL
    for (int tile = job->of_warpgroup[warpgroup].end - 1; tile >= job->tiles.begin; tile = job->below(tile)) {
      DropoutBits const bits(threshold_of(params), job->pairs, job->token0 + warp * 16, tile * Traits::B_c, lane);
      shared.drawn_empty[warp].wait_for(slot.phase ^ 1);
      CUTE_UNROLL
      for (int i = 0; i < DropoutBits::kSixteens; ++i) masks[i][lane] = bits.mask(i);
      shared.drawn_full[warp].arrive();
      slot.advance();
    }
    __syncwarp();
    if (lane == 0) jobs.release(job);
  }
}

}  // namespace cutlass_ext::sm90

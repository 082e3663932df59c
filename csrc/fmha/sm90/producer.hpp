// The producer warps of the persistent Hopper kernel: one works out the jobs, one copies Q, one K and V. Used by
// fmha.hpp.
#pragma once

#include "../copy/tma.hpp"
#include "../score.hpp"
#include "../visibility.hpp"
#include "jobs.hpp"
#include "tensor_maps.hpp"
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
  WorkQueue queue(params, B_r);
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
    Range const tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params.scheduler.splits(), work.split);
    auto& job = shared.jobs[slot.stage];
    int const row = sequence.q_row0 + work.row0;
    if (lane == 0) {
      job.exists = exists;
      job.tiles = tiles;
      job.visibility = visibility;
      job.q_row0 = row;
      job.row0 = work.row0;
      job.k_row0 = sequence.k_row0;
      job.batch = sequence.batch;
      job.head = work.head;
      shared.job_placed[slot.stage].arrive();
    }
    if (lane < Traits::Consumers) {
      int const row0 = work.row0 + lane * kAtomRows, end = visibility.tiles_of(row0, kAtomRows, B_c).end;
      // A warpgroup skips K ahead of V, so no more tiles than fit beside the one of V that it has not multiplied yet.
      int const first = tiles.end - (Traits::Stages - 1), least = first > tiles.begin ? first : tiles.begin + 1;
      int const seen = end < least ? least : end < tiles.end ? end : tiles.end;
      job.rows[lane].end = row0 < visibility.n_q ? seen : tiles.begin;
      job.rows[lane].unmasked = visibility.unmasked_tiles_of(row0, kAtomRows, B_c);
    }
    if (lane == 0) {
      job.result_row0 = sequence.result_row0(params, work.head, work.split) + work.row0;
      job.out_row0 =
          sequence.batch * params.o_stride.batch + row * params.o_stride.row + work.head * params.o_stride.head;
      if constexpr (Traits::ScoreMods) {
        if (exists) job.score_mod = ScoreMod(params, work.batch, work.head);
      } else {
        job.score_mod.sink_log2 = params.sink && exists ? params.sink[work.head] * kLog2e : -INFINITY;
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

  CUTE_DEVICE Job<Traits::Consumers> const* next() {
    full[slot.stage].wait_for(slot.phase);
    auto const* const job = &shared.jobs[slot.stage];
    slot.advance();
    return job;
  }
  /// By one lane of each reading warp.
  CUTE_DEVICE void release(Job<Traits::Consumers> const* job) { shared.job_empty[job - shared.jobs].arrive(); }
};

/// The warp that copies Q, as soon as a job is known and a buffer free.
template <class Traits>
CUTE_DEVICE void copy_queries(Params const& params, CUtensorMap const& map, typename Traits::SharedStorage& shared) {
  constexpr int B_r = Traits::B_r, Columns = Traits::ColumnsQK;
  TailCopy copy{shared.q_tail};
  JobReader<Traits> jobs{shared, shared.job_placed};
  RingPosition<Traits::StagesQ> q;
  for (auto const* job = jobs.next(); job->exists; job = jobs.next()) {
    if (job->tiles.size() > 0) {
      shared.q_empty[q.stage].wait_for(q.phase ^ 1);
      copy.template tile<B_r, Columns>(map, shared.q_full[q.stage], shared.q + q.stage * B_r * Columns, job->q_row0,
                                       job->visibility.n_q - job->row0, params.stored_rows(), job->head, job->batch,
                                       TMA::CacheHintSm90::EVICT_FIRST);
      q.advance();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) jobs.release(job);
  }
}

/// How many key tiles before the last of a job the next one is asked for; 1 is 4% slower at b1 N1024 d64, 4 no faster.
constexpr int kTilesAhead = 2;

/// The warp that keeps the rings of K and V full.
template <class Traits>
CUTE_DEVICE void copy_keys_and_values(Params const& params, TensorMaps const& maps,
                                      typename Traits::SharedStorage& shared) {
  constexpr int B_c = Traits::B_c;
  bool const leader = threadIdx.x % 32 == 0;
  RingPosition<Traits::Stages> k, v;
  TailCopy copy_tail{shared.v_tail};
  auto load_k = [&](auto const& job, int tile) {
    shared.k_empty[k.stage].wait_for(k.phase ^ 1);
    if (leader) {
      copy_panels<B_c, Traits::ColumnsQK>(maps.k, shared.k_full[k.stage], shared.k + k.stage * B_c * Traits::ColumnsQK,
                                          job.k_row0 + tile * B_c, params.heads_per_kv.div(job.head), job.batch,
                                          TMA::CacheHintSm90::EVICT_LAST);
    }
    k.advance();
  };
  auto load_v = [&](auto const& job, int tile) {
    shared.v_empty[v.stage].wait_for(v.phase ^ 1);
    copy_tail.template tile<B_c, Traits::ColumnsV>(
        maps.v, shared.v_full[v.stage], shared.v + v.stage * B_c * Traits::ColumnsV, job.k_row0 + tile * B_c,
        job.visibility.len_kv - tile * B_c, params.stored_keys(), params.heads_per_kv.div(job.head), job.batch,
        TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  };

  // In the order of their use: K is a tile ahead of V, across jobs too. The next job is asked for as late as its
  // arrival in time allows: who takes work early takes it from a CTA that will be idle.
  JobReader<Traits> jobs{shared, shared.job_placed};
  auto load_first_k = [&](auto const& job) {
    if (job.tiles.size() > 0) load_k(job, job.tiles.end - 1);
  };
  auto ask_for_next = [&] {
    if (leader) shared.job_asked.arrive();
  };
  auto const* job = jobs.next();
  load_first_k(*job);
  while (job->exists) {
    Range const tiles = job->tiles;
    if (tiles.size() <= kTilesAhead) ask_for_next();
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      __syncwarp();
      if (tile == tiles.begin + kTilesAhead) ask_for_next();
      if (tile > tiles.begin) load_k(*job, tile - 1);
      load_v(*job, tile);
    }
    auto const* const next = jobs.next();
    load_first_k(*next);
    __syncwarp();
    if (leader) jobs.release(job);
    job = next;
  }
}

}  // namespace cutlass_ext::sm90

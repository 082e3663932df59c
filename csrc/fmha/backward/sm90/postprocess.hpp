// dQ of the sums that Hopper's kernels over tiles of keys leave in memory, made by a spare warp of each CTA beside the
// tiles of a launch that goes through its heads section for section: of the section before, whose place it clears for
// one that comes. So the sums never leave L2, and no launch clears or reads them before and after. Used by kernel.hpp.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../../mma/mma_sync.hpp"
#include "../../operand.hpp"
#include "../../optimization_barriers.hpp"
#include "dq_gemm.hpp"
#include "sections.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// A warp that does one job after the other. The copy engine brings the sums and takes dQ, part for part: beside the
/// others the warp issues an instruction in twenty clocks, and one that reads or writes shared memory in a hundred, so
/// that these are to be few. An H200's clocks for a job of 128 columns, (8, 2048, 16, 128): 72,000, and as many with
/// loads and stores instead, which slow the others down.
template <class Traits>
struct PostprocessWarp {
  using Element = typename Traits::Element;
  using Shared = decltype(Traits::SharedStorage::beside);
  static constexpr int kParts = Traits::StagesPostprocess, kRows = Shared::kRows, kColumns = Shared::kColumns,
                       kChunks = kColumns / 8, kVectors = kRows * kColumns / 4,
                       kColumnsOfPiece = SumsOfTile::columns_of_part(Traits::HeadDim),  // of a warp's 16 rows
      kPieces = SumsOfTile::parts(Traits::HeadDim), kPartsOfPiece = kColumnsOfPiece / kColumns,
                       kPartsOfJob = TiledRows::kTile / kRows * kPieces * kPartsOfPiece;
  static_assert(kPartsOfJob % (2 * kParts) == 0, "every job begins with the same phase");
  static_assert(kColumnsOfPiece % kColumns == 0 && sizeof(Element) == 2, "whole parts, chunks of eight columns");

  BackwardParams const& params;
  CUtensorMap const& map;
  Shared& shared;
  Barrier* const full;     // of its parts
  PostprocessJob& of_job;  // the first lane's, which has no registers for it

  CUTE_DEVICE PostprocessWarp(BackwardParams const& params, CUtensorMap const& map,
                              typename Traits::SharedStorage& shared)
      : params(params),
        map(map),
        shared(shared.beside),
        full(shared.postprocess_full),
        of_job(shared.postprocess_job) {}

  CUTE_DEVICE void operator()() const {
    SectionJobs const& jobs = params.section_jobs;
    int const heads = jobs.of_a_section / jobs.of_a_head;
    while (true) {
      unsigned job = draw(params.counters + 1);
      if (job >= jobs.size) break;
      int const section = job / jobs.of_a_section;
      job -= section * jobs.of_a_section;
      int const in_section = job / jobs.of_a_head, head = section * heads + in_section, batch = head / params.heads_q,
                row0 = (job - in_section * jobs.of_a_head) * TiledRows::kTile;
      if (threadIdx.x % 32 == 0) of_job = {section, batch, head - batch * params.heads_q, row0};
      while (!has_counted(params.sections[section].tiles, params.scheduler.items_a_section())) __nanosleep(200);
      int64_t const place = section % kSectionsOfSums * heads + in_section;
      finish(params.dq_sums + (place * params.rows_a_head + row0) * Traits::HeadDim);
      asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine may be what adds to them next
      __syncwarp();
      if (threadIdx.x % 32 == 0) count_done(params.sections[of_job.section].jobs);
    }
    tma_store_wait<0>();  // shared memory is read until then
  }

 private:
  /// dQ of rows whose sums begin at `sums`, which are zero then.
  CUTE_DEVICE void finish(float* sums) const {
    int const lane = threadIdx.x % 32;
    auto* of_part = reinterpret_cast<float4*>(sums) + lane;
    uint32_t const shared_sums = cast_smem_ptr_to_uint(shared.sums);
    auto const bring = [&](float4* from, int part) {  // by lane 0
      auto& barrier = full[part % kParts];
      barrier.arrive_and_expect_tx(kVectors * sizeof(float4));
      SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier), shared.sums[part % kParts],
                               kVectors * sizeof(float4));
    };
    asm volatile("fence.proxy.async.global;" ::: "memory");  // others have added to them
    __syncwarp();
    if (lane == 0) {
      for (int part = 0; part < kParts; ++part) bring(of_part + part * kVectors, part);
    }
    float const scale = factor_of_gradients(params);
    CUTE_NO_UNROLL
    for (int part = 0; part < kPartsOfJob; ++part, of_part += kVectors) {
      tma_store_wait<0>();  // what was left there before has been read
      full[part % kParts].wait_for(part / kParts % 2);
      __syncwarp();
      // The lane leaves a row of a matrix: of four, rows 0 to 7 and the eight after them, of eight columns and of the
      // eight after them.
      unsigned const thread = static_cast<unsigned>(opaque(threadIdx.x)) % 32;
      uint32_t const from = shared_sums + (part % kParts * kVectors + thread) * sizeof(float4),
                     to = cast_smem_ptr_to_uint(shared.dq) + thread % 16 * (kColumns * sizeof(Element)) +
                          ((thread / 16) ^ (thread / (8 / kChunks) % kChunks)) * 16;
      // Loaded where the code says so: the compiler would do it one after the other.
      constexpr int kUnderWay = 2;
      auto const load = [&](int i) { return sm80::load_shared(from + i * 32 * sizeof(float4)); };
      uint4 x[kUnderWay];
      CUTE_UNROLL
      for (int i = 0; i < kUnderWay; ++i) x[i] = load(i);
      uint32_t words[4];
      CUTE_UNROLL
      for (int i = 0; i < kChunks; ++i) {
        auto& of = x[i % kUnderWay];
        words[i % 2 * 2] = pack<Element>(__uint_as_float(of.x) * scale, __uint_as_float(of.y) * scale);
        words[i % 2 * 2 + 1] = pack<Element>(__uint_as_float(of.z) * scale, __uint_as_float(of.w) * scale);
        if (i + kUnderWay < kChunks) of = load(i + kUnderWay);
        if (i % 2 == 0) continue;
        store_matrices(to ^ (i / 2 * 32), words[0], words[1], words[2], words[3]);
      }
      CUTE_UNROLL
      for (int i = 0; i < kChunks; ++i) of_part[i * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (lane == 0) {
        if (part + kParts < kPartsOfJob) bring(of_part + kParts * kVectors, part + kParts);
        // A warp's 16 rows of a piece after those of the one before; piece after piece; tile after tile.
        int const sixteen = part / kPartsOfPiece;
        PostprocessJob const job = of_job;
        SM90_TMA_STORE_4D::copy(
            &map, shared.dq, sixteen / 4 % kPieces * kColumnsOfPiece + part % kPartsOfPiece * kColumns,
            job.row0 + sixteen / (4 * kPieces) * SumsOfTile::kRows + sixteen % 4 * kRows, job.head, job.batch);
        tma_store_arrive();
      }
    }
  }
};

}  // namespace cutlass_ext::sm90

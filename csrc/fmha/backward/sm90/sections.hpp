// How a launch of gradients that goes through its heads section for section passes from one to the next: by counts that
// CTAs wait for. Used by producer.hpp and postprocess.hpp.
//
// Every wait is for tiles and jobs that running CTAs took earlier: a launch ends, however few of its CTAs have room.
#pragma once

#include "../params.hpp"

namespace cutlass_ext::sm90 {

/// What a warp beside the tiles (postprocess.hpp) has in shared memory: `Parts` parts of sums, 16 rows of `Columns`
/// each, and one of dQ, swizzled as the copy engine does.
template <class Element, int Parts, int Columns>
struct PostprocessBuffers {
  static constexpr int kRows = 16, kColumns = Columns;
  alignas(1024) Element dq[kRows * kColumns];
  float4 sums[Parts][kRows * kColumns / 4];
};
template <class Element, int Columns>
struct PostprocessBuffers<Element, 0, Columns> {};

/// What such a warp works on.
struct alignas(16) PostprocessJob {
  int section, batch, head, row0;
};

/// By a whole warp: the number of what nobody has drawn yet.
CUTE_DEVICE unsigned draw(unsigned* counter) {
  return __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? atomicAdd(counter, 1u) : 0, 0);
}

/// Counts one more, by one thread: who sees it sees what that thread, and those that it has been synchronized with,
/// did before.
CUTE_DEVICE void count_done(unsigned& count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&count) : "memory");
}

/// How many have counted. What they did before is to be seen then.
CUTE_DEVICE unsigned load_count(unsigned const& count) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(&count) : "memory");
  return now;
}

/// By a whole warp: whether so many have.
CUTE_DEVICE bool has_counted(unsigned const& count, unsigned wanted) {
  unsigned now = 0;
  if (threadIdx.x % 32 == 0) now = load_count(count);
  now = __shfl_sync(0xffffffffu, now, 0);
  __syncwarp();  // which orders the other lanes' reads behind the first one's
  return now >= wanted;
}

/// Whether the place of a section's sums is free, and cleared.
CUTE_DEVICE bool is_ready(BackwardParams const& params, int section) {
  int const before = section - kSectionsOfSums;
  return before < 0 || has_counted(params.sections[before].jobs, params.section_jobs.of_a_section);
}

}  // namespace cutlass_ext::sm90

// What the host decides about the work of a launch: its order, and how many splits it gets. Called by dispatch.cu, by
// the benchmarks, by the tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.hpp"

namespace cutlass_ext {

/// Pairs of (batch, query head) that `limit` allows, where each key head takes `cost` of it; whole groups that share a
/// key head, and at least one.
inline int section_of(int64_t limit, int64_t cost, int heads_per_kv) {
  int64_t const key_heads = cost > 0 ? limit / cost : limit;
  return heads_per_kv * static_cast<int>(key_heads < 1 ? 1 : key_heads < (1 << 16) ? key_heads : 1 << 16);
}

/// `section` pairs or fewer, at least half as many, so that `pairs` fall into sections of one size where whole groups
/// of `heads_per_kv` allow it; else `section`. A short last section begins its longest tiles when little else is left
/// to do beside them: causal (2, 8192, 16, 128) took 7% longer in sections of 7, 7, 7, 7, 4 than in eight of 4.
inline int even_section(int pairs, int section, int heads_per_kv) {
  for (int s = section; 2 * s >= section && s > 0; s -= heads_per_kv) {
    if (pairs % s == 0) return s;
  }
  return section;
}

/// The section of a launch on a GPU that holds `params.resident_ctas` CTAs at once and has `l2_bytes` of L2: what fits
/// an eighth of L2, since b8 N2048 d128 is 5% slower with half of it (an H200's 60 MB). Under a causal mask the last
/// tiles of the last section are to be short of the whole work, so from eight query tiles on (shorter ones differ too
/// little) three waves of tiles, at most five eighths of L2. Causal rows of an H200 at head_dim 256: two heads of N
/// 16384 at a time are 10% faster than one, four of N 8192 9% faster than two; at N 512, 32 are 2% faster than 64.
inline int section_for(Params const& params, int block_r, int64_t l2_bytes, int element_bytes) {
  int64_t const bytes_a_head = int64_t(params.n_kv) * (params.head_dim + params.head_dim_v) * element_bytes;
  int const heads_per_kv = params.heads_q / params.heads_kv, tiles = Scheduler::tiles_of(params.n_q, block_r);
  int section = section_of(l2_bytes / 8, bytes_a_head, heads_per_kv);
  if (params.window_right >= 0 && tiles >= 8) {
    int64_t const tiles_a_group = int64_t(heads_per_kv) * tiles * params.num_splits;
    section = std::min(section_of(l2_bytes / 8 * 5, bytes_a_head, heads_per_kv),
                       section_of(3 * params.resident_ctas, tiles_a_group, heads_per_kv));
  }
  return even_section(params.batch * params.heads_q, section, heads_per_kv);
}

/// Fills in what follows from the tile of the kernel and the GPU: `params.resident_ctas`, the order of the work.
inline void order_work(Params* params, int block_r, int resident_ctas, int64_t l2_bytes, int element_bytes) {
  params->resident_ctas = resident_ctas;
  params->heads_per_kv = cutlass::FastDivmod(params->heads_q / params->heads_kv);
  params->scheduler = Scheduler(params->batch, params->heads_q, params->n_q, block_r, params->num_splits,
                                section_for(*params, block_r, l2_bytes, element_bytes));
}

/// Splits of the keys that fill `resident_ctas` (CTAs that the GPU holds at once) when `work_tiles` query tiles do not:
/// 1 while they fill three quarters of them; never fewer than `least_key_tiles` a split; no split count that only makes
/// tails shorter.
inline int choose_num_splits(int64_t work_tiles, int64_t key_tiles, int64_t resident_ctas, int64_t least_key_tiles) {
  if (work_tiles == 0 || key_tiles < 2 * least_key_tiles || 4 * work_tiles >= 3 * resident_ctas) return 1;
  int64_t const wanted = std::min(resident_ctas / work_tiles, key_tiles / least_key_tiles);
  int64_t const tiles_per_split = (key_tiles + wanted - 1) / wanted;
  return static_cast<int>((key_tiles + tiles_per_split - 1) / tiles_per_split);
}

}  // namespace cutlass_ext

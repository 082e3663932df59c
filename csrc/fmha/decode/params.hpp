// Sizes that the decode kernels and the host share, and what the host has to know of a launch: limits, workspace. Read
// by the kernels, by host/, by the tests.
#pragma once

#include <algorithm>

#include "../params.hpp"

namespace cutlass_ext::decode {

/// Packed query rows of the narrow kernels (narrow.hpp, cluster.hpp), the sequences that they take, and log2 of the
/// keys of a tile, which lies in one page.
constexpr int kNarrowRows = 8, kNarrowBatch = 256, kNarrowTileShift = 4;

/// The warps of a CTA of cluster.hpp.
constexpr int kClusterWarps = 8;

/// Tiles for each warp of cluster.hpp at most: it holds their pages in its lanes.
constexpr int kClusterTurns = 16;

/// Groups of fewer keys than this cost more to merge than they gain: a tile for each of four warps.
constexpr int kMinChunkKeys = 64;

/// Of a chunk of the batch's keys only the first and the last sequence can reach beyond it, so a CTA leaves at most two
/// partial results: the first of the sequence that it begins with, the second of one that begins inside.
constexpr int kPartialsOfCta = 2;

/// Rows, and the key tiles (of 8 keys at least) that are shared out, are counted in 32 bits.
constexpr int64_t kMostCounted = (int64_t(1) << 31) - 64;

/// Whether the keys of the batch are too many to be shared out; each sequence can have parts of its own.
inline bool has_too_many_keys(Params const& p) { return int64_t(p.batch) * (p.n_kv / 8 + 1) > kMostCounted; }

/// How many, then: of 2^16 keys, since a CTA's sums lose digits with their number (fp32, one part of 2^20 keys: 1.7
/// times the error that is allowed), as far as 256 MB of workspace hold them.
inline int parts_of_many_keys(Params const& p) {
  int64_t const rows = std::max<int64_t>(16, int64_t(p.n_q) * (p.heads_q / p.heads_kv));
  int64_t const bytes_a_part = 4 * int64_t(p.batch) * p.heads_kv * rows * (p.head_dim_v + 2);
  int64_t const room = (int64_t(1) << 28) / std::max<int64_t>(bytes_a_part, 1);
  return static_cast<int>(std::clamp<int64_t>((p.n_kv >> 16) + 1, 1, std::clamp<int64_t>(room, 1, 1024)));
}

/// What no kernel here can do without, in tiles of `tile_rows` packed query rows. Sequences with rows of their own
/// number are taken over pages, each in one tile.
inline bool fits(Params const& p, int tile_rows) {
  return (!p.packed() || p.paged()) &&
         int64_t(p.n_q) * (p.heads_q / p.heads_kv) <= (p.packed() ? tile_rows : kMostCounted) &&
         (p.fixed_splits || !has_too_many_keys(p));
}

/// What a packed call says of its query rows, for kernels that are not given all of Lengths.
struct QueryEnds {
  int const* cu_seqlens_q;
  int total_q, least_q, most_q;

  explicit QueryEnds(Lengths const& of)
      : cu_seqlens_q(of.cu_seqlens_q), total_q(of.total_q), least_q(of.least_q), most_q(of.most_q) {}
  CUTE_HOST_DEVICE void put(Lengths* to) const {
    to->cu_seqlens_q = cu_seqlens_q;
    to->total_q = total_q;
    to->least_q = least_q;
    to->most_q = most_q;
  }
};

/// Whether narrow.hpp and cluster.hpp have kernels for heads of so many columns.
inline bool has_narrow_kernels(Params const& p) {
  return p.head_dim == p.head_dim_v && (p.head_dim == 64 || p.head_dim == 128);
}

/// Whether these have room for the rows and pages of a call, in tiles of `head_dim` columns.
inline bool is_narrow(Params const& p, int head_dim) {
  return fits(p, kNarrowRows) && has_narrow_kernels(p) && p.head_dim == head_dim &&
         p.n_q * (p.heads_q / p.heads_kv) <= kNarrowRows &&
         (p.page_rows.divisor >> kNarrowTileShift << kNarrowTileShift == p.page_rows.divisor);
}

/// The most keys that a sequence may have for a cluster of `ctas`.
constexpr int64_t cluster_keys(int ctas) { return int64_t(kClusterTurns * kClusterWarps * ctas) << kNarrowTileShift; }

/// Tiles of the packed query rows: one without rows, which appends.
inline int row_tiles_of(Params const& p, int tile_rows) {
  int64_t const rows = int64_t(p.n_q) * (p.heads_q / p.heads_kv);
  return static_cast<int>(std::max<int64_t>(1, (rows + tile_rows - 1) / tile_rows));
}

/// Rows of o_partial, [rows, d_v], and of lse_partial, [rows, 2], and how many counters are to be zero; 0: no CTA
/// shares a sequence with others.
inline int64_t partial_rows(Params const& p, int tile_rows) {
  int64_t const of_group = int64_t(p.row_tiles) * p.heads_kv * tile_rows;
  if (p.fixed_splits) return p.num_splits > 1 ? int64_t(p.batch) * p.num_splits * of_group : 0;
  return p.groups > 1 ? kPartialsOfCta * p.groups * of_group : 0;
}
inline int64_t counters_of(Params const& p) { return int64_t(p.batch) * p.row_tiles * p.heads_kv; }

}  // namespace cutlass_ext::decode

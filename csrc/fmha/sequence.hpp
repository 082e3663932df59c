// One sequence of a batch, padded, packed or cached: which rows of the tensors are its own, and which keys its queries
// see. Read on the device for each work item, by every kernel; by the tests on the host.
#pragma once

#include <cassert>
#include <cstdint>

#include "optimization_barriers.hpp"
#include "params.hpp"
#include "visibility.hpp"

namespace cutlass_ext {

struct Sequence {
  int batch;   // index into the batch dimension of q and o: packed sequences lie in a batch of one
  int q_row0;  // row of q, o and lse that holds its first query
  int k_row0;  // row of k and v that holds its first real key: the left padding is cut off
  int cached;  // keys before the call's new ones, counted from the first real one: at or past this a key is new
  Visibility visibility;
  int leftpad;  // keys that are cut off in front

  /// Index of query row 0 of head `head` in lse, and in lse_partial (times d_v: in o_partial) at split `split`; the
  /// rows that follow it follow there.
  CUTE_HOST_DEVICE int64_t result_row0(Params const& params, int head, int split) const {
    return split * params.result_rows() + (int64_t(batch) * params.heads_q + head) * params.stored_rows() + q_row0;
  }
};

CUTE_HOST_DEVICE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/// Rows of q that sequence `b` holds; none where it is another launch's.
CUTE_HOST_DEVICE Range query_rows_of(Lengths const& lengths, int b) {
  if (!lengths.packed()) return {0, lengths.n_q};
  int const begin = clamp(lengths.cu_seqlens_q[b], 0, lengths.total_q);
  int const end = clamp(lengths.cu_seqlens_q[b + 1], begin, lengths.total_q), rows = end - begin;
  return {begin, lengths.least_q <= rows && rows <= lengths.most_q ? end : begin};
}

/// What the device alone knows about sequence `b`: its rows, lengths, padding and start position. Whatever the device
/// holds stays in bounds: ends that lie outside the packed tensors or before their beginning are moved to the nearest
/// that do not, `seqused_k`, `leftpad_k` and new keys are held to the keys that there is room for, query rows at or
/// past `n_q` are left out (the launch knows of no more), positions are held to +-2^29.
CUTE_HOST_DEVICE Sequence sequence_of(Lengths const& lengths, int b) {
  Range const q = query_rows_of(lengths, b);
  Range k{0, lengths.n_kv};
  if (lengths.cu_seqlens_k) {
    k.begin = clamp(lengths.cu_seqlens_k[b], 0, lengths.total_k);
    k.end = clamp(lengths.cu_seqlens_k[b + 1], k.begin, lengths.total_k);
  }
  int const len_q = q.size();
  int const cached = clamp(lengths.seqused_k ? lengths.seqused_k[b] : lengths.n_cached, 0, k.size());
  int const len_kv = clamp(cached + lengths.n_new, 0, k.size());
  int const leftpad = lengths.leftpad_k ? clamp(lengths.leftpad_k[b], 0, cached) : 0;
  int const start = lengths.start_pos_kind == StartPos::Scalar ? lengths.start_pos
                    : lengths.start_pos_kind == StartPos::PerBatch
                        ? clamp(lengths.start_positions[b], -kMaxPosition, kMaxPosition)
                        : len_kv - len_q;
  return {lengths.packed() ? 0 : b,
          q.begin,
          k.begin + leftpad,
          cached - leftpad,
          Visibility{len_q < lengths.n_q ? len_q : lengths.n_q, len_kv - leftpad, start - leftpad, lengths.window_left,
                     lengths.window_right},
          leftpad};
}

/// What each sequence sees, where all see the same: for the host, which must not read what lies on the device.
inline Visibility visibility_of_all(Lengths const& lengths) {
  assert(all_alike(lengths));
  return sequence_of(lengths, 0).visibility;
}

/// What the longest sequence may see, as far as the host knows: with positions that only the device knows, as if its
/// last row saw its last key.
inline Visibility visibility_of_longest(Lengths const& lengths) {
  int const n_q = lengths.n_q, n_kv = lengths.n_kv;
  return {n_q, n_kv, lengths.start_pos_kind == StartPos::Scalar ? lengths.start_pos : n_kv - n_q, lengths.window_left,
          lengths.window_right};
}

#if defined(__CUDACC__)
/// `sequence_of` for kernels that keep it in registers. A compiler that knew how the numbers came about spilled 12 of
/// them around a main loop that had none to spare.
CUTE_DEVICE Sequence device_sequence_of(Lengths const& lengths, int b) {
  Sequence s = sequence_of(lengths, b);
  for (int* x : {&s.q_row0, &s.k_row0, &s.visibility.n_q, &s.visibility.len_kv, &s.visibility.start_pos})
    materialize(*x);
  return s;
}

/// Whether a packed row is one that the launch computes, asked by a whole warp: rows behind the last sequence are
/// nobody's, those of sequences that another launch has may be written at the same time. Its sequence is the last that
/// begins at or before it, looked for in steps of 32.
CUTE_DEVICE bool is_computed(Lengths const& lengths, int row) {
  int first = 0, sequences = lengths.batch;
  while (sequences > 1) {
    int const step = (sequences + 31) / 32, own = threadIdx.x % 32 * step;
    bool const begins = own < sequences && lengths.cu_seqlens_q[first + own] <= row;
    int const skipped = max(31 - __clz(__ballot_sync(0xffffffffu, begins)), 0) * step;
    first += skipped;
    sequences = min(step, sequences - skipped);
  }
  Range const rows = query_rows_of(lengths, first);
  return rows.begin <= row && row < rows.end && row - rows.begin < lengths.n_q;
}
#endif

}  // namespace cutlass_ext

// One sequence of a batch, padded or packed: which rows of the tensors are its own, and which keys its queries see.
// Read on the device for each work item, by every kernel; by the tests on the host.
#pragma once

#include <cstdint>

#include "params.hpp"
#include "visibility.hpp"

namespace cutlass_ext {

struct Sequence {
  int batch;   // index into the batch dimension of the tensors: packed sequences lie in a batch of one
  int q_row0;  // row of q, o and lse that holds its first query
  int k_row0;  // row of k and v that holds its first real key: the left padding is cut off
  Visibility visibility;

  /// Index of query row 0 of head `head` in lse, and in lse_partial (times d_v: in o_partial) at split `split`; the
  /// rows that follow it follow there.
  CUTE_HOST_DEVICE int64_t result_row0(ForwardParams const& params, int head, int split) const {
    return split * params.result_rows() + (int64_t(batch) * params.heads_q + head) * params.stored_rows() + q_row0;
  }
};

/// Rows of q that sequence `b` holds.
CUTE_HOST_DEVICE Range query_rows_of(ForwardParams const& params, int b) {
  if (!params.packed()) return {0, params.n_q};
  auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
  int const begin = clamp(params.cu_seqlens_q[b], 0, params.total_q);
  return {begin, clamp(params.cu_seqlens_q[b + 1], begin, params.total_q)};
}

/// What the device alone knows about sequence `b`: its rows, lengths, padding and start position. Whatever the device
/// holds stays in bounds: ends that lie outside the packed tensors or before their beginning are moved to the nearest
/// that do not, `seqused_k` and `leftpad_k` are held to the keys that there are, query rows at or past `params.n_q`
/// are left out (the launch knows of no more), positions are held to +-2^29.
CUTE_HOST_DEVICE Sequence sequence_of(ForwardParams const& params, int b) {
  auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
  Range const q = query_rows_of(params, b);
  Range k{0, params.n_kv};
  if (params.packed()) {
    k.begin = clamp(params.cu_seqlens_k[b], 0, params.total_k);
    k.end = clamp(params.cu_seqlens_k[b + 1], k.begin, params.total_k);
  }
  int const len_q = q.size();
  int const len_kv = params.seqused_k ? clamp(params.seqused_k[b], 0, k.size()) : k.size();
  int const leftpad = params.leftpad_k ? clamp(params.leftpad_k[b], 0, len_kv) : 0;
  int const start = params.start_pos_kind == StartPos::Scalar ? params.start_pos
                    : params.start_pos_kind == StartPos::PerBatch
                        ? clamp(params.start_positions[b], -kMaxPosition, kMaxPosition)
                        : len_kv - len_q;
  return {params.packed() ? 0 : b, q.begin, k.begin + leftpad,
          Visibility{len_q < params.n_q ? len_q : params.n_q, len_kv - leftpad, start - leftpad, params.window_left,
                     params.window_right}};
}

#if defined(__CUDACC__)
/// `sequence_of` for kernels that keep it in registers. The empty asm hides how the numbers came about: a compiler that
/// knew it spilled 12 of them around a main loop that had none to spare.
CUTE_DEVICE Sequence device_sequence_of(ForwardParams const& params, int b) {
  Sequence s = sequence_of(params, b);
  for (int* x : {&s.q_row0, &s.k_row0, &s.visibility.n_q, &s.visibility.len_kv, &s.visibility.start_pos}) {
    asm volatile("" : "+r"(*x));
  }
  return s;
}
#endif

}  // namespace cutlass_ext

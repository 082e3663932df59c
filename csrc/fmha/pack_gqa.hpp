// Grouped heads packed into tile rows: the query rows of all heads that share a KV head are rows of one matrix, so
// that each key is read once for all of them. Called by the kernels, and by the tests on the host.
#pragma once

#include "sequence.hpp"

namespace cutlass_ext {

/// Row `row` of head `head` in a [batch, row, head, head_dim] tensor.
template <class Element>
CUTE_HOST_DEVICE Element* row_at(void const* tensor, Strides const& stride, int batch, int row, int head) {
  return static_cast<Element*>(const_cast<void*>(tensor)) + batch * stride.batch + row * stride.row +
         head * stride.head;
}

/// Divides fewer than 2^15 / divisor packed rows by G in two instructions, where FastDivmod takes four.
struct RowDivisor {
  int divisor, multiplier;

  explicit RowDivisor(int divisor) : divisor(divisor), multiplier((65535 + divisor) / divisor) {}
  CUTE_HOST_DEVICE int div(int row) const { return row * multiplier >> 16; }
};

/// The query rows of a sequence: `count` of them, from row `row0` of batch index `batch` of q, o and lse on.
struct QueryRows {
  int batch, row0, count;
};

/// Those of sequence `b`, for which packed calls alone look at what the device knows. `params` is Params, or has its
/// numbers, here and below.
template <class P>
CUTE_HOST_DEVICE QueryRows query_rows(P const& params, int b, Sequence const& sequence) {
  if (params.packed()) return {sequence.batch, sequence.q_row0, sequence.visibility.n_q};
  return {b, 0, params.n_q};
}

/// The packed rows of a KV head, N_q * G of them, where G query heads share it.
template <class P>
CUTE_HOST_DEVICE int packed_rows(P const& params, QueryRows const& rows) {
  return rows.count * params.heads_per_kv.divisor;
}

/// Packed row r of KV head h: query row r / G of query head h * G + r % G.
struct PackedRow {
  int token;  // query row of the sequence
  int head;   // query head

  template <class P>
  CUTE_HOST_DEVICE PackedRow(P const& params, int key_head, int row)
      : token(params.heads_per_kv.div(row)), head((key_head - token) * params.heads_per_kv.divisor + row) {}

  /// Its index in lse.
  template <class P>
  CUTE_HOST_DEVICE int64_t result(P const& params, QueryRows const& rows) const {
    return (int64_t(rows.batch) * params.heads_q + head) * params.stored_rows() + rows.row0 + token;
  }
};

/// Query tiles of `block` rows into which the rows of `heads_a_tile` heads are packed, token by token. A tile begins
/// with a token, so that where the heads do not divide it its last rows are nobody's.
struct TileRows {
  cutlass::FastDivmod const& heads;
  int tokens;  // of a tile

  CUTE_HOST_DEVICE TileRows(Work const& work, int block) : heads(work.heads_a_tile), tokens(heads.div(block)) {}

  /// Rows from one tile to the next.
  CUTE_HOST_DEVICE int step() const { return tokens * heads.divisor; }
  CUTE_HOST_DEVICE int token(int row) const { return heads.div(row); }
  CUTE_HOST_DEVICE int head(int row) const { return row - heads.div(row) * heads.divisor; }

  /// From the tile's first row to row `row` of it in a tensor with these strides.
  template <class Stride>
  CUTE_HOST_DEVICE Stride offset(int row, Stride token_stride, Stride head_stride) const {
    int const token = heads.div(row);
    return token * token_stride + (row - token * heads.divisor) * head_stride;
  }
};

}  // namespace cutlass_ext

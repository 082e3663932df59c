// ForwardParams: the one contract between the host and every forward kernel. Filled by torch_ops.cpp and by
// bench/fmha_bench.cu, completed by dispatch.cu (splits and their workspace), read by the kernels.
#pragma once

#include <cstdint>

#include <cute/config.hpp>

#include "scheduler.hpp"

namespace cutlass_ext {

/// Element strides of a [batch, row, head, head_dim] tensor; the last dimension is contiguous. Packed sequences
/// [total, head, head_dim] are a batch of one.
struct Strides {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

/// Where query row 0 of a sequence stands among its keys.
enum class StartPos : int {
  Scalar,    ///< the same `start_pos` for every sequence
  PerBatch,  ///< `start_positions[b]`, int32 on the device
  End,       ///< len_kv_b - len_q_b: the last query row sees the last key
};

/// What a CTA asks for first stands first: 64 bytes of parameters come from memory at a time, and each time it waits.
struct ForwardParams {
  int batch = 0;  // sequences
  int n_q = 0;    // query rows of a sequence; packed: of the longest, and no row past it is computed
  int n_kv = 0;   // keys of a sequence; packed: of the longest, for the choice of splits alone
  int start_pos = 0;
  StartPos start_pos_kind = StartPos::Scalar;
  int window_left = -1;                  // -1: unbounded
  int window_right = -1;                 // causal is window_right = 0
  int num_splits = 1;                    // filled by dispatch.cu, like the next two
  Scheduler scheduler;                   // the order of the work
  cutlass::FastDivmod heads_per_kv;      // query heads of a key head
  int const* cu_seqlens_q = nullptr;     // [B + 1]: sequence b has the packed rows cu[b] to cu[b + 1]; null: not packed
  int const* cu_seqlens_k = nullptr;     // [B + 1], both or none
  int const* seqused_k = nullptr;        // [B]: len_kv of each sequence, at most what it has; null: all of that
  int const* leftpad_k = nullptr;        // [B]; null: 0
  int const* start_positions = nullptr;  // [B]
  int heads_q = 0;
  int heads_kv = 0;
  int head_dim = 0;    // d
  int head_dim_v = 0;  // d_v
  int total_q = 0;     // rows of packed q and o
  int total_k = 0;     // rows of packed k and v

  void const* q = nullptr;  // [B, N_q,  H_q,  d];   packed: [total_q, H_q, d]
  void const* k = nullptr;  // [B, N_kv, H_kv, d];   packed: [total_k, H_kv, d]
  void const* v = nullptr;  // [B, N_kv, H_kv, d_v]; packed: [total_k, H_kv, d_v]
  Strides q_stride, k_stride, v_stride;

  float softmax_scale = 1.f;
  float softcap = 0.f;                  // 0: off
  float const* alibi_slopes = nullptr;  // [H_q] (batch stride 0) or [B, H_q]
  int64_t alibi_batch_stride = 0;
  float const* sink = nullptr;  // [H_q], natural-log units

  void* o = nullptr;     // [B, N_q,  H_q,  d_v]; packed: [total_q, H_q, d_v]
  float* lse = nullptr;  // [B, H_q, N_q], natural log; packed: [H_q, total_q]
  Strides o_stride;
  // Filled by dispatch.cu
  int slots = 0;                     // CTAs that the device holds at once: those of a persistent launch
  unsigned* work_counter = nullptr;  // two, zero between launches: work items taken, CTAs that found none
  float* o_partial = nullptr;        // [num_splits, (shape of lse), d_v], each split normalised by itself
  float* lse_partial = nullptr;      // [num_splits, (shape of lse)]

  CUTE_HOST_DEVICE bool packed() const { return cu_seqlens_q != nullptr; }
  /// The batch dimension and the query rows of the tensors themselves.
  CUTE_HOST_DEVICE int stored_batch() const { return packed() ? 1 : batch; }
  CUTE_HOST_DEVICE int stored_rows() const { return packed() ? total_q : n_q; }
  CUTE_HOST_DEVICE int stored_keys() const { return packed() ? total_k : n_kv; }
  /// Results of one split: elements of lse.
  CUTE_HOST_DEVICE int64_t result_rows() const { return int64_t(stored_batch()) * heads_q * stored_rows(); }
};

/// Whether the host knows that all sequences, if they are not packed, have the same keys in the same place.
CUTE_HOST_DEVICE bool all_alike(ForwardParams const& params) {
  return !params.seqused_k && !params.leftpad_k && params.start_pos_kind != StartPos::PerBatch;
}

}  // namespace cutlass_ext

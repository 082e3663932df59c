// ForwardParams: the one contract between the host and every forward kernel. Filled by torch_ops.cpp and by
// bench/fmha_bench.cu, completed by dispatch.cu (splits and their workspace), read by the kernels.
#pragma once

#include <cstdint>

namespace cutlass_ext {

/// Element strides of a [batch, row, head, head_dim] tensor; the last dimension is contiguous.
struct Strides {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

/// Where query row 0 of a sequence stands among its keys.
enum class StartPos : int {
  Scalar,    ///< the same `start_pos` for every sequence
  PerBatch,  ///< `start_positions[b]`, int32 on the device
  End,       ///< len_kv_b - N_q: the last query row sees the last key
};

struct ForwardParams {
  void const* q = nullptr;  // [B, N_q,  H_q,  d]
  void const* k = nullptr;  // [B, N_kv, H_kv, d]
  void const* v = nullptr;  // [B, N_kv, H_kv, d_v]
  void* o = nullptr;        // [B, N_q,  H_q,  d_v]
  float* lse = nullptr;     // [B, H_q, N_q], natural log
  Strides q_stride, k_stride, v_stride, o_stride;

  int batch = 0;
  int n_q = 0;
  int n_kv = 0;
  int heads_q = 0;
  int heads_kv = 0;
  int head_dim = 0;    // d
  int head_dim_v = 0;  // d_v

  float softmax_scale = 1.f;
  float softcap = 0.f;                  // 0: off
  float const* alibi_slopes = nullptr;  // [H_q] (batch stride 0) or [B, H_q]
  int64_t alibi_batch_stride = 0;
  float const* sink = nullptr;  // [H_q], natural-log units

  StartPos start_pos_kind = StartPos::Scalar;
  int start_pos = 0;
  int const* start_positions = nullptr;  // [B]
  int const* seqused_k = nullptr;        // [B]: len_kv of each sequence; null: N_kv
  int const* leftpad_k = nullptr;        // [B]; null: 0
  int window_left = -1;                  // -1: unbounded
  int window_right = -1;                 // causal is window_right = 0

  int multiprocessors = 0;  // of the device: the CTAs of a persistent launch
  unsigned* work_counter = nullptr;  // zero between launches; null: work is dealt out in turn
  int section = 1 << 30;    // (batch, head) pairs whose keys and values stay in L2 together
  int num_splits = 1;
  float* o_partial = nullptr;    // [num_splits, B, H_q, N_q, d_v], each split normalised by itself
  float* lse_partial = nullptr;  // [num_splits, B, H_q, N_q]
};

}  // namespace cutlass_ext

// DecodeParams: what the decode kernels take beyond ForwardParams: a cache that may be paged, new tokens, rotary
// embedding, and how the work is shared out. Filled by torch_kvcache.cpp and torch_ops.cpp, completed by
// decode_dispatch.cu.
#pragma once

#include "../params.hpp"

namespace cutlass_ext::decode {

/// Rotary position embedding (RoFormer, arXiv:2104.09864, section 3.2) of the first `dim` columns of q and new keys.
struct Rotary {
  void const* cos = nullptr;  // [rows, dim / 2], the dtype of q; null: none
  void const* sin = nullptr;
  int64_t row_stride = 0;
  int rows = 0;  // positions beyond the table take its last row
  int dim = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1); otherwise (i, i + dim / 2)
};

/// ForwardParams, where k and v are the cache, [batch, row, H_kv, d] or pages [page, row, H_kv, d], `n_kv` the keys
/// that it has room for, and `seqused_k` the keys in it before this call. `lse` is null where nobody asked for it.
struct DecodeParams : ForwardParams {
  int const* block_table = nullptr;  // [B, pages of a sequence]; null: contiguous
  int64_t block_table_stride = 0;
  int page_shift = 31;             // log2 of a page's rows
  int const* batch_idx = nullptr;  // [B]: the cache's batch index of each sequence; null: its own. Contiguous only
  int cached = 0;                  // keys in the cache where seqused_k is null

  void const* k_new = nullptr;  // [B, n_new, H_kv, d], appended behind the cached keys
  void const* v_new = nullptr;  // [B, n_new, H_kv, d_v]
  Strides k_new_stride, v_new_stride;
  int n_new = 0;
  Rotary rotary;

  int group_heads = 1;           // G = H_q / H_kv
  unsigned group_magic = 0;      // 2^32 / G rounded up, to divide by G; 0 where G is 1
  int row_tiles = 1;             // tiles of the packed query rows, N_q * H_q / H_kv of them
  bool lean = false;             // for the kernel of lean.hpp
  int cluster = 0;               // for that of cluster.hpp: CTAs that share a sequence; else 0
  int groups = 1;                // of CTAs; each group has one for every key head and row tile
  bool fixed_splits = false;     // num_splits parts of every sequence; otherwise the batch's keys in equal parts
  unsigned* counters = nullptr;  // [B, row_tiles, H_kv], zero before and after
};

/// Exact where row * G < 2^32, which the host has checked.
inline unsigned group_magic(unsigned group_heads) {
  return group_heads == 1 ? 0 : static_cast<unsigned>(((uint64_t(1) << 32) + group_heads - 1) / group_heads);
}

/// Whether a call changes no score, keeps its keys where they are expected, and leaves the splits to the library.
inline bool is_plain_or_appends(DecodeParams const& p) {
  return p.softcap == 0.f && !p.alibi_slopes && !p.sink && !p.batch_idx && !p.leftpad_k && !p.fixed_splits;
}

/// Whether a call is plain: it reads a cache, nothing more. Its code is then a quarter smaller and runs straight
/// through, which counts where a kernel of a few microseconds finds its instructions in device memory: with L2 cold,
/// 1024 keys of 8 heads take 18.4 us on an H200 with everything in the way, 12.7 without.
inline bool is_plain(DecodeParams const& p) { return is_plain_or_appends(p) && p.n_new == 0 && !p.rotary.cos; }

/// What the kernels of lean.hpp and cluster.hpp take beyond a plain call: packed query rows, sequences, and pages that
/// hold a tile of their 16 keys.
constexpr int kLeanRows = 8, kLeanBatch = 256, kLeanPageShift = 4;

/// Of the kernel of cluster.hpp: the largest cluster, the warps of a CTA, and about how many tiles each is given at
/// most.
constexpr int kMaxCluster = 8, kClusterWarps = 8, kClusterTurns = 16;

}  // namespace cutlass_ext::decode

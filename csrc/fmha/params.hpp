// Params: the one contract between the host and every kernel, by what its parts are about; functions take the part that
// they need. Filled by torch/ and by bench/, completed by host/plan.cpp (Work), read by the kernels.
#pragma once

#include <cmath>
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

/// Positions and windows are held to 32 bits without overflow: lengths and |start_pos| stay below 2^29 (checked on the
/// host, clamped in sequence.hpp where the device alone knows), a window from 2^30 on is unbounded.
constexpr int kMaxPosition = 1 << 29;

/// Which rows and keys the sequences have, and which of them see each other.
struct Lengths {
  int batch = 0;       // sequences
  int n_q = 0;         // query rows of a sequence; packed: of the longest, and no row past it is computed
  int n_kv = 0;        // keys that a sequence has room for; packed keys: of the longest, for the choice of splits alone
  int longest_kv = 0;  // keys of the longest sequence, as a hint of what is fast; 0: as many as there is room for
  int start_pos = 0;
  StartPos start_pos_kind = StartPos::Scalar;
  int window_left = -1;                  // -1: unbounded
  int window_right = -1;                 // causal is window_right = 0
  int n_cached = kMaxPosition;           // keys before the call's new ones where seqused_k is null, as far as there are
  int n_new = 0;                         // keys that the call appends
  int total_q = 0;                       // rows of packed q and o
  int total_k = 0;                       // rows of packed k and v
  int least_q = 0;                       // packed: sequences of fewer query rows, or of more, are another launch's:
  int most_q = kMaxPosition;             // here they have none
  int const* cu_seqlens_q = nullptr;     // [B + 1]: sequence b has the packed rows cu[b] to cu[b + 1]; null: not packed
  int const* cu_seqlens_k = nullptr;     // [B + 1], with cu_seqlens_q unless the keys lie in pages
  int const* seqused_k = nullptr;        // [B]: keys of each sequence before the call's new ones; null: `n_cached`
  int const* leftpad_k = nullptr;        // [B]; null: 0
  int const* start_positions = nullptr;  // [B]

  CUTE_HOST_DEVICE bool packed() const { return cu_seqlens_q != nullptr; }
  /// Whether another launch has the sequences of more query rows than `most_q`.
  CUTE_HOST_DEVICE bool is_beside_chunks() const { return most_q < kMaxPosition; }
  /// The batch dimension, the query rows and the keys of the tensors themselves.
  CUTE_HOST_DEVICE int stored_batch() const { return packed() ? 1 : batch; }
  CUTE_HOST_DEVICE int stored_rows() const { return packed() ? total_q : n_q; }
  CUTE_HOST_DEVICE int stored_keys() const { return cu_seqlens_k ? total_k : n_kv; }
};

/// What plan.cpp decides, and the workspace that this takes.
struct Work {
  int num_splits = 1;
  int writes_parts = 0;              // whether there are several, or one whose o is float32 (Results)
  Scheduler scheduler;               // the order of query tiles
  cutlass::FastDivmod heads_per_kv;  // G, query heads of a KV head
  cutlass::FastDivmod heads_a_tile;  // query heads whose rows share a query tile: G, or 1 (pack_gqa.hpp)
  int resident_ctas = 0;             // that the device holds at once: those of a persistent launch
  int dealt_ctas = 0;                // of a persistent launch: CTAs that begin with the work item of their own index
  int queue_ctas = 0;                // and those that take the others, of a relief of it (plan.hpp) too
  bool is_relief = false;            // whether this is one
  bool leads_k = false;              // whether tiles of a persistent launch leave columns empty in front of those of k
  bool leads_v = false;              // and of v (Params::lead_k, lead_v)
  unsigned* counters = nullptr;      // zero between launches: of a persistent launch two (work items taken, CTAs
                                     // that found none), of decode kernels [B, row_tiles, H_kv], parts finished. A
                                     // launch of gradients has workspace of its own: tiles taken, jobs taken
  float* o_partial = nullptr;        // parts of O, each normalised by itself where splits are merged by a launch
                                     // of its own: [num_splits, (shape of lse), d_v], one alone where o is; else as
                                     // merge.hpp has them
  float* lse_partial = nullptr;      // their lse in the log2 domain, [num_splits, (shape of lse)]; else (m, l)
  int box_rows = 0;                  // keys that Hopper's persistent kernels copy at a time where they lie in pages
  // Of the decode kernels
  bool fixed_splits = false;  // num_splits parts of every sequence; else the batch's keys in equal parts
  int row_tiles = 1;          // tiles of the packed query rows, N_q * G of them
  int groups = 1;             // of CTAs; each group has one for every KV head and row tile

  /// Whether parts of rows are written, which a launch of its own merges; of query tiles.
  CUTE_HOST_DEVICE bool is_split() const { return writes_parts; }
};

/// The tensors that are read.
struct Problem {
  int heads_q = 0;
  int heads_kv = 0;
  int head_dim = 0;    // d
  int head_dim_v = 0;  // d_v
  int element_bytes = 0;

  void const* q = nullptr;  // [B, N_q,  H_q,  d];   packed: [total_q, H_q, d]
  void const* k = nullptr;  // [B, N_kv, H_kv, d];   packed: [total_k, H_kv, d];   pages [page, row, H_kv, d]
  void const* v = nullptr;  // [B, N_kv, H_kv, d_v]; packed: [total_k, H_kv, d_v]; pages [page, row, H_kv, d_v]
  Strides q_stride, k_stride, v_stride;
};

/// Columns of 16 bits from a multiple of 32 bytes to where the rows of a head begin, 0 or 8, if they begin at multiples
/// of 16 and lie multiples of 32 apart.
CUTE_HOST_DEVICE int columns_past_32_bytes(void const* data, Strides const& stride, int head) {
  return (static_cast<int>(reinterpret_cast<uintptr_t>(data) / 2) + head * static_cast<int>(stride.head)) & 8;
}

/// What happens to scores.
struct Scores {
  float softmax_scale = 1.f;
  float softcap = 0.f;                  // 0: off
  float const* alibi_slopes = nullptr;  // [H_q] (batch stride 0) or [B, H_q]
  int64_t alibi_batch_stride = 0;
  float const* sink = nullptr;  // [H_q], natural-log units

  CUTE_HOST_DEVICE float sink_of(int head) const { return sink ? sink[head] : -INFINITY; }
};

/// The dtype of a bias, whatever q, k and v are of.
enum class BiasType : int { Float32, Float16, BFloat16 };

/// Natural-log units, added to the scores after softcap and beside ALiBi; -inf hides a key. Row i and key j are those
/// of the sequence, padding in front counted.
struct Bias {
  void const* data = nullptr;  // [1 or B, 1 or H_q, 1 or N_q, N_kv]; null: none
  BiasType type = BiasType::Float32;
  int64_t batch = 0, head = 0, row = 0, key = 0;  // element strides, 0 where broadcast
};

/// Whether the bias has 16 bits, and rows of neighbouring keys that begin at multiples of 16 bytes.
CUTE_HOST_DEVICE bool is_in_vectors(Bias const& bias) {
  int64_t const places = bias.batch | bias.head | bias.row;
  return bias.data && bias.type != BiasType::Float32 && bias.key == 1 && places % 8 == 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

/// Whether a copy of it can be (align_bias.hpp): one of 16 bits with more than one row, and an element for each key.
CUTE_HOST_DEVICE bool is_alignable(Bias const& bias) {
  return bias.data && bias.type != BiasType::Float32 && bias.row != 0 && bias.key != 0;
}

/// Whether the copy engine (TMA) can bring tiles of the bias: it wants more than one row, too.
CUTE_HOST_DEVICE bool is_copyable(Bias const& bias) { return is_in_vectors(bias) && bias.row != 0; }
/// Whether it can bring neither these nor those of a copy.
CUTE_HOST_DEVICE bool is_scattered(Bias const& bias) { return bias.data && !is_copyable(bias) && !is_alignable(bias); }

/// Which keys a row may see, in bits, as kernels/pack_mask.cu packs them of a bool tensor: bit j % 32 of word j / 32 is
/// key j, bits at or past N_kv are 0. Rows and keys as those of a bias. Behind the rows of a head lies its map of
/// blocks of 64 rows and 64 keys, a row of as many words for each 64 rows: of 32 blocks of keys a word with the bits of
/// those of which some pair is seen, and one with the bits of those of which no pair is hidden (pairs past the last row
/// or key are neither).
struct Mask {
  static constexpr int kBlock = 64;

  uint32_t const* bits = nullptr;        // [1 or B, 1 or H_q, stored_rows(rows), words]; null: none
  int64_t batch = 0, head = 0, row = 0;  // strides in words, 0 where broadcast
  int rows = 0;                          // 1 or N_q
  bool packed_before = false;            // whether an ordinary launch of the call, if any, writes the bits first

  Mask() = default;
  /// Of the bits of [batch, heads, rows, keys], one after the other.
  Mask(int batch, int heads, int rows, int keys)
      : head(heads == 1 ? 0 : stored_rows(rows) * words_of(keys)), row(rows == 1 ? 0 : words_of(keys)), rows(rows) {
    if (batch > 1) this->batch = heads * stored_rows(rows) * words_of(keys);
  }

  CUTE_HOST_DEVICE static int blocks_of(int length) { return length / kBlock + (length % kBlock != 0); }
  /// Of a row: 16 bytes, or a multiple.
  CUTE_HOST_DEVICE static int words_of(int n_kv) { return (n_kv / 128 + (n_kv % 128 != 0)) * 4; }
  /// Of a head: those of the bits, and those of the map.
  CUTE_HOST_DEVICE static int64_t stored_rows(int rows) { return int64_t(rows) + blocks_of(rows); }
};

/// Dropout by position, so that whoever computes a pair of a row and a key draws the same for it: Philox4x32-7 (Salmon
/// et al., SC 2011) with the 64 bits of seed[0] as key and the counter
///   (key position / 16, row position, head + low half of x, sequence + high half of x),   x = seed[1] * kSpread,
/// words modulo 2^32, the low ones first. What rows 2i and 2i + 1 draw for sixteen keys is for their 32 pairs together:
/// of its eight words, the even row's first, each pair has a bit, at the same place in all (`bit_of_pair` in
/// pairs.hpp). These are the top byte of its number, the first the lowest; below it lie 24 bits that all 32 share, the
/// upper ones of w0 ^ rotl(w1, 11) ^ rotl(w2, 22). A pair is kept where its number is `threshold` or more. Bits at
/// three places make one that is shared, and so neither a pair's own bits nor those of two tell anything of them: two
/// pairs of a draw are as good as independent, with a correlation of 2^-18 / (p (1 - p)) at most.
struct Dropout {
  /// Odd. Seeds that count calls by their second word would draw the next head's numbers without it.
  static constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;

  int64_t const* seed = nullptr;  // [2], on the device; null: no dropout
  uint32_t threshold = 0;         // round(p 2^32), at least 1
  float scale = 1.f;              // of what is kept: 1 / (1 - p)
  int head_start = 0;             // what head 0 and sequence 0 count as
  int sequence_start = 0;
  int key_start = 0;                // the position of key 0
  int const* key_starts = nullptr;  // [B], instead
};

/// What pairs of a row and a key have of their own.
struct Pairs {
  Bias bias;
  Mask mask;
  Dropout dropout;
};

/// The tensors that are written.
struct Results {
  void* o = nullptr;     // [B, N_q,  H_q,  d_v]; packed: [total_q, H_q, d_v]
  float* lse = nullptr;  // [B, H_q, N_q], natural log; packed: [H_q, total_q]; null: not asked for
  Strides o_stride;
  bool widens = false;  // o is float32 beside inputs of 16 bits, and lies as lse does: [B, H_q, N_q, d_v] or
                        // [H_q, total_q, d_v]
};

/// Rotary position embedding (RoFormer, arXiv:2104.09864, section 3.2) of the first `dim` columns of q and new keys.
struct Rotary {
  void const* cos = nullptr;  // [rows, dim / 2], the dtype of q; null: none
  void const* sin = nullptr;
  int64_t row_stride = 0;
  int rows = 0;  // positions beyond the table take its last row
  int dim = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1); otherwise (i, i + dim / 2)
  bool rows_move = false;    // under a causal mask or a window; otherwise all query rows stand where the first does
};

/// Keys and values that lie in pages or grow by the call.
struct Cache {
  int const* block_table = nullptr;  // [B, pages of a sequence]; null: contiguous
  int64_t block_table_stride = 0;
  cutlass::FastDivmod page_rows{1 << 30};  // of a page; without pages more than there are keys
  int pages = 0;                           // pages that there are, or the batch dimension of a contiguous cache
  int const* batch_idx = nullptr;  // [B]: the cache's batch index of each sequence; null: its own. Contiguous only

  void const* k_new = nullptr;  // [B, n_new, H_kv, d], appended behind the cached keys
  void const* v_new = nullptr;  // [B, n_new, H_kv, d_v]
  Strides k_new_stride, v_new_stride;
  Rotary rotary;

  CUTE_HOST_DEVICE bool paged() const { return block_table; }
  /// Makes all `rows` keys of a sequence a page, the one that `page_of` [B] names.
  void set_one_page_each(int const* page_of, int rows) {
    block_table = page_of;
    block_table_stride = 1;
    page_rows = cutlass::FastDivmod(rows > 0 ? rows : 1);
  }
  /// The pages of sequence `b`; null: contiguous.
  CUTE_HOST_DEVICE int const* pages_of(int b) const { return paged() ? block_table + b * block_table_stride : nullptr; }
};

/// What scores and O are to be multiplied by where operands were scaled: powers of two.
struct PartScales {
  float scores, out;
};

/// The same of a backward pass: of scores, dP, dQ, dK and dV.
struct GradientScales {
  float scores, dp, dq, dk, dv;
};

/// Of float32 calls on tensor cores, whose operands are in two parts of 16 bits (operand_parts.hpp), and of the
/// launches on CUDA cores that compute what such parts do not hold.
struct InParts {
  PartScales const* part_scales = nullptr;  // [B, H_kv]
  int const* out_of_range = nullptr;        // on the device: 1 where parts do not hold the call; null: none were made
  bool if_out_of_range = false;             // what the launch is for

  /// Whether the other launch computes the call.
  CUTE_HOST_DEVICE bool is_skipped() const { return out_of_range && (*out_of_range != 0) != if_out_of_range; }
};

/// What a CTA asks for first stands first: 64 bytes of parameters come from memory at a time, and each time it waits.
struct Params : Lengths, Work, Problem, Scores, Results, Cache, Pairs, InParts {
  /// Results of one split: elements of lse.
  CUTE_HOST_DEVICE int64_t result_rows() const { return int64_t(stored_batch()) * heads_q * stored_rows(); }
  /// Columns that tiles leave empty in front of those of a KV head's keys and its query heads' rows, and of its values
  /// and O, so that the copy engine reads whole 32 bytes (leads_rows in heuristics.hpp has what that is worth).
  CUTE_HOST_DEVICE int lead_k(int head_kv) const { return leads_k ? columns_past_32_bytes(k, k_stride, head_kv) : 0; }
  CUTE_HOST_DEVICE int lead_v(int head_kv) const { return leads_v ? columns_past_32_bytes(v, v_stride, head_kv) : 0; }
};

/// Whether the host knows that all sequences have the same rows, and the same keys in the same place.
CUTE_HOST_DEVICE bool all_alike(Lengths const& lengths) {
  return !lengths.packed() && !lengths.seqused_k && !lengths.leftpad_k && lengths.start_pos_kind != StartPos::PerBatch;
}

}  // namespace cutlass_ext

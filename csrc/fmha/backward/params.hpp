// What a backward pass is given beside the forward's parameters, and where what is known of each query row lies. Filled
// by torch/ and host/backward.cpp, read by the kernels of this folder.
#pragma once

#include "../params.hpp"
#include "../sequence.hpp"

namespace cutlass_ext {

/// What is known of a query row before its gradients: P = exp2(score - lse_log2), dS = P (dP - delta)
/// (FlashAttention-2, arXiv:2307.08691, section 3.1).
struct RowStatistics {
  float lse_log2;  // lse in the log2 domain; +inf where the row does not exist or sees no key: its P is 0
  float delta;     // rowsum(dO O), less the gradient of lse
};

/// What is read beside Problem, and what is written.
struct Gradients {
  void const* dout = nullptr;    // as o
  float const* dlse = nullptr;   // as lse, the gradient of lse; null: 0
  float const* delta = nullptr;  // as lse; null: computed from `o`
  Strides dout_stride;
  void* dq = nullptr;      // as q, contiguous
  void* dk = nullptr;      // as k, contiguous
  void* dv = nullptr;      // as v, contiguous
  float* dsink = nullptr;  // [H_q]; null: not asked for
  Strides dq_stride, dk_stride, dv_stride;
  void* dbias = nullptr;                                   // of the bias's shape and dtype; null: not asked for
  int64_t dbias_batch = 0, dbias_head = 0, dbias_row = 0;  // element strides, 0 where the bias has one for all
  RowStatistics* row_statistics = nullptr;                 // workspace, laid out by StatisticsRows
  uint32_t* empty_rows = nullptr;  // a bit for each: rows that see no key by what pairs have; null: there are none
  float* dq_sums = nullptr;  // workspace of kernels that add to dQ: as many rows, of the tile's head_dim (SumsOfTile)
  uint32_t* mask_of_keys = nullptr;  // workspace, the mask as MaskOfKeys has it; null: all rows share it
  uint32_t* tile_map = nullptr;      // workspace of a launch, laid out by TileMap; null: every tile is seen
  int dbias_parts = 1;               // of the turns that an element of dbias adds up
  float* dbias_sums = nullptr;       // workspace: [dbias_parts, (shape of dbias)], where there are several
  GradientScales const* gradient_scales = nullptr;  // [B, H_kv], where operands are in parts
};

/// Of Results, `o` and `lse` are read: what the forward gave.
struct BackwardParams : Params, Gradients {};

/// Where the statistics of a sequence's rows lie. Each head of a sequence has room for whole tiles of `kTile` rows, and
/// begins at a multiple of as many; rows of the last tile that do not exist are there, too.
struct StatisticsRows {
  static constexpr int kTile = 128;
  int64_t of_a_head;  // of all sequences, where they are packed

  CUTE_HOST_DEVICE explicit StatisticsRows(Lengths const& lengths)
      : of_a_head(lengths.packed() ? whole(lengths.total_q + int64_t(lengths.batch) * kTile) : whole(lengths.n_q)) {}

  CUTE_HOST_DEVICE int64_t size(Params const& p) const { return int64_t(p.stored_batch()) * p.heads_q * of_a_head; }

  /// Of query row 0 of sequence `b` and head `head`.
  CUTE_HOST_DEVICE int64_t first(Params const& p, Sequence const& sequence, int b, int head) const {
    int64_t const of_sequence = p.packed() ? (sequence.q_row0 + int64_t(b) * kTile) / kTile * kTile : 0;
    return (int64_t(sequence.batch) * p.heads_q + head) * of_a_head + of_sequence;
  }

 private:
  CUTE_HOST_DEVICE static int64_t whole(int64_t rows) { return (rows + kTile - 1) / kTile * kTile; }
};

/// In which order the sums of dQ of a tile of rows and a head lie: that in which the threads that add them hold them,
/// as accumulators of WGMMA. `kParts` warpgroups have a part of the columns each; of a part a warp's 16 rows lie in one
/// piece, in vectors of four: two columns of two rows, of eight columns by its lanes side by side.
template <int HeadDim>
struct SumsOfTile {
  static constexpr int kRows = 64, kParts = HeadDim > 64 ? 2 : 1, kOfAWarp = HeadDim / 8 / kParts * 32;
  /// Of the vectors of a warp of a warpgroup.
  CUTE_HOST_DEVICE static constexpr int first(int part, int warp) { return (part * (kRows / 16) + warp) * kOfAWarp; }
};

/// The mask from the side of keys: [1 or B, 1 or H_q, N_kv, words], bit i % 32 of word i / 32 is row i.
struct MaskOfKeys {
  int batch, heads, words;  // the latter of a key

  CUTE_HOST_DEVICE explicit MaskOfKeys(Params const& p)
      : batch(p.mask.batch ? p.batch : 1), heads(p.mask.head ? p.heads_q : 1), words((p.n_q + 127) / 128 * 4) {}

  CUTE_HOST_DEVICE int64_t size(Params const& p) const { return int64_t(batch) * heads * p.n_kv * words; }
  CUTE_HOST_DEVICE int64_t first(Params const& p, int b, int head, int key) const {
    return ((int64_t(batch > 1 ? b : 0) * heads + (heads > 1 ? head : 0)) * p.n_kv + key) * words;
  }
};

/// Of a launch with tiles of `held` rows of one side in hand, which goes through those of `step` of the other: a bit
/// for each of these, of `seen` where a mask leaves some pair of both, of `whole` where it leaves all.
struct TileMap {
  enum Plane { Seen, Whole };
  int heads, held_tiles, words;

  CUTE_HOST_DEVICE TileMap(Params const& p, bool of_keys, int held, int step)
      : heads(p.mask.head ? p.heads_q : 1),
        held_tiles(((of_keys ? p.n_kv : p.n_q) + held - 1) / held),
        words(((of_keys ? p.n_q : p.n_kv) + 32 * step - 1) / (32 * step)) {}

  CUTE_HOST_DEVICE int64_t size(Params const& p) const { return int64_t(p.batch) * heads * held_tiles * 2 * words; }
  CUTE_HOST_DEVICE int64_t first(int b, int head, int held_tile, Plane plane) const {
    return (((int64_t(b) * heads + (heads > 1 ? head : 0)) * held_tiles + held_tile) * 2 + plane) * words;
  }
};

}  // namespace cutlass_ext

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

/// How much of a section of heads has been done (sm90/sections.hpp): tiles of keys that have added to dQ, and jobs.
struct SectionCounts {
  unsigned tiles, jobs;
};
/// A job makes dQ of the sums of a tile of rows (TiledRows::kTile) of a query head. `size`: of all sections but the
/// last, after which nothing is left to do beside.
struct SectionJobs {
  unsigned of_a_head, of_a_section, size;
};
/// Sections whose sums of dQ memory has room for: those that CTAs add to, and those that are finished meanwhile. With
/// three, where they are not of whole waves, CTAs wait: (9, 1500, 16, 128) takes 0.868 ms, with four 0.781.
constexpr int kSectionsOfSums = 4;

/// Which tiles in hand of a launch several CTAs share, each with a split of the query heads and of the tiles that pass
/// by for each: of its items in their order those from `begin` on, all or the last ones, so that no wave of CTAs leaves
/// most of the GPU idle (as the hybrid schedules of Stream-K, arXiv:2301.03598).
struct SharedTiles {
  int begin = 0, count = 0;
  int splits = 1;  // of a tile
  cutlass::FastDivmod head_splits, tile_splits;
  // Of `together` items the first splits come before the second ones, and so on: with those of an item side by side
  // (16, 124, 64 on 4, 128), causal, takes 154 us, for 143.
  cutlass::FastDivmod together, ctas_together;
  float* sums = nullptr;  // what each split has summed up, laid out by SplitSums

  /// An item of the scheduler, and which split of it; -1: it is a CTA's alone.
  struct Item {
    int index, split;
  };
  CUTE_HOST_DEVICE Item operator()(int cta) const {
    if (count == 0 || cta < begin) return {cta, -1};
    int group, split, index;
    ctas_together(group, index, cta - begin);
    together(split, index, index);
    return {begin + group * together.divisor + index, split};
  }
  /// CTAs, or clusters, of a launch of so many items.
  CUTE_HOST_DEVICE int64_t ctas(int64_t items) const { return items + int64_t(count) * (splits - 1); }

  /// Which of `heads` query heads a split goes through, and of which of `tiles` for each.
  CUTE_HOST_DEVICE Range turns(int split, int heads, Range* tiles) const {
    int of_heads, of_tiles;
    tile_splits(of_heads, of_tiles, split);
    *tiles = split_range(*tiles, tile_splits, of_tiles);
    return split_range({0, heads}, head_splits, of_heads);
  }
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
  uint32_t* transposed_mask = nullptr;  // workspace, the mask as TransposedMask has it; null: all rows share it
  uint32_t* tile_map = nullptr;         // workspace of a launch, laid out by TileMap; null: every tile is seen
  int dbias_parts = 1;                  // of the turns that an element of dbias adds up
  float* dbias_sums = nullptr;          // workspace: [dbias_parts, (shape of dbias)], where there are several
  SharedTiles shared_tiles;
  // Whether a CTA takes tiles of keys by twos, one and its mirror image: under a causal mask any two see as many rows
  // together. Rows pass by the first from the last one on, by the second up to it, each for all heads of a group: CTAs
  // that begin together come by the same rows and end together. A tile and its image begin with rows of this sum. Where
  // a cluster has a head, whether its CTAs take the tiles of every other head the other way round.
  bool is_mirrored = false;
  bool stores_dbias = false;  // whether tiles of keys write their part of dbias, each element of which is one pair's
  int mirrored_row0s = 0;
  int rows_a_head = 0;                              // of workspace of query rows (StatisticsRows)
  GradientScales const* gradient_scales = nullptr;  // [B, H_kv], where operands are in parts
  // Workspace of a launch that makes dQ of its sums beside its tiles, section for section; null: another does so.
  SectionCounts* sections = nullptr;
  SectionJobs section_jobs;
  // Workspace of a launch whose tiles of keys add to dQ in their order (sm90/dq_semaphore.hpp): for each 64 rows of
  // workspace of query rows how many tiles have added; null: in any order.
  unsigned* dq_semaphore = nullptr;
  unsigned last_keys_first = 0;  // of its items, in how many, from the first on, the last keys come first
  // Whether tiles of rows pass by for one head after the other, each: of mirrored tiles and in order. And whether
  // others wait for what a tile of keys adds: then no CTA has one before it runs, and it says when it has added.
  bool by_rows = false, is_waited_for = false;
};

/// Of Results, `o` and `lse` are read: what the forward gave.
struct BackwardParams : Params, Gradients {
  /// Whether an item is the mirror image of the scheduler's tile.
  CUTE_HOST_DEVICE bool comes_from_the_end(int index) const { return static_cast<unsigned>(index) < last_keys_first; }
  /// Where it begins, or its image; `row0`: where the scheduler's tile does.
  CUTE_HOST_DEVICE int row0_of(int index, int row0, bool is_image) const {
    return is_image || comes_from_the_end(index) ? mirrored_row0s - row0 : row0;
  }
};

/// What Hopper's kernels multiply dK and dQ by at last, others their sums of dQ. Dropout's scale is not in dS: there it
/// would be a product for each pair.
CUTE_HOST_DEVICE float factor_of_gradients(Params const& p) { return p.softmax_scale * p.dropout.scale; }

/// Where workspace of the query rows, or of the keys, of a sequence lies. Each head of a sequence has room for whole
/// tiles of `kTile` rows, and begins at a multiple of as many; rows of the last tile that do not exist are there, too.
struct TiledRows {
  static constexpr int kTile = 128;
  bool of_keys;
  int64_t of_a_head;  // of all sequences, where they are packed

  CUTE_HOST_DEVICE TiledRows(Lengths const& lengths, Axis side)
      : of_keys(side == Axis::Keys),
        of_a_head(whole(lengths.packed()
                            ? (of_keys ? lengths.total_k : lengths.total_q) + int64_t(lengths.batch) * kTile
                        : of_keys ? lengths.n_kv
                                  : lengths.n_q)) {}

  CUTE_HOST_DEVICE int64_t size(Params const& p) const { return int64_t(p.stored_batch()) * heads(p) * of_a_head; }

  /// Of row 0 of sequence `b` and head `head`.
  CUTE_HOST_DEVICE int64_t first(Params const& p, Sequence const& sequence, int b, int head) const {
    int const row0 = of_keys ? sequence.k_row0 : sequence.q_row0;
    int64_t const of_sequence = p.packed() ? (row0 + int64_t(b) * kTile) / kTile * kTile : 0;
    return (int64_t(sequence.batch) * heads(p) + head) * of_a_head + of_sequence;
  }

 private:
  CUTE_HOST_DEVICE int heads(Params const& p) const { return of_keys ? p.heads_kv : p.heads_q; }
  CUTE_HOST_DEVICE static int64_t whole(int64_t rows) { return (rows + kTile - 1) / kTile * kTile; }
};

/// Where the statistics of a sequence's query rows lie.
struct StatisticsRows : TiledRows {
  CUTE_HOST_DEVICE explicit StatisticsRows(Lengths const& lengths) : TiledRows(lengths, Axis::Rows) {}
};

/// In which order the sums of dQ of a tile of rows and a head lie: that in which the threads that add them hold them,
/// as accumulators: all columns of heads of up to kMostInOnePart, and else parts of 64. Of a part a warp's 16 rows lie
/// in one piece, eight columns after the others: two columns of two rows of each lane, as vectors of the lanes side by
/// side, or, where instructions add them that have no vectors (add_in_memory.hpp), the lanes' first numbers side by
/// side, then their second ones, and so on.
struct SumsOfTile {
  enum class Order { Vectors, Lanes };
  static constexpr int kRows = 64, kPanel = 64, kMostInOnePart = 96;
  CUTE_HOST_DEVICE static constexpr int columns_of_part(int head_dim) {
    return head_dim <= kMostInOnePart ? head_dim : kPanel;
  }
  CUTE_HOST_DEVICE static constexpr int parts(int head_dim) { return head_dim / columns_of_part(head_dim); }
  /// The first vector of a panel of columns of a warp of a warpgroup.
  CUTE_HOST_DEVICE static constexpr int first(int head_dim, int panel, int warp) {
    int const of_part = columns_of_part(head_dim), part = panel * kPanel / of_part;
    return ((part * (kRows / 16) + warp) * of_part + (panel * kPanel - part * of_part)) * 4;
  }
};

/// Where what the splits of a launch have summed up of the tiles that CTAs share lies: of each split, of 64 rows as in
/// SumsOfTile, or of CUDA cores row by row; dK or dQ of all splits, then dV, or of dQ on CUDA cores what P of each row
/// sums up to. Tile after tile, of mirrored twos the tile before its image; of packed sequences, which share all tiles
/// and have fewer than the launch has items, as TiledRows has them. `columns` are the kernel's.
struct SplitSums {
  BackwardParams const& params;
  Axis side;
  int block;  // rows of a tile

  CUTE_HOST_DEVICE SplitSums(BackwardParams const& params, Axis side, int block)
      : params(params), side(side), block(block) {}

  /// Tiles of an item.
  CUTE_HOST_DEVICE int images() const { return params.is_mirrored ? 2 : 1; }
  /// Of one split.
  CUTE_HOST_DEVICE int64_t rows() const {
    return params.packed() ? TiledRows(params, side).size(params)
                           : int64_t(params.shared_tiles.count) * images() * block;
  }
  CUTE_HOST_DEVICE int64_t size(int columns) const { return params.shared_tiles.splits * rows() * columns; }
  /// The first row of a split's tile, which begins with row `row0` of a sequence and head, of those of all splits.
  CUTE_HOST_DEVICE int64_t first_row(SharedTiles::Item item, bool is_image, Sequence const& sequence, int b, int head,
                                     int row0) const {
    int64_t const of_split = params.packed()
                                 ? TiledRows(params, side).first(params, sequence, b, head) + row0
                                 : (int64_t(item.index - params.shared_tiles.begin) * images() + is_image) * block;
    return item.split * rows() + of_split;
  }
};

/// The mask from the side of keys: [1 or B, 1 or H_q, N_kv, words], bit i % 32 of word i / 32 is row i.
struct TransposedMask {
  int batch, heads, words;  // the latter of a key

  CUTE_HOST_DEVICE explicit TransposedMask(Params const& p)
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

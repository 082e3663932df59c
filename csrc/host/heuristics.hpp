// What was measured about which kernel, how many splits and which order of work are fastest: small functions of a call
// and a GPU, with their reasons. They choose speed alone; what a kernel can do at all its features say. Called by
// plan.cpp, by the benchmarks and by the tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../fmha/decode/params.hpp"
#include "../fmha/pack_gqa.hpp"
#include "../fmha/pairs.hpp"
#include "../fmha/sequence.hpp"
#include "device.hpp"

namespace cutlass_ext {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ------------------------------------------------------------------------------------------ what a call is like
/// Keys of the longest sequence, as far as the host knows.
inline int64_t longest_keys(Params const& p) { return p.longest_kv > 0 ? p.longest_kv : p.n_kv; }

/// Whether what comes before a row's window is hidden from it.
inline bool hides_first_keys(Params const& p) { return p.window_left >= 0; }

/// Whether what comes after a row may be hidden from it, as under a causal mask: tiles of a head then have unequal
/// work.
inline bool has_unequal_tiles(Params const& p) { return p.window_right >= 0; }

/// Whether a window hides nothing of what lies before a row, or little of what lies after it: tiles of keys then differ
/// as they do without it.
inline bool shows_first_keys(Params const& p) { return !hides_first_keys(p) || p.window_left >= p.n_kv; }
inline bool shows_last_keys(Params const& p) { return !has_unequal_tiles(p) || p.window_right >= p.n_q / 4. * 3; }

/// Keys of `keys` that `rows` rows next to each other see through a window with two ends.
inline int64_t keys_through_window(Params const& p, int64_t keys, int64_t rows) {
  return hides_first_keys(p) && has_unequal_tiles(p) ? std::min(keys, int64_t(p.window_left) + p.window_right + rows)
                                                     : keys;
}

/// Whether all sequences have the same rows, keys and positions, as far as the host knows.
inline bool have_one_length(Params const& p) { return !(features_of(p) & (feature::Packed | feature::kUnlike)); }

/// Whether all rows see all keys, as far as the host knows.
inline bool sees_all_pairs(Params const& p) {
  return !hides_first_keys(p) && !has_unequal_tiles(p) && have_one_length(p);
}

// ------------------------------------------------------------------------------------------ packed heads
/// Whether query tiles of `block` rows are to hold those of all heads that share a KV head: where that makes fewer
/// tiles. Packed sequences of different lengths nearly always have fewer. ALiBi's slopes are of one head, and so is
/// what pairs have.
inline bool should_pack_heads(Params const& p, int block) {
  int64_t const heads_per_kv = p.heads_q / p.heads_kv, rows = p.n_q * heads_per_kv;
  if (int64_t(block) * p.heads_q * p.head_dim_v > INT32_MAX) return false;  // kernels count a tile's elements of o so
  if (heads_per_kv == 1 || heads_per_kv > block || (features_of(p) & (feature::Alibi | feature::kPairs)) ||
      rows > INT32_MAX - block)
    return false;
  return p.packed() || ceil_div(rows, block / heads_per_kv * heads_per_kv) < heads_per_kv * ceil_div(p.n_q, block);
}

// ------------------------------------------------------------------------------------------ which kind of kernel
/// Query rows up to which a call decodes where no kernel packs heads into its query tiles: its keys are then read once
/// for all heads that share them, and its splits merged in the same launch.
constexpr int kMaxDecodeRows = 16;

/// Packed query rows of the tallest tiles that decode.
constexpr int kTallRows = 64;

/// Pages of fewer rows are read by lanes that gather 16 bytes each; query tiles have a box of TMA for each of them.
constexpr int kShortPage = 16;

/// Query rows of a sequence up to which it decodes where query tiles could pack its heads: as many as the narrow
/// kernels hold, which there are of head_dim 64 and 128. In us, H200, keys in pages of 64: 8 rows of 16 x 8192 keys of
/// 8 heads 128.1 for 129.6, 16 rows 136.4 for 130.8; 32 rows of one head, 16 x 8192 keys 46.2 for 28.9, 1 x 8192 63.3
/// for 16.5. Of 287 random calls of up to 8 packed rows at head_dim 80 and 96 query tiles take 0.87 of the time, of 157
/// at 192 and 256 with 2 to 4 rows 0.94, of 68 with new keys 0.85; of 61 with one row 1.04. It follows from the call's
/// sizes alone, so that with the number of splits fixed a sequence's bits do not depend on the others.
inline int few_rows_of(Params const& p) {
  bool const short_pages = p.paged() && p.page_rows.divisor < kShortPage;
  return decode::has_narrow_kernels(p) || short_pages ? decode::kNarrowRows / (p.heads_q / p.heads_kv) : 0;
}

/// The same where others of the batch have many rows, or where query tiles do not pack heads: as many as a tile of 16
/// rows holds for all heads of a KV head. Beside products it is faster than query tiles of all (64 decodes and a chunk
/// of 512 0.261 ms for 0.288 with tiles of 8). Taller tiles decode only what cannot be packed; 0: none.
inline int few_rows_beside(Params const& p, bool tiles_pack_heads) {
  int const heads_per_kv = p.heads_q / p.heads_kv;
  return (heads_per_kv <= 16 ? 16 : tiles_pack_heads ? 0 : kTallRows) / heads_per_kv;
}

/// Whether a call that the short kernels do not take is done before the pipeline of Hopper's persistent ones is full,
/// and so is faster by mma.sync. At head_dim 64 few blocks. Above it short sequences whose heads query tiles do not
/// pack, however many: 200 of up to 8 rows, 32 heads of 128, 113 us for 168 (before the short kernels took packed
/// ones); but 16 of up to 10 rows, 32 heads on 8, 17.4 for 11.8, and of 65 to 128 rows they take 1.04 to 1.4 times as
/// long. With pairs few blocks alone were measured.
inline bool is_tiny(Params const& p, Device const& device) {
  int const columns = std::max(p.head_dim, p.head_dim_v), longest = std::max(p.n_q, p.n_kv);
  if (columns > 128 || longest > 192) return false;
  bool const few =
      int64_t(p.batch) * p.heads_q * ceil_div(p.n_q, 64) * ceil_div(p.n_kv, 64) <= 4 * device.multiprocessors;
  if (features_of(p) & feature::kMods) return longest <= 128 && few;
  if (columns <= 64) return few;
  return longest <= 64 && !should_pack_heads(p, 128);
}

/// Whether small heads are faster whole, each a CTA's (sm80/whole_heads.hpp), than by query tiles that pack those which
/// share a KV head. A wave of heads takes 0.94 us, of such tiles 2.5, and 4 more until their pipeline is full: 200
/// sequences of up to 12 rows, 64 heads on 8, 99 us for 40 packed, but 40 of up to 23 rows, 16 heads on 2, 10.7 for
/// 11.6. Of 577 random calls the faster of both takes 0.998 of what is chosen so. With the number of splits fixed that
/// may not depend on the batch.
inline bool small_heads_pay(Params const& p, Device const& device) {
  if (device.capability != 90 || p.fixed_splits || !should_pack_heads(p, 128)) return true;
  int64_t const rows = p.packed() && p.batch > 0 ? ceil_div(p.total_q, p.batch) : p.n_q,
                tiles = int64_t(p.batch) * p.heads_kv * ceil_div(rows * (p.heads_q / p.heads_kv), 128);
  return 3 * int64_t(p.batch) * p.heads_q <= 8 * tiles + 13 * device.multiprocessors;
}

/// Whether a kernel computes float32 faster in two fp16 parts than those of CUDA cores do: products at 220 TFLOP/s, by
/// mma.sync 80, for 35, against reading q, k and v twice and writing them once at 2.5 TB/s, and 12 us of launches.
/// Milliseconds of an H200: (2, 8192, 16, 64) 2.28 for 12.9, (8, 512, 16, 64) causal 0.12 for 0.22, (1, 1024, 8, 64)
/// causal 0.064 for 0.087; by mma.sync with padding, on an H100, 4.2 for 16.7 and, not causal, 0.17 for 0.31. Only
/// where rows see more keys than two tiles have, through a window too: sums of fewer are more exact on CUDA cores. Of
/// keys in pages every sequence has room for parts of as many as its row of the table has room for: no more in all than
/// the pages have, unless it is asked for. Gradients have five products for two: (2, 8192, 16, 64) 9.3 for 49.6, (8,
/// 512, 16, 64) causal 0.21 for 0.59, by mma.sync (4, 200, 16, 64) 0.16 for 0.23. On other GPUs than Hopper's parts
/// have to be asked for: nothing was measured there. On paper tensor cores of 8.0 make 16 products for one of CUDA
/// cores, as Hopper's 15, those from 8.6 on 2 to 4, of which parts take three.
inline bool parts_pay(Params const& p, Kernel const& kernel, Device const& device) {
  if (device.capability != 90) return false;
  constexpr double kOnCudaCores = 35e6, kBytes = 2.5e6, kLaunches = 12;  // a microsecond
  constexpr int kLeastKeys = 192;
  double const of_kernel = wants_hopper(kernel) ? 220e6 : 80e6, products = kernel.kind == Kind::KeyGradients ? 5 : 2;
  if (p.paged() && int64_t(p.batch) * p.n_kv > int64_t(p.pages) * p.page_rows.divisor) return false;
  double seen = static_cast<double>(keys_through_window(p, longest_keys(p), 1));
  if (seen < kLeastKeys) return false;
  if (!hides_first_keys(p) && has_unequal_tiles(p)) seen = std::max(seen / 2, seen - p.n_q / 2.);
  double const rows = double(p.stored_batch()) * p.stored_rows(),
               stored_keys = p.paged() ? double(p.batch) * longest_keys(p) : double(p.stored_batch()) * p.stored_keys();
  double const columns = p.head_dim + p.head_dim_v, pairs = p.heads_q * rows * seen,
               in_parts = products * (kernel.head_dim + kernel.head_dim_v) * pairs / of_kernel,
               on_cuda_cores = products * columns * pairs / kOnCudaCores,
               bytes = 3 * 4 * columns * (p.heads_q * rows / 2 + p.heads_kv * stored_keys);
  return in_parts + bytes / kBytes + kLaunches < on_cuda_cores;
}

/// The query tiles of 64 rows of Hopper's short kernels, and the blocks of 64 keys that they see, as far as the host
/// knows.
struct ShortTiles {
  static constexpr int kBlock = 64;

  int of_head;                                   // query tiles
  int64_t all, blocks_of_head = 0, longest = 0;  // longest: blocks of the tile that sees most
  int64_t blocks_a_multiprocessor;               // rounded up
  Visibility visibility;

  ShortTiles(Params const& p, Device const& device)
      : of_head(Scheduler::tiles_of(p.n_q, kBlock)), visibility(visibility_of_longest(p)) {
    int64_t const heads = int64_t(p.batch) * p.heads_q;
    for (int tile = 0; tile < of_head; ++tile) {
      int64_t const blocks = std::max(1, visibility.tiles_of(tile * kBlock, kBlock, kBlock).size());  // a CTA at least
      blocks_of_head += blocks;
      longest = std::max(longest, blocks);
    }
    all = heads * of_head;
    blocks_a_multiprocessor = ceil_div(heads * blocks_of_head, device.multiprocessors);
  }

  /// Whether most CTAs of packed sequences would have no rows.
  bool are_mostly_empty(Params const& p) const {
    return p.packed() && int64_t(p.batch) * of_head > 4 * (p.total_q / kBlock + int64_t(p.batch));
  }

  /// Whether half of the last tile of 128 keys or more would be empty.
  bool half_fills_large_tiles(Params const& p) const { return ceil_div(p.n_kv, kBlock) % 2 != 0; }

  /// Whether a causal mask or a window makes them unequal.
  bool unequal() const { return 4 * blocks_of_head < 3 * longest * of_head; }

  /// Their blocks over those in tiles of 128 rows, of `heads_a_tile` heads that share a KV head, and 128 keys.
  double beside_large_tiles(int heads_a_tile) const {
    int64_t blocks = 0;
    int const tokens = 2 * kBlock / heads_a_tile;
    for (int token = 0; token < visibility.n_q; token += tokens)
      blocks += 4 * visibility.tiles_of(token, tokens, 2 * kBlock).size();
    return double(blocks_of_head * heads_a_tile) / std::max<int64_t>(blocks, 1);
  }
};

/// Whether the short kernels are faster than the others for sequences that only the device knows: of random calls of up
/// to 700 keys those that go there are 1.25 to 1.32 times as fast in the mean (495 packed ones, 178 of lengths). In us,
/// 12 heads of 64 columns, packed: 64 of up to 128 rows 15.7 for 22.0, 128 of up to 197 46.2 for 59.7, 16 of 128 7.4
/// for 10.7. Not where tiles of 128 rows that hold those of several heads have fewer blocks: (314, 77, 8 heads on 2,
/// 80) of one length 74.8 for 43.7.
inline bool short_tiles_pay_of_unlike(ShortTiles const& tiles, int head_dim, int heads_a_tile) {
  constexpr double kFewer = 1.3;
  int64_t const longest = tiles.longest, blocks = tiles.blocks_a_multiprocessor;
  if (heads_a_tile > 1 && (tiles.beside_large_tiles(heads_a_tile) > kFewer || (head_dim > 64 && blocks > 20)))
    return false;
  if (longest <= 2 || (longest <= 4 && head_dim <= 64) || (longest <= 5 && tiles.unequal())) return true;
  if (longest > 12) return false;
  if (head_dim > 64) return blocks <= 20;
  return blocks <= (tiles.unequal() && longest <= 8 ? 110 : 36);
}

/// The same of calls with a mask, dropout or a bias, beside the persistent kernels and mma.sync. Figures are of random
/// calls, the mean and the lowest; "fill" means as many query tiles as multiprocessors.
/// A mask, whatever it hides: of 220 of tiles that see up to 11 blocks those with padding 1.51, 0.97, with pairs at
/// random 1.37, with nothing hidden 1.46. At head_dim 128 up to 7 where there are many: (66, 503), 16 heads, nothing
/// hidden, 308 us for 267. Beside a bias up to 11 as well: of 224 1.36, 0.95.
/// Dropout up to 16 blocks: of 368 up to 11 1.43, 1.00, of 208 of 12 to 16 1.19, 0.87, with a mask of 316 1.57, 1.02,
/// and of 98 1.30, 1.03. Longer rows gain where they fill: with a mask up to 32, of 169 1.17, 0.81; without one where
/// there are many tiles, at head_dim 64 of 318 1.11, 0.97, of 88 with a causal mask 1.09, 0.92; above it of 184 1.17,
/// 0.92, and of 77 1.11, 0.92. Of few unequal ones the longest end alone: causal (8, 2048), 4 heads, 64, 82 us for 71;
/// above head_dim 64 from 25 blocks on.
/// Dropout and a bias of any length where tiles fill: of 1003 1.53, 0.79. A bias: of 260 1.30, 0.85. Up to 11 blocks, 5
/// at head_dim 128, where there are few; (32, 512), 12 heads, 64, 87.5 us for 81.0, (16, 512), 16 heads, 128, 102 for
/// 84.
inline bool short_tiles_pay_with_pairs(Params const& p, ShortTiles const& tiles, int head_dim, Device const& device) {
  Features const features = features_of(p);
  bool const has_bias = features & feature::Bias, has_mask = features & feature::Mask,
             drops = features & feature::Dropout;
  int64_t const longest = tiles.longest, multiprocessors = device.multiprocessors;
  bool const fill = tiles.all >= multiprocessors, many = tiles.blocks_a_multiprocessor > 36, wide = head_dim > 96;
  if (drops && has_bias) return longest <= 10 || fill;
  if (drops) {
    bool const small = head_dim <= 64;
    int64_t const many_a_multiprocessor = tiles.unequal() ? (small ? 16 : 8) : (small ? 2 : 1);
    if (tiles.all >= many_a_multiprocessor * multiprocessors) return true;
    return longest <= (!fill ? 16 : has_mask ? 32 : small ? 16 : 24);
  }
  if (has_mask) return longest <= (!has_bias && wide && many ? 7 : 11);
  if (tiles.unequal()) return longest <= (wide ? 6 : 13);
  if (!many) return longest <= (wide ? 5 : 11);
  return longest <= (tiles.half_fills_large_tiles(p) ? wide ? 5 : 9 : wide ? 2 : 4);
}

/// How many warpgroups a query tile gets in the short kernels of Hopper; 0 where others are faster. Blocks are of 64
/// rows and keys, figures (batch, N) in us there and in the persistent kernels, 32 heads on 8 where no others are
/// named.
/// Two where every query tile has a multiprocessor of its own: causal (1, 256) at head_dim 128 8.9 for 11.2, (1, 2048,
/// 4 heads) 23.0 for 26.5. From 16 blocks a tile on splits are faster where they find multiprocessors idle: (1, 2048, 1
/// head) 22.1 for 20.8. One, on several CTAs a multiprocessor, while this has few blocks. At head_dim 128 up to 6, or 9
/// where a causal mask makes the tiles unequal, which several CTAs level out: (1, 512) causal, 8.7 blocks, 14.2
/// for 14.5, (1, 384) in full, as many, 13.5 for 12.4. Up to 80 where there are six of keys at most and the
/// persistent kernels, whose tiles are of 128, would have a tenth more: (16, 128) causal, 32 heads, 23.3 for 28.5,
/// (128, 64), 16 heads, 35.3 for 58.0, (16, 192), 32 heads, 38.2 for 44.3; but (8, 256), 16 heads, 21.5 for 18.4. At
/// head_dim 64 up to 80 of query tiles that see no more than four, up to 18 of others: (32, 197) causal, 77 blocks, 43
/// for 53, (2, 512) causal, 17.5, 14.3 for 16.0, (1, 1024) causal, 33, 21.2 for 20.2; of four without a limit where
/// tiles of 128 keys would be cut: (304, 72), 12 heads, 61 for 76, 75 random calls 1.18 in the mean, but (256, 128), 12
/// heads, 66 for 60. The figures of one at 128 are of two CTAs with three stages. Of few rows, which query tiles of all
/// heads of a KV head would hold together, up to 1024 keys and 6 blocks: 4 rows of 8 x 294 keys, 128 heads on 16, 31.3
/// for 13.9, but of 1 x 128 keys 7.5 for 12.
inline int warpgroups_of_short(Params const& p, Device const& device) {
  constexpr int kMostBlocks = 80, kMostSequences = 65535;  // what a grid takes
  int const most_tiles = has_dropout(p) ? 128 : 64;
  int const head_dim = std::max(p.head_dim, p.head_dim_v);
  if (device.capability != 90 || head_dim > 128 || p.batch > kMostSequences ||
      Scheduler::tiles_of(p.n_q, ShortTiles::kBlock) > most_tiles)
    return 0;
  ShortTiles const tiles(p, device);
  int64_t const longest = tiles.longest, blocks = tiles.blocks_a_multiprocessor,
                multiprocessors = device.multiprocessors;
  bool const packs = should_pack_heads(p, 2 * ShortTiles::kBlock);
  int const heads_a_tile = packs ? p.heads_q / p.heads_kv : 1;
  if (packs && p.n_q <= kMaxDecodeRows && (longest > 16 || blocks > 6)) return 0;
  if (features_of(p) & feature::kPairs) return short_tiles_pay_with_pairs(p, tiles, head_dim, device) ? 1 : 0;
  if (!all_alike(p)) {
    bool const pays = !tiles.are_mostly_empty(p) && short_tiles_pay_of_unlike(tiles, head_dim, heads_a_tile);
    return pays ? 1 : 0;
  }
  if (1 < longest && longest <= (2 * tiles.all > multiprocessors ? 32 : 16) && tiles.all <= multiprocessors) return 2;
  bool const saves_blocks = head_dim > 64 && p.n_kv <= 6 * ShortTiles::kBlock && blocks <= kMostBlocks &&
                            tiles.beside_large_tiles(heads_a_tile) <= 0.9;
  bool const cuts_large_tiles = tiles.unequal() || p.n_kv % (2 * ShortTiles::kBlock) != 0;
  int64_t const most = head_dim <= 64    ? (longest > 4        ? 18
                                            : cuts_large_tiles ? INT64_MAX
                                                               : kMostBlocks)
                       : saves_blocks    ? kMostBlocks
                       : tiles.unequal() ? 9
                                         : 6;
  // Where few tiles see many keys, splits have the multiprocessors that these would leave idle.
  return blocks <= most && (longest <= 16 || tiles.all >= multiprocessors) ? 1 : 0;
}

/// CTAs of a cluster for each sequence and KV head of a decoding call: as many as all of them can have at once; 0
/// where the other kernels win. Where the sequences differ, the longest decides how long theirs take, and the narrow
/// kernel shares them out evenly; where they are alike, clusters win what its counter and merge cost (H200, head_dim
/// 128: 7.5 us for 9.9 at 1024 keys of 8 heads, 14.0 for 15.9 at 8192; 14.0 for 15.6 at 2 x 4096 keys of 8), and lose
/// in long ones where their CTAs do not fill the GPU (73.5 for 67.9 at 16,384 keys of 32 heads, 30.2 for 24.9 at 32,768
/// of 4, which have 64 and 32 CTAs).
inline int cluster_of(Params const& p, Occupancy const& occupancy) {
  constexpr int kTurnsOfUnlike = 8, kEnoughCtas = 48;
  int64_t const wanted = int64_t(p.batch) * p.heads_kv;
  int size = 0;
  for (int i = 0; i < 3; ++i) {
    if (wanted <= occupancy.clusters[2 << i]) size = 2 << i;
  }
  if (size == 0) return 0;
  int64_t keys = p.n_kv;
  // Beside what a window shows a cluster goes through the new keys, which lie next to it, or anywhere.
  if (p.n_new == 0 || p.start_pos_kind == StartPos::End) keys = keys_through_window(p, keys, p.n_q + p.n_new);
  bool const alike = (p.batch == 1 || all_alike(p)) && wanted * size >= kEnoughCtas;
  int64_t const most = decode::cluster_keys(size);
  return keys <= (alike ? most : most * kTurnsOfUnlike / decode::kClusterTurns) ? size : 0;
}

// ------------------------------------------------------------------------------------------ which tile
/// The query tiles of a call.
struct QueryTiles {
  int heads_a_tile;  // 1, or all that share a KV head
  int heads;         // of tiles: packed ones count as one
  int rows, step;    // of such a head, and from a tile to the next
  int64_t all;       // tiles, as far as the host knows; packed sequences may have fewer than their longest has

  QueryTiles(Params const& p, Kernel const& kernel)
      : heads_a_tile(kernel.kind == Kind::Persistent && should_pack_heads(p, kernel.block_r) ? p.heads_q / p.heads_kv
                                                                                             : 1),
        heads(p.heads_q / heads_a_tile),
        rows(p.n_q * heads_a_tile),
        step(kernel.block_r / heads_a_tile * heads_a_tile) {
    int64_t const most = int64_t(p.batch) * of_a_head();
    all = heads * (p.packed() ? std::min(most, int64_t(p.total_q) * heads_a_tile / step + p.batch) : most);
  }

  int of_a_head() const { return Scheduler::tiles_of(rows, step); }
};

/// Whether tiles of keys or values in Hopper's persistent kernels begin 8 columns before the rows of heads that begin
/// at odd multiples of 16 bytes, as every second head of 72, 104 or 120 columns does: without that each 32 bytes of the
/// tile lie in two units of 32 of memory. Milliseconds of an H200, (2, 4096, 16 heads): 0.420 and with it 0.386 at
/// head_dim 72, 0.481 and 0.441 at 104, 0.660 and 0.610 at 136, (4, 1024, 16, 72) 0.071 and 0.063. Where copies are not
/// what is waited for, up to head_dim 64, it is 0.96 to 1.0 times as fast, and 0.85 times at 80 of views that begin so.
/// All rows of a head have to begin alike; tiles of these head dims have 8 columns to spare.
inline bool leads_rows(Params const& p, Strides const& stride, int columns) {
  int const places = p.paged() ? p.pages : p.stored_batch();
  return p.element_bytes == 2 && columns > 64 && columns % 16 == 8 && stride.row % 16 == 0 &&
         (places == 1 || stride.batch % 16 == 0);
}

/// Whether `tiles` query tiles fill the CTAs that the GPU holds at once. Under a causal mask the tiles of a sequence
/// differ in length, and a single wave lasts as long as its longest: (1, 2048, 16, 64) took 341 us in 256 tiles of 128
/// rows for 264 CTAs, 266 in 1024 of 32 for 528.
inline bool fills(Params const& p, int block_r, int64_t tiles, int64_t resident_ctas) {
  return has_unequal_tiles(p) && p.n_q > block_r ? 4 * tiles >= 5 * resident_ctas : 4 * tiles >= 3 * resident_ctas;
}

// ------------------------------------------------------------------------------------------ how many splits
/// Key tiles that the busiest query tile visits, as far as the host knows.
inline int64_t key_tiles(Params const& p, Kernel const& kernel) {
  return ceil_div(keys_through_window(p, longest_keys(p), kernel.block_r), kernel.block_c);
}

/// Whether tiles of more than 128 rows may be chosen. Those of 80 keys and 128 columns where all rows see all keys and
/// a tile of 128 rows does not hold a head's: then fewer of them fill their last wave, or read keys less often. us on
/// an H200 without and with them: (3, 1477, 4, 128) 39.7 and 32.2, (1, 711, 24, 128) 25.7 and 20.2, 16 x 176 rows on
/// 6284, 16 heads, 305 and 223; but of two causal calls that would have them (2, 901, 24, 128) 31.1 and 37.8.
inline bool may_be_tall(Params const& p, Kernel const& kernel) {
  return kernel.head_dim <= 112 ||
         (sees_all_pairs(p) && !p.fixed_splits && !p.paged() && int64_t(p.n_q) * (p.heads_q / p.heads_kv) > 128);
}

/// What a pair takes in tiles of more than 128 rows, beside 1 in tiles of 128. Up to head_dim 112 they have tiles of 96
/// keys or more. Fitted to random calls on an H200 with that tile alone and with the other one: at 112 72 calls take
/// 1.008 of the faster, with 0.83 1.014, and 57 at 104, whose copies take longer (leads_rows), with that 1.012, with
/// 0.97 1.027.
inline double duration_of_tall_tiles(Params const& p, Kernel const& kernel) {
  if (kernel.head_dim > 112) return 1.06;
  return kernel.head_dim > 96 && !leads_rows(p, p.k_stride, p.head_dim) ? 0.97 : 0.83;
}

/// Microseconds of a launch of Hopper's persistent kernels and of its merge, if its keys are in `splits`: as many turns
/// as it takes `resident_ctas` CTAs for all query tiles, at least the longest, and at least what it takes to read the
/// keys. Where the host does not know how long padded sequences are it lies between that and what they take with 0.6 of
/// the longest one's keys in the mean: parts then differ, and the last one ends behind the others. Fitted to random
/// calls in 1 to 64 splits on an H200, which has 132 multiprocessors: in the splits chosen so 393 without a cache take
/// 1.005 of their least, 2,539 over caches 1.018 and, of lengths that differ, 1.023, and took 1.011, 1.023 and 1.025 by
/// the fit before. But for 8.7 us that all splits have in common it is off by 8% in the mean without a cache. A tile of
/// 128 rows and 128 keys takes 0.83 us at head_dim 64 and 1.19 at 128, and no less than 94 GB/s bring it; a merge 2 us,
/// 0.2 for each megabyte of the result in float32, and 0.47 for each of its parts.
inline double microseconds_of(Params const& p, Kernel const& kernel, QueryTiles const& tiles, int resident_ctas,
                              int splits) {
  // Parts have three products for one.
  double const a_pair = kernel.block_r > 128             ? duration_of_tall_tiles(p, kernel)
                        : kernel.dtype == DType::Float32 ? 3
                                                         : 1,
               products =
                   a_pair * kernel.block_r * kernel.block_c * (2.9e-5 + 1.7e-7 * (kernel.head_dim + kernel.head_dim_v)),
               copies = double(kernel.block_c) * (p.head_dim + p.head_dim_v) * p.element_bytes / 94e3,
               a_tile = tiles.of_a_head() == 1 ? std::max(products, copies) : products;
  int64_t const keys = longest_keys(p), longest = key_tiles(p, kernel);
  double const shown = !has_unequal_tiles(p) || keys == 0 ? 1 : std::max(0.5, 1 - 0.5 * p.n_q / keys);
  constexpr double kItem = 0.85, kMeanLength = 0.6, kTail = 0.3, kRagged = 0.35;
  auto const item = [&](double key_tiles) { return kItem + a_tile * key_tiles; };
  double const turns = static_cast<double>(ceil_div(tiles.all * splits, resident_ctas)),
               longest_item = item(ceil_div(longest, splits)), all_turns = turns * item(shown * longest / splits);
  double const a_key = double(p.heads_kv) * (p.head_dim + p.head_dim_v) * p.element_bytes,
               reads = (all_alike(p) ? 1 : kMeanLength) * p.batch * std::min(keys, longest * kernel.block_c) * a_key /
                       4.5e6;
  double us = std::max({longest_item, all_turns, reads});
  if (p.batch > 1 && !p.packed() && !all_alike(p)) {
    double const last = item(double(longest) / splits),
                 mean = tiles.all * (kItem * splits + kMeanLength * a_tile * shown * longest) / resident_ctas,
                 behind = tiles.all * splits > resident_ctas ? kTail * last : 0;
    us += kRagged * (std::max({last, mean + behind, reads}) - us);
  }
  if (splits == 1) return us;
  double const part = 4e-6 * p.head_dim_v * p.heads_q * (p.packed() ? p.total_q : int64_t(p.batch) * p.n_q);
  return us + 2 + part * (0.2 + 0.47 * splits);
}

/// The fastest number of splits there.
inline int choose_splits_of_persistent(Params const& p, Kernel const& kernel, QueryTiles const& tiles,
                                       int resident_ctas) {
  constexpr int kMost = 64;
  int best = 1;
  if (tiles.all == 0 || tiles.all >= 2 * resident_ctas) return best;
  double least = microseconds_of(p, kernel, tiles, resident_ctas, 1);
  for (int splits = 2; splits <= std::min<int64_t>(kMost, key_tiles(p, kernel)); ++splits) {
    double const us = microseconds_of(p, kernel, tiles, resident_ctas, splits);
    if (us < least) least = us, best = splits;
  }
  return best;
}

/// Splits of the keys that fill `resident_ctas` (CTAs that the GPU holds at once) when `work_tiles` query tiles do not:
/// 1 while they fill three quarters of them; never fewer than two tiles a split, since the merge costs about as much;
/// no split count that only makes tails shorter.
inline int choose_num_splits(int64_t work_tiles, int64_t key_tiles, int64_t resident_ctas) {
  constexpr int kLeastKeyTiles = 2;
  if (work_tiles == 0 || key_tiles < 2 * kLeastKeyTiles || 4 * work_tiles >= 3 * resident_ctas) return 1;
  int64_t const wanted = std::min(resident_ctas / work_tiles, key_tiles / kLeastKeyTiles);
  return static_cast<int>(ceil_div(key_tiles, ceil_div(key_tiles, wanted)));
}

/// Whether a CTA of a kernel has a multiprocessor of Hopper to itself.
inline bool leaves_no_room(Kernel const& kernel) { return kernel.shared_bytes > 114 * 1024; }

/// Groups of CTAs among which a decoding kernel shares the keys of the batch; a group has `ctas_a_group`. As many as
/// fill 96 KB of a multiprocessor with copies: twice as much, in twice the CTAs, is slower on an H200 where sequences
/// are shared by groups (130 us for 126 at 16 x 8192 keys of 8 heads, 19.3 for 17.5 at 1 x 8192: more parts to merge),
/// and faster where a group has several: one CTA then copies while another ends a sequence (the narrow kernel: 235 us
/// for 238 at 64 ragged sequences; but 243 for 240 at 64 x 4096, where all end at the same time). Of tall tiles as many
/// CTAs as fit: the products of one take about as long as its copies, and another copies meanwhile.
inline int decode_groups(Params const& p, Kernel const& kernel, Device const& device, int ctas_a_multiprocessor,
                         int64_t ctas_a_group) {
  constexpr int kWantedBytes = 96 * 1024;
  // Beside a launch that prefills, CTAs on some of the multiprocessors read memory nearly as fast as on all, and leave
  // it the others: 64 sequences of one row and a chunk of 512 take 332, 310, 289, 280, 279 and 309 us where 56, 64, 72,
  // 80, 96 and 104 of 132 decode, 8 of 4 rows, 32 of one and two chunks of 1024 take 297, 296, 313, 322, 320 and 319.
  if (p.is_beside_chunks()) {
    double const wanted = (leaves_no_room(kernel) ? 0.61 : 0.8) * device.multiprocessors;
    return static_cast<int>(std::max<int64_t>(1, std::llround(wanted / ctas_a_group)));
  }
  auto const groups_of = [&](int64_t ctas) {
    return static_cast<int>(std::max<int64_t>(1, ctas * device.multiprocessors / ctas_a_group));
  };
  int const enough = std::clamp<int>(ceil_div(kWantedBytes, kernel.shared_bytes), 1, ctas_a_multiprocessor);
  int const groups = groups_of(enough);
  bool const ends_together = kernel.kind == Kind::Narrow && all_alike(p), tall = kernel.block_r >= kTallRows;
  return tall || (p.batch > groups && !ends_together) ? groups_of(ctas_a_multiprocessor) : groups;
}

// ------------------------------------------------------------------------------------------ in which order
/// Pairs of (batch, query head) that `limit` allows, where each KV head takes `cost` of it; whole groups that share a
/// KV head, and at least one.
inline int64_t section_of(int64_t limit, int64_t cost, int heads_per_kv) {
  return heads_per_kv * std::clamp<int64_t>(cost > 0 ? limit / cost : limit, 1, 1 << 16);
}

/// `section` pairs or fewer, at least half as many, so that `pairs` fall into sections of one size where whole groups
/// of `heads_per_kv` allow it; else `section`. A short last section begins its longest tiles when little else is left
/// to do beside them: causal (2, 8192, 16, 128) took 7% longer in sections of 7, 7, 7, 7, 4 than in eight of 4.
inline int64_t even_section(int64_t pairs, int64_t section, int heads_per_kv) {
  if (section >= pairs) return pairs;
  for (int64_t s = section; 2 * s >= section && s > 0; s -= heads_per_kv) {
    if (pairs % s == 0) return s;
  }
  return section;
}

/// The section of a launch on a GPU that holds `p.resident_ctas` CTAs at once and has `l2_bytes` of L2, the heads of a
/// tile counted as one: what fits an eighth of L2, since b8 N2048 d128 is 5% slower with half of it (an H200's 60 MB).
/// Under a causal mask the last tiles of the last section are to be short of the whole work, so from eight query tiles
/// on (shorter ones differ too little) three waves of tiles, at most five eighths of L2. Causal rows of an H200 at
/// head_dim 256: two heads of N 16384 at a time are 10% faster than one, four of N 8192 9% faster than two; at N 512,
/// 32 are 2% faster than 64.
inline int64_t section_for(Params const& p, int block_r, int64_t l2_bytes) {
  int64_t const bytes_a_head = longest_keys(p) * (p.head_dim + p.head_dim_v) * p.element_bytes;
  int const heads_per_kv = p.heads_q / p.heads_kv / p.heads_a_tile.divisor,
            tiles = Scheduler::tiles_of(p.n_q * p.heads_a_tile.divisor, TileRows(p, block_r).step());
  int64_t section = section_of(l2_bytes / 8, bytes_a_head, heads_per_kv);
  if (has_unequal_tiles(p) && tiles >= 8) {
    int64_t const tiles_a_group = int64_t(heads_per_kv) * tiles * p.num_splits;
    section = std::min(section_of(l2_bytes / 8 * 5, bytes_a_head, heads_per_kv),
                       section_of(3 * int64_t(p.resident_ctas), tiles_a_group, heads_per_kv));
  }
  return even_section(int64_t(p.batch) * p.heads_kv * heads_per_kv, section, heads_per_kv);
}

}  // namespace cutlass_ext

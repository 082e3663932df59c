// What was measured about which kernel, how many splits and which order of work are fastest: small functions of a call
// and a GPU, with their reasons. They choose speed alone; what a kernel can do at all its features say. Called by
// plan.cpp, by the benchmarks and by the tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../fmha/backward/params.hpp"
#include "../fmha/decode/params.hpp"
#include "../fmha/pack_gqa.hpp"
#include "../fmha/pairs.hpp"
#include "../fmha/sequence.hpp"
#include "device.hpp"

namespace cutlass_ext {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
/// and so is faster by mma.sync. At head_dim 64 few blocks: packed sequences of up to 128 rows 1.5 times as fast as
/// FlashAttention-3, in the persistent ones 1.3. Above it short sequences whose heads query tiles do not pack, however
/// many: 200 of up to 8 rows, 32 heads of 128, 113 us for 168; but 16 of up to 10 rows, 32 heads on 8, 17.4 for 11.8,
/// and of 65 to 128 rows they take 1.04 to 1.4 times as long. With pairs few blocks alone were measured.
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

/// Keys of the longest sequence, as far as the host knows.
inline int64_t longest_keys(Params const& p) { return p.longest_kv > 0 ? p.longest_kv : p.n_kv; }

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
  double seen = static_cast<double>(longest_keys(p));
  if (p.window_left >= 0 && p.window_right >= 0)
    seen = std::min<double>(seen, double(p.window_left) + p.window_right + 1);
  if (seen < kLeastKeys) return false;
  if (p.window_left < 0 && p.window_right >= 0) seen = std::max(seen / 2, seen - p.n_q / 2.);
  double const rows = double(p.stored_batch()) * p.stored_rows(),
               stored_keys = p.paged() ? double(p.batch) * longest_keys(p) : double(p.stored_batch()) * p.stored_keys();
  double const columns = p.head_dim + p.head_dim_v, pairs = p.heads_q * rows * seen,
               in_parts = products * (kernel.head_dim + kernel.head_dim_v) * pairs / of_kernel,
               on_cuda_cores = products * columns * pairs / kOnCudaCores,
               bytes = 3 * 4 * columns * (p.heads_q * rows / 2 + p.heads_kv * stored_keys);
  return in_parts + bytes / kBytes + kLaunches < on_cuda_cores;
}

/// How many warpgroups a query tile gets in the short kernels of Hopper; 0 where the persistent ones are faster. For
/// calls whose sequences are alike. Blocks are of 64 rows and keys, figures (batch, N) in us there and in the
/// persistent kernels, 32 heads on 8 where no others are named.
/// Two where every query tile has a multiprocessor of its own: causal (1, 256) at head_dim 128 8.9 for 11.2, (1, 2048,
/// 4 heads) 23.0 for 26.5. From 16 blocks a tile on splits are faster where they find multiprocessors idle: (1, 2048, 1
/// head) 22.1 for 20.8. One, on several CTAs a multiprocessor, while this has few blocks. At head_dim 128 up to 6, or 9
/// where a causal mask makes the tiles unequal, which several CTAs level out: (1, 512) causal, 8.7 blocks, 14.2
/// for 14.5, (1, 384) in full, as many, 13.5 for 12.4. Up to 80 where there are six of keys at most and the
/// persistent kernels, whose tiles are of 128, would have a tenth more: (16, 128) causal, 32 heads, 23.3 for 28.5,
/// (128, 64), 16 heads, 35.3 for 58.0, (16, 192), 32 heads, 38.2 for 44.3; but (8, 256), 16 heads, 21.5 for 18.4. At
/// head_dim 64 up to 80 of query tiles that see no more than four, up to 18 of others: (32, 197) causal, 77 blocks, 43
/// for 53, (2, 512) causal, 17.5, 14.3 for 16.0, (1, 1024) causal, 33, 21.2 for 20.2. The figures of one at 128 are of
/// two CTAs with three stages. Of few rows, which query tiles of all heads of a KV head would hold together, up to 1024
/// keys and 6 blocks: 4 rows of 8 x 294 keys, 128 heads on 16, 31.3 for 13.9, but of 1 x 128 keys 7.5 for 12.
inline int warpgroups_of_short(Params const& p, Device const& device) {
  constexpr int kBlock = 64, kMaxTiles = 64, kMostBlocks = 80;
  int const head_dim = std::max(p.head_dim, p.head_dim_v), query_tiles = Scheduler::tiles_of(p.n_q, kBlock);
  if (device.capability != 90 || head_dim > 128 || query_tiles > kMaxTiles) return 0;
  Visibility const visibility = visibility_of_all(p);
  int64_t blocks_of_head = 0, longest = 0;
  for (int tile = 0; tile < query_tiles; ++tile) {
    int64_t const blocks = std::max(1, visibility.tiles_of(tile * kBlock, kBlock, kBlock).size());  // a CTA at least
    blocks_of_head += blocks;
    longest = std::max(longest, blocks);
  }
  int64_t const heads = int64_t(p.batch) * p.heads_q, tiles = heads * query_tiles;
  int64_t const multiprocessors = device.multiprocessors;
  bool const packs = should_pack_heads(p, 2 * kBlock);
  if (packs && p.n_q <= kMaxDecodeRows && (longest > 16 || heads * blocks_of_head > 6 * multiprocessors)) return 0;
  if (1 < longest && longest <= (2 * tiles > multiprocessors ? 32 : 16) && tiles <= multiprocessors) return 2;
  bool const unequal = 4 * blocks_of_head < 3 * longest * query_tiles;
  // Blocks of all heads of a KV head, or of one head, in tiles of 128 rows and keys.
  auto const in_large_tiles = [&](int heads_a_tile) {
    int64_t blocks = 0;
    int const tokens = 2 * kBlock / heads_a_tile;
    for (int token = 0; token < p.n_q; token += tokens)
      blocks += 4 * visibility.tiles_of(token, tokens, 2 * kBlock).size();
    return blocks;
  };
  int const heads_a_tile = packs ? p.heads_q / p.heads_kv : 1;
  bool const saves_blocks = head_dim > 64 && p.n_kv <= 6 * kBlock &&
                            heads * blocks_of_head <= kMostBlocks * multiprocessors &&
                            10 * blocks_of_head * heads_a_tile <= 9 * in_large_tiles(heads_a_tile);
  int64_t const most = head_dim <= 64 ? (longest <= 4 ? kMostBlocks : 18)
                       : saves_blocks ? kMostBlocks
                       : unequal      ? 9
                                      : 6;
  // Where few tiles see many keys, splits have the multiprocessors that these would leave idle.
  return heads * blocks_of_head <= most * multiprocessors && (longest <= 16 || tiles >= multiprocessors) ? 1 : 0;
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
  if (p.window_left >= 0 && p.window_right >= 0 && (p.n_new == 0 || p.start_pos_kind == StartPos::End))
    keys = std::min<int64_t>(keys, int64_t(p.window_left) + p.window_right + p.n_q + p.n_new);
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

/// Whether what comes after a row may be hidden from it, as under a causal mask: tiles of a head then have unequal
/// work.
inline bool has_unequal_tiles(Params const& p) { return p.window_right >= 0; }

/// Whether `tiles` query tiles fill the CTAs that the GPU holds at once. Under a causal mask the tiles of a sequence
/// differ in length, and a single wave lasts as long as its longest: (1, 2048, 16, 64) took 341 us in 256 tiles of 128
/// rows for 264 CTAs, 266 in 1024 of 32 for 528.
inline bool fills(Params const& p, int block_r, int64_t tiles, int64_t resident_ctas) {
  return has_unequal_tiles(p) && p.n_q > block_r ? 4 * tiles >= 5 * resident_ctas : 4 * tiles >= 3 * resident_ctas;
}

// ------------------------------------------------------------------------------------------ how many splits
/// Key tiles that the busiest query tile visits, as far as the host knows.
inline int64_t key_tiles(Params const& p, Kernel const& kernel) {
  int64_t keys = longest_keys(p);
  if (p.window_left >= 0 && p.window_right >= 0)
    keys = std::min<int64_t>(keys, int64_t(p.window_left) + p.window_right + kernel.block_r);
  return ceil_div(keys, kernel.block_c);
}

/// Microseconds of a launch of Hopper's persistent kernels and of its merge, if its keys are in `splits`: as many turns
/// as it takes `resident_ctas` CTAs for all query tiles, at least the longest, and at least what it takes to read the
/// keys. Where the host does not know how long padded sequences are it lies between that and what they take with 0.6 of
/// the longest one's keys in the mean: parts then differ, and the last one ends behind the others. Fitted to 790 random
/// calls in 1 to 32 splits on an H200, which has 132 multiprocessors (329 of ragged caches, 289 without a cache, 172
/// others): in the splits chosen so they take 1.029, 1.010 and 1.015 of their least, and took 1.062, 1.010 and 1.019 by
/// the fit before. A tile of 128 rows and 128 keys takes 1.0 us at head_dim 64 and 1.15 at 128, and no less than 94
/// GB/s bring it; a merge 3.6 us, 1.5 more for every eight parts, and some by the megabytes of a part.
inline double microseconds_of(Params const& p, Kernel const& kernel, QueryTiles const& tiles, int resident_ctas,
                              int splits) {
  // Parts have three products for one.
  double const tall = kernel.block_r > 128             ? 0.83
                      : kernel.dtype == DType::Float32 ? 3
                                                       : 1,
               products =
                   tall * kernel.block_r * kernel.block_c * (5.5e-5 + 6e-8 * (kernel.head_dim + kernel.head_dim_v)),
               copies = double(kernel.block_c) * (p.head_dim + p.head_dim_v) * p.element_bytes / 94e3,
               a_tile = tiles.of_a_head() == 1 ? std::max(products, copies) : products;
  int64_t const keys = longest_keys(p), longest = key_tiles(p, kernel);
  double const shown = p.window_right < 0 || keys == 0 ? 1 : std::max(0.5, 1 - 0.5 * p.n_q / keys);
  constexpr double kItem = 0.8, kMeanLength = 0.6, kTail = 0.3, kRagged = 0.35;
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
  return us + 3.6 + 1.5 * ((splits - 1) / 8) + part * (0.4 + 0.23 * splits);
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

// ------------------------------------------------------------------------------------------ the backward pass
/// Whether one kernel of Hopper's that makes dK and dV, and adds to dQ, is faster than two: five products for seven,
/// against sums in memory, which a call of few rows is too short for. An H200's ms in one and in two: (64, 256, 16, 64)
/// 0.254 and 0.264, (256, 128, 16, 64) 0.411 and 0.403; (256, 64, 16, 80) 0.304 and 0.461, (128, 197, 16, 96) 0.590 and
/// 0.641; (32, 512, 16, 128) 0.489 and 0.519, causal 0.382 and 0.423, (64, 256, 16, 128) 0.391 and 0.369, causal 0.354
/// and 0.355, with a bias 0.495 and 0.554, (128, 197, 16, 80) with one 0.890 and 1.000; (48, 384, 8, 192) 0.411 and
/// 0.441, (64, 256, 8, 192) 0.325 and 0.323, of v's 128 columns (16, 512, 16, 192) 0.375 and 0.418, (64, 256, 16, 192)
/// 0.551 and 0.543; (32, 512, 8, 256) 0.621 and 0.595, (8, 2048, 8, 256) 1.58 and 1.80. But of 558 random plain calls
/// of up to 0.3 ms in any order, 16 to 4096 rows and 16 to 8192 keys, one kernel takes 1.007 of the faster way, and
/// what the other numbers say 1.089: few rows beside many keys leave a kernel of rows few tiles, (1, 23 on 2326, 2
/// heads of 128) 55 us.
inline bool adds_to_queries(Params const& p, bool deterministic) {
  int const columns = std::max(p.head_dim, p.head_dim_v);
  bool const is_plain = !(features_of(p) & feature::kMods);
  // Without rows no launch would clear the counters that the kernel takes its tiles by.
  if (p.n_q == 0 || p.stored_rows() == 0) return false;
  if (is_plain && !deterministic) return true;
  int const too_few = columns <= 64 ? 128 : columns <= 96 || !is_plain ? 32 : columns <= 192 ? 256 : 512;
  return p.n_q > too_few;
}

/// The same of a kernel of mma.sync, of which `resident_ctas` are there at once. One makes five parts of what two make
/// seven, four over tiles of keys; but a tile of keys goes through all heads that share it, so that where these are few
/// the three over tiles of rows end sooner. An H200's ms in one and in two: (16, 512, 16, 64) 0.200 and 0.225, (16,
/// 512, 16, 128) 0.406 and 0.453, (1, 512, 8, 128), causal, 0.048 and 0.067, but (1, 2048, 4 heads on 1, 64), causal,
/// 0.396 and 0.305, (2, 256, 32 on 4, 128) 0.172 and 0.156. Of wide heads both products over keys are made twice: (64,
/// 128, 16, 192) 0.357 and 0.340, (32, 256, 16, 192) 0.483 and 0.503, (32, 256, 16, 256), causal, 0.521 and 0.473, (16,
/// 512, 16, 256) 1.000 and 1.066, causal 0.686 and 0.674.
inline bool adds_to_queries_by_mma_sync(Params const& p, Kernel const& kernel, int64_t resident_ctas) {
  // Sums are of whole tiles of 128 rows: those of fewer would be many times as large as dQ.
  int const few = kernel.head_dim <= 128   ? 64
                  : kernel.head_dim <= 192 ? 128
                                           : 256,
            mean = p.packed() && p.batch > 0 ? p.total_q / p.batch : p.n_q;
  if (resident_ctas == 0 || mean <= few) return false;
  int64_t const rows = Scheduler::tiles_of(p.n_q, kernel.block_c), keys = Scheduler::tiles_of(p.n_kv, kernel.block_c),
                of_keys = int64_t(p.batch) * p.heads_kv * keys, of_rows = int64_t(p.batch) * p.heads_q * rows;
  return ceil_div(of_keys, resident_ctas) * (p.heads_q / p.heads_kv) * rows <
         3 * ceil_div(of_rows, resident_ctas) * keys;
}

/// Whether a tile of `kernel` has all keys of a sequence: then nobody else adds to its dQ.
inline bool has_all_keys(Params const& p, Kernel const& kernel) { return p.n_kv <= kernel.block_c; }

/// The same as adds_to_queries_by_mma_sync of CUDA cores, which are always faster so. Their two kernels take out of P
/// what the rounded lse leaves in it, and so does a tile that has all keys. Others cannot, and are for calls that do
/// not ask for the highest precision: where rows see hundreds of keys sums err as much as lse, and dQ of both
/// together 1.9 times as much as by two kernels, dK and dV 1.1 to 1.3 times, half as much as by PyTorch's
/// memory-efficient kernel. Of 50 keys, or scores in the tens, they may err by more than section 3 of the design
/// allows.
inline bool adds_to_queries_on_cuda_cores(Params const& p, Kernel const& kernel, bool asks_for_highest) {
  constexpr int kManyKeys = 256;
  if (has_all_keys(p, kernel)) return true;
  if (asks_for_highest) return false;
  int const keys = p.packed() && p.batch > 0 ? p.total_k / p.batch : p.n_kv,
            of_window = p.window_left < 0 || p.window_right < 0 ? keys : p.window_left + p.window_right + 1;
  return std::min(keys, of_window) >= kManyKeys;
}

/// How long a launch over tiles of keys that adds to dQ takes, in units of a tile of 128 keys that sees all rows. Three
/// warpgroups take 1.37 of that for 192, an H100's ms: (1, 16384, 32, 64) 9.6 and 10.6, causal 4.85 and 5.4, (8, 2048,
/// 32, 64) 1.45 and 1.58; but (1, 4096, 4, 64), whose 88 tiles leave a third of the GPU idle, 0.162 and 0.117. Under a
/// causal mask tiles see half of the rows in the mean, and the longest one sees all.
inline double duration_of_gradients(Params const& p, Kernel const& kernel, int64_t resident_ctas) {
  constexpr double kOfThree = 1.37;
  int64_t const tiles = int64_t(p.batch) * p.heads_kv * Scheduler::tiles_of(p.n_kv, kernel.block_c);
  double const waves =
      has_unequal_tiles(p) ? std::max(1., 0.5 * tiles / resident_ctas) : double(ceil_div(tiles, resident_ctas));
  return waves * (kernel.block_c > 128 ? kOfThree : 1);
}

/// Whether all sequences have the same rows, keys and positions, as far as the host knows.
inline bool have_one_length(Params const& p) { return !(features_of(p) & (feature::Packed | feature::kUnlike)); }

/// Whether tiles of keys come by all pairs, as far as the host knows.
inline bool sees_all_pairs(Params const& p) { return p.window_left < 0 && p.window_right < 0 && have_one_length(p); }

/// Waves of CTAs that a section of causal tiles is to have, longest first. Those of one come by the same rows together;
/// of several the last ones end together. An H100's ms with three and with one: (2, 4096, 32 on 8, 128) 1.75 and 1.28,
/// (2, 8192, 32 on 8, 128) 5.5 and 4.7, (16, 1024, 16, 128) 0.67 and 0.56, (32, 1024, 12, 64) 0.483 and 0.465, (2,
/// 8192, 8, 256) 3.17 and 3.20. Where sequences differ in length, with three, two and one: 32 packed ones of 128 to
/// 4096 rows 10.2, 9.7, 9.7, but 60 of 200 and one of 6000 0.731, 0.737, 0.765. Windows make tiles alike: (1, 16384, 32
/// on 8, 64) of 1024 keys 0.866 and 0.911. Other kernels than Hopper's lose 2% with one at worst, and win 1%.
inline int waves_a_section(Params const& p, bool is_hopper) {
  if (!is_hopper || p.window_left >= 0) return 3;
  return have_one_length(p) ? 1 : 2;
}

/// Whether CTAs are to take tiles of keys by twos, one and its mirror image. Longest first, tiles of a group begin at
/// different times and with different rows; where the groups under way read and add to more than L2 has, each tile then
/// finds its rows in DRAM. `block`: keys of a tile; a group of heads reads and adds to `bytes`. An H100's
/// ms, longest first and mirrored: (4, 2048, 28 on 4, 128) 1.01 and 0.64, (1, 8192, 64 on 8, 128) 6.2 and 4.7, (2,
/// 4096, 16 on 1, 256) 3.4 and 1.8, (2, 4096, 32 on 8, 128) 1.28 and 1.25. All twos take as long, so their last wave
/// has to be nearly whole: (4, 4096, 28 on 4, 64), of 1.3 waves, 1.30 and 1.62. Long calls reach the limit of power,
/// and longest first has room between CTAs: of four waves, (2, 8192, 32 on 8, 128) 4.7 and 5.1, (1, 16384, 40 on 8,
/// 128) 11.3 and 11.9; but where there is twice as much under way (8, 4096, 28 on 4, 128) 5.4 and 4.6.
inline bool takes_mirrored(Params const& p, int block, int splits, int64_t bytes, int64_t resident_ctas,
                           Device const& device) {
  if (!has_unequal_tiles(p) || p.window_left >= 0 || !have_one_length(p)) return false;
  int const tiles = Scheduler::tiles_of(p.n_kv, block), pairs = ceil_div(tiles, 2);
  int64_t const groups = int64_t(p.batch) * p.heads_kv, ctas = int64_t(tiles) * splits, twos = groups * pairs * splits;
  if (twos == 0) return false;
  int64_t const waves = ceil_div(twos, resident_ctas),
                under_way = std::min(groups * ctas, resident_ctas) * bytes / ctas;
  if (25 * waves * resident_ctas > 28 * twos || 5 * under_way <= (waves <= 2 ? 5 : 9) * device.l2_bytes) return false;
  Visibility const visibility = visibility_of_longest(p);
  auto const rows = [&](int pair) {
    int const image = 2 * pairs - 1 - pair;
    return visibility.row_tiles_of(pair * block, block, block).size() +
           (image < tiles ? visibility.row_tiles_of(image * block, block, block).size() : 0);
  };
  int const outer = rows(0), inner = rows(pairs - 1);
  return 8 * std::abs(outer - inner) <= std::max(outer, inner) + 8;
}

/// Splits of the tiles in hand of a launch of gradients: of the query heads that a tile goes through, and of the tiles
/// for each.
struct GradientSplits {
  int heads = 1, tiles = 1;
  double us = 0;  // that the launch is to take with the sums of its splits; 0: it is not known
  int all() const { return heads * tiles; }
};

/// What a launch of gradients takes, in us: each CTA, each tile that passes by, and so much more for a million products
/// of a row, a key and a column; for dQ alone a part of both. Where CTAs differ it takes so many times their mean. Sums
/// of splits take a launch more, and so many bytes a microsecond; and it has to be worth it.
struct GradientCosts {
  double cta, turn, a_million, of_rows, level, apart, bytes, worth;

  double turn_of(Kernel const& kernel, int cluster) const {
    double const columns = kernel.head_dim + kernel.head_dim_v;
    return turn + a_million * 1e-6 * kernel.block_r * kernel.block_c * columns / cluster;
  }
};
/// Of Hopper's kernels for all gradients, where any tile may add to dQ at any time. Fitted to 1,886 random calls of up
/// to 150 us, each in up to 14 numbers of splits, on an H200: those chosen so take 1.005 of the fastest.
constexpr GradientCosts kOfOneKernel{3.1, 0.67, 0.8, 0, 1.16, 1.1, 3.7e6, 1};
constexpr GradientCosts kOfTwoKernels{3, 0.35, 0.8, 2 / 3., 1.03, 4, 2.5e6, 0.9},
    kOnCudaCores{3, 0.5, 27, 3 / 4., 1.03, 4, 2.5e6, 0.9};
inline GradientCosts const& gradient_costs_of(Kernel const& kernel, bool in_order) {
  if (!wants_hopper(kernel)) return kOnCudaCores;
  return kernel.kind == Kind::AllGradients && !in_order ? kOfOneKernel : kOfTwoKernels;
}

/// Whether a CTA, or a cluster, is to have all tiles of a head, so that dQ needs no sums in memory: where heads fill
/// the GPU nearly as well as tiles do. It is worth a fifth to a third, and half of the time of two kernels, which fixed
/// bits want otherwise; an H200's ms, there and else: (32, 512, 32, 64) 0.469 and 0.536, causal 0.364 and 0.448, (128,
/// 197, 12, 64) 0.236 and 0.310, (256, 128, 16, 64) 0.227 and 0.384, (20, 512, 16, 64), of heads in 2.4 waves, 0.180
/// and 0.190; with fixed bits (32, 512, 32, 64) 0.469 and 0.675.
///
/// Where each tile of a head is another CTA's, of a cluster, few heads are faster so, too: no launch adds anything up.
/// A GPU of 132 multiprocessors has room for 66 clusters of two, 39 of three and 30 of four. An H200's ms, there and
/// else: (64, 256, 16, 128) 0.279 and 0.384, causal 0.247 and 0.350, (128, 197, 16, 80) 0.435 and 0.549, (40, 350, 16,
/// 128) 0.375 and 0.406, (2, 256, 16, 128) 0.022 and 0.025; but (40, 512, 16, 80), of four tiles, 0.549 and 0.495. With
/// fixed bits the other way takes longer: (32, 512, 16, 128) 0.556 and 0.612, but (16, 1024, 16, 128), of eight
/// tiles, 1.010 and 0.960.
///
/// Where that leaves CTAs idle several may rather share a tile, if the launch of `otherwise` is faster with its sums,
/// by more than what comes before and after it: a CTA has all turns of a head one after the other. Of 729 random calls
/// whole heads for up to 8 turns, the rule before, take 1.11 of the faster way, this one 1.01: (1, 256, 8 heads on 1,
/// 128), 32 turns of two CTAs, 0.090 and 0.035 ms, (1, 16, 8 on 1, 128), 8 turns, 0.030 and 0.015.
inline bool whole_heads_pay(Params const& p, Kernel const& kernel, int64_t resident_heads, int64_t resident_ctas,
                            bool deterministic, GradientSplits const& otherwise) {
  constexpr int kFewTurns = 8;
  constexpr double kAround = 3;  // us
  int64_t const heads = int64_t(p.batch) * p.heads_kv, tiles = Scheduler::tiles_of(p.n_kv, kernel.block_c);
  if (p.n_q == 0 || heads * tiles == 0 || resident_heads == 0) return false;
  bool const by_clusters = kernel.loop.dq_through_cluster;
  if (by_clusters && tiles > (deterministic ? 4 : 3)) return false;
  int64_t const waves_of_heads = ceil_div(heads, resident_heads);
  int64_t all = heads * tiles;
  if (by_clusters && p.packed())
    all = std::min(all, p.heads_kv * (int64_t(p.stored_keys()) / kernel.block_c + p.batch));
  if (5 * all < 4 * waves_of_heads * resident_ctas) {
    int64_t const turns = int64_t(p.heads_q / p.heads_kv) * Scheduler::tiles_of(p.n_q, kernel.block_r);
    if (!deterministic && otherwise.us > 0) {
      double const us =
          waves_of_heads * (kOfOneKernel.cta + kOfOneKernel.turn_of(kernel, 1) * turns * (by_clusters ? 1 : tiles));
      if (us > otherwise.us + kAround) return false;
    } else if (by_clusters && turns > kFewTurns) {
      return false;
    }
  }
  return 5 * (by_clusters ? 1 : tiles) * waves_of_heads <= (deterministic ? 7 : 6) * ceil_div(all, resident_ctas);
}

/// Tiles in hand of a head, and the tiles that pass by them: all, and by the one that sees most.
struct Turns {
  int tiles;
  int64_t sum = 0, longest = 0;
};
inline Turns turns_of_tiles(Params const& p, bool of_keys, int block, int step) {
  Turns turns{
      Scheduler::tiles_of(of_keys ? std::min(p.n_kv, p.stored_keys()) : std::min(p.n_q, p.stored_rows()), block)};
  Visibility const visibility = visibility_of_longest(p);
  for (int tile = 0; tile < turns.tiles; ++tile) {
    int64_t const seen = of_keys ? visibility.row_tiles_of(tile * block, block, step).size()
                                 : visibility.tiles_of(tile * block, block, step).size();
    turns.sum += seen, turns.longest = std::max(turns.longest, seen);
  }
  return turns;
}

/// Columns of workspace that a split has: with those of dK come dV's, with dQ's of float32 what P of a row sums up to.
inline int columns_of_splits(Kernel const& kernel, bool of_keys) {
  return kernel.head_dim + (of_keys ? kernel.head_dim_v : kernel.dtype == DType::Float32);
}

/// How many, where CTAs are few, or one works longer than it takes all together: of what takes as long the most of the
/// heads, which all have the same work. Each split writes sums in float32, in workspace of at most kMostBytes, which a
/// launch adds up. A model of tiles taken longest first: each CTA and its turns as above, and 1 us where packed
/// sequences leave it nothing. (2, 4096, 16 on 1 head, 256), causal, has 128 tiles of keys, the longest of 1024 turns,
/// the mean of 520. Calls of few tiles are 1.15 to 3.0 times as fast for it, (1, 512, 32 on 4, 128) 54 us for 120.
inline GradientSplits gradient_splits(Params const& p, Kernel const& kernel, GradientCosts const& costs, bool of_keys,
                                      int resident_tiles) {
  constexpr int64_t kMostBytes = 64 << 20, kTilesACta = 6;
  constexpr double kEmpty = 1;
  int const block = of_keys ? kernel.block_c : kernel.block_r, step = of_keys ? kernel.block_r : kernel.block_c;
  int const stored = of_keys ? p.stored_keys() : p.stored_rows(),
            tiles = Scheduler::tiles_of(std::min(of_keys ? p.n_kv : p.n_q, stored), block);
  int const heads_held = of_keys ? p.heads_kv : p.heads_q, heads = p.heads_q / heads_held;
  int64_t const of_a_head = int64_t(p.batch) * tiles,
                in_all = heads_held * (p.packed() ? std::min<int64_t>(of_a_head, stored / block + p.batch) : of_a_head);
  if (in_all == 0 || 2 * in_all >= kTilesACta * resident_tiles) return {};
  auto const [of_tiles, sum, longest] = turns_of_tiles(p, of_keys, block, step);
  double const turn = (of_keys ? 1 : costs.of_rows) * costs.turn_of(kernel, kernel.loop.cluster),
               turns = double(sum) / tiles * in_all * heads;
  bool const alike = 4 * longest * tiles <= 5 * sum;
  int const columns = columns_of_splits(kernel, of_keys);
  int64_t const workspace = SplitSums(p, of_keys ? Axis::Keys : Axis::Rows).size(1, columns) * sizeof(float);
  double const bytes = 4. * columns * heads_held * (p.packed() ? 1 : p.batch) * stored;  // of rows that there are
  GradientSplits best;
  auto const consider = [&](int of_heads, int of_tiles) {
    int64_t const turns_of_a_head = ceil_div(longest, of_tiles);
    GradientSplits splits{of_heads, longest > 0 ? static_cast<int>(ceil_div(longest, turns_of_a_head)) : 1};
    bool const whole = splits.all() == 1;
    int64_t const ctas = splits.all() * in_all;
    if (!whole && (ctas > kTilesACta * resident_tiles || splits.all() * workspace > kMostBytes)) return;
    double const one = costs.cta + turn * ceil_div(heads, of_heads) * turns_of_a_head,
                 mean = (costs.cta * ctas + turn * turns) / resident_tiles,
                 us = alike ? ceil_div(ctas, resident_tiles) * one : std::max(one, costs.level * mean),
                 empty = kEmpty * splits.all() * (heads_held * of_a_head - in_all) / resident_tiles,
                 apart = whole ? 0 : costs.apart + 2 * splits.all() * bytes / costs.bytes;
    splits.us = (whole ? costs.worth : 1) * (us + empty + apart);
    if (best.us == 0 || splits.us < best.us) best = splits;
  };
  for (int heads_a_split = 1, last = 0; heads_a_split <= heads; ++heads_a_split) {
    int const of_heads = static_cast<int>(ceil_div(heads, heads_a_split));
    if (of_heads == last) continue;
    last = of_heads;
    for (int of_tiles = 1; of_tiles == 1 || of_tiles < 2 * longest; of_tiles *= 2) consider(of_heads, of_tiles);
  }
  return best;
}

/// `heads` fall into sections of `wanted` or a little more: the last one is no shorter.
inline int64_t level_section(int64_t heads, int64_t wanted) {
  int64_t const least = std::min(std::max<int64_t>(wanted, 1), std::max<int64_t>(heads, 1));
  int64_t section = least;
  while (heads % section > 0 && heads % section < least) ++section;
  return section;
}

/// The section of a launch that makes dQ of its sums beside its tiles (sm90/sections.hpp): a wave of CTAs.
inline int64_t section_of_fused_postprocess(int64_t heads, int64_t tiles, Device const& device) {
  return level_section(heads, device.multiprocessors / std::max<int64_t>(tiles, 1));
}

/// Whether the last keys are to be first where tiles of keys add to dQ in their order (sm90/dq_semaphore.hpp): where L2
/// holds what all CTAs go by until the next tile comes by the same rows. An H200's ms, last keys first and first keys
/// first: (2, 8192, 16, 64), causal, 1.32 and 1.42, (2, 8192, 16, 128) 2.45 and 2.74; but (2, 8192, 32 on 8, 128) 7.6
/// and 5.0.
inline bool takes_last_keys_first(Params const& p, Kernel const& kernel, int64_t resident_ctas, Device const& device) {
  if (visibility_of_longest(p).sees_all()) return false;
  int64_t const turns = int64_t(kernel.block_c / kernel.block_r) * (p.heads_q / p.heads_kv),
                bytes_a_turn = kernel.block_r * (int64_t(p.head_dim + p.head_dim_v) * p.element_bytes +
                                                 kernel.head_dim * int64_t(sizeof(float)));
  return 4 * turns * resident_ctas * bytes_a_turn <= 3 * device.l2_bytes;
}

/// The section of such a launch: two waves of CTAs, or so many heads that eight tiles of each are under way at once,
/// which follow each other.
inline int64_t section_in_order(Params const& p, int64_t heads, int64_t tiles, bool last_keys_first,
                                int64_t resident_ctas) {
  bool const by_waves = last_keys_first || visibility_of_longest(p).sees_all();
  return level_section(heads, by_waves ? 2 * resident_ctas / std::max<int64_t>(tiles, 1) : resident_ctas / 8);
}

/// Whether tiles of keys are to add to dQ in their order, where bits are to be fixed, and not two kernels. Tiles of a
/// head that are under way at once begin one after the other, a turn and a half apart; those of one wave under a causal
/// mask end sooner by more. An H200's ms, in order and by two kernels: (2, 8192, 16, 64) 2.58 and 3.76, (16, 600, 16,
/// 64), causal, 0.161 and 0.211, (4, 1024, 8, 128) 0.108 and 0.114, (3, 700, 5, 128), causal, 0.039 and 0.048, but (2,
/// 2048, 8, 128), causal, 0.126 and 0.116, (1, 8192, 1, 128) 0.372 and 0.198, (1, 640, 2, 128) 0.036 and 0.032.
inline bool adds_in_order(Params const& p, Kernel const& kernel, int splits, int64_t resident_ctas) {
  Turns const turns = turns_of_tiles(p, true, kernel.block_c, kernel.block_r);
  int64_t const heads = int64_t(p.batch) * p.heads_kv;
  if (heads * turns.tiles == 0 || resident_ctas == 0) return false;
  if (has_unequal_tiles(p) && splits == 1 && heads * turns.tiles <= resident_ctas) return true;
  int64_t const under_way = std::min<int64_t>(turns.tiles, ceil_div(resident_ctas, heads)),
                turns_a_cta = turns.sum * heads * (p.heads_q / p.heads_kv) / resident_ctas;
  return 6 * under_way <= turns_a_cta;
}

/// Whether a launch that adds to dQ is to make it of its sums beside its tiles, and not a launch after it: where the
/// sums of the sections under way stay in L2, and tiles take longer than the one warp that a CTA has for it. An H200's
/// ms, with a launch and beside: (16, 1024, 16, 128)
/// 0.699 and 0.671, causal 0.475 and 0.524; (8, 2048, 16, 128) 1.168 and 1.105, causal 0.708 and 0.690; (9, 1500, 16,
/// 128) 0.836 and 0.781, causal 0.504 and 0.518; (5, 700, 64, 128) 0.527 and 0.557; (2, 8192, 16, 128) 4.52 and 4.47,
/// causal 2.25 and 2.19. Of narrow heads (32, 1024, 12, 64) 0.638 and 0.585, causal 0.431 and 0.398; (40, 600, 16, 64),
/// causal, 0.365 and 0.343; with three warpgroups, which leave the warp less memory, (8, 2048, 32, 64) 1.342 and 1.267,
/// causal 0.804 and 0.773, (9, 1500, 32, 64) 0.898 and 0.837, causal 0.586 and 0.613, (5, 700, 64, 64) 0.298 and 0.344.
/// Grouped (8, 1024, 32 on 16, 64) 0.408 and 0.384, causal 0.276 and 0.259, but (3, 1024, 32 on 16, 128) 0.262 and
/// 0.266, (8, 1024, 32 on 8, 64), causal, 0.270 and 0.274.
inline bool fused_postprocess_pays(Params const& p, Kernel const& kernel, Device const& device) {
  // Rows that a tile goes by, in the mean.
  int const least_rows = kernel.head_dim > 64 || kernel.block_c > 128 ? 960 : 256;
  if (!have_one_length(p) || p.n_q == 0) return false;
  Turns const turns = turns_of_tiles(p, true, kernel.block_c, kernel.block_r);
  int64_t const heads = int64_t(p.batch) * p.heads_kv;
  if (heads * turns.tiles < 3 * device.multiprocessors) return false;
  int64_t const sums = section_of_fused_postprocess(heads, turns.tiles, device) * (p.heads_q / p.heads_kv) * p.n_q *
                       kernel.head_dim * int64_t(sizeof(float));
  return kSectionsOfSums * sums <= device.l2_bytes && turns.sum * kernel.block_r >= int64_t(least_rows) * turns.tiles;
}

/// The section of a launch of gradients of `heads` heads, all sequences' counted, that are `ctas` CTAs' and work on
/// `bytes_a_head` each: what fits half of L2, or, under a causal mask, so many waves. No section is smaller, the last
/// one included: its long tiles would begin when all else is nearly done.
inline int64_t gradient_section_for(Params const& p, bool is_hopper, int64_t heads, int64_t ctas, int64_t bytes_a_head,
                                    Device const& device) {
  int64_t const fits = device.l2_bytes / 2 / std::max<int64_t>(bytes_a_head, 1);
  int const waves = waves_a_section(p, is_hopper);
  int64_t const level = waves * device.multiprocessors / std::max<int64_t>(ctas, 1);
  int64_t const wanted = !has_unequal_tiles(p) ? fits : waves == 3 ? std::max(fits, level) : level;
  return level_section(heads, wanted);
}

}  // namespace cutlass_ext

// What was measured about the backward pass: one kernel or two, how many CTAs share a tile, and in which order tiles
// go. As heuristics.hpp, which has the forward's and what both ask of a call. Called by backward.cpp and by the tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "../fmha/backward/params.hpp"
#include "heuristics.hpp"

namespace cutlass_ext {

/// Whether one kernel of Hopper's that makes dK and dV, and adds to dQ, is faster than two: five products for seven,
/// against sums in memory, which a call of few rows is too short for. An H200's ms in one and in two: (64, 256, 16, 64)
/// 0.254 and 0.264, (256, 128, 16, 64) 0.411 and 0.403; (256, 64, 16, 80) 0.304 and 0.461, (128, 197, 16, 96) 0.590 and
/// 0.641; (32, 512, 16, 128) 0.489 and 0.519, causal 0.382 and 0.423, (64, 256, 16, 128) 0.391 and 0.369, causal 0.354
/// and 0.355, with a bias 0.495 and 0.554, (128, 197, 16, 80) with one 0.890 and 1.000; (48, 384, 8, 192) 0.411 and
/// 0.441, (64, 256, 8, 192) 0.325 and 0.323, of v's 128 columns (16, 512, 16, 192) 0.375 and 0.418, (64, 256, 16, 192)
/// 0.551 and 0.543; (32, 512, 8, 256) 0.621 and 0.595, (8, 2048, 8, 256) 1.58 and 1.80. But of 558 random plain calls
/// of up to 0.3 ms in any order, 16 to 4096 rows and 16 to 8192 keys, one kernel takes 1.007 of the faster way, and
/// what the other numbers say 1.089: few rows beside many keys leave a kernel of rows few tiles, (1, 23 on 2326, 2
/// heads of 128) 55 us. Of wide heads with more tiles than the GPU has room for two kernels are 1.117 times as fast,
/// where there are no more keys than twice the rows: of 5,378 random calls of up to 400 rows that takes 1.012 of the
/// faster way, one kernel always 1.046, two 1.100. us in one and in two: (32, 64, 16, 192) 97 and 76, (128, 64, 8, 256)
/// 182 and 163; but (64, 16 on 512, 8, 192) 220 and 286.
inline bool adds_to_queries(Params const& p, Kernel const& of_all, int64_t resident_tiles, bool deterministic) {
  int const columns = std::max(p.head_dim, p.head_dim_v);
  bool const is_plain = !(features_of(p) & feature::kMods);
  // Without rows no launch would clear the counters that the kernel takes its tiles by.
  if (p.n_q == 0 || p.stored_rows() == 0) return false;
  int64_t const tiles = int64_t(p.batch) * p.heads_kv * Scheduler::tiles_of(p.n_kv, of_all.block_c);
  bool const are_many_wide_heads = columns > 128 && 4 * tiles > 5 * resident_tiles && p.n_kv <= 2 * p.n_q;
  if (is_plain && !deterministic && !are_many_wide_heads) return true;
  int const too_few = columns <= 64 ? 128 : columns <= 96 || !is_plain ? 32 : columns <= 192 ? 256 : 512;
  return p.n_q > too_few;
}

/// Whether two kernels of mma.sync, with tiles of 32 rows, are faster than Hopper's two, which have 64: of many wide
/// heads of few rows. Of 1,015 random calls of those they are 1.207 times as fast, the worst 0.874. us by these and by
/// Hopper's: (64, 16, 12, 256), causal, 82 and 106, (32, 32, 16, 192), causal, 58 and 72; but (32, 64, 16, 192) 85 and
/// 76.
inline bool have_few_rows_for_hopper(Params const& p, Device const& device) {
  constexpr int kFewRows = 32, kFewKeys = 64;
  return std::max(p.head_dim, p.head_dim_v) > 128 && p.n_q <= kFewRows && p.n_kv <= kFewKeys &&
         int64_t(p.batch) * p.heads_kv > 3 * device.multiprocessors / 4 && !(features_of(p) & feature::kMods);
}

/// The same of a kernel of mma.sync, of which `resident_ctas` are there at once: of 220 random calls at head_dim 64 to
/// 256 it takes 0.82 of what two take in the mean. It is slower, by up to 1.39 times, of many heads of few rows and
/// keys, whose sums are of whole tiles of 64 rows. An H200's us in one and in two: (64, 20, 8, 256) 92 and 66, (64, 22,
/// 4, 224) 50 and 39; but (64, 27 on 77, 1, 256) 24 and 32, (16, 36, 8, 128) 28 and 30.
inline bool adds_to_queries_by_mma_sync(Params const& p, Kernel const& kernel, int64_t resident_ctas) {
  constexpr int kFewRows = 32, kFewKeys = 128;
  int const rows = p.packed() && p.batch > 0 ? p.total_q / p.batch : p.n_q;
  int64_t const tiles = int64_t(p.batch) * p.heads_kv * Scheduler::tiles_of(p.n_kv, kernel.block_c);
  bool const are_many = tiles > resident_ctas;
  return resident_ctas > 0 && p.n_q > 0 && !(rows <= kFewRows && p.n_kv <= kFewKeys && are_many);
}

/// Whether a tile of `kernel` has all keys of a sequence: then nobody else adds to its dQ.
inline bool has_all_keys(Params const& p, Kernel const& kernel) { return p.n_kv <= kernel.block_c; }

/// The same as adds_to_queries_by_mma_sync of CUDA cores, which are always faster so. Their two kernels take out of P
/// what the rounded lse leaves in it, and so does a tile that has all keys. Others cannot, and are for calls that do
/// not ask for the highest precision: where rows see hundreds of keys sums err as much as lse, and dQ of both
/// together 1.9 times as much as by two kernels, dK and dV 1.1 to 1.3 times, half as much as by PyTorch's
/// memory-efficient kernel. Of 50 keys, or scores in the tens, they may err by more than docs/semantics.md
/// allows.
inline bool adds_to_queries_on_cuda_cores(Params const& p, Kernel const& kernel, bool asks_for_highest) {
  constexpr int kManyKeys = 256;
  if (has_all_keys(p, kernel)) return true;
  if (asks_for_highest) return false;
  return keys_through_window(p, p.packed() && p.batch > 0 ? p.total_k / p.batch : p.n_kv, 1) >= kManyKeys;
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

/// Waves of CTAs that a section of causal tiles is to have, longest first. Those of one come by the same rows together;
/// of several the last ones end together. An H100's ms with three and with one: (2, 4096, 32 on 8, 128) 1.75 and 1.28,
/// (2, 8192, 32 on 8, 128) 5.5 and 4.7, (16, 1024, 16, 128) 0.67 and 0.56, (32, 1024, 12, 64) 0.483 and 0.465, (2,
/// 8192, 8, 256) 3.17 and 3.20. Where sequences differ in length, with three, two and one: 32 packed ones of 128 to
/// 4096 rows 10.2, 9.7, 9.7, but 60 of 200 and one of 6000 0.731, 0.737, 0.765. Windows make tiles alike: (1, 16384, 32
/// on 8, 64) of 1024 keys 0.866 and 0.911; but one that hides nothing, (8, 1024, 32 on 4, 256) of 2000 keys, 1.80 and
/// 1.11 on an H200. Other kernels than Hopper's lose 2% with one at worst, and win 1%.
inline int waves_a_section(Params const& p, bool is_hopper) {
  if (!is_hopper || !shows_first_keys(p)) return 3;
  return have_one_length(p) ? 1 : 2;
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

/// Splits of tiles in hand of a launch of gradients: of the query heads that a tile goes through, and of the tiles for
/// each; and from which of its items in their order on.
struct GradientSplits {
  int heads = 1, tiles = 1, begin = 0;
  double us = 0;  // that the launch is to take, sums of splits and all; 0: it is not known
  int all() const { return heads * tiles; }
  /// As the launch is told.
  SharedTiles of(Scheduler const& scheduler) const {
    SharedTiles shared;
    if (all() == 1) return shared;
    shared.begin = begin;
    shared.count = static_cast<int>(scheduler.size() - begin);
    shared.head_splits = cutlass::FastDivmod(heads);
    shared.tile_splits = cutlass::FastDivmod(tiles);
    shared.splits = all();
    // One tile of each head, longest first; the last section may have fewer heads.
    bool const are_level = scheduler.size() == int64_t(scheduler.sections()) * scheduler.items_a_section();
    shared.together = cutlass::FastDivmod(begin > 0   ? std::max(shared.count, 1)
                                          : are_level ? scheduler.pairs_a_section()
                                                      : 1);
    shared.ctas_together = cutlass::FastDivmod(shared.together.divisor * all());
    return shared;
  }
};

/// What a launch of gradients takes, in us.
struct GradientCosts {
  double cta;        // each CTA
  double turn;       // each tile that passes by a CTA, ...
  double a_million;  // ... and so much more for a million products of a row, a key and a column
  double of_rows;    // of a tile that passes by, the part that dQ alone takes
  double level;      // of CTAs that differ: how often their mean the launch takes
  double apart;      // the launch that adds up splits, ...
  double bytes;      // ... so many a microsecond
  double worth;      // splits have to take less than so much of what none takes
  bool of_last;      // whether tiles of a last wave may be split, and no others

  double turn_of(Kernel const& kernel, int cluster) const {
    double const columns = kernel.head_dim + kernel.head_dim_v;
    return turn + a_million * 1e-6 * kernel.block_r * kernel.block_c * columns / cluster;
  }
};
/// Of Hopper's kernels for all gradients, where any tile may add to dQ at any time. Fitted to 1,886 random calls of up
/// to 150 us, each in up to 14 numbers of splits, on an H200: those chosen so take 1.005 of the fastest.
constexpr GradientCosts kInAnyOrder{3.1, 0.67, 0.8, 0, 1.16, 1.1, 3.7e6, 1, true};
/// Of Hopper's two kernels, and where tiles add in their order. Fitted when sums took longer, and to whole tiles of
/// them.
constexpr GradientCosts kOfFixedBits{3, 0.35, 0.8, 2 / 3., 1.03, 4, 2.5e6, 0.9, false},
    kOnCudaCores{3, 0.5, 27, 3 / 4., 1.03, 4, 2.5e6, 0.9, false};
/// By mma.sync: what the rows of suites take on an H200, where a CTA at head_dim 128 takes 6 us beside its turns. With
/// splits so chosen (1, 4039, 4 on 1, 160) takes 0.78 ms for 2.15.
constexpr GradientCosts kByMmaSync{6, 0.7, 2, 3 / 4., 1.16, 4, 2.5e6, 0.95, false};
inline GradientCosts const& gradient_costs_of(Kernel const& kernel, bool in_order) {
  if (kernel.dtype == DType::Float32) return kOnCudaCores;
  if (!wants_hopper(kernel)) return kByMmaSync;
  return kernel.kind == Kind::AllGradients && !in_order ? kInAnyOrder : kOfFixedBits;
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
    int64_t const turns = turns_of_tiles(p, true, kernel.block_c, kernel.block_r).longest * (p.heads_q / p.heads_kv);
    if (!deterministic && otherwise.us > 0) {
      // A kernel of mma.sync for small heads was among those calls.
      double const us = waves_of_heads * (kInAnyOrder.cta + kInAnyOrder.turn_of(kernel, 1) * turns);
      if (us > otherwise.us + kAround) return false;
    } else if (by_clusters && turns > kFewTurns) {
      return false;
    }
  }
  return 5 * (by_clusters ? 1 : tiles) * waves_of_heads <= (deterministic ? 7 : 6) * ceil_div(all, resident_ctas);
}

constexpr int64_t kMostBytesOfSplits = 64 << 20;

/// Columns of workspace that a split has: with those of dK come dV's, with dQ's of float32 what P of a row sums up to.
inline int columns_of_splits(Kernel const& kernel, bool of_keys) {
  return kernel.head_dim + (of_keys ? kernel.head_dim_v : kernel.dtype == DType::Float32);
}

/// Those of all tiles or of none that are fastest; and the fastest, be they of the last tiles alone.
struct ChosenSplits {
  GradientSplits of_all_tiles, best;
};

/// How many, where CTAs are few, or one works longer than it takes all together: of what takes as long the most of the
/// heads, which all have the same work. Each split writes sums in float32, in workspace of at most kMostBytesOfSplits,
/// which a launch adds up. A model of tiles taken longest first: each CTA and its turns as above, and 1 us where packed
/// sequences leave it nothing. (2, 4096, 16 on 1 head, 256), causal, has 128 tiles of keys, the longest of 1024 turns,
/// the mean of 520. Calls of few tiles are 1.15 to 3.0 times as fast for it, (1, 512, 32 on 4, 128) 54 us for 120.
///
/// Of tiles that take as long, in any order, only the last ones may be split, where a last wave is all but empty: of
/// 128 random calls of up to 5 waves that do so the mean is 1.15 times as fast, (1, 4405, 4, 128) 175 us for 262, the
/// worst 0.956. Of a single wave of causal tiles the longest alone were tried, too: 0.93 in the mean, since the others
/// come by other rows then.
inline ChosenSplits gradient_splits(Params const& p, Kernel const& kernel, GradientCosts const& costs, bool of_keys,
                                    int resident_tiles) {
  constexpr int64_t kTilesACta = 6;
  constexpr double kEmpty = 1;
  int const block = of_keys ? kernel.block_c : kernel.block_r, step = of_keys ? kernel.block_r : kernel.block_c;
  int const stored = of_keys ? p.stored_keys() : p.stored_rows(),
            tiles = Scheduler::tiles_of(std::min(of_keys ? p.n_kv : p.n_q, stored), block);
  int const heads_held = of_keys ? p.heads_kv : p.heads_q, heads = p.heads_q / heads_held;
  int64_t const of_a_head = int64_t(p.batch) * tiles,
                in_all = heads_held * (p.packed() ? std::min<int64_t>(of_a_head, stored / block + p.batch) : of_a_head);
  bool const are_few = 2 * in_all < kTilesACta * resident_tiles;
  if (in_all == 0 || 2 * in_all >= kTilesACta * resident_tiles * int64_t(kernel.loop.cluster)) return {};
  auto const [of_tiles, sum, longest] = turns_of_tiles(p, of_keys, block, step);
  double const turn = (of_keys ? 1 : costs.of_rows) * costs.turn_of(kernel, kernel.loop.cluster),
               turns = double(sum) / tiles * in_all * heads;
  bool const alike = 4 * longest * tiles <= 5 * sum;
  int const columns = columns_of_splits(kernel, of_keys);
  int64_t const bytes_a_row = columns * int64_t(sizeof(float)),
                packed_rows = p.packed() ? TiledRows(p, of_keys ? Axis::Keys : Axis::Rows).size(p) : 0;
  double const bytes = bytes_a_row * heads_held * (p.packed() ? 1. : p.batch) * stored;  // of rows that there are
  ChosenSplits chosen;
  double least = INFINITY, least_of_all = INFINITY;
  auto const consider = [&](int of_heads, int of_tiles, int64_t begin) {
    int64_t const turns_of_a_head = ceil_div(longest, of_tiles);
    GradientSplits splits{of_heads, longest > 0 ? static_cast<int>(ceil_div(longest, turns_of_a_head)) : 1,
                          static_cast<int>(begin)};
    bool const whole = splits.all() == 1;
    int64_t const count = in_all - begin, ctas = begin + splits.all() * count,
                  workspace = splits.all() * (p.packed() ? packed_rows : count * block) * bytes_a_row;
    if (!whole && (ctas > kTilesACta * resident_tiles || workspace > kMostBytesOfSplits)) return;
    double const alone = costs.cta + turn * heads * longest,
                 one = costs.cta + turn * ceil_div(heads, of_heads) * turns_of_a_head,
                 mean = (costs.cta * ctas + turn * turns) / resident_tiles,
                 us = alike ? begin / resident_tiles * alone + ceil_div(ctas - begin, resident_tiles) * one
                            : std::max(one, costs.level * mean),
                 empty = kEmpty * splits.all() * (heads_held * of_a_head - in_all) / resident_tiles,
                 apart = whole ? 0 : costs.apart + 2 * splits.all() * (bytes * count / in_all) / costs.bytes;
    splits.us = us + empty + apart;
    double const compared = (whole ? costs.worth : 1) * splits.us;
    if (begin == 0 && compared < least_of_all) chosen.of_all_tiles = splits, least_of_all = compared;
    if (compared < least) chosen.best = splits, least = compared;
  };
  int64_t const next = alike && have_one_length(p) && costs.of_last ? resident_tiles : in_all;
  for (int heads_a_split = 1, last = 0; heads_a_split <= heads; ++heads_a_split) {
    int const of_heads = static_cast<int>(ceil_div(heads, heads_a_split));
    if (of_heads == last) continue;
    last = of_heads;
    for (int of_tiles = 1; of_tiles == 1 || of_tiles < 2 * longest; of_tiles *= 2) {
      if (are_few || of_heads * of_tiles == 1) consider(of_heads, of_tiles, 0);
      for (int64_t begin = next; begin < in_all && of_heads * of_tiles > 1; begin += resident_tiles)
        consider(of_heads, of_tiles, begin);
    }
  }
  return chosen;
}

/// Whether CTAs are to take tiles of keys by twos, one and its mirror image, and in which splits; `of_all`: those that
/// tiles have one by one. Longest first, tiles of a group begin at different times and with different rows; where the
/// groups under way read and add to more than L2 has, each tile then finds its rows in DRAM. A group of heads reads and
/// adds to `bytes`. An H100's ms, longest first and mirrored: (4, 2048, 28 on 4, 128) 1.01 and 0.64, (1, 8192, 64 on 8,
/// 128) 6.2 and 4.7, (2, 4096, 16 on 1, 256) 3.4 and 1.8, (2, 4096, 32 on 8, 128) 1.28 and 1.25. All twos take as long:
/// where their last wave would be nearly empty it is split, or all are. Of 246 random causal calls of grouped heads, ms
/// on an H200: (4, 1792, 64 on 4, 128) 1.65 longest first and 1.13 mirrored, (2, 1981, 32 on 4, 256) 1.22 and 0.81, but
/// (1, 4480, 32 on 2, 80) 0.60 and 0.77; twos wherever they leave less than 0.3 of the GPU idle take 1.009 of the
/// fastest way in the mean, less than 0.15 1.027, less than half 1.013, never 1.049. Long calls reach the limit of
/// power, and longest first has room between CTAs: of four waves, (2, 8192, 32 on 8, 128) 4.7 and 5.1, (1, 16384, 40 on
/// 8, 128) 11.3 and 11.9; but where there is twice as much under way (8, 4096, 28 on 4, 128) 5.4 and 4.6.
inline std::optional<GradientSplits> splits_if_mirrored(Params const& p, Kernel const& kernel,
                                                        GradientSplits const& of_all, int64_t bytes,
                                                        int64_t resident_tiles, Device const& device) {
  constexpr double kLeastUtilization = 0.7;
  if (!has_unequal_tiles(p) || !shows_first_keys(p) || !have_one_length(p)) return std::nullopt;
  int const block = kernel.block_c, heads = p.heads_q / p.heads_kv;
  int const tiles = Scheduler::tiles_of(p.n_kv, block), pairs = ceil_div(tiles, 2);
  int64_t const groups = int64_t(p.batch) * p.heads_kv, twos = groups * pairs;
  if (twos == 0) return std::nullopt;
  Visibility const visibility = visibility_of_longest(p);
  auto const rows = [&](int pair) {
    int const image = 2 * pairs - 1 - pair;
    return visibility.row_tiles_of(pair * block, block, block).size() +
           (image < tiles ? visibility.row_tiles_of(image * block, block, block).size() : 0);
  };
  int const outer = rows(0), inner = rows(pairs - 1);
  if (8 * std::abs(outer - inner) > std::max(outer, inner) + 8) return std::nullopt;
  // What part of the GPU works, where a two takes as long as its heads.
  auto const utilization = [&](GradientSplits const& splits) {
    double const of_split = double(ceil_div(heads, splits.heads)) / splits.tiles,
                 lasts = splits.begin / resident_tiles * heads +
                         ceil_div((twos - splits.begin) * splits.all(), resident_tiles) * of_split;
    return double(twos) * heads / (lasts * resident_tiles);
  };
  GradientSplits best = of_all;
  double most = utilization(best);
  int const whole_waves = static_cast<int>(twos / resident_tiles * resident_tiles);
  int64_t const bytes_of_two = 2 * block * columns_of_splits(kernel, true) * int64_t(sizeof(float));
  for (int of_heads = 2; of_heads <= heads && kernel.loop.splits; ++of_heads) {
    for (int const begin : {whole_waves, 0}) {
      GradientSplits const splits{of_heads, 1, begin};
      if (of_heads * (twos - begin) * bytes_of_two > kMostBytesOfSplits) continue;
      if (double const of_these = utilization(splits); of_these > most + 0.02) best = splits, most = of_these;
    }
  }
  int64_t const waves = ceil_div(best.begin + (twos - best.begin) * best.all(), resident_tiles),
                ctas = int64_t(tiles) * (best.begin > 0 ? 1 : best.all()),
                under_way = std::min(groups * ctas, resident_tiles) * bytes / ctas;
  bool const is_larger = 5 * under_way > (waves <= 2 ? 5 : 9) * device.l2_bytes;
  return is_larger && most >= kLeastUtilization ? std::optional(best) : std::nullopt;
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
/// one included: its long tiles would begin when all else is nearly done. Windows with two ends that hide little are no
/// causal masks: of 1000 keys each way (8, 1536, 16 on 2, 256) takes 1.66 ms, in sections of three waves 3.14.
inline int64_t gradient_section_for(Params const& p, bool is_hopper, int64_t heads, int64_t ctas, int64_t bytes_a_head,
                                    Device const& device) {
  int64_t const fits = device.l2_bytes / 2 / std::max<int64_t>(bytes_a_head, 1);
  int const waves = waves_a_section(p, is_hopper);
  int64_t const level = waves * device.multiprocessors / std::max<int64_t>(ctas, 1);
  int64_t const wanted = shows_last_keys(p) ? fits : waves == 3 ? std::max(fits, level) : level;
  return level_section(heads, wanted);
}

}  // namespace cutlass_ext

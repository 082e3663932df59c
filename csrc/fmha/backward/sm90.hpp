// The backward pass on Hopper, one loop from two sides. A CTA holds a tile of one side of the scores and goes through
// the tiles of the other that see it: with a tile of keys in hand it sums up dK and dV over the query rows (of all
// heads that share the key head), with one of query rows dQ over the keys (FlashAttention-2, arXiv:2307.08691, section
// 3.1, algorithm 2, with the sums of dQ in a launch of their own). Every sum then has one owner, so that its order, and
// its bits, are fixed, and P and dS pass from accumulators to operands in registers: seven products. A third kernel, of
// five, goes by keys and adds what each tile makes of dQ to memory, in any order: dS passes through shared memory, so
// that the warpgroups share out dS K. A fourth does so for heads of few rows, whose dQ shared memory holds while a CTA
// goes through all of their keys. One warp copies each of the two streams by TMA. Instantiated by
// csrc/kernels/sm90_backward_*.cu.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../features.hpp"
#include "../score.hpp"
#include "../sm90/tensor_maps.hpp"
#include "../sm90/warpgroup.hpp"
#include "../softmax.hpp"
#include "params.hpp"
#include "row_product.hpp"
#include "sm90_pairs.hpp"
#include "sm90_parts.hpp"

namespace cutlass_ext::sm90 {

/// What a consumer warpgroup sums up.
enum class Sums {
  KeysAndValues,  ///< dK and dV of 64 keys
  Values,         ///< dV of 64 keys, of which another warpgroup has dK: two accumulators of wide heads are too many
  Keys,
  Queries,  ///< dQ of 64 rows
  All,      ///< dK and dV of 64 keys, and what these and the other warpgroup's add to dQ
};

/// Where a kernel over tiles of keys adds up dQ.
enum class SumsOfQueries {
  None,      ///< another launch does
  InMemory,  ///< CTAs add to it in any order
  InShared,  ///< a CTA has all tiles of a head, one after the other
};

/// Tiles of rows that there is room for in shared memory, those of all query heads of a key head; and how many a head
/// has.
constexpr int kMostHeldTiles = 8;
CUTE_HOST_DEVICE int tiles_of_head(int rows, int block) { return (rows + block - 1) / block; }

/// Adds four numbers that lie side by side to as many in memory.
CUTE_DEVICE void add_to_memory(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

/// Has the copy engine add `bytes` of shared memory, as floats, to as many in memory; one thread, and a bulk group of
/// its own. The sums stay in L2 as long as they can: every tile of keys adds to them.
CUTE_DEVICE void add_to_memory(float* to, void const* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(to),
      "r"(cast_smem_ptr_to_uint(from)), "r"(bytes), "l"(static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST))
      : "memory");
  tma_store_arrive();
}

/// What a CTA works on at a time: a tile of one side, and the tiles of the other that it goes through, once for each
/// head.
template <class Traits>
struct GradientTile {
  WorkItem work;  // row0: first row in hand
  Sequence sequence;
  Visibility view;  // from the side in hand: what is held are its rows, what is streamed its keys
  Range tiles, unmasked;
  int heads;  // query heads that are gone through
  int head_q, head_kv;
  int held_row0, streamed_row0;  // rows of the tensors that hold the side's first
  PairMod pairs;                 // of the first head
  bool bias_in_chunks;           // whether eight keys of a row are a vector of 16 bytes
  float bias_unit;               // of the bias in scores
  int seen_tiles;                // turns, where a mask hides tiles
  uint32_t held_phase = 0;       // of the barriers of the tile in hand

  GradientTile() = default;
  CUTE_DEVICE GradientTile(BackwardParams const& params, int index)
      : work(params.scheduler(index)), sequence(sequence_of(params, work.batch)) {
    Visibility const& visibility = sequence.visibility;
    if constexpr (Traits::OfKeys) {
      view = visibility.transposed();
      tiles = visibility.row_tiles_of(work.row0, Traits::B_c, Traits::B_r);
      unmasked = visibility.unmasked_row_tiles_of(work.row0, Traits::B_c, Traits::B_r);
      heads = params.heads_per_kv.divisor;
      head_q = work.head * heads, head_kv = work.head;
      held_row0 = sequence.k_row0, streamed_row0 = sequence.q_row0;
    } else {
      view = visibility;
      tiles = visibility.tiles_of(work.row0, Traits::B_r, Traits::B_c);
      unmasked = visibility.unmasked_tiles_of(work.row0, Traits::B_r, Traits::B_c);
      heads = 1;
      head_q = work.head, head_kv = params.heads_per_kv.div(work.head);
      held_row0 = sequence.q_row0, streamed_row0 = sequence.k_row0;
    }
    if constexpr (Traits::Splits) {
      Range const own = split_turns(params, work.split, heads, &tiles);
      head_q += own.begin, heads = own.size();
    }
    if (!Traits::Pairs || !has_pairs(params)) return;
    pairs = PairMod(params, sequence, work.batch, head_q);
    bias_in_chunks = pairs.bias_in_chunks(params, heads);
    bias_unit = ScoreMod::changes(params) ? kLog2e : 1.f / ScoreMod::gradient_scale(params);
  }

  CUTE_DEVICE int rows() const { return view.n_q - work.row0; }  // in hand that exist
  // Over keys, whether the tile is a head's first, and whether it is its last.
  CUTE_DEVICE bool begins_head() const { return work.row0 == 0; }
  CUTE_DEVICE bool ends_head() const { return rows() <= Traits::Held; }
  CUTE_DEVICE int turns(BackwardParams const& params) const {
    return Traits::Hides && params.tile_map ? seen_tiles : heads * tiles.size();
  }

  /// Bits of the tiles that are gone through for a head; null: all are seen.
  CUTE_DEVICE uint32_t const* map(BackwardParams const& params, int head, TileMap::Plane plane) const {
    if (!Traits::Hides || !params.tile_map) return nullptr;
    TileMap const of(params, Traits::OfKeys, Traits::Held, Traits::Step);
    return params.tile_map + of.first(work.batch, head, work.row0 / Traits::Held, plane);
  }
  /// Counts them, a warp for all.
  CUTE_DEVICE int count_seen(BackwardParams const& params) const {
    int count = 0;
    for (int g = 0; g < heads; ++g) {
      uint32_t const* const seen = map(params, head_q + g, TileMap::Seen);
      for (int t = tiles.begin + threadIdx.x % 32; t < tiles.end; t += 32) count += __ldg(seen + t / 32) >> t % 32 & 1;
    }
    return __reduce_add_sync(0xffffffffu, count);
  }
};

/// Where dV and dK of a tile are two warpgroups' (`Apart`), and there are sums of queries, a third makes what is added
/// to these, and S is computed by that of dV, which passes P on.
template <Axis Of_, int B_r_, int B_c_, int HeadDim_, int HeadDimV_, class Element_, int Stages_, Features Mods_,
          SumsOfQueries OfQueries>
struct BackwardTraits {
  static constexpr Axis Of = Of_;
  static constexpr bool OfKeys = Of == Axis::Keys;
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDimV_, Stages = Stages_;
  // Which of feature::kMods are taken. Wider heads have no registers left for what pairs have.
  static constexpr Features Mods = HeadDim <= 128 && HeadDimV <= 128 ? Mods_ : Mods_ & feature::kScoreMods;
  static constexpr bool ScoreMods = Mods & feature::kScoreMods, Pairs = Mods & feature::kPairs;
  // Whether pairs may be hidden, and tiles left out; and whether the kernel is for dropout and nothing else: then all
  // of its calls have it.
  static constexpr bool Hides = Mods & (feature::Bias | feature::Mask), DropsAlone = Mods == feature::Dropout;
  static constexpr bool AddsToQueries = OfQueries != SumsOfQueries::None,
                        HoldsSums = OfQueries == SumsOfQueries::InShared;
  // Whether a CTA works on one tile after the other: the next one's first copies land while a tile's gradients are
  // stored. Else the launch has a CTA for each (backward.cpp asks the same): with score changes 64 and 104 bytes
  // spilled, with dropout alone 26 at head_dim 128.
  static constexpr bool Persistent = AddsToQueries && (!Mods || (DropsAlone && HeadDim <= 64));
  static constexpr int TilesKnown = Persistent ? 2 : 1;
  using Element = Element_;
  using Part = typename Operand<Element>::Part;
  static constexpr int Parts = Operand<Element>::Parts;
  // Whether several CTAs may share a tile in hand: each goes through some of the heads, and of the tiles (backward.cpp
  // asks the same).
  static constexpr bool Splits = !Pairs && Parts == 1 && !HoldsSums;
  static constexpr int Held = OfKeys ? B_c : B_r, Step = OfKeys ? B_r : B_c;  // rows in hand, and of a streamed tile
  /// Whether each of two warpgroups sums up one of dK and dV, for the same keys.
  static constexpr bool Apart = OfKeys && Held == kAtomRows, AddsApart = Apart && AddsToQueries;
  static constexpr int Streaming = Apart ? 2 : Held / kAtomRows;  // warpgroups that go through the streams
  static constexpr int Consumers = Streaming + AddsApart;
  static constexpr int Threads = (Consumers + 1) * kWarpgroup;
  // 504 are there, as in traits.hpp, 512 of four warpgroups.
  static constexpr int ProducerRegisters = HoldsSums             ? 56
                                           : Persistent && Pairs ? 40
                                                                 : 24,
                       ConsumerRegisters = AddsApart             ? 208
                                           : HoldsSums           ? 224
                                           : Persistent && Pairs ? 232
                                                                 : 240,
                       RegistersOfValues = AddsApart ? 200 : 240, RegistersOfQueries = 80;

  template <int Columns>
  static constexpr int Padded = (Columns + kPanel - 1) / kPanel * kPanel;  // in shared memory: whole panels
  static constexpr int ColumnsQK = Padded<HeadDim> * Parts, ColumnsV = Padded<HeadDimV> * Parts;  // high parts first

  template <int Columns>
  using LayoutHeld = LayoutAlongColumns<Part, Held, Columns>;
  template <int Columns>
  using LayoutStreamed =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Part>{}, Shape<Int<Step>, Int<Columns>, Int<Stages>>{}));
  // The same bytes, transposed, as the second products want them.
  template <int Columns>
  using LayoutAcross = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Part>{},
                                              Shape<Int<Columns>, Int<Step>, Int<Stages>>{}, cute::Step<_2, _1, _3>{}));

  // Whether tiles that a mask leaves whole have a body of the loop of their own, where nothing else changes scores.
  static constexpr bool TwoBodies = (Mods & feature::Mask) && AddsToQueries;

  // Whether a warpgroup keeps its rows in hand in registers: there are 52 left, and shared memory, which the products
  // would read them from each turn, is what the kernel waits for.
  static constexpr bool HoldsInRegisters = AddsToQueries && HeadDim <= 64 && HeadDimV <= 64;
  template <int Columns>
  using ShapeOfScores = Shape<Int<kAtomRows>, Int<Step>, Int<Columns>>;
  template <int Columns>
  using MmaScores = decltype(make_tiled_mma(
      std::conditional_t<HoldsInRegisters, decltype(GMMA::rs_op_selector<Part, Part, float, ShapeOfScores<Columns>>()),
                         decltype(GMMA::ss_op_selector<Part, Part, float, ShapeOfScores<Columns>>())>{}));
  // An instruction may have no more registers than a thread is launched with: 128 where warpgroups are four.
  template <int Columns>
  static constexpr int ColumnsAtOnce = AddsApart && Columns > 128 ? 128 : Columns;
  template <int Columns>
  using MmaGradient = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Part, Part, float, Shape<Int<kAtomRows>, Int<ColumnsAtOnce<Columns>>, Int<Step>>,
                           GMMA::Major::K, GMMA::Major::MN>()));

  // What a tile adds to dQ: dS of all keys in hand, as the warpgroups leave it, times K; of each warpgroup a part of
  // the columns. It is multiplied a turn after it was left, so that no warpgroup waits for another within a turn; with
  // three buffers the barrier that says that it is there will do.
  // Apart, it passes from one warpgroup to another, which says when it has it in registers: as many as there are
  // stages, so that a turn has one number for both. Beside sums in shared memory there is room for two.
  static constexpr int BuffersDS = AddsApart ? Stages : HoldsSums ? 2 : 3;
  static constexpr bool EmptiesDS = AddsApart || HoldsSums;  // whether it is said when it has been read
  // Narrow heads leave registers for all columns: the warpgroups then take turns, which reads dS once.
  static constexpr bool TakesTurns = AddsToQueries && SumsOfTile<HeadDim>::kParts == 1;
  static constexpr int QueryColumns = AddsApart ? 32 : HeadDim / SumsOfTile<HeadDim>::kParts;
  // Whether the copy engine adds it, out of `staging`: the registers are free at once. Wider heads have neither room
  // there nor time of shared memory.
  static constexpr bool StagesSums = TakesTurns && !HoldsSums;
  static constexpr int VectorsOfSums = HoldsSums ? kMostHeldTiles * B_r * HeadDim / 4 : 1;
  // Beside sums in shared memory values in hand pass through the stages of dout: 64 rows each.
  static constexpr int HeldBox = HoldsSums ? kAtomRows : Held;
  static constexpr int Staged = 16 * (StagesSums ? kPanel * sizeof(float) / sizeof(Part) : kPanel);  // of a warp
  using LayoutDS =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Part>{}, Shape<Int<B_r>, Int<B_c>, Int<BuffersDS>>{}));
  using MmaKeys =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Part, Part, float, Shape<Int<kAtomRows>, Int<HeadDim>, Int<B_r>>,
                                                   GMMA::Major::K, GMMA::Major::MN>()));
  template <int Columns>
  using ShapeOfQueries = Shape<Int<B_r>, Int<Columns>, Int<B_c>>;
  template <int Columns>
  using MmaQueries = decltype(make_tiled_mma(
      std::conditional_t<
          AddsApart,
          decltype(GMMA::rs_op_selector<Part, Part, float, ShapeOfQueries<Columns>, GMMA::Major::K, GMMA::Major::MN>()),
          decltype(GMMA::ss_op_selector<Part, Part, float, ShapeOfQueries<Columns>, GMMA::Major::MN,
                                        GMMA::Major::MN>())>{}));
  static constexpr int VectorsOfP = kAtomRows * B_r / kWarpgroup / 4;  // of a thread

  // Whether a tile of bias, or its part, lies apart from `staging`: where that is too small, or in use.
  static constexpr bool StagesPairs = Hides && (Step > kPanel || StagesSums);
  struct SharedStorage {
    alignas(1024) Part held[Held * ColumnsQK];
    alignas(1024) Part streamed[Stages * Step * ColumnsQK];
    alignas(1024) Part streamed_v[Stages * Step * ColumnsV];
    alignas(1024) Part ds[AddsToQueries ? BuffersDS * B_r * B_c : 8];
    alignas(HoldsSums ? 16 : 1024) Part held_v[HoldsSums ? 8 : Held * ColumnsV];
    alignas(16) float4 sums[VectorsOfSums];  // of dQ: tiles of rows of a head, in the order of SumsOfTile
    // 16 rows of a panel for each consumer warp; a warp's part of dS, or of what else it passes on, serves as such.
    alignas(256) Part staging[Parts == 1 && !EmptiesDS ? 4 * Consumers * Staged : 8];
    alignas(256) Part pairs_staging[StagesPairs ? Consumers * kAtomRows * Step : 8];
    StreamedTile at[Hides ? Stages : 1];  // what the stages hold
    alignas(16) RowStatistics statistics[Stages][OfKeys ? Step : 1];
    GradientTile<BackwardTraits> tiles[TilesKnown];
    bool is_last[TilesKnown];  // there is no tile
    Barrier tile_full[TilesKnown], tile_empty[TilesKnown];
    Barrier held_full, held_v_full, held_empty, held_v_empty;
    Barrier full[Stages], empty[Stages], full_v[Stages], empty_v[Stages];
    Barrier ds_full[BuffersDS];
    Barrier tail, tail_v;  // the copy of a tile whose rows past the last are to be zeroed before anyone sees it
    Barrier ds_empty[EmptiesDS ? BuffersDS : 1], p_full, p_empty;
    Barrier head_taken, rows_known;  // the CTA's next head, of whole ones, and the statistics of its rows
    unsigned next_head;              // its first tile's index
    alignas(16) float4 p[AddsApart ? VectorsOfP * kWarpgroup : 1];
  };

  static_assert(StatisticsRows::kTile % B_r == 0 || !OfKeys, "statistics are copied by whole tiles of rows");
  static_assert(!AddsToQueries || (OfKeys && B_r == kPanel), "a row of a panel of dS is one key's");
  static_assert(!AddsToQueries || (B_r == SumsOfTile<HeadDim>::kRows &&
                                   (TakesTurns || Apart || Consumers == SumsOfTile<HeadDim>::kParts)),
                "the order of the sums");
  static_assert(!AddsApart || !Mods, "there are no registers for score changes");
  static_assert(!AddsApart || Stages == 2, "the phase of P is a turn's stage: both alternate");
  static_assert(!HoldsSums || (HoldsInRegisters && TakesTurns && Persistent && !Hides),
                "a warp adds to the same tiles each time");
  static_assert(!TakesTurns || Consumers == 2, "every other turn is a warpgroup's");
  static_assert(Held % kAtomRows == 0 && Step % 16 == 0, "WGMMA's rows, and its steps");
  static_assert(Parts == 1 || !(Mods || AddsToQueries), "float32 is multiplied plainly");
  static_assert(Parts == 1 || (HeadDim % kPanel == 0 && HeadDimV % kPanel == 0), "low parts begin with a panel");
  static_assert(Parts == 1 || HeadDimV <= 2 * kPanel, "there are no registers for more sums of dP");
};

/// What `store_rows` has to know of sums with `Columns` columns.
template <class Traits, int Columns>
struct Stored {
  using Element = typename Traits::Element;
  static constexpr int HeadDimV = Columns, PanelsV = Traits::template Padded<Columns> / kPanel, StagedPanels = 1;
};

/// The CTA's tiles in turn, as all warps but the one that takes them see them.
template <class Traits>
struct TileReader {
  typename Traits::SharedStorage& shared;
  RingPosition<Traits::TilesKnown> at{};

  /// The current tile; null: there is none.
  CUTE_DEVICE GradientTile<Traits> const* here() const {
    if constexpr (Traits::Persistent) {
      shared.tile_full[at.stage].wait_for(at.phase);
      if (shared.is_last[at.stage]) return nullptr;
    }
    return &shared.tiles[at.stage];
  }
  /// By a whole warp, once it has read the current tile for the last time; whether there may be another.
  CUTE_DEVICE bool release() {
    if constexpr (Traits::Persistent) {
      __syncwarp();
      if (elect_one_sync()) shared.tile_empty[at.stage].arrive();
      at.advance();
    }
    return Traits::Persistent;
  }
};

/// Takes the CTA's tiles, the first by its index, then the next one that nobody has. By a whole warp.
template <class Traits>
struct TileTaker {
  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  RingPosition<Traits::TilesKnown> at{};
  bool took_first = false, goes_on = false;  // with a head
  unsigned index = 0, next_head = 0;         // of the tile, and of the first one of the next head
  uint32_t held_phase = 0, rows_phase = 0;

  /// What no CTA has: a tile, or a head.
  CUTE_DEVICE unsigned draw(bool leader) const {
    return gridDim.x + __shfl_sync(0xffffffffu, leader ? atomicAdd(params.counters, 1u) : 0, 0);
  }
  /// The index of the next tile.
  CUTE_DEVICE unsigned take(bool leader) {
    bool const is_first = !took_first;
    took_first = true;
    if constexpr (Traits::HoldsSums) {
      return goes_on ? index + 1 : take_head(leader, is_first);
    } else {
      return is_first ? blockIdx.x : draw(leader);
    }
  }
  /// That of the next head's first tile, once the statistics of its rows are there. The head behind it is drawn, so
  /// that those of its rows are made meanwhile.
  CUTE_DEVICE unsigned take_head(bool leader, bool is_first) {
    unsigned const tiles = tiles_of_head(params.n_kv, Traits::Held);
    unsigned first = blockIdx.x * tiles;
    if (!is_first) {
      shared.rows_known.wait_for(rows_phase);
      rows_phase ^= 1;
      first = next_head;
    }
    next_head = draw(leader) * tiles;
    if (leader) {
      shared.next_head = next_head;
      shared.head_taken.arrive();
    }
    return first;
  }

  /// Tells the others of a tile that has rows, or that there is none, and returns it.
  CUTE_DEVICE GradientTile<Traits> const* next() {
    bool const leader = threadIdx.x % 32 == 0;
    auto& slot = shared.tiles[at.stage];
    shared.tile_empty[at.stage].wait_for(at.phase ^ 1);
    bool exists;
    do {
      index = take(leader);
      exists = index < static_cast<unsigned>(params.scheduler.size());
      if (exists && leader) {
        slot = GradientTile<Traits>(params, index);
        slot.held_phase = held_phase;
        if (Traits::HoldsSums && slot.rows() <= 0) slot.tiles = {0, 0};  // a head without keys, whose dQ is 0
      }
      __syncwarp();
      if (Traits::HoldsSums && exists) goes_on = !slot.ends_head();
      // Packed: the launch counts the tiles of the longest sequence for each.
    } while (exists && slot.rows() <= 0 && !Traits::HoldsSums);
    if (leader) {
      shared.is_last[at.stage] = !exists;
      shared.tile_full[at.stage].arrive();
    }
    if (exists && slot.turns(params) > 0) held_phase ^= 1;
    at.advance();
    return exists ? &slot : nullptr;
  }
};

/// One of two warps that make the statistics of rows of the CTA's next head, before the warp that copies them takes it.
template <class Traits>
CUTE_DEVICE void know_rows(BackwardParams const& params, typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  unsigned index = 0, size = static_cast<unsigned>(params.scheduler.size());
  for (uint32_t phase = 0; index < size; phase ^= 1) {
    shared.head_taken.wait_for(phase);
    index = shared.next_head;
    if (index < size && makes_rows_known(params)) {  // else all were known before
      WorkItem const work = params.scheduler(index);
      Sequence const sequence = sequence_of(params, work.batch);
      int const heads = params.heads_per_kv.divisor;
      CUTE_NO_UNROLL
      for (int head = work.head * heads; head < (work.head + 1) * heads; ++head)
        make_rows_known<Traits::Step, Element>(params, sequence, work.batch, head);
      asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine reads them
    }
    shared.rows_known.arrive();  // every lane for itself
  }
}

/// A warp that copies one tile in hand after the other, and the tiles of one stream: of q and k with the statistics of
/// rows, or of v and dout.
template <class Traits, bool OfValues>
struct StreamCopy {
  using Part = typename Traits::Part;
  using Shared = typename Traits::SharedStorage;
  static constexpr int Held = Traits::Held, Step = Traits::Step;
  static constexpr int Columns = OfValues ? Traits::ColumnsV : Traits::ColumnsQK;
  static constexpr bool WithStatistics = Traits::OfKeys && !OfValues;

  BackwardParams const& params;
  GradientMaps const& maps;
  Shared& shared;
  TailCopy tail;
  RingPosition<Traits::Stages> ring{};

  CUTE_DEVICE StreamCopy(BackwardParams const& params, GradientMaps const& maps, Shared& shared)
      : params(params), maps(maps), shared(shared), tail{OfValues ? shared.tail_v : shared.tail} {}

  CUTE_DEVICE void operator()(GradientTile<Traits> const& tile) {
    if (tile.turns(params) == 0) return;
    constexpr int StatisticsBytes = WithStatistics ? Step * sizeof(RowStatistics) : 0;
    CUtensorMap const& map_held = OfValues ? maps.held_v : maps.held;
    CUtensorMap const& map_streamed = OfValues ? maps.streamed_v : maps.streamed;
    Part* const held = OfValues ? shared.held_v : shared.held;
    Part* const streamed = OfValues ? shared.streamed_v : shared.streamed;
    Barrier& held_full = OfValues ? shared.held_v_full : shared.held_full;
    auto& full = OfValues ? shared.full_v : shared.full;
    auto& empty = OfValues ? shared.empty_v : shared.empty;
    bool const leader = threadIdx.x % 32 == 0;
    int const batch = tile.sequence.batch;
    int const held_stored = Traits::OfKeys ? params.stored_keys() : params.stored_rows(),
              streamed_stored = Traits::OfKeys ? params.stored_rows() : params.stored_keys();

    // What lies past a tensor's end arrives as zeros; what lies behind a sequence, and rows that see no key, are to be
    // zeroed: 0 times NaN is NaN.
    Visibility const& visibility = tile.sequence.visibility;
    Range const query_rows = visibility.rows_with_keys(), keys{0, visibility.len_kv};
    auto const counting = [](Range of_sequence, int first, int rows) {  // of a tile's rows, those that count
      return Range{max(of_sequence.begin - first, 0), min(of_sequence.end - first, rows)};
    };
    auto const is_cut = [](Range rows, int all, int64_t at, int stored) {
      return rows.begin > 0 || (rows.end < all && at + rows.end < stored);
    };
    // And the query rows of a tile that see no key by what pairs have, in bits; null where there are none.
    auto const empty_rows = [&](bool of_rows, int head, int first, int rows) -> uint32_t const* {
      if (!Traits::Hides || !of_rows || !params.empty_rows) return nullptr;
      uint32_t const* const bits =
          params.empty_rows + (StatisticsRows(params).first(params, tile.sequence, tile.work.batch, head) + first) / 32;
      uint32_t any = 0;
      for (int word = 0; word < rows / 32; ++word) any |= __ldg(bits + word);
      return any ? bits : nullptr;
    };
    int const row = tile.held_row0 + tile.work.row0;
    Range const here = counting(Traits::OfKeys ? keys : query_rows, tile.work.row0, Held);
    auto const* const empty_held = empty_rows(!Traits::OfKeys, tile.head_q, tile.work.row0, Held);
    if constexpr (Traits::Persistent && !(Traits::HoldsSums && OfValues))
      (OfValues ? shared.held_v_empty : shared.held_empty).wait_for(tile.held_phase ^ 1);
    if constexpr (Traits::HoldsSums && OfValues) {
      for (int first = 0; first < Held; first += Step) {
        Range const here = counting(keys, min(tile.work.row0 + first, keys.end), Step);
        auto* const to = streamed + ring.stage * Step * Columns;
        empty[ring.stage].wait_for(ring.phase ^ 1);
        tail.template tile<Step, Columns>(
            full[ring.stage], to, is_cut(here, Step, row + first, held_stored), here, [&](Barrier& barrier) {
              if (leader)
                copy_panels<Step, Columns>(map_held, barrier, to, row + first, tile.work.head, batch,
                                           TMA::CacheHintSm90::EVICT_FIRST);
            });
        ring.advance();
      }
    } else {
      tail.template tile<Held, Columns>(
          held_full, held, empty_held || is_cut(here, Held, row, held_stored), here,
          [&](Barrier& barrier) {
            if (!leader) return;
            barrier.arrive_and_expect_tx(Held * Columns * sizeof(Part));
            CUTE_UNROLL
            for (int first = 0; first < Held; first += Traits::HeldBox)
              copy_box<Held, Columns>(map_held, barrier, held + first * kPanel, row + first, tile.work.head, batch,
                                      TMA::CacheHintSm90::EVICT_FIRST);
          },
          empty_held);
    }
    for (int g = 0; g < tile.heads; ++g) {
      int const head_q = tile.head_q + g, head = Traits::OfKeys ? head_q : tile.head_kv;
      int64_t const statistics =
          WithStatistics ? StatisticsRows(params).first(params, tile.sequence, tile.work.batch, head) : 0;
      uint32_t const *const seen = tile.map(params, head_q, TileMap::Seen), *const whole = tile.map(params, head_q,
                                                                                                    TileMap::Whole);
      for (int t = tile.tiles.begin; t < tile.tiles.end; ++t) {
        if (seen && !(__ldg(seen + t / 32) >> t % 32 & 1)) continue;
        int const first = t * Step, at = tile.streamed_row0 + first;
        Range const here = counting(Traits::OfKeys ? query_rows : keys, first, Step);
        auto* const to = streamed + ring.stage * Step * Columns;
        auto const* const empty_streamed = empty_rows(Traits::OfKeys, head, first, Step);
        empty[ring.stage].wait_for(ring.phase ^ 1);
        tail.template tile<Step, Columns>(
            full[ring.stage], to, empty_streamed || is_cut(here, Step, at, streamed_stored), here,
            [&](Barrier& barrier) {
              if (!leader) return;
              if constexpr (Traits::Hides && !OfValues) {
                auto& says = shared.at[ring.stage];
                says.tile = t, says.head = head_q, says.mixed = whole && !(__ldg(whole + t / 32) >> t % 32 & 1);
                if constexpr (Traits::OfKeys) {
                  if (says.mixed) says.mask = TilePairs<Traits>::mask_of_tile(params, tile.work.batch, head_q, t);
                  if (has_bias(params) && tile.bias_in_chunks)
                    says.bias_row = tile.pairs.bias_row(params, head_q - tile.head_q, t * Step);
                }
                if constexpr (Traits::AddsToQueries)
                  says.sums = params.dq_sums + (statistics + first) * Traits::HeadDim;
              }
              barrier.arrive_and_expect_tx(Step * Columns * sizeof(Part) + StatisticsBytes);
              copy_box<Step, Columns>(map_streamed, barrier, to, at, head, batch, TMA::CacheHintSm90::EVICT_LAST);
              if constexpr (WithStatistics) {
                SM90_BULK_COPY_G2S::copy(params.row_statistics + statistics + first,
                                         reinterpret_cast<uint64_t*>(&barrier), shared.statistics[ring.stage],
                                         StatisticsBytes);
              }
            },
            empty_streamed);
        ring.advance();
      }
    }
  }
};

/// Where the sums of dQ of a streamed tile begin.
template <class Traits>
CUTE_DEVICE float* sums_of_tile(BackwardParams const& params, GradientTile<Traits> const& tile, int head, int t) {
  int64_t const row = StatisticsRows(params).first(params, tile.sequence, tile.work.batch, head) + t * Traits::Step;
  return params.dq_sums + row * Traits::HeadDim;
}

/// What the keys in hand add to dQ of a tile of rows: dS K, computed by all warpgroups together, of each a part of the
/// columns, or, `AddsApart`, by one of them. `buffer` is where dS of the tile lies.
template <class Traits>
struct QuerySums {
  using Element = typename Traits::Element;
  static constexpr int Columns = Traits::QueryColumns;
  using Mma = typename Traits::template MmaQueries<Columns>;
  using MmaOfPanel = typename Traits::template MmaQueries<kPanel>;  // describes a panel of K as it lies there
  static constexpr int kVectors = Columns * 4;                      // of a warp's 16 rows

  typename Traits::SharedStorage& shared;
  int warpgroup;
  uint32_t ds_at;  // chunk lane / 16, swizzled, of the lane's row of dS: bits are flipped for the others

  CUTE_DEVICE QuerySums(typename Traits::SharedStorage& shared, int warpgroup) : shared(shared), warpgroup(warpgroup) {
    auto const [lane, warp_row] = ConsumerThread();
    int const key = (Traits::Apart ? warp_row % Traits::Held : warp_row) + lane % 16;
    ds_at = cast_smem_ptr_to_uint(shared.ds) + key * (kPanel * sizeof(Element)) + ((lane / 16) ^ (key & 7)) * 16;
    compute_here(ds_at);
  }

  /// Leaves dS^T of the warp's 16 keys to all.
  template <class Words>
  CUTE_DEVICE void share(Words const& words, int buffer) const {
    uint32_t const at = ds_at + buffer * Traits::B_c * (kPanel * sizeof(Element));
    CUTE_UNROLL
    for (int m = 0; m < Traits::B_r / 16; ++m) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ (m * 32)),
                   "r"(words(4 * m)), "r"(words(4 * m + 1)), "r"(words(4 * m + 2)), "r"(words(4 * m + 3))
                   : "memory");
    }
    if constexpr (!Traits::Apart) cutlass::arch::fence_view_async_shared();  // WGMMA reads it there
    __syncwarp();
    if (elect_one_sync()) shared.ds_full[buffer].arrive();
  }

  /// dS of the warp's 16 rows of a tile, as operand A, once another warpgroup has left it.
  CUTE_DEVICE static auto operand() {
    return make_tensor<Element>(partition_shape_A(Mma{}, Shape<Int<Traits::B_r>, Int<Traits::B_c>>{}));
  }
  template <class Operand>
  CUTE_DEVICE void take(Operand& ds, int buffer) const {
    int const thread = anew(threadIdx.x);  // an address for each turn: there is no register for one
    auto const* const from =
        shared.ds + buffer * Traits::B_c * kPanel + row_for_operand_a<Element>(thread % 32, thread / 32 % 4);
    Tensor words = recast<uint32_t>(ds);
    CUTE_UNROLL
    for (int m = 0; m < Traits::B_c / 16; ++m) {
      SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(from + m * 16 * kPanel), words(4 * m),
                              words(4 * m + 1), words(4 * m + 2), words(4 * m + 3));
    }
    __syncwarp();
    if (elect_one_sync()) shared.ds_empty[buffer].arrive();
  }

  /// dS^T of the warpgroup's own keys, as operand A of dK's product.
  CUTE_DEVICE auto own_ds(int buffer) const {
    using Rows = LayoutAlongColumns<Element, Traits::B_c, kPanel>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(shared.ds + buffer * Traits::B_c * kPanel), Rows{}),
                             Shape<Int<kAtomRows>, Int<kPanel>>{}, make_coord(warpgroup, _0{}));
    return typename Traits::MmaKeys{}.get_slice(0).partition_fragment_A(rows);
  }

  CUTE_DEVICE int part() const { return Traits::TakesTurns ? 0 : warpgroup; }
  CUTE_DEVICE static auto accumulator() { return partition_fragment_C(Mma{}, Shape<Int<Traits::B_r>, Int<Columns>>{}); }
  /// K in hand from a column on, as operand B.
  CUTE_DEVICE auto keys_from(int column) const {
    constexpr int kKeys = Traits::B_c;
    return MmaOfPanel{}.get_slice(0).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.held + column / kPanel * kPanel * kKeys + column % kPanel),
                    LayoutAlongRows<Element, kKeys, kPanel>{}));
  }
  template <class Sums>
  CUTE_DEVICE void issue(Sums& sums, int buffer) const {
    Tensor fDS =
        Mma{}.get_slice(0).partition_fragment_A(make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDS{}));
    gemm_async<Traits::B_c / 16>(Mma{}, fDS(_, _, _, buffer), keys_from(part() * Columns), sums, true);
  }

  /// Adds to all columns of a tile of rows, `Columns` at a time, of which two are under way.
  template <class Operand>
  CUTE_DEVICE void add_tile(Operand const& ds, float* to) const {
    constexpr int kSteps = Traits::HeadDim / Columns, kVectorsOfLanes = 32 * 4;
    Tensor both = make_tensor<float>(append(accumulator().layout(), Layout<_2>{}).shape());
    for_each(make_int_sequence<kSteps + 1>{}, [&](auto step) {
      constexpr int kNext = decltype(step)::value, kDone = kNext - 1;
      if constexpr (kNext < kSteps) {
        Tensor sums = both(_, _, _, kNext % 2);
        gemm_async<Traits::B_c / 16>(Mma{}, ds, keys_from(kNext * Columns), sums, true);
      }
      if constexpr (kDone >= 0) {
        Tensor sums = both(_, _, _, kDone % 2);
        warpgroup_wait<(kNext < kSteps ? 1 : 0)>();
        warpgroup_fence_operand(sums);
        constexpr int kColumn = kDone * Columns;
        add(sums,
            to + SumsOfTile<Traits::HeadDim>::first(kColumn / kPanel, 0) * 4 + kColumn % kPanel / 8 * kVectorsOfLanes);
      }
    });
  }

  /// `to`: as `first` says. Sums lie in memory in the order in which threads hold them: each adds whole vectors, side
  /// by side with its neighbours', those of a warp in one piece. SumsOfTile knows the order.
  template <class Sums>
  CUTE_DEVICE void add(Sums const& sums, float* to) const {
    if constexpr (Traits::StagesSums) {
      auto* const warps = reinterpret_cast<float4*>(shared.staging + part_of_warp<Traits>() * Traits::Staged);
      tma_store_wait<0>();  // what the warp left there last has been read: by the thread that had it copied
      __syncwarp();
      CUTE_UNROLL
      for (int e = 0; e < size(sums); e += 4)
        warps[e * 8 + threadIdx.x % 32] = make_float4(sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elect_one_sync()) add_to_memory(to, warps, kVectors * sizeof(float4));
    } else {
      CUTE_UNROLL
      for (int e = 0; e < size(sums); e += 4)
        add_to_memory(to + e * 32, sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
    }
  }
  /// The vectors of tile `tile` of those that shared memory has, 32 apart, that the thread alone reads and writes.
  CUTE_DEVICE float4* held(int tile) const {
    constexpr int kTileVectors = Traits::B_r * Traits::HeadDim / 4;
    return shared.sums + tile * kTileVectors + SumsOfTile<Traits::HeadDim>::first(0, threadIdx.x / 32 % 4) +
           threadIdx.x % 32;
  }
  template <class Sums>
  CUTE_DEVICE void hold(Sums const& sums, int tile) const {
    float4* const to = held(tile);
    CUTE_UNROLL
    for (int e = 0; e < size(sums); e += 4) {
      float4 const x = to[e * 8];
      to[e * 8] = make_float4(x.x + sums(e), x.y + sums(e + 1), x.z + sums(e + 2), x.w + sums(e + 3));
    }
  }
  /// Where the thread adds, or the warp, counted from the sums of a tile.
  CUTE_DEVICE int first() const {
    int const lane = Traits::StagesSums ? 0 : threadIdx.x % 32;
    return (SumsOfTile<Traits::HeadDim>::first(part(), threadIdx.x / 32 % 4) + lane) * 4;
  }
};

/// The warp's 16 of `Rows` rows of a panel that are in hand, to registers: operand A.
template <int Rows, class Operand, class Element>
CUTE_DEVICE void load_held(Operand& operand, Element const* held) {
  auto const [lane, warp_row] = ConsumerThread();
  Tensor words = recast<uint32_t>(operand);
  int const row = warp_row % Rows + lane % 16;
  CUTE_UNROLL
  for (int m = 0; m < kPanel / 16; ++m) {
    auto const* const from = held + row * kPanel + swizzled_chunk<Element>(2 * m + lane / 16, row);
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(from), words(4 * m), words(4 * m + 1), words(4 * m + 2),
                            words(4 * m + 3));
  }
}

/// Where a consumer warpgroup stands, from tile to tile.
template <class Traits>
struct Standing {
  RingPosition<Traits::Stages> ring{}, ring_v{};  // the second of dout, where values in hand pass there, too
  RingPosition<Traits::BuffersDS> ds{}, last_ds{};
  unsigned taken = 0;  // tiles of dS, by a warpgroup that does nothing else
};

/// A warpgroup that adds to dQ, of what those of dV and dK have left.
template <class Traits>
CUTE_DEVICE void add_to_queries(BackwardParams const& params, typename Traits::SharedStorage& shared,
                                GradientTile<Traits> const& tile, Standing<Traits>& standing) {
  if (tile.turns(params) == 0) return;
  QuerySums<Traits> const query_sums(shared, 0);
  Tensor fdS = QuerySums<Traits>::operand();
  shared.held_full.wait_for(tile.held_phase);
  CUTE_NO_UNROLL
  for (int head = tile.head_q; head < tile.head_q + tile.heads; ++head) {
    float* to = sums_of_tile(params, tile, head, tile.tiles.begin) + query_sums.first();
    CUTE_NO_UNROLL
    for (int t = tile.tiles.begin; t < tile.tiles.end; ++t, to += Traits::Step * Traits::HeadDim) {
      int const buffer = standing.taken % Traits::BuffersDS;
      shared.ds_full[buffer].wait_for(standing.taken / Traits::BuffersDS % 2);
      query_sums.take(fdS, buffer);
      ++standing.taken;
      query_sums.add_tile(fdS, to);
    }
  }
  if (elect_one_sync()) shared.held_empty.arrive(), shared.held_v_empty.arrive();
}

/// dQ of a head from shared memory, once all of its keys have been gone through: of the tiles that the warpgroup adds
/// to.
template <class Traits>
CUTE_DEVICE void store_held_sums(BackwardParams const& params, QuerySums<Traits> const& sums,
                                 GradientTile<Traits> const& tile, int row_block) {
  using Element = typename Traits::Element;
  int const rows = tile.sequence.visibility.n_q, tiles = tiles_of_head(rows, Traits::Step), lane = threadIdx.x % 32,
            warp_row = threadIdx.x / 32 % 4 * 16;
  Tensor cQ = QuerySums<Traits>::accumulator();
  Tensor dQ = rows_and_columns(cQ);
  CUTE_NO_UNROLL
  for (int held = row_block; held < tile.heads * tiles; held += 2) {
    float4* const from = sums.held(held);
    CUTE_UNROLL
    for (int e = 0; e < size(cQ); e += 4) {
      float4 const x = from[e * 8];
      cQ(e) = x.x, cQ(e + 1) = x.y, cQ(e + 2) = x.z, cQ(e + 3) = x.w;
    }
    CUTE_UNROLL
    for (int e = 0; e < size(cQ); ++e) cQ(e) *= factor_of_gradients(params);
    __syncwarp();  // all have read what is written over
    int const head = held / tiles, row = (held - head * tiles) * Traits::Step + warp_row;
    auto* const to = row_at<Element>(params.dq, params.dq_stride, tile.sequence.batch,
                                     tile.sequence.q_row0 + row + lane / 8, tile.head_q + head);
    store_rows<Stored<Traits, Traits::HeadDim>>(
        to, [&](int pass) { return pass * 4 * params.dq_stride.row; }, rows - row, params.head_dim, dQ,
        reinterpret_cast<Element*>(from - lane), lane);
  }
}

/// A consumer warpgroup: goes through the tiles of the stream and sums up its gradients.
template <class Traits, Sums What>
CUTE_DEVICE void accumulate(BackwardParams const& params, typename Traits::SharedStorage& shared,
                            GradientTile<Traits> const& tile, int row_block, Standing<Traits>& standing) {
  using Element = typename Traits::Element;
  using Part = typename Traits::Part;
  constexpr int Step = Traits::Step, ColumnsQK = Traits::ColumnsQK, ColumnsV = Traits::ColumnsV;
  constexpr bool SumsP = What == Sums::KeysAndValues || What == Sums::Values || What == Sums::All;  // A2 += P Y2
  constexpr bool SumsS = What != Sums::Values;                                                      // A1 += dS Y1
  constexpr bool AddsQ = What == Sums::All;
  // Whether dP is computed in the place of S: P is another warpgroup's.
  constexpr bool kGetsP = Traits::AddsApart && What == Sums::Keys;
  // Wide heads have no registers to spare: dK's product reads dS from shared memory, where it lies for dQ.
  [[maybe_unused]] constexpr bool kReadsDS = AddsQ && Traits::HeadDim > 64;
  constexpr bool kInParts = Traits::Parts > 1;
  using MmaS = typename Traits::template MmaScores<Traits::HeadDim>;
  using MmaP = typename Traits::template MmaScores<Traits::HeadDimV>;
  using MmaG = typename Traits::template MmaGradient<Traits::HeadDim>;
  using MmaV = typename Traits::template MmaGradient<Traits::HeadDimV>;

  auto const operand_held = [&](auto mma, Part* data, auto columns) {
    if constexpr (Traits::HoldsInRegisters)
      return make_tensor<Part>(partition_shape_A(mma, Shape<Int<kAtomRows>, decltype(columns)>{}));
    using Layout = typename Traits::template LayoutHeld<decltype(columns)::value>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(data), Layout{}), Shape<Int<kAtomRows>, decltype(columns)>{},
                             make_coord(row_block, _0{}));
    return mma.get_slice(0).partition_fragment_A(rows);
  };
  auto const operand_b = [&](auto mma, Part* data, auto layout) {
    return mma.get_slice(0).partition_fragment_B(make_tensor(make_smem_ptr(data), layout));
  };
  Tensor fX = operand_held(MmaS{}, shared.held, Int<ColumnsQK>{});
  Tensor fXv = operand_held(MmaP{}, shared.held_v, Int<ColumnsV>{});
  Tensor fY = operand_b(MmaS{}, shared.streamed, typename Traits::template LayoutStreamed<ColumnsQK>{});
  Tensor fYv = operand_b(MmaP{}, shared.streamed_v, typename Traits::template LayoutStreamed<ColumnsV>{});
  // Their low parts, where they are in parts: the second half of a tile's columns.
  Tensor fY_low =
      operand_b(MmaS{}, shared.streamed + Step * ColumnsQK / 2, typename Traits::template LayoutStreamed<ColumnsQK>{});
  Tensor fYv_low =
      operand_b(MmaP{}, shared.streamed_v + Step * ColumnsV / 2, typename Traits::template LayoutStreamed<ColumnsV>{});
  Tensor fYt = operand_b(typename Traits::template MmaGradient<ColumnsQK>{}, shared.streamed,
                         typename Traits::template LayoutAcross<ColumnsQK>{});
  Tensor fYvt = operand_b(typename Traits::template MmaGradient<ColumnsV>{}, shared.streamed_v,
                          typename Traits::template LayoutAcross<ColumnsV>{});
  Tensor cS = partition_fragment_C(MmaS{}, Shape<Int<kAtomRows>, Int<Step>>{});
  Tensor cA = partition_fragment_C(MmaG{}, Shape<Int<kAtomRows>, Int<Traits::HeadDim>>{});
  Tensor cV = partition_fragment_C(MmaV{}, Shape<Int<kAtomRows>, Int<Traits::HeadDimV>>{});
  Tensor fP = make_tensor<Part>(partition_shape_A(MmaV{}, Shape<Int<kAtomRows>, Int<Traits::Parts * Step>>{}));
  Tensor fdS = make_tensor<Part>(partition_shape_A(MmaG{}, Shape<Int<kAtomRows>, Int<Traits::Parts * Step>>{}));
  Tensor S = rows_and_columns(cS);
  Tensor A = rows_and_columns(cA);
  Tensor V = rows_and_columns(cV);
  [[maybe_unused]] QuerySums<Traits> const query_sums(shared, row_block);
  // Of P that passes from one thread to that of the same number: what both hold lies in the same order.
  [[maybe_unused]] float4* const passed = shared.p + threadIdx.x / 32 % 4 * Traits::VectorsOfP * 32 + threadIdx.x % 32;
  Tensor words_p = recast<uint32_t>(fP);
  Tensor words_ds = recast<uint32_t>(fdS);
  clear(cA);
  clear(cV);
  warpgroup_fence_operand(cA);  // zeros that the compiler moved behind the first product would end the pipeline
  warpgroup_fence_operand(cV);

  // The thread's first row in hand, counted in the sequence, of which the second lies 8 further.
  auto const first_row_of = [&](ConsumerThread const& thread) {
    return tile.work.row0 + thread.warp_row % Traits::Held + thread.lane / 4;
  };
  int const turns = tile.turns(params);
  // What products are to be multiplied by where operands were scaled; made where there are keys.
  [[maybe_unused]] GradientScales scales{};
  if constexpr (kInParts) {
    if (turns > 0) scales = params.gradient_scales[tile.work.batch * params.heads_kv + tile.head_kv];
  }
  float query_scale = ScoreMod::query_scale(params);
  if constexpr (kInParts) {
    query_scale = fmaf(query_scale, kCutOffScores, query_scale) * scales.scores;
    scales.dp = fmaf(scales.dp, kCutOffScores, scales.dp);
  }
  // Statistics of the thread's columns, two neighbours at a time, where those are query rows. A tile's are read in the
  // turn before, in front of what this adds to dQ: behind it they would wait until memory has taken that. As far as
  // registers allow it: `lses` of heads of up to 128, where pairs have nothing, `deltas` of up to 64, but for the warps
  // that make them leave fewer.
  constexpr bool kReadsAhead =
      Traits::OfKeys && !kInParts && Traits::HeadDim <= (Traits::Pairs && !Traits::TwoBodies ? 64 : 128);
  constexpr bool kKeepsDeltas = kReadsAhead && Traits::HeadDim <= 64 && !Traits::HoldsSums;
  constexpr int kPairs = kReadsAhead ? Step / 8 : 1, kPairsAhead = Traits::Pairs && AddsQ && !kKeepsDeltas ? 4 : kPairs;
  float2 lses[kPairs] = {};
  [[maybe_unused]] float2 deltas[kPairs] = {};
  int quad_lane = threadIdx.x % 4;
  compute_here(quad_lane);
  auto const statistics_of = [&](int stage, int pair) {
    return reinterpret_cast<float4 const*>(shared.statistics[stage])[quad_lane + pair * 4];
  };
  auto const read_statistics = [&](int stage) {
    if constexpr (kReadsAhead) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairsAhead; ++pair) {
        float4 const x = statistics_of(stage, pair);
        lses[pair] = make_float2(x.x, x.z);
        if constexpr (!(Traits::Pairs && AddsQ)) deltas[pair] = make_float2(x.y, x.w);
      }
    }
  };
  // Where pairs have something there are fewer registers, and they wait until the weights need theirs no more.
  [[maybe_unused]] auto const read_deltas = [&](int stage) {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      float4 const x = statistics_of(stage, pair);
      deltas[pair] = make_float2(x.y, x.w);
    }
  };
  RowStatistics mine[2] = {};  // of the rows in hand, where those are query rows
  if constexpr (!Traits::OfKeys) {
    int const first_row = first_row_of(ConsumerThread());
    auto const* const rows = params.row_statistics +
                             StatisticsRows(params).first(params, tile.sequence, tile.work.batch, tile.head_q) +
                             first_row;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      mine[i] = first_row + row_of(i) < tile.view.n_q ? rows[row_of(i)] : RowStatistics{INFINITY, 0.f};
  }

  Range const tiles = tile.tiles, unmasked = tile.unmasked;
  auto& ring = standing.ring;
  auto& ring_v = Traits::HoldsSums ? standing.ring_v : standing.ring;
  [[maybe_unused]] auto &ds = standing.ds, &last_ds = standing.last_ds;
  auto mods_of = [&](auto changed, int head) {
    if constexpr (decltype(changed)::value) return ScoreMod(params, tile.work.batch, head);
    return ScoreMod(cutlass_ext::Scores{}, 0, 0);
  };
  auto release = [&](Barrier& barrier) {
    if (elect_one_sync()) barrier.arrive();
  };
  // What pairs have: bias and mask go into the scores, what dropout draws into P and dP.
  [[maybe_unused]] TilePairs<Traits> tile_pairs;

  // Of the rows of elements (i, j) and (i, j + 1) of scores.
  auto const lses_of = [&](auto changed, int stage, int i, int j) {
    constexpr bool kReadsAgain = decltype(changed)::value && Traits::TwoBodies && Traits::HeadDim > 64;
    if constexpr (!Traits::OfKeys) return make_float2(mine[i].lse_log2, mine[i].lse_log2);
    if (kReadsAhead && !kReadsAgain && j / 2 < kPairsAhead) return lses[j / 2 % kPairs];
    float4 const x = statistics_of(stage, j / 2);
    return make_float2(x.x, x.z);
  };
  auto const deltas_of = [&](int stage, int i, int j) {
    if constexpr (!Traits::OfKeys) return make_float2(mine[i].delta, mine[i].delta);
    if constexpr (kKeepsDeltas) return deltas[j / 2 % kPairs];
    float4 const x = statistics_of(stage, j / 2);
    return make_float2(x.y, x.w);
  };
  [[maybe_unused]] float row_sum[2] = {};  // of P in parts, where rows are in hand
  // From the products in S to P, an operand, and in S to P times the derivative of the score.
  auto weigh = [&](auto changed, int stage, int t, int head) __attribute__((always_inline)) {
    constexpr bool kChanged = decltype(changed)::value, kModified = kChanged && Traits::ScoreMods;
    warpgroup_fence_operand(cS);
    // p - j of an element of scores that are changed: rows in hand are query rows, or keys.
    auto const offset_of = [](int i, int j) { return Traits::OfKeys ? key_of(j) - row_of(i) : row_of(i) - key_of(j); };
    [[maybe_unused]] ScoreMod const score_mod = mods_of(std::bool_constant<kModified>{}, head);
    [[maybe_unused]] int offset = 0;
    float const scale = kModified && ScoreMod::changes(params) ? 1.f : query_scale;
    if constexpr (kModified) {
      ConsumerThread const thread;
      int const first_row = first_row_of(thread), first_column = t * Step + thread.lane % 4 * 2;
      Visibility const& visibility = tile.sequence.visibility;
      offset = Traits::OfKeys ? visibility.offset(first_column, first_row) : visibility.offset(first_row, first_column);
      if (ScoreMod::changes(params)) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
        score_mod.template apply<true>(S, offset, offset_of);
      }
    }
    if constexpr (kChanged && Traits::Hides) {
      if (tile_pairs.has_bias(params)) tile_pairs.add_bias(S, tile.bias_unit, params, shared, tile, shared.at[stage]);
      if (tile_pairs.is_mixed(shared.at[stage])) tile_pairs.hide(S);
    }
    if (!unmasked.contains(t)) {
      ConsumerThread const thread;
      int const first_row = first_row_of(thread), rows[2] = {first_row, first_row + row_of(1)};
      TileMask<Step / 4> mask(tile.view.counted_from(t * Step), rows, thread.lane);
      if constexpr (AddsQ) mask.hide_rows_from(tile.view.n_q, rows);
      mask.apply(S);
    }
    auto const exponentiate = [&](auto capped, auto const& derivative) {
      [[maybe_unused]] float of_tile[2] = {};
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const of_rows = lses_of(changed, stage, i, j);
          auto const weight = [&](int j, float lse) {
            float const score = S(i, j), p = exp2_approx(fmaf(score, scale, kInParts ? kShiftP - lse : -lse));
            S(i, j) = p;
            if constexpr (decltype(capped)::value) S(i, j) *= derivative(score, i, j);
            return p;
          };
          float const left = weight(j, of_rows.x), right = weight(j + 1, of_rows.y);
          if constexpr (SumsP) put_operand<Element>(words_p, i, j, left, right);
          if constexpr (kInParts && !Traits::OfKeys) of_tile[i] += left + right;
        }
      }
      if constexpr (kInParts && !Traits::OfKeys) row_sum[0] += of_tile[0], row_sum[1] += of_tile[1];
    };
    using Capped = std::bool_constant<kModified && SumsS>;
    if (Capped::value && ScoreMod::caps(params)) {
      // Without a branch an element where there are registers for it: 20 bytes spilled beside 128 keys a tile, 44
      // beside dK and dV of wide heads.
      constexpr bool kUnbranched = Step <= 64 && (Traits::HeadDim <= 128 || !Traits::OfKeys);
      if (kUnbranched && !(features_of(params) & feature::Alibi)) {
        float const per_softcap = reciprocal(score_mod.softcap_log2);
        exponentiate(Capped{},
                     [&](float score, int, int) { return ScoreMod::derivative_of_softcap(score, per_softcap); });
      } else {
        exponentiate(Capped{}, [&](float score, int i, int j) {
          return score == -INFINITY ? 0.f : score_mod.derivative(score, offset + offset_of(i, j));
        });
      }
    } else {
      exponentiate(std::false_type{}, nullptr);
    }
    if constexpr (SumsP && kChanged && Traits::Pairs) {
      if (tile_pairs.has_dropout(params)) tile_pairs.drop(words_p);
    }
  };
  // From weights and dP to dS, an operand.
  auto take_gradients = [&](auto changed, auto& cdP, int stage) __attribute__((always_inline)) {
    warpgroup_fence_operand(cdP);
    Tensor dP = rows_and_columns(cdP);
    auto const multiply = [&](auto const& ds_of) {
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2) {
        [[maybe_unused]] float4 p;
        if constexpr (kGetsP) p = passed[j / 2 * 32];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float2 const of_rows = deltas_of(stage, i, j);
          float left = S(i, j), right = S(i, j + 1);
          if constexpr (kGetsP) left = i == 0 ? p.x : p.z, right = i == 0 ? p.y : p.w;
          put_operand<Element>(words_ds, i, j, ds_of(i, j, left, of_rows.x), ds_of(i, j + 1, right, of_rows.y));
        }
      }
    };
    if (Traits::Pairs && decltype(changed)::value && tile_pairs.has_dropout(params)) {
      float const share = -reciprocal(params.dropout.scale);
      multiply([&](int i, int j, float p, float delta) {
        return tile_pairs.add_if_kept(i, j, p, dP(i, j), p * (delta * share));
      });
    } else {
      multiply([&](int i, int j, float p, float delta) { return p * (dP(i, j) - delta); });
    }
  };
  // Of the rows in hand, in parts: worked out where it is wanted, or all addresses are kept in registers.
  [[maybe_unused]] auto const held_here = [&](auto mma, Part* data, auto columns) {
    using Layout = typename Traits::template LayoutHeld<decltype(columns)::value>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(data + anew(0)), Layout{}),
                             Shape<Int<kAtomRows>, decltype(columns)>{}, make_coord(row_block, _0{}));
    return mma.get_slice(0).partition_fragment_A(rows);
  };
  auto issue_s = [&](int stage) {
    if constexpr (kInParts) {
      constexpr int kSteps = Traits::HeadDim / 16;
      gemm_async<0, kSteps, kSteps>(MmaS{}, held_here(MmaS{}, shared.held, Int<ColumnsQK>{}), fY(_, _, _, stage),
                                    fY_low(_, _, _, stage), cS, true);
    } else {
      gemm_async<Traits::HeadDim / 16>(MmaS{}, fX, fY(_, _, _, stage), cS, true);
    }
  };
  auto issue_dp = [&](auto& cdP, int stage) {
    gemm_async<Traits::HeadDimV / 16>(MmaP{}, fXv, fYv(_, _, _, stage), cdP, true);
  };
  // The same of a panel of columns in parts: of longer sums the tensor cores cut off so much that where all terms have
  // one sign dP - delta errs more than on CUDA cores.
  [[maybe_unused]] auto const issue_panel_of_dp = [&](auto& cdP, int stage, auto panel) {
    constexpr int kSteps = kPanel / 16;
    gemm_async<decltype(panel)::value * kSteps, kSteps, Traits::HeadDimV / 16>(
        MmaP{}, held_here(MmaP{}, shared.held_v, Int<ColumnsV>{}), fYv(_, _, _, stage), fYv_low(_, _, _, stage), cdP,
        true);
  };
  auto issue_dv = [&](int stage) { gemm_async<Step / 16>(MmaV{}, fP, fYvt(_, _, _, stage), cV, false); };
  auto issue_gradient = [&](int stage) { gemm_async<Step / 16>(MmaG{}, fdS, fYt(_, _, _, stage), cA, false); };
  auto scores_of_a_tile = [] { return partition_fragment_C(MmaP{}, Shape<Int<kAtomRows>, Int<Step>>{}); };

  // WGMMAs in flight forbid a branch around their issue, and are not to be in flight at the end of a turn: what is
  // issued for a tile behind the last is of whatever lies there.
  int t = tiles.begin, head = tile.head_q;
  // What the next tile that is due adds to dQ. Where, is worked out when it is wanted: registers of what is being
  // added, its address among them, wait for memory before they are written again.
  [[maybe_unused]] float* sums_to = nullptr;
  [[maybe_unused]] int due_t = tiles.begin, due_head = tile.head_q, due_held = 0;
  [[maybe_unused]] int const tiles_of_rows = tiles_of_head(tile.sequence.visibility.n_q, Step);
  [[maybe_unused]] auto const find_sums = [&] {
    if constexpr (Traits::Hides) {
      sums_to += query_sums.first();
      return;
    }
    if constexpr (Traits::HoldsSums) {
      due_held = (due_head - tile.head_q) * tiles_of_rows + due_t;
    } else if (due_t == tiles.begin) {
      sums_to = sums_of_tile(params, tile, due_head, due_t) + query_sums.first();
    } else {
      sums_to += Step * Traits::HeadDim;
    }
    if (++due_t == tiles.end) due_t = tiles.begin, ++due_head;
  };
  [[maybe_unused]] auto const add_sums = [&](auto& sums) {
    warpgroup_fence_operand(sums);
    if constexpr (!Traits::TakesTurns) find_sums();
    if constexpr (Traits::HoldsSums) {
      release(shared.ds_empty[last_ds.stage]);
      query_sums.hold(sums, due_held);
    } else {
      query_sums.add(sums, sums_to);
    }
  };
  // Whether the warpgroup adds what is due before turn `turn`: in shared memory always to the same tiles.
  [[maybe_unused]] auto const takes_sums = [&](int turn) {
    return !Traits::TakesTurns || (Traits::HoldsSums ? due_held % 2 == row_block : turn % 2 != row_block);
  };
  if constexpr (Traits::HoldsSums) {
    if (tile.begins_head()) {
      for (int held = row_block; held < tile.heads * tiles_of_rows; held += 2) {
        CUTE_UNROLL
        for (int i = 0; i < Traits::HeadDim / 8; ++i) query_sums.held(held)[i * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  }
  if (turns > 0) {
    if constexpr (!kGetsP) shared.held_full.wait_for(tile.held_phase);
    (kGetsP ? shared.full_v : shared.full)[ring.stage].wait_for(ring.phase);
    if constexpr (SumsS && !Traits::HoldsSums) shared.held_v_full.wait_for(tile.held_phase);
  }
  if constexpr (Traits::HoldsInRegisters) {
    if (turns > 0) {  // else the next tile's copies may be on their way there
      load_held<Traits::Held>(fX, shared.held);
      if constexpr (Traits::HoldsSums) {
        CUTE_UNROLL
        for (int block = 0; block < Traits::Streaming; ++block) {
          shared.full_v[ring_v.stage].wait_for(ring_v.phase);
          if (block == row_block) load_held<Step>(fXv, shared.streamed_v + ring_v.stage * Step * ColumnsV);
          __syncwarp();
          release(shared.empty_v[ring_v.stage]);
          ring_v.advance();
        }
      } else {
        load_held<Traits::Held>(fXv, shared.held_v);
        __syncwarp();
        release(shared.held_v_empty);
      }
    }
  }
  if constexpr (kGetsP) {
    issue_dp(cS, ring.stage);
  } else {
    issue_s(ring.stage);
  }
  read_statistics(ring.stage);
  // What the tile of a stage, the next one, wants, by the body of a turn that comes before.
  [[maybe_unused]] int changed_next = 0;
  [[maybe_unused]] auto const ask_for = [&](auto changed, int stage, int t, int head) {
    if constexpr (Traits::DropsAlone) {
      tile_pairs.draw_for(params, tile, t, head);
    } else {
      StreamedTile const& next = shared.at[stage];
      if constexpr (Traits::TwoBodies)
        changed_next = decltype(changed)::value && tile_pairs.changes_every_tile(params) ? 1 : next.mixed;
      tile_pairs.template ask<decltype(changed)::value>(params, shared, tile, next);
    }
  };
  if constexpr (Traits::Pairs) {
    if (turns > 0) ask_for(std::true_type{}, ring.stage, t, head);
  }
  warpgroup_wait<0>();
  // `changed`: whether anything but visibility changes scores, or what becomes of them.
  auto const take_turn = [&](auto changed, int turn) __attribute__((always_inline)) {
    // Accumulators of one turn are made in it: WGMMA's zero is no write to the compiler, which would keep old sums.
    Tensor cdP = scores_of_a_tile();
    [[maybe_unused]] auto cQ = QuerySums<Traits>::accumulator();
    int const stage = ring.stage, stage_v = ring_v.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    auto const wait_for_next = [&] {
      if (turn + 1 < turns) shared.full[next.stage].wait_for(next.phase);
    };
    if constexpr (Traits::Hides) t = shared.at[stage].tile, head = shared.at[stage].head;
    shared.full_v[stage_v].wait_for(ring_v.phase);
    if constexpr (SumsS) issue_dp(cdP, stage_v);
    weigh(changed, stage, t, head);
    // The weights are worked out beside dP: the branches of a wait keep the assembler from moving the one for dP in
    // front of them.
    if constexpr (AddsQ) {
      warpgroup_fence_operand(cS);
      if constexpr (Traits::Pairs && kKeepsDeltas) read_deltas(stage);
      wait_for_next();
    }
    if constexpr (AddsQ && Traits::Pairs) {
      // In front of the wait for dP: behind it the assembler puts most of the weights, too, and dV's product begins
      // when the gradients have been worked out.
      issue_dv(stage_v);
      warpgroup_wait<1>();
    } else {
      if constexpr (SumsS) warpgroup_wait<0>();
      if constexpr (SumsP) issue_dv(stage_v);
    }
    if constexpr (SumsS) take_gradients(changed, cdP, stage);
    if constexpr (AddsQ) {
      if (turn > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
      if constexpr (Traits::HoldsSums) shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
      query_sums.share(words_ds, ds.stage);
      if constexpr (kReadsDS || Traits::TakesTurns) {
        warpgroup_wait<0>();  // P's registers are wanted, or no WGMMA is to be in flight where the turns part
        warpgroup_fence_operand(cV);
        release(shared.empty_v[stage_v]);
      }
    }
    auto const go_on = [&]() __attribute__((always_inline)) {
      if constexpr (kReadsDS) {
        gemm_async<Step / 16>(typename Traits::MmaKeys{}, query_sums.own_ds(ds.stage), fYt(_, _, _, stage), cA, false);
      } else if constexpr (SumsS) {
        issue_gradient(stage);
      }
      if constexpr (!AddsQ) wait_for_next();
      // Behind the last tile of all, of what is there still: the next stage is another tile's.
      int const following = Traits::Persistent && turn + 1 == turns ? stage : next.stage;
      issue_s(following);
      read_statistics(following);
      if constexpr (Traits::Pairs) {
        bool const ends = t + 1 == tiles.end;
        if (turn + 1 < turns) ask_for(changed, next.stage, ends ? tiles.begin : t + 1, ends ? head + 1 : head);
      }
    };
    if constexpr (Traits::TakesTurns) {
      if (turn > 0) find_sums();
      if (turn > 0 && takes_sums(turn)) {
        query_sums.issue(cQ, last_ds.stage);
        go_on();
        warpgroup_wait<2>();
        add_sums(cQ);
        warpgroup_wait<0>();
      } else {
        go_on();
        warpgroup_wait<0>();
      }
    } else {
      if constexpr (AddsQ) query_sums.issue(cQ, last_ds.stage);
      go_on();
      if constexpr (SumsP) warpgroup_wait<SumsS ? 2 : 1>();
      if constexpr (SumsP && !kReadsDS) warpgroup_fence_operand(cV);
      if constexpr (!kReadsDS) release(shared.empty_v[stage_v]);
      if constexpr (AddsQ) {
        if (turn > 0) add_sums(cQ);
      }
    }
    if constexpr (AddsQ) {
      last_ds = ds;
      ds.advance();
    }
    warpgroup_wait<0>();
    if constexpr (AddsQ && Traits::Hides) sums_to = shared.at[stage].sums;
    if constexpr (Traits::OfKeys) {
      shared.empty[stage].arrive();  // every lane for itself: each has read statistics
    } else {
      release(shared.empty[stage]);
    }
    ring = next;
    if constexpr (Traits::HoldsSums) ring_v.advance();
    if (!Traits::Hides && ++t == tiles.end) t = tiles.begin, ++head;
  };
  // Where dV and dK are two warpgroups', which pass P and dS on: the products of the next tile that wait for neither
  // are under way beside the last of this one.
  [[maybe_unused]] auto const take_turn_apart = [&](auto changed, int turn) __attribute__((always_inline)) {
    bool const is_last = turn + 1 == turns;
    int const stage = ring.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    int const following = is_last ? stage : next.stage;  // behind the last tile, of what is there still
    auto const share_ds = [&] {
      shared.ds_empty[stage].wait_for(ring.phase ^ 1);
      query_sums.share(words_ds, stage);
    };
    if constexpr (What == Sums::Values) {
      weigh(changed, stage, t, head);
      shared.p_empty.wait_for(stage ^ 1);
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; j += 2)
        passed[j / 2 * 32] = make_float4(S(0, j), S(0, j + 1), S(1, j), S(1, j + 1));
      __syncwarp();
      release(shared.p_full);
      warpgroup_fence_operand(cS);
      shared.full_v[stage].wait_for(ring.phase);
      if (!is_last) shared.full[next.stage].wait_for(next.phase);
      issue_dv(stage);
      warpgroup_wait<0>();  // there are no registers for P and the next S
      issue_s(following);
      warpgroup_wait<1>();
      warpgroup_fence_operand(cV);
      release(shared.empty_v[stage]);
      warpgroup_wait<0>();
    } else {
      if (!is_last) release(shared.empty_v[stage]);  // dP is there
      shared.full[stage].wait_for(ring.phase);
      shared.p_full.wait_for(stage);
      take_gradients(changed, cS, stage);
      __syncwarp();
      release(shared.p_empty);
      share_ds();
      warpgroup_fence_operand(cS);
      if (!is_last) shared.full_v[next.stage].wait_for(next.phase);
      issue_gradient(stage);
      issue_dp(cS, following);
      warpgroup_wait<0>();
      if (is_last) release(shared.empty_v[stage]);
    }
    shared.empty[stage].arrive();  // every lane for itself: each has read statistics
    ring = next;
    if (++t == tiles.end) t = tiles.begin, ++head;
  };
  [[maybe_unused]] auto const take_turn_in_parts = [&](int turn) __attribute__((always_inline)) {
    constexpr int kPanels = Traits::HeadDimV / kPanel;
    Tensor cdP = scores_of_a_tile();
    [[maybe_unused]] Tensor cdP_rest = scores_of_a_tile();
    int const stage = ring.stage;
    RingPosition<Traits::Stages> next = ring;
    next.advance();
    float of_rows[2] = {1.f, 1.f};
    auto const wait_for_next = [&] {
      if (turn + 1 < turns) shared.full[next.stage].wait_for(next.phase);
    };
    auto const issue_next = [&] {
      if constexpr (!SumsS) wait_for_next();
      issue_s(next.stage);
    };
    auto const gradients = [&] {
      warpgroup_fence_operand(cdP);
      if constexpr (kPanels > 1) warpgroup_fence_operand(cdP_rest);
      Tensor dP = rows_and_columns(cdP), dP_rest = rows_and_columns(cdP_rest);
      auto const difference = [&](int i, int j, float delta) {
        float const first = fmaf(dP(i, j), scales.dp, -delta);
        return kPanels == 1 ? first : fmaf(dP_rest(i, j), scales.dp, first);
      };
      split_gradients(S, words_ds, difference, [&](int i, int j) { return deltas_of(stage, i, j); }, of_rows);
    };
    shared.full_v[stage].wait_for(ring.phase);
    if constexpr (SumsS) issue_panel_of_dp(cdP, stage, _0{});
    if constexpr (SumsS && kPanels > 1) issue_panel_of_dp(cdP_rest, stage, _1{});
    weigh(std::false_type{}, stage, t, head);
    if constexpr (SumsS) {
      wait_for_next();  // here, where its branches keep the weights in front of the wait for dP
      warpgroup_wait<0>();
    }
    if constexpr (SumsP) {
      float const ones[2] = {1.f, 1.f};
      if constexpr (SumsS) {
        add_product<Traits, ColumnsV, false>(V, fP, shared.streamed_v, stage, ones, gradients);
      } else {
        add_product<Traits, ColumnsV, true>(V, fP, shared.streamed_v, stage, ones, issue_next);
      }
    } else {
      gradients();
    }
    release(shared.empty_v[stage]);
    if constexpr (SumsS) add_product<Traits, ColumnsQK, true>(A, fdS, shared.streamed, stage, of_rows, issue_next);
    warpgroup_wait<0>();
    if constexpr (Traits::OfKeys) {
      shared.empty[stage].arrive();  // every lane for itself: each has read statistics
    } else {
      release(shared.empty[stage]);
    }
    ring = next;
    if (++t == tiles.end) t = tiles.begin, ++head;
  };
  CUTE_NO_UNROLL
  for (int turn = 0; turn < turns; ++turn) {
    if constexpr (kInParts) {
      take_turn_in_parts(turn);
    } else if constexpr (Traits::AddsApart) {
      take_turn_apart(std::false_type{}, turn);
    } else if constexpr (Traits::TwoBodies) {
      // No WGMMA is in flight here, and the assembler is to see that a warp does not part.
      if (__any_sync(0xffffffffu, changed_next)) {
        take_turn(std::true_type{}, turn);
      } else {
        take_turn(std::false_type{}, turn);
      }
    } else {
      take_turn(std::bool_constant < Traits::ScoreMods || Traits::Pairs > {}, turn);
    }
  }
  if constexpr (AddsQ) {
    // Waited for by all: what is left next goes where the tile before this turn's dS has been read.
    if (turns > 0) shared.ds_full[last_ds.stage].wait_for(last_ds.phase);
    if constexpr (Traits::TakesTurns) find_sums();
    if (turns > 0 && takes_sums(turns)) {
      Tensor cQ = QuerySums<Traits>::accumulator();
      query_sums.issue(cQ, last_ds.stage);
      warpgroup_wait<0>();
      add_sums(cQ);
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(cS);
  warpgroup_fence_operand(cA);
  warpgroup_fence_operand(cV);
  if constexpr (Traits::Persistent) {
    if (turns > 0) {
      release(shared.held_empty);
      if constexpr (!Traits::HoldsInRegisters) release(shared.held_v_empty);
    }
  }
  if constexpr (Traits::StagesSums) {
    tma_store_wait<0>();  // `staging` is written again, and is to be there until it has been read
    __syncwarp();
  }

  ConsumerThread const thread;
  int const lane = thread.lane, warp_row = thread.warp_row % Traits::Held;
  if constexpr (kInParts) {
    // What the tensor cores cut off is made up for, where sums have a tile's terms.
    constexpr float kCutOff = kCutOffSum * Step / kKeysOfCutOff;
    float factors[2];
    auto const factor_of = [&](float scale) {
      int const row = tile.work.row0 + warp_row + lane / 4;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        bool const sums_up = tile.view.keys_of_row(row + row_of(i)).size() >= Step;
        factors[i] = (sums_up ? fmaf(scale, kCutOff, scale) : scale) * (1.f / (1 << kShiftP));
      }
    };
    auto const store = [&](void* data, Strides const& stride, auto const& sums, int cols, int head) {
      float* const to = static_cast<float*>(data) + tile.sequence.batch * stride.batch + head * stride.head +
                        (int64_t(tile.held_row0) + tile.work.row0 + warp_row) * stride.row;
      store_floats(to, stride.row, tile.rows() - warp_row, cols, sums, factors, lane);
    };
    float const scale = ScoreMod::gradient_scale(params);
    if constexpr (SumsP) {
      factor_of(scales.dv);
      store(params.dv, params.dv_stride, V, params.head_dim_v, tile.head_kv);
    }
    if constexpr (SumsS && Traits::OfKeys) {
      factor_of(scale * scales.dk);
      store(params.dk, params.dk_stride, A, params.head_dim, tile.head_kv);
    }
    if constexpr (!Traits::OfKeys) {
      factor_of(scale * scales.dq);
      // What P lacks to sum to 1: dQ gets it here, dK and dV from the lse that is left for their launch.
      float const sink_log2 = params.sink_of(tile.head_q) * kLog2e;
      RowStatistics* const rows = params.row_statistics +
                                  StatisticsRows(params).first(params, tile.sequence, tile.work.batch, tile.head_q) +
                                  tile.work.row0 + warp_row + lane / 4;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float const sum = sum_for_one(warp_sum<4, 1>(row_sum[i]) * (1.f / (1 << kShiftP)), sink_log2, mine[i].lse_log2);
        factors[i] *= reciprocal(sum);
        if (lane % 4 == 0 && lane / 4 + row_of(i) < tile.rows() - warp_row)
          rows[row_of(i)].lse_log2 = mine[i].lse_log2 + log2f(sum);
      }
      store(params.dq, params.dq_stride, A, params.head_dim, tile.head_q);
    }
  } else {
    auto* staging = shared.staging + part_of_warp<Traits>() * Traits::Staged;
    if constexpr (Traits::HoldsSums) {
      shared.ds_empty[ds.stage].wait_for(ds.phase ^ 1);
      staging = shared.ds + (ds.stage * Traits::B_c + warp_row) * kPanel;
    }
    if constexpr (Traits::AddsApart) {  // what the warp has passed on there has been taken
      if constexpr (SumsP) {
        shared.p_empty.wait_for(ring.stage ^ 1);
        staging = reinterpret_cast<Element*>(passed - lane);
      } else {
        shared.ds_empty[ring.stage].wait_for(ring.phase ^ 1);
        staging = shared.ds + (ring.stage * Traits::B_c + warp_row) * kPanel;
      }
    }
    auto const store = [&](void* data, Strides const& stride, auto const& sums, int cols, auto head_dim) {
      int64_t const row = tile.held_row0 + tile.work.row0 + warp_row + lane / 8;
      auto* const to = static_cast<Element*>(data) + tile.sequence.batch * stride.batch +
                       (Traits::OfKeys ? tile.head_kv : tile.head_q) * stride.head + row * stride.row;
      store_rows<Stored<Traits, decltype(head_dim)::value>>(
          to, [&](int pass) { return pass * 4 * stride.row; }, tile.rows() - warp_row, cols, sums, staging, lane);
    };
    // What a split has is added up, in their order, by the launch that follows (sums.hpp): accumulators as they are.
    [[maybe_unused]] auto const leave = [&](auto const& sums, int64_t from, auto head_dim) {
      constexpr int kColumns = decltype(head_dim)::value;
      using Order = SumsOfTile<kPanel>;
      int const head = Traits::OfKeys ? tile.head_kv : tile.head_q;
      int const row = tile.work.row0 + warp_row / kAtomRows * kAtomRows;
      auto* const to = reinterpret_cast<float4*>(
          params.split_sums + from +
          SplitSums(params, Traits::Of)
              .first(params, tile.sequence, tile.work.batch, head, row, tile.work.split, kColumns));
      CUTE_UNROLL
      for (int e = 0; e < size(sums); e += 4) {
        constexpr int kOfAPanel = kPanel / 2;  // of a thread
        to[Order::first(e / kOfAPanel, warp_row % kAtomRows / 16) + e % kOfAPanel * 8 + lane] =
            make_float4(sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
      }
    };
    if constexpr (SumsP && Traits::Pairs) {
      CUTE_UNROLL
      for (int e = 0; e < size(V); ++e) V(e) *= params.dropout.scale;
    }
    bool const is_split = Traits::Splits && params.splits() > 1;
    if constexpr (SumsP) {
      if (is_split) {
        leave(cV, SplitSums(params, Traits::Of).size(params.splits(), Traits::HeadDim), Int<Traits::HeadDimV>{});
      } else {
        store(params.dv, params.dv_stride, V, params.head_dim_v, Int<Traits::HeadDimV>{});
      }
    }
    if constexpr (SumsS) {
      CUTE_UNROLL
      for (int e = 0; e < size(A); ++e) A(e) *= factor_of_gradients(params);
      Strides const& stride = Traits::OfKeys ? params.dk_stride : params.dq_stride;
      if (is_split) {
        leave(cA, 0, Int<Traits::HeadDim>{});
      } else {
        store(Traits::OfKeys ? params.dk : params.dq, stride, A, params.head_dim, Int<Traits::HeadDim>{});
      }
    }
    if constexpr (Traits::HoldsSums) {
      if (tile.ends_head()) store_held_sums(params, query_sums, tile, row_block);
    }
  }
}

/// The CTA's shared memory. Where a turn has two bodies its address comes from a lane of the warp: then the assembler
/// sees in both of them that it is the warp's, and works out descriptors and barriers once a warp (44 instructions of a
/// turn less).
template <class Traits>
CUTE_DEVICE typename Traits::SharedStorage& shared_of(unsigned char* smem) {
  void* at = smem;
  if constexpr (Traits::TwoBodies)
    at = __cvta_shared_to_generic(__shfl_sync(0xffffffffu, cast_smem_ptr_to_uint(smem), 0));
  return *static_cast<typename Traits::SharedStorage*>(at);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    backward_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ GradientMaps const maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = shared_of<Traits>(smem);
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if constexpr (Traits::Parts > 1) {
    if (params.stands_aside()) return;
  }
  if constexpr (!Traits::Persistent) {
    GradientTile<Traits> const here(params, blockIdx.x);
    if (here.rows() <= 0) return;  // packed: the launch counts the tiles of the longest sequence for each
    if (threadIdx.x == 0) shared.tiles[0] = here;
    if constexpr (Traits::Hides) {
      if (warp == 0 && params.tile_map) {
        int const seen = here.count_seen(params);
        if (threadIdx.x == 0) shared.tiles[0].seen_tiles = seen;
      }
    }
  }
  if (warp == 0) {
    for (CUtensorMap const* map : {&maps.held, &maps.held_v, &maps.streamed, &maps.streamed_v})
      cute::prefetch_tma_descriptor(map);
    if (threadIdx.x == 0) {
      constexpr int kReaders = 4 * Traits::Consumers;  // every consumer warp says when it is done with a tile
      for (auto* barrier : {&shared.held_full, &shared.held_v_full, &shared.tail, &shared.tail_v}) barrier->init(1);
      for (auto* barrier : {&shared.held_empty, &shared.held_v_empty}) barrier->init(kReaders);
      for (auto& barrier : shared.ds_full) barrier.init(Traits::AddsApart ? 4 : kReaders);
      if constexpr (Traits::EmptiesDS) {
        for (auto& barrier : shared.ds_empty) barrier.init(4);
      }
      if constexpr (Traits::AddsApart) {
        for (auto* barrier : {&shared.p_full, &shared.p_empty}) barrier->init(4);
      }
      if constexpr (Traits::HoldsSums) shared.head_taken.init(1), shared.rows_known.init(2 * 32);
      for (auto& barrier : shared.tile_full) barrier.init(1);
      for (auto& barrier : shared.tile_empty) barrier.init(kReaders + 1);  // and the other warp that copies
      CUTE_UNROLL
      for (int i = 0; i < Traits::Stages; ++i) {
        shared.full[i].init(1), shared.full_v[i].init(1);
        shared.empty[i].init(4 * Traits::Streaming * (Traits::OfKeys ? 32 : 1));
        shared.empty_v[i].init(4 * Traits::Streaming);
      }
      cutlass::arch::fence_barrier_init();
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (warp == 0) {
      StreamCopy<Traits, false> copy(params, maps, shared);
      if constexpr (Traits::Persistent) {
        TileTaker<Traits> tiles{params, shared};
        while (auto const* tile = tiles.next()) copy(*tile);
      } else {
        copy(shared.tiles[0]);
      }
    }
    if (warp == 1) {
      StreamCopy<Traits, true> copy(params, maps, shared);
      TileReader<Traits> tiles{shared};
      do {
        auto const* const tile = tiles.here();
        if (!tile) break;
        copy(*tile);
      } while (tiles.release());
    }
    if constexpr (Traits::HoldsSums) {
      if (warp >= 2) know_rows<Traits>(params, shared);
    }
    return;
  }
  TileReader<Traits> tiles{shared};
  Standing<Traits> standing;
  auto const go_through = [&](auto const& work_on) __attribute__((always_inline)) {
    do {
      auto const* const tile = tiles.here();
      if (!tile) break;
      work_on(*tile);
    } while (tiles.release());
  };
  if constexpr (Traits::AddsApart) {
    if (warpgroup == Traits::Consumers) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::RegistersOfQueries>();
      go_through([&](auto const& tile) { add_to_queries(params, shared, tile, standing); });
    } else if (warpgroup == 1) {
      cutlass::arch::warpgroup_reg_alloc<Traits::RegistersOfValues>();
      go_through([&](auto const& tile) { accumulate<Traits, Sums::Values>(params, shared, tile, 0, standing); });
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
      go_through([&](auto const& tile) { accumulate<Traits, Sums::Keys>(params, shared, tile, 0, standing); });
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
  go_through([&](auto const& tile) __attribute__((always_inline)) {
    if constexpr (Traits::Apart) {
      if (warpgroup == 1) {
        accumulate<Traits, Sums::Values>(params, shared, tile, 0, standing);
      } else {
        accumulate<Traits, Sums::Keys>(params, shared, tile, 0, standing);
      }
    } else {
      constexpr Sums kSums = Traits::AddsToQueries ? Sums::All : Traits::OfKeys ? Sums::KeysAndValues : Sums::Queries;
      accumulate<Traits, kSums>(params, shared, tile, warpgroup - 1, standing);
    }
  });
}

/// One side's kernel at one tile shape, a CTA for each tile of that side, or, with sums of queries, as many as there is
/// room for.
template <Axis Of, int B_r, int B_c, int HeadDim, int HeadDimV, class Element, int Stages, Features Mods = 0,
          SumsOfQueries OfQueries = SumsOfQueries::None>
struct Backward {
  using Traits = BackwardTraits<Of, B_r, B_c, HeadDim, HeadDimV, Element, Stages, Mods, OfQueries>;
  static constexpr char const* kFamily = "sm90";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &backward_kernel<Traits>;
  static constexpr Kind kKind = Traits::HoldsSums       ? Kind::HeadGradients
                                : Traits::AddsToQueries ? Kind::AllGradients
                                : Traits::OfKeys        ? Kind::KeyGradients
                                                        : Kind::QueryGradients;
  static constexpr Features kTakes = Traits::Mods | feature::Sink | feature::Packed | feature::kUnlike;
  /// Softcap's derivative is found in scores, from which what has been added since is not taken again.
  static bool takes_shape(Params const& params) {
    int const heads = params.heads_q / params.heads_kv;
    if (Traits::HoldsSums && int64_t(tiles_of_head(params.n_q, B_r)) * heads > kMostHeldTiles) return false;
    if (Traits::DropsAlone && !has_dropout(params)) return false;
    return !(ScoreMod::caps(params) && has_bias(params));
  }
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have on Hopper");
};

}  // namespace cutlass_ext::sm90

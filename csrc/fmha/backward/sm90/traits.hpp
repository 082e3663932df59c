// What a backward kernel is made of: tiles, layouts, products, registers, shared memory. Used by the other files here.
#pragma once

#include <cutlass/arch/barrier.h>

#include "../../cute_tensor.hpp"
#include "../../features.hpp"
#include "../../sm90/warpgroup.hpp"
#include "folded_statistics.hpp"
#include "pairs.hpp"
#include "plain_bias.hpp"
#include "sections.hpp"
#include "tile_scheduler.hpp"

namespace cutlass_ext::sm90 {

/// What a consumer warpgroup sums up.
enum class Accumulates {
  KeysAndValues,  ///< dK and dV of 64 keys
  Values,         ///< dV of 64 keys, of which another warpgroup has dK: two accumulators of wide heads are too many
  Keys,
  Queries,  ///< dQ of 64 rows
  All,      ///< dK and dV of 64 keys, and what these and the other warpgroup's add to dQ
};

/// Whether that has a product with P, and one with dS: sums of dV, and of dK or dQ.
constexpr bool sums_p(Accumulates what) { return what != Accumulates::Keys && what != Accumulates::Queries; }
constexpr bool sums_ds(Accumulates what) { return what != Accumulates::Values; }

/// Where a kernel over tiles of keys adds up dQ.
enum class DqAccumulation {
  None,     ///< another launch does
  Global,   ///< CTAs add to it, in any order or in their own (dq_semaphore.hpp)
  Shared,   ///< a CTA has all tiles of a head, one after the other
  Cluster,  ///< CTAs of a cluster have a tile of a head each, and pass sums on from the last keys to the first
};

/// lse and delta of the rows of each stage. Not at the end of shared memory: of a product with them compute-sanitizer
/// takes the second half, which is the first once more, for what lies behind.
template <int Stages>
struct ColumnsOfStages {
  alignas(1024) ColumnsOfRow lse_columns[Stages][kColumns];
  ColumnsOfRow delta_columns[Stages][kColumns];
};
template <>
struct ColumnsOfStages<0> {};

/// Of a cluster, what the other CTA's `Keys` keys make this one add to dQ: two panels of their columns, and their dS.
template <class Part, int Keys, int Rows>
struct FromOtherCta {
  alignas(1024) Part other_held[Keys * 2 * kPanel];
  alignas(1024) Part other_ds[Rows * Keys];
};
template <class Part, int Rows>
struct FromOtherCta<Part, 0, Rows> {};

/// Of each of `Warps`, for sums of dQ that come from another CTA of a cluster; and for those that go, either way.
template <int Warps>
struct BarriersOfSums {
  Barrier sums_full[Warps], sums_empty[2][Warps];
};
template <>
struct BarriersOfSums<0> {};

template <bool IsOne>
struct BarriersOfCluster {
  Barrier ds_full, sent_ds_empty;  // of the other's dS, and of what has been sent there
  Barrier index_full, index_read;  // of the next tile's index, from the first CTA to the other
  alignas(8) unsigned index;
};
template <>
struct BarriersOfCluster<false> {};

/// Where dV and dK of a tile are two warpgroups' (`SplitsDkDv`), and there are sums of queries, a third makes what is
/// added to these, and S is computed by that of dV, which passes P on.
template <Axis Of_, int B_r_, int B_c_, int HeadDim_, int HeadDimV_, class Element_, int Stages_, Features Mods_,
          DqAccumulation OfQueries>
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
  static constexpr bool AccumulatesDq = OfQueries != DqAccumulation::None,
                        DqInShared = OfQueries == DqAccumulation::Shared,
                        DqThroughCluster = OfQueries == DqAccumulation::Cluster,
                        OwnsHeads = DqInShared || DqThroughCluster;
  /// Whether nothing but a bias that the copy engine brings and a mask may change scores, beside sums in shared memory
  /// a mask alone: then dQ is made, and a tile goes through the others, but for those that a mask hides, as without.
  static constexpr bool IsPlain =
      !Mods || (AccumulatesDq && !(Mods & ~(DqInShared ? feature::Mask : feature::Bias | feature::Mask)));
  static constexpr bool PlainBias = IsPlain && (Mods & feature::Bias), PlainMask = IsPlain && (Mods & feature::Mask),
                        SkipsTiles = IsPlain ? PlainMask : Hides;
  // Whether a CTA works on one tile after the other: the next one's first copies land while a tile's gradients are
  // stored. Else the launch has a CTA for each: with score changes 64 and 104 bytes spilled.
  static constexpr bool Persistent = AccumulatesDq && (IsPlain || DropsAlone);
  static constexpr int TilesKnown = Persistent ? 2 : 1;
  using Element = Element_;
  using Part = typename Operand<Element>::Part;
  static constexpr int Parts = Operand<Element>::Parts;
  // Whether several CTAs may share a tile in hand: each goes through some of the heads, and of the tiles.
  static constexpr bool Splits = (!Pairs || IsPlain) && Parts == 1 && !OwnsHeads;
  CUTE_DEVICE static SplitSums split_sums(BackwardParams const& params) { return {params, Of, OfKeys ? B_c : B_r}; }
  /// CTAs that share a tile of keys. Wide heads have registers for 64 keys a CTA alone, and a multiprocessor sends 16
  /// bytes a clock at most to be added in memory (3.9 TB/s from all of an H200's, in any way), which 64 keys wait for.
  /// So two CTAs copy what passes by once for both, pass dS to each other, and add to a half of the columns each. At
  /// head_dim 256 there is room for one stage of dout then, and (2, 8192, 8, 256) takes 6.3 ms for 5.9.
  static constexpr int Cluster = AccumulatesDq && HeadDim > 128 && HeadDim <= 192 ? 2 : 1;
  static constexpr int Held = OfKeys ? B_c / Cluster : B_r;  // rows in hand of a CTA
  static constexpr int OthersKeys = Cluster > 1 ? Held : 0;  // of a cluster's other CTA
  static constexpr int Step = OfKeys ? B_r : B_c;            // rows of a streamed tile
  /// Whether each of two warpgroups sums up one of dK and dV, for the same keys.
  static constexpr bool SplitsDkDv = OfKeys && Held == kAtomRows, HasDqWarpgroup = SplitsDkDv && AccumulatesDq;
  static constexpr int Streaming = SplitsDkDv ? 2 : Held / kAtomRows;  // warpgroups that go through the streams
  static constexpr int Consumers = Streaming + HasDqWarpgroup;
  /// Whether three warpgroups share the registers: each has them for what a turn sums up, and for little else.
  static constexpr bool ThreeConsumers = AccumulatesDq && Streaming == 3;
  /// Whether a row's lse and delta come into S and dP by products (StatisticsProducer): read from shared memory by
  /// every thread, they take a tenth to a sixth of what it can give, and what dropout leaves out wants delta by itself.
  static constexpr bool FoldsStatistics = AccumulatesDq && !HasDqWarpgroup && !DqInShared && IsPlain;
  /// Whether consumers read those of the rows that pass by.
  static constexpr bool ReadsStatistics = OfKeys && !FoldsStatistics;
  /// Whether rows may pass by in either order (StreamIterator).
  static constexpr bool AnyOrder = AccumulatesDq && !OwnsHeads && IsPlain && !SkipsTiles;
  /// Whether tiles of keys may add to dQ in their order (dq_semaphore.hpp).
  static constexpr bool InOrder = FoldsStatistics && !OwnsHeads;
  /// How many parts of the sums of dQ, and of how many columns, are on their way to a warp that makes dQ of them beside
  /// the tiles (postprocess.hpp): what there is room for. 0: none does.
  static constexpr int StagesPostprocess = !Persistent || OwnsHeads || HasDqWarpgroup ? 0
                                           : ThreeConsumers                           ? 1
                                           : HeadDim <= 96                            ? 4
                                                                                      : 2,
                       ColumnsPostprocess = ThreeConsumers || HeadDim % kPanel ? 32 : kPanel;
  static constexpr bool FusesPostprocess = StagesPostprocess > 0;
  // Of dout there are as many stages as of q, but where there is no room for them.
  static constexpr int StagesV = (Cluster > 1 && HeadDimV > 128) || (PlainBias && HeadDimV > 64) ? 2 : Stages;
  static constexpr int Threads = (Consumers + 1) * kWarpgroup;
  // 504 are there, as in ../../sm90/traits.hpp, 512 of four warpgroups. With 232 at head_dim 128 consumers take 1.4
  // times as long.
  static constexpr int ProducerRegisters = DqInShared                                   ? 56
                                           : (PlainMask || DropsAlone) && HeadDim <= 64 ? 40
                                                                                        : 24,
                       ConsumerRegisters = Cluster > 1                                  ? 192
                                           : HasDqWarpgroup                             ? 208
                                           : ThreeConsumers                             ? 160
                                           : DqInShared                                 ? 224
                                           : (PlainMask || DropsAlone) && HeadDim <= 64 ? 232
                                                                                        : 240,
                       RegistersOfValues = Cluster > 1      ? 184
                                           : HasDqWarpgroup ? 200
                                                            : 240,
                       DqRegisters = Cluster > 1 ? 112 : 80;

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
  // Where nothing else can, a branch in one body takes 2 to 4% less time.
  static constexpr bool TwoBodies = (Mods & feature::Mask) && AccumulatesDq && !PlainMask;

  // Whether a warpgroup keeps its rows in hand in registers: there are 52 left where warpgroups are two, and shared
  // memory, which the products would read them from each turn, is what the kernel waits for.
  static constexpr bool HoldsInRegisters = AccumulatesDq && !ThreeConsumers && HeadDim <= 64 && HeadDimV <= 64;
  using MmaScores = Product<Step, Part, HoldsInRegisters ? SourceOfA::Registers : SourceOfA::Shared>;
  // An instruction may have no more registers than a thread is launched with: 128 where warpgroups are four.
  template <int Columns>
  static constexpr int ColumnsAtOnce = HasDqWarpgroup && Columns > 192 ? 128 : Columns;
  template <int Columns>
  using MmaGradient = Product<ColumnsAtOnce<Columns>, Part, SourceOfA::Registers, GMMA::Major::K, GMMA::Major::MN>;

  // Narrow heads leave registers for what a tile adds to all columns of dQ: the warpgroups then take turns, which reads
  // dS once.
  static constexpr bool AlternatesDq = AccumulatesDq && SumsOfTile::parts(HeadDim) == 1;
  // What a tile adds to dQ: dS of all keys in hand, as the warpgroups leave it, times K; of each warpgroup a part of
  // the columns. It is multiplied a turn after it was left, so that no warpgroup waits for another within a turn; with
  // three buffers the barrier that says that it is there will do.
  // Beside a warpgroup of its own it passes from one warpgroup to another, which says when it has it in registers: two
  // will do. Beside several tiles of sums in shared memory there is room for no more, and it is said when it has been
  // read.
  static constexpr bool HasDsEmpty = HasDqWarpgroup || DqInShared || (DqThroughCluster && AlternatesDq);
  static constexpr int StagesDS = HasDsEmpty ? 2 : 3;
  static constexpr int DqColumns = HasDqWarpgroup ? 32 : HeadDim / SumsOfTile::parts(HeadDim);
  // Whether the copy engine adds it, out of `staging`: the registers are free at once. Wider heads have neither room
  // there nor time of shared memory.
  static constexpr bool StagesSums = AlternatesDq && HeadDim <= kPanel && !OwnsHeads;
  // Tiles of sums of dQ that shared memory has room for: those of a head, or one that another CTA passes on; two, where
  // warpgroups take turns.
  static constexpr int TilesOfSums = DqInShared ? kMostHeldTiles : !DqThroughCluster ? 0 : AlternatesDq ? Streaming : 1;
  // Beside sums in shared memory values in hand pass through the stages of dout: 64 rows each.
  static constexpr int HeldBox = DqInShared ? kAtomRows : Held;
  static constexpr int Staged = 16 * (StagesSums ? kPanel * sizeof(float) / sizeof(Part) : kPanel);  // of a warp
  using Maps = std::conditional_t<PlainBias, GradientMapsOfBias, GradientMaps>;
  using LayoutDS =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Part>{}, Shape<Int<B_r>, Int<Held>, Int<StagesDS>>{}));
  using MmaKeys = Product<HeadDim, Part, SourceOfA::Shared, GMMA::Major::K, GMMA::Major::MN>;
  template <int Columns>
  using MmaDq =
      std::conditional_t<HasDqWarpgroup, Product<Columns, Part, SourceOfA::Registers, GMMA::Major::K, GMMA::Major::MN>,
                         Product<Columns, Part, SourceOfA::Shared, GMMA::Major::MN, GMMA::Major::MN>>;
  static constexpr int VectorsOfP = kAtomRows * B_r / kWarpgroup / 4;  // of a thread

  // Whether finished gradients pass through the buffer of dS that was left longest ago, which all have read, or through
  // the places of sums that have been passed on.
  static constexpr bool StagesInDS = DqInShared || (FusesPostprocess && !StagesSums), StagesInSums = DqThroughCluster;
  // Whether a tile of bias, or its part, lies apart from `staging`: where that is too small, or in use.
  static constexpr bool StagesPairs = (Mods & feature::Bias) && !PlainBias && (Step > kPanel || StagesSums);
  struct SharedStorage : ColumnsOfStages<FoldsStatistics ? Stages : 0>,
                         FromOtherCta<Part, OthersKeys, B_r>,
                         TileOfBias<PlainBias ? Step * Held : 0>,
                         BarriersOfSums<DqThroughCluster ? 4 * Consumers : 0> {
    alignas(1024) Part held[Held * ColumnsQK];
    alignas(1024) Part streamed[Stages * Step * ColumnsQK];
    alignas(1024) Part streamed_v[StagesV * Step * ColumnsV];
    alignas(1024) Part ds[AccumulatesDq ? StagesDS * B_r * Held : 8];
    alignas(DqInShared ? 16 : 1024) Part held_v[DqInShared ? 8 : Held * ColumnsV];
    PostprocessBuffers<Element, StagesPostprocess, ColumnsPostprocess> beside;
    alignas(16) float4 sums[TilesOfSums ? TilesOfSums * B_r * HeadDim / 4 : 1];  // in the order of SumsOfTile
    // 16 rows of a panel for each consumer warp; a warp's part of dS, or of what else it passes on, serves as such.
    alignas(256) Part staging[Parts == 1 && !HasDsEmpty && !StagesInDS && !StagesInSums ? 4 * Consumers * Staged : 8];
    alignas(256) Part pairs_staging[StagesPairs ? Consumers * kAtomRows * Step : 8];
    StreamedTileInfo at[SkipsTiles ? Stages : 1];  // what the stages hold
    alignas(16) RowStatistics statistics[Stages][ReadsStatistics ? Step : 1];
    GradientTile<BackwardTraits> tiles[TilesKnown];
    bool is_last[TilesKnown];  // there is no tile
    Barrier tile_full[TilesKnown], tile_empty[TilesKnown];
    Barrier held_full, held_v_full, held_empty, held_v_empty;
    Barrier full[Stages], empty[Stages], full_v[StagesV], empty_v[StagesV];
    Barrier ds_full[StagesDS];
    Barrier tail, tail_v;  // the copy of a tile whose rows past the last are to be zeroed before anyone sees it
    Barrier ds_empty[HasDsEmpty ? StagesDS : 1], p_full, p_empty;
    Barrier dq_added;  // all of what the tile adds to dQ
    Barrier postprocess_full[FusesPostprocess ? StagesPostprocess : 1];
    PostprocessJob postprocess_job;
    Barrier head_taken, rows_preprocessed;  // the CTA's next head, of whole ones, and the statistics of its rows
    unsigned next_head;                     // its first tile's index
    BarriersOfCluster<(Cluster > 1)> cluster;
    alignas(16) float4 p[HasDqWarpgroup ? VectorsOfP * kWarpgroup : 1];
  };

  static_assert(StatisticsRows::kTile % B_r == 0 || !OfKeys, "statistics are copied by whole tiles of rows");
  static_assert(!AccumulatesDq || (OfKeys && B_r == kPanel), "a row of a panel of dS is one key's");
  static_assert(!AccumulatesDq || (B_r == SumsOfTile::kRows &&
                                   (AlternatesDq || SplitsDkDv || Consumers == SumsOfTile::parts(HeadDim))),
                "the order of the sums");
  static_assert(Cluster == 1 || (HasDqWarpgroup && Persistent), "the CTAs of a cluster take the same tiles");
  static_assert(Cluster == 1 || HeadDim == 3 * kPanel, "each CTA adds to columns of two panels");
  static_assert(!HasDqWarpgroup || !Mods, "there are no registers for score changes");
  static_assert(!HasDqWarpgroup || StagesDS == 2, "the phase of P is a turn's buffer: both alternate");
  static_assert(!DqInShared || (HoldsInRegisters && AlternatesDq && Persistent && !PlainBias),
                "a warp adds to the same tiles each time");
  static_assert(!DqInShared || Consumers == 2, "every other tile is a warpgroup's");
  static_assert(!InOrder || FusesPostprocess, "consumers say when all of a tile has been added");
  static_assert(!DqInShared || !(FoldsStatistics || FusesPostprocess || InOrder), "warps 2 and 3 have one thing to do");
  static_assert(!(HasDqWarpgroup || ThreeConsumers || Parts > 1) || StagesV == Stages || Cluster > 1,
                "a turn goes by one position in both streams");
  static_assert(ProducerRegisters + (HasDqWarpgroup ? RegistersOfValues + ConsumerRegisters + DqRegisters
                                                    : Consumers * ConsumerRegisters) <=
                    (Consumers + 1) * (65536 / Threads / 8 * 8),
                "what the CTA is launched with is all there is to hand out");
  static_assert(!ThreeConsumers || (StagesSums && FoldsStatistics), "there are no registers for more");
  static_assert(!FoldsStatistics || (Step == kColumns && Parts == 1), "of ColumnsOfRow");
  static_assert(Held % kAtomRows == 0 && Step % 16 == 0, "WGMMA's rows, and its steps");
  static_assert(Parts == 1 || !(Mods || AccumulatesDq), "float32 is multiplied plainly");
  static_assert(Parts == 1 || (HeadDim % kPanel == 0 && HeadDimV % kPanel == 0), "low parts begin with a panel");
  static_assert(Parts == 1 || HeadDimV <= 2 * kPanel, "there are no registers for more sums of dP");
};

}  // namespace cutlass_ext::sm90

// Tile shapes, shared-memory layouts and tensor-core operations of the Hopper kernels (sm_90a). Used by fmha.hpp and
// short.hpp, and of its constants by the backward pass.
#pragma once

#include <type_traits>

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

#include "../copy/tma.hpp"
#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../mma/wgmma.hpp"
#include "../operand.hpp"
#include "dropout.hpp"
#include "lazy_softmax.hpp"
#include "pipeline.hpp"
#include "tensor_maps.hpp"
#include "tile_scheduler.hpp"

namespace cutlass_ext::sm90 {

using namespace cute;

constexpr int kWarpgroup = 128;  // threads that issue one WGMMA together

/// `B_r` query rows are shared out to B_r / 64 consumer warpgroups; `Stages` tiles of K and of V and `StagesQ` of Q are
/// in flight. `Mods`: with softcap and ALiBi (`ScoreMods`), and where there is room with bias, mask or dropout
/// (`Pairs`); variants of their own, since scale then leaves the exponent's FMA and what a call does not have costs
/// registers and branches. Tiles of operands in two parts (operand.hpp) have twice the columns, the high parts first.
template <int B_r_, int B_c_, int HeadDim_, int HeadDimV_, class Element_, int Stages_, int StagesQ_, Features Mods_>
struct Traits {
  static constexpr int B_r = B_r_, B_c = B_c_, HeadDim = HeadDim_, HeadDimV = HeadDimV_;
  static constexpr int Stages = Stages_, StagesQ = StagesQ_, StagesJobs = 3;
  // Which of feature::kMods are taken. Wider heads have no registers left for what pairs have.
  static constexpr Features Mods =
      HeadDim_ <= 128 && HeadDimV_ <= 128 && Operand<Element_>::Parts == 1 ? Mods_ : Mods_ & feature::kScoreMods;
  static constexpr bool ScoreMods = Mods & feature::kScoreMods, Pairs = Mods & feature::kPairs;
  // Whether the kernel is for dropout, with or without a mask: then all of its calls have it.
  static constexpr bool AlwaysDrops = Mods == (feature::Mask | feature::Dropout);
  // Whether it is for a bias that the copy engine brings, alone or with a mask: then all of its calls have one.
  static constexpr bool PlainBias = Mods == feature::Bias || Mods == (feature::Bias | feature::Mask);
  // Whether it is for a mask and nothing else: tiles of more than 128 rows then for one of keys alone. Of a mask by
  // blocks of 128 they would see three of four where tiles of 128 rows see one of two: (8, 2048, 16, 64) 0.249 ms for
  // 0.181.
  static constexpr bool MaskAlone = Mods == feature::Mask, OfKeysAlone = MaskAlone && B_r > 128;
  using Element = Element_;
  using Part = typename Operand<Element>::Part;
  static constexpr int Parts = Operand<Element>::Parts;
  static constexpr int Consumers = B_r / kAtomRows;  // warpgroups
  // Warpgroups that draw what dropout keeps, ahead of those that consume, one for each of them: up to head_dim 64,
  // where consumers have registers to spare.
  static constexpr int DropoutWarpgroups = AlwaysDrops && HeadDimV <= 64 ? Consumers : 0;
  static constexpr int Warpgroups = 1 + Consumers + DropoutWarpgroups;  // the producer's first, those that draw last
  static constexpr int Threads = Warpgroups * kWarpgroup;
  using Job = sm90::Job<Consumers, Pairs>;
  using Maps = std::conditional_t<Pairs, TensorMapsOfPairs, TensorMaps>;
  // setmaxnreg, in units of 8 a thread. What the CTA is launched with (65,536 over its threads, rounded down to units
  // of 8) is all there is to hand out: 504 for three warpgroups, 512 for four, 480 for five.
  static constexpr int ProducerRegisters = Warpgroups == 3 ? 40 : 32, DropoutRegisters = 48;
  static constexpr int ConsumerRegisters = DropoutWarpgroups > 0 ? 176 : Consumers == 3 ? 160 : 232;
  static_assert(ProducerRegisters + Consumers * ConsumerRegisters + DropoutWarpgroups * DropoutRegisters <=
                Warpgroups * (65536 / Threads / 8 * 8));
  // Columns in shared memory: whole panels.
  static constexpr int ColumnsQK = (HeadDim + kPanel - 1) / kPanel * kPanel * Parts;
  static constexpr int ColumnsV = (HeadDimV + kPanel - 1) / kPanel * kPanel * Parts;
  static constexpr int PanelsV = ColumnsV / kPanel, StagedPanels = PanelsV > 1 ? 2 : 1;  // of O, two at a time
  static constexpr int StagedColumns = StagedPanels * kPanel;
  // Of bias, 64 rows for each warpgroup. Where there is no room left they lie where O is staged, and dropout has none.
  static constexpr bool BiasInO = HeadDim > 64 && !PlainBias;
  static constexpr int StagesBias = HeadDim > 64 || Consumers > 2 ? 1 : 2;
  static constexpr int StagesOfBias = (Mods & feature::Bias) && !BiasInO ? StagesBias : 0;  // apart from O
  static constexpr int BiasElements = kAtomRows * B_c;                                      // of a warpgroup

  // What dropout keeps of a consumer warp's tile. Where no warpgroup draws it lies where O is staged.
  using Drawn = std::conditional_t<(DropoutWarpgroups > 0), MasksOfWarp, BitsOfWarp>;
  static_assert(!Pairs || B_c == DropoutBits::kKeys, "as many keys as are drawn for");

  // What a call has, where the kernel takes it.
  CUTE_HOST_DEVICE static bool has_bias(Params const& params) {
    return PlainBias || ((Mods & feature::Bias) && cutlass_ext::has_bias(params));
  }
  CUTE_HOST_DEVICE static bool has_mask(Params const& params) {
    return (Mods & feature::Mask) && cutlass_ext::has_mask(params);
  }
  CUTE_HOST_DEVICE static bool has_dropout(Params const& params) {
    return AlwaysDrops || ((Mods & feature::Dropout) && cutlass_ext::has_dropout(params));
  }

  /// Whether tiles of the bias are copied to shared memory; else each thread loads what it wants.
  CUTE_HOST_DEVICE static bool copies_bias(Params const& params) {
    // The copy engine faults on a first column that is off 16 bytes, as padding in front makes it.
    return PlainBias || (has_bias(params) && is_copyable(bias_of(params)) &&
                         !(features_of(params) & feature::LeftPadding) && !(BiasInO && has_dropout(params)));
  }

  // Of the B_c / 4 columns of S that a thread has in a row, those exponentiated while P V still runs: as many as there
  // are registers for (of 32 at head_dim 128, 24 are 4 to 12% faster than 4; at 64 and 256, 8 are 1 to 6% slower; with
  // three warpgroups 56 bytes spilled at head_dim 96).
  static constexpr int EarlyColumns =
      Parts == 1 && HeadDimV > 64 && HeadDimV <= 128 && Consumers < 3 ? B_c / 32 * 6 : 4;
  // Of parts 8 powers of two below the maximum: most exponents of usual scores then lie near 0, where fp32 rounds them
  // least. With 10 errors of O are 10% larger, with 5 they are 5% smaller, and what is far below the maximum loses
  // bits.
  using Softmax = LazySoftmax<B_c / 4, EarlyColumns, Parts == 1 ? 0 : 8>;

  // Keys of one sum P V in the tensor cores. They cut off what an accumulator has no bits for, step after step, and
  // more of sums of one sign: of operands in parts 64 keys are as exact as CUDA cores are, 128 lose up to five times as
  // much.
  static constexpr int KeysOfSum = Parts == 1 || B_c < 64 ? B_c : 64;
  static_assert(KeysOfSum == B_c || 2 * KeysOfSum == B_c, "the keys of a tile are summed at once, or in halves");

  static_assert(std::is_same_v<Part, half_t> || std::is_same_v<Part, bfloat16_t>, "WGMMA takes 16-bit operands");
  static_assert(Parts == 1 || (HeadDim % kPanel == 0 && HeadDimV % kPanel == 0), "low parts begin with a panel");
  static_assert(B_r % kAtomRows == 0 && Consumers >= 1 && Consumers <= 3, "up to three consumer warpgroups");
  static_assert(B_c % 16 == 0 && B_c <= 256, "P V runs through the keys 16 at a time");
  static_assert(HeadDim % 16 == 0 && HeadDimV % 16 == 0, "Q K^T runs through head_dim 16 at a time");

  // Panels of 64 columns, row after row: what one copy of the tensor maps writes.
  using LayoutQ =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Part>{}, Shape<Int<B_r>, Int<ColumnsQK>, Int<StagesQ>>{}));
  using LayoutK =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Part>{}, Shape<Int<B_c>, Int<ColumnsQK>, Int<Stages>>{}));
  // The same bytes seen as V transposed, which is how the second product wants them.
  using LayoutV = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Part>{},
                                         Shape<Int<ColumnsV>, Int<B_c>, Int<Stages>>{}, Step<_2, _1, _3>{}));

  using MmaQK = Product<B_c, Part, SourceOfA::Shared>;
  template <int Columns>
  using MmaWithP = Product<Columns, Part, SourceOfA::Registers, GMMA::Major::K, GMMA::Major::MN>;
  using MmaPV = MmaWithP<HeadDimV>;
  using MmaOfV = MmaWithP<ColumnsV>;  // describes V as it lies in shared memory, to whole panels

  struct SharedStorage {
    static constexpr int kDrawnAhead = DropoutWarpgroups > 0 ? 4 * Consumers : 0;  // warps
    alignas(1024) Part q[cosize_v<LayoutQ>];
    alignas(1024) Part k[cosize_v<LayoutK>];
    alignas(1024) Part v[cosize_v<LayoutV>];
    alignas(1024) Part o[Parts == 1 ? B_r * StagedColumns : 1];  // 16 rows for each consumer warp; fp32 needs none
    alignas(128) Drawn drawn[kDrawnAhead];
    alignas(StagesOfBias > 0 ? 1024 : 128) Part biases[StagesOfBias * B_r * B_c];
    Job jobs[StagesJobs];
    Barrier job_placed[StagesJobs], job_full[StagesJobs], job_empty[StagesJobs];  // placed: known to who copies
    Barrier job_asked;  // the next job, by the warp that will copy for it
    Barrier q_full[StagesQ], q_empty[StagesQ];
    Barrier k_full[Stages], k_empty[Stages];
    Barrier v_full[Stages], v_empty[Stages];
    Barrier q_tail, v_tail;  // the copy of a tile whose rows past the last are to be zeroed before anyone sees it
    PartScales scales[Parts == 1 ? 1 : StagesJobs];  // of each job, where operands are in parts
    Barrier drawn_full[kDrawnAhead], drawn_empty[kDrawnAhead];
    Barrier bias_full[Pairs ? Consumers : 0][StagesBias], bias_empty[Pairs ? Consumers : 0][StagesBias];

    /// Of the warp with rows from `warp_row` on.
    CUTE_DEVICE Drawn& drawn_of(int warp_row) {
      if constexpr (DropoutWarpgroups > 0) return drawn[warp_row / 16];
      return *reinterpret_cast<Drawn*>(o + warp_row * StagedColumns);
    }
    CUTE_DEVICE Part* biases_of(int warpgroup, int stage) {
      return BiasInO ? o + warpgroup * BiasElements : biases + (stage * Consumers + warpgroup) * BiasElements;
    }
  };
};

}  // namespace cutlass_ext::sm90

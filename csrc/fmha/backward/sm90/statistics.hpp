// Statistics of rows (lse and delta) as a consumer thread has them. Used by mainloop.hpp.
#pragma once

#include "../../cute_tensor.hpp"
#include "../../optimization_barriers.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../params.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// Of the two rows in hand, where those are query rows, for as long as the tile is; else of the thread's columns, two
/// neighbours at a time: a tile's are read in the turn before, in front of what this adds to dQ (`AddsQ`): behind it
/// they would wait until memory has taken that. As far as registers allow it: lse of heads of up to 128, where pairs
/// have nothing, delta of up to 64, but for the warps that make them leave fewer. Where products bring them there is
/// nothing left to do: they are 0 here.
template <class Traits, bool AddsQ>
class StatisticsAtHand {
  static constexpr bool kReadsAhead = Traits::OfKeys && Traits::Parts == 1 && !Traits::FoldsStatistics &&
                                      Traits::HeadDim <= (Traits::Pairs && !Traits::TwoBodies ? 64 : 128);
  static constexpr bool kKeepsDeltas = kReadsAhead && Traits::HeadDim <= 64 && !Traits::DqInShared;
  static constexpr int kPairs = kReadsAhead ? Traits::Step / 8 : 1,
                       kPairsAhead = Traits::Pairs && AddsQ && !kKeepsDeltas ? 4 : kPairs;

  typename Traits::SharedStorage& shared_;
  int quad_lane_ = threadIdx.x % 4;
  RowStatistics of_rows_[2] = {};
  float2 lses_[kPairs] = {}, deltas_[kPairs] = {};

  CUTE_DEVICE float4 of_columns(int stage, int pair) const {
    return reinterpret_cast<float4 const*>(shared_.statistics[stage])[quad_lane_ + pair * 4];
  }

 public:
  CUTE_DEVICE StatisticsAtHand(BackwardParams const& params, typename Traits::SharedStorage& shared,
                               GradientTile<Traits> const& tile)
      : shared_(shared) {
    materialize(quad_lane_);
    if constexpr (!Traits::OfKeys) {
      int const first_row = tile.first_row(GradientThread());
      auto const* const rows = params.row_statistics +
                               StatisticsRows(params).first(params, tile.sequence, tile.work.batch, tile.head_q) +
                               first_row;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i)
        of_rows_[i] = first_row + row_of(i) < tile.view.n_q ? rows[row_of(i)] : RowStatistics{INFINITY, 0.f};
    }
  }

  /// What is read ahead of the tile in `stage`.
  CUTE_DEVICE void read(int stage) {
    if constexpr (kReadsAhead) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairsAhead; ++pair) {
        float4 const x = of_columns(stage, pair);
        lses_[pair] = make_float2(x.x, x.z);
        if constexpr (!(Traits::Pairs && AddsQ)) deltas_[pair] = make_float2(x.y, x.w);
      }
    }
  }
  /// Where pairs have something there are fewer registers, and delta waits until the weights need theirs no more.
  CUTE_DEVICE void read_deltas(int stage) {
    if constexpr (kKeepsDeltas) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        float4 const x = of_columns(stage, pair);
        deltas_[pair] = make_float2(x.y, x.w);
      }
    }
  }

  /// Of the rows of elements (i, j) and (i, j + 1) of scores, which are changed or not.
  template <bool Changed>
  CUTE_DEVICE float2 lses(int stage, int i, int j) const {
    if constexpr (Traits::FoldsStatistics) return {};
    constexpr bool kReadsAgain = Changed && Traits::TwoBodies && Traits::HeadDim > 64;
    if constexpr (!Traits::OfKeys) return make_float2(of_rows_[i].lse_log2, of_rows_[i].lse_log2);
    if (kReadsAhead && !kReadsAgain && j / 2 < kPairsAhead) return lses_[j / 2 % kPairs];
    float4 const x = of_columns(stage, j / 2);
    return make_float2(x.x, x.z);
  }
  CUTE_DEVICE float2 deltas(int stage, int i, int j) const {
    if constexpr (Traits::FoldsStatistics) return {};
    if constexpr (!Traits::OfKeys) return make_float2(of_rows_[i].delta, of_rows_[i].delta);
    if constexpr (kKeepsDeltas) return deltas_[j / 2 % kPairs];
    float4 const x = of_columns(stage, j / 2);
    return make_float2(x.y, x.w);
  }
  /// Of the rows in hand.
  CUTE_DEVICE RowStatistics const (&of_rows() const)[2] { return of_rows_; }
};

}  // namespace cutlass_ext::sm90

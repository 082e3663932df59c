// The two products of a decode step on Hopper, for 64 query rows and one key tile: WGMMA reads K and V from shared
// memory once for the four warps, where mma.sync reads them once for each. The lanes hold what they hold in math.hpp.
// Called by fmha.hpp.
#pragma once

#include "../mma/wgmma.hpp"
#include "math.hpp"

namespace cutlass_ext::decode {

/// Both products by WGMMA. Q and P come from registers, Q, where O leaves no room there, from shared memory.
template <class Traits>
struct WarpgroupTensorCores : TensorCores<Traits> {
  using Element = typename Traits::Element;
  static constexpr int Rows = Traits::Rows, HeadDim = Traits::HeadDim, TileKeys = Traits::TileKeys;

  CUTE_DEVICE void scores(Fragment<TileKeys>& S, Element const* sQ, Element const* sK, int) const {
    constexpr auto kSource = Traits::QueryInRegisters ? sm90::SourceOfA::Registers : sm90::SourceOfA::Shared;
    using Mma = sm90::Product<TileKeys, Element, kSource>;
    auto const multiply = [&](auto const& fQ) {
      Tensor fK =
          Mma::operand_b(make_tensor(make_smem_ptr(sK), sm90::LayoutAlongColumns<Element, TileKeys, HeadDim>{}));
      Tensor cS = make_tensor(make_rmem_ptr(&S[0][0]), typename Mma::template ShapeOfSums<TileKeys>{});
      sm90::gemm_async<HeadDim / 16>(Mma{}, fQ, fK, cS, true);
      warpgroup_wait<0>();
      warpgroup_fence_operand(cS);
    };
    if constexpr (Traits::QueryInRegisters) {
      multiply(make_tensor(make_rmem_ptr<Element>(&this->q[0][0]), typename Mma::template ShapeOfA<HeadDim>{}));
    } else {
      multiply(Mma::operand_a(make_tensor(make_smem_ptr(sQ), sm90::LayoutAlongColumns<Element, Rows, HeadDim>{})));
    }
  }

  CUTE_DEVICE void values(Fragment<HeadDim>& O, Fragment<TileKeys> const& P, float const (&rescale)[2],
                          Element const* sV, int) const {
    rescale_rows(O, rescale);
    uint32_t p[TileKeys / 16][4];
    CUTE_UNROLL
    for (int k = 0; k < TileKeys / 16; ++k) pack_operand<Element>(p[k], P[2 * k], P[2 * k + 1]);

    using Mma = sm90::Product<HeadDim, Element, sm90::SourceOfA::Registers, GMMA::Major::K, GMMA::Major::MN>;
    Tensor fP = make_tensor(make_rmem_ptr<Element>(&p[0][0]), typename Mma::template ShapeOfA<TileKeys>{});
    Tensor fV = Mma::operand_b(make_tensor(make_smem_ptr(sV), sm90::LayoutAlongRows<Element, TileKeys, HeadDim>{}));
    Tensor cO = make_tensor(make_rmem_ptr(&O[0][0]), typename Mma::template ShapeOfSums<HeadDim>{});
    sm90::gemm_async<TileKeys / 16>(Mma{}, fP, fV, cO, false);
    warpgroup_wait<0>();
    warpgroup_fence_operand(cO);
  }
};

template <class Traits>
struct MathOf<Traits, true> {
  using Type = WarpgroupTensorCores<Traits>;
};

}  // namespace cutlass_ext::decode

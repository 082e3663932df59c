// dBias of fp16 and bf16 on Hopper's tensor cores (WGMMA).
#include "../fmha/backward/sm90/dbias.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {

template <class Traits>
struct Argument<BiasTiles, Traits> {
  static BiasTiles of(Params const& params) {
    return BiasTiles(static_cast<BackwardParams const&>(params), Traits::B_r, Traits::B_c, kBiasCluster);
  }
};

/// Of rows each CTA of a cluster copies a part.
template <class Traits>
struct Argument<sm90::BiasMaps, Traits> {
  static sm90::BiasMaps of(Params const& params) {
    int const cluster = Argument<BiasTiles, Traits>::of(params).cluster;
    return maps_of_sides<typename Traits::Element>(static_cast<BackwardParams const&>(params), params.head_dim,
                                                   params.head_dim_v, Traits::B_r / cluster, Traits::B_c);
  }
};

static RegisteredKernels const kernels_here{
    kernel_of<sm90::BiasGradients<64, cute::half_t, 5>>(),
    kernel_of<sm90::BiasGradients<128, cute::half_t, 3>>(),
    kernel_of<sm90::BiasGradients<64, cute::bfloat16_t, 5>>(),
    kernel_of<sm90::BiasGradients<128, cute::bfloat16_t, 3>>(),
};

}  // namespace cutlass_ext

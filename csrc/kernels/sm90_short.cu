// fp16 and bf16 on Hopper's tensor cores (WGMMA), short launches, head_dim up to 128: several CTAs of one warpgroup on
// a multiprocessor, and one of two.
#include "../fmha/sm90/short.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
template <class Element, int HeadDim, Features Mods>
using Of = sm90::ShortFMHA<64, HeadDim, Element, 1, 1, Mods>;
template <class Element, int HeadDim>
using OfTwo = sm90::ShortFMHA<64, HeadDim, Element, 4, 2>;
constexpr Features kOfUnlike = feature::kUnlike | feature::Packed, kWithDropout = feature::Mask | feature::Dropout,
                   kWithBias = feature::Bias | kWithDropout;
static RegisteredKernels const kernels_here{
    kernel_of<Of<cute::half_t, 64, 0>>(),
    kernel_of<OfTwo<cute::half_t, 64>>(),
    kernel_of<Of<cute::half_t, 128, 0>>(),
    kernel_of<OfTwo<cute::half_t, 128>>(),
    kernel_of<Of<cute::half_t, 64, feature::Mask>>(),
    kernel_of<Of<cute::half_t, 64, kWithDropout>>(),
    kernel_of<Of<cute::half_t, 64, kWithBias>>(),
    kernel_of<Of<cute::half_t, 64, kOfUnlike>>(),
    kernel_of<Of<cute::half_t, 128, feature::Mask>>(),
    kernel_of<Of<cute::half_t, 128, kWithDropout>>(),
    kernel_of<Of<cute::half_t, 128, kWithBias>>(),
    kernel_of<Of<cute::half_t, 128, kOfUnlike>>(),
    kernel_of<Of<cute::bfloat16_t, 64, 0>>(),
    kernel_of<OfTwo<cute::bfloat16_t, 64>>(),
    kernel_of<Of<cute::bfloat16_t, 128, 0>>(),
    kernel_of<OfTwo<cute::bfloat16_t, 128>>(),
    kernel_of<Of<cute::bfloat16_t, 64, feature::Mask>>(),
    kernel_of<Of<cute::bfloat16_t, 64, kWithDropout>>(),
    kernel_of<Of<cute::bfloat16_t, 64, kWithBias>>(),
    kernel_of<Of<cute::bfloat16_t, 64, kOfUnlike>>(),
    kernel_of<Of<cute::bfloat16_t, 128, feature::Mask>>(),
    kernel_of<Of<cute::bfloat16_t, 128, kWithDropout>>(),
    kernel_of<Of<cute::bfloat16_t, 128, kWithBias>>(),
    kernel_of<Of<cute::bfloat16_t, 128, kOfUnlike>>(),
};
}  // namespace cutlass_ext

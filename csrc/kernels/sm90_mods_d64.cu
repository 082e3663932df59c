// FMHA on Hopper's tensor cores (WGMMA), head_dim up to 64, of calls that have softcap or ALiBi, a bias, a mask or
// both, or dropout with or without a mask, and nothing else that changes scores: 1.05 to 1.5 times as fast as by the
// kernel for all of these (bench/results/backward_h200.md).
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
template <class Element, Features Mods>
using Of = sm90::FMHA<128, 128, 64, 64, Element, 3, 2, Mods>;
static RegisteredKernels const kernels_here{
    kernel_of<Of<cute::half_t, feature::kScoreMods>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::half_t, 3, 2, feature::Bias>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::half_t, 3, 2, feature::Bias | feature::Mask>>(),
    kernel_of<Of<cute::half_t, feature::kBias>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::half_t, 3, 2, feature::Mask>>(),
    kernel_of<Of<cute::half_t, feature::Mask>>(),
    kernel_of<Of<cute::half_t, feature::Mask | feature::Dropout>>(),
    kernel_of<Of<cute::bfloat16_t, feature::kScoreMods>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::bfloat16_t, 3, 2, feature::Bias>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::bfloat16_t, 3, 2, feature::Bias | feature::Mask>>(),
    kernel_of<Of<cute::bfloat16_t, feature::kBias>>(),
    kernel_of<sm90::FMHA<192, 128, 64, 64, cute::bfloat16_t, 3, 2, feature::Mask>>(),
    kernel_of<Of<cute::bfloat16_t, feature::Mask>>(),
    kernel_of<Of<cute::bfloat16_t, feature::Mask | feature::Dropout>>(),
};
}  // namespace cutlass_ext

// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 64, of calls that have a bias, a mask,
// both, dropout, or a mask and dropout, and nothing else that changes scores: up to 1.7 times as fast as by the kernels
// for all of these (bench/results/backward_h200.md).
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
template <class Element, int Stages, Features Mods, DqAccumulation OfQueries = DqAccumulation::Global>
using OfPairs = sm90::Backward<Axis::Keys, 64, 128, 64, 64, Element, Stages, Mods, OfQueries>;
static RegisteredKernels const kernels_here{
    kernel_of<OfPairs<cute::half_t, 4, feature::Dropout>>(),
    kernel_of<OfPairs<cute::half_t, 4, feature::Mask>>(),
    kernel_of<OfPairs<cute::half_t, 4, feature::Mask | feature::Dropout>>(),
    kernel_of<OfPairs<cute::half_t, 4, feature::Bias>>(),
    kernel_of<OfPairs<cute::half_t, 4, feature::Bias | feature::Mask>>(),
    kernel_of<OfPairs<cute::half_t, 4, feature::kBias>>(),
    kernel_of<OfPairs<cute::half_t, 3, feature::Dropout, DqAccumulation::Shared>>(),
    kernel_of<OfPairs<cute::half_t, 3, feature::Mask, DqAccumulation::Shared>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::Dropout>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::Mask>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::Mask | feature::Dropout>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::Bias>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::Bias | feature::Mask>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 4, feature::kBias>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 3, feature::Dropout, DqAccumulation::Shared>>(),
    kernel_of<OfPairs<cute::bfloat16_t, 3, feature::Mask, DqAccumulation::Shared>>(),
};
}  // namespace cutlass_ext

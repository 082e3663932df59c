// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), with softcap, ALiBi, bias, masks and dropout, head_dim
// up to 64.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::half_t, 4, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 64, 64, cute::half_t, 3, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::half_t, 4, feature::kMods, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::bfloat16_t, 4, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 64, 64, cute::bfloat16_t, 3, feature::kMods>>(),
    kernel_of<
        sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::bfloat16_t, 4, feature::kMods, DqAccumulation::Global>>(),
};
}  // namespace cutlass_ext

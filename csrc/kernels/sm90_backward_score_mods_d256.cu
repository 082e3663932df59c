// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), with softcap and ALiBi, head_dim up to 256.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::half_t, 2, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 32, 256, 256, cute::half_t, 2, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::bfloat16_t, 2, feature::kMods>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 32, 256, 256, cute::bfloat16_t, 2, feature::kMods>>(),
};
}  // namespace cutlass_ext

// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 128; `kMods`: with softcap, ALiBi, bias, masks
// and dropout.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::FMHA<192, 80, 128, 128, cute::half_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 128, 128, cute::half_t, 2, 2>>(),
    kernel_of<sm90::FMHA<128, 128, 128, 128, cute::half_t, 2, 2, feature::kMods>>(),
    kernel_of<sm90::FMHA<192, 80, 128, 128, cute::bfloat16_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 128, 128, cute::bfloat16_t, 2, 2>>(),
    kernel_of<sm90::FMHA<128, 128, 128, 128, cute::bfloat16_t, 2, 2, feature::kMods>>(),
};
}  // namespace cutlass_ext

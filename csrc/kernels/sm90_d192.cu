// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 192; `kMods`: with softcap and ALiBi.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::FMHA<128, 96, 192, 192, cute::half_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 80, 192, 192, cute::half_t, 2, 1, feature::kMods>>(),
    kernel_of<sm90::FMHA<128, 96, 192, 192, cute::bfloat16_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 80, 192, 192, cute::bfloat16_t, 2, 1, feature::kMods>>(),
};
}  // namespace cutlass_ext

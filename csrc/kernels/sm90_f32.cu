// fp32 on Hopper's tensor cores (WGMMA), each operand in two fp16 parts, head_dim up to 64 and 128;
// `kMods`: with softcap and ALiBi.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::FMHA<128, 128, 64, 64, float, 2, 2>>(),
    kernel_of<sm90::FMHA<128, 128, 64, 64, float, 2, 2, feature::kMods>>(),
    kernel_of<sm90::FMHA<128, 64, 128, 128, float, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 64, 128, 128, float, 2, 1, feature::kMods>>(),
};
}  // namespace cutlass_ext

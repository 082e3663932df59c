// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim above 96 and up to 112; what has more than plain calls goes
// by tiles of 128 columns.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::FMHA<192, 96, 112, 112, cute::half_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 112, 112, cute::half_t, 2, 2>>(),
    kernel_of<sm90::FMHA<192, 96, 112, 112, cute::bfloat16_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 112, 112, cute::bfloat16_t, 2, 2>>(),
};
}  // namespace cutlass_ext

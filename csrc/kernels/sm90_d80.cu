// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim above 64 and up to 80; what has more than plain calls goes
// by tiles of 96 columns.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::FMHA<192, 96, 80, 80, cute::half_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 80, 80, cute::half_t, 2, 2>>(),
    kernel_of<sm90::FMHA<192, 96, 80, 80, cute::bfloat16_t, 2, 1>>(),
    kernel_of<sm90::FMHA<128, 128, 80, 80, cute::bfloat16_t, 2, 2>>(),
};
}  // namespace cutlass_ext

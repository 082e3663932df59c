// fp32 on mma.sync tensor cores, each operand in two fp16 parts, head_dim up to 64, 128 and 256.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm80::FMHA<false, 64, 64, 64, float, 128>>(),
    kernel_of<sm80::FMHA<true, 64, 64, 64, float, 128>>(),
    kernel_of<sm80::FMHA<false, 64, 48, 128, float, 128, 1>>(),
    kernel_of<sm80::FMHA<true, 64, 48, 128, float, 128, 1>>(),
    kernel_of<sm80::FMHA<false, 64, 32, 256, float, 256, 1, 2>>(),
    kernel_of<sm80::FMHA<true, 64, 32, 256, float, 256, 1, 2>>(),
};
}  // namespace cutlass_ext

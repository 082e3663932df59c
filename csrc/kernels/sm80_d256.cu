// fp16 and bf16 on mma.sync tensor cores, head_dim up to 256; of the larger, two warps share the rows.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm80::FMHA<false, 64, 64, 256, cute::half_t, 128, 1, 2>>(),
    kernel_of<sm80::FMHA<true, 64, 64, 256, cute::half_t, 128, 1, 2>>(),
    kernel_of<sm80::FMHA<false, 64, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::FMHA<true, 64, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::FMHA<false, 64, 64, 256, cute::bfloat16_t, 128, 1, 2>>(),
    kernel_of<sm80::FMHA<true, 64, 64, 256, cute::bfloat16_t, 128, 1, 2>>(),
    kernel_of<sm80::FMHA<false, 64, 64, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::FMHA<true, 64, 64, 256, cute::bfloat16_t, 128, 1>>(),
};
}  // namespace cutlass_ext

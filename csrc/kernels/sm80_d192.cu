// fp16 and bf16 on mma.sync tensor cores, head_dim up to 192.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm80::FMHA<false, 64, 80, 192, cute::half_t, 128, 1>>(),
    kernel_of<sm80::FMHA<true, 64, 80, 192, cute::half_t, 128, 1>>(),
    kernel_of<sm80::FMHA<false, 64, 32, 192, cute::half_t, 128>>(),
    kernel_of<sm80::FMHA<true, 64, 32, 192, cute::half_t, 128>>(),
    kernel_of<sm80::FMHA<false, 64, 80, 192, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::FMHA<true, 64, 80, 192, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::FMHA<false, 64, 32, 192, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::FMHA<true, 64, 32, 192, cute::bfloat16_t, 128>>(),
};
}  // namespace cutlass_ext

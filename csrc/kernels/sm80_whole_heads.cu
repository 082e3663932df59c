// fp16 and bf16 of heads of few rows and keys on mma.sync tensor cores, head_dim up to 64, and their gradients.
#include "../fmha/backward/sm80_whole_heads.hpp"
#include "../fmha/sm80/whole_heads.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm80::WholeHeads<64, 64, cute::half_t, 5>>(),
    kernel_of<sm80::HeadGradients<64, 64, 64, cute::half_t, 4>>(),
    kernel_of<sm80::HeadGradients<128, 32, 64, cute::half_t, 2>>(),
    kernel_of<sm80::WholeHeads<64, 64, cute::bfloat16_t, 5>>(),
    kernel_of<sm80::HeadGradients<64, 64, 64, cute::bfloat16_t, 4>>(),
    kernel_of<sm80::HeadGradients<128, 32, 64, cute::bfloat16_t, 2>>(),
};
}  // namespace cutlass_ext

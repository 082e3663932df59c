// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 192; `true`: plain calls alone.
#include "../fmha/decode/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<decode::Decode<192, cute::half_t, 1, 2, 16, 3, true>>(),
    kernel_of<decode::Decode<192, cute::half_t, 1, 2, 16, 3, false>>(),
    kernel_of<decode::Decode<192, cute::half_t, 4, 1, 32, 3, false>>(),
    kernel_of<decode::Decode<192, cute::bfloat16_t, 1, 2, 16, 3, true>>(),
    kernel_of<decode::Decode<192, cute::bfloat16_t, 1, 2, 16, 3, false>>(),
    kernel_of<decode::Decode<192, cute::bfloat16_t, 4, 1, 32, 3, false>>(),
};
}  // namespace cutlass_ext

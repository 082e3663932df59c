// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 256; `true`: plain calls alone.
#include "../fmha/decode/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<decode::Decode<256, cute::half_t, 1, 2, 16, 2, true>>(),
    kernel_of<decode::Decode<256, cute::half_t, 1, 2, 16, 2, false>>(),
    kernel_of<decode::Decode<256, cute::half_t, 4, 1, 32, 2, false>>(),
    kernel_of<decode::Decode<256, cute::bfloat16_t, 1, 2, 16, 2, true>>(),
    kernel_of<decode::Decode<256, cute::bfloat16_t, 1, 2, 16, 2, false>>(),
    kernel_of<decode::Decode<256, cute::bfloat16_t, 4, 1, 32, 2, false>>(),
};
}  // namespace cutlass_ext

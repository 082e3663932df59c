// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 128. `true`: Decode for plain calls alone,
// NarrowDecode for packed calls alone.
#include "../fmha/decode/fmha.hpp"
#include "../fmha/decode/narrow.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<decode::Decode<128, cute::half_t, 1, 4, 16, 3, true>>(),
    kernel_of<decode::Decode<128, cute::half_t, 1, 4, 16, 3, false>>(),
    kernel_of<decode::Decode<128, cute::half_t, 4, 1, 64, 3, false>>(),
    kernel_of<decode::NarrowDecode<128, cute::half_t, false>>(),
    kernel_of<decode::NarrowDecode<128, cute::half_t, true>>(),
    kernel_of<decode::Decode<128, cute::bfloat16_t, 1, 4, 16, 3, true>>(),
    kernel_of<decode::Decode<128, cute::bfloat16_t, 1, 4, 16, 3, false>>(),
    kernel_of<decode::Decode<128, cute::bfloat16_t, 4, 1, 64, 3, false>>(),
    kernel_of<decode::NarrowDecode<128, cute::bfloat16_t, false>>(),
    kernel_of<decode::NarrowDecode<128, cute::bfloat16_t, true>>(),
};
}  // namespace cutlass_ext

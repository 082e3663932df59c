// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 256.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static Entered const kernels_here{
    kernel_of<sm80::Backward<Axis::Keys, 32, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Axis::Rows, 64, 32, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Axis::Keys, 32, 64, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::Backward<Axis::Rows, 64, 32, 256, cute::bfloat16_t, 128, 1>>(),
};
}  // namespace cutlass_ext

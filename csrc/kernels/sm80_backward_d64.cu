// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 64.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static Entered const kernels_here{
    kernel_of<sm80::Backward<Axis::Keys, 32, 128, 64, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Axis::Rows, 128, 32, 64, cute::half_t, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Axis::Keys, 32, 128, 64, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Axis::Rows, 128, 32, 64, cute::bfloat16_t, 128, 2, 2>>(),
};
}  // namespace cutlass_ext

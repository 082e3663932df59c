// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 128.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static Entered const kernels_here{
    kernel_of<sm80::Backward<Axis::Keys, 32, 128, 128, cute::half_t, 256>>(),
    kernel_of<sm80::Backward<Axis::Rows, 128, 32, 128, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Axis::Keys, 32, 128, 128, cute::bfloat16_t, 256>>(),
    kernel_of<sm80::Backward<Axis::Rows, 128, 32, 128, cute::bfloat16_t, 128>>(),
};
}  // namespace cutlass_ext

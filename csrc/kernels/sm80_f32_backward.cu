// Gradients of fp32 on mma.sync tensor cores, each operand in two fp16 parts, head_dim up to 64 and 128.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 64, float, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 64, float, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 64, float, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 64, float, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 128, float, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 128, float, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 128, float, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 128, float, 128, 1>>(),
};
}  // namespace cutlass_ext

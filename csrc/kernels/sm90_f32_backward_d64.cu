// Gradients of fp32 on Hopper's tensor cores (WGMMA), each operand in two fp16 parts, head_dim up to 64.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, float, 4>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 64, 64, 64, float, 4>>(),
};
}  // namespace cutlass_ext

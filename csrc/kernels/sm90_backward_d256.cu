// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 256; in one kernel by a warpgroup each
// for dV, dK and dQ.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 32, 256, 256, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::half_t, 2, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 32, 256, 256, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 256, 256, cute::bfloat16_t, 2, 0, DqAccumulation::Global>>(),
};
}  // namespace cutlass_ext

// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 192 and that of v up to 128 or 192; in
// one kernel by a warpgroup each for dV, dK and dQ.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 192, 128, cute::half_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 64, 192, 128, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 192, 192, cute::half_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 64, 192, 192, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 192, 128, cute::half_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 192, 192, cute::half_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 192, 128, cute::bfloat16_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 64, 192, 128, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 192, 192, cute::bfloat16_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 64, 192, 192, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 192, 128, cute::bfloat16_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 192, 192, cute::bfloat16_t, 3, 0, DqAccumulation::Global>>(),
};
}  // namespace cutlass_ext

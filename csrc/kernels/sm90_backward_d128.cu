// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 96 and 128.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::half_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 96, 96, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::half_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::half_t, 2, 0, DqAccumulation::Cluster>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::half_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 128, 128, cute::half_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::half_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::half_t, 2, 0, DqAccumulation::Cluster>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::bfloat16_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 96, 96, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::bfloat16_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 96, 96, cute::bfloat16_t, 2, 0, DqAccumulation::Cluster>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::bfloat16_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 128, 128, cute::bfloat16_t, 2>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::bfloat16_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 128, 128, cute::bfloat16_t, 2, 0, DqAccumulation::Cluster>>(),
};
}  // namespace cutlass_ext

// Gradients of fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 64. Of those that add to dQ in memory
// the ones of three warpgroups are for long calls (duration_of_gradients in csrc/host/backward_heuristics.hpp).
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
using sm90::DqAccumulation;
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::half_t, 4>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 64, 64, cute::half_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::half_t, 4, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 192, 64, 64, cute::half_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::half_t, 3, 0, DqAccumulation::Shared>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::bfloat16_t, 4>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 128, 64, 64, cute::bfloat16_t, 3>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::bfloat16_t, 4, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 192, 64, 64, cute::bfloat16_t, 3, 0, DqAccumulation::Global>>(),
    kernel_of<sm90::Backward<Axis::Keys, 64, 128, 64, 64, cute::bfloat16_t, 3, 0, DqAccumulation::Shared>>(),
};
}  // namespace cutlass_ext

// Gradients of fp32 on Hopper's tensor cores (WGMMA), each operand in two fp16 parts, head_dim up to 128. Tiles are
// what shared memory holds: of keys in hand 64, which two warpgroups share, each with one of dK and dV; of query rows
// 128, beside 32 keys a stage.
#include "../fmha/backward/sm90/kernel.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::Backward<Axis::Keys, 64, 64, 128, 128, float, 2>>(),
    kernel_of<sm90::Backward<Axis::Rows, 128, 32, 128, 128, float, 3>>(),
};
}  // namespace cutlass_ext

// The backward pass in fp32 on CUDA cores, head_dim up to 32. A lane has 8 x 8 scores, and 8 x 4 of each gradient.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::Backward<Axis::Keys, 64, 128, 32, float, 128, simt::Walk<32>>>(),
    kernel_of<simt::Backward<Axis::Rows, 128, 64, 32, float, 128, simt::Walk<32>>>(),
};
}  // namespace cutlass_ext

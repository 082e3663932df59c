// The backward pass in fp32 on CUDA cores, head_dim up to 128. A lane has 4 x 8 scores, and 4 x 16 of each gradient, 8
// columns at a time; the tiles that fit 99 KB have half the scores. Of each kind the first that fits the device runs.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::Backward<Kind::KeyGradients, 64, 64, 128, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::KeyGradients, 32, 64, 128, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::AllGradients, 64, 64, 128, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::AllGradients, 32, 64, 128, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 64, 64, 128, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 64, 32, 128, float, 128, simt::Walk<64>>>(),
};
}  // namespace cutlass_ext

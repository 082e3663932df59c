// The backward pass in fp32 on CUDA cores, head_dim up to 32. A lane has 8 x 8 scores, and 8 x 4 of each gradient;
// where what pairs have is taken for dK and dV 8 x 4 scores: with 8 x 8 the kernel had 144 KB of instructions and,
// for 8.0, 80 bytes spilled. Of up to 64 keys it has 4 x 8 scores and 4 x 4 of each gradient.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::Backward<Kind::KeyGradients, 32, 128, 32, float, 128, simt::Walk<32>>>(),
    kernel_of<simt::Backward<Kind::AllGradients, 64, 128, 32, float, 128, simt::Walk<32>>>(),
    kernel_of<simt::BackwardOfOneTile<Kind::AllGradients, 64, 64, 32, float, 128, simt::Walk<32>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 128, 64, 32, float, 128, simt::Walk<32>>>(),
};
}  // namespace cutlass_ext

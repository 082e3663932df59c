// The backward pass in fp32 on CUDA cores, head_dim up to 64. A lane has 8 x 4 scores, and 8 x 8 of each gradient: 8 x
// 8 scores beside dK and dV spill. Of up to 64 keys it has half as many of each.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::Backward<Kind::KeyGradients, 32, 128, 64, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::AllGradients, 32, 128, 64, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::BackwardOfOneTile<Kind::AllGradients, 32, 64, 64, float, 128, simt::Walk<64>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 128, 32, 64, float, 128, simt::Walk<64>>>(),
};
}  // namespace cutlass_ext

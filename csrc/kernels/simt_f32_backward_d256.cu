// The backward pass in fp32 on CUDA cores, head_dim up to 256. Two warps share rows: a lane has 4 x 4 scores, and 4 x
// 16 of each gradient; the tiles that fit 99 KB wait for each of their copies. Of each kind the first that fits the
// device runs.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::Backward<Kind::KeyGradients, 64, 64, 256, float, 256, simt::Walk<128, 2, 2>>>(),
    kernel_of<simt::Backward<Kind::KeyGradients, 64, 32, 256, float, 128, simt::Walk<64, 1, 2>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 64, 64, 256, float, 256, simt::Walk<128, 2, 2>>>(),
    kernel_of<simt::Backward<Kind::QueryGradients, 32, 64, 256, float, 128, simt::Walk<64, 1, 2>>>(),
};
}  // namespace cutlass_ext

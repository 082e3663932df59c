// The backward pass in fp32 on CUDA cores, head_dim up to 256: of each kind the first tile that the device has shared
// memory for runs.
#include "../fmha/backward/simt.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static Entered const kernels_here{
    kernel_of<simt::Backward<Axis::Keys, 64, 64, 256, float, 256, simt::Walk<128, 2, 2>>>(),
    kernel_of<simt::Backward<Axis::Keys, 64, 32, 256, float, 128, simt::Walk<64, 1, 2>>>(),
    kernel_of<simt::Backward<Axis::Rows, 64, 64, 256, float, 256, simt::Walk<128, 2, 2>>>(),
    kernel_of<simt::Backward<Axis::Rows, 32, 64, 256, float, 128, simt::Walk<64, 1, 2>>>(),
};
}  // namespace cutlass_ext

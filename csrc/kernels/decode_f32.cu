// Decoding fp32 on CUDA cores.
#include "../fmha/decode/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<decode::Decode<64, float, 1, 4, 8, 4, false>>(),
    kernel_of<decode::Decode<128, float, 1, 4, 8, 2, false>>(),
    kernel_of<decode::Decode<256, float, 1, 2, 8, 2, false>>(),
};
}  // namespace cutlass_ext

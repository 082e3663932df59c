// fp32 on CUDA cores, head_dim up to 256. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::FMHA<128, 32, 256, float, 256>>(),
    kernel_of<simt::FMHA<64, 32, 256, float, 128>>(),
};
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 64. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::FMHA<128, 64, 64, float, 128>>(),
    kernel_of<simt::FMHA<32, 64, 64, float, 64>>(),
    kernel_of<simt::FMHA<64, 32, 64, float, 128>>(),
    kernel_of<simt::FewTiles<32, 64, 64, float, 128>>(),
};
}  // namespace cutlass_ext

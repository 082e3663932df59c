// fp32 on CUDA cores, head_dim up to 224. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<simt::FMHA<32, 32, 224, float, 64>>(),
};
}  // namespace cutlass_ext

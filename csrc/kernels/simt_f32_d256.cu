// fp32 on CUDA cores, head_dim up to 256. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d256_large = kernel_of<simt::FMHA<128, 32, 256, float, 256>>();
extern Kernel const simt_f32_d256_small = kernel_of<simt::FMHA<64, 32, 256, float, 128>>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 64. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d64_large = kernel_of<simt::FMHA<128, 64, 64, float, 128>>();
extern Kernel const simt_f32_d64_medium = kernel_of<simt::FMHA<32, 64, 64, float, 64>>();
extern Kernel const simt_f32_d64_small = kernel_of<simt::FMHA<64, 32, 64, float, 128>>();
}  // namespace cutlass_ext

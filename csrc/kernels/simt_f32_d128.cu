// fp32 on CUDA cores, head_dim up to 128. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d128_large = kernel_of<simt::FMHA<128, 96, 128, float, 256>>();
extern Kernel const simt_f32_d128_medium = kernel_of<simt::FMHA<64, 64, 128, float, 128>>();
extern Kernel const simt_f32_d128_small = kernel_of<simt::FMHA<64, 32, 128, float, 128>>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 32. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d32_large = kernel_of<simt::FMHA<128, 64, 32, float, 128>>();
extern Kernel const simt_f32_d32_small = kernel_of<simt::FMHA<64, 32, 32, float, 128>>();
}  // namespace cutlass_ext

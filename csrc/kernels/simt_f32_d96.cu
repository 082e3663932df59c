// fp32 on CUDA cores, head_dim up to 96. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d96_large = simt_kernel<64, 64, 96, 128>();
extern Kernel const simt_f32_d96_small = simt_kernel<64, 32, 96, 128>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 64. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d64_large = simt_kernel<128, 64, 64, 128>();
extern Kernel const simt_f32_d64_medium = simt_kernel<32, 64, 64, 64>();
extern Kernel const simt_f32_d64_small = simt_kernel<64, 32, 64, 128>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 128. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d128_large = simt_kernel<128, 96, 128, 256>();
extern Kernel const simt_f32_d128_medium = simt_kernel<64, 64, 128, 128>();
extern Kernel const simt_f32_d128_small = simt_kernel<64, 32, 128, 128>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 256. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d256_large = simt_kernel<128, 32, 256, 256>();
extern Kernel const simt_f32_d256_small = simt_kernel<64, 32, 256, 128>();
}  // namespace cutlass_ext

// fp32 on CUDA cores, head_dim up to 32. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d32_large = simt_kernel<128, 64, 32, 128>();
extern Kernel const simt_f32_d32_small = simt_kernel<64, 32, 32, 128>();
}  // namespace cutlass_ext

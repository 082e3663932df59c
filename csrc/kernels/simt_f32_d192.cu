// fp32 on CUDA cores, head_dim up to 192. How the tiles were chosen: bench/results/tuning.md.
#include "simt_kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d192_large = simt_kernel<64, 32, 192, 128>();
extern Kernel const simt_f32_d192_small = simt_kernel<32, 32, 192, 64>();
}  // namespace cutlass_ext

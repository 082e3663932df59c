// fp32 on CUDA cores, head_dim up to 224 where a block may have 99 KB of shared memory (sm_86, sm_89): tiles of
// head_dim 256 do not fit. How the tiles were chosen: bench/results/tuning.md.
#include "../fmha/simt/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const simt_f32_d224_small = kernel_of<simt::FMHA<32, 32, 224, float, 64>>();
}  // namespace cutlass_ext

// fp16 and bf16 on mma.sync tensor cores, head_dim up to 256.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm80_f16_d256_large = kernel_of<sm80::FMHA<64, 64, 256, cute::half_t, 128, 1, 2>>();
extern Kernel const sm80_f16_d256_small = kernel_of<sm80::FMHA<64, 64, 256, cute::half_t, 128, 1>>();
extern Kernel const sm80_bf16_d256_large = kernel_of<sm80::FMHA<64, 64, 256, cute::bfloat16_t, 128, 1, 2>>();
extern Kernel const sm80_bf16_d256_small = kernel_of<sm80::FMHA<64, 64, 256, cute::bfloat16_t, 128, 1>>();
}  // namespace cutlass_ext

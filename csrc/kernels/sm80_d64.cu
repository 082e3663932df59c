// fp16 and bf16 on mma.sync tensor cores, head_dim up to 64.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm80_f16_d64_large = kernel_of<sm80::FMHA<128, 64, 64, cute::half_t, 128>>();
extern Kernel const sm80_f16_d64_small = kernel_of<sm80::FMHA<64, 64, 64, cute::half_t, 128>>();
extern Kernel const sm80_bf16_d64_large = kernel_of<sm80::FMHA<128, 64, 64, cute::bfloat16_t, 128>>();
extern Kernel const sm80_bf16_d64_small = kernel_of<sm80::FMHA<64, 64, 64, cute::bfloat16_t, 128>>();
}  // namespace cutlass_ext

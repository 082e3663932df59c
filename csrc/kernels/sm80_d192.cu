// fp16 and bf16 on mma.sync tensor cores, head_dim up to 192.
#include "../fmha/sm80/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm80_f16_d192_large = kernel_of<sm80::FMHA<64, 80, 192, cute::half_t, 128, 1>>();
extern Kernel const sm80_f16_d192_small = kernel_of<sm80::FMHA<64, 32, 192, cute::half_t, 128>>();
extern Kernel const sm80_bf16_d192_large = kernel_of<sm80::FMHA<64, 80, 192, cute::bfloat16_t, 128, 1>>();
extern Kernel const sm80_bf16_d192_small = kernel_of<sm80::FMHA<64, 32, 192, cute::bfloat16_t, 128>>();
}  // namespace cutlass_ext

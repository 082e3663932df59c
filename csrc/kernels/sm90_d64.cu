// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 64; _mods are for softcap and ALiBi.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm90_f16_d64_large = kernel_of<sm90::FMHA<192, 128, 64, 64, cute::half_t, 3, 2, false>>();
extern Kernel const sm90_f16_d64_small = kernel_of<sm90::FMHA<128, 128, 64, 64, cute::half_t, 3, 2, false>>();
extern Kernel const sm90_f16_d64_mods = kernel_of<sm90::FMHA<128, 128, 64, 64, cute::half_t, 3, 2, true>>();
extern Kernel const sm90_bf16_d64_large = kernel_of<sm90::FMHA<192, 128, 64, 64, cute::bfloat16_t, 3, 2, false>>();
extern Kernel const sm90_bf16_d64_small = kernel_of<sm90::FMHA<128, 128, 64, 64, cute::bfloat16_t, 3, 2, false>>();
extern Kernel const sm90_bf16_d64_mods = kernel_of<sm90::FMHA<128, 128, 64, 64, cute::bfloat16_t, 3, 2, true>>();
}  // namespace cutlass_ext

// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 96; _mods are for softcap and ALiBi.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm90_f16_d96 = kernel_of<sm90::FMHA<128, 128, 96, 96, cute::half_t, 2, 2, false>>();
extern Kernel const sm90_f16_d96_mods = kernel_of<sm90::FMHA<128, 128, 96, 96, cute::half_t, 2, 2, true>>();
extern Kernel const sm90_bf16_d96 = kernel_of<sm90::FMHA<128, 128, 96, 96, cute::bfloat16_t, 2, 2, false>>();
extern Kernel const sm90_bf16_d96_mods = kernel_of<sm90::FMHA<128, 128, 96, 96, cute::bfloat16_t, 2, 2, true>>();
}  // namespace cutlass_ext

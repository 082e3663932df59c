// fp16 and bf16 on Hopper's tensor cores (WGMMA), head_dim up to 192 for Q and K, 128 for V; _mods are for softcap and
// ALiBi.
#include "../fmha/sm90/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm90_f16_d192_128 = kernel_of<sm90::FMHA<128, 112, 192, 128, cute::half_t, 2, 1, false>>();
extern Kernel const sm90_f16_d192_128_mods = kernel_of<sm90::FMHA<128, 112, 192, 128, cute::half_t, 2, 1, true>>();
extern Kernel const sm90_bf16_d192_128 = kernel_of<sm90::FMHA<128, 112, 192, 128, cute::bfloat16_t, 2, 1, false>>();
extern Kernel const sm90_bf16_d192_128_mods = kernel_of<sm90::FMHA<128, 112, 192, 128, cute::bfloat16_t, 2, 1, true>>();
}  // namespace cutlass_ext

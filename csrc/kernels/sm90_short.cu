// fp16 and bf16 on Hopper's tensor cores (WGMMA), short launches, head_dim up to 128: several CTAs of one warpgroup on
// a multiprocessor, and one of two.
#include "../fmha/sm90/short.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
extern Kernel const sm90_f16_d64_short_1 = kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 1, 1>>(1);
extern Kernel const sm90_f16_d64_short_2 = kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 4, 2>>(2);
extern Kernel const sm90_bf16_d64_short_1 = kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 1, 1>>(1);
extern Kernel const sm90_bf16_d64_short_2 = kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 4, 2>>(2);
extern Kernel const sm90_f16_d128_short_1 = kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 1, 1>>(1);
extern Kernel const sm90_f16_d128_short_2 = kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 4, 2>>(2);
extern Kernel const sm90_bf16_d128_short_1 = kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 1, 1>>(1);
extern Kernel const sm90_bf16_d128_short_2 = kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 4, 2>>(2);
}  // namespace cutlass_ext

// fp16 and bf16 on Hopper's tensor cores (WGMMA), short launches, head_dim up to 128: several CTAs of one warpgroup on
// a multiprocessor, and one of two.
#include "../fmha/sm90/short.hpp"
#include "kernel.hpp"
#include "tensor_maps.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 1, 1>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 4, 2>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 1, 1>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 4, 2>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 1, 1, feature::Mask>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::half_t, 1, 1, feature::kUnlike | feature::Packed>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 1, 1, feature::Mask>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::half_t, 1, 1, feature::kUnlike | feature::Packed>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 1, 1>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 4, 2>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 1, 1>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 4, 2>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 1, 1, feature::Mask>>(),
    kernel_of<sm90::ShortFMHA<64, 64, cute::bfloat16_t, 1, 1, feature::kUnlike | feature::Packed>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 1, 1, feature::Mask>>(),
    kernel_of<sm90::ShortFMHA<64, 128, cute::bfloat16_t, 1, 1, feature::kUnlike | feature::Packed>>(),
};
}  // namespace cutlass_ext

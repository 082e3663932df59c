// Decoding fp16 and bf16 on Hopper: with a cluster of CTAs for each sequence and KV head (`true`: with new keys), and
// beside a launch that prefills (`true`: plain calls alone).
#include "../fmha/decode/cluster.hpp"
#include "../fmha/decode/fmha.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static RegisteredKernels const kernels_here{
    kernel_of<decode::ClusterDecode<64, cute::half_t, false>>(),
    kernel_of<decode::ClusterDecode<64, cute::half_t, true>>(),
    kernel_of<decode::ClusterDecode<128, cute::half_t, false>>(),
    kernel_of<decode::ClusterDecode<128, cute::half_t, true>>(),
    kernel_of<decode::DecodeBeside<64, cute::half_t, 12, 4, true>>(),
    kernel_of<decode::DecodeBeside<64, cute::half_t, 8, 6, false>>(),
    kernel_of<decode::DecodeBeside<128, cute::half_t, 12, 2, true>>(),
    kernel_of<decode::DecodeBeside<128, cute::half_t, 8, 3, false>>(),
    kernel_of<decode::ClusterDecode<64, cute::bfloat16_t, false>>(),
    kernel_of<decode::ClusterDecode<64, cute::bfloat16_t, true>>(),
    kernel_of<decode::ClusterDecode<128, cute::bfloat16_t, false>>(),
    kernel_of<decode::ClusterDecode<128, cute::bfloat16_t, true>>(),
    kernel_of<decode::DecodeBeside<64, cute::bfloat16_t, 12, 4, true>>(),
    kernel_of<decode::DecodeBeside<64, cute::bfloat16_t, 8, 6, false>>(),
    kernel_of<decode::DecodeBeside<128, cute::bfloat16_t, 12, 2, true>>(),
    kernel_of<decode::DecodeBeside<128, cute::bfloat16_t, 8, 3, false>>(),
};
}  // namespace cutlass_ext

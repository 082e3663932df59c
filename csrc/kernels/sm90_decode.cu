// Decoding fp16 and bf16 with a cluster of CTAs for each sequence and key head, on Hopper; `true`: with new keys.
#include "../fmha/decode/cluster.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
static Entered const kernels_here{
    kernel_of<decode::ClusterDecode<64, cute::half_t, false>>(),
    kernel_of<decode::ClusterDecode<64, cute::half_t, true>>(),
    kernel_of<decode::ClusterDecode<128, cute::half_t, false>>(),
    kernel_of<decode::ClusterDecode<128, cute::half_t, true>>(),
    kernel_of<decode::ClusterDecode<64, cute::bfloat16_t, false>>(),
    kernel_of<decode::ClusterDecode<64, cute::bfloat16_t, true>>(),
    kernel_of<decode::ClusterDecode<128, cute::bfloat16_t, false>>(),
    kernel_of<decode::ClusterDecode<128, cute::bfloat16_t, true>>(),
};
}  // namespace cutlass_ext

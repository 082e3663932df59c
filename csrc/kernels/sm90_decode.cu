// Decoding fp16 and bf16 with a cluster of CTAs for each sequence and key head, on Hopper: cluster.hpp.
#include "../decode_dispatch.hpp"
#include "../fmha/decode/cluster.hpp"

namespace cutlass_ext::decode {
namespace {

template <int HeadDim, class Element>
ClusterKernel cluster_kernel_of() {
  using Fmha = ClusterDecode<HeadDim, Element>;
  return {std::is_same_v<Element, cutlass::half_t> ? DType::Float16 : DType::BFloat16,
          HeadDim,
          Fmha::Traits::Threads,
          Fmha::kSharedBytes,
          {reinterpret_cast<void const*>(Fmha::kernel), reinterpret_cast<void const*>(Fmha::appending_kernel)},
          [](DecodeParams const& params, cudaStream_t stream) { return Fmha{}(params, stream); }};
}

}  // namespace

extern ClusterKernel const f16_d64_cluster = cluster_kernel_of<64, cutlass::half_t>();
extern ClusterKernel const f16_d128_cluster = cluster_kernel_of<128, cutlass::half_t>();
extern ClusterKernel const bf16_d64_cluster = cluster_kernel_of<64, cutlass::bfloat16_t>();
extern ClusterKernel const bf16_d128_cluster = cluster_kernel_of<128, cutlass::bfloat16_t>();
}  // namespace cutlass_ext::decode

// Describes one instantiation of the decode kernel to its dispatch. Included by kernels/decode_*.cu, each of which
// names its tiles.
#pragma once

#include "../decode_dispatch.hpp"
#include "../fmha/decode/fmha.hpp"

namespace cutlass_ext::decode {

template <int HeadDim, class Element, int RowWarps, int KeyWarps, int TileKeys, int Stages>
Kernel decode_kernel_of() {
  using Fmha = Decode<HeadDim, Element, RowWarps, KeyWarps, TileKeys, Stages>;
  static_assert(Fmha::kSharedBytes <= 99 * 1024, "what a block has on compute capability 8.6");
  static_assert(!Fmha::HasLean || int(Fmha::Lean::Threads) == int(Fmha::Traits::Threads));
  return {std::is_same_v<Element, float>             ? DType::Float32
          : std::is_same_v<Element, cutlass::half_t> ? DType::Float16
                                                     : DType::BFloat16,
          HeadDim,
          Fmha::Traits::Rows,
          TileKeys,
          Fmha::Traits::Threads,
          Fmha::kSharedBytes,
          {reinterpret_cast<void const*>(Fmha::kernel), reinterpret_cast<void const*>(Fmha::plain_kernel)},
          Fmha::lean_entry(),
          Fmha::kLeanSharedBytes,
          [](DecodeParams const& params, cudaStream_t stream) { return Fmha{}(params, stream); }};
}

}  // namespace cutlass_ext::decode

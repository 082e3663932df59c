// Decoding fp16 and bf16 by WGMMA on Hopper, in tiles of 64 packed query rows. With 96 KB of ring two CTAs share a
// multiprocessor: one copies while the other multiplies.
#include "../fmha/decode/fmha.hpp"
#include "../fmha/decode/warpgroup_math.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
template <int HeadDim, class Element, int TileKeys, int Stages>
using WarpgroupDecode = decode::Decode<HeadDim, Element, 4, 1, TileKeys, Stages, false, true>;

static RegisteredKernels const kernels_here{
    kernel_of<WarpgroupDecode<128, cute::half_t, 64, 3>>(),
    kernel_of<WarpgroupDecode<192, cute::half_t, 32, 3>>(),
    kernel_of<WarpgroupDecode<256, cute::half_t, 32, 2>>(),
    kernel_of<WarpgroupDecode<128, cute::bfloat16_t, 64, 3>>(),
    kernel_of<WarpgroupDecode<192, cute::bfloat16_t, 32, 3>>(),
    kernel_of<WarpgroupDecode<256, cute::bfloat16_t, 32, 2>>(),
};
}  // namespace cutlass_ext

// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 128.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
// Accumulators of a thread, and shared memory of a CTA:
//   keys   dK and dV of 16 keys a warp 2 x 64, S and dP of 32 rows 2 x 16; K, V 64 KB, two stages of Q, dO 32 KB
//   rows   dQ of 32 rows a warp 128, S and dP of 32 keys 2 x 32; 96 KB likewise, two CTAs a multiprocessor on Hopper
//   rows, for what pairs have: of 16 rows a warp half of that; 64 KB
//   all    of 64 rows. Two warps share 32 keys: each has the scores of 32 rows, 2 x 32, and 64 columns of dK and dV,
//          2 x 64; dQ of 32 rows and columns a warp 32. K, V 64 KB, two stages of Q, dO 64 KB, P and dS of two tiles
//          32 KB: one CTA a multiprocessor, where there is as much. With 16 columns of dQ at a time it took 9% more.
static RegisteredKernels const kernels_here{
    kernel_of<sm80::Backward<Kind::AllGradients, false, 64, 128, 128, cute::half_t, 256, 2, 0, 2>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 128, 128, cute::half_t, 256>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 128, 128, cute::half_t, 256>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 128, 32, 128, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 128, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::AllGradients, false, 64, 128, 128, cute::bfloat16_t, 256, 2, 0, 2>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 128, 128, cute::bfloat16_t, 256>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 128, 128, cute::bfloat16_t, 256>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 128, 32, 128, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 128, cute::bfloat16_t, 128>>(),
};
}  // namespace cutlass_ext

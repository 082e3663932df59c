// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 256.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
// Accumulators of a thread, and shared memory of a CTA, two of which a multiprocessor holds on Hopper:
//   keys   dV, then dK, of 16 keys a warp 128, S and dP of 32 rows 2 x 16; K, V 64 KB, one stage of Q, dO 32 KB
//   rows   dQ of 16 rows a warp 128, S and dP of 32 keys 2 x 16; 96 KB likewise
//   all    as keys, and beside dK dQ of 32 rows and, one half after the other, 64 columns a warp 32; dS of two
//          tiles 8 KB
static RegisteredKernels const kernels_here{
    kernel_of<sm80::Backward<Kind::AllGradients, false, 32, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 256, cute::half_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::AllGradients, false, 32, 64, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 256, cute::bfloat16_t, 128, 1>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 256, cute::bfloat16_t, 128, 1>>(),
};
}  // namespace cutlass_ext

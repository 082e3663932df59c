// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 192.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
// Accumulators of a thread, and shared memory of a CTA, two of which a multiprocessor holds on Hopper:
//   keys   dV, then dK, of 16 keys a warp 96, S and dP of 32 rows 2 x 16; K, V 48 KB, two stages of Q, dO 48 KB
//   rows   dQ of 16 rows a warp 96, S and dP of 32 keys 2 x 16; 96 KB likewise
//   all    of 64 rows. Four warps share 32 keys: each has the scores of 16 rows, 2 x 16, and 16 columns of each panel
//          of dK and dV, 2 x 48; dQ of 32 rows and, 16 columns after the others, 48 columns a warp 16. K, V 48 KB, two
//          stages of Q, dO 96 KB, P and dS of two tiles 16 KB: one CTA a multiprocessor
static RegisteredKernels const kernels_here{
    kernel_of<sm80::Backward<Kind::AllGradients, false, 64, 64, 192, cute::half_t, 256, 2, 0, 4>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 192, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 192, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 192, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 192, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::AllGradients, false, 64, 64, 192, cute::bfloat16_t, 256, 2, 0, 4>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 64, 192, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 64, 192, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 64, 32, 192, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 64, 32, 192, cute::bfloat16_t, 128>>(),
};
}  // namespace cutlass_ext

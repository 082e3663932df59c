// Gradients of fp16 and bf16 on mma.sync tensor cores, head_dim up to 64.
#include "../fmha/backward/sm80.hpp"
#include "kernel.hpp"

namespace cutlass_ext {
// Accumulators of a thread, and shared memory of a CTA, two of which a multiprocessor of 8.0 and 9.0 holds:
//   keys   dK and dV of 32 keys a warp 2 x 64, S and dP of 32 rows 2 x 32; K, V 32 KB, two stages of Q, dO 16 KB
//   rows   dQ of 32 rows a warp 64, S and dP of 32 keys 2 x 32, Q and dO as operands 2 x 32; 48 KB likewise
//   all    as keys, and dQ of 32 rows and 16 columns a warp 16; dS of two tiles 16 KB
static RegisteredKernels const kernels_here{
    kernel_of<sm80::Backward<Kind::AllGradients, false, 32, 128, 64, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 128, 64, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 128, 64, cute::half_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 128, 32, 64, cute::half_t, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 128, 32, 64, cute::half_t, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Kind::AllGradients, false, 32, 128, 64, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, false, 32, 128, 64, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::KeyGradients, true, 32, 128, 64, cute::bfloat16_t, 128>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, false, 128, 32, 64, cute::bfloat16_t, 128, 2, 2>>(),
    kernel_of<sm80::Backward<Kind::QueryGradients, true, 128, 32, 64, cute::bfloat16_t, 128, 2, 2>>(),
};
}  // namespace cutlass_ext

// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 256.
#include "decode_kernel.hpp"

namespace cutlass_ext::decode {
extern Kernel const f16_d256_rows16 = decode_kernel_of<256, cutlass::half_t, 1, 2, 16, 2>();
extern Kernel const f16_d256_rows64 = decode_kernel_of<256, cutlass::half_t, 4, 1, 32, 2>();
extern Kernel const bf16_d256_rows16 = decode_kernel_of<256, cutlass::bfloat16_t, 1, 2, 16, 2>();
extern Kernel const bf16_d256_rows64 = decode_kernel_of<256, cutlass::bfloat16_t, 4, 1, 32, 2>();
}  // namespace cutlass_ext::decode

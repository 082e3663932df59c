// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 64.
#include "decode_kernel.hpp"

namespace cutlass_ext::decode {
extern Kernel const f16_d64_rows16 = decode_kernel_of<64, cutlass::half_t, 1, 4, 16, 6>();
extern Kernel const f16_d64_rows64 = decode_kernel_of<64, cutlass::half_t, 4, 1, 64, 6>();
extern Kernel const bf16_d64_rows16 = decode_kernel_of<64, cutlass::bfloat16_t, 1, 4, 16, 6>();
extern Kernel const bf16_d64_rows64 = decode_kernel_of<64, cutlass::bfloat16_t, 4, 1, 64, 6>();
}  // namespace cutlass_ext::decode

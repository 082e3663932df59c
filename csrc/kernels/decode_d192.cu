// Decoding fp16 and bf16 on mma.sync tensor cores, head_dim up to 192.
#include "decode_kernel.hpp"

namespace cutlass_ext::decode {
extern Kernel const f16_d192_rows16 = decode_kernel_of<192, cutlass::half_t, 1, 2, 16, 3>();
extern Kernel const f16_d192_rows64 = decode_kernel_of<192, cutlass::half_t, 4, 1, 32, 3>();
extern Kernel const bf16_d192_rows16 = decode_kernel_of<192, cutlass::bfloat16_t, 1, 2, 16, 3>();
extern Kernel const bf16_d192_rows64 = decode_kernel_of<192, cutlass::bfloat16_t, 4, 1, 32, 3>();
}  // namespace cutlass_ext::decode

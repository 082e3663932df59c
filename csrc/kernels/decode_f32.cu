// Decoding fp32 on CUDA cores.
#include "decode_kernel.hpp"

namespace cutlass_ext::decode {
extern Kernel const f32_d64_rows16 = decode_kernel_of<64, float, 1, 4, 8, 4>();
extern Kernel const f32_d128_rows16 = decode_kernel_of<128, float, 1, 4, 8, 2>();
extern Kernel const f32_d256_rows16 = decode_kernel_of<256, float, 1, 2, 8, 2>();
}  // namespace cutlass_ext::decode

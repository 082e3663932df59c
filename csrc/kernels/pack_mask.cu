// A mask to bits.
#include "../host/pack_mask.hpp"

#include "../host/error.hpp"

namespace cutlass_ext {

void pack_mask(ByteMask const& mask, uint32_t* bits, cudaStream_t stream) {
  int64_t const words = int64_t(mask.batch) * mask.heads * mask.rows * Mask::words_of(mask.keys),
                ctas = (words + kPackThreads - 1) / kPackThreads;
  if (ctas == 0) return;
  if (ctas > INT32_MAX)
    fail("ValueError", "mask: has ", words, " words of 32 keys; a launch has room for fewer than 2^39");
  pack_mask_kernel<<<static_cast<unsigned>(ctas), kPackThreads, 0, stream>>>(mask, bits);
  check_cuda(cudaGetLastError(), "packing the mask");
}

}  // namespace cutlass_ext

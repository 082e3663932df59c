// A mask to bits and a map of their blocks.
#include "../host/pack_mask.hpp"

#include "../host/error.hpp"

namespace cutlass_ext {

void pack_mask(ByteMask const& mask, uint32_t* bits, cudaStream_t stream) {
  int64_t const ctas = int64_t(mask.batch) * mask.heads * Mask::blocks_of(mask.rows) * pack_ctas(mask.keys);
  if (ctas == 0) return;
  pack_mask_kernel<<<grid_of(ctas, "mask"), kPackThreads, 0, stream>>>(mask, bits);
  check_cuda(cudaGetLastError(), "packing the mask");
}

}  // namespace cutlass_ext

// A bias to one whose rows are whole vectors.
#include "../host/align_bias.hpp"

#include "../fmha/pairs.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {

Pairs align_bias(Params const& params, cudaStream_t stream, Allocate const& allocate) {
  BiasCopy const copy(bias_of(params), params);
  int64_t const ctas = copy.ctas();  // fewer than 2^31: of 8 KB each
  if (ctas == 0 || is_in_vectors(copy.from) || !is_alignable(copy.from)) return params;
  auto* const to = static_cast<uint16_t*>(allocate(copy.size() * sizeof(uint16_t)));
  align_bias_kernel<<<static_cast<unsigned>(ctas), kAlignThreads, 0, stream>>>(copy, to);
  check_cuda(cudaGetLastError(), "copying rows to whole vectors");
  return {copy.at(to), params.mask, params.dropout};
}

}  // namespace cutlass_ext

// Writes new keys to a cache ahead of a kernel that reads it alone, for each dtype.
#include "../fmha/append.hpp"
#include "../host/append.hpp"

#include <cutlass/numeric_types.h>

#include "../host/error.hpp"

namespace cutlass_ext {

void append_new_keys(DType dtype, Params const& params, void* rotated_q, cudaStream_t stream) {
  int64_t const units = params.batch * append::Units(params).of_sequence();
  if (units == 0) return;
  auto const kernel = dtype == DType::Float32   ? append::append_kernel<float>
                      : dtype == DType::Float16 ? append::append_kernel<cutlass::half_t>
                                                : append::append_kernel<cutlass::bfloat16_t>;
  if (units > INT32_MAX) fail("ValueError", "q: has more rows than one launch can rotate and append");
  unsigned const ctas = (units + append::kWarps - 1) / append::kWarps;
  kernel<<<ctas, append::kWarps * 32, 0, stream>>>(params, rotated_q);
  check_cuda(cudaGetLastError(), "launching the append of new keys");
}

}  // namespace cutlass_ext

// Writes new keys to a cache ahead of a kernel that reads it alone, for each dtype.
#include "../fmha/append.hpp"
#include "../host/append.hpp"

#include <cutlass/numeric_types.h>

#include "../host/error.hpp"

namespace cutlass_ext {
namespace {

template <class Element>
void launch_append(Params const& params, void* rotated_q, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(Element);
  int const columns = append::takes_vectors(params) ? kVector : 1;
  int64_t const threads = append::Threads(params, columns).all(),
                ctas_a_sequence = (threads + append::kThreads - 1) / append::kThreads,
                ctas = params.batch * ctas_a_sequence;
  if (ctas == 0) return;
  if (threads > INT32_MAX || ctas > INT32_MAX)
    fail("ValueError", params.rotary.cos ? "q, k" : "k", ": more rows than one launch can rotate and append");
  auto const kernel = columns > 1 ? append::append_kernel<Element, kVector> : append::append_kernel<Element, 1>;
  kernel<<<unsigned(ctas), append::kThreads, 0, stream>>>(params, rotated_q, unsigned(ctas_a_sequence));
  check_cuda(cudaGetLastError(), "launching the append of new keys");
}

}  // namespace

void append_new_keys(DType dtype, Params const& params, void* rotated_q, cudaStream_t stream) {
  auto const launch = dtype == DType::Float32   ? launch_append<float>
                      : dtype == DType::Float16 ? launch_append<cutlass::half_t>
                                                : launch_append<cutlass::bfloat16_t>;
  launch(params, rotated_q, stream);
}

}  // namespace cutlass_ext

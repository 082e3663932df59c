// dQ from the sums of Hopper's kernels, for each dtype and head_dim that these have.
#include "../fmha/backward/sums.hpp"
#include "../host/gradient_steps.hpp"

#include "../host/error.hpp"

namespace cutlass_ext {

void finish_dq(Kernel const& kernel, BackwardParams const& params, cudaStream_t stream) {
  dim3 const ctas(Scheduler::tiles_of(params.n_q, kSumsRows), params.heads_q, params.batch);
  if (ctas.x == 0 || ctas.z == 0) return;
  bool const half = kernel.dtype == DType::Float16;
  auto const run = kernel.head_dim <= 64 ? half ? dq_kernel<64, cutlass::half_t> : dq_kernel<64, cutlass::bfloat16_t>
                   : half                ? dq_kernel<128, cutlass::half_t>
                                         : dq_kernel<128, cutlass::bfloat16_t>;
  run<<<ctas, kSumsThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launching the last step of dQ");
}

}  // namespace cutlass_ext

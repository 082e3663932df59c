// Runs the decode kernels on tensors that are checked and described: allocates results and workspace, plans, launches.
// Included by the operators that decode, torch_ops.cpp and torch_kvcache.cpp.
#pragma once

#include <string>
#include <vector>

#include "decode_dispatch.hpp"
#include "torch_support.hpp"

namespace cutlass_ext {

/// The kernel for `params`, which it completes. The tensors' device is current.
inline decode::Plan plan_decode(decode::DecodeParams& params, View const& q, int64_t num_splits,
                                std::string const& backend, bool want_reason) {
  decode::Plan plan;
  check_cuda(decode::plan(&params, *dtype_of(q), backend, static_cast<int>(num_splits), want_reason, &plan),
             "choosing a kernel");
  return plan;
}

/// Completes `params` by results, `out` [B, N_q, H_q, d_v] and if asked for `lse` [B, H_q, N_q], and launches. The
/// tensors' device is current.
inline std::vector<Tensor> launch_decode(decode::Plan const& plan, decode::DecodeParams& params, View const& q,
                                         bool return_lse) {
  int const device = q.device_index;
  int32_t const fp32 = aoti_torch_dtype_float32();
  std::vector<Tensor> results;
  results.push_back(empty({params.batch, params.n_q, params.heads_q, params.head_dim_v}, aoti_dtype(q.dtype), device));
  params.o = results[0].mutable_data_ptr();
  if (return_lse) {
    results.push_back(empty({params.batch, params.heads_q, params.n_q}, fp32, device));
    params.lse = static_cast<float*>(results[1].mutable_data_ptr());
  }
  params.o_stride = {int64_t(params.n_q) * params.heads_q * params.head_dim_v,
                     int64_t(params.heads_q) * params.head_dim_v, params.head_dim_v};
  if (params.batch == 0 || params.n_q == 0) return results;

  OptionalTensor partial;  // freed on return: the caching allocator reuses it in stream order
  if (plan.partial_rows > 0) {
    partial = empty({plan.partial_rows * (params.head_dim_v + 2)}, fp32, device);
    params.o_partial = static_cast<float*>(partial->mutable_data_ptr());
    params.lse_partial = params.o_partial + plan.partial_rows * params.head_dim_v;
  }
  check_cuda(decode::run(plan, &params, current_stream(device)), "launching the kernel");
  return results;
}

}  // namespace cutlass_ext

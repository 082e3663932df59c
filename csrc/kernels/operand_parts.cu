// fp32 to two fp16 parts, for each number of columns that kernels multiply.
#include "../fmha/operand_parts.hpp"

#include "../host/error.hpp"
#include "../host/operand_parts.hpp"

namespace cutlass_ext {
namespace {

using operand_parts::Parts;

/// What the workspace holds, one after the other.
struct Places {
  size_t flag, maxima, scales, gradient_scales, q, k, v, dout, end;

  Places(Params const& p, int cols, bool with_dout) {
    constexpr size_t kAligned = 256;
    size_t at = 0;
    auto const place = [&](size_t bytes) {
      size_t const here = at;
      at += (bytes + kAligned - 1) / kAligned * kAligned;
      return here;
    };
    auto const parts = [&](int rows, int heads) {
      return place(size_t(p.stored_batch()) * operand_parts::strides_of(rows, heads, cols).batch * sizeof(__half));
    };
    size_t const pairs = size_t(p.batch) * p.heads_kv;
    flag = place(sizeof(int));
    maxima = place(pairs * operand_parts::kTensors * (cols + 1) * sizeof(uint32_t));
    scales = place(pairs * sizeof(PartScales));
    gradient_scales = place(with_dout ? pairs * sizeof(GradientScales) : 0);
    q = parts(p.stored_rows(), p.heads_q);
    k = parts(p.stored_keys(), p.heads_kv);
    v = parts(p.stored_keys(), p.heads_kv);
    dout = with_dout ? parts(p.stored_rows(), p.heads_q) : at;
    end = at;
  }
};

/// `params` with the parts instead, once the launches have made them; those of dout, where there is one, are for the
/// caller to take.
Params make(Params const& params, Parts const& parts, int head_dim, size_t zeros, cudaStream_t stream) {
  int64_t const ctas = params.batch * operand_parts::Chunks(params, parts.dout).of_sequence();
  if (ctas > INT32_MAX) fail("ValueError", "q: has more rows than one launch can split; use precision=\"highest\"");
  check_cuda(cudaMemsetAsync(parts.out_of_range, 0, zeros, stream), "clearing what is known of the operands");
  auto const launch = [&](auto const& measure, auto const& split) {
    measure<<<static_cast<unsigned>(ctas), operand_parts::kThreads, 0, stream>>>(params, parts);
    check_cuda(cudaGetLastError(), "measuring the operands");
    split<<<static_cast<unsigned>(ctas), operand_parts::kThreads, 0, stream>>>(params, parts);
    check_cuda(cudaGetLastError(), "splitting the operands");
  };
  if (ctas > 0) {
    if (head_dim == 64)
      launch(operand_parts::measure<64>, operand_parts::split<64>);
    else
      launch(operand_parts::measure<128>, operand_parts::split<128>);
  }

  Params p = params;
  p.q = parts.q, p.k = parts.k, p.v = parts.v;
  p.q_stride = operand_parts::strides_of(p.stored_rows(), p.heads_q, head_dim);
  p.k_stride = p.v_stride = operand_parts::strides_of(p.stored_keys(), p.heads_kv, head_dim);
  p.part_scales = parts.scales;
  p.out_of_range = parts.out_of_range;
  return p;
}

Parts parts_at(void* workspace, Places const& places) {
  auto const at = [&](size_t place) { return static_cast<char*>(workspace) + place; };
  Parts parts{};
  parts.q = reinterpret_cast<__half*>(at(places.q));
  parts.k = reinterpret_cast<__half*>(at(places.k));
  parts.v = reinterpret_cast<__half*>(at(places.v));
  parts.maxima = reinterpret_cast<uint32_t*>(at(places.maxima));
  parts.out_of_range = reinterpret_cast<int*>(at(places.flag));
  parts.scales = reinterpret_cast<PartScales*>(at(places.scales));
  return parts;
}

}  // namespace

size_t bytes_of_parts(Params const& params, int head_dim) { return Places(params, head_dim, false).end; }
size_t bytes_of_parts(BackwardParams const& params, int head_dim) { return Places(params, head_dim, true).end; }

Params make_parts(Params const& params, int head_dim, void* workspace, cudaStream_t stream) {
  Places const places(params, head_dim, false);
  return make(params, parts_at(workspace, places), head_dim, places.scales, stream);
}

BackwardParams make_parts(BackwardParams const& params, int head_dim, void* workspace, cudaStream_t stream) {
  Places const places(params, head_dim, true);
  Parts parts = parts_at(workspace, places);
  parts.dout = reinterpret_cast<__half*>(static_cast<char*>(workspace) + places.dout);
  parts.dout_from = static_cast<float const*>(params.dout);
  parts.dout_stride = params.dout_stride;
  parts.gradient_scales = reinterpret_cast<GradientScales*>(static_cast<char*>(workspace) + places.gradient_scales);
  BackwardParams p = params;
  static_cast<Params&>(p) = make(params, parts, head_dim, places.scales, stream);
  p.dout = parts.dout;
  p.dout_stride = p.q_stride;
  p.gradient_scales = parts.gradient_scales;
  return p;
}

}  // namespace cutlass_ext

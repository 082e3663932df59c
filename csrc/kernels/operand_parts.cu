// fp32 to two fp16 parts, for each number of columns that kernels multiply.
#include "../fmha/operand_parts.hpp"

#include "../host/error.hpp"
#include "../host/operand_parts.hpp"

namespace cutlass_ext {
namespace {

using operand_parts::Parts;

/// What the workspace holds, one after the other.
struct Places {
  size_t flag, maxima, scales, pages, gradient_scales, q, k, v, dout, end;

  Places(Params const& p, int cols, int cols_v, bool with_dout) {
    constexpr size_t kAligned = 256;
    size_t at = 0;
    auto const place = [&](size_t bytes) {
      size_t const here = at;
      at += (bytes + kAligned - 1) / kAligned * kAligned;
      return here;
    };
    auto const parts = [&](int batch, int rows, int heads, int cols) {
      return place(size_t(batch) * operand_parts::strides_of(rows, heads, cols).batch * sizeof(__half));
    };
    int const batch_of_keys = p.paged() ? p.batch : p.stored_batch();
    size_t const pairs = size_t(p.batch) * p.heads_kv;
    flag = place(sizeof(int));
    maxima = place(pairs * operand_parts::kTensors * operand_parts::kMaxima * sizeof(uint32_t));
    scales = place(pairs * sizeof(PartScales));
    pages = place(p.paged() ? p.batch * sizeof(int) : 0);
    gradient_scales = place(with_dout ? pairs * sizeof(GradientScales) : 0);
    q = parts(p.stored_batch(), p.stored_rows(), p.heads_q, cols);
    k = parts(batch_of_keys, p.stored_keys(), p.heads_kv, cols);
    v = parts(batch_of_keys, p.stored_keys(), p.heads_kv, cols_v);
    dout = parts(with_dout ? p.stored_batch() : 0, p.stored_rows(), p.heads_q, cols_v);
    end = at;
  }
};

/// `params` with the parts instead, once the launches have made them; those of dout, where there is one, are for the
/// caller to take.
Params make(Params const& params, Parts const& parts, int head_dim, int head_dim_v, size_t zeros, cudaStream_t stream) {
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
    if (head_dim == 64) {
      launch(operand_parts::measure<64, 64>, operand_parts::split<64, 64>);
    } else if (head_dim == 128) {
      launch(operand_parts::measure<128, 128>, operand_parts::split<128, 128>);
    } else if (head_dim == 192) {
      launch(operand_parts::measure<192, 128>, operand_parts::split<192, 128>);
    } else {
      launch(operand_parts::measure<256, 256>, operand_parts::split<256, 256>);
    }
  }

  Params p = params;
  p.q = parts.q, p.k = parts.k, p.v = parts.v;
  p.q_stride = operand_parts::strides_of(p.stored_rows(), p.heads_q, head_dim);
  p.k_stride = operand_parts::strides_of(p.stored_keys(), p.heads_kv, head_dim);
  p.v_stride = operand_parts::strides_of(p.stored_keys(), p.heads_kv, head_dim_v);
  if (p.paged()) {
    p.set_one_page_each(parts.pages, p.n_kv);
    p.pages = p.batch;
  }
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
  parts.pages = reinterpret_cast<int*>(at(places.pages));
  return parts;
}

}  // namespace

size_t bytes_of_parts(Params const& params, int head_dim, int head_dim_v) {
  return Places(params, head_dim, head_dim_v, false).end;
}
size_t bytes_of_parts(BackwardParams const& params, int head_dim, int head_dim_v) {
  return Places(params, head_dim, head_dim_v, true).end;
}

Params make_parts(Params const& params, int head_dim, int head_dim_v, void* workspace, cudaStream_t stream) {
  Places const places(params, head_dim, head_dim_v, false);
  return make(params, parts_at(workspace, places), head_dim, head_dim_v, places.scales, stream);
}

BackwardParams make_parts(BackwardParams const& params, int head_dim, int head_dim_v, void* workspace,
                          cudaStream_t stream) {
  Places const places(params, head_dim, head_dim_v, true);
  Parts parts = parts_at(workspace, places);
  parts.dout = reinterpret_cast<__half*>(static_cast<char*>(workspace) + places.dout);
  parts.dout_from = static_cast<float const*>(params.dout);
  parts.dout_stride = params.dout_stride;
  parts.gradient_scales = reinterpret_cast<GradientScales*>(static_cast<char*>(workspace) + places.gradient_scales);
  BackwardParams p = params;
  static_cast<Params&>(p) = make(params, parts, head_dim, head_dim_v, places.scales, stream);
  p.dout = parts.dout;
  p.dout_stride = operand_parts::strides_of(p.stored_rows(), p.heads_q, head_dim_v);
  p.gradient_scales = parts.gradient_scales;
  return p;
}

}  // namespace cutlass_ext

// fp32 to two fp16 parts, for each number of columns that kernels multiply.
#include "../fmha/operand_parts.hpp"

#include "../host/error.hpp"
#include "../host/operand_parts.hpp"

namespace cutlass_ext {
namespace {

using operand_parts::Parts;

/// What the workspace holds, one after the other.
struct Places {
  size_t flag, maxima, scales, q, k, v, end;

  Places(Params const& p, int cols) {
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
    maxima = place(pairs * 3 * (cols + 1) * sizeof(uint32_t));
    scales = place(pairs * sizeof(PartScales));
    q = parts(p.stored_rows(), p.heads_q);
    k = parts(p.stored_keys(), p.heads_kv);
    v = parts(p.stored_keys(), p.heads_kv);
    end = at;
  }
};

}  // namespace

size_t bytes_of_parts(Params const& params, int head_dim) { return Places(params, head_dim).end; }

Params make_parts(Params const& params, int head_dim, void* workspace, cudaStream_t stream) {
  Places const places(params, head_dim);
  auto const at = [&](size_t place) { return static_cast<char*>(workspace) + place; };
  Parts const parts{reinterpret_cast<__half*>(at(places.q)), reinterpret_cast<__half*>(at(places.k)),
                    reinterpret_cast<__half*>(at(places.v)), reinterpret_cast<uint32_t*>(at(places.maxima)),
                    reinterpret_cast<int*>(at(places.flag)), reinterpret_cast<PartScales*>(at(places.scales))};
  int64_t const ctas = params.batch * operand_parts::Chunks(params).of_sequence();
  if (ctas > INT32_MAX) fail("ValueError", "q: has more rows than one launch can split; use precision=\"highest\"");
  check_cuda(cudaMemsetAsync(workspace, 0, places.scales, stream), "clearing what is known of the operands");
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

}  // namespace cutlass_ext

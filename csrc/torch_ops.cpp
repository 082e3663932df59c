// torch.ops.cutlass_ext.fmha_*: checks arguments, fills ForwardParams, allocates, launches. Imported as cutlass_ext._C,
// which registers the operators.
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_decode.hpp"

namespace cutlass_ext {
namespace {

// ---------------------------------------------------------------------------------------------- arguments
constexpr char kTensors[] = "(Tensor q, Tensor k, Tensor v, ";
constexpr char kPacking[] = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, ";
// A plain call leaves the last ones out, which saves 0.8 us of host time, and one without lse another 1.2 us. The
// defaults are those of PLAIN in cutlass_ext/_ops.py.
constexpr char kFeatures[] =
    "bool causal, SymInt? start_pos, bool return_lse, Tensor? start_positions=None, SymInt window_left=-1, "
    "SymInt window_right=-1, float? softmax_scale=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sink=None, Tensor? seqused_k=None, Tensor? leftpad_k=None, SymInt num_splits=0, str backend='auto')";

struct Arguments {
  View q, k, v;
  OptionalView cu_seqlens_q, cu_seqlens_k;  // packed sequences; both or none
  int64_t max_seqlen_q, max_seqlen_k;
  bool causal;
  std::optional<int64_t> start_pos;  // none, and no start_positions: "end"
  bool return_lse;
  OptionalView start_positions;
  int64_t window_left, window_right;
  std::optional<double> softmax_scale;
  double softcap;
  OptionalView alibi_slopes, sink, seqused_k, leftpad_k;
  int64_t num_splits;
  std::string const& backend;

  bool packed() const { return cu_seqlens_q.has_value(); }
  int64_t batch() const { return packed() ? cu_seqlens_q->size(0) - 1 : q.size(0); }
  bool on_cuda() const { return q.device_type == kCuda; }
  static inline int32_t const kCuda = aoti_torch_device_type_cuda();
};

/// An operator's boxed form from a function of Arguments, so that each parameter list stands once.
template <auto Body>
auto unpacked(Tensor q, Tensor k, Tensor v, bool causal, std::optional<int64_t> start_pos, bool return_lse,
              OptionalTensor start_positions, int64_t window_left, int64_t window_right,
              std::optional<double> softmax_scale, double softcap, OptionalTensor alibi_slopes, OptionalTensor sink,
              OptionalTensor seqused_k, OptionalTensor leftpad_k, int64_t num_splits, std::string backend) {
  return Body(Arguments{View(q),
                        View(k),
                        View(v),
                        std::nullopt,
                        std::nullopt,
                        0,
                        0,
                        causal,
                        start_pos,
                        return_lse,
                        view_of(start_positions),
                        window_left,
                        window_right,
                        softmax_scale,
                        softcap,
                        view_of(alibi_slopes),
                        view_of(sink),
                        view_of(seqused_k),
                        view_of(leftpad_k),
                        num_splits,
                        backend});
}

/// The same of the operators for packed sequences.
template <auto Body>
auto unpacked_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
                     int64_t max_seqlen_k, bool causal, std::optional<int64_t> start_pos, bool return_lse,
                     OptionalTensor start_positions, int64_t window_left, int64_t window_right,
                     std::optional<double> softmax_scale, double softcap, OptionalTensor alibi_slopes,
                     OptionalTensor sink, OptionalTensor seqused_k, OptionalTensor leftpad_k, int64_t num_splits,
                     std::string backend) {
  return Body(Arguments{View(q),
                        View(k),
                        View(v),
                        View(cu_seqlens_q),
                        View(cu_seqlens_k),
                        max_seqlen_q,
                        max_seqlen_k,
                        causal,
                        start_pos,
                        return_lse,
                        view_of(start_positions),
                        window_left,
                        window_right,
                        softmax_scale,
                        softcap,
                        view_of(alibi_slopes),
                        view_of(sink),
                        view_of(seqused_k),
                        view_of(leftpad_k),
                        num_splits,
                        backend});
}

void check_operand(char const* name, View const& t, Arguments const& a) {
  if (a.packed()) {
    check_heads(name, t, a.q, 3, "[total, heads, head_dim], which is what cu_seqlens_q goes with");
    return;
  }
  check_heads(name, t, a.q, 4, "[batch, seq, heads, head_dim], or cu_seqlens_q for packed sequences");
  if (t.size(0) != a.q.size(0))
    fail("ValueError", name, ": has batch ", t.size(0), " and q has ", a.q.size(0), "; they must be equal");
}

void check_packing(Arguments const& a) {
  View const& ends = *a.cu_seqlens_q;
  if (ends.dim() != 1 || ends.size(0) < 1) {
    fail("ValueError", "cu_seqlens_q: has shape ", ends.shape_text(),
         "; expected [batch + 1], the row where each sequence begins and the end of the last");
  }
  check_vector("cu_seqlens_q", a.cu_seqlens_q, a.q, ScalarType::Int, ends.size(0), "[batch + 1]");
  check_vector("cu_seqlens_k", a.cu_seqlens_k, a.q, ScalarType::Int, ends.size(0), "[batch + 1] of cu_seqlens_q");
  for (auto [name, n] : {std::pair("max_seqlen_q", a.max_seqlen_q), std::pair("max_seqlen_k", a.max_seqlen_k)}) {
    if (n < 0) fail("ValueError", name, ": is ", n, "; expected the length of the longest sequence");
  }
}

void check(Arguments const& a) {
  check_operand("q", a.q, a);
  check_operand("k", a.k, a);
  check_operand("v", a.v, a);
  if (a.packed()) check_packing(a);
  int64_t const batch = a.batch(), heads_q = a.q.size(-2), heads_kv = a.k.size(-2);
  if (a.q.size(-1) != a.k.size(-1))
    fail("ValueError", "k: has head_dim ", a.k.size(-1), " and q has ", a.q.size(-1), "; they must be equal");
  if (a.v.size(-3) != a.k.size(-3) || a.v.size(-2) != heads_kv) {
    fail("ValueError", "v: has shape ", a.v.shape_text(), " and k ", a.k.shape_text(),
         "; they must agree in all but the last dimension");
  }
  check_groups(heads_q, "k", heads_kv, "k and v");
  check_vector("start_pos", a.start_positions, a.q, ScalarType::Int, batch, "[batch]");
  check_vector("seqused_k", a.seqused_k, a.q, ScalarType::Int, batch, "[batch]");
  check_vector("leftpad_k", a.leftpad_k, a.q, ScalarType::Int, batch, "[batch]");
  check_options(a.q, batch, heads_q, a.alibi_slopes, a.sink, a.start_pos, a.window_left, a.window_right,
                a.softmax_scale, a.softcap, a.num_splits, a.backend);
}

// ---------------------------------------------------------------------------------------------- parameters
ForwardParams params_of(Arguments const& a) {
  ForwardParams p;
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.q_stride = strides_of(a.q);
  p.k_stride = strides_of(a.k);
  p.v_stride = strides_of(a.v);
  p.batch = static_cast<int>(a.batch());
  p.n_q = static_cast<int>(a.q.size(-3));
  p.heads_q = static_cast<int>(a.q.size(-2));
  p.head_dim = static_cast<int>(a.q.size(-1));
  p.n_kv = static_cast<int>(a.k.size(-3));
  p.heads_kv = static_cast<int>(a.k.size(-2));
  p.head_dim_v = static_cast<int>(a.v.size(-1));
  if (a.packed()) {
    p.cu_seqlens_q = data_of<int>(a.cu_seqlens_q);
    p.cu_seqlens_k = data_of<int>(a.cu_seqlens_k);
    p.total_q = p.n_q;
    p.total_k = p.n_kv;
    p.n_q = static_cast<int>(std::min<int64_t>(a.max_seqlen_q, p.total_q));
    p.n_kv = static_cast<int>(std::min<int64_t>(a.max_seqlen_k, p.total_k));
  }
  set_options(p, a);
  p.seqused_k = data_of<int>(a.seqused_k);
  p.leftpad_k = data_of<int>(a.leftpad_k);
  return p;
}

Plan plan_of(Arguments const& a, ForwardParams const& params, bool want_reason) {
  Plan plan;
  check_cuda(plan_forward(params, *dtype_of(a.q), a.backend, static_cast<int>(a.num_splits), want_reason, &plan),
             "choosing a kernel");
  return plan;
}

// ---------------------------------------------------------------------------------------------- operators
/// `out`, and if asked for `lse`.
std::vector<Tensor> fmha_forward(Arguments const& a) {
  check(a);
  ForwardParams params = params_of(a);
  int const device = a.q.device_index;
  DeviceGuard const guard(device);
  decode::DecodeParams decoding = decode::params_of(params);
  if (decode::takes(decoding, *dtype_of(a.q))) {
    decode::Plan const plan = plan_decode(decoding, a.q, a.num_splits, a.backend, false);
    if (plan.launch) return launch_decode(plan, decoding, a.q, a.return_lse);
  }
  Plan plan = plan_of(a, params, false);
  if (!plan.kernel) fail("NotImplementedError", plan_of(a, params, true).reason);

  int32_t const fp32 = aoti_torch_dtype_float32(), dtype = aoti_dtype(a.q.dtype);
  int64_t const batch = params.stored_batch(), rows = params.stored_rows();
  Tensor out = a.packed() ? empty({rows, params.heads_q, params.head_dim_v}, dtype, device)
                          : empty({batch, rows, params.heads_q, params.head_dim_v}, dtype, device);
  Tensor lse =
      a.packed() ? empty({params.heads_q, rows}, fp32, device) : empty({batch, params.heads_q, rows}, fp32, device);
  params.o = out.mutable_data_ptr();
  int64_t const row_stride = int64_t(params.heads_q) * params.head_dim_v;
  params.o_stride = {rows * row_stride, row_stride, params.head_dim_v};
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.num_splits = plan.num_splits;
  OptionalTensor o_partial, lse_partial;  // freed on return: the caching allocator reuses them in stream order
  if (plan.num_splits > 1) {
    o_partial = empty({plan.num_splits, params.result_rows(), params.head_dim_v}, fp32, device);
    lse_partial = empty({plan.num_splits, params.result_rows()}, fp32, device);
    params.o_partial = static_cast<float*>(o_partial->mutable_data_ptr());
    params.lse_partial = static_cast<float*>(lse_partial->mutable_data_ptr());
  }
  check_cuda(run_forward(plan, params, current_stream(device)), "launching the kernel");
  return a.return_lse ? std::vector{out, lse} : std::vector{out};
}

void fmha_check(Arguments const& a) { check(a); }

std::string fmha_explain(Arguments const& a) {
  check(a);
  if (!a.on_cuda()) return "torch: the tensors are not on a CUDA device";
  if (a.backend == "torch") return "torch: asked for by backend=\"torch\"";
  DeviceGuard const guard(a.q.device_index);
  ForwardParams const params = params_of(a);
  decode::DecodeParams decoding = decode::params_of(params);
  if (decode::takes(decoding, *dtype_of(a.q))) {
    decode::Plan const plan = plan_decode(decoding, a.q, a.num_splits, a.backend, true);
    if (plan.launch) return plan.reason;
  }
  Plan const plan = plan_of(a, params, true);
  if (!plan.kernel) fail("NotImplementedError", plan.reason);
  return plan.reason;
}

}  // namespace

STABLE_TORCH_LIBRARY(cutlass_ext, library) {
  auto def = [&](std::string const& name, char const* returns) {
    library.def((name + kTensors + kFeatures + " -> " + returns).c_str());
  };
  auto def_varlen = [&](std::string const& name, char const* returns) {
    library.def((name + kTensors + kPacking + kFeatures + " -> " + returns).c_str());
  };
  def("fmha_forward", "Tensor[]");
  def("fmha_check", "()");
  def("fmha_explain", "str");
  def_varlen("fmha_varlen", "Tensor[]");
  def_varlen("fmha_varlen_check", "()");
  def_varlen("fmha_varlen_explain", "str");
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CUDA, library) {
  library.impl("fmha_forward", TORCH_BOX(&unpacked<fmha_forward>));
  library.impl("fmha_check", TORCH_BOX(&unpacked<fmha_check>));
  library.impl("fmha_explain", TORCH_BOX(&unpacked<fmha_explain>));
  library.impl("fmha_varlen", TORCH_BOX(&unpacked_varlen<fmha_forward>));
  library.impl("fmha_varlen_check", TORCH_BOX(&unpacked_varlen<fmha_check>));
  library.impl("fmha_varlen_explain", TORCH_BOX(&unpacked_varlen<fmha_explain>));
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CPU, library) {
  library.impl("fmha_check", TORCH_BOX(&unpacked<fmha_check>));
  library.impl("fmha_explain", TORCH_BOX(&unpacked<fmha_explain>));
  library.impl("fmha_varlen_check", TORCH_BOX(&unpacked_varlen<fmha_check>));
  library.impl("fmha_varlen_explain", TORCH_BOX(&unpacked_varlen<fmha_explain>));
}

}  // namespace cutlass_ext

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", "Registers torch.ops.cutlass_ext.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* const created = PyModule_Create(&module);
  if (created)
    PyModule_AddIntConstant(created, "CUDART_VERSION", CUDART_VERSION);  // for the check of the driver at import
  return created;
}

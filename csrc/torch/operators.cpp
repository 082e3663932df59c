// torch.ops.cutlass_ext.*: registers the operators and carries calls out. Imported as cutlass_ext._C.
#include <Python.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../host/pack_mask.hpp"
#include "arguments.hpp"

namespace cutlass_ext {
namespace {

/// An empty tensor, which stands for a result that nobody asked for: over storage without bytes that is kept for it, so
/// that no call allocates any, and results of one call share none. `position`: of the result.
AtenTensorHandle no_result(int device, int position) {
  static std::mutex mutex;
  static auto& storages =
      *new std::map<std::pair<int, int>, Allocation>;  // torch may be gone before static objects are
  std::lock_guard<std::mutex> const lock(mutex);
  auto found = storages.find({device, position});
  if (found == storages.end())
    found = storages.emplace(std::pair(device, position), Allocation({0}, kFloat32, device)).first;
  int64_t const size = 0, stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(found->second.handle, 1, &size, &stride, 0, &handle));
  return handle;
}

/// The bits of a mask.
Allocation pack(ByteMask const& bytes, int device, cudaStream_t stream) {
  Allocation bits({bytes.batch, bytes.heads, Mask::stored_rows(bytes.rows), Mask::words_of(bytes.keys)}, kInt32,
                  device);
  pack_mask(bytes, static_cast<uint32_t*>(bits.data), stream);
  return bits;
}

/// Those of a call's mask, if it has one that is not packed yet, which the launches to come read.
Allocation pack(Tensor const& t, cudaStream_t stream, Params* params) {
  if (!t || t.dtype == kInt32) return {};
  Allocation bits = pack(bytes_of(t), t.device_index, stream);
  params->mask.bits = static_cast<uint32_t const*>(bits.data);
  params->mask.packed_before = true;
  return bits;
}

/// Whether two tensors may share memory: whether they do between the first and the last of their elements.
bool may_overlap(Tensor const& t, Tensor const& other, int element_bytes) {
  if (!t || !other || t.empty() || other.empty()) return false;
  auto const end = [&](Tensor const& x) {
    int64_t elements = 1;
    for (int i = 0; i < x.dim(); ++i) elements += (x.size(i) - 1) * x.stride(i);
    return x.as<char>() + elements * element_bytes;
  };
  return t.data < end(other) && other.data < end(t);
}

/// Whether kernels can write the result to `out`: 16 bytes at a time, at offsets of 32 bits within a tile, while other
/// tiles still read q, k and v.
bool takes_result(Arguments const& a, int element_bytes) {
  constexpr int64_t kMostElements = 1 << 22;  // from row to row and from head to head
  Tensor const& t = a.out;
  bool takes = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride(-1) == 1;
  for (int i = 1; i < t.dim(); ++i) {
    int const from_end = -1 - i;
    int64_t const stride = t.size(from_end) > 1 ? t.stride(from_end) : 16;
    takes = takes && stride > 0 && stride * element_bytes % 16 == 0 && (i == 3 || stride <= kMostElements);
  }
  for (Tensor const* const read : {&a.q, &a.k, &a.v, &a.k_new, &a.v_new})
    takes = takes && !may_overlap(t, *read, element_bytes);
  return takes;
}

/// out, unless the call says where it goes, and lse: empty where nobody asked for it.
void forward(Arguments const& a, StableIValue* results) {
  check(a);
  int const device = a.q.device_index;
  DeviceGuard const guard(device);
  Params call = params_of(a);
  if (call.n_new > 0) {
    call.k = a.k.mutable_data();
    call.v = a.v.mutable_data();
  }
  Plan planned = plan(call, request_of(a));
  if (!planned.kernel) fail("NotImplementedError", planned.refusal);

  Params& params = planned.params;
  int64_t const batch = params.stored_batch(), rows = params.stored_rows(), heads = params.heads_q;
  Allocation out, lse;
  if (a.writes_out() && takes_result(a, params.element_bytes)) {
    params.o = a.out.mutable_data();
    params.o_stride = strides_of(a.out);
  } else {
    int64_t const head_dim_v = params.head_dim_v;
    int64_t const all = heads * std::max<int64_t>(rows, 1) * head_dim_v;
    Strides const stride =
        params.widens ? Strides{all, head_dim_v, all / heads} : Strides{all, heads * head_dim_v, head_dim_v};
    int32_t const dtype = a.dtype_of_results();
    out = a.packed()
              ? Allocation({rows, heads, head_dim_v}, {stride.row, stride.head, 1}, dtype, device)
              : Allocation({batch, rows, heads, head_dim_v}, {stride.batch, stride.row, stride.head, 1}, dtype, device);
    params.o = out.data;
    params.o_stride = stride;
  }
  if (a.return_lse) {
    lse = a.packed() ? Allocation({heads, rows}, kFloat32, device) : Allocation({batch, heads, rows}, kFloat32, device);
  }
  std::vector<Allocation> workspace;
  params.lse = static_cast<float*>(lse.data);
  Allocation const bits = pack(a.mask, current_stream(device), &params);
  run(planned, current_stream(device), [&](size_t bytes) {
    workspace.push_back(Allocation({int64_t(bytes + 3) / 4}, kFloat32, device));
    return workspace.back().data;
  });
  if (!a.writes_out())
    *results++ = torch::stable::detail::from(out.release());
  else if (out.handle)
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(a.out.handle(), out.handle, false));
  *results = torch::stable::detail::from(a.return_lse ? lse.release() : no_result(device, 1));
}

/// What the backward pass takes, or why it does not take it.
BackwardPlan backward_plan_of(Arguments const& a, BackwardParams const& params) {
  BackwardPlan planned = plan_backward(params, request_of(a));
  if (!planned) fail("NotImplementedError", planned.refusal);
  return planned;
}

/// Where the gradient of a tensor of scores goes, which is contiguous.
void set_dbias(Tensor const& of, void* data, BackwardParams* params) {
  int64_t const row = of.size(3), head = of.size(2) * row, batch = of.size(1) * head;
  params->dbias = data;
  params->dbias_batch = of.size(0) == 1 ? 0 : batch;
  params->dbias_head = of.size(1) == 1 ? 0 : head;
  params->dbias_row = of.size(2) == 1 ? 0 : row;
}

/// dq, dk, dv, dsink, empty where there is no sink, and dbias, empty where nobody asked for it.
void backward(Arguments const& a, StableIValue* results) {
  check(a);
  int const device = a.q.device_index;
  DeviceGuard const guard(device);
  BackwardParams params = backward_params_of(a);
  BackwardPlan const planned = backward_plan_of(a, params);

  auto const allocate = [&](int64_t batch, int64_t rows, int64_t heads, int64_t cols, Strides* strides) {
    *strides = {rows * heads * cols, heads * cols, cols};
    return a.packed() ? Allocation({rows, heads, cols}, a.q.dtype, device)
                      : Allocation({batch, rows, heads, cols}, a.q.dtype, device);
  };
  int64_t const batch = params.stored_batch(), keys = params.stored_keys();
  Allocation dq = allocate(batch, params.stored_rows(), params.heads_q, params.head_dim, &params.dq_stride);
  Allocation dk = allocate(batch, keys, params.heads_kv, params.head_dim, &params.dk_stride);
  Allocation dv = allocate(batch, keys, params.heads_kv, params.head_dim_v, &params.dv_stride);
  Allocation dsink, dbias;
  if (a.sinks() > 0) dsink = Allocation({a.sinks()}, kFloat32, device);
  Tensor const* const of_scores = a.with_dbias();
  if (of_scores)
    dbias = Allocation({of_scores->size(0), of_scores->size(1), of_scores->size(2), of_scores->size(3)},
                       of_scores->dtype, device);
  params.dq = dq.data;
  params.dk = dk.data;
  params.dv = dv.data;
  params.dsink = static_cast<float*>(dsink.data);
  if (of_scores) set_dbias(*of_scores, dbias.data, &params);
  Allocation const bits = pack(a.mask, current_stream(device), &params);
  std::vector<Allocation> workspace;
  run_backward(planned, params, current_stream(device), [&](size_t bytes) {
    workspace.push_back(Allocation({int64_t(bytes + 3) / 4}, kFloat32, device));
    return workspace.back().data;
  });
  results[0] = torch::stable::detail::from(dq.release());
  results[1] = torch::stable::detail::from(dk.release());
  results[2] = torch::stable::detail::from(dv.release());
  results[3] = torch::stable::detail::from(dsink.handle ? dsink.release() : no_result(device, 3));
  results[4] = torch::stable::detail::from(dbias.handle ? dbias.release() : no_result(device, 4));
}

StableIValue string_value(std::string const& text) { return torch::stable::detail::from(text); }

/// backend, kernel, B_r, B_c, splits (of gradients: of a tile of keys), CTAs, reason.
void explain(Arguments const& a, StableIValue* results) {
  check(a);
  auto const answer = [&](std::string const& backend, std::string const& kernel, int64_t block_r, int64_t block_c,
                          int64_t splits, int64_t ctas, std::string const& reason) {
    using torch::stable::detail::from;
    StableIValue const values[] = {string_value(backend), string_value(kernel), from(block_r),       from(block_c),
                                   from(splits),          from(ctas),           string_value(reason)};
    for (int i = 0; i < 7; ++i) results[i] = values[i];
  };
  if (!a.on_cuda()) return answer("torch", "torch", 0, 0, 1, 0, "the tensors are not on a CUDA device");
  if (a.by_torch()) return answer("torch", "torch", 0, 0, 1, 0, "the call asks for PyTorch's operators");
  DeviceGuard const guard(a.q.device_index);
  if (a.is_backward()) {
    BackwardPlan const planned = backward_plan_of(a, backward_params_of(a));
    Kernel const& keys = *planned.of_keys.kernel;
    Kernel const& queries = planned.is_one() ? keys : *planned.of_queries.kernel;
    auto const tile = [](Kernel const& k, GradientLaunch const& launch) {
      SharedTiles const shared = launch.shared_tiles();
      std::string const some = shared.count == launch.scheduler.size()
                                   ? "each"
                                   : std::to_string(shared.count * (launch.is_mirrored ? 2 : 1)) + " of them";
      return std::string(k.family) + "'s, of " + std::to_string(k.block_r) + " rows and " + std::to_string(k.block_c) +
             " keys" + (shared.count > 0 ? ", " + some + " in " + std::to_string(shared.splits) + " splits" : "");
    };
    int const splits = planned.of_keys.splits.all();
    std::string reason = "dK and dV by tiles that are " + tile(keys, planned.of_keys) + "; dQ by tiles that are " +
                         tile(queries, planned.is_one() ? planned.of_keys : planned.of_queries);
    if (planned.out_of_range)
      reason +=
          "; operands in two fp16 parts, made by two launches before; where they do not hold the call, by tiles " +
          ("that are " + tile(*planned.out_of_range->of_keys.kernel, planned.out_of_range->of_keys));
    return answer(keys.family, kernel_name(keys), keys.block_r, keys.block_c, splits,
                  planned.of_keys.ctas + planned.of_queries.ctas, reason);
  }
  Request const request = request_of(a);
  Plan const planned = plan(params_of(a), request);
  if (!planned.kernel) fail("NotImplementedError", planned.refusal);
  Kernel const& kernel = *planned.kernel;
  dim3 const& ctas = planned.grid.ctas;
  answer(kernel.family, kernel_name(kernel), kernel.block_r, kernel.block_c, planned.splits,
         int64_t(ctas.x) * ctas.y * ctas.z + planned.relief, planned.reason(request));
}

void check_alone(Arguments const& a, StableIValue*) { check(a); }

/// An operator's boxed form.
template <Operator Of, auto Body>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  Arguments const arguments(Of, stack);
  Body(arguments, stack);
}

/// A bool mask as the operators take it too: packed once for many calls, those of an expanded one as often as it says.
void packed_mask(StableIValue* stack, uint64_t, uint64_t) {
  Tensor mask(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  mask.look();
  check_mask_to_pack(mask);
  int const device = mask.device_index;
  DeviceGuard const guard(device);
  stack[0] = torch::stable::detail::from(pack(bytes_of(mask, false), device, current_stream(device)).release());
}

/// The kernels whose features hold all of `features`, by family, kind, dtype and tile: what the tests hold features.hpp
/// against.
void kernels_taking(StableIValue* stack, uint64_t, uint64_t) {
  auto const features = static_cast<Features>(torch::stable::detail::to<int64_t>(stack[0]));
  std::string names;
  for (Kernel const& k : kernels()) {
    if (features & ~k.takes) continue;
    names += std::string(k.family) + " " + name_of(k.kind) + " " + name_of(k.dtype) + " " + std::to_string(k.block_r) +
             "x" + std::to_string(k.block_c) + " " + std::to_string(k.head_dim) + "_" + std::to_string(k.head_dim_v) +
             "\n";
  }
  stack[0] = string_value(names);
}

/// Checks and explanations, which run where the tensors are.
template <class Library>
void add_checks(Library& library) {
  library.impl("fmha_check", &boxed<Operator::Fmha, check_alone>);
  library.impl("fmha_explain", &boxed<Operator::Fmha, explain>);
  library.impl("fmha_out_check", &boxed<Operator::FmhaOut, check_alone>);
  library.impl("fmha_out_explain", &boxed<Operator::FmhaOut, explain>);
  library.impl("fmha_backward_check", &boxed<Operator::Backward, check_alone>);
  library.impl("fmha_backward_explain", &boxed<Operator::Backward, explain>);
  library.impl("fmha_kvcache_check", &boxed<Operator::KVCache, check_alone>);
  library.impl("fmha_kvcache_explain", &boxed<Operator::KVCache, explain>);
  library.impl("fmha_kvcache_out_check", &boxed<Operator::KVCacheOut, check_alone>);
  library.impl("fmha_kvcache_out_explain", &boxed<Operator::KVCacheOut, explain>);
}

constexpr char kExplanation[] =
    "(str backend, str kernel, int tile_rows, int tile_keys, int splits, int ctas, str reason)";
constexpr char const* kResults = "(Tensor out, Tensor lse)";
constexpr char const* kOthers = "Tensor lse";  // where the call says where out goes
constexpr char const* kGradients = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)";

}  // namespace

STABLE_TORCH_LIBRARY(cutlass_ext, library) {
  for (auto const& [of, name, results] :
       {std::tuple(Operator::Fmha, "fmha", kResults), std::tuple(Operator::FmhaOut, "fmha_out", kOthers),
        std::tuple(Operator::Backward, "fmha_backward", kGradients),
        std::tuple(Operator::KVCache, "fmha_kvcache", kResults),
        std::tuple(Operator::KVCacheOut, "fmha_kvcache_out", kOthers)}) {
    std::string const prefix = name;
    library.def(schema_of(of, prefix, false, results).c_str());
    library.def(schema_of(of, prefix + "_check", false, "()").c_str());
    library.def(schema_of(of, prefix + "_explain", false, kExplanation).c_str());
  }
  library.def(schema_of(Operator::Fmha, "fmha_with_grad", false, kResults).c_str());  // fmha, which autograd knows
  library.def(schema_of(Operator::KVCache, "fmha_kvcache_append", true, kResults).c_str());
  library.def(schema_of(Operator::KVCacheOut, "fmha_kvcache_append_out", true, kOthers).c_str());
  library.def("kernels_taking(int features) -> str");
  library.def("pack_mask(Tensor mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CUDA, library) {
  library.impl("fmha", &boxed<Operator::Fmha, forward>);
  library.impl("fmha_out", &boxed<Operator::FmhaOut, forward>);
  library.impl("fmha_with_grad", &boxed<Operator::Fmha, forward>);
  library.impl("fmha_backward", &boxed<Operator::Backward, backward>);
  library.impl("fmha_kvcache", &boxed<Operator::KVCache, forward>);
  library.impl("fmha_kvcache_append", &boxed<Operator::KVCache, forward>);
  library.impl("fmha_kvcache_out", &boxed<Operator::KVCacheOut, forward>);
  library.impl("fmha_kvcache_append_out", &boxed<Operator::KVCacheOut, forward>);
  library.impl("pack_mask", &packed_mask);
  add_checks(library);
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CPU, library) { add_checks(library); }

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CompositeExplicitAutograd, library) {
  library.impl("kernels_taking", &kernels_taking);
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

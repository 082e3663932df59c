// What every operator of torch.ops.cutlass_ext needs of torch, through the LibTorch stable ABI alone: errors, views of
// tensors, checks of one argument, allocation, the current stream. Included by torch_*.cpp, the only files that know
// torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "dispatch.hpp"

namespace cutlass_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The stable ABI raises RuntimeError only; cutlass_ext/_ops.py turns this form of it into the exception that it names.
template <class... Parts>
[[noreturn]] void fail(char const* exception, Parts const&... parts) {
  std::ostringstream text;
  text << "cutlass_ext." << exception << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline void check_cuda(cudaError_t error, char const* doing) {
  if (error != cudaSuccess) fail("RuntimeError", doing, ": ", cudaGetErrorString(error));
}

/// What the checks and ForwardParams need of a tensor, read once: every question to a Tensor is a call through the C
/// shim.
struct View {
  torch::headeronly::IntHeaderOnlyArrayRef shape, strides;
  ScalarType dtype;
  int32_t device_type, device_index;
  void const* data;

  explicit View(Tensor const& t)
      : shape(t.sizes()), strides(t.strides()), dtype(t.scalar_type()), data(t.const_data_ptr()) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
  }
  int64_t dim() const { return static_cast<int64_t>(shape.size()); }
  int64_t size(int i) const { return shape[i < 0 ? i + dim() : i]; }  // as Python counts
  int64_t stride(int i) const { return strides[i < 0 ? i + dim() : i]; }
  bool empty() const {
    for (int64_t n : shape) {
      if (n == 0) return true;
    }
    return false;
  }
  char const* dtype_name() const { return torch::headeronly::toString(dtype); }
  std::string shape_text() const {
    std::ostringstream text;
    text << '[';
    for (int64_t i = 0; i < dim(); ++i) text << (i ? ", " : "") << shape[i];
    text << ']';
    return text.str();
  }
};
using OptionalView = std::optional<View>;
inline OptionalView view_of(OptionalTensor const& t) { return t ? OptionalView(View(*t)) : std::nullopt; }

constexpr int64_t kMaxLength = int64_t(1) << 29;  // visibility.hpp: positions are held to 32 bits
constexpr int64_t kUnboundedWindow = int64_t(1) << 30;
constexpr int64_t kMaxSplits = 1024;

inline std::optional<DType> dtype_of(View const& t) {
  switch (t.dtype) {
    case ScalarType::Float:
      return DType::Float32;
    case ScalarType::Half:
      return DType::Float16;
    case ScalarType::BFloat16:
      return DType::BFloat16;
    default:
      return std::nullopt;
  }
}

inline void check_same_device(char const* name, View const& t, View const& q) {
  if (t.device_type != q.device_type || t.device_index != q.device_index)
    fail("ValueError", name, ": is on another device than q; move it there");
}

inline void check_vector(char const* name, OptionalView const& t, View const& q, ScalarType dtype, int64_t length,
                         char const* meaning) {
  if (!t) return;
  if (t->dtype != dtype)
    fail("TypeError", name, ": has dtype ", t->dtype_name(), "; expected ", torch::headeronly::toString(dtype));
  if (t->dim() != 1 || t->size(0) != length)
    fail("ValueError", name, ": has shape ", t->shape_text(), "; expected ", meaning, " = [", length, "]");
  if (length > 1 && t->strides[0] != 1) fail("ValueError", name, ": is not contiguous; call .contiguous() on it");
  check_same_device(name, *t, q);
}

/// A tensor of heads next to q: `layout` are its `dims` dimensions, the last of them rows, heads and the head dim.
inline void check_heads(char const* name, View const& t, View const& q, int dims, char const* layout) {
  if (t.dim() != dims)
    fail("ValueError", name, ": has shape ", t.shape_text(), "; expected ", dims, " dimensions ", layout);
  if (!dtype_of(t)) fail("TypeError", name, ": has dtype ", t.dtype_name(), "; expected float32, float16 or bfloat16");
  if (t.dtype != q.dtype) {
    fail("TypeError", name, ": has dtype ", t.dtype_name(), " and q ", q.dtype_name(), "; give q, k and v one dtype");
  }
  check_same_device(name, t, q);
  int64_t const step = t.dtype == ScalarType::Float ? 4 : 8;
  int64_t const d = t.size(-1);
  if (d < step || d > 256 || d % step != 0) {
    fail("ValueError", name, ": has head_dim ", d, "; expected a multiple of ", step, " from ", step,
         " to 256: pad the last dimension with zeros");
  }
  if (t.stride(-1) != 1 && !t.empty()) {
    fail("ValueError", name, ": its last dimension has stride ", t.stride(-1),
         "; expected 1: call .contiguous() on it");
  }
  if (t.size(-3) >= kMaxLength) fail("ValueError", name, ": has ", t.size(-3), " rows; expected fewer than 2^29");
}

/// The heads of q are shared out evenly among the `heads_kv` of `name`, which is of `owners`.
inline void check_groups(int64_t heads_q, char const* name, int64_t heads_kv, char const* owners) {
  if (heads_q < 1) fail("ValueError", "q: has no heads; expected at least 1");
  if (heads_kv < 1 || heads_q % heads_kv != 0) {
    fail("ValueError", name, ": has ", heads_kv, " heads and q has ", heads_q,
         "; the heads of q must be a multiple of those of ", owners);
  }
}

/// What changes scores, and how the work is done: the arguments that every operator has.
inline void check_options(View const& q, int64_t batch, int64_t heads_q, OptionalView const& alibi_slopes,
                          OptionalView const& sink, std::optional<int64_t> start_pos, int64_t window_left,
                          int64_t window_right, std::optional<double> softmax_scale, double softcap, int64_t num_splits,
                          std::string const& backend) {
  check_vector("sink", sink, q, ScalarType::Float, heads_q, "[heads_q]");
  if (alibi_slopes && alibi_slopes->dim() == 2) {
    View const& t = *alibi_slopes;
    if (t.dtype != ScalarType::Float)
      fail("TypeError", "alibi_slopes: has dtype ", t.dtype_name(), "; expected float32");
    if (t.size(0) != batch || t.size(1) != heads_q) {
      fail("ValueError", "alibi_slopes: has shape ", t.shape_text(), "; expected [heads_q] = [", heads_q,
           "] or [batch, heads_q] = [", batch, ", ", heads_q, "]");
    }
    if (heads_q > 1 && t.strides[1] != 1)
      fail("ValueError", "alibi_slopes: its last dimension is not contiguous; call .contiguous() on it");
    check_same_device("alibi_slopes", t, q);
  } else {
    check_vector("alibi_slopes", alibi_slopes, q, ScalarType::Float, heads_q,
                 "[heads_q] or [batch, heads_q], here [heads_q]");
  }
  if (start_pos && (*start_pos <= -kMaxLength || *start_pos >= kMaxLength)) {
    fail("ValueError", "start_pos: is ", *start_pos, "; expected a position between -2^29 and 2^29");
  }
  if (window_left < -1)
    fail("ValueError", "window: its left side is ", window_left,
         "; expected the number of keys before a row's own, or -1 for all");
  if (window_right < -1)
    fail("ValueError", "window: its right side is ", window_right,
         "; expected the number of keys after a row's own, or -1 for all");
  if (softmax_scale && !(*softmax_scale > 0 && std::isfinite(*softmax_scale))) {
    fail("ValueError", "softmax_scale: is ", *softmax_scale,
         "; expected a finite number above 0, or None for 1/sqrt(head_dim)");
  }
  if (!(softcap >= 0 && std::isfinite(softcap)))
    fail("ValueError", "softcap: is ", softcap, "; expected a finite number above 0, or 0 for none");
  if (num_splits < 0 || num_splits > kMaxSplits) {
    fail("ValueError", "num_splits: is ", num_splits, "; expected 1 to ", kMaxSplits, ", or 0 to have it chosen");
  }
  if (backend != "auto" && backend != "torch" && backend != "simt" && backend != "sm80" && backend != "sm90") {
    fail("ValueError", "backend: is \"", backend, "\"; expected \"auto\", \"simt\", \"sm80\", \"sm90\" or \"torch\"");
  }
  if (q.device_type != aoti_torch_device_type_cuda() && backend != "auto" && backend != "torch") {
    fail("ValueError", "backend: \"", backend,
         "\" runs on a CUDA device and q is not on one; move q, k and v there, or use \"auto\" or \"torch\"");
  }
}

template <class T>
T const* data_of(OptionalView const& t) {
  return t ? static_cast<T const*>(t->data) : nullptr;
}

/// Of [batch, row, head, head_dim], or of packed [row, head, head_dim].
inline Strides strides_of(View const& t) { return {t.dim() == 4 ? t.stride(0) : 0, t.stride(-3), t.stride(-2)}; }

inline int32_t aoti_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float  ? aoti_torch_dtype_float32()
         : dtype == ScalarType::Half ? aoti_torch_dtype_float16()
                                     : aoti_torch_dtype_bfloat16();
}

inline int bounded_window(int64_t window) { return window >= kUnboundedWindow ? -1 : static_cast<int>(window); }

/// What the arguments of every operator say of scores, start and windows; head_dim is set before.
template <class Arguments>
void set_options(ForwardParams& p, Arguments const& a) {
  p.softmax_scale =
      static_cast<float>(a.softmax_scale ? *a.softmax_scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = static_cast<float>(a.softcap);
  p.alibi_slopes = data_of<float>(a.alibi_slopes);
  p.alibi_batch_stride = a.alibi_slopes && a.alibi_slopes->dim() == 2 ? a.alibi_slopes->strides[0] : 0;
  p.sink = data_of<float>(a.sink);
  p.start_pos_kind = a.start_positions ? StartPos::PerBatch : a.start_pos ? StartPos::Scalar : StartPos::End;
  p.start_pos = static_cast<int>(a.start_pos.value_or(0));
  p.start_positions = data_of<int>(a.start_positions);
  p.window_left = bounded_window(a.window_left);
  p.window_right = a.causal ? 0 : bounded_window(a.window_right);
}

/// Makes `device` current and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&before_), "reading the current CUDA device");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "making the tensors' device current");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int device_, before_ = 0;
};

/// PyTorch's current stream. The binary may have been linked where torch is a CPU build, so the function is looked up
/// where it runs.
inline cudaStream_t current_stream(int device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static GetStream const get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (!get || get(device, &stream) != AOTI_TORCH_SUCCESS)
    fail("RuntimeError", "PyTorch's current CUDA stream was not found; this torch has no CUDA support");
  return static_cast<cudaStream_t>(stream);
}

/// An uninitialised contiguous tensor on the device of `like`, through the C shim: the dispatcher costs about 2 us
/// more.
template <size_t N>
Tensor empty(int64_t const (&shape)[N], int32_t dtype, int device) {
  int64_t strides[N];
  int64_t step = 1;
  for (size_t i = N; i-- > 0;) {
    strides[i] = step;
    step *= shape[i] > 0 ? shape[i] : 1;
  }
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(N, shape, strides, dtype, aoti_torch_device_type_cuda(), device, &handle) !=
      AOTI_TORCH_SUCCESS) {
    fail("RuntimeError", "could not allocate ", step, " elements on CUDA device ", device);
  }
  return Tensor(handle);
}

}  // namespace cutlass_ext

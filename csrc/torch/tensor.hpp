// Tensors through the C shim of LibTorch's stable ABI, with what the checks and Params need of them read once; device,
// stream, allocation. Used by torch/ alone, the only folder that knows torch.
#pragma once

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../host/error.hpp"

namespace cutlass_ext {

// Dtypes as the shim numbers them.
inline int32_t const kFloat64 = aoti_torch_dtype_float64(), kFloat32 = aoti_torch_dtype_float32(),
                     kFloat16 = aoti_torch_dtype_float16(), kBFloat16 = aoti_torch_dtype_bfloat16(),
                     kInt32 = aoti_torch_dtype_int32(), kInt64 = aoti_torch_dtype_int64(),
                     kBool = aoti_torch_dtype_bool();

inline char const* dtype_name(int32_t dtype) {
  using torch::headeronly::ScalarType;
  return torch::headeronly::toString(torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype)));
}

/// A tensor that the operator owns a handle of, or none. Every question to torch is a call through the shim, so that
/// each is asked once, in `look`: a question may fail, and by then every handle of the call is to have its owner.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}

  void look() {
    if (!handle_) return;
    AtenTensorHandle const handle = handle_.get();
    int64_t dims;
    ask(aoti_torch_get_dim(handle, &dims));
    ask(aoti_torch_get_sizes(handle, &sizes_));
    ask(aoti_torch_get_strides(handle, &strides_));
    ask(aoti_torch_get_dtype(handle, &dtype));
    ask(aoti_torch_get_device_type(handle, &device_type));
    ask(aoti_torch_get_device_index(handle, &device_index));
    ask(torch_get_const_data_ptr(handle, &data));
    dims_ = static_cast<int>(dims);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  int dim() const { return dims_; }
  int64_t size(int i) const { return sizes_[i < 0 ? i + dims_ : i]; }  // as Python counts
  int64_t stride(int i) const { return strides_[i < 0 ? i + dims_ : i]; }
  bool empty() const {
    for (int i = 0; i < dims_; ++i) {
      if (sizes_[i] == 0) return true;
    }
    return false;
  }
  std::string shape_text() const {
    std::ostringstream text;
    text << '[';
    for (int i = 0; i < dims_; ++i) text << (i ? ", " : "") << sizes_[i];
    text << ']';
    return text.str();
  }

  /// The data of a tensor that is written: one that shares its data with another until then gets data of its own.
  void* mutable_data() const {
    void* found;
    ask(torch_get_mutable_data_ptr(handle_.get(), &found));
    return found;
  }
  AtenTensorHandle handle() const { return handle_.get(); }
  template <class T>
  T const* as() const {
    return static_cast<T const*>(data);
  }

  int32_t dtype = 0, device_type = 0, device_index = 0;
  void const* data = nullptr;  // null where there is no tensor

 private:
  static void ask(AOTITorchError error) { TORCH_ERROR_CODE_CHECK(error); }
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  std::unique_ptr<std::remove_pointer_t<AtenTensorHandle>, Delete> handle_;
  int dims_ = 0;
  int64_t *sizes_ = nullptr, *strides_ = nullptr;
};

/// Makes `device` current while it lives, if it is not; torch's guard opens no context on the device to which it goes
/// back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int before;
    check_cuda(cudaGetDevice(&before), "reading the current CUDA device");
    if (before != device) guard_ = std::make_unique<torch::stable::accelerator::DeviceGuard>(device);
  }

 private:
  std::unique_ptr<torch::stable::accelerator::DeviceGuard> guard_;
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

/// Owns what it allocates until it goes out of scope; the caching allocator then reuses it in stream order.
struct Allocation {
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;

  Allocation() = default;
  /// An uninitialised contiguous tensor on a CUDA device, through the C shim: the dispatcher costs about 2 us more.
  template <size_t N>
  Allocation(int64_t const (&shape)[N], int32_t dtype, int device) : Allocation() {
    int64_t strides[N];
    int64_t step = 1;
    for (size_t i = N; i-- > 0;) {
      strides[i] = step;
      step *= shape[i] > 0 ? shape[i] : 1;
    }
    allocate(shape, strides, dtype, device);
  }
  /// The same of other strides, without gaps.
  template <size_t N>
  Allocation(int64_t const (&shape)[N], int64_t const (&strides)[N], int32_t dtype, int device) : Allocation() {
    allocate(shape, strides, dtype, device);
  }
  ~Allocation() {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }
  Allocation(Allocation&& other) noexcept
      : handle(std::exchange(other.handle, nullptr)), data(std::exchange(other.data, nullptr)) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(handle, other.handle);
    std::swap(data, other.data);
    return *this;
  }
  AtenTensorHandle release() { return std::exchange(handle, nullptr); }

 private:
  template <size_t N>
  void allocate(int64_t const (&shape)[N], int64_t const (&strides)[N], int32_t dtype, int device) {
    if (aoti_torch_empty_strided(N, shape, strides, dtype, aoti_torch_device_type_cuda(), device, &handle) !=
        AOTI_TORCH_SUCCESS) {
      std::ostringstream text;
      for (size_t i = 0; i < N; ++i) text << (i ? " x " : "") << shape[i];
      fail("RuntimeError", "could not allocate ", text.str(), " elements on CUDA device ", device);
    }
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &data));
  }
};

}  // namespace cutlass_ext

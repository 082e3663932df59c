// CUDA tensors for a PyTorch that was built for CPUs alone, in the emulated GPU's memory. Every operator on them runs
// PyTorch's CPU kernel on CPU tensors that share their memory; what it returns becomes a CUDA tensor again. Loaded by
// __init__.py, which patches torch.cuda.
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.hpp"

namespace cutlass_ext::emulator {
namespace {

c10::Device const kCuda{c10::DeviceType::CUDA, 0}, kCpu{c10::DeviceType::CPU};

// ------------------------------------------------------------------------------ memory, device, stream
struct CudaMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = bytes ? emulator::allocate(bytes) : nullptr;
    return {data, data, raw_deleter(), kCuda};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      if (data) release(data);
    };
  }
  void copy_data(void* to, void const* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

CudaMemory* cuda_memory() {
  static auto* const memory = new CudaMemory;
  return memory;
}

thread_local uint64_t current_stream = 0;

struct CudaGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kCuda; }
  c10::Device getDevice() const override { return kCuda; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kCuda); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, c10::Stream const&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, c10::Stream const&) const override {}
  bool queryEvent(void*) const override { return true; }
};
c10::impl::DeviceGuardImplRegistrar const guard(c10::DeviceType::CUDA, new CudaGuard);

/// What PyTorch asks before it believes in a GPU. It looks the class up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getCUDADeviceAllocator() const override { return cuda_memory(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  // what is drawn is drawn on the CPU
  at::Generator const& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ------------------------------------------------------------------------------ tensors and their twins on the CPU
/// A tensor like `t` on other storage.
at::Tensor like(at::Tensor const& t, c10::Storage storage, c10::DispatchKey key) {
  c10::InferenceMode const as_it(t.is_inference());  // a view of a tensor that is not one of inference is none
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

/// Gives CUDA storage the contents of CPU storage.
void fill(c10::StorageImpl* cuda, c10::Storage const& cpu) {
  c10::DataPtr data = cuda_memory()->allocate(cpu.nbytes());
  if (cpu.nbytes()) std::memcpy(data.get(), cpu.data(), cpu.nbytes());
  cuda->set_data_ptr_noswap(std::move(data));
  cuda->set_nbytes(cpu.nbytes());
}

/// The arguments of one operator, each CUDA tensor replaced by a CPU tensor that shares its memory, and the way back.
class Twins {
 public:
  c10::IValue on_cpu(c10::IValue const& value) {
    if (value.isDevice()) return value.toDevice().is_cuda() ? kCpu : value.toDevice();
    if (value.isStorage()) return on_cpu(value.toStorage());
    return of_tensors(value, [this](at::Tensor const& t) { return on_cpu(t); });
  }

  c10::IValue on_cuda(c10::IValue const& value) {
    return of_tensors(value, [this](at::Tensor const& t) { return on_cuda(t); });
  }

  /// Gives the arguments what the operator did to them beyond writing their elements: other sizes, other storage.
  void finish() {
    for (auto& [cuda, cpu] : tensors_) {
      if (!cuda.is_cuda()) continue;
      auto* const impl = cuda.unsafeGetTensorImpl();
      c10::Storage const storage = on_cuda(cpu.storage());
      if (!storage.is_alias_of(cuda.storage())) impl->set_storage_keep_dtype(storage);
      if (cuda.sizes() == cpu.sizes() && cuda.strides() == cpu.strides() &&
          cuda.storage_offset() == cpu.storage_offset())
        continue;
      impl->set_storage_offset(cpu.storage_offset());
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides());
    }
    for (auto& [cuda, cpu, shares] : storages_) {
      if (shares && cpu.data() != cuda.data()) fill(cuda.unsafeGetStorageImpl(), cpu);  // it was resized
    }
  }

 private:
  template <class Change>
  static c10::IValue of_tensors(c10::IValue const& value, Change const& change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (at::Tensor const& t : value.toTensorVector()) changed.push_back(change(t));
      return changed;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> changed;
      for (auto const& t : value.toOptionalTensorVector()) changed.push_back(t ? std::optional(change(*t)) : t);
      return changed;
    }
    return value;
  }

  at::Tensor on_cpu(at::Tensor const& t) {
    if (!t.defined()) return t;
    for (auto const& [cuda, cpu] : tensors_) {
      if (t.is_same(cuda)) return cpu;
    }
    tensors_.emplace_back(t, t.is_cuda() ? like(t, on_cpu(t.storage()), c10::DispatchKey::CPU) : t);
    return tensors_.back().second;
  }

  /// Of an argument, a view of one, or new.
  at::Tensor on_cuda(at::Tensor const& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto const& [cuda, cpu] : tensors_) {
      if (t.is_same(cpu)) return cuda;
    }
    return like(t, on_cuda(t.storage()), c10::DispatchKey::CUDA);
  }

  c10::Storage on_cpu(c10::Storage const& storage) {
    if (storage.device_type() != c10::DeviceType::CUDA) return storage;
    for (auto const& [cuda, cpu, shares] : storages_) {
      if (cuda.is_alias_of(storage)) return cpu;
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(storage.mutable_data(), kCpu),
                      c10::GetCPUAllocator(), /*resizable=*/true);
    storages_.push_back({storage, made, true});
    return made;
  }

  c10::Storage on_cuda(c10::Storage const& storage) {
    for (auto const& [cuda, cpu, shares] : storages_) {
      if (cpu.is_alias_of(storage)) return cuda;
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, kCuda), cuda_memory(), true);
    fill(made.unsafeGetStorageImpl(), storage);
    storages_.push_back({made, storage, false});  // for other results of the same storage
    return made;
  }

  struct Storages {
    c10::Storage cuda, cpu;
    bool shares;  // an argument's, the same memory; else a result's, a copy
  };
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // arguments, each beside what stood for it
  std::vector<Storages> storages_;
};

// ------------------------------------------------------------------------------ operators
void run_on_cpu(c10::OperatorHandle const& operation, torch::jit::Stack* stack) {
  Twins twins;
  auto const count = operation.schema().arguments().size();
  for (auto value = stack->end() - count; value != stack->end(); ++value) *value = twins.on_cpu(*value);
  {
    at::AutoDispatchBelowADInplaceOrView const below;
    operation.callBoxed(*stack);
  }
  auto const results = operation.schema().returns().size();
  for (auto value = stack->end() - results; value != stack->end(); ++value) *value = twins.on_cuda(*value);
  twins.finish();
}

c10::DispatchKeySet const kKeys(c10::DispatchKey::CUDA);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, cuda_memory(), kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, cuda_memory(), kKeys, at::dtype_or_default(dtype));
}

/// A tangent of zeros, which PyTorch has without memory where it can.
at::Tensor efficient_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device>, std::optional<bool>) {
  at::Tensor made = at::detail::empty_generic(size, cuda_memory(), kKeys, at::dtype_or_default(dtype), std::nullopt);
  return made.zero_();
}

/// PyTorch's attention written out: its fused kernels on a GPU are operators of their own.
int64_t fused_sdp_choice(at::Tensor const&, at::Tensor const&, at::Tensor const&, std::optional<at::Tensor> const&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("record_stream", [](at::Tensor&, at::Stream) {});
  // its kernel for every device would look for one of CUDA's
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace cutlass_ext::emulator

using namespace cutlass_ext::emulator;

extern "C" {

/// Where csrc/torch/tensor.hpp looks for it: in a library of this one's name.
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = reinterpret_cast<void*>(current_stream);
  return 0;
}

// for __init__.py
void emulator_set_stream(uint64_t stream) { current_stream = stream; }
size_t emulator_bytes_allocated() { return usage().now; }
size_t emulator_most_allocated() { return usage().most; }
void emulator_forget_most() { usage().most = usage().now; }

}  // extern "C"

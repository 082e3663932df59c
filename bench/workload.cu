// See workload.hpp.
#include "workload.hpp"

#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include <cutlass/numeric_types.h>

#include "host/error.hpp"

namespace cutlass_ext::bench {
namespace {

/// Uniform in [-sqrt(3), sqrt(3)], so variance 1, from a 64-bit mix of the index (splitmix64; Steele, Lea and Flood,
/// OOPSLA 2014).
__host__ __device__ float value_at(uint64_t index) {
  uint64_t z = index * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (static_cast<float>((z ^ (z >> 31)) >> 40) * (2.f / (1 << 24)) - 1.f) * 1.7320508f;
}

template <class Element>
__global__ void fill_random(Element* data, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    data[i] = Element(value_at(seed + i));
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t n) {
    if (cudaMalloc(&data_, n * sizeof(T)) != cudaSuccess) data_ = nullptr;
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer const&) = delete;
  T* get() const { return data_; }
  /// At least `n` of them; what was there is lost if there were fewer.
  T* room(size_t n) {
    if (n <= count_) return data_;
    cudaFree(data_);
    count_ = cudaMalloc(&data_, n * sizeof(T)) == cudaSuccess ? n : 0;
    return data_;
  }

 private:
  size_t count_ = 0;
  T* data_ = nullptr;
};

/// Largest error of a few rows against the formula in float64, relative to the largest output; the inputs are
/// recomputed from their indices.
template <class Element>
double sampled_error(Case const& c, Element const* out, uint64_t const (&seeds)[3]) {
  auto input = [&](int tensor, int b, int row, int head, int col) {
    int64_t const row_index = (int64_t(b) * c.n + row) * c.heads + head;
    return double(
        float(Element(value_at(seeds[tensor] + row_index * (tensor == 2 ? c.head_dim_v : c.head_dim) + col))));
  };
  double error = 0, largest = 0;
  for (int sample = 0; sample < 4; ++sample) {
    int const b = sample % c.batch, head = sample * 5 % c.heads, row = int(int64_t(c.n - 1) * sample / 3);
    int const keys = c.causal ? row + 1 : c.n;
    std::vector<double> s(keys), o(c.head_dim_v);
    double m = -INFINITY, l = 0;
    for (int j = 0; j < keys; ++j) {
      for (int x = 0; x < c.head_dim; ++x) s[j] += input(0, b, row, head, x) * input(1, b, j, head, x);
      s[j] /= std::sqrt(double(c.head_dim));
      m = std::max(m, s[j]);
    }
    for (int j = 0; j < keys; ++j) {
      double const p = std::exp(s[j] - m);
      l += p;
      for (int x = 0; x < c.head_dim_v; ++x) o[x] += p * input(2, b, j, head, x);
    }
    std::vector<Element> got(c.head_dim_v);
    cudaMemcpy(got.data(), out + ((int64_t(b) * c.n + row) * c.heads + head) * c.head_dim_v,
               c.head_dim_v * sizeof(Element), cudaMemcpyDeviceToHost);
    for (int x = 0; x < c.head_dim_v; ++x) {
      double const difference = std::abs(float(got[x]) - o[x] / l);
      error = difference <= error ? error : difference;  // NaN counts as an error
      largest = std::max(largest, std::abs(o[x] / l));
    }
  }
  return error / largest;
}

template <class Element>
void run_as(benchmark::State& state, Case const& c, double tolerance, std::function<Plan(Params*)> const& plan) {
  int64_t const rows = int64_t(c.batch) * c.n * c.heads, elements = rows * c.head_dim, elements_v = rows * c.head_dim_v;
  DeviceBuffer<Element> q(elements), k(elements), v(elements_v), o(elements_v);
  DeviceBuffer<float> lse(rows);
  if (!q.get() || !k.get() || !v.get() || !o.get()) return state.SkipWithError("out of device memory");
  uint64_t const seeds[] = {1ull << 60, 2ull << 60, 3ull << 60};
  DeviceBuffer<Element> const* inputs[] = {&q, &k, &v};
  for (int i = 0; i < 3; ++i) fill_random<<<1024, 256>>>(inputs[i]->get(), i == 2 ? elements_v : elements, seeds[i]);
  cudaMemset(o.get(), 0xff, elements_v * sizeof(Element));  // NaN: an unwritten output shows

  Params p;
  p.q = q.get();
  p.k = k.get();
  p.v = v.get();
  p.o = o.get();
  p.lse = lse.get();
  p.q_stride = p.k_stride = {int64_t(c.n) * c.heads * c.head_dim, int64_t(c.heads) * c.head_dim, c.head_dim};
  p.v_stride = p.o_stride = {int64_t(c.n) * c.heads * c.head_dim_v, int64_t(c.heads) * c.head_dim_v, c.head_dim_v};
  p.batch = c.batch;
  p.n_q = p.n_kv = c.n;
  p.heads_q = p.heads_kv = c.heads;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.element_bytes = sizeof(Element);
  p.softmax_scale = 1.f / std::sqrt(float(c.head_dim));
  p.window_right = c.causal ? 0 : -1;

  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaStreamCreate(&stream);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaDeviceSynchronize();
  DeviceBuffer<char> parts(0);  // one of a launch's requests; few want a second
  DeviceBuffer<char> counters(0);
  try {
    Plan const planned = plan(&p);
    if (!planned.kernel) throw std::runtime_error(planned.refusal);
    auto const launch = [&] {
      bool first = true;
      cutlass_ext::run(planned, p, stream, [&](size_t bytes) {
        return std::exchange(first, false) ? parts.room(bytes) : counters.room(bytes);
      });
    };
    launch();
    check_cuda(cudaStreamSynchronize(stream), "the first launch");
    double const wrong = sampled_error(c, o.get(), seeds);
    if (!(wrong < tolerance)) throw std::runtime_error("wrong result: error " + std::to_string(wrong));
    for (auto _ : state) {
      cudaEventRecord(begin, stream);
      launch();
      cudaEventRecord(end, stream);
      cudaEventSynchronize(end);
      float ms;
      cudaEventElapsedTime(&ms, begin, end);
      state.SetIterationTime(ms * 1e-3);
    }
  } catch (std::exception const& error) {
    state.SkipWithError(error.what());
  }
  double const pairs = c.causal ? double(c.n) * (c.n + 1) / 2 : double(c.n) * c.n;
  using benchmark::Counter;
  state.counters["TFLOP/s"] =
      Counter(2e-12 * c.batch * c.heads * (c.head_dim + c.head_dim_v) * pairs, Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] =
      Counter(2e-9 * (elements + elements_v) * sizeof(Element), Counter::kIsIterationInvariantRate);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
}

}  // namespace

std::string Case::name() const {
  return "b" + std::to_string(batch) + "/n" + std::to_string(n) + "/h" + std::to_string(heads) + "/d" +
         std::to_string(head_dim) + (head_dim_v == head_dim ? "" : "_" + std::to_string(head_dim_v)) +
         (causal ? "/causal" : "/full");
}

void run(benchmark::State& state, Case const& c, std::function<Plan(Params*)> const& plan) {
  switch (c.dtype) {  // in 16 bits P and the output are rounded
    case DType::Float32:
      return run_as<float>(state, c, 1e-5, plan);
    case DType::Float16:
      return run_as<cutlass::half_t>(state, c, 2e-3, plan);
    case DType::BFloat16:
      return run_as<cutlass::bfloat16_t>(state, c, 2e-2, plan);
  }
}

void run_kernel(benchmark::State& state, Case const& c, Kernel const& kernel) {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, kernel.entry);
  state.counters["registers"] = attributes.numRegs;
  state.counters["spilled"] = static_cast<double>(attributes.localSizeBytes);
  run(state, c, [&](Params* params) {
    Device const& device = current_device();
    if (!runs_on(kernel, device)) throw std::runtime_error("this GPU has too little shared memory a block");
    state.counters["CTAs"] = occupancy_of(kernel, device).ctas_a_multiprocessor;
    return plan_with(kernel, params);
  });
}

}  // namespace cutlass_ext::bench

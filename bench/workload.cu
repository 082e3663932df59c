// See workload.hpp.
#include "workload.hpp"

#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include <cutlass/numeric_types.h>

#include "host/backward.hpp"
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
    if (count_ == 0) data_ = nullptr;
    return data_;
  }

 private:
  size_t count_ = 0;
  T* data_ = nullptr;
};

/// What launches ask for, the same memory in every round: those of one ask in the same order.
class Workspace {
 public:
  void begin() { next_ = 0; }
  void* operator()(size_t bytes) {
    if (next_ == pieces_.size()) pieces_.push_back(std::make_unique<DeviceBuffer<char>>(0));
    return pieces_[next_++]->room(bytes);
  }

 private:
  size_t next_ = 0;
  std::vector<std::unique_ptr<DeviceBuffer<char>>> pieces_;
};

/// Calls `launch` once, has `error` looked at, and times the rounds of `state` by events.
template <class Launch, class Error>
void time_rounds(benchmark::State& state, double tolerance, Launch const& launch, Error const& error) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaStreamCreate(&stream);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaDeviceSynchronize();
  try {
    launch(stream);
    check_cuda(cudaStreamSynchronize(stream), "the first launch");
    double const wrong = error();
    if (!(wrong < tolerance)) throw std::runtime_error("wrong result: error " + std::to_string(wrong));
    for (auto _ : state) {
      cudaEventRecord(begin, stream);
      launch(stream);
      cudaEventRecord(end, stream);
      cudaEventSynchronize(end);
      float ms;
      cudaEventElapsedTime(&ms, begin, end);
      state.SetIterationTime(ms * 1e-3);
    }
  } catch (std::exception const& error) {
    state.SkipWithError(error.what());
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
}

/// The sizes of a case, and tensors without padding between rows.
void set_sizes(Params& p, Case const& c, int element_bytes) {
  auto const strides = [&](int cols) { return Strides{int64_t(c.n) * c.heads * cols, int64_t(c.heads) * cols, cols}; };
  p.q_stride = p.k_stride = strides(c.head_dim);
  p.v_stride = p.o_stride = strides(c.head_dim_v);
  p.batch = c.batch;
  p.n_q = p.n_kv = c.n;
  p.heads_q = p.heads_kv = c.heads;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.element_bytes = element_bytes;
  p.softmax_scale = 1.f / std::sqrt(float(c.head_dim));
  p.window_right = c.causal ? 0 : -1;
}

double pairs_of(Case const& c) { return c.causal ? double(c.n) * (c.n + 1) / 2 : double(c.n) * c.n; }

void count_registers(benchmark::State& state, Kernel const& kernel) {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, kernel.entry);
  state.counters["registers"] = attributes.numRegs;
  state.counters["spilled"] = static_cast<double>(attributes.localSizeBytes);
}

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
void run_as(benchmark::State& state, Case const& c, double tolerance, std::function<Plan(Params const&)> const& plan) {
  int64_t const rows = int64_t(c.batch) * c.n * c.heads, elements = rows * c.head_dim, elements_v = rows * c.head_dim_v;
  DeviceBuffer<Element> q(elements), k(elements), v(elements_v), o(elements_v);
  DeviceBuffer<float> lse(rows);
  if (!q.get() || !k.get() || !v.get() || !o.get()) return state.SkipWithError("out of device memory");
  uint64_t const seeds[] = {1ull << 60, 2ull << 60, 3ull << 60};
  DeviceBuffer<Element> const* inputs[] = {&q, &k, &v};
  for (int i = 0; i < 3; ++i) fill_random<<<1024, 256>>>(inputs[i]->get(), i == 2 ? elements_v : elements, seeds[i]);
  cudaMemset(o.get(), 0xff, elements_v * sizeof(Element));  // NaN: an unwritten output shows

  Params p;
  set_sizes(p, c, sizeof(Element));
  p.q = q.get();
  p.k = k.get();
  p.v = v.get();
  p.o = o.get();
  p.lse = lse.get();
  try {
    Plan const planned = plan(p);
    if (!planned.kernel) throw std::runtime_error(planned.refusal);
    Workspace workspace;
    auto const launch = [&](cudaStream_t stream) {
      workspace.begin();
      cutlass_ext::run(planned, stream, [&](size_t bytes) { return workspace(bytes); });
    };
    time_rounds(state, tolerance, launch, [&] { return sampled_error(c, o.get(), seeds); });
  } catch (std::exception const& error) {
    state.SkipWithError(error.what());
  }
  using benchmark::Counter;
  state.counters["TFLOP/s"] = Counter(2e-12 * c.batch * c.heads * (c.head_dim + c.head_dim_v) * pairs_of(c),
                                      Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] =
      Counter(2e-9 * (elements + elements_v) * sizeof(Element), Counter::kIsIterationInvariantRate);
}

// ------------------------------------------------------------------------------------------------------- gradients
/// lse of a row, near that of scores of variance 1, and no forward pass: gradients are what the formula makes of any.
__host__ __device__ float lse_at(Case const& c, int row) { return logf(c.causal ? row + 1.f : c.n) + 0.5f; }

__global__ void fill_lse(float* lse, Case c) {
  for (int row = threadIdx.x; row < c.n; row += blockDim.x) lse[int64_t(blockIdx.x) * c.n + row] = lse_at(c, row);
}

/// Largest error of a few rows of dq, dk and dv (`gradients`) against the formula in float64, each relative to its
/// largest; `seeds` of q, k, v, dout and o.
template <class Element>
double sampled_error(Case const& c, Element const* const (&gradients)[3], uint64_t const (&seeds)[5]) {
  using Row = std::vector<double>;
  auto const first_of = [&](int cols, int b, int row, int head) {
    return ((int64_t(b) * c.n + row) * c.heads + head) * cols;
  };
  double const scale = 1 / std::sqrt(double(c.head_dim));
  double errors[3] = {}, largest[3] = {};
  for (int sample = 0; sample < 4; ++sample) {
    int const b = sample % c.batch, head = sample * 5 % c.heads, here = int(int64_t(c.n - 1) * sample / 3);
    auto const input = [&](int tensor, int row) {
      Row x(tensor < 2 ? c.head_dim : c.head_dim_v);
      uint64_t const first = seeds[tensor] + first_of(int(x.size()), b, row, head);
      for (size_t i = 0; i < x.size(); ++i) x[i] = float(Element(value_at(first + i)));
      return x;
    };
    auto const dot = [](Row const& x, Row const& y) {
      double sum = 0;
      for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
      return sum;
    };
    auto const add = [](Row& to, double factor, Row const& x) {
      for (size_t i = 0; i < x.size(); ++i) to[i] += factor * x[i];
    };
    struct Pair {
      double p, ds;
    };
    auto const pair = [&](Row const& q, Row const& dout, double delta, int row, Row const& k, Row const& v) {
      double const p = std::exp(scale * dot(q, k) - lse_at(c, row));
      return Pair{p, p * (dot(dout, v) - delta)};
    };
    Row of_row(c.head_dim), of_key(c.head_dim), of_value(c.head_dim_v);
    Row const q = input(0, here), k = input(1, here), v = input(2, here), dout = input(3, here);
    double const delta = dot(dout, input(4, here));
    for (int key = 0; key < (c.causal ? here + 1 : c.n); ++key) {
      Row const other = input(1, key);
      add(of_row, scale * pair(q, dout, delta, here, other, input(2, key)).ds, other);
    }
    for (int row = c.causal ? here : 0; row < c.n; ++row) {
      Row const other = input(0, row), other_dout = input(3, row);
      Pair const x = pair(other, other_dout, dot(other_dout, input(4, row)), row, k, v);
      add(of_key, scale * x.ds, other);
      add(of_value, x.p, other_dout);
    }
    Row const* const expected[] = {&of_row, &of_key, &of_value};
    for (int i = 0; i < 3; ++i) {
      int const cols = static_cast<int>(expected[i]->size());
      std::vector<Element> got(cols);
      cudaMemcpy(got.data(), gradients[i] + first_of(cols, b, here, head), cols * sizeof(Element),
                 cudaMemcpyDeviceToHost);
      for (int x = 0; x < cols; ++x) {
        double const difference = std::abs(float(got[x]) - (*expected[i])[x]);
        errors[i] = difference <= errors[i] ? errors[i] : difference;  // NaN counts as an error
        largest[i] = std::max(largest[i], std::abs((*expected[i])[x]));
      }
    }
  }
  double error = 0;
  for (int i = 0; i < 3; ++i) error = errors[i] / largest[i] <= error ? error : errors[i] / largest[i];
  return error;
}

}  // namespace

std::string Case::name() const {
  return "b" + std::to_string(batch) + "/n" + std::to_string(n) + "/h" + std::to_string(heads) + "/d" +
         std::to_string(head_dim) + (head_dim_v == head_dim ? "" : "_" + std::to_string(head_dim_v)) +
         (causal ? "/causal" : "/full");
}

void run(benchmark::State& state, Case const& c, std::function<Plan(Params const&)> const& plan) {
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
  count_registers(state, kernel);
  run(state, c, [&](Params const& params) {
    Device const& device = current_device();
    if (!runs_on(kernel, device)) throw std::runtime_error("this GPU has too little shared memory a block");
    state.counters["CTAs"] = occupancy_of(kernel, device).ctas_a_multiprocessor;
    return plan_with(kernel, params);
  });
}

void run_gradients(benchmark::State& state, Case const& c, Kernel const& of_keys, Kernel const* of_queries) {
  using Element = cutlass::bfloat16_t;
  constexpr double kTolerance = 2e-2;
  count_registers(state, of_keys);
  int64_t const rows = int64_t(c.batch) * c.n * c.heads, elements = rows * c.head_dim, elements_v = rows * c.head_dim_v;
  DeviceBuffer<Element> q(elements), k(elements), v(elements_v), dout(elements_v), o(elements_v), dq(elements),
      dk(elements), dv(elements_v);
  DeviceBuffer<float> lse(rows);
  for (auto const* buffer : {&q, &k, &v, &dout, &o, &dq, &dk, &dv}) {
    if (!buffer->get() || !lse.get()) return state.SkipWithError("out of device memory");
  }
  uint64_t const seeds[] = {1ull << 60, 2ull << 60, 3ull << 60, 4ull << 60, 5ull << 60};
  DeviceBuffer<Element> const* inputs[] = {&q, &k, &v, &dout, &o};
  for (int i = 0; i < 5; ++i) fill_random<<<1024, 256>>>(inputs[i]->get(), i < 2 ? elements : elements_v, seeds[i]);
  fill_lse<<<c.batch * c.heads, 256>>>(lse.get(), c);
  for (auto const* buffer : {&dq, &dk}) cudaMemset(buffer->get(), 0xff, elements * sizeof(Element));  // NaN
  cudaMemset(dv.get(), 0xff, elements_v * sizeof(Element));

  BackwardParams p;
  set_sizes(p, c, sizeof(Element));
  p.q = q.get(), p.k = k.get(), p.v = v.get(), p.o = o.get(), p.dout = dout.get(), p.lse = lse.get();
  p.dq = dq.get(), p.dk = dk.get(), p.dv = dv.get();
  p.dq_stride = p.dk_stride = p.q_stride;
  p.dv_stride = p.dout_stride = p.o_stride;
  try {
    if (!runs_on(of_keys, current_device())) throw std::runtime_error("this GPU has too little shared memory a block");
    BackwardPlan const plan = plan_backward_with(&of_keys, of_queries, p);
    Workspace workspace;
    auto const launch = [&](cudaStream_t stream) {
      workspace.begin();
      run_backward(plan, p, stream, [&](size_t bytes) { return workspace(bytes); });
    };
    Element const* const gradients[] = {dq.get(), dk.get(), dv.get()};
    time_rounds(state, kTolerance, launch, [&] { return sampled_error(c, gradients, seeds); });
  } catch (std::exception const& error) {
    state.SkipWithError(error.what());
  }
  using benchmark::Counter;
  state.counters["TFLOP/s"] = Counter(2e-12 * c.batch * c.heads * (3. * c.head_dim + 2. * c.head_dim_v) * pairs_of(c),
                                      Counter::kIsIterationInvariantRate);
}

}  // namespace cutlass_ext::bench

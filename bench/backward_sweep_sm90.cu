// Shapes of Hopper's gradients in bfloat16 for the head_dim that CMake sets as SWEEP_HEAD_DIM; linked into fmha_bench
// by -DFMHA_SWEEP=sm90. Those that csrc/kernels/sm90_backward_d*.cu has are labelled so: CMake reads them there. To
// ship another is a line there.
#include <optional>
#include <string>

#include "fmha/backward/sm90/kernel.hpp"
#include "kernels/kernel.hpp"
#include "kernels/tensor_maps.hpp"
#include "workload.hpp"

namespace cutlass_ext::bench {
namespace {

using sm90::DqAccumulation;
constexpr int kHeadDim = SWEEP_HEAD_DIM;

template <class Traits>
std::string shape_of() {
  std::string const kind = Traits::AccumulatesDq ? "all" : Traits::OfKeys ? "keys" : "rows";
  return kind + "/Br" + std::to_string(Traits::B_r) + "/Bc" + std::to_string(Traits::B_c) + "/stages" +
         std::to_string(Traits::Stages);
}

/// Whether csrc/kernels/ instantiates the shape: its template arguments as they stand there.
template <class Traits>
bool is_shipped() {
  std::string arguments = Traits::OfKeys ? "<Axis::Keys" : "<Axis::Rows";
  for (int const x : {Traits::B_r, Traits::B_c, kHeadDim, kHeadDim}) arguments += ", " + std::to_string(x);
  arguments += ", cute::bfloat16_t, " + std::to_string(Traits::Stages);
  if (Traits::AccumulatesDq) arguments += ", 0, DqAccumulation::Global";
  return std::string(SWEEP_SHIPPED).find(arguments + ">") != std::string::npos;
}

/// The gradients of two kernels, or, `Queries` being void, of one.
template <class Keys, class Queries = void>
void register_gradients() {
  Kernel const of_keys = kernel_of<Keys>();
  std::string shape = shape_of<typename Keys::Traits>();
  bool shipped = is_shipped<typename Keys::Traits>();
  std::optional<Kernel> of_queries;
  if constexpr (!std::is_void_v<Queries>) {
    of_queries = kernel_of<Queries>();
    shape += "+" + shape_of<typename Queries::Traits>();
    shipped = shipped && is_shipped<typename Queries::Traits>();
  }
  for (Case const& sizes :
       {Case{8, 2048, 2048 / kHeadDim, kHeadDim, false}, Case{2, 8192, 2048 / kHeadDim, kHeadDim, false},
        Case{32, 512, 2048 / kHeadDim, kHeadDim, false}}) {
    for (bool causal : {false, true}) {
      Case const c{sizes.batch, sizes.n, sizes.heads, kHeadDim, causal, DType::BFloat16};
      auto const time = [=](benchmark::State& state) {
        if (shipped) state.SetLabel("shipped");
        run_gradients(state, c, of_keys, of_queries ? &*of_queries : nullptr);
      };
      benchmark::RegisterBenchmark(("backward_sm90/" + c.name() + "/" + shape).c_str(), time)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

template <Axis Of, int B_r, int B_c, int Stages, DqAccumulation OfQueries = DqAccumulation::None>
using Gradients = sm90::Backward<Of, B_r, B_c, kHeadDim, kHeadDim, cute::bfloat16_t, Stages, 0, OfQueries>;

/// One kernel for all gradients, where it fits.
template <int Stages>
void register_stages() {
  constexpr DqAccumulation kGlobal = DqAccumulation::Global;
  if constexpr (sizeof(typename sm90::BackwardTraits<Axis::Keys, 64, 128, kHeadDim, kHeadDim, cute::bfloat16_t, Stages,
                                                     0, kGlobal>::SharedStorage) <= 227 * 1024)
    register_gradients<Gradients<Axis::Keys, 64, 128, Stages, kGlobal>>();
}

void register_shapes() {
  if constexpr (kHeadDim > 128 && kHeadDim <= 192) {  // two CTAs share a tile of keys
    register_gradients<Gradients<Axis::Keys, 64, 64, 3>, Gradients<Axis::Rows, 128, 64, 2>>();
    register_stages<2>(), register_stages<3>();
  } else if constexpr (kHeadDim > 192) {
    register_gradients<Gradients<Axis::Keys, 64, 64, 2, DqAccumulation::Global>>();
#ifndef SWEEP_ONE_SHAPE  // `make test` sees that this file compiles
    register_gradients<Gradients<Axis::Keys, 64, 64, 2>, Gradients<Axis::Rows, 128, 32, 2>>();
#endif
  } else {
    constexpr int kStages = kHeadDim > 64 ? 3 : 4, kStagesOfRows = kStages - 1;
    register_gradients<Gradients<Axis::Keys, 64, 128, kStages>, Gradients<Axis::Rows, 128, 128, kStagesOfRows>>();
    register_stages<2>(), register_stages<3>(), register_stages<4>();
  }
}

[[maybe_unused]] bool const registered = (register_shapes(), true);

}  // namespace
}  // namespace cutlass_ext::bench

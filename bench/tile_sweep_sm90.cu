// Every tile shape of the Hopper FMHA that fits a multiprocessor, in bfloat16, for the head_dim that CMake sets as
// SWEEP_HEAD_DIM and SWEEP_HEAD_DIM_V; linked into fmha_bench by -DFMHA_SWEEP=sm90. Compiled once for each B_r, which
// is SWEEP_B_R. The shapes that csrc/kernels/sm90_*.cu has are labelled so: CMake reads them there.
#include <string>

#include "fmha/sm90/fmha.hpp"
#include "kernels/kernel.hpp"
#include "kernels/tensor_maps.hpp"
#include "workload.hpp"

namespace cutlass_ext::bench {
namespace {

constexpr int kHeadDim = SWEEP_HEAD_DIM, kHeadDimV = SWEEP_HEAD_DIM_V, kB_r = SWEEP_B_R;

/// Registers of a consumer thread that a shape cannot do without: S, P and O. With fewer than 24 beside them it spills
/// in the main loop, which is of no use and slow to compile.
template <class Traits>
constexpr bool fits_registers =
    Traits::B_c / 2 + Traits::B_c / 4 + Traits::HeadDimV / 2 + 24 <= Traits::ConsumerRegisters;

template <int B_c, int Stages, int StagesQ>
void register_tile() {
  using Traits = sm90::Traits<kB_r, B_c, kHeadDim, kHeadDimV, cute::bfloat16_t, Stages, StagesQ, 0>;
  if constexpr (fits_registers<Traits> && sizeof(typename Traits::SharedStorage) <= 227 * 1024) {
    Kernel const kernel = kernel_of<sm90::FMHA<kB_r, B_c, kHeadDim, kHeadDimV, cute::bfloat16_t, Stages, StagesQ>>();
    std::string const shape = "Br" + std::to_string(kB_r) + "/Bc" + std::to_string(B_c) + "/stages" +
                              std::to_string(Stages) + "/stagesQ" + std::to_string(StagesQ);
    bool const shipped = std::string(SWEEP_SHIPPED).find(shape + ",") != std::string::npos;
    for (bool causal : {false, true}) {
      Case const c{2, 8192, 2048 / kHeadDim, kHeadDim, causal, DType::BFloat16, kHeadDimV};
      auto const time = [=](benchmark::State& state) {
        if (shipped) state.SetLabel("shipped");
        run_kernel(state, c, kernel);
      };
      benchmark::RegisterBenchmark(("tile_sm90/" + c.name() + "/" + shape).c_str(), time)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

template <int B_c>
void register_stages() {
  register_tile<B_c, 2, 1>(), register_tile<B_c, 2, 2>(), register_tile<B_c, 3, 1>(), register_tile<B_c, 3, 2>(),
      register_tile<B_c, 4, 1>(), register_tile<B_c, 4, 2>();
}

#ifdef SWEEP_ONE_SHAPE  // `make test` sees that this file compiles
[[maybe_unused]] bool const registered = (register_tile<80, 2, 1>(), true);
#else
[[maybe_unused]] bool const registered =
    (register_stages<48>(), register_stages<64>(), register_stages<80>(), register_stages<96>(), register_stages<112>(),
     register_stages<128>(), register_stages<144>(), register_stages<160>(), register_stages<176>(), true);
#endif

}  // namespace
}  // namespace cutlass_ext::bench

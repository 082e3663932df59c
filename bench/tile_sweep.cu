// Every tile shape of the CUDA-core FMHA that fits a multiprocessor, for the head_dim that CMake sets as
// SWEEP_HEAD_DIM; linked into fmha_bench by -DFMHA_SWEEP=simt. How the tiles in csrc/kernels were chosen: the table is
// in bench/results.
#include <string>

#include "fmha/simt/fmha.hpp"
#include "kernels/kernel.hpp"
#include "workload.hpp"

namespace cutlass_ext::bench {
namespace {

constexpr int kSharedLimit = 227 * 1024;  // of a block on sm_90; smaller GPUs refuse the launch and the row says so

template <int B_r, int B_c, int Threads>
void register_tile() {
  if constexpr (B_r % (Threads / 2) == 0 && B_r <= Threads) {  // four or eight rows a lane
    using Fmha = simt::FMHA<B_r, B_c, SWEEP_HEAD_DIM, float, Threads>;
    if constexpr (Fmha::kSharedBytes <= kSharedLimit) {
      Kernel const kernel = kernel_of<Fmha>();
      for (bool causal : {false, true}) {
        Case const c{2, 4096, 16, SWEEP_HEAD_DIM, causal};
        std::string const name = "tile/" + c.name() + "/Br" + std::to_string(B_r) + "/Bc" + std::to_string(B_c) +
                                 "/threads" + std::to_string(Threads);
        benchmark::RegisterBenchmark(name.c_str(), run_kernel, c, kernel)
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

template <int B_r, int Threads>
void register_keys() {
  register_tile<B_r, 32, Threads>(), register_tile<B_r, 64, Threads>(), register_tile<B_r, 96, Threads>(),
      register_tile<B_r, 128, Threads>();
}

template <int Threads>
void register_rows() {
  register_keys<32, Threads>(), register_keys<64, Threads>(), register_keys<96, Threads>(),
      register_keys<128, Threads>();
}

#ifdef SWEEP_ONE_SHAPE  // `make test` sees that this file compiles
[[maybe_unused]] bool const registered = (register_tile<64, 64, 128>(), true);
#else
[[maybe_unused]] bool const registered = (register_rows<64>(), register_rows<128>(), register_rows<256>(), true);
#endif

}  // namespace
}  // namespace cutlass_ext::bench

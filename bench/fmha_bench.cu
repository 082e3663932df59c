// fmha_bench: times the library's kernels without torch or Python, on Google Benchmark: --benchmark_filter=REGEX,
// --benchmark_format=json, --benchmark_out=FILE. Needs a driver and nothing else. With -DFMHA_SWEEP=simt it holds the
// tile shapes of tile_sweep.cu instead, with sm90 those of tile_sweep_sm90.cu: a kernel that two parts of one program
// instantiate has two copies on the device, and one name between them.
#include <string>

#include "workload.hpp"

namespace cutlass_ext::bench {
#ifndef FMHA_SWEEP
namespace {

void time_library(benchmark::State& state, Case const& c) {
  run(state, c, [&](Params const& params) {
    Request const request{c.dtype};
    Plan const planned = plan(params, request);
    if (planned.kernel) state.SetLabel(planned.kernel->family + (": " + planned.reason(request)));
    return planned;
  });
}

void register_library() {
  static Case const cases[] = {
      {4, 512, 16, 64}, {8, 59, 16, 64},  {1, 2048, 16, 64}, {2, 8192, 16, 64}, {2, 4096, 16, 128}, {1, 4096, 16, 256},
      {1, 256, 1, 64},  {1, 1024, 1, 64}, {2, 256, 4, 64},   {2, 1024, 4, 64},  {10, 1024, 64, 32},
  };
  for (Case c : cases) {
    for (bool causal : {false, true}) {
      c.causal = causal;
      benchmark::RegisterBenchmark(("fmha/" + c.name()).c_str(), time_library, c)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
#endif
}  // namespace cutlass_ext::bench

int main(int argc, char** argv) {
#ifndef FMHA_SWEEP  // there the sweep has registered its own
  cutlass_ext::bench::register_library();
#endif
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    fprintf(stderr, "fmha_bench: no CUDA device, or a driver older than 580 (CUDA 13)\n");
    return 1;
  }
  benchmark::AddCustomContext("gpu", device.name);
  benchmark::RunSpecifiedBenchmarks();
}

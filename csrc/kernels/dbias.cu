// dBias, for each dtype.
#include "../fmha/backward/dbias.hpp"
#include "../host/gradient_steps.hpp"

#include <algorithm>

#include <cutlass/numeric_types.h>

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {

void compute_dbias(DType dtype, BackwardParams const& params, cudaStream_t stream,
                   std::function<void*(size_t)> const& allocate) {
  BiasTiles tiles(params);
  int64_t const all = tiles.all();
  if (tiles.elements == 0) return;
  if (all > INT32_MAX)
    fail("ValueError", "dbias: has ", all, " tiles of 64 rows and keys; a launch has room for fewer than 2^31");
  // Four CTAs a multiprocessor fill it.
  int64_t const wanted = 4 * current_device().multiprocessors / all;
  tiles.parts = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(tiles.turns(), 1)));
  if (tiles.parts > 1) tiles.partial = static_cast<float*>(allocate(tiles.parts * tiles.elements * sizeof(float)));
  auto const kernel = dtype == DType::Float32   ? bias_gradient_kernel<float>
                      : dtype == DType::Float16 ? bias_gradient_kernel<cutlass::half_t>
                                                : bias_gradient_kernel<cutlass::bfloat16_t>;
  kernel<<<dim3(static_cast<unsigned>(all), tiles.parts), kBiasThreads, 0, stream>>>(params, tiles);
  check_cuda(cudaGetLastError(), "launching dBias");
  if (tiles.parts == 1) return;
  bias_parts_kernel<<<static_cast<unsigned>((tiles.elements + kBiasThreads - 1) / kBiasThreads), kBiasThreads, 0,
                      stream>>>(params, tiles);
  check_cuda(cudaGetLastError(), "adding up dBias");
}

}  // namespace cutlass_ext

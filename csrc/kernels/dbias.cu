// dBias, for each dtype, and the choice of its parts.
#include "../fmha/backward/dbias.hpp"
#include "../host/backward_steps.hpp"

#include <algorithm>

#include <cutlass/numeric_types.h>

#include "../host/device.hpp"
#include "../host/error.hpp"

namespace cutlass_ext {

void compute_dbias(DType dtype, Kernel const* hopper, BackwardParams params, cudaStream_t stream,
                   Allocate const& allocate) {
  int const multiprocessors = current_device().multiprocessors;
  if (params.batch == 0 || params.n_q == 0) hopper = nullptr;  // tensors that lie nowhere cannot be copied
  BiasTiles const tiles = hopper ? BiasTiles(params, hopper->block_r, hopper->block_c, kBiasCluster)
                                 : BiasTiles(params, kBiasTile, kBiasTile);
  int64_t const clusters = tiles.clusters();
  if (tiles.elements == 0) return;
  if (clusters > 1 << 30 || tiles.turns() > INT32_MAX)
    fail("ValueError", "dbias: has ", clusters, " tiles, each of ", tiles.turns(),
         " others; a launch has room for at most 2^30 and 2^31");
  // The Hopper kernel has one CTA a multiprocessor; of the other four fill it.
  int const resident = hopper ? std::max(multiprocessors / tiles.cluster, 1) : 4 * multiprocessors;
  params.dbias_parts =
      static_cast<int>(std::clamp<int64_t>(resident / clusters, 1, std::max<int64_t>(tiles.turns(), 1)));
  if (params.dbias_parts > 1)
    params.dbias_sums = static_cast<float*>(allocate(params.dbias_parts * tiles.elements * sizeof(float)));
  if (hopper) {
    occupancy_of(*hopper, current_device());  // raises the kernel's limit of shared memory
    int64_t const launched = std::min<int64_t>(clusters * params.dbias_parts, resident);
    unsigned const size = tiles.cluster;
    hopper->launch(params, {dim3(static_cast<unsigned>(launched) * size), size}, stream);
  } else {
    auto const kernel = dtype == DType::Float32   ? bias_gradient_kernel<float>
                        : dtype == DType::Float16 ? bias_gradient_kernel<cutlass::half_t>
                                                  : bias_gradient_kernel<cutlass::bfloat16_t>;
    kernel<<<dim3(static_cast<unsigned>(clusters), params.dbias_parts), kBiasThreads, 0, stream>>>(params, tiles);
    check_cuda(cudaGetLastError(), "launching dBias");
  }
  if (params.dbias_parts == 1) return;
  bias_parts_kernel<<<static_cast<unsigned>((tiles.elements + kBiasThreads - 1) / kBiasThreads), kBiasThreads, 0,
                      stream>>>(params, tiles.elements);
  check_cuda(cudaGetLastError(), "adding up dBias");
}

}  // namespace cutlass_ext

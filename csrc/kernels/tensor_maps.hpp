// Tensor maps: how the copy engine (TMA) finds tiles of a [batch, row, head, head_dim] tensor. Built on the host at
// each launch, without a synchronisation and without linking libcuda; passed to the kernels as parameters. Used by
// kernels/sm90_*.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "../fmha/sm90/tensor_maps.hpp"
#include "kernel.hpp"

namespace cutlass_ext {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

/// The driver's cuTensorMapEncodeTiled, through the runtime; null where the driver lacks it.
inline TensorMapEncoder tensor_map_encoder() {
  static TensorMapEncoder const encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    cudaGetLastError();  // what is missing is said where it is wanted
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(found)
                                                                         : nullptr;
  }();
  return encoder;
}

/// A map whose copies are `box_rows` rows by 64 columns of one head, swizzled over 128 bytes; what lies outside the
/// tensor (rows past its end, columns past `cols`) arrives as zeros.
inline CUtensorMap tensor_map(CUtensorMapDataType dtype, void const* data, Strides const& stride, int64_t batch,
                              int64_t rows, int64_t heads, int64_t cols, int box_rows) {
  auto const encode = tensor_map_encoder();
  if (!encode) fail("RuntimeError", "the driver has no cuTensorMapEncodeTiled: update it");
  CUtensorMap map;
  auto size = [](int64_t n) { return static_cast<uint64_t>(n > 0 ? n : 1); };  // an empty tensor is never read
  auto bytes = [](int64_t elements, int64_t n) { return static_cast<uint64_t>(n > 1 ? 2 * elements : 16); };
  uint64_t const sizes[] = {size(cols), size(rows), size(heads), size(batch)};
  uint64_t const strides[] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
  uint32_t const box[] = {64, static_cast<uint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  CUresult const result =
      encode(&map, dtype, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("RuntimeError", "encoding a tensor map: CUDA driver error ", int(result));
  return map;
}

/// The maps of a launch with tiles of B_r query rows and B_c keys.
template <class Traits>
struct Argument<sm90::TensorMaps, Traits> {
  static sm90::TensorMaps of(Params const& p) {
    auto const dtype = std::is_same_v<typename Traits::Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    int const batch = p.stored_batch(), keys = p.stored_keys();
    return {tensor_map(dtype, p.q, p.q_stride, batch, p.stored_rows(), p.heads_q, p.head_dim, Traits::B_r),
            tensor_map(dtype, p.k, p.k_stride, batch, keys, p.heads_kv, p.head_dim, Traits::B_c),
            tensor_map(dtype, p.v, p.v_stride, batch, keys, p.heads_kv, p.head_dim_v, Traits::B_c)};
  }
};

}  // namespace cutlass_ext

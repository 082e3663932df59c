// Tensor maps: how the copy engine (TMA) finds tiles of a [batch, row, head, head_dim] tensor. Built on the host at each
// launch, without a synchronisation and without linking libcuda; passed to the kernels as parameters.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include "../params.hpp"

namespace cutlass_ext::sm90 {

constexpr int kPanel = 64;  // 16-bit columns of one copy: 128 bytes, the widest swizzle

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

struct TensorMaps {
  CUtensorMap q, k, v;
};

/// The driver's cuTensorMapEncodeTiled, through the runtime; null where the driver lacks it.
inline TensorMapEncoder tensor_map_encoder() {
  static TensorMapEncoder const encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<TensorMapEncoder>(found)
               : nullptr;
  }();
  return encoder;
}

/// Whether the copy engine can read a 16-bit tensor at `data`: base and strides are whole 16-byte units below 2^40
/// bytes. Strides of dimensions of size 1 are never used.
inline bool tensor_map_possible(void const* data, Strides const& stride, int64_t batch, int64_t rows, int64_t heads) {
  auto possible = [](int64_t elements, int64_t size) {
    return size <= 1 || (elements % 8 == 0 && elements > 0 && elements < (int64_t(1) << 39));
  };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && possible(stride.row, rows) && possible(stride.head, heads) &&
         possible(stride.batch, batch);
}

/// A map whose copies are `box_rows` rows by 64 columns of one head, swizzled over 128 bytes; what lies outside the
/// tensor (rows past its end, columns past `cols`) arrives as zeros.
inline cudaError_t make_tensor_map(CUtensorMap* map, CUtensorMapDataType dtype, void const* data,
                                   Strides const& stride, int64_t batch, int64_t rows, int64_t heads, int64_t cols,
                                   int box_rows) {
  auto const encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  auto bytes = [](int64_t elements, int64_t size) { return static_cast<uint64_t>(size > 1 ? 2 * elements : 16); };
  uint64_t const sizes[] = {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), static_cast<uint64_t>(heads),
                            static_cast<uint64_t>(batch)};
  uint64_t const strides[] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
  uint32_t const box[] = {kPanel, static_cast<uint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  CUresult const result =
      encode(map, dtype, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace cutlass_ext::sm90

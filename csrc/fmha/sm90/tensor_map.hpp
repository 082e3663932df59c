// Tensor maps: how the copy engine (TMA) finds tiles of a [batch, row, head, head_dim] tensor. Built on the host at
// each launch, without a synchronisation and without linking libcuda; passed to the kernels as parameters.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "../params.hpp"

namespace cutlass_ext::sm90 {

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
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(found)
                                                                         : nullptr;
  }();
  return encoder;
}

/// Whether the copy engine can read the inputs, and 16 bytes a lane write the output: bases and strides are whole
/// 16-byte units, below 2^40 bytes. Strides of dimensions of size 1 are never used.
inline bool tensor_maps_possible(ForwardParams const& p) {
  auto possible = [&](void const* data, Strides const& stride, int64_t rows, int64_t heads) {
    auto step = [](int64_t elements, int64_t size) {
      return size <= 1 || (elements % 8 == 0 && elements >= 0 && elements < (int64_t(1) << 39));
    };
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && step(stride.row, rows) && step(stride.head, heads) &&
           step(stride.batch, p.stored_batch());
  };
  int const keys = p.stored_keys();
  return possible(p.q, p.q_stride, p.stored_rows(), p.heads_q) && possible(p.k, p.k_stride, keys, p.heads_kv) &&
         possible(p.v, p.v_stride, keys, p.heads_kv) && p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0;
}

/// Why the Hopper kernels cannot have the tensors, or null.
inline char const* why_no_tensor_maps(ForwardParams const& params) {
  return tensor_maps_possible(params)
             ? nullptr
             : "the copy engine wants q, k, v and out to begin at, and to have strides of, multiples of 16 bytes";
}

/// A map whose copies are `box_rows` rows by 64 columns of one head, swizzled over 128 bytes; what lies outside the
/// tensor (rows past its end, columns past `cols`) arrives as zeros.
inline cudaError_t make_tensor_map(CUtensorMap* map, CUtensorMapDataType dtype, void const* data, Strides const& stride,
                                   int64_t batch, int64_t rows, int64_t heads, int64_t cols, int box_rows) {
  auto const encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  auto size = [](int64_t n) { return static_cast<uint64_t>(n > 0 ? n : 1); };  // an empty tensor is never read
  auto bytes = [](int64_t elements, int64_t n) { return static_cast<uint64_t>(n > 1 ? 2 * elements : 16); };
  uint64_t const sizes[] = {size(cols), size(rows), size(heads), size(batch)};
  uint64_t const strides[] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
  uint32_t const box[] = {64, static_cast<uint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  CUresult const result =
      encode(map, dtype, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// The maps of a launch with tiles of `block_r` query rows and `block_c` keys.
template <class Element>
cudaError_t make_tensor_maps(TensorMaps* maps, ForwardParams const& p, int block_r, int block_c) {
  auto const dtype =
      std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int const batch = p.stored_batch(), keys = p.stored_keys();
  if (cudaError_t e =
          make_tensor_map(&maps->q, dtype, p.q, p.q_stride, batch, p.stored_rows(), p.heads_q, p.head_dim, block_r))
    return e;
  if (cudaError_t e = make_tensor_map(&maps->k, dtype, p.k, p.k_stride, batch, keys, p.heads_kv, p.head_dim, block_c))
    return e;
  return make_tensor_map(&maps->v, dtype, p.v, p.v_stride, batch, keys, p.heads_kv, p.head_dim_v, block_c);
}

}  // namespace cutlass_ext::sm90

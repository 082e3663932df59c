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

template <class Element>
constexpr CUtensorMapDataType map_dtype =
    std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

/// A dimension of a tensor beside its columns, and how much of it a copy takes.
struct MapDimension {
  int64_t size, stride;  // in elements
  int box = 1;
};

/// A map whose copies are boxes of 64 columns, or of 32, row after row of as many, swizzled over as many; what lies
/// outside the tensor (rows past its end, columns past `cols`) arrives as zeros. What L2 lacks it is asked to read
/// `promotion` bytes at a time: with 256 the boxes of a row's two halves both ask for all of it, and of an H200's
/// memory 4.1 TB/s were left for 4.6 (16 x 32 rows on 4096 keys, 32 heads on 8, 75.8 us for 69.0).
template <size_t N>
CUtensorMap tensor_map(CUtensorMapDataType dtype, void const* data, int64_t cols, MapDimension const (&dimensions)[N],
                       int box_cols = 64, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  auto const encode = tensor_map_encoder();
  if (!encode) fail("RuntimeError", "the driver has no cuTensorMapEncodeTiled: update it");
  auto const size = [](int64_t n) { return static_cast<uint64_t>(n > 0 ? n : 1); };  // an empty tensor is never read
  uint64_t sizes[N + 1] = {size(cols)}, strides[N];
  uint32_t box[N + 1] = {static_cast<uint32_t>(box_cols)}, steps[N + 1] = {1};
  for (size_t i = 0; i < N; ++i) {
    auto const& dimension = dimensions[i];
    sizes[i + 1] = size(dimension.size);
    strides[i] = dimension.size > 1 ? static_cast<uint64_t>(2 * dimension.stride) : 16;
    box[i + 1] = static_cast<uint32_t>(dimension.box);
    steps[i + 1] = 1;
  }
  CUtensorMap map;
  CUresult const result =
      encode(&map, dtype, N + 1, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("RuntimeError", "encoding a tensor map: CUDA driver error ", int(result));
  return map;
}

/// The maps of a launch with tiles of B_r query rows, of as many heads as share a tile (pack_gqa.hpp), and of B_c keys,
/// from pages in boxes.
template <class Traits>
struct Argument<sm90::TensorMaps, Traits> {
  static sm90::TensorMaps of(Params const& p) {
    constexpr auto dtype = map_dtype<typename Traits::Part>;
    constexpr bool in_parts = Traits::Parts > 1;
    constexpr int kSmallBox = 16;  // rows
    int const heads = p.heads_a_tile.divisor;
    Strides const& q = p.q_stride;
    auto const of_keys = [&](void const* data, Strides const& stride, int cols) {
      MapDimension const rows = p.paged() ? MapDimension{p.page_rows.divisor, stride.row, p.box_rows}
                                          : MapDimension{p.stored_keys(), stride.row, Traits::B_c};
      int const places = p.paged() ? p.pages : p.stored_batch();
      // Of small boxes the second half of a row is soon asked for: 8 x 128 rows over pages of 16 105 us for 108.6.
      auto const promotion =
          rows.box > kSmallBox ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
      return tensor_map(dtype, data, cols, {rows, {p.heads_kv, stride.head}, {places, stride.batch}}, 64, promotion);
    };
    int const cols = in_parts ? Traits::ColumnsQK : p.head_dim, cols_v = in_parts ? Traits::ColumnsV : p.head_dim_v;
    return {tensor_map(dtype, p.q, cols,
                       {{heads, q.head, heads},
                        {p.stored_rows(), q.row, Traits::B_r / heads},
                        {p.heads_q / heads, heads * q.head},
                        {p.stored_batch(), q.batch}}),
            of_keys(p.k, p.k_stride, cols), of_keys(p.v, p.v_stride, cols_v)};
  }
};

/// That of a bias, in boxes of 64 rows and 64 keys.
inline CUtensorMap map_of_bias(Params const& p) {
  Bias const& biases = bias_of(p);
  auto const size = [](int64_t stride, int size) { return stride == 0 ? 1 : size; };
  return tensor_map(
      biases.type == BiasType::Float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      biases.data, p.n_kv,
      {{p.n_q, biases.row, sm90::kAtomRows},
       {size(biases.head, p.heads_q), biases.head},
       {size(biases.batch, p.batch), biases.batch}});
}

template <class Traits>
struct Argument<sm90::TensorMapsOfPairs, Traits> {
  static sm90::TensorMapsOfPairs of(Params const& p) {
    sm90::TensorMapsOfPairs maps{Argument<sm90::TensorMaps, Traits>::of(p), {}};
    if (Traits::copies_bias(p)) maps.biases = map_of_bias(p);
    return maps;
  }
};

/// Those of a backward pass: of q and dout in boxes of so many rows, of k and v of so many keys.
template <class Element>
sm90::BiasMaps maps_of_sides(BackwardParams const& p, int cols, int cols_v, int box_rows, int box_keys) {
  auto const map = [&](void const* data, Strides const& stride, int cols, int rows, int heads, int box) {
    return tensor_map(map_dtype<Element>, data, cols,
                      {{rows, stride.row, box}, {heads, stride.head}, {p.stored_batch(), stride.batch}});
  };
  auto const of_rows = [&](void const* data, Strides const& stride, int cols) {
    return map(data, stride, cols, p.stored_rows(), p.heads_q, box_rows);
  };
  auto const of_keys = [&](void const* data, Strides const& stride, int cols) {
    return map(data, stride, cols, p.stored_keys(), p.heads_kv, box_keys);
  };
  return {of_rows(p.q, p.q_stride, cols), of_rows(p.dout, p.dout_stride, cols_v), of_keys(p.k, p.k_stride, cols),
          of_keys(p.v, p.v_stride, cols_v)};
}

/// The maps of one side's launch of the backward pass: tiles of B_c keys in hand and of B_r rows streamed, or the other
/// way round.
template <class Traits>
struct Argument<sm90::GradientMaps, Traits> {
  static sm90::GradientMaps of(Params const& params) {
    constexpr bool in_parts = Traits::Parts > 1;
    auto const& p = static_cast<BackwardParams const&>(params);
    auto const [q, dout, k, v] = maps_of_sides<typename Traits::Part>(
        p, in_parts ? Traits::ColumnsQK : params.head_dim, in_parts ? Traits::ColumnsV : params.head_dim_v,
        Traits::B_r / Traits::Cluster, Traits::OfKeys ? Traits::HeldBox : Traits::B_c);
    sm90::GradientMaps maps =
        Traits::OfKeys ? sm90::GradientMaps{k, v, q, dout, {}} : sm90::GradientMaps{q, dout, k, v, {}};
    if (Traits::FusesPostprocess && p.sections) {
      maps.dq = tensor_map(map_dtype<typename Traits::Part>, p.dq, p.head_dim,
                           {{p.n_q, p.dq_stride.row, 16}, {p.heads_q, p.dq_stride.head}, {p.batch, p.dq_stride.batch}},
                           Traits::ColumnsPostprocess);
    }
    return maps;
  }
};

template <class Traits>
struct Argument<sm90::GradientMapsOfBias, Traits> {
  static sm90::GradientMapsOfBias of(Params const& params) {
    return {Argument<sm90::GradientMaps, Traits>::of(params), map_of_bias(params)};
  }
};

}  // namespace cutlass_ext

// The two products of a decode step, for one warp's 16 query rows and one key tile: on mma.sync tensor cores (fp16,
// bf16) and on CUDA cores (fp32), with the same lanes holding the same scores and outputs. Called by fmha.hpp.
#pragma once

#include "../cute_tensor.hpp"
#include "../mma/mma_sync.hpp"
#include "../operand.hpp"
#include "traits.hpp"

namespace cutlass_ext::decode {

using namespace cute;

/// A lane's part of an accumulator of N columns: rows lane / 4 and that + 8, columns 8n + lane % 4 * 2 and the next.
template <int N>
using Fragment = float[N / 8][4];

/// P of 16 keys, of the accumulators of two times 8, as the left operand of the second product.
template <class Element>
CUTE_DEVICE void pack_operand(uint32_t (&p)[4], float const (&left)[4], float const (&right)[4]) {
  p[0] = pack<Element>(left[0], left[1]);
  p[1] = pack<Element>(left[2], left[3]);
  p[2] = pack<Element>(right[0], right[1]);
  p[3] = pack<Element>(right[2], right[3]);
}

/// The maxima settle after a few tiles: from then on there is nothing to do.
template <int Atoms>
CUTE_DEVICE void rescale_rows(float (&O)[Atoms][4], float const (&rescale)[2]) {
  if (!__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) return;
  CUTE_UNROLL
  for (int n = 0; n < Atoms; ++n) {
    CUTE_UNROLL
    for (int e = 0; e < 4; ++e) O[n][e] *= rescale[e / 2];
  }
}

/// Both products on tensor cores. Q stays in registers, or, where O leaves no room there, in shared memory.
template <class Traits>
struct TensorCores {
  using Element = typename Traits::Element;
  static constexpr int HeadDim = Traits::HeadDim, TileKeys = Traits::TileKeys, Steps = HeadDim / 16;

  uint32_t q[Traits::QueryInRegisters ? Steps : 1][4];

  /// Called when the warp's rows lie in `sQ`.
  CUTE_DEVICE void take_query(Element const* sQ, int lane) {
    if constexpr (Traits::QueryInRegisters) {
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) load_fragment(q[k], sQ, k, lane);
    }
  }

  /// S = Q K^T, over all columns of the tile: the copies have zeroed those past head_dim.
  CUTE_DEVICE void scores(Fragment<TileKeys>& S, Element const* sQ, Element const* sK, int lane) const {
    CUTE_UNROLL
    for (int n = 0; n < TileKeys / 8; ++n) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0.f;
    CUTE_UNROLL
    for (int k = 0; k < Steps; ++k) {
      uint32_t fragment[4];
      if constexpr (Traits::QueryInRegisters) {
        CUTE_UNROLL
        for (int part = 0; part < 4; ++part) fragment[part] = q[k][part];
      } else {
        load_fragment(fragment, sQ, k, lane);
      }
      CUTE_UNROLL
      for (int n = 0; n < TileKeys / 8; n += 2) {
        uint32_t keys[4];  // two atoms of 8 keys, both halves of the 16 columns
        load_matrices(keys,
                      sK + chunk_offset<Element, TileKeys>(n * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        sm80::mma<Element>(S[n], fragment, keys[0], keys[1]);
        sm80::mma<Element>(S[n + 1], fragment, keys[2], keys[3]);
      }
    }
  }

  /// O = rescale O + P V, P from the accumulators of Q K^T.
  CUTE_DEVICE void values(Fragment<HeadDim>& O, Fragment<TileKeys> const& P, float const (&rescale)[2],
                          Element const* sV, int lane) const {
    rescale_rows(O, rescale);
    CUTE_UNROLL
    for (int k = 0; k < TileKeys / 16; ++k) {
      uint32_t p[4];
      pack_operand<Element>(p, P[2 * k], P[2 * k + 1]);
      CUTE_UNROLL
      for (int n = 0; n < HeadDim / 8; n += 2) {
        uint32_t v[4];  // both halves of the 16 keys, two atoms of 8 columns
        load_matrices_transposed(v, sV + chunk_offset<Element, TileKeys>(k * 16 + lane % 16, n + lane / 16));
        sm80::mma<Element>(O[n], p, v[0], v[1]);
        sm80::mma<Element>(O[n + 1], p, v[2], v[3]);
      }
    }
  }

 private:
  CUTE_DEVICE static void load_fragment(uint32_t (&fragment)[4], Element const* sQ, int k, int lane) {
    load_matrices(fragment, sQ + chunk_offset<Element, kWarpRows>(lane % 16, 2 * k + lane / 16));
  }
};

/// Both products on CUDA cores in fp32; Q lies in shared memory.
template <class Traits>
struct CudaCores {
  using Element = float;
  static constexpr int HeadDim = Traits::HeadDim, TileKeys = Traits::TileKeys, Chunks = HeadDim / 4;
  static_assert(Traits::RowWarps == 1);

  CUTE_DEVICE void take_query(float const*, int) {}

  CUTE_DEVICE void scores(Fragment<TileKeys>& S, float const* sQ, float const* sK, int lane) const {
    CUTE_UNROLL
    for (int n = 0; n < TileKeys / 8; ++n) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0.f;
#pragma unroll 2
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      float4 q[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i)
        q[i] = *reinterpret_cast<float4 const*>(sQ + chunk_offset<float, kWarpRows>(lane / 4 + 8 * i, chunk));
      CUTE_UNROLL
      for (int n = 0; n < TileKeys / 8; ++n) {
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float4 const k =
              *reinterpret_cast<float4 const*>(sK + chunk_offset<float, TileKeys>(n * 8 + lane % 4 * 2 + j, chunk));
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            float& s = S[n][2 * i + j];
            s = fmaf(q[i].w, k.w, fmaf(q[i].z, k.z, fmaf(q[i].y, k.y, fmaf(q[i].x, k.x, s))));
          }
        }
      }
    }
  }

  /// The tile's product is summed apart and added once: the rounding error of O then grows with the number of tiles and
  /// not of keys.
  CUTE_DEVICE void values(Fragment<HeadDim>& O, Fragment<TileKeys> const& P, float const (&rescale)[2], float const* sV,
                          int lane) const {
    float p[2][TileKeys];  // the lane's two rows, from the four lanes that share them
    CUTE_UNROLL
    for (int key = 0; key < TileKeys; ++key) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i)
        p[i][key] = __shfl_sync(0xffffffffu, P[key / 8][2 * i + key % 2], lane / 4 * 4 + key % 8 / 2);
    }
    CUTE_UNROLL
    for (int n = 0; n < HeadDim / 8; ++n) {
      float sum[4] = {};
      int const col = n * 8 + lane % 4 * 2;
      CUTE_UNROLL
      for (int key = 0; key < TileKeys; ++key) {
        float2 const v = *reinterpret_cast<float2 const*>(sV + chunk_offset<float, TileKeys>(key, col / 4) + col % 4);
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) sum[e] = fmaf(p[e / 2][key], e % 2 ? v.y : v.x, sum[e]);
      }
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) O[n][e] = fmaf(O[n][e], rescale[e / 2], sum[e]);
    }
  }
};

template <class Traits>
using Math = std::conditional_t<Traits::TensorCores, TensorCores<Traits>, CudaCores<Traits>>;

}  // namespace cutlass_ext::decode

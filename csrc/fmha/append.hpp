// What comes before attention where what is new goes to a cache and the kernel only reads it: keys are turned and
// written to their places with their values, and q is turned into a tensor of its own, so that everything is found as
// if it had always been there. Instantiated by csrc/kernels/append.cu.
#pragma once

#include "cache.hpp"
#include "features.hpp"
#include "pack_gqa.hpp"
#include "sequence.hpp"

namespace cutlass_ext::append {

constexpr int kWarps = 4, kHeads = 4;  // of a CTA; rows of a warp: so many heads of one token
constexpr int kMaxHeadDim = 256;

/// The work of a sequence, a warp each: new keys, as many of new values, and rows of q where they are turned.
struct Units {
  int64_t keys, queries;

  CUTE_HOST_DEVICE explicit Units(Params const& p)
      : keys(groups(p.heads_kv) * p.n_new), queries(p.rotary.cos ? groups(p.heads_q) * p.n_q : 0) {}
  CUTE_HOST_DEVICE static int64_t groups(int heads) { return (heads + kHeads - 1) / kHeads; }
  CUTE_HOST_DEVICE int64_t of_sequence() const { return 2 * keys + queries; }
};

/// Launched with Units::of_sequence warps for each sequence, fewer than 2^31 in all. Rows of q go to `rotated_q`,
/// [B, N_q, H_q, d].
template <class Element>
__global__ void __launch_bounds__(kWarps * 32)
    append_kernel(__grid_constant__ Params const params, void* __restrict__ rotated_q) {
  constexpr int Vector = 16 / sizeof(Element), Ahead = 4;  // chunks that a lane asks for before it waits
  __shared__ uint4 tiles[kWarps][kHeads * kMaxHeadDim / Vector];
  unsigned const lane = threadIdx.x % 32, unit = blockIdx.x * kWarps + threadIdx.x / 32;
  Units const units(params);
  unsigned const of_sequence = units.of_sequence(), keys = units.keys, batch = unit / of_sequence;
  if (batch >= params.batch) return;
  unsigned index = unit - batch * of_sequence;
  bool const is_q = index >= 2 * keys, is_v = !is_q && index >= keys;
  index -= is_q ? 2 * keys : is_v ? keys : 0;
  int const all_heads = is_q ? params.heads_q : params.heads_kv, groups = Units::groups(all_heads);
  int const token = index / groups, first_head = (index - token * groups) * kHeads;

  Sequence const s = sequence_of(params, batch);
  int const first_new = s.cached + s.k_row0, key_row = first_new + token;
  int const page = is_q || key_row >= params.n_kv ? -1 : page_of_row(params, batch, key_row);
  if (!is_q && page < 0) return;

  void const* const from = is_q ? params.q : is_v ? params.v_new : params.k_new;
  Strides const from_stride = is_q ? params.q_stride : is_v ? params.v_new_stride : params.k_new_stride;
  Element* const to =
      is_q ? static_cast<Element*>(rotated_q) + (int64_t(batch) * params.n_q + token) * params.heads_q * params.head_dim
           : row_at<Element>(is_v ? params.v : params.k, is_v ? params.v_stride : params.k_stride, page,
                             row_in_page(params, key_row), 0);
  int64_t const to_stride = is_q ? params.head_dim : is_v ? params.v_stride.head : params.k_stride.head;
  int const chunks = (is_v ? params.head_dim_v : params.head_dim) / Vector;
  int const heads = min(kHeads, all_heads - first_head), size = heads * chunks;
  bool const aligned = rows_are_aligned(params), turns = params.rotary.cos && !is_v;
  uint4* const tile = tiles[threadIdx.x / 32];

  auto const load = [&](int i) {
    return load_chunk(
        row_at<Element const>(from, from_stride, batch, token, first_head + i / chunks) + i % chunks * Vector, aligned);
  };
  auto const store = [&](int i, uint4 const& chunk) {
    store_chunk(to + (first_head + i / chunks) * to_stride + i % chunks * Vector, chunk, aligned);
  };
  for (int begin = lane; begin < size; begin += 32 * Ahead) {
    uint4 chunk[Ahead];
    CUTE_UNROLL
    for (int i = 0; i < Ahead; ++i) {
      if (begin + 32 * i < size) chunk[i] = load(begin + 32 * i);
    }
    CUTE_UNROLL
    for (int i = 0; i < Ahead; ++i) {
      if (begin + 32 * i >= size) break;
      if (turns)
        tile[begin + 32 * i] = chunk[i];
      else
        store(begin + 32 * i, chunk[i]);
    }
  }
  if (!turns) return;
  __syncwarp();
  int const position = is_q ? rotary_position(params.rotary, first_new, token) : key_row;
  for (int head = 0; head < heads; ++head)
    rotate_row<Element>(params.rotary, position, [&](int c) -> uint4& { return tile[head * chunks + c]; });
  __syncwarp();
  for (int i = lane; i < size; i += 32) store(i, tile[i]);
}

}  // namespace cutlass_ext::append

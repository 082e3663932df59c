// What comes before attention where what is new goes to a cache and the kernel only reads it: keys are turned and
// written to their places with their values, and q is turned into a tensor of its own, so that everything is found as
// if it had always been there. Instantiated by csrc/kernels/append.cu.
#pragma once

#include "cache.hpp"
#include "features.hpp"
#include "pack_gqa.hpp"
#include "sequence.hpp"

namespace cutlass_ext::append {

constexpr int kThreads = 128;
/// Heads of one token, the same columns of each, that a thread reads before it waits: their cosines are the same.
constexpr int kHeads = 4;

/// Columns of a row that a thread reads and writes at once.
template <class Element, int Columns>
struct alignas(Columns * sizeof(Element)) Chunk {
  Element x[Columns];
};

/// The threads of a sequence: of its new keys, of as many values, and of rows of q where they are turned.
struct Threads {
  int64_t keys, values, queries;

  CUTE_HOST_DEVICE Threads(Params const& p, int columns)
      : keys(of(p.n_new, p.heads_kv, p.head_dim / columns)),
        values(of(p.n_new, p.heads_kv, p.head_dim_v / columns)),
        queries(p.rotary.cos ? of(p.n_q, p.heads_q, p.head_dim / columns) : 0) {}
  CUTE_HOST_DEVICE int64_t all() const { return keys + values + queries; }
  CUTE_HOST_DEVICE static int groups(int heads) { return (heads + kHeads - 1) / kHeads; }

 private:
  CUTE_HOST_DEVICE static int64_t of(int rows, int heads, int chunks) { return int64_t(rows) * groups(heads) * chunks; }
};

/// Whether rows are read and written 16 bytes at a time, and their cosines and sines so, or as 8 for pairs side by
/// side; else every column is by itself.
inline bool takes_vectors(Params const& p) {
  int const columns = 16 / p.element_bytes;
  Rotary const& rotary = p.rotary;
  auto const is_aligned = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  bool const whole_chunks = rotary.dim % (rotary.interleaved ? columns : 2 * columns) == 0;
  return rows_are_aligned(p) && (!rotary.cos || (whole_chunks && rotary.row_stride % columns == 0 &&
                                                 is_aligned(rotary.cos) && is_aligned(rotary.sin)));
}

/// What `Columns` columns, from `col` on, of rows at a position are turned by: each, with the one that it makes a pair
/// with.
template <class Element, int Columns>
struct Turn {
  static constexpr int kPairs = Columns > 1 ? Columns / 2 : 1;  // of columns side by side
  float cos[Columns], sin[Columns];

  CUTE_DEVICE Turn(Rotary const& rotary, int position, int col) {
    int const half = rotary.dim / 2;
    int64_t const entry = rotary_entry(rotary, position);
    if (rotary.interleaved) {
      auto const c = load<kPairs>(rotary.cos, entry + col / 2), s = load<kPairs>(rotary.sin, entry + col / 2);
      CUTE_UNROLL
      for (int i = 0; i < Columns; ++i) set(i, c.x[i / 2], s.x[i / 2], (col + i) % 2 == 0);
    } else {
      int64_t const pair = entry + (col < half ? col : col - half);
      auto const c = load<Columns>(rotary.cos, pair), s = load<Columns>(rotary.sin, pair);
      CUTE_UNROLL
      for (int i = 0; i < Columns; ++i) set(i, c.x[i], s.x[i], col < half);
    }
  }
  /// The first of the columns that these make pairs with: their own, if pairs are side by side in them.
  CUTE_DEVICE static int partner_of(Rotary const& rotary, int col) {
    int const half = rotary.dim / 2;
    if (rotary.interleaved) return Columns > 1 ? col : col ^ 1;
    return col < half ? col + half : col - half;
  }
  CUTE_DEVICE void apply(Rotary const& rotary, Chunk<Element, Columns>& own,
                         Chunk<Element, Columns> const& partner) const {
    CUTE_UNROLL
    for (int i = 0; i < Columns; ++i) {
      Element const of_pair = rotary.interleaved ? partner.x[Columns > 1 ? i ^ 1 : i] : partner.x[i];
      own.x[i] = static_cast<Element>(turned(own.x[i], of_pair, cos[i], sin[i]));
    }
  }

 private:
  template <int N>
  CUTE_DEVICE static Chunk<Element, N> load(void const* table, int64_t at) {
    return *reinterpret_cast<Chunk<Element, N> const*>(static_cast<Element const*>(table) + at);
  }
  CUTE_DEVICE void set(int i, float c, float s, bool is_first) { cos[i] = c, sin[i] = is_first ? -s : s; }
};

/// Launched with `ctas_a_sequence` CTAs for each sequence. Rows of q go to `rotated_q`, [B, N_q, H_q, d]. A thread
/// reads its rows whether or not all of its heads exist, and before it looks at the sequence: behind a condition ptxas
/// would have loads wait for one another.
template <class Element, int Columns>
__global__ void __launch_bounds__(kThreads)
    append_kernel(__grid_constant__ Params const params, void* __restrict__ rotated_q, unsigned ctas_a_sequence) {
  using OfRow = Chunk<Element, Columns>;
  Threads const threads(params, Columns);
  unsigned const batch = blockIdx.x / ctas_a_sequence, keys = threads.keys, values = threads.values;
  unsigned index = (blockIdx.x - batch * ctas_a_sequence) * kThreads + threadIdx.x;
  if (index >= threads.all()) return;
  bool const is_q = index >= keys + values, is_v = !is_q && index >= keys;
  index -= is_q ? keys + values : is_v ? keys : 0;
  int const all_heads = is_q ? params.heads_q : params.heads_kv, groups = Threads::groups(all_heads);
  unsigned const chunks = (is_v ? params.head_dim_v : params.head_dim) / Columns, group = index / chunks;
  int const col = (index - group * chunks) * Columns, token = group / groups,
            first_head = (group - token * groups) * kHeads, heads = min(kHeads, all_heads - first_head);

  void const* const data = is_q ? params.q : is_v ? params.v_new : params.k_new;
  Strides const stride = is_q ? params.q_stride : is_v ? params.v_new_stride : params.k_new_stride;
  Element const* const from = row_at<Element const>(data, stride, batch, token, first_head);
  OfRow own[kHeads], partner[kHeads];
  auto const load = [&](OfRow(&rows)[kHeads], int of_col) {
    CUTE_UNROLL
    for (int i = 0; i < kHeads; ++i)  // of heads that there are not, the last one
      rows[i] = *reinterpret_cast<OfRow const*>(from + min(i, heads - 1) * stride.head + of_col);
  };
  Rotary const& rotary = params.rotary;
  bool const turns = rotary.cos && !is_v && col < rotary.dim;
  load(own, col);
  if (rotary.cos) load(partner, turns ? Turn<Element, Columns>::partner_of(rotary, col) : col);

  Sequence const s = sequence_of(params, batch);
  int const first_new = s.cached + s.k_row0, key_row = first_new + token;
  int const page = is_q || key_row >= params.n_kv ? -1 : page_of_row(params, batch, key_row);
  if (!is_q && page < 0) return;
  if (turns) {
    Turn<Element, Columns> const turn(rotary, is_q ? rotary_position(rotary, first_new, token) : key_row, col);
    CUTE_UNROLL
    for (int i = 0; i < kHeads; ++i) turn.apply(rotary, own[i], partner[i]);
  }
  Element* const to =
      is_q ? static_cast<Element*>(rotated_q) + (int64_t(batch) * params.n_q + token) * params.heads_q * params.head_dim
           : row_at<Element>(is_v ? params.v : params.k, is_v ? params.v_stride : params.k_stride, page,
                             row_in_page(params, key_row), 0);
  int64_t const to_stride = is_q ? params.head_dim : is_v ? params.v_stride.head : params.k_stride.head;
  CUTE_UNROLL
  for (int i = 0; i < kHeads; ++i) {
    if (i < heads) *reinterpret_cast<OfRow*>(to + (first_head + i) * to_stride + col) = own[i];
  }
}

}  // namespace cutlass_ext::append

// What the mma.sync kernels do with tiles: the two products of a warp, P between them, and rows to memory. Used by
// fmha.hpp and backward/sm80.hpp.
#pragma once

#include "../cute_tensor.hpp"
#include "../mma/mma_sync.hpp"
#include "../operand.hpp"
#include "../softmax.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm80 {

/// A thread's place in the work of its CTA.
template <class Traits>
struct Place {
  int lane = threadIdx.x % 32;
  int warp_row = threadIdx.x / 32 / Traits::Sharers * Traits::RowAtoms * kAtom;
  int part = threadIdx.x / 32 % Traits::Sharers;  // of the keys of a tile, and of the columns of O
};

/// Rows and keys of a thread, counted from its first: an accumulator holds two rows 8 apart and two columns.
CUTE_HOST_DEVICE constexpr int row_of(int i) { return i / 2 * kAtom + i % 2 * 8; }
CUTE_HOST_DEVICE constexpr int key_of(int j) { return j / 2 * kAtomN + j % 2; }

/// The thread's rows and columns of its accumulators.
template <int RowAtoms, int ColumnAtoms>
CUTE_DEVICE auto rows_and_columns(float (&c)[RowAtoms][ColumnAtoms][4]) {
  return make_tensor(make_rmem_ptr(&c[0][0][0]),
                     make_layout(make_shape(Shape<_2, Int<RowAtoms>>{}, Shape<_2, Int<ColumnAtoms>>{}),
                                 make_stride(Stride<_2, Int<4 * ColumnAtoms>>{}, Stride<_1, _4>{})));
}

/// Accumulators of zeros, and the sum of two.
template <int RowAtoms, int Atoms>
CUTE_DEVICE void clear(float (&c)[RowAtoms][Atoms][4]) {
  CUTE_UNROLL
  for (int a = 0; a < RowAtoms; ++a) {
    CUTE_UNROLL
    for (int n = 0; n < Atoms; ++n) c[a][n][0] = c[a][n][1] = c[a][n][2] = c[a][n][3] = 0.f;
  }
}
template <int RowAtoms, int Atoms>
CUTE_DEVICE void add(float (&c)[RowAtoms][Atoms][4], float const (&more)[RowAtoms][Atoms][4]) {
  CUTE_UNROLL
  for (int a = 0; a < RowAtoms; ++a) {
    CUTE_UNROLL
    for (int n = 0; n < Atoms; ++n) {
      CUTE_UNROLL
      for (int x = 0; x < 4; ++x) c[a][n][x] += more[a][n][x];
    }
  }
}

/// The chunk with which a part of a tile's columns begins.
template <class Traits>
CUTE_HOST_DEVICE constexpr int part_chunk(int part) {
  return part * (Traits::HeadDim / kVector);
}

/// Q of a warp as an operand, 16 columns at a time; in registers, `held`, where they suffice. `Beyond`, here and below:
/// bytes from the address that is given to the tile, where addresses are shared with another tile.
template <class Traits, uint32_t Beyond = 0>
struct Queries {
  static constexpr int Steps = Traits::HeadDim / kAtom;
  using Rows16 = typename Traits::Rows16;
  using Held = Rows16[Traits::QueriesInRegisters ? Steps : 1];
  Held& held;
  uint32_t at;  // where the lane's rows of fragments begin

  /// Called when Q has landed.
  CUTE_DEVICE void take() const {
    if constexpr (Traits::QueriesInRegisters) {
      CUTE_UNROLL
      for (int k = 0; k < Steps; ++k) load(held[k], k);
    }
  }
  CUTE_DEVICE void operator()(Rows16& q, int k) const {
    if constexpr (Traits::QueriesInRegisters) {
      CUTE_UNROLL
      for (int part = 0; part < Traits::Parts; ++part) {
        CUTE_UNROLL
        for (int a = 0; a < Traits::RowAtoms; ++a) {
          CUTE_UNROLL
          for (int x = 0; x < 4; ++x) q[part][a][x] = held[k][part][a][x];
        }
      }
    } else {
      load(q, k);
    }
  }

 private:
  CUTE_DEVICE void load(Rows16& q, int k) const {
    CUTE_UNROLL
    for (int part = 0; part < Traits::Parts; ++part) {
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a)
        load_matrices(q[part][a], chunk_at<Traits::B_r>(at, a * kAtom, part_chunk<Traits>(part) + 2 * k) + Beyond);
    }
  }
};

/// C += A B of a warp's rows and two atoms of columns, 16 deep.
template <class Part, int RowAtoms, int Atoms>
CUTE_DEVICE void multiply(float (&c)[RowAtoms][Atoms][4], int n, uint32_t const (&a)[RowAtoms][4],
                          uint32_t const (&b)[4]) {
  CUTE_UNROLL
  for (int r = 0; r < RowAtoms; ++r) {
    mma<Part>(c[r][n], a[r], b[0], b[1]);
    mma<Part>(c[r][n + 1], a[r], b[2], b[3]);
  }
}

/// The same of operands in parts. The small products have a sum of their own, `low`: in one with the large ones every
/// step would cut off what the accumulator has no bits for, three times as often.
template <class Traits, int Atoms>
CUTE_DEVICE void multiply(float (&c)[Traits::RowAtoms][Atoms][4], float (&low)[Traits::RowAtoms][Atoms][4], int n,
                          typename Traits::Rows16 const& a, typename Traits::Columns16 const& b) {
  using Part = typename Traits::Part;
  if constexpr (Traits::Parts == 2) {
    multiply<Part>(low, n, a[0], b[1]);
    multiply<Part>(low, n, a[1], b[0]);
  }
  multiply<Part>(c, n, a[0], b[0]);
}

/// S += Q K^T of the warp's rows, over all columns of the tile: the copies have zeroed those past head_dim; or, 16 at a
/// time, over `Steps` from `First` on. `queries(q, k)` gives 16 columns of Q; `meanwhile` is issued behind the first
/// products.
template <class Traits, uint32_t Beyond = 0, int First = 0, int Steps = Traits::HeadDim / kAtom, class Queries,
          class Meanwhile>
CUTE_DEVICE void add_qk(float (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], Queries const& queries, uint32_t keys_at,
                        Meanwhile const& meanwhile) {
  float low[Traits::RowAtoms][Traits::KeyAtoms][4];
  if constexpr (Traits::Parts > 1) clear(low);
  auto const multiply_keys = [&](typename Traits::Rows16 const& q, int k, int n) {
    typename Traits::Columns16 keys;  // two atoms of 8 keys, both halves of the 16 columns
    CUTE_UNROLL
    for (int part = 0; part < Traits::Parts; ++part)
      load_matrices(keys[part], chunk_at<Traits::B_c>(keys_at, n * kAtomN, part_chunk<Traits>(part) + 2 * k) + Beyond);
    multiply<Traits>(S, low, n, q, keys);
  };
  // The last steps go keys first, so that the maxima of some scores are taken while others are still being summed.
  constexpr int End = First + Steps, Last = Traits::QueriesInRegisters ? Steps : 2 / Traits::Parts;
  CUTE_UNROLL
  for (int k = First; k < End - Last; ++k) {
    typename Traits::Rows16 q;
    queries(q, k);
    CUTE_UNROLL
    for (int n = 0; n < Traits::KeyAtoms; n += 2) multiply_keys(q, k, n);
    if (k == First) meanwhile();
  }
  typename Traits::Rows16 q[Last];
  CUTE_UNROLL
  for (int k = 0; k < Last; ++k) queries(q[k], End - Last + k);
  CUTE_UNROLL
  for (int n = 0; n < Traits::KeyAtoms; n += 2) {
    CUTE_UNROLL
    for (int k = 0; k < Last; ++k) multiply_keys(q[k], End - Last + k, n);
    if (Last == Steps && n == 0) meanwhile();
  }
  if constexpr (Traits::Parts > 1) add(S, low);
}

/// S = Q K^T likewise.
template <class Traits, uint32_t Beyond = 0, int First = 0, int Steps = Traits::HeadDim / kAtom, class Queries,
          class Meanwhile>
CUTE_DEVICE void gemm_qk(float (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], Queries const& queries, uint32_t keys_at,
                         Meanwhile const& meanwhile) {
  clear(S);
  add_qk<Traits, Beyond, First, Steps>(S, queries, keys_at, meanwhile);
}

/// The same, `StepsAtOnce` times 16 columns after the others, whose sums are added up in float32: of longer ones of
/// parts the tensor cores cut off more.
template <class Traits, int StepsAtOnce, uint32_t Beyond = 0, class Queries, class Meanwhile>
CUTE_DEVICE void gemm_qk_in_pieces(float (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], Queries const& queries,
                                   uint32_t keys_at, Meanwhile const& meanwhile) {
  gemm_qk<Traits, Beyond, 0, StepsAtOnce>(S, queries, keys_at, meanwhile);
  for_each(make_int_sequence<Traits::HeadDim / kAtom / StepsAtOnce - 1>{}, [&](auto piece) {
    float of_piece[Traits::RowAtoms][Traits::KeyAtoms][4];
    gemm_qk<Traits, Beyond, (decltype(piece)::value + 1) * StepsAtOnce, StepsAtOnce>(of_piece, queries, keys_at, [] {});
    add(S, of_piece);
  });
}

/// O += P V over 16 keys, the first of which `values_at` points to. Loads come before products: the other order took 4%
/// more at head_dim 128.
template <class Traits, uint32_t Beyond = 0>
CUTE_DEVICE void gemm_pv_step(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                              uint32_t const (&p)[Traits::RowAtoms][4], uint32_t values_at) {
  uint32_t values[Traits::OutAtoms / 2][4];  // both halves of the 16 keys, two atoms of 8 columns
  CUTE_UNROLL
  for (int n = 0; n < Traits::OutAtoms; n += 2)
    load_matrices_transposed(values[n / 2], chunk_at<Traits::B_c>(values_at, 0, Traits::chunk_of(n)) + Beyond);
  CUTE_UNROLL
  for (int n = 0; n < Traits::OutAtoms; n += 2) multiply<typename Traits::Element>(O, n, p, values[n / 2]);
}

/// P of 16 keys as an operand: `p_of(i, s)` of a score of row i.
template <class Traits, class POf>
CUTE_DEVICE void operand_p(typename Traits::Rows16& p, float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], int k,
                           POf const& p_of) {
  CUTE_UNROLL
  for (int a = 0; a < Traits::RowAtoms; ++a) {
    CUTE_UNROLL
    for (int x = 0; x < 4; ++x) {
      float const* const s = &S[a][2 * k + x / 2][x % 2 * 2];
      float const left = p_of(2 * a + x % 2, s[0]), right = p_of(2 * a + x % 2, s[1]);
      if constexpr (Traits::Parts == 2) {
        split_operand(left, right, p[0][a][x], p[1][a][x]);
      } else {
        p[0][a][x] = pack<typename Traits::Element>(left, right);
      }
    }
  }
}

/// O += P V: P of 16 keys is made ahead of the 16 that are multiplied.
template <class Traits, class POf>
CUTE_DEVICE void gemm_pv(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                         float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], POf const& p_of, uint32_t values_at) {
  constexpr int Steps = Traits::B_c / kAtom;
  typename Traits::Rows16 p[Steps];
  operand_p<Traits>(p[0], S, 0, p_of);
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    if (k + 1 < Steps) operand_p<Traits>(p[k + 1], S, k + 1, p_of);
    gemm_pv_step<Traits>(O, p[k][0], chunk_at<Traits::B_c>(values_at, k * kAtom, 0));
  }
}

/// Factors of rows that are multiplied by nothing.
struct Ones {
  CUTE_DEVICE constexpr float operator[](int) const { return 1.f; }
};

/// The same of operands in parts: P V of some keys is a sum of its own, for some columns after the others, and added to
/// O in float32, times the factor of its row. `values_of(k)` points to 16 of the keys.
template <class Traits, uint32_t Beyond = 0, int Steps, class ValuesOf, class Factors>
CUTE_DEVICE void gemm_pv_in_parts(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                                  typename Traits::Rows16 const (&p)[Steps], ValuesOf const& values_of,
                                  Factors const& factors) {
  constexpr int RowAtoms = Traits::RowAtoms;
  constexpr int Atoms = 2;  // at a time: with four 28 to 68 bytes spilled, and no more was won
  CUTE_UNROLL
  for (int first = 0; first < Traits::OutAtoms; first += Atoms) {
    float sum[RowAtoms][Atoms][4], low[RowAtoms][Atoms][4];
    clear(sum);
    clear(low);
    CUTE_UNROLL
    for (int k = 0; k < Steps; ++k) {
      CUTE_UNROLL
      for (int n = 0; n < Atoms; n += 2) {
        typename Traits::Columns16 values;
        CUTE_UNROLL
        for (int part = 0; part < Traits::Parts; ++part)
          load_matrices_transposed(
              values[part], chunk_at<Traits::B_c>(values_of(k), 0, part_chunk<Traits>(part) + first + n) + Beyond);
        multiply<Traits>(sum, low, n, p[k], values);
      }
    }
    add(sum, low);
    CUTE_UNROLL
    for (int a = 0; a < RowAtoms; ++a) {
      CUTE_UNROLL
      for (int n = 0; n < Atoms; ++n) {
        CUTE_UNROLL
        for (int x = 0; x < 4; ++x) O[a][first + n][x] = fmaf(sum[a][n][x], factors[2 * a + x / 2], O[a][first + n][x]);
      }
    }
  }
}

/// Until all warps that share the rows have come here: what they wrote to shared memory before is there.
template <class Traits>
CUTE_DEVICE void meet_sharer() {
  int const barrier = 1 + threadIdx.x / 32 / Traits::Sharers;  // 0 is __syncthreads
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * Traits::Sharers) : "memory");
}

/// The same where two warps share the rows: each multiplies P of its own keys first, then that of the other's, which
/// comes through shared memory. `own_at` and `other_at` point to the first 16 keys of V of either; `p_to` and `p_from`
/// to the lane's place in what this warp writes of P, and to its rows of the other's fragments.
template <class Traits, class POf>
CUTE_DEVICE void gemm_pv_shared(float (&O)[Traits::RowAtoms][Traits::OutAtoms][4],
                                float const (&S)[Traits::RowAtoms][Traits::KeyAtoms][4], POf const& p_of,
                                uint32_t own_at, uint32_t other_at, uint32_t p_to, uint32_t p_from) {
  constexpr int Steps = Traits::WarpKeys / kAtom, PartChunks = Traits::B_c / kVector;
  typename Traits::Rows16 p[2 * Steps];
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    operand_p<Traits>(p[k], S, k, p_of);
    CUTE_UNROLL
    for (int part = 0; part < Traits::Parts; ++part) {
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a) {
        CUTE_UNROLL
        for (int x = 0; x < 4; ++x)
          store_shared(chunk_at<Traits::B_r>(p_to, a * kAtom + x % 2 * 8, part * PartChunks + 2 * k + x / 2),
                       p[k][part][a][x]);
      }
    }
  }
  auto const values_of = [&](int k) {
    return chunk_at<Traits::B_c>(k < Steps ? own_at : other_at, k % Steps * kAtom, 0);
  };
  if constexpr (Traits::Parts == 1) {
    CUTE_UNROLL
    for (int k = 0; k < Steps; ++k) gemm_pv_step<Traits>(O, p[k][0], values_of(k));
  }
  meet_sharer<Traits>();
  CUTE_UNROLL
  for (int k = 0; k < Steps; ++k) {
    CUTE_UNROLL
    for (int part = 0; part < Traits::Parts; ++part) {
      CUTE_UNROLL
      for (int a = 0; a < Traits::RowAtoms; ++a)
        load_matrices(p[Steps + k][part][a], chunk_at<Traits::B_r>(p_from, a * kAtom, part * PartChunks + 2 * k));
    }
    if constexpr (Traits::Parts == 1) gemm_pv_step<Traits>(O, p[Steps + k][0], values_of(Steps + k));
  }
  if constexpr (Traits::Parts > 1) gemm_pv_in_parts<Traits>(O, p, values_of, Ones{});  // of all keys in one sum
}

/// Writes a warp's rows of a tile in the dtype, 16 bytes at a time, through its own rows of a tile of `TileRows` rows
/// in shared memory, which begins at `tile`. `to_of(row, chunk)` is where a row's chunk goes; of the tile, `rows` rows
/// and `cols` columns exist. What parameters hold comes by reference, so that it is read where it is wanted. The warp
/// has `PanelChunks` chunks of each of its panels, from `first_chunk` on.
template <class Element, int TileRows, int PanelChunks = 8, class OutTensor, class ToOf>
CUTE_DEVICE void store_rows(OutTensor const& out, Element const* tile, int lane, int warp_row, int first_chunk,
                            ToOf const& to_of, int64_t const& row_stride, int rows, int const& cols) {
  constexpr int Rows = decltype(size<0>(out))::value, Columns = decltype(size<1>(out))::value * 4;
  uint32_t const tile_at = cast_smem_ptr_to_uint(tile);
  uint32_t const to_tile = tile_at + 2 * (chunk_offset<TileRows>(warp_row + lane / 4, first_chunk) + lane % 4 * 2);
  __syncwarp();  // the rows may have been read a moment ago
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int n = 0; n < Columns / kAtomN; ++n)
      store_shared(chunk_at<TileRows>(to_tile, row_of(i), n / PanelChunks * 8 + n % PanelChunks),
                   pack<Element>(out(i, 2 * n), out(i, 2 * n + 1)));
  }
  __syncwarp();
  constexpr int RowsAPass = 32 / PanelChunks;
  int const row = warp_row + lane / PanelChunks, chunk = first_chunk + lane % PanelChunks;
  Element* to = to_of(row, chunk);
  uint32_t const from[2] = {tile_at + 2 * chunk_offset<TileRows>(row, chunk),
                            tile_at + 2 * chunk_offset<TileRows>(row + 4, chunk)};
  CUTE_UNROLL
  for (int first = 0; first < Rows * 8; first += RowsAPass, to += RowsAPass * row_stride) {
    CUTE_UNROLL
    for (int panel = 0; panel < Columns / kVector / PanelChunks; ++panel) {
      if (row + first < rows && (panel * 8 + chunk) * kVector < cols)
        *reinterpret_cast<uint4*>(to + panel * kPanel) =
            load_shared(from[first / 4 % 2] + (panel * TileRows + first / 8 * 8) * kPanel * uint32_t(sizeof(Element)));
    }
  }
}

/// The same in float32, straight from registers: `to_of(row)` is where a row's first column goes.
template <class OutTensor, class ToOf>
CUTE_DEVICE void store_floats(OutTensor const& out, int lane, int warp_row, int first_column, ToOf const& to_of,
                              int rows, int const& cols) {
  CUTE_UNROLL
  for (int i = 0; i < size<0>(out); ++i) {
    int const row = warp_row + row_of(i) + lane / 4;
    float* const to = to_of(row);
    CUTE_UNROLL
    for (int n = 0; n < size<1>(out) / 2; ++n) {
      int const col = first_column + n * kAtomN + lane % 4 * 2;
      if (row < rows && col < cols)
        *reinterpret_cast<float2*>(to + col) = make_float2(out(i, 2 * n), out(i, 2 * n + 1));
    }
  }
}

/// Writes the warp's part of O and lse, or of a split's.
template <class Traits, class OutTensor, class Softmax>
CUTE_DEVICE void store(Params const& params, typename Traits::SharedStorage& shared, WorkItem const& work,
                       OutTensor& out, Softmax& softmax, Place<Traits> place) {
  using Element = typename Traits::Element;
  constexpr int B_r = Traits::B_r, Rows = Traits::Rows;
  auto const [lane, warp_row, part] = place;
  bool const is_split = params.is_split();
  Sequence const sequence = shared.sequence;
  int const rows = sequence.visibility.n_q - work.row0, first_column = part * Traits::WarpColumns;
  int64_t const result_row0 = sequence.result_row0(params, work.head, work.split) + work.row0;
  float const sink_log2 = is_split ? -INFINITY : shared.score_mod.sink_log2;
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    Finish finished = softmax.template finish<Element>(i, sink_log2);
    int const row = warp_row + row_of(i) + lane / 4;
    if (lane % 4 == 0 && part == 0 && row < rows) store_lse(params, result_row0 + row, finished);
    if constexpr (Traits::Parts > 1) {
      finished.factor *= shared.scales[0].out;
      // Of sums of fewer keys less is cut off, down to nothing.
      constexpr float kCutOff = kCutOffSum * Traits::B_c / kKeysOfCutOff;
      if (sequence.visibility.keys_of_row(work.row0 + row).size() >= Traits::B_c)
        finished.factor = fmaf(finished.factor, kCutOff, finished.factor);
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(out); ++j) out(i, j) *= finished.factor;
  }
  auto const o_of = [&](int row, int column) {
    return static_cast<Element*>(params.o) + sequence.batch * params.o_stride.batch +
           int64_t(sequence.q_row0 + work.row0 + row) * params.o_stride.row + work.head * params.o_stride.head + column;
  };
  constexpr bool kFloat32 = std::is_same_v<Element, float>;
  if (is_split || kFloat32) {
    auto const to_of = [&](int row) {
      float* to = params.o_partial + (result_row0 + row) * params.head_dim_v;
      if constexpr (kFloat32) to = is_split ? to : o_of(row, 0);
      return to;
    };
    store_floats(out, lane, warp_row, first_column, to_of, rows, params.head_dim_v);
    return;
  }
  // O leaves through the warp's own part of the query tile, which nobody reads any more.
  if constexpr (!kFloat32) {
    auto const to_of = [&](int row, int chunk) { return o_of(row, chunk * kVector); };
    store_rows<Element, B_r>(out, shared.q, lane, warp_row, first_column / kVector, to_of, params.o_stride.row, rows,
                             params.head_dim_v);
  }
}

}  // namespace cutlass_ext::sm80

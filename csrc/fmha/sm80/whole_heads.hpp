// FMHA of heads of few rows and keys on mma.sync tensor cores: a CTA has all pairs of a head, 16 rows and all keys a
// warp, so that there is no running maximum and nothing to be copied while it works. Small CTAs, several a
// multiprocessor, hide each other's copies. Of the gradients of such heads (backward/sm80_whole_heads.hpp) the first
// half is the same. Instantiated by csrc/kernels/sm80_whole_heads.cu.
#pragma once

#include "../copy/cp_async.hpp"
#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../pack_gqa.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../softmax.hpp"
#include "warp.hpp"

namespace cutlass_ext::sm80 {

/// Of heads of at most `Rows` rows and keys. Scores are made of `Piece` keys at a time: where there are registers for
/// it of all, else of half a panel. `Resident` CTAs of a multiprocessor share its registers.
template <int Rows, int Piece, int HeadDim_, class Element_, int Resident_>
struct WholeHeadTraits : Traits<Rows, Piece, HeadDim_, Element_, 2 * Rows, 1> {
  using Base = Traits<Rows, Piece, HeadDim_, Element_, 2 * Rows, 1>;
  static constexpr int kRows = Rows, kPiece = Piece, kPieces = Rows / Piece, kPiecesOfPanel = kPanel / Piece;
  static constexpr int Resident = Resident_;
  static constexpr int B_c = Rows;               // the tile that the CTA has, beside that of a product
  static constexpr int kTile = Rows * HeadDim_;  // elements
  using Scores = float[1][Base::KeyAtoms][4];
  using Output = float[1][Base::OutAtoms][4];
  using Words = uint32_t[2][Base::KeyAtoms];  // of a row two neighbouring keys each, of 16 bits

  struct SharedStorage {
    alignas(128) Element_ q[kTile], k[kTile], v[kTile];
  };
  static_assert(Base::RowAtoms == 1 && (Piece == kPanel || 2 * Piece == kPanel), "of the 64 keys of a panel of P");
  static_assert(HeadDim_ == kPanel, "a piece of the keys is part of one panel");
};

constexpr Features kTakesOfHeads = feature::kMods | feature::Sink | feature::Packed | feature::kUnlike;

/// Whether such kernels take a call.
template <class Traits>
bool has_small_heads(Params const& p) {
  return p.n_q <= Traits::kRows && p.n_kv <= Traits::kRows;
}

/// What of one head of one sequence both passes do.
template <class Traits>
class WholeHead {
 protected:
  using Element = typename Traits::Element;
  using Base = typename Traits::Base;
  static constexpr int kRows = Traits::kRows, kPiece = Traits::kPiece;
  using Shared = typename Traits::SharedStorage;
  /// Where a sequence's rows or keys lie in their tensors.
  struct Side {
    int batch, row0;
  };

  CUTE_DEVICE WholeHead(Params const& params, Shared& shared)
      : params_(params),
        shared_(shared),
        work_(params.scheduler(blockIdx.x)),
        sequence_(sequence_of(params, work_.batch)) {}

  CUTE_DEVICE Visibility const& visibility() const { return sequence_.visibility; }
  CUTE_DEVICE int rows() const { return visibility().n_q; }
  CUTE_DEVICE int keys() const { return visibility().len_kv; }
  CUTE_DEVICE Side rows_side() const { return {sequence_.batch, sequence_.q_row0}; }
  CUTE_DEVICE Side keys_side() const { return {sequence_.batch, sequence_.k_row0}; }
  /// Of the lane, in accumulators, and among the keys of a piece.
  CUTE_DEVICE int first_row() const { return place_.warp_row + place_.lane / 4; }
  CUTE_DEVICE int first_key() const { return place_.lane % 4 * 2; }
  CUTE_DEVICE static Element const* of_piece(Element const* tile, int piece) {
    return tile + piece * kPiece * Traits::HeadDim;
  }

  CUTE_DEVICE void copy(void const* data, Strides const& stride, Side of, int head, int rows, int cols,
                        Element* to) const {
    auto from = global_tile<Element>(data, stride, of.batch, head, of.row0, rows, cols);
    from.aligned = true;
    copy_tile<kRows, Traits::HeadDim, Traits::Threads>(from, to, [](int row) { return row; });
  }
  /// Until all copies have landed.
  CUTE_DEVICE static void wait() {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }

  /// Where the lane's rows of fragments begin in a tile: as operand A, as B of a product with the transposed tile, and
  /// as B of one with the tile itself.
  CUTE_DEVICE uint32_t operand_at(Element const* tile) const {
    return at(tile, place_.warp_row + place_.lane % kAtom, place_.lane / kAtom);
  }
  CUTE_DEVICE uint32_t columns_at(Element const* tile) const {
    return at(tile, place_.lane % 8 + place_.lane / 16 * 8, place_.lane / 8 % 2);
  }
  CUTE_DEVICE uint32_t rows_at(Element const* tile) const { return at(tile, place_.lane % kAtom, place_.lane / kAtom); }

  /// X Y^T of the warp's rows of X and a piece of Y.
  CUTE_DEVICE void multiply(typename Traits::Scores& S, Element const* x, Element const* y) const {
    typename Queries<Base>::Held held;
    Queries<Base> const operand{held, operand_at(x)};
    operand.take();
    gemm_qk<Base>(S, operand, columns_at(y), [] {});
  }
  /// O += X Y of the warp's rows of X, which are packed, and a piece of Y.
  CUTE_DEVICE void multiply(typename Traits::Output& O, typename Traits::Words const& x, Element const* y) const {
    CUTE_UNROLL
    for (int k = 0; k < kPiece / kAtom; ++k) {
      uint32_t const operand[1][4] = {{x[0][2 * k], x[1][2 * k], x[0][2 * k + 1], x[1][2 * k + 1]}};
      gemm_pv_step<Base>(O, operand, chunk_at<kRows>(rows_at(y), k * kAtom, 0));
    }
  }

  CUTE_DEVICE PairMod pairs() const { return PairMod(params_, sequence_, work_.batch, work_.head); }

  /// From products with a piece of the keys to scores, hidden ones -inf. Returns what they are still to be multiplied
  /// by.
  template <class ScoreTensor>
  CUTE_DEVICE float to_scores(ScoreTensor& S, int piece) const {
    Visibility const visibility = this->visibility();
    int const row = first_row(), key = piece * kPiece + first_key();
    float scale = ScoreMod::query_scale(params_);
    if (ScoreMod::changes(params_) || changes_scores(params_)) {
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= scale;
      scale = 1.f;
      ScoreMod(params_, work_.batch, work_.head).template apply<true>(S, visibility.offset(row, key), [](int i, int j) {
        return row_of(i) - key_of(j);
      });
      if (changes_scores(params_)) {
        PairMod const pairs = this->pairs();
        change_by_columns<(Traits::kPieces == 1)>(S, [&](float (&x)[kQuadColumns], int i, int j) {
          pairs.apply(x, params_, visibility, row + row_of(i), key + key_of(j), key_of_quad);
        });
      }
    }
    if (hides(piece)) mask(S, visibility.counted_from(key).with_finite_windows(), row, row_of, key_of);
    return scale;
  }
  /// Whether some row of the warp does not see all keys of a piece by windows and the last key.
  CUTE_DEVICE bool hides(int piece) const { return visibility().needs_mask(piece, place_.warp_row, kAtom, kPiece); }

  /// Which of the lane's pairs dropout keeps, of the 64 keys of a panel.
  CUTE_DEVICE uint32_t kept(int panel) const {
    if (!has_dropout(params_)) return ~0u;
    return pairs().kept_of_rows(threshold_of(params_), place_.warp_row, panel * kPanel, place_.lane);
  }
  CUTE_DEVICE static bool is_kept(uint32_t kept, int piece, int i, int j) {
    int const first = piece % Traits::kPiecesOfPanel * (kPiece / kAtomN);
    return kept >> PairMod::bit_of_rows(first, 0, 0) & 1u << PairMod::bit_of_rows(j / 2, j % 2, i);
  }

  /// Writes 16 rows from `row` on through their part of `tile`, which nobody reads any more.
  template <class OutTensor>
  CUTE_DEVICE void store(OutTensor const& out, Element const* tile, int row, void* to, Strides const& stride, Side of,
                         int rows, int const& cols) const {
    auto const to_of = [&](int row, int chunk) {
      return row_at<Element>(to, stride, of.batch, of.row0, work_.head) + row * stride.row + chunk * kVector;
    };
    store_rows<Element, kRows>(out, tile, place_.lane, row, 0, to_of, stride.row, rows, cols);
  }

  Params const& params_;
  Shared& shared_;
  WorkItem const work_;
  Sequence const sequence_;
  Place<Base> const place_;

 private:
  CUTE_DEVICE static uint32_t at(Element const* tile, int row, int chunk) {
    return cast_smem_ptr_to_uint(tile) + 2 * chunk_offset<kRows>(row, chunk);
  }
};

/// The forward pass.
template <class Traits>
class ForwardOfHead : WholeHead<Traits> {
  using Head = WholeHead<Traits>;
  using Element = typename Traits::Element;
  using Head::params_, Head::shared_, Head::work_, Head::sequence_, Head::place_;
  static_assert(Traits::kPieces == 1, "a row's maximum is one of these scores");

 public:
  CUTE_DEVICE ForwardOfHead(Params const& params, typename Traits::SharedStorage& shared) : Head(params, shared) {}

  CUTE_DEVICE void run() const {
    int const head = work_.head, head_kv = params_.heads_per_kv.div(head);
    this->copy(params_.q, params_.q_stride, this->rows_side(), head, this->rows(), params_.head_dim, shared_.q);
    this->copy(params_.k, params_.k_stride, this->keys_side(), head_kv, this->keys(), params_.head_dim, shared_.k);
    this->copy(params_.v, params_.v_stride, this->keys_side(), head_kv, this->keys(), params_.head_dim_v, shared_.v);
    uint32_t const kept = Head::kept(0);
    Head::wait();
    typename Traits::Scores scores;
    this->multiply(scores, shared_.q, shared_.k);
    Tensor S = rows_and_columns(scores);
    float const scale = this->to_scores(S, 0), sink_log2 = params_.sink_of(head) * kLog2e;
    typename Traits::Words p;
    float factors[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float largest = S(i, 0), sum = 0.f;
      CUTE_UNROLL
      for (int j = 1; j < size<1>(S); ++j) largest = fmaxf(largest, S(i, j));
      float const base = fmaxf(scale * warp_max<4, 1>(largest), kLeastMaximum);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(S); j += 2) {
        float weights[2];
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          weights[e] = exp2_approx(fmaf(S(i, j + e), scale, -base));
          sum += weights[e];
          if (has_dropout(params_) && !Head::is_kept(kept, 0, i, j + e)) weights[e] = 0.f;
        }
        p[i][j / 2] = pack<Element>(weights[0], weights[1]);
      }
      Finish const finished = finish<Element>(Part{base, warp_sum<4, 1>(sum)}, sink_log2);
      factors[i] = finished.factor * params_.dropout.scale;
      int const row = this->first_row() + row_of(i);
      if (place_.lane % 4 == 0 && row < this->rows())
        store_lse(params_, sequence_.result_row0(params_, head, 0) + row, finished);
    }
    typename Traits::Output out = {};
    this->multiply(out, p, shared_.v);
    Tensor O = rows_and_columns(out);
    CUTE_UNROLL
    for (int e = 0; e < size(O); ++e) O(e) *= factors[e % 2];
    this->store(O, shared_.q, place_.warp_row, params_.o, params_.o_stride, this->rows_side(), this->rows(),
                params_.head_dim_v);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::Resident)
    whole_heads_kernel(__grid_constant__ Params const params) {
  extern __shared__ __align__(128) unsigned char smem[];
  ForwardOfHead<Traits>(params, *reinterpret_cast<typename Traits::SharedStorage*>(smem)).run();
}

/// The kernel of whole heads, launched for each query head of each sequence.
template <int Rows, int HeadDim, class Element, int Resident>
struct WholeHeads {
  using Traits = WholeHeadTraits<Rows, Rows, HeadDim, Element, Resident>;
  static constexpr char const* kFamily = "sm80";
  static constexpr Kind kKind = Kind::Heads;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &whole_heads_kernel<Traits>;
  static constexpr Features kTakes = kTakesOfHeads;
  static bool takes_shape(Params const& p) { return has_small_heads<Traits>(p); }
};

}  // namespace cutlass_ext::sm80

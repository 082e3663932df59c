// Gradients of heads of few rows and keys on mma.sync tensor cores: a CTA has all pairs of a head, and makes dQ, dK and
// dV of them with five products, and no launch before it but for dsink and dbias. Of 64 keys at a time a warp has 16
// query rows, and then 16 keys and all rows: P and dS pass through shared memory in between. Instantiated by
// csrc/kernels/sm80_whole_heads.cu.
#pragma once

#include "../sm80/whole_heads.hpp"
#include "empty_rows.hpp"
#include "params.hpp"
#include "row_product.hpp"

namespace cutlass_ext::sm80 {

template <int Rows, int Piece, int HeadDim_, class Element_, int Resident_>
struct HeadGradientTraits : WholeHeadTraits<Rows, Piece, HeadDim_, Element_, Resident_> {
  using Whole = WholeHeadTraits<Rows, Piece, HeadDim_, Element_, Resident_>;
  struct SharedStorage : Whole::SharedStorage {
    alignas(128) Element_ dout[Whole::kTile];
    alignas(128) Element_ p[Rows * kPanel], ds[Rows * kPanel];
  };
  // Whether a warp makes dV or dK of 16 keys, and not both.
  static constexpr bool Apart = Whole::Warps == 8;
  static_assert(Apart || Whole::Warps == 4, "a warp for 16 of 64 keys");
};

template <class Traits>
class GradientsOfHead : WholeHead<Traits> {
  using Head = WholeHead<Traits>;
  using Element = typename Traits::Element;
  using Words = typename Traits::Words;
  using Gradient = typename Traits::Output;
  using Head::shared_, Head::work_, Head::sequence_, Head::place_;
  static constexpr int kRows = Traits::kRows, kWarpsOfPanel = kPanel / kAtom;

 public:
  CUTE_DEVICE GradientsOfHead(BackwardParams const& params, typename Traits::SharedStorage& shared)
      : Head(params, shared), params_of_gradients_(params) {}

  CUTE_DEVICE void run() {
    BackwardParams const& params = params_of_gradients_;
    int const rows = this->visibility().rows_with_keys().end;  // of those before the first zero_empty_rows() sees to
    int const keys = this->keys(), d = params.head_dim, d_v = params.head_dim_v, head = work_.head;
    this->copy(params.q, params.q_stride, this->rows_side(), head, rows, d, shared_.q);
    this->copy(params.k, params.k_stride, this->keys_side(), head, keys, d, shared_.k);
    this->copy(params.dout, params.dout_stride, this->rows_side(), head, rows, d_v, shared_.dout);
    this->copy(params.v, params.v_stride, this->keys_side(), head, keys, d_v, shared_.v);
    look_at_rows();
    Head::wait();
    zero_empty_rows();
    Gradient dQ = {};
    CUTE_NO_UNROLL
    for (int panel = 0; panel < kRows / kPanel; ++panel) {
      uint32_t const kept = Head::kept(panel);
      CUTE_NO_UNROLL
      for (int piece = 0; piece < Traits::kPiecesOfPanel; ++piece)
        from_rows(panel * Traits::kPiecesOfPanel + piece, kept, dQ);
      __syncthreads();
      if constexpr (Traits::Apart) {
        store_side(panel, threadIdx.x / 32 / kWarpsOfPanel == 0);
      } else {
        store_side(panel, true);
        store_side(panel, false);
      }
      __syncthreads();
    }
    store(dQ, ScoreMod::gradient_scale(params), shared_.q, place_.warp_row, params.dq, params.dq_stride,
          this->rows_side(), this->rows(), params.head_dim);
  }

 private:
  /// What is known of the lane's two rows before their gradients.
  CUTE_DEVICE void look_at_rows() {
    BackwardParams const& params = params_of_gradients_;
    auto const row_of_head = [&](void const* data, Strides const& stride, int row) {
      return row_at<Element const>(data, stride, sequence_.batch, sequence_.q_row0 + row, work_.head);
    };
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = this->first_row() + row_of(i);
      bool const exists = row < this->rows();
      int64_t const result_row = sequence_.result_row0(params, work_.head, 0) + row;
      // A row that sees no key counts nowhere, whatever its lse, which may be one of more keys.
      lse_[i] = this->visibility().rows_with_keys().contains(row) ? params.lse[result_row] : -INFINITY;
      // Not the sum of P dP, though all keys are here: lse and O may be those of more keys.
      bool const has_product = lse_[i] > -INFINITY && !params.delta;  // all lanes take part in the sum
      delta_[i] = row_product<4, Traits::HeadDim * sizeof(Element) / 64>(
          row_of_head(params.dout, params.dout_stride, row), row_of_head(params.o, params.o_stride, row),
          has_product ? params.head_dim_v : 0, is_aligned<Element>(params.o, params.o_stride), place_.lane % 4);
      if (exists && params.delta) delta_[i] = params.delta[result_row];
      if (exists && params.dlse) delta_[i] -= params.dlse[result_row];
    }
  }

  /// Zeroes the warp's rows of Q and dO that see no key: they may hold anything.
  CUTE_DEVICE void zero_empty_rows() {
    float const least = lse_without_keys(params_of_gradients_, work_.head);
    auto const is_asked = [&](int i) { return this->first_row() + row_of(i) < this->rows() && !(lse_[i] > least); };
    bool const asked = is_asked(0) || is_asked(1);
    if (!__any_sync(0xffffffffu, asked)) return;
    float largest[2] = {-INFINITY, -INFINITY};
    CUTE_NO_UNROLL
    for (int piece = 0; piece < Traits::kPieces; ++piece) {
      typename Traits::Scores scores = {};
      Tensor S = rows_and_columns(scores);
      this->to_scores(S, piece);
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) largest[e % 2] = fmaxf(largest[e % 2], S(e));
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (warp_max<4, 1>(largest[i]) > -INFINITY) continue;
      for (int chunk = place_.lane % 4; chunk < Traits::HeadDim / kVector; chunk += 4) {
        for (Element* tile : {shared_.q, shared_.dout})
          *reinterpret_cast<uint4*>(tile + chunk_offset<kRows>(this->first_row() + row_of(i), chunk)) =
              make_uint4(0, 0, 0, 0);
      }
    }
    __syncwarp();
  }

  /// Of the warp's query rows and a piece of the keys P and dS, which are left in shared memory, and what they add to
  /// dQ.
  CUTE_DEVICE void from_rows(int piece, uint32_t kept, Gradient& dQ) const {
    BackwardParams const& params = params_of_gradients_;
    typename Traits::Scores scores, gradients;
    this->multiply(scores, shared_.q, Head::of_piece(shared_.k, piece));
    this->multiply(gradients, shared_.dout, Head::of_piece(shared_.v, piece));
    Tensor S = rows_and_columns(scores), dP = rows_and_columns(gradients);
    float const scale = this->to_scores(S, piece);
    bool const caps = ScoreMod::caps(params), drops = has_dropout(params);
    Words p, ds;
    // P and dS. `Plain`: nothing is dropped or hidden, and all rows exist: of what is not seen dP may be anything.
    auto const weigh = [&](auto plain) {
      constexpr bool Plain = decltype(plain)::value;
      float const per_softcap =
          !Plain && caps ? reciprocal(ScoreMod(params, work_.batch, work_.head).softcap_log2) : 0.f;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float const lse_log2 = lse_[i] > -INFINITY ? lse_[i] * kLog2e : INFINITY;
        if (!Plain && lse_[i] == -INFINITY) {  // keys that hold NaN have it in the scores of rows that do not exist
          CUTE_UNROLL
          for (int j = 0; j < size<1>(S); ++j) S(i, j) = -INFINITY;
        }
        CUTE_UNROLL
        for (int j = 0; j < size<1>(S); j += 2) {
          float weights[2];
          CUTE_UNROLL
          for (int e = 0; e < 2; ++e) {
            float const score = S(i, j + e), weight = exp2_approx(fmaf(score, scale, -lse_log2));
            float& dp = dP(i, j + e);
            S(i, j + e) = weights[e] = weight;
            if (!Plain && caps) S(i, j + e) *= ScoreMod::derivative_of_softcap(score, per_softcap);
            if (!Plain && drops) {
              bool const is_kept = Head::is_kept(kept, piece, i, j + e);
              dp = is_kept ? dp * params.dropout.scale : 0.f;
              if (!is_kept) weights[e] = 0.f;
            }
          }
          p[i][j / 2] = pack<Element>(weights[0], weights[1]);
        }
        auto const ds_of = [&](int j) { return Plain || S(i, j) > 0.f ? S(i, j) * (dP(i, j) - delta_[i]) : 0.f; };
        CUTE_UNROLL
        for (int j = 0; j < size<1>(S); j += 2) ds[i][j / 2] = pack<Element>(ds_of(j), ds_of(j + 1));
      }
    };
    // A body for plain pieces would cost half a panel's kernel 32 bytes of spills.
    bool const sees_all = !this->hides(piece) && place_.warp_row + kAtom <= this->rows();
    if (Traits::kPieces > 1 || caps || drops || changes_scores(params) || !sees_all) {
      weigh(std::false_type{});
    } else {
      weigh(std::true_type{});
    }
    leave(p, piece, shared_.p);
    leave(ds, piece, shared_.ds);
    this->multiply(dQ, ds, Head::of_piece(shared_.k, piece));
  }

  /// Leaves a piece of P or dS in its part of a panel.
  CUTE_DEVICE void leave(Words const& words, int piece, Element* tile) const {
    uint32_t const to = cast_smem_ptr_to_uint(tile) +
                        2 * (chunk_offset<kRows>(this->first_row(), piece % Traits::kPiecesOfPanel * Traits::KeyAtoms) +
                             this->first_key());
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < Traits::KeyAtoms; ++n) store_shared(chunk_at<kRows>(to, row_of(i), n), words[i][n]);
    }
  }

  /// dV or dK of 16 keys of a panel, by the warp of every four that has their number: X^T Y over all rows.
  CUTE_DEVICE void store_side(int panel, bool of_values) const {
    BackwardParams const& params = params_of_gradients_;
    int const warp = threadIdx.x / 32 % kWarpsOfPanel;
    // Around the loops over pieces its numbers would spill.
    Sequence const sequence = Traits::kPieces > 1 ? sequence_of(params, opaque(work_.batch)) : sequence_;
    uint32_t const from = cast_smem_ptr_to_uint(of_values ? shared_.p : shared_.ds) +
                          2 * row_for_operand_a<Element>(place_.lane, warp),
                   rows_at = this->rows_at(of_values ? shared_.dout : shared_.q);
    Gradient gradient = {};
    CUTE_UNROLL
    for (int k = 0; k < kRows / kAtom; ++k) {
      uint32_t operand[1][4];
      load_matrices_transposed(operand[0], from + k * kAtom * kPanel * uint32_t(sizeof(Element)));
      gemm_pv_step<typename Traits::Base>(gradient, operand, chunk_at<kRows>(rows_at, k * kAtom, 0));
    }
    store(gradient, of_values ? params.dropout.scale : ScoreMod::gradient_scale(params),
          of_values ? shared_.v : shared_.k, panel * kPanel + warp * kAtom, of_values ? params.dv : params.dk,
          of_values ? params.dv_stride : params.dk_stride, {sequence.batch, sequence.k_row0},
          sequence.visibility.len_kv, of_values ? params.head_dim_v : params.head_dim);
  }

  CUTE_DEVICE void store(Gradient& gradient, float scale, Element const* tile, int row, void* to, Strides const& stride,
                         typename Head::Side of, int rows, int const& cols) const {
    Tensor out = rows_and_columns(gradient);
    CUTE_UNROLL
    for (int e = 0; e < size(out); ++e) out(e) *= scale;
    Head::store(out, tile, row, to, stride, of, rows, cols);
  }

  BackwardParams const& params_of_gradients_;
  float lse_[2], delta_[2];  // of the lane's rows
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, Traits::Resident)
    head_gradients_kernel(__grid_constant__ BackwardParams const params) {
  extern __shared__ __align__(128) unsigned char smem[];
  GradientsOfHead<Traits>(params, *reinterpret_cast<typename Traits::SharedStorage*>(smem)).run();
}

/// The kernel of gradients of whole heads, launched for each head of each sequence: none share keys.
template <int Rows, int Piece, int HeadDim, class Element, int Resident>
struct HeadGradients {
  using Traits = HeadGradientTraits<Rows, Piece, HeadDim, Element, Resident>;
  static constexpr char const* kFamily = "sm80";
  static constexpr Kind kKind = Kind::HeadGradients;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &head_gradients_kernel<Traits>;
  static constexpr Features kTakes = kTakesOfHeads;
  /// What softcap makes of gradients is worked out from scores that nothing else has been added to.
  static bool takes_shape(Params const& p) {
    return has_small_heads<Traits>(p) && p.heads_q == p.heads_kv &&
           !(ScoreMod::caps(p) && (has_bias(p) || features_of(p) & feature::Alibi));
  }
};

}  // namespace cutlass_ext::sm80

// FMHA on mma.sync tensor cores: fp16 and bf16 attention, and fp32 in two fp16 parts, for one query tile and its
// visible key tiles, fp32 accumulation and softmax. FlashAttention-2's division of work (arXiv:2307.08691,
// section 3.3): warps share out the query rows, and P passes from the accumulator of the first product to the A operand
// of the second in registers. The loop over tiles without masks is one basic block, so that the compiler hides the
// exponentials behind the products. Instantiated by csrc/kernels/sm80_*.cu.
#pragma once

#include "../copy/cp_async.hpp"
#include "../cute_tensor.hpp"
#include "../features.hpp"
#include "../pairs.hpp"
#include "../score.hpp"
#include "../sequence.hpp"
#include "../softmax.hpp"
#include "traits.hpp"
#include "warp.hpp"

namespace cutlass_ext::sm80 {

constexpr float kLeastScale = 0x1p-64f;  // by which a bias is divided: by less it may overflow
constexpr int kMaxSlack = 8;             // log2: P stays below 256, which fp16 holds with room for rounding to even
// Of parts P stays below 2^15, from 2^8 at the maximum on: what is far below it keeps its bits (sm90/traits.hpp).
constexpr int kHeadroomOfParts = 8, kMaxSlackOfParts = 15;

/// What a tile of keys asks of the main loop.
enum class KeyTile {
  Plain,   // nothing
  Masked,  // element masks
  Any,     // perhaps masks, score modifications, what pairs have, copies of single elements, pages
};

/// The copies of a work item: Q, then K and V from the last tile to the first. With two stages the next tiles of K and
/// V are under way all along; with one V is while Q K^T is made, the next K while P V is.
template <class Traits>
class Copies {
  using Element = typename Traits::Part;
  using Shared = typename Traits::SharedStorage;
  static constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Columns = Traits::Columns, Threads = Traits::Threads;
  static constexpr bool Two = Traits::Stages == 2, kAligned = Traits::Parts > 1;  // as parts are made
  static constexpr uint32_t TileBytes = B_c * Columns * sizeof(Element);
  static constexpr bool kChecksKeys = Traits::HeadDim > 192;  // a second way to copy spilled 144 bytes there
  static constexpr auto moved = [](int row) { return row; };

 public:
  Range tiles, unmasked;  // that the query tile visits, and of those the ones that need no mask
  bool const aligned;

  /// Whether the keys lie in pages: a tile's rows are then looked up one by one.
  CUTE_DEVICE bool paged() const { return params_.paged(); }

  CUTE_DEVICE Copies(Params const& params, Shared& shared)
      : aligned(kAligned ||
                (is_aligned<Element>(params.k, params.k_stride) && is_aligned<Element>(params.v, params.v_stride))),
        params_(params),
        shared_(shared),
        at_(cast_smem_ptr_to_uint(shared.k) + 2 * chunk_offset<B_c>(threadIdx.x / 8, threadIdx.x % 8)) {}

  /// Starts the first copies, and leaves in shared memory what is wanted of the work item now and then; false where it
  /// has no query rows.
  CUTE_DEVICE bool start(WorkItem const& work) {
    Sequence const sequence = sequence_of(params_, work.batch);
    Visibility const& visibility = sequence.visibility;
    if (work.row0 >= visibility.n_q) return false;  // packed: the launch counts the tiles of the longest for each
    tiles = split_range(visibility.tiles_of(work.row0, B_r, B_c), params_.scheduler.splits(), work.split);
    unmasked = visibility.unmasked_tiles_of(work.row0, B_r, B_c);
    int const head_kv = params_.heads_per_kv.div(work.head), last_key = (tiles.end - 1) * B_c;
    auto q = global_tile<Element>(params_.q, params_.q_stride, sequence.batch, work.head, sequence.q_row0 + work.row0,
                                  visibility.n_q - work.row0, columns());
    int64_t const first_row = paged() ? 0 : sequence.k_row0;  // of pages, all that counts is where page 0 begins
    auto const last = [&](void const* data, Strides const& stride, int cols) {
      return global_tile<Element>(data, stride, paged() ? 0 : sequence.batch, head_kv, first_row + last_key,
                                  visibility.len_kv - last_key, cols);
    };
    auto k = last(params_.k, params_.k_stride, columns());
    auto v = last(params_.v, params_.v_stride, columns_v());
    if constexpr (kAligned) q.aligned = k.aligned = v.aligned = true;
    if (tiles.size() > 0) {
      copy_tile<B_r, Columns, Threads>(q, shared_.q, moved);
      if (!paged()) {
        copy_tile<B_c, Columns, Threads>(k, shared_.k[0], moved);
        if (Two) copy_tile<B_c, Columns, Threads>(v, shared_.v[0], moved);
      }
    }
    keys_next_ = k.data + (int(threadIdx.x / 8) - B_c) * k.row_stride + threadIdx.x % 8 * kVector;
    values_next_ = v.data + (int(threadIdx.x / 8) - (Two ? B_c : 0)) * v.row_stride + threadIdx.x % 8 * kVector;
    if (threadIdx.x == 0) {
      shared_.sequence = sequence;
      shared_.score_mod = ScoreMod(params_, work.batch, work.head);
      if (Traits::Pairs && has_pairs(params_)) shared_.pairs = PairMod(params_, sequence, work.batch, work.head);
      shared_.keys = k.data - (first_row + last_key) * k.row_stride;
      shared_.values = v.data - (first_row + last_key) * v.row_stride;
      shared_.table = params_.pages_of(work.batch);
      shared_.copies_checked = !aligned || paged();
      shared_.checked = ScoreMod::changes(params_) || shared_.copies_checked ||
                        (Traits::Pairs && (has_bias(params_) || has_dropout(params_)));
      if constexpr (Traits::Parts > 1) {  // sequences without keys have none
        shared_.scales[0] =
            tiles.size() > 0 ? params_.part_scales[work.batch * params_.heads_kv + head_kv] : PartScales{1.f, 1.f};
      }
    }
    if (paged()) {
      __syncthreads();  // what has just been left in shared memory is read
      if (tiles.size() > 0) {
        copy_checked(shared_.keys, params_.k_stride, columns(), tiles.end - 1, shared_.k[0]);
        if (Two) copy_checked(shared_.values, params_.v_stride, columns_v(), tiles.end - 1, shared_.v[0]);
      }
    }
    return true;
  }

  /// Until what is under way has landed and every warp is done with the tile before it.
  CUTE_DEVICE static void wait() {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }

  /// Byte offset of the stage in use.
  CUTE_DEVICE uint32_t here() const { return Two ? stage_ * TileBytes : 0; }

  /// The copies beside Q K^T of `tile`, those between its two products, and the step to the next tile.
  template <KeyTile Kind>
  CUTE_DEVICE void during_qk(int tile) {
    if (Two) copy_keys<Kind>(tile);
    copy_values<Kind>(tile);
  }
  template <KeyTile Kind>
  CUTE_DEVICE void between(int tile) {
    if constexpr (!Two) {
      wait();
      copy_keys<Kind>(tile);
    }
  }
  CUTE_DEVICE void next() {
    stage_ ^= 1;
    wait();
  }

 private:
  /// Columns that rows of q and k have, and those of v: parts fill theirs up.
  CUTE_DEVICE int columns() const { return Traits::Parts > 1 ? Columns : params_.head_dim; }
  CUTE_DEVICE int columns_v() const { return Traits::Parts > 1 ? Columns : params_.head_dim_v; }

  CUTE_DEVICE uint32_t there() const { return Two ? TileBytes - here() : 0; }

  template <KeyTile Kind>
  CUTE_DEVICE void copy_keys(int tile) {
    bool const more = tile > tiles.begin;
    if (Kind == KeyTile::Any && (kChecksKeys || shared_.copies_checked)) {
      if (more) copy_checked(shared_.keys, params_.k_stride, columns(), tile - 1, shared_.k[Two ? stage_ ^ 1 : 0]);
    } else {
      copy_whole_tile<B_c, Columns, Threads>(keys_next_, params_.k_stride.row, more ? columns() : 0, at_ + there());
    }
    keys_next_ -= B_c * params_.k_stride.row;
  }

  template <KeyTile Kind>
  CUTE_DEVICE void copy_values(int tile) {
    bool const more = tile > tiles.begin;
    bool const may_lack_rows = !Two && (Kind == KeyTile::Masked || (Kind == KeyTile::Any && tile == tiles.end - 1));
    if (may_lack_rows || (Kind == KeyTile::Any && shared_.copies_checked)) {
      if (more || !Two)
        copy_checked(shared_.values, params_.v_stride, columns_v(), Two ? tile - 1 : tile,
                     shared_.v[Two ? stage_ ^ 1 : 0]);
    } else {
      copy_whole_tile<B_c, Columns, Threads>(values_next_, params_.v_stride.row, more || !Two ? columns_v() : 0,
                                             at_ + Traits::Stages * TileBytes + there());
    }
    values_next_ -= B_c * params_.v_stride.row;
  }

  /// Tile `tile` of K or V where rows may be missing, not begin at multiples of 16 bytes, or lie in pages.
  CUTE_DEVICE void copy_checked(Element const* data, Strides const& stride, int cols, int tile, Element* to) const {
    int const first_key = tile * B_c;
    copy_tile<B_c, Columns, Threads>(
        LookedUpTile<Element>{data, stride, params_, shared_.table, shared_.sequence.k_row0 + first_key,
                              shared_.sequence.visibility.len_kv - first_key, cols, aligned},
        to, moved);
  }

  Params const& params_;
  Shared& shared_;
  uint32_t const at_;  // the thread's part of a tile of K in shared memory
  uint32_t stage_ = 0;
  Element const *keys_next_, *values_next_;  // the thread's part of the tile of K and of V to be copied next
};

/// Where two warps share rows: a number a row from each to the other.
template <class Traits>
struct Exchange {
  typename Traits::SharedStorage& shared;
  Place<Traits> place;

  CUTE_DEVICE void publish(float const (&x)[Traits::Rows]) const {
    CUTE_UNROLL
    for (int i = 0; i < Traits::Rows; ++i) {
      if (place.lane % 4 == 0) shared.statistics[place.part][row(i)] = x[i];
    }
    meet_sharer<Traits>();
  }
  CUTE_DEVICE float of_sharer(int i) const { return shared.statistics[1 - place.part][row(i)]; }

 private:
  CUTE_DEVICE int row(int i) const { return place.warp_row + row_of(i) + place.lane / 4; }
};

/// S = Q K^T, softmax, O += P V of a warp's rows, a tile of keys after the other.
template <class Traits>
class MainLoop {
  static constexpr int B_r = Traits::B_r, B_c = Traits::B_c, Rows = Traits::Rows;
  static constexpr int KeptKeys = 64, KeptWords = (Traits::WarpKeys + KeptKeys - 1) / KeptKeys;
  using Kept = uint32_t[Traits::RowAtoms][KeptWords];  // bits of 16 rows and `KeptKeys` keys

 public:
  using Scores = float[Traits::RowAtoms][Traits::KeyAtoms][4];
  using Output = float[Traits::RowAtoms][Traits::OutAtoms][4];
  using Softmax = std::conditional_t<Traits::Parts == 1, OnlineSoftmax<Rows, 4, 1, kMaxSlack>,
                                     OnlineSoftmax<Rows, 4, 1, kMaxSlackOfParts, kHeadroomOfParts>>;

  /// The arrays are the kernel's own variables: in one object with the numbers below they spilled.
  CUTE_DEVICE MainLoop(Params const& params, typename Traits::SharedStorage& shared, Copies<Traits>& copies, int row0,
                       Place<Traits> place, typename Queries<Traits>::Held& held, Scores& S, Output& O,
                       Softmax& softmax)
      : shared_(shared),
        copies_(copies),
        place_(place),
        exchange_{shared, place},
        queries_{held, cast_smem_ptr_to_uint(shared.q) +
                           2 * chunk_offset<B_r>(place.warp_row + place.lane % kAtom, place.lane / kAtom)},
        S_(S),
        O_(O),
        softmax_(softmax),
        warp_row0_(row0 + place.warp_row),
        params_(params),
        starts_with_bias_(Traits::Parts == 1 && has_bias() && !ScoreMod::caps(params) &&
                          ScoreMod::query_scale(params) > kLeastScale),
        score_mods_(ScoreMod::changes(params) || (has_bias() && !starts_with_bias_)),
        query_scale_(ScoreMod::query_scale(params)),
        keys_at_(cast_smem_ptr_to_uint(shared.k) +
                 2 * chunk_offset<B_c>(place.part * Traits::WarpKeys + place.lane % 8 + place.lane / 16 * 8,
                                       place.lane / 8 % 2)),
        values_at_(cast_smem_ptr_to_uint(shared.v) +
                   2 * chunk_offset<B_c>(place.lane % kAtom,
                                         place.part * (Traits::WarpColumns / kVector) + place.lane / kAtom)),
        p_to_(cast_smem_ptr_to_uint(shared.p) +
              2 * (chunk_offset<B_r>(place.warp_row + place.lane / 4, place.part * HalfChunks) + place.lane % 4 * 2)),
        p_from_(cast_smem_ptr_to_uint(shared.p) +
                2 * chunk_offset<B_r>(place.warp_row + place.lane % kAtom,
                                      (1 - place.part) * HalfChunks + place.lane / kAtom)) {}

  /// All tiles, from the last to the first; O is what dropout keeps, times its scale.
  CUTE_DEVICE void run() {
    copies_.wait();
    if (has_mask()) {
      PairMod const& pairs = shared_.pairs;
      int const row0 = warp_row0_ - place_.warp_row;
      shared_.seen.look(copies_.tiles, [&](int tile) {
        return pairs.seen_of(params_, {row0, row0 + B_r}, {tile * B_c, (tile + 1) * B_c});
      });
      __syncthreads();
    }
    queries_.take();
    if constexpr (Traits::Parts > 1) query_scale_ *= (1.f + kCutOffScores) * shared_.scales[0].scores;
    Range const tiles = copies_.tiles, unmasked = copies_.unmasked;
    int tile = tiles.end - 1;
    int const plain_begin = unmasked.begin > tiles.begin ? unmasked.begin : tiles.begin;
    while (tile >= tiles.begin) {
      Seen const here = seen(tile);
      if (!here.some) {
        pass<KeyTile::Any>(tile--);
      } else if (shared_.checked || !here.all) {
        step<KeyTile::Any>(tile--);
      } else if (!unmasked.contains(tile)) {
        step<KeyTile::Masked>(tile--);
      } else {
        do step<KeyTile::Plain>(tile--);
        while (tile >= plain_begin && !has_mask());
      }
    }
    if (has_dropout()) {
      Tensor out = rows_and_columns(O_);
      CUTE_UNROLL
      for (int e = 0; e < size(out); ++e) out(e) *= params_.dropout.scale;
    }
    if constexpr (Traits::Shared) {  // l of all keys, in the one lane of four whose part is counted
      float sum[Rows];
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) sum[i] = warp_sum<4, 1>(softmax_.l[i]);
      exchange_.publish(sum);
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) softmax_.l[i] = place_.lane % 4 == 0 ? sum[i] + exchange_.of_sharer(i) : 0.f;
    }
  }

 private:
  CUTE_DEVICE bool has_bias() const { return Traits::Pairs && cutlass_ext::has_bias(params_); }
  CUTE_DEVICE bool has_mask() const { return Traits::Pairs && cutlass_ext::has_mask(params_); }
  CUTE_DEVICE bool has_dropout() const { return Traits::Pairs && cutlass_ext::has_dropout(params_); }

  CUTE_DEVICE Seen seen(int tile) const { return shared_.seen.of(has_mask(), tile); }

  /// The copies of a tile that nothing comes of.
  template <KeyTile Kind>
  CUTE_DEVICE void pass(int tile) {
    copies_.template during_qk<Kind>(tile);
    copies_.template between<Kind>(tile);
    copies_.next();
  }

  template <KeyTile Kind>
  CUTE_DEVICE void step(int tile) {
    // At head_dim 64 this took 3% of (32, 512, 32, 64) and brought nothing.
    if constexpr (Kind == KeyTile::Masked && Traits::HeadDim > 64) {
      Visibility const visibility = shared_.sequence.visibility;
      if (!visibility.tiles_of(warp_row0_, Traits::RowAtoms * kAtom, B_c).contains(tile)) {
        pass<Kind>(tile);  // hidden from all rows of this warp
        return;
      }
    }
    Kept kept = {};
    if (Kind == KeyTile::Any && has_dropout()) draw(kept, tile);  // while there are no scores
    uint32_t const here = copies_.here();
    auto const copy = [&] { copies_.template during_qk<Kind>(tile); };
    if constexpr (Kind == KeyTile::Any) {
      copy();
      multiply_qk(tile, keys_at_ + here);
    } else {
      gemm_qk_in_pieces<Traits, Traits::StepsAtOnce>(S_, queries_, keys_at_ + here, copy);
    }
    float const scale = finish_scores<Kind>(tile);
    Tensor base = make_tensor<float>(Shape<Int<Rows>>{});
    raise_maxima(base, scale);
    copies_.template between<Kind>(tile);
    add_pv<Kind>(base, scale, here, kept);
    copies_.next();
  }

  /// The warp's first key of a tile, and the lane's first row and key.
  CUTE_DEVICE int warp_key(int tile) const { return tile * B_c + place_.part * Traits::WarpKeys; }
  CUTE_DEVICE int first_row() const { return warp_row0_ + place_.lane / 4; }
  CUTE_DEVICE int first_key(int tile) const { return warp_key(tile) + place_.lane % 4 * 2; }

  /// S = Q K^T, and of the bias what makes one multiplication with both.
  CUTE_DEVICE void multiply_qk(int tile, uint32_t keys_at) {
    auto const nothing = [] {};
    if constexpr (Traits::Parts == 1) {
      if (starts_with_bias_) {
        Tensor S = rows_and_columns(S_);
        load_bias(S, kLog2e / query_scale_, shared_.pairs, params_, shared_.sequence.visibility, first_row(),
                  first_key(tile), row_of, key_of);
      } else {
        clear(S_);
      }
      add_qk<Traits>(S_, queries_, keys_at, nothing);
    } else {
      gemm_qk_in_pieces<Traits, Traits::StepsAtOnce>(S_, queries_, keys_at, nothing);
    }
  }

  /// Score modifications and masks; returns what is left to multiply scores by.
  template <KeyTile Kind>
  CUTE_DEVICE float finish_scores(int tile) {
    Tensor S = rows_and_columns(S_);
    int const first_row = this->first_row(), first_key = this->first_key(tile);
    if constexpr (Kind == KeyTile::Any) {
      if (score_mods_) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e) *= query_scale_;
        ScoreMod const score_mod = shared_.score_mod;
        // float32 has the hyperbolic tangent that CUDA cores have.
        score_mod.template apply<Traits::Parts == 1>(S, shared_.sequence.visibility.start_pos + first_row - first_key,
                                                     [&](int i, int j) { return row_of(i) - key_of(j); });
        if (has_bias() && !starts_with_bias_) {
          change_by_columns<false>(S, [&](float (&x)[kQuadColumns], int i, int j) {
            shared_.pairs.add_bias(x, params_, shared_.sequence.visibility, first_row + row_of(i),
                                   first_key + key_of(j), key_of_quad);
          });
        }
      }
      if (!seen(tile).all) {
        hide_by_mask(S, shared_.pairs, params_, shared_.sequence.visibility, first_row, warp_key(tile), place_.lane,
                     row_of);
      }
    }
    if (Kind == KeyTile::Masked || (Kind == KeyTile::Any && !copies_.unmasked.contains(tile)))
      mask(S, shared_.sequence.visibility.counted_from(first_key).with_finite_windows(), first_row, row_of, key_of);
    return Kind == KeyTile::Any && score_mods_ ? 1.f : query_scale_;
  }

  /// m rises to what S asks for; l and O follow.
  template <class RowTensor>
  CUTE_DEVICE void raise_maxima(RowTensor& base, float scale) {
    Tensor rescale = make_tensor<float>(Shape<Int<Rows>>{});
    softmax_.raise(rows_and_columns(S_), rescale, base, scale, [&](float (&tile_max)[Rows]) {
      if constexpr (Traits::Shared) {
        exchange_.publish(tile_max);
        CUTE_UNROLL
        for (int i = 0; i < Rows; ++i) tile_max[i] = fmaxf(tile_max[i], exchange_.of_sharer(i));
      }
    });
    bool raised = false;
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) raised |= rescale(i) != 1.f;
    if (__any_sync(0xffffffffu, raised)) {  // the maxima stay where they are after a few tiles
      Tensor out = rows_and_columns(O_);
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        softmax_.l[i] *= rescale(i);
        CUTE_UNROLL
        for (int j = 0; j < size<1>(out); ++j) out(i, j) *= rescale(i);
      }
    }
  }

  /// Which pairs of a tile dropout keeps.
  CUTE_DEVICE void draw(Kept& kept, int tile) const {
    CUTE_UNROLL
    for (int a = 0; a < Traits::RowAtoms; ++a) {
      CUTE_UNROLL
      for (int word = 0; word < KeptWords; ++word)
        kept[a][word] = shared_.pairs.template kept_of_rows<KeptKeys>(threshold_of(params_), warp_row0_ + a * kAtom,
                                                                      warp_key(tile) + word * KeptKeys, place_.lane);
    }
  }

  /// P = exp2(scale S - base), l += its sums, O += P V, of what dropout keeps.
  template <KeyTile Kind, class RowTensor>
  CUTE_DEVICE void add_pv(RowTensor const& base, float scale, uint32_t here, Kept const& kept) {
    float sum[Rows] = {};
    auto const p_of = [&](int i, float s) {
      float const p = exp2_approx(fmaf(s, scale, -base(i)));
      sum[i] += p;
      return p;
    };
    if (Kind == KeyTile::Any && has_dropout()) {
      Tensor P = rows_and_columns(S_);
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(P); ++j) {
          constexpr int kColumns = KeptKeys / 4;  // of a word
          uint32_t const bit = 1u << PairMod::bit_of_rows(j % kColumns / 2, j % 2, i % 2);
          P(i, j) = p_of(i, P(i, j));
          if (!(kept[i / 2][j / kColumns] & bit)) P(i, j) = 0.f;
        }
      }
      multiply_pv([](int, float p) { return p; }, here);
    } else {
      multiply_pv(p_of, here);
    }
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) softmax_.l[i] += sum[i];
  }

  template <class POf>
  CUTE_DEVICE void multiply_pv(POf const& p_of, uint32_t here) {
    if constexpr (Traits::Shared) {
      constexpr uint32_t Half = Traits::WarpKeys * kPanel * sizeof(typename Traits::Part);
      gemm_pv_shared<Traits>(O_, S_, p_of, values_at_ + here + place_.part * Half,
                             values_at_ + here + (1 - place_.part) * Half, p_to_, p_from_);
    } else if constexpr (Traits::Parts > 1) {
      typename Traits::Rows16 p[Traits::B_c / kAtom];
      CUTE_UNROLL
      for (int k = 0; k < Traits::B_c / kAtom; ++k) operand_p<Traits>(p[k], S_, k, p_of);
      auto const values_of = [&](int k) { return chunk_at<B_c>(values_at_ + here, k * kAtom, 0); };
      gemm_pv_in_parts<Traits>(O_, p, values_of, Ones{});
    } else {
      gemm_pv<Traits>(O_, S_, p_of, values_at_ + here);
    }
  }

  static constexpr int HalfChunks = Traits::WarpKeys / kVector;
  typename Traits::SharedStorage& shared_;
  Copies<Traits>& copies_;
  Place<Traits> const place_;
  Exchange<Traits> const exchange_;
  Queries<Traits> const queries_;
  int const warp_row0_;  // the warp's first row, counted in the sequence
  Params const& params_;
  bool const starts_with_bias_;  // scores do
  bool const score_mods_;        // what changes them between the products
  float query_scale_;
  Scores& S_;
  Output& O_;
  Softmax& softmax_;
  uint32_t const keys_at_, values_at_;  // where the lane's rows of fragments begin
  uint32_t const p_to_, p_from_;        // where a sharing warp puts P, and has the other's from
};

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads) fmha_kernel(__grid_constant__ Params const params) {
  if constexpr (Traits::Parts > 1) {
    if (params.is_skipped()) return;
  }
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  WorkItem const work = params.scheduler(blockIdx.x);
  Place<Traits> const place;
  Copies<Traits> copies(params, shared);
  if (!copies.start(work)) return;
  typename Queries<Traits>::Held held;
  typename MainLoop<Traits>::Scores S;
  typename MainLoop<Traits>::Output O = {};
  typename MainLoop<Traits>::Softmax softmax;
  MainLoop<Traits>(params, shared, copies, work.row0, place, held, S, O, softmax).run();
  Tensor out = rows_and_columns(O);
  store<Traits>(params, shared, work, out, softmax, place);
}

/// The kernel of one tile shape, launched for every query tile and split.
template <bool Pairs, int B_r, int B_c, int HeadDim, class Element, int Threads, int Stages = 2, int Sharers = 1>
struct FMHA {
  using Traits = sm80::Traits<B_r, B_c, HeadDim, Element, Threads, Stages, Sharers, Pairs>;
  static constexpr char const* kFamily = "sm80";
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;
  static constexpr Kind kKind = Kind::Tiles;
  // Whether parts hold a sequence may depend on the others of the batch; they are made of whole vectors.
  static constexpr Features kTakes =
      feature::kScoreMods | (Pairs ? feature::kPairs : 0) | feature::Sink | feature::Packed | feature::kUnlike |
      feature::FewerKeys | feature::Pages |
      (Traits::Parts == 1 ? feature::FixedSplits | feature::Float32Results | feature::UnalignedRows : 0);
};

}  // namespace cutlass_ext::sm80

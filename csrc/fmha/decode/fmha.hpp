// Decoding: attention of a few query rows to a long cache, bound by the memory that holds it. The query rows of all
// heads that share a KV head are packed into one tile, so that each key is read once; the keys of all sequences are
// shared out among the CTAs; partial results are merged in key order by the last CTA of a sequence to finish
// (Flash-Decoding's split of the keys, in one launch). Instantiated by csrc/kernels/decode_*.cu and,
// beside a launch that prefills, sm90_decode.cu.
#pragma once

#include "../features.hpp"
#include "../score.hpp"
#include "../softmax.hpp"
#include "load.hpp"
#include "math.hpp"
#include "parts.hpp"
#include "share.hpp"

namespace cutlass_ext::decode {

/// What a row of query head `head` ends as.
template <class Element>
CUTE_DEVICE Finish finish_row(Params const& params, int head, Part const& row) {
  return params.sink ? finish<Element>(row, params.sink[head] * kLog2e) : finish<Element>(row);
}

/// The zeros of sequences of which no query row sees a key: they are nobody's work.
template <class Traits>
CUTE_DEVICE void write_empty(Params const& params, Place const& place, Tokens const& tokens) {
  using Element = typename Traits::Element;
  for (int b = place.group + threadIdx.x * params.groups; b < params.batch; b += Traits::Threads * params.groups) {
    Sequence const sequence = sequence_of(params, b);
    if (tiles_of(params, sequence, tokens, Traits::TileKeys).size() > 0) continue;
    QueryRows const rows = query_rows(params, b, sequence);
    for (int row = 0; row < Traits::rows_of(params, place, rows); ++row) {
      PackedRow const packed = Traits::packed_row(params, place, row);
      Finish const finished = finish_row<Element>(params, packed.head, {});
      for (int unit = 0; unit * 4 < params.head_dim_v; ++unit)
        write_unit<Element>(params, rows, packed, unit, make_float4(0.f, 0.f, 0.f, 0.f), finished);
    }
  }
}

/// Until the other warps that read the same tile are here; what each has brought is then there for all.
template <class Traits>
CUTE_DEVICE void meet() {
  if constexpr (Traits::RowWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// The lane's scores of its `rows` rows, of which the first begins at `first`, as [row, key].
template <int TileKeys, class Rows>
CUTE_DEVICE auto score_rows(float* first, Rows rows) {
  return make_tensor(make_rmem_ptr(first), make_layout(make_shape(rows, Shape<_2, Int<TileKeys / 8>>{}),
                                                       make_stride(_2{}, Stride<_1, _4>{})));
}

/// The products of a tile that begins with key `first_key` become scores: multiplied by `query_scale` and changed if
/// the call asks for it, hidden from rows that do not see them. The lane's rows are `row0` and row0 + 8; every row sees
/// `keys_of_all`.
template <class Traits>
CUTE_DEVICE void finish_scores(Params const& params, Place const& place, int batch, Visibility const& visibility,
                               Range const& keys_of_all, int row0, int first_key, bool changes_scores,
                               float query_scale, Fragment<Traits::TileKeys>& scores) {
  constexpr int TileKeys = Traits::TileKeys;
  auto const key_of = [](int j) { return j / 2 * 8 + j % 2; };
  int const lane_key = first_key + threadIdx.x % 4 * 2;  // the lane's first
  Tensor S = score_rows<TileKeys>(&scores[0][0], _2{});
  if (changes_scores) {
    CUTE_UNROLL
    for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      Tensor S_row = score_rows<TileKeys>(&scores[0][2 * i], _1{});
      PackedRow const row = Traits::packed_row(params, place, row0 + 8 * i);
      ScoreMod(params, batch, row.head).apply(S_row, visibility.start_pos + row.token - lane_key, [&](int, int j) {
        return -key_of(j);
      });
    }
  }
  if (first_key < keys_of_all.begin || first_key + TileKeys > keys_of_all.end) {
    int const tokens[2] = {Traits::packed_row(params, place, row0).token,
                           Traits::packed_row(params, place, row0 + 8).token};
    mask(S, visibility.counted_from(lane_key), 0, [&](int i) { return tokens[i]; }, key_of);
  }
}

/// Ends the CTA's part of a sequence, of which the calling warp has O, m and l of its rows and keys.
template <class Traits, class Softmax>
CUTE_DEVICE void end_share(Params const& params, Place const& place, KeyShare const& share, QueryRows const& queries,
                           typename Traits::SharedStorage& shared, Fragment<Traits::HeadDim> const& O,
                           Softmax const& softmax, int free_stage) {
  using Element = typename Traits::Element;
  constexpr int HeadDim = Traits::HeadDim, Units = Traits::Units;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const rows = Traits::rows_of(params, place, queries);
  unsigned* const counter = params.counters + int64_t(share.batch) * place.ctas + place.cta;
  Partials const partials(params, int64_t(share.first_group) * place.ctas + place.cta, place.ctas,
                          params.fixed_splits ? 1 : kPartialsOfCta, share.begins_inside, Traits::Rows,
                          params.head_dim_v / 4);
  auto const write = [&](int row, int unit, UnitPart const& x) {
    PackedRow const packed = Traits::packed_row(params, place, row);
    write_unit<Element>(params, queries, packed, unit, x.o, finish_row<Element>(params, packed.head, x.row));
  };
  float const l[2] = {warp_sum<4, 1>(softmax.l[0]), warp_sum<4, 1>(softmax.l[1])};
  if constexpr (Traits::KeyWarps > 1) {
    // The warps' parts meet in the stages that they were done with last: nobody reads those, and the next copy waits.
    auto const unit_of = [&](int w, int stage, int row, int unit) {
      return reinterpret_cast<float4*>(&shared.ring[w][stage]) + row * Units + (unit ^ row % 8 * 2);
    };
    __syncwarp();  // the lanes are done with the tile that this overwrites
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = lane / 4 + 8 * i;
      if (lane % 4 == 0) shared.ml[warp][row] = make_float2(softmax.m[i], l[i]);
      if (row >= rows) continue;
      CUTE_UNROLL
      for (int n = 0; n < HeadDim / 8; ++n) {
        auto* const to = reinterpret_cast<float2*>(unit_of(warp, free_stage, row, n * 2)) + lane % 4;
        *to = make_float2(O[n][2 * i], O[n][2 * i + 1]);
      }
    }
    __syncthreads();
    end_part<Traits::Warps, Units>(
        partials, share.part, share.parts, counter, shared.is_last, rows,
        [&](int row, int unit) {
          return merge_units<Traits::KeyWarps>(
              Traits::KeyWarps, [&](int w) { return shared.ml[w][row]; },
              [&](int w) { return *unit_of(w, shared.free_stage[w], row, unit); });
        },
        write);
  } else {
    // Of the two rows of which two lanes have half a unit each, either lane writes one.
    bool const low = lane % 2 == 0;
    int const row = warp * kWarpRows + lane / 4 + (low ? 0 : 8);
    Part const part{low ? softmax.m[0] : softmax.m[1], low ? l[0] : l[1]};
    PackedRow const packed = Traits::packed_row(params, place, row);
    Finish const finished = finish_row<Element>(params, packed.head, part);
    CUTE_UNROLL
    for (int n = 0; n < HeadDim / 8; ++n) {
      float const x = __shfl_xor_sync(0xffffffffu, low ? O[n][2] : O[n][0], 1),
                  y = __shfl_xor_sync(0xffffffffu, low ? O[n][3] : O[n][1], 1);
      float4 const o = low ? make_float4(O[n][0], O[n][1], x, y) : make_float4(x, y, O[n][2], O[n][3]);
      int const unit = 2 * n + lane % 4 / 2;
      if (row >= rows || unit >= partials.units) continue;
      if (share.parts == 1) {
        write_unit<Element>(params, queries, packed, unit, o, finished);
      } else {
        partials.put(share.part, row, unit, {o, part});
      }
    }
    if (share.parts > 1 && is_last_of(share.parts, counter, shared.is_last))
      merge_partials<Traits::Warps>(partials, share.parts, rows, write);
  }
}

template <class Traits, Features Takes>
__global__ void __launch_bounds__(Traits::Threads, Traits::CtasAMultiprocessor)
    decode_kernel(__grid_constant__ Params const all_params) {
  Params const params = specialised<Takes>(all_params);
  constexpr int HeadDim = Traits::HeadDim, TileKeys = Traits::TileKeys, Stages = Traits::Stages;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const key_warp = Traits::RowWarps == 1 ? warp : 0, row_warp = Traits::RowWarps == 1 ? 0 : warp;
  auto& ring = shared.ring[key_warp];
  bool const aligned = (Takes & feature::UnalignedRows) == 0 || rows_are_aligned(params);

  Walk<TileKeys>& walk = shared.walk;  // like `place` in shared memory, since registers are for the main loop
  Place const& place = shared.place;
  {
    Place const here(params, blockIdx.x);
    Walk<TileKeys> const first = first_walk<Traits>(params, here.group, here.tokens(params, Traits::Rows), shared);
    if (threadIdx.x == 0) {
      shared.place = here;
      shared.free_stage[0] = Stages - 1;
      walk = shared.next = first;
      if (!first.done()) shared.next.next(params);
    }
    if (lane == 0) shared.ahead[warp] = first;
    __syncthreads();
  }
  // Where Q does not stay in shared memory it passes through the free tile of warp 0.
  auto const tile_Q = [&] { return Traits::QueryInRegisters ? shared.ring[0][shared.free_stage[0]].k : shared.q; };
  Query<Traits> query;
  if (!walk.done() || params.fixed_splits) query.ask(params, place, walk, tile_Q(), aligned);
  Loader<Traits> loader(params, shared.ahead[warp], place.head, warp, aligned);
  CUTE_NO_UNROLL
  for (int stage = 0; stage < Stages - 1; ++stage) loader.load(ring[stage]);

  if (!params.fixed_splits && (walk.done() || !all_alike(params))) write_empty<Traits>(params, place, walk.tokens());

  bool const changes_scores = ScoreMod::changes(params);
  float const query_scale = ScoreMod::query_scale(params);
  int stage = 0;
  auto const free_stage = [&] { return (stage + Stages - 1) % Stages; };  // no copy is under way to it, nobody reads it

  for (bool once = params.fixed_splits; once || !walk.done(); once = false) {
    Visibility const& visibility = walk.sequence().visibility;
    Range const tiles = walk.here();
    Tokens const tokens = walk.tokens().of(params, walk.sequence());
    Range const keys_of_all = {visibility.keys_of_row(tokens.last).begin, visibility.keys_of_row(tokens.first).end};

    Math<Traits> math;
    query.put(params, place, walk, tile_Q());
    __syncthreads();
    auto const* const sQ = tile_Q() + Traits::query_tile(row_warp * kWarpRows);
    math.take_query(sQ, lane);
    if (Traits::QueryInRegisters) __syncthreads();
    if (query.Waits && !shared.next.done()) query.ask(params, place, shared.next, tile_Q(), aligned);

    Fragment<HeadDim> O = {};
    OnlineSoftmax<2, 4, 1> softmax;
    for (int tile = tiles.begin + key_warp; tile < tiles.end; tile += Traits::KeyWarps) {
      cp_async_wait<Stages - 2>();
      meet<Traits>();
      loader.load(ring[free_stage()]);
      int const first_key = tile * TileKeys;
      if (__builtin_expect(params.n_new > 0 && first_key + TileKeys > walk.sequence().cached, false)) {
        take_new_keys<Traits>(params, walk, place.head, first_key, ring[stage], aligned);
        meet<Traits>();
      }

      Fragment<TileKeys> scores;
      math.scores(scores, sQ, ring[stage].k, lane);
      finish_scores<Traits>(params, place, walk.batch(), visibility, keys_of_all, row_warp * kWarpRows + lane / 4,
                            first_key, changes_scores, query_scale, scores);
      Tensor S = score_rows<TileKeys>(&scores[0][0], _2{});
      float rescale[2];
      Tensor rescale_rows = make_tensor(make_rmem_ptr(rescale), Shape<_2>{});
      softmax.update(S, rescale_rows, changes_scores ? 1.f : query_scale);
      math.values(O, scores, rescale, ring[stage].v, lane);
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }

    if (lane == 0 && row_warp == 0) shared.free_stage[key_warp] = free_stage();
    end_share<Traits>(params, place, walk.share(params, place.group), walk.rows(params), shared, O, softmax,
                      free_stage());
    __syncthreads();  // everyone has read `walk`
    if (threadIdx.x == 0) {
      walk = shared.next;
      if (!walk.done()) shared.next.next(params);
    }
    __syncthreads();  // the free stages may be copied to again
    if (!query.Waits && !walk.done()) query.ask(params, place, walk, tile_Q(), aligned);
  }
  cp_async_wait<0>();
}

/// The kernel of one tile shape; without what a plain call does not need where `Plain`.
template <int HeadDim, class Element, int RowWarps, int KeyWarps, int TileKeys, int Stages, bool Plain>
struct Decode {
  using Traits = decode::Traits<HeadDim, Element, RowWarps, KeyWarps, TileKeys, Stages>;
  static constexpr char const* kFamily = Traits::TensorCores ? "sm80" : "simt";
  static constexpr Kind kKind = Kind::Decode;
  static constexpr Features kPlain =
      feature::Packed | feature::KeyLengths | feature::StartPositions | feature::FewerKeys | feature::Pages;
  static constexpr Features kTakes = Plain ? kPlain
                                           : kPlain | feature::kScoreMods | feature::Sink | feature::kUnlike |
                                                 feature::kCache | feature::FixedSplits | feature::Float32Results |
                                                 feature::UnalignedRows;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(Traits::Warps > 4 || kSharedBytes <= 99 * 1024, "what a block has on 8.6");
  static constexpr auto kernel = &decode_kernel<Traits, kTakes>;

  static bool takes_shape(Params const& p) { return fits(p, Traits::Rows); }
};

/// The same beside a launch that prefills, on Hopper: a CTA has all of a multiprocessor, so that few of them read
/// memory as fast as it comes and the prefill has the others. Where registers allow it, twelve warps and few stages: a
/// warp works 1.6 us on a tile, one step after the other, and 80 CTAs of eight warps and three stages read 3.2 TB/s
/// where twelve and two read 3.7.
template <int HeadDim, class Element, int KeyWarps, int Stages, bool Plain>
struct DecodeBeside : Decode<HeadDim, Element, 1, KeyWarps, 16, Stages, Plain> {
  using Base = Decode<HeadDim, Element, 1, KeyWarps, 16, Stages, Plain>;
  static constexpr char const* kFamily = "sm90";
  // With the number of splits fixed a sequence has the bits that it has alone, which are those of four warps.
  static constexpr Features kTakes = Base::kTakes & ~feature::FixedSplits;
  static constexpr auto kernel = &decode_kernel<typename Base::Traits, kTakes>;
  static bool takes_shape(Params const& p) { return p.is_beside_chunks() && fits(p, kWarpRows); }
};

}  // namespace cutlass_ext::decode

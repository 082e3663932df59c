// The decode kernel of few sequences: what narrow.hpp does, with a cluster of CTAs for each KV head of each sequence.
// Their parts meet in the shared memory of one of them: no counter, no workspace, and no length decides which tiles are
// whose. On an H200 1024 keys of 8 heads then take 7.5 us for 9.9 (an empty kernel 3.7). Needs compute capability 9.0.
// Instantiated by csrc/kernels/sm90_decode.cu.
#pragma once

#include <type_traits>

#include <cute/arch/cluster_sm90.hpp>

#include "../sm90/pipeline.hpp"
#include "narrow_tile.hpp"
#include "parts.hpp"
#include "walk.hpp"

namespace cutlass_ext::decode {

/// The warps of all CTAs have tiles of 16 keys in turn, each in a ring of its own. One CTA a multiprocessor, and as
/// much in flight as fits beside the parts: four warps, in twice the CTAs, take 15.8 us for 14.0 at 8192 keys.
template <int HeadDim, class Element>
struct ClusterTraits : NarrowTile<HeadDim, Element> {
  using Tile = NarrowTile<HeadDim, Element>;
  static constexpr int Warps = kClusterWarps, Threads = 32 * Warps, Stages = 384 / HeadDim;

  struct SharedStorage {
    typename Tile::Stage ring[Warps][Stages];
    float4 parts[kMostInCluster][Tile::Rows * Tile::Units];  // of all CTAs, in the first one
    float2 parts_ml[kMostInCluster][Tile::Rows];
    float2 ml[Warps][Tile::Rows];
    sm90::Barrier parts_there;
  };
};

/// What a call is told besides that appends nothing; one that does, where its new keys are: its Cache.
struct NoNewKeys {
  explicit NoNewKeys(Params const&) {}
};

/// A tile in which some keys are new: those from `old` on. It begins with key `first_key` of sequence `batch`, in row
/// `row` of `page`, which the cache need not have.
template <class Tile>
struct NewRows {
  using Element = typename Tile::Element;
  NarrowParams const& params;
  Cache const& fresh;
  int head, batch, page, row, first_key, cached, len;

  CUTE_DEVICE int old() const { return max(cached - first_key, 0); }

  /// As copy_tile does, the new rows from where the call has them.
  CUTE_DEVICE void copy(typename Tile::Stage& stage, int page_read) const {
    auto const rows_of = [&](void const* cache, Strides const& stride, void const* new_rows,
                             Strides const& new_stride) {
      return [=, &stride, &new_stride](int i) {
        return i < old() ? row_at<Element const>(cache, stride, page_read, row + i, head)
                         : row_at<Element const>(new_rows, new_stride, batch, first_key + i - cached, head);
      };
    };
    copy_rows<Tile, 1>(stage.k, key_place, len - first_key,
                       rows_of(params.k, params.k_stride, fresh.k_new, fresh.k_new_stride));
    copy_rows<Tile, 1>(stage.v, value_place, len - first_key,
                       rows_of(params.v, params.v_stride, fresh.v_new, fresh.v_new_stride));
  }

  /// Turns the new keys where they lie, and writes keys and values to the cache.
  CUTE_DEVICE void append(typename Tile::Stage& stage) const {
    bool const writes = !params.paged() || has_page(params.pages, page);
    take_new_rows<Tile::HeadDim, Element>(
        old(), min(len - first_key, Tile::TileKeys), fresh.rotary, first_key, writes, true, Tile::HeadDim,
        Tile::HeadDim, [&](int i, int chunk) -> uint4& { return stage.k[i][key_place(i, chunk)]; },
        [&](int i, int chunk) -> uint4& { return stage.v[i][value_place(i, chunk)]; },
        [&](int i) -> KvRow<Element> {
          return {row_at<Element>(params.k, params.k_stride, page, row + i, head),
                  row_at<Element>(params.v, params.v_stride, page, row + i, head)};
        });
    __syncwarp();
  }
};

/// The warps' sums meet in shared memory, those of the `size` CTAs in that of the first, which writes the result.
template <class Traits>
CUTE_DEVICE void merge_cluster(NarrowParams const& params, typename Traits::SharedStorage& shared,
                               QueryRows const& queries, int size, int rank, int head) {
  using Tile = typename Traits::Tile;
  using Element = typename Tile::Element;
  constexpr int Units = Tile::Units, Warps = Traits::Warps;
  int const rows = packed_rows(params, queries);
  auto const in_first = [](void const* p) { return sm90::address_in(0, p); };
  uint32_t const barrier = in_first(&shared.parts_there);
  for (unsigned index = threadIdx.x; index < rows * Units; index += Traits::Threads) {
    unsigned const row = index / Units, unit = index % Units;
    UnitPart const sum = merge_units<Warps>(
        Warps, [&](int w) { return shared.ml[w][row]; },
        [&](int w) { return reinterpret_cast<float4*>(shared.ring[w])[NarrowSums<Tile>::scratch_place(row, unit)]; });
    sm90::push(in_first(&shared.parts[rank][index]), sum.o, barrier);
    if (unit == 0) sm90::push(in_first(&shared.parts_ml[rank][row]), make_float2(sum.row.m, sum.row.l), barrier);
  }
  if (rank > 0) return;
  shared.parts_there.wait_for(0);
  for (unsigned index = threadIdx.x; index < rows * Units; index += Traits::Threads) {
    unsigned const row = index / Units;
    UnitPart const sum = merge_units<kMostInCluster>(
        size, [&](int i) { return shared.parts_ml[i][row]; }, [&](int i) { return shared.parts[i][index]; });
    write_unit<Element>(params, queries, PackedRow(params, head, row), index % Units, sum.o, finish<Element>(sum.row));
  }
}

/// A cluster has all CTAs of x, for KV head blockIdx.y of sequence blockIdx.z.
template <class Traits, class Fresh>
__global__ void __launch_bounds__(Traits::Threads, 1)
    cluster_kernel(__grid_constant__ NarrowParams const params, __grid_constant__ Fresh const fresh) {
  using Tile = typename Traits::Tile;
  using Element = typename Tile::Element;
  using Sums = NarrowSums<Tile>;
  constexpr bool Appends = std::is_same_v<Fresh, Cache>;
  constexpr int Chunks = Tile::Chunks, Units = Tile::Units, Warps = Traits::Warps, Stages = Traits::Stages,
                TileKeys = Tile::TileKeys;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const size = gridDim.x, rank = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  int const step = size * Warps, place = rank * Warps + warp;  // the warp has tiles place, place + step, ...
  QueryRows const queries{batch, 0, params.n_q};
  int const rows = packed_rows(params, queries);

  // The pages of the warp's tiles, in its lanes. They are asked for beside the length, which says later whether they
  // are used.
  static_assert(kClusterTurns < 32);
  Lengths const lengths = params.lengths();
  auto const page_of = [&](int tile) {
    return tile * TileKeys < lengths.n_kv ? __ldg(params.pages_of(batch) + params.page_rows.div(tile * TileKeys)) : 0;
  };
  int pages = params.paged() ? page_of(place + lane * step) : 0;

  Sequence const sequence = sequence_of(lengths, batch);
  Visibility const& visibility = sequence.visibility;
  int const cached = sequence.cached, len = visibility.len_kv;
  Range const tiles = tiles_of(lengths, sequence, {0, params.n_q - 1, Appends}, TileKeys);
  Range const seen_by_all = keys_of_all_rows(visibility);
  int const hidden = tiles.begin > place ? (tiles.begin - place + step - 1) / step : 0;
  int tile = place + hidden * step;
  if (params.paged() && hidden > 0) pages = page_of(tile + lane * step);
  auto const page_at = [&](int turn) { return params.paged() ? __shfl_sync(0xffffffffu, pages, turn) : batch; };

  if (threadIdx.x == 0 && rank == 0) {
    shared.parts_there.init(1);
    cutlass::arch::fence_barrier_init();
    shared.parts_there.arrive_and_expect_tx(size * rows * (Units * sizeof(float4) + sizeof(float2)));
  }
  cute::cluster_arrive_relaxed();

  auto& ring = shared.ring[warp];
  uint4 query[Chunks / 4];
  Sums sums;
  sums.clear();
  // A turn asks for a tile and works on the one of Stages - 1 turns before.
  for (int turn = 0, stage = 0;; ++turn, tile += step) {
    if (tile < tiles.end) {
      int const page = page_at(turn), page_read = params.paged() ? nearest_page(page, params.pages) : page,
                key = tile * TileKeys, row = row_in_page(params, key);
      bool mixed = false;
      if constexpr (Appends) {
        mixed = key + TileKeys > cached;
        if (mixed) NewRows<Tile>{params, fresh, head, batch, page, row, key, cached, len}.copy(ring[stage], page_read);
      }
      if (!mixed) copy_tile<Tile>(ring[stage], params, head, page_read, row, len - key);
    }
    cute::cp_async_fence();
    stage = stage + 1 == Stages ? 0 : stage + 1;
    if (turn == 0) {  // behind the first keys: before them they come 0.3 us later
      auto const chunk_of = [&](int row, int chunk) { return query_chunk<Tile>(params, head, queries, row, chunk); };
      bool turned = false;
      if constexpr (Appends) {
        turned = fresh.rotary.cos;
        if (turned) {  // through a stage that is not in use yet, a warp a row
          static_assert(Tile::Rows == Warps && Chunks <= 32 && Stages > 1);
          auto& q = shared.ring[0][Stages - 1].k;
          if (lane < Chunks) q[warp][lane] = chunk_of(warp, lane);
          __syncwarp();
          rotate_row<Element>(fresh.rotary, rotary_position(fresh.rotary, cached, params.heads_per_kv.div(warp)),
                              [&](int c) -> uint4& { return q[warp][c]; });
          __syncthreads();
          CUTE_UNROLL
          for (int c = 0; c < Chunks; c += 4) query[c / 4] = crossed(q[lane / 4][c + lane % 4]);
          __syncthreads();
        }
      }
      if (!turned) {
        CUTE_UNROLL
        for (int c = 0; c < Chunks; c += 4) query[c / 4] = crossed(chunk_of(lane / 4, c + lane % 4));
      }
    }
    if (turn < Stages - 1) continue;
    int const now = tile - (Stages - 1) * step;
    if (now >= tiles.end) break;
    cute::cp_async_wait<Stages - 1>();
    __syncwarp();
    if constexpr (Appends) {
      int const key = now * TileKeys;
      if (key + TileKeys > cached) {
        int const page = page_at(turn - (Stages - 1)), row = row_in_page(params, key);
        NewRows<Tile>{params, fresh, head, batch, page, row, key, cached, len}.append(ring[stage]);
      }
    }
    sums.add(ring[stage], [&](int c) { return query[c / 4]; }, params, visibility, seen_by_all, now * TileKeys);
    __syncwarp();  // the stage may be copied to
  }

  sums.put(reinterpret_cast<float4*>(ring), shared.ml[warp], rows);
  __syncthreads();
  cute::cluster_wait();  // the first CTA's barrier is there
  merge_cluster<Traits>(params, shared, queries, size, rank, head);
}

/// The kernel of one head_dim, which also appends where `Appends`.
template <int HeadDim, class Element, bool Appends>
struct ClusterDecode {
  using Traits = ClusterTraits<HeadDim, Element>;
  static constexpr char const* kFamily = "sm90";
  static constexpr Kind kKind = Kind::Cluster;
  static constexpr Features kTakes = feature::KeyLengths | feature::StartPositions | feature::FewerKeys |
                                     feature::Pages | (Appends ? feature::NewKeys | feature::RotaryEmbedding : 0);
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024);
  static constexpr auto kernel = &cluster_kernel<Traits, std::conditional_t<Appends, Cache, NoNewKeys>>;

  static bool takes_shape(Params const& p) { return is_narrow(p, HeadDim) && p.batch < 65536 && p.heads_kv < 65536; }
};

}  // namespace cutlass_ext::decode

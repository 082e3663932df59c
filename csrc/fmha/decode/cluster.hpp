// The decode kernel of few sequences: what lean.hpp does, with a cluster of CTAs for each key head of each sequence.
// Their parts meet in the shared memory of one of them: no counter, no workspace, and no length decides which tiles are
// whose. On an H200 1024 keys of 8 heads then take 7.5 us for 9.9 (an empty kernel 3.7). Needs compute capability 9.0.
// Instantiated by csrc/kernels/sm90_decode.cu; launched through decode_dispatch.cu.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "../sm90/pipeline.hpp"
#include "lean_tile.hpp"

namespace cutlass_ext::decode {

/// The warps of all CTAs have tiles of 16 keys in turn, each in a ring of its own. One CTA a multiprocessor, and as
/// much in flight as fits beside the parts: four warps, in twice the CTAs, take 15.8 us for 14.0 at 8192 keys.
template <int HeadDim, class Element>
struct ClusterTraits : LeanTile<HeadDim, Element> {
  using Tile = LeanTile<HeadDim, Element>;
  static constexpr int Warps = kClusterWarps, Threads = 32 * Warps, Stages = 384 / HeadDim;

  struct SharedStorage {
    typename Tile::Stage ring[Warps][Stages];
    float4 parts[kMaxCluster][Tile::Rows * Tile::Units];  // of all CTAs, in the first one
    float2 parts_ml[kMaxCluster][Tile::Rows];
    float2 ml[Warps][Tile::Rows];
    sm90::Barrier parts_there;
  };
};

/// Writes `x` to another CTA's shared memory and counts its bytes at a barrier there.
CUTE_DEVICE void push(uint32_t to, float4 const& x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}
CUTE_DEVICE void push(uint32_t to, float2 const& x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}

/// A cluster has all CTAs of x, for key head blockIdx.y of sequence blockIdx.z.
template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1) cluster_kernel(__grid_constant__ LeanParams const params) {
  using Tile = typename Traits::Tile;
  using Sums = LeanSums<Tile>;
  constexpr int Chunks = Tile::Chunks, Units = Tile::Units, Warps = Traits::Warps, Stages = Traits::Stages,
                TileKeys = Tile::TileKeys;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const size = gridDim.x, rank = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  int const step = size * Warps, place = rank * Warps + warp;  // the warp has tiles place, place + step, ...
  LeanRows<Tile> const rows{params, blockIdx.y};

  // The pages of the warp's tiles, in its lanes. They are asked for beside the length, which says later whether they
  // are used.
  static_assert(kClusterTurns < 32);
  auto const page_of = [&](int tile) {
    return tile * TileKeys < params.keys
               ? __ldg(params.block_table + batch * params.block_table_stride + (tile * TileKeys >> params.page_shift))
               : 0;
  };
  int pages = params.block_table ? page_of(place + lane * step) : 0;

  Visibility const visibility = params.visibility_of(batch);
  Range const tiles = visibility.tiles_of(0, params.n_q, TileKeys), seen_by_all = keys_of_all_rows(visibility);
  int const hidden = tiles.begin > place ? (tiles.begin - place + step - 1) / step : 0;
  int tile = place + hidden * step;
  if (params.block_table && hidden > 0) pages = page_of(tile + lane * step);

  if (threadIdx.x == 0 && rank == 0) {
    shared.parts_there.init(1);
    cutlass::arch::fence_barrier_init();
    shared.parts_there.arrive_and_expect_tx(size * rows.count() * (Units * sizeof(float4) + sizeof(float2)));
  }
  cute::cluster_arrive_relaxed();

  auto& ring = shared.ring[warp];
  uint4 query[Chunks / 4];
  Sums sums;
  sums.clear();
  // A turn asks for a tile and works on the one of Stages - 1 turns before.
  for (int turn = 0, stage = 0;; ++turn, tile += step) {
    if (tile < tiles.end) {
      int page = batch, row = tile * TileKeys;
      int const keys = visibility.len_kv - row;
      if (params.block_table) {
        page = __shfl_sync(0xffffffffu, pages, turn);
        row &= (1 << params.page_shift) - 1;
      }
      copy_tile<Tile>(ring[stage], params, head, page, row, keys);
    }
    cute::cp_async_fence();
    stage = stage + 1 == Stages ? 0 : stage + 1;
    if (turn == 0) {  // behind the first keys: before them they come 0.3 us later
      CUTE_UNROLL
      for (int c = 0; c < Chunks; c += 4) query[c / 4] = rows.query(batch, lane / 4, c + lane % 4);
    }
    if (turn < Stages - 1) continue;
    int const now = tile - (Stages - 1) * step;
    if (now >= tiles.end) break;
    cute::cp_async_wait<Stages - 1>();
    __syncwarp();
    sums.add(
        ring[stage], [&](int c) { return query[c / 4]; }, rows, visibility, seen_by_all, now * TileKeys, params.scale);
    __syncwarp();  // the stage may be copied to
  }

  // The warps' sums meet in shared memory, the CTAs' in that of the first.
  auto const scratch_of = [&](int w) { return reinterpret_cast<float4*>(shared.ring[w]); };
  sums.put(scratch_of(warp), shared.ml[warp], rows.count());
  __syncthreads();
  cute::cluster_wait();  // the first CTA's barrier is there
  auto const in_first = [&](void const* p) { return cute::set_block_rank(cute::cast_smem_ptr_to_uint(p), 0); };
  uint32_t const barrier = in_first(&shared.parts_there);
  for (unsigned index = threadIdx.x; index < rows.count() * Units; index += Traits::Threads) {
    unsigned const row = index / Units, unit = index % Units;
    LeanPart const sum = sum_of_parts<Warps>(
        Warps, [&](int w) { return shared.ml[w][row]; },
        [&](int w) { return scratch_of(w)[Sums::scratch_place(row, unit)]; });
    push(in_first(&shared.parts[rank][index]), sum.o, barrier);
    if (unit == 0) push(in_first(&shared.parts_ml[rank][row]), make_float2(sum.m, sum.l), barrier);
  }
  if (rank > 0) return;
  shared.parts_there.wait_for(0);
  for (unsigned index = threadIdx.x; index < rows.count() * Units; index += Traits::Threads) {
    unsigned const row = index / Units;
    rows.write(
        batch, row, index % Units,
        sum_of_parts<kMaxCluster>(
            size, [&](int i) { return shared.parts_ml[i][row]; }, [&](int i) { return shared.parts[i][index]; }));
  }
}

template <int HeadDim, class Element>
struct ClusterDecode {
  using Traits = ClusterTraits<HeadDim, Element>;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024);
  static constexpr auto kernel = &cluster_kernel<Traits>;

  cudaError_t operator()(DecodeParams const& params, cudaStream_t stream) const {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(params.cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(params.cluster, params.heads_kv, params.batch);
    config.blockDim = Traits::Threads;
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, LeanParams(params, Traits::TileKeys));
  }
};

}  // namespace cutlass_ext::decode

// FMHA on Hopper: one producer warp copies tiles with the tensor memory accelerator, consumer warpgroups of 64 query
// rows each multiply them with WGMMA. Softmax is hidden twice: warpgroups take turns on the tensor cores, and within one
// the next Q K^T is issued before this tile's softmax (FlashAttention-3, arXiv:2407.08608, section 3).
// Instantiated by csrc/kernels/sm90_*.cu; launched through dispatch.cu.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../online_softmax.hpp"
#include "../params.hpp"
#include "../scheduler.hpp"
#include "../score_mod.hpp"
#include "../visibility.hpp"
#include "tensor_map.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// Element offset of 16-byte chunk `chunk` of row `row` in a panel of `Rows` rows.
template <int Rows>
CUTE_HOST_DEVICE int chunk_offset(int row, int chunk) {
  return row * kPanel + (chunk ^ (row % 8)) * 8;
}

template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, half_t>) {
    __half2 const x = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  } else {
    __nv_bfloat162 const x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(x);
  }
}

/// The next work item of this CTA, for one lane. Whoever is free takes the next one; without a counter CTAs deal them out
/// to and fro, so that with the longest first everybody gets about as much.
struct Schedule {
  unsigned size;
  unsigned* counter;
  unsigned round = 0;
  /// At or past `size` once the work is done. The counter returns to 0 by itself: each CTA is told once that it is done.
  CUTE_DEVICE unsigned next() {
    if (counter) return atomicInc(counter, size + gridDim.x - 1);
    unsigned const turn = round++;
    return turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

/// Copies `Rows` rows of one head; `barrier` counts the bytes as they land.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_panels(CUtensorMap const& map, Barrier& barrier, Element* smem, int row, int head, int batch,
                             TMA::CacheHintSm90 hint) {
  barrier.arrive_and_expect_tx(Rows * Cols * sizeof(Element));
  CUTE_UNROLL
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), static_cast<uint64_t>(hint),
                           smem + panel * Rows * kPanel, panel * kPanel, row, head, batch);
  }
}

/// The producer warp: works out the jobs of this CTA and keeps the rings of Q, K and V full.
template <class Traits>
CUTE_DEVICE void produce(ForwardParams const& params, TensorMaps const& maps, typename Traits::SharedStorage& shared) {
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c;
  int const lane = threadIdx.x % 32;
  bool const leader = lane == 0;
  Scheduler const scheduler(params.batch, params.heads_q, params.n_q, B_r, params.num_splits, params.section);
  RingPosition<Traits::StagesJobs> slot;
  RingPosition<Traits::StagesQ> q;
  RingPosition<Traits::Stages> k, v;
  int const heads_per_kv = params.heads_q / params.heads_kv;
  Schedule schedule{unsigned(scheduler.size()), params.work_counter};
  unsigned next_index = leader ? schedule.next() : 0;

  struct Source {  // where a job's tiles lie; a job without any has one step, in which nothing is copied
    Range tiles;
    int batch, head, head_kv, row0, key_row0;
    bool copies, exists;
  };
  // Works out the next job and hands it to the consumers.
  auto next_job = [&]() -> Source {
    unsigned const index = __shfl_sync(0xffffffffu, next_index, 0);
    Job job{};
    job.exists = index < schedule.size;
    int key_row0 = 0;
    if (job.exists) {
      if (leader) next_index = schedule.next();  // a trip to L2, over when the next job is asked for
      job.work = scheduler(index, B_r);
      job.visibility = visibility_of(params, job.work.batch, &key_row0);
      job.tiles =
          split_range(job.visibility.tiles_of(job.work.row0, B_r, B_c), params.num_splits, job.work.split);
    }
    shared.job_empty[slot.stage].wait_for(slot.phase ^ 1);
    Job& out = shared.jobs[slot.stage];
    if (leader) out.work = job.work, out.visibility = job.visibility, out.tiles = job.tiles, out.exists = job.exists;
    if (job.exists && lane < Traits::Consumers) {
      int const row0 = job.work.row0 + lane * kAtomRows;
      int const end = job.visibility.tiles_of(row0, kAtomRows, B_c).end;
      out.rows[lane].end = end <= job.tiles.begin ? job.tiles.begin + 1 : end < job.tiles.end ? end : job.tiles.end;
      out.rows[lane].unmasked = job.visibility.unmasked_tiles_of(row0, kAtomRows, B_c);
    }
    __syncwarp();
    if (leader) shared.job_full[slot.stage].arrive();
    slot.advance();
    bool const copies = job.tiles.size() > 0;
    return {copies ? job.tiles : Range{0, 1}, job.work.batch,  job.work.head, job.work.head / heads_per_kv,
            job.work.row0, key_row0, copies, job.exists};
  };
  auto load_q = [&](Source const& job) {
    shared.q_empty[q.stage].wait_for(q.phase ^ 1);
    if (leader) {
      copy_panels<B_r, Traits::HeadDim>(maps.q, shared.q_full[q.stage], shared.q + q.stage * B_r * Traits::HeadDim,
                                        job.row0, job.head, job.batch, TMA::CacheHintSm90::EVICT_FIRST);
    }
    q.advance();
  };
  auto load_k = [&](Source const& job, int tile) {
    shared.k_empty[k.stage].wait_for(k.phase ^ 1);
    if (leader) {
      copy_panels<B_c, Traits::HeadDim>(maps.k, shared.k_full[k.stage], shared.k + k.stage * B_c * Traits::HeadDim,
                                        job.key_row0 + tile * B_c, job.head_kv, job.batch,
                                        TMA::CacheHintSm90::EVICT_LAST);
    }
    k.advance();
  };
  auto load_v = [&](Source const& job, int tile) {
    shared.v_empty[v.stage].wait_for(v.phase ^ 1);
    if (leader) {
      copy_panels<B_c, Traits::HeadDimV>(maps.v, shared.v_full[v.stage], shared.v + v.stage * B_c * Traits::HeadDimV,
                                         job.key_row0 + tile * B_c, job.head_kv, job.batch,
                                         TMA::CacheHintSm90::EVICT_LAST);
    }
    v.advance();
  };

  // Copies are issued in the order of their use: K is a tile ahead of V, across jobs too.
  Source job{};
  job.tiles = {0, 1};
  job.exists = true;
  while (job.exists) {
    Source next{};
    for (int tile = job.tiles.end - 1; tile >= job.tiles.begin; --tile) {
      bool const last = tile == job.tiles.begin;
      if (last) next = next_job();
      if (last ? next.copies : job.copies) {
        if (Traits::StagesQ > 1 && last) load_q(next);
        load_k(last ? next : job, last ? next.tiles.end - 1 : tile - 1);
      }
      if (job.copies) load_v(job, tile);
      if (Traits::StagesQ == 1 && last && next.copies) load_q(next);
    }
    job = next;
  }
}

/// Turns of the consumer warpgroups on the tensor cores, handed round by named barriers.
template <class Traits>
struct Turns {
  int warpgroup;
  CUTE_DEVICE void begin() const {
    if (Traits::PingPong && warpgroup == Traits::Consumers - 1) pass();
  }
  CUTE_DEVICE void wait() const {
    if constexpr (Traits::PingPong) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup);
  }
  CUTE_DEVICE void pass() const {
    if constexpr (Traits::PingPong)
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, warpgroup + 1 == Traits::Consumers ? 0 : warpgroup + 1);
  }
};

/// C += A B, issued and not waited for.
template <bool Zero, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma mma, A const& a, B const& b, C& c) {
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = Zero ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int i = 0; i < size<2>(a); ++i) {
    cute::gemm(mma, a(_, _, i), b(_, _, i), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

/// The rows and columns that a thread holds of an accumulator of 64 x N.
template <class Accumulator>
CUTE_DEVICE auto rows_and_columns(Accumulator& c) {
  constexpr int N = decltype(size(c))::value / 4;
  return make_tensor(c.data(), Layout<Shape<_2, Shape<_2, Int<N>>>, Stride<_2, Stride<_1, _4>>>{});
}

/// Writes the warp's part of O and lse, or of a split's.
template <class Traits, class OutTensor, class Softmax>
CUTE_DEVICE void store(ForwardParams const& params, Job const& job, OutTensor& O, Softmax& softmax,
                       typename Traits::Element* staging, int warp_row, int lane) {
  using Element = typename Traits::Element;
  int const batch = job.work.batch, head = job.work.head;
  bool const split = params.num_splits > 1;
  float const sink_log2 = params.sink && !split ? params.sink[head] * kLog2e : -INFINITY;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = job.work.row0 + warp_row + lane / 4 + i * 8;
    float const lse = softmax.finish(i, O, sink_log2);
    bool const exists = row < params.n_q;
    int64_t const index = (int64_t(batch) * params.heads_q + head) * params.n_q + row;
    if (split) {
      int64_t const partial = job.work.split * (int64_t(params.batch) * params.heads_q * params.n_q) + index;
      float* to = params.o_partial + partial * params.head_dim_v;
      if (exists && lane % 4 == 0) params.lse_partial[partial] = lse;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(O); j += 2) {
        int const col = j / 2 * 8 + lane % 4 * 2;
        if (exists && col < params.head_dim_v) *reinterpret_cast<float2*>(to + col) = make_float2(O(i, j), O(i, j + 1));
      }
      continue;
    }
    if (exists && lane % 4 == 0) params.lse[index] = lse;
  }
  if (split) return;
  // Through 16 rows of shared memory that are the warp's own, so that global memory is written 16 bytes a lane.
  Element* const to = static_cast<Element*>(params.o) + batch * params.o_stride.batch + head * params.o_stride.head;
  CUTE_UNROLL
  for (int panel = 0; panel < Traits::HeadDimV / kPanel; ++panel) {
    CUTE_UNROLL
    for (int n = 0; n < kPanel / 16; ++n) {
      int const j = panel * kPanel / 4 + n * 4;
      SM90_U32x4_STSM_N::copy(pack<Element>(O(0, j), O(0, j + 1)), pack<Element>(O(1, j), O(1, j + 1)),
                              pack<Element>(O(0, j + 2), O(0, j + 3)), pack<Element>(O(1, j + 2), O(1, j + 3)),
                              reinterpret_cast<uint128_t&>(staging[chunk_offset<16>(lane % 16, 2 * n + lane / 16)]));
    }
    __syncwarp();
    CUTE_UNROLL
    for (int pass = 0; pass < 4; ++pass) {
      int const row = pass * 4 + lane / 8, col = panel * kPanel + lane % 8 * 8;
      int const global_row = job.work.row0 + warp_row + row;
      if (global_row < params.n_q && col < params.head_dim_v) {
        *reinterpret_cast<uint4*>(to + global_row * params.o_stride.row + col) =
            *reinterpret_cast<uint4 const*>(&staging[chunk_offset<16>(row, lane % 8)]);
      }
    }
    __syncwarp();
  }
}

/// The same where no key is visible.
template <class Traits>
CUTE_DEVICE void store_empty(ForwardParams const& params, Job const& job, typename Traits::Element* staging,
                             int warp_row, int lane) {
  Tensor O = make_tensor<float>(Shape<_2, Int<Traits::HeadDimV / 4>>{});
  clear(O);
  OnlineSoftmax<2, 4, 1> softmax;
  store<Traits>(params, job, O, softmax, staging, warp_row, lane);
}

/// A consumer warpgroup: S = Q K^T, softmax, O += P V for its 64 query rows of every job.
template <class Traits>
CUTE_DEVICE void consume(ForwardParams const& params, typename Traits::SharedStorage& shared, int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int B_c = Traits::B_c;
  int const lane = threadIdx.x % 32, warp_row = warpgroup * kAtomRows + threadIdx.x % kWarpgroup / 32 * 16;

  Element* const staging = shared.o + warp_row * kPanel;

  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto thread_qk = mma_qk.get_slice(0);  // descriptors are the warpgroup's: no thread index in them
  auto thread_pv = mma_pv.get_slice(0);
  Tensor sQ = local_tile(make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{}),
                         Shape<Int<kAtomRows>, Int<Traits::HeadDim>>{}, make_coord(warpgroup, _0{}));
  Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{});
  Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutV{});
  Tensor fQ = thread_qk.partition_fragment_A(sQ);
  Tensor fK = thread_qk.partition_fragment_B(sK);
  Tensor fV = thread_pv.partition_fragment_B(sV);
  Tensor cS = partition_fragment_C(mma_qk, Shape<Int<kAtomRows>, Int<B_c>>{});
  Tensor cO = partition_fragment_C(mma_pv, Shape<Int<kAtomRows>, Int<Traits::HeadDimV>>{});
  Tensor fP = make_tensor<Element>(partition_shape_A(mma_pv, Shape<Int<kAtomRows>, Int<B_c>>{}));
  Tensor S = rows_and_columns(cS);
  Tensor O = rows_and_columns(cO);
  Tensor rescale = make_tensor<float>(Shape<_2>{});

  RingPosition<Traits::StagesJobs> slot;
  RingPosition<Traits::StagesQ> q;
  RingPosition<Traits::Stages> k, v;
  Turns<Traits> const turns{warpgroup};
  float const query_scale = ScoreMod::query_scale(params);

  auto release = [&](Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto issue_qk = [&] { gemm_async<true>(mma_qk, fQ(_, _, _, q.stage), fK(_, _, _, k.stage), cS); };
  auto issue_pv = [&] {
    gemm_async<false>(mma_pv, fP, fV(_, _, _, v.stage), cO);
  };
  auto release_v = [&] {
    warpgroup_fence_operand(cO);
    release(shared.v_empty[v.stage]);
    v.advance();
  };
  auto convert_p = [&] {
    Tensor words = recast<uint32_t>(fP);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(cS(2 * i), cS(2 * i + 1));
  };

  // Moves on to the next job that sees a key; false if there is none.
  auto next_job = [&] {
    while (true) {
      shared.job_full[slot.stage].wait_for(slot.phase);
      Job const& job = shared.jobs[slot.stage];
      if (!job.exists) return false;
      if (job.tiles.size() > 0) return true;
      store_empty<Traits>(params, job, staging, warp_row, lane);
      release(shared.job_empty[slot.stage]);
      slot.advance();
    }
  };
  // Issues the first Q K^T of a job; without one, of whatever the buffers hold: WGMMAs in flight forbid a branch here.
  auto begin_job = [&](bool exists) {
    if (exists) {
      Job const& job = shared.jobs[slot.stage];
      for (int tile = job.tiles.end; tile > job.rows[warpgroup].end; --tile) {
        shared.k_full[k.stage].wait_for(k.phase);
        release(shared.k_empty[k.stage]);
        k.advance();
        turns.wait();
        turns.pass();
      }
      shared.q_full[q.stage].wait_for(q.phase);
      shared.k_full[k.stage].wait_for(k.phase);
    }
    turns.wait();
    issue_qk();
    turns.pass();
  };

  turns.begin();
  bool more = next_job();
  begin_job(more);
  warpgroup_wait<0>();
  warpgroup_fence_operand(cS);
  while (more) {
    int const this_slot = slot.stage;
    Job const& job = shared.jobs[this_slot];
    int const begin = job.tiles.begin, end = job.rows[warpgroup].end;
    Range const unmasked = job.rows[warpgroup].unmasked;
    slot.advance();
    OnlineSoftmax<2, 4, 1, 8> softmax;
    // From the products of Q and the keys of `tile`, just arrived, to P.
    auto soften = [&](int tile) {
      release(shared.k_empty[k.stage]);
      k.advance();
      if (tile == begin) {
        release(shared.q_empty[q.stage]);
        q.advance();
      }
      if (unmasked.contains(tile)) {
        softmax.template update<Traits::Polynomial, std::is_same_v<Element, half_t> ? 4 : 3>(S, rescale, query_scale);
      } else {
        int const first_key = tile * B_c + lane % 4 * 2;
        mask(S, job.visibility.counted_from(first_key), job.work.row0 + warp_row + lane / 4, [](int i) { return i * 8; },
             [](int j) { return j / 2 * 8 + j % 2; });
        softmax.update(S, rescale, query_scale);
      }
    };
    soften(end - 1);
    convert_p();
    clear(cO);
    for (int tile = job.tiles.end; tile > end; --tile) {
      shared.v_full[v.stage].wait_for(v.phase);
      release(shared.v_empty[v.stage]);
      v.advance();
    }
    for (int tile = end - 2; tile >= begin; --tile) {
      shared.k_full[k.stage].wait_for(k.phase);
      turns.wait();
      issue_qk();
      shared.v_full[v.stage].wait_for(v.phase);
      issue_pv();
      turns.pass();
      warpgroup_wait<1>();
      warpgroup_fence_operand(cS);
      soften(tile);
      // The branch also keeps the compiler from moving the softmax past the wait for P V, which it is to hide.
      if (__any_sync(0xffffffffu, rescale(0) != 1.f || rescale(1) != 1.f)) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(cO);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < size<1>(O); ++j) O(i, j) *= rescale(i);
        }
      }
      warpgroup_wait<0>();
      release_v();
      convert_p();
    }
    shared.v_full[v.stage].wait_for(v.phase);
    turns.wait();
    issue_pv();
    turns.pass();
    more = next_job();
    begin_job(more);  // while this job's output is stored
    warpgroup_wait<1>();
    release_v();
    store<Traits>(params, job, O, softmax, staging, warp_row, lane);
    release(shared.job_empty[this_slot]);
    warpgroup_wait<0>();
    warpgroup_fence_operand(cS);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    fmha_kernel(__grid_constant__ ForwardParams const params, __grid_constant__ TensorMaps const maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  constexpr int kReaders = 4 * Traits::Consumers;  // every consumer warp says when it is done with a buffer
  if (threadIdx.x == 0) {
    shared.v_tail.init(1);
    for (int s = 0; s < Traits::StagesJobs; ++s) shared.job_full[s].init(1), shared.job_empty[s].init(kReaders);
    for (int s = 0; s < Traits::StagesQ; ++s) shared.q_full[s].init(1), shared.q_empty[s].init(kReaders);
    for (int s = 0; s < Traits::Stages; ++s) {
      shared.k_full[s].init(1), shared.k_empty[s].init(kReaders);
      shared.v_full[s].init(1), shared.v_empty[s].init(kReaders);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (threadIdx.x < 32) produce<Traits>(params, maps, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    consume<Traits>(params, shared, warpgroup - 1);
  }
}

/// The kernel of one tile shape: `FMHA<...>{}(params, stream)` launches it, persistent, for every query tile and split.
template <int B_r, int B_c, int HeadDim, int HeadDimV, class Element, int Stages, int StagesQ, bool PingPong, int Variant = 0>
struct FMHA {
  using Traits = sm90::Traits<B_r, B_c, HeadDim, HeadDimV, Element, Stages, StagesQ, PingPong, Variant>;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &fmha_kernel<Traits>;

  cudaError_t operator()(ForwardParams const& params, cudaStream_t stream) const {
    int64_t const items = Scheduler(params.batch, params.heads_q, params.n_q, B_r, params.num_splits, params.section).size();
    if (items == 0) return cudaSuccess;
    TensorMaps maps;
    CUtensorMapDataType const dtype =
        std::is_same_v<Element, half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (cudaError_t e = make_tensor_map(&maps.q, dtype, params.q, params.q_stride, params.batch, params.n_q,
                                        params.heads_q, params.head_dim, B_r))
      return e;
    if (cudaError_t e = make_tensor_map(&maps.k, dtype, params.k, params.k_stride, params.batch, params.n_kv,
                                        params.heads_kv, params.head_dim, B_c))
      return e;
    if (cudaError_t e = make_tensor_map(&maps.v, dtype, params.v, params.v_stride, params.batch, params.n_kv,
                                        params.heads_kv, params.head_dim_v, B_c))
      return e;
    unsigned const grid = static_cast<unsigned>(items < params.multiprocessors ? items : params.multiprocessors);
    kernel<<<grid, Traits::Threads, kSharedBytes, stream>>>(params, maps);
    return cudaGetLastError();
  }
};

}  // namespace cutlass_ext::sm90

// Decoding: attention of a few query rows to a long cache, bound by the memory that holds it. The query rows of all
// heads that share a key head are packed into one tile, so that each key is read once; the keys of all sequences are
// shared out among the CTAs; partial results are merged in key order by the last CTA of a sequence to finish
// (Flash-Decoding's split of the keys, in one launch). Instantiated by csrc/kernels/decode_*.cu; launched through
// decode_dispatch.cu.
#pragma once

#include <cuda_runtime.h>

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "../features.hpp"
#include "../softmax.hpp"
#include "../score.hpp"
#include "math.hpp"
#include "merge.hpp"
#include "params.hpp"
#include "traits.hpp"
#include "walk.hpp"

namespace cutlass_ext::decode {

/// A warp's way through the tiles ahead of those that it works on: which tile it copies next, and from where.
template <class Traits>
class Loader {
  using Element = typename Traits::Element;
  using Stage = typename Traits::Stage;

 public:
  /// `walk` is the warp's own, in shared memory: only a change of sequence needs it.
  CUTE_DEVICE Loader(Params const& params, Walk<Traits::TileKeys>& walk, int head, int warp)
      : params_(params),
        walk_(walk),
        head_(head),
        key_warp_(Traits::RowWarps == 1 ? warp : 0),
        row0_(Traits::RowWarps == 1 ? 0 : warp * Traits::LoadRows),
        lane_(threadIdx.x % 32) {
    enter();
    settle(true);
  }

  /// Starts the copy of the next tile of K and V, if there is one, and commits a group either way.
  CUTE_DEVICE void load(Stage& stage) {
    if (tile_ < tile_end_) {
      Element const *k, *v;
      rows(k, v);
      copy(stage.k, k, params_.head_dim);
      copy(stage.v, v, params_.head_dim_v);
      tile_ += Traits::KeyWarps;
      settle(false);
    }
    cp_async_fence();
  }

 private:
  CUTE_DEVICE void enter() {
    Range const tiles = walk_.done() ? Range{0, 0} : walk_.here();
    tile_ = tiles.begin + key_warp_;
    tile_end_ = tiles.end;
    Sequence const& s = walk_.sequence();
    leftpad_ = s.k_row0;
    cached_ = s.cached;
    len_ = s.visibility.len_kv;
    if (!params_.block_table && !walk_.done())
      page_ = params_.batch_idx ? params_.batch_idx[walk_.batch()] : walk_.batch();
  }

  /// Moves on to the next sequence where this one has no more tiles for the warp. Pages are asked for two tiles ahead:
  /// under load their table answers later than a tile arrives (page size 16: 135 us for 126 on an H200).
  CUTE_DEVICE void settle(bool entered) {
    while (tile_ >= tile_end_ && !walk_.done()) {
      __syncwarp();
      if (lane_ == 0) walk_.next(params_);
      __syncwarp();
      enter();
      entered = true;
    }
    if (params_.block_table) {
      page_ = entered ? page_of(tile_) : next_page_;
      next_page_ = page_of(tile_ + Traits::KeyWarps);
    }
  }

  /// The page of the lane's row of a tile.
  CUTE_DEVICE int page_of(int tile) const {
    int const key = tile * Traits::TileKeys + row0_ + lane_ % Traits::LoadRows;
    return tile < tile_end_ && key < cached_
               ? params_
                     .block_table[walk_.batch() * params_.block_table_stride + ((key + leftpad_) >> params_.page_shift)]
               : 0;
  }

  CUTE_DEVICE int key() const { return tile_ * Traits::TileKeys + row0_ + lane_ % Traits::LoadRows; }

  /// The row of K and of V that the lane speaks for; null where there is none.
  CUTE_DEVICE void rows(Element const*& k, Element const*& v) const {
    int const key = this->key();
    k = v = nullptr;
    if (key < cached_) {
      int const row = (key + leftpad_) & ((1u << params_.page_shift) - 1);
      k = static_cast<Element const*>(params_.k) + int64_t(page_) * params_.k_stride.batch +
          row * params_.k_stride.row + head_ * params_.k_stride.head;
      v = static_cast<Element const*>(params_.v) + int64_t(page_) * params_.v_stride.batch +
          row * params_.v_stride.row + head_ * params_.v_stride.head;
    } else if (params_.n_new > 0 && key < len_) {
      k = static_cast<Element const*>(params_.k_new) + walk_.batch() * params_.k_new_stride.batch +
          (key - cached_) * params_.k_new_stride.row + head_ * params_.k_new_stride.head;
      v = static_cast<Element const*>(params_.v_new) + walk_.batch() * params_.v_new_stride.batch +
          (key - cached_) * params_.v_new_stride.row + head_ * params_.v_new_stride.head;
    }
  }

  CUTE_DEVICE void copy(Element* tile, Element const* lanes_row, int cols) const {
    CUTE_UNROLL
    for (int pass = 0; pass < Traits::LoadRows / 4; ++pass) {
      int const row = pass * 4 + lane_ / 8;
      auto const* from = reinterpret_cast<Element const*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(lanes_row), row));
      CUTE_UNROLL
      for (int panel = 0; panel < Traits::Panels; ++panel) {
        int const col = panel * Traits::PanelCols + lane_ % 8 * Traits::Vector;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(from + col),
            *reinterpret_cast<cute::uint128_t*>(
                tile + chunk_offset<Element, Traits::TileKeys>(row0_ + row, panel * 8 + lane_ % 8)),
            from != nullptr && col < cols);
      }
    }
  }

  Params const& params_;
  Walk<Traits::TileKeys>& walk_;
  int head_, key_warp_, row0_, lane_;
  int tile_, tile_end_;
  int leftpad_, cached_, len_;    // of the sequence: see Sequence
  int page_ = 0, next_page_ = 0;  // of the lane's row, now and in the next tile; or the cache's batch index
};

/// The row of the cache that holds key `key` of a sequence.
template <class Element, int TileKeys>
CUTE_DEVICE Element* cache_row(Params const& params, void const* cache, Strides const& stride,
                               Walk<TileKeys> const& walk, int head, int key) {
  int const row = key + walk.sequence().k_row0, batch = walk.batch();
  int64_t const page = params.block_table
                           ? params.block_table[batch * params.block_table_stride + (row >> params.page_shift)]
                       : params.batch_idx ? params.batch_idx[batch]
                                          : batch;
  return static_cast<Element*>(const_cast<void*>(cache)) + page * stride.batch +
         (row & ((1u << params.page_shift) - 1)) * stride.row + head * stride.head;
}

/// Writes the new keys (rotated) and values among key tiles `tiles` to the cache. The CTAs of all row tiles do, and
/// write the same.
template <class Traits>
CUTE_DEVICE void append(Params const& params, Walk<Traits::TileKeys> const& walk, int head, Range tiles) {
  using Element = typename Traits::Element;
  constexpr int Chunks = Traits::HeadDim / Traits::Vector;
  int const cached = walk.sequence().cached;
  int const begin = max(cached, tiles.begin * Traits::TileKeys);
  int const end = min(walk.sequence().visibility.len_kv, tiles.end * Traits::TileKeys);
  CUTE_NO_UNROLL
  for (int index = threadIdx.x; index < (end - begin) * Chunks; index += Traits::Threads) {
    int const key = begin + index / Chunks, chunk = index % Chunks, col = chunk * Traits::Vector;
    auto const new_row = [&](void const* base, Strides const& stride) {
      return static_cast<Element const*>(base) + walk.batch() * stride.batch + (key - cached) * stride.row +
             head * stride.head;
    };
    if (col < params.head_dim) {
      Element const* row = new_row(params.k_new, params.k_new_stride);
      *reinterpret_cast<uint4*>(cache_row<Element>(params, params.k, params.k_stride, walk, head, key) + col) =
          params.rotary.cos && col < params.rotary.dim
              ? rotated_chunk<Element>(
                    params.rotary, key, chunk, [&](int c) { return static_cast<float>(row[c]); })
              : *reinterpret_cast<uint4 const*>(row + col);
    }
    if (col < params.head_dim_v) {
      *reinterpret_cast<uint4*>(cache_row<Element>(params, params.v, params.v_stride, walk, head, key) + col) =
          *reinterpret_cast<uint4 const*>(new_row(params.v_new, params.v_new_stride) + col);
    }
  }
}

/// Puts the rotated new keys in the place of those that the warp has copied to a tile of K. `append` has left them in
/// the cache.
template <class Traits>
CUTE_DEVICE void take_rotated(Params const& params, Walk<Traits::TileKeys> const& walk, int head, int first_key,
                              typename Traits::Element* tile) {
  using Element = typename Traits::Element;
  int const lane = threadIdx.x % 32, row0 = Traits::RowWarps == 1 ? 0 : threadIdx.x / 32 * Traits::LoadRows;
  int const begin = max(walk.sequence().cached, first_key + row0);
  int const end = min(walk.sequence().visibility.len_kv, first_key + row0 + Traits::LoadRows);
  CUTE_NO_UNROLL
  for (int key = begin; key < end; ++key) {
    Element const* row = cache_row<Element>(params, params.k, params.k_stride, walk, head, key);
    for (int chunk = lane; chunk * Traits::Vector < params.head_dim; chunk += 32) {
      *reinterpret_cast<uint4*>(tile + chunk_offset<Element, Traits::TileKeys>(key - first_key, chunk)) =
          *reinterpret_cast<uint4 const*>(row + chunk * Traits::Vector);
    }
  }
}

/// The first work of a CTA. The lengths are on the device: every CTA sums up the tiles of all sequences before its own.
template <class Traits>
CUTE_DEVICE Walk<Traits::TileKeys> first_walk(Params const& params, unsigned group, Tokens const& tokens,
                                              typename Traits::SharedStorage& shared) {
  constexpr int TileKeys = Traits::TileKeys;
  constexpr unsigned MinChunk = kMinChunkKeys > TileKeys ? kMinChunkKeys / TileKeys : 1;
  if (params.fixed_splits) return Walk<TileKeys>::of_split(params, group, tokens);
  if (all_alike(params)) {
    unsigned const tiles = tiles_of(sequence_of(params, 0), tokens, TileKeys).size();
    Partition const partition(params.batch * tiles, params.groups, MinChunk);
    unsigned const batch = tiles > 0 ? partition.begin_of(group) / tiles : 0;
    return Walk<TileKeys>::of_chunk(params, partition, group, batch, batch * tiles, tokens);
  }

  unsigned const each = (params.batch + Traits::Threads - 1) / Traits::Threads, lane = threadIdx.x % 32;
  unsigned const begin = threadIdx.x * each, end = min(begin + each, unsigned(params.batch));
  auto const tiles_of_batch = [&](unsigned b) -> unsigned {
    return tiles_of(sequence_of(params, b), tokens, TileKeys).size();
  };
  unsigned sum = 0;
  for (unsigned b = begin; b < end; ++b) sum += tiles_of_batch(b);
  unsigned before = sum;  // tiles of the lower lanes' sequences, with the lane's own
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    unsigned const lower = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += lower;
  }
  if (lane == 31) shared.scan[threadIdx.x / 32] = before;
  __syncthreads();
  before -= sum;
  unsigned total = 0;
  CUTE_UNROLL
  for (int w = 0; w < Traits::Warps; ++w) {
    if (w < threadIdx.x / 32) before += shared.scan[w];
    total += shared.scan[w];
  }
  Partition const partition(total, params.groups, MinChunk);
  unsigned const at = partition.begin_of(group);
  if (at >= before && at < before + sum) {
    for (unsigned b = begin; b < end; ++b) {
      unsigned const tiles = tiles_of_batch(b);
      if (at < before + tiles) {
        shared.found_batch = b;
        shared.found_first = before;
        break;
      }
      before += tiles;
    }
  }
  __syncthreads();
  bool const found = at < total;
  return Walk<TileKeys>::of_chunk(params, partition, group, found ? shared.found_batch : 0,
                                  found ? shared.found_first : 0, tokens);
}

/// Where the packed query rows of a CTA's tile end up: row r is query row r / G of head `head` * G + r % G.
template <class Traits>
struct Output {
  using Element = typename Traits::Element;
  Params const& params;
  Place const& place;
  /// Rows of the tile.
  CUTE_DEVICE int rows() const {
    return min(Traits::Rows, params.n_q * params.heads_per_kv.divisor - place.row_tile * Traits::Rows);
  }
  CUTE_DEVICE int token(int row) const {
    unsigned const packed = place.row_tile * Traits::Rows + row;
    return params.heads_per_kv.div(packed);
  }
  CUTE_DEVICE int head(int row) const {
    return (place.head - token(row)) * params.heads_per_kv.divisor + place.row_tile * Traits::Rows + row;
  }
  CUTE_DEVICE Element* out(int batch, int row) const {
    return static_cast<Element*>(params.o) + batch * params.o_stride.batch + token(row) * params.o_stride.row +
           head(row) * params.o_stride.head;
  }

  /// Writes the row's lse, if it was asked for, and returns what brings its sum of P V to its output.
  CUTE_DEVICE float finish(int batch, int row, float m, float l, bool write) const {
    float const sink = params.sink ? params.sink[head(row)] * kLog2e : -INFINITY;
    float const m_all = fmaxf(m, sink);
    float const base = m_all == -INFINITY ? 0.f : m_all;
    float const rescale = exp2_approx(m - base), sum = fmaf(l, rescale, exp2_approx(sink - base));
    if (write && params.lse) {
      params.lse[(int64_t(batch) * params.heads_q + head(row)) * params.n_q + token(row)] =
          sum == 0.f ? -INFINITY : (base + log2f(sum)) * kLn2;
    }
    return sum == 0.f ? 0.f : rescale * reciprocal(sum);
  }

  CUTE_DEVICE static void store(Element* to, float4 x) {
    if constexpr (Traits::TensorCores) {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack<Element>(x.x, x.y), pack<Element>(x.z, x.w));
    } else {
      *reinterpret_cast<float4*>(to) = x;
    }
  }
};

/// Chunk `chunk` of row `row` of the tile of Q, rotated; zeros where it does not exist.
template <class Traits>
CUTE_DEVICE uint4 query_chunk(Params const& params, Output<Traits> const& output, Walk<Traits::TileKeys> const& walk,
                              int row, int chunk, bool rotate) {
  using Element = typename Traits::Element;
  if (row >= output.rows() || chunk * Traits::Vector >= params.head_dim) return make_uint4(0, 0, 0, 0);
  int const token = output.token(row);
  Element const* const from = static_cast<Element const*>(params.q) + walk.batch() * params.q_stride.batch +
                              token * params.q_stride.row + output.head(row) * params.q_stride.head;
  if (rotate && chunk * Traits::Vector < params.rotary.dim) {
    bool const moving = params.window_left >= 0 || params.window_right >= 0;
    return rotated_chunk<Element>(params.rotary, walk.sequence().cached + (moving ? token : 0), chunk,
                                  [&](int c) { return static_cast<float>(from[c]); });
  }
  return *reinterpret_cast<uint4 const*>(from + chunk * Traits::Vector);
}

/// The tile of Q on its way from global to shared memory, in registers: under way before the copies of K and V queue
/// up in front of it (7 us for it on an H200 where it was asked for after them).
template <class Traits>
class Query {
  using Element = typename Traits::Element;
  static constexpr int Chunks = Traits::HeadDim / Traits::Vector,
                       Each = Traits::Rows * Chunks / Traits::Threads;  // chunks of a thread
  static constexpr bool Ahead = Each <= 2;                              // registers for more than 2 are not there
  uint4 ahead_[Ahead ? Each : 1];

 public:
  /// Asks for the rows of the sequence that `walk` stands at.
  CUTE_DEVICE void ask(Params const& params, Output<Traits> const& output, Walk<Traits::TileKeys> const& walk) {
    if constexpr (Ahead) {
      CUTE_UNROLL
      for (int i = 0; i < Each; ++i) {
        int const index = i * Traits::Threads + threadIdx.x;
        ahead_[i] = query_chunk<Traits>(params, output, walk, index / Chunks, index % Chunks, false);
      }
    }
  }

  /// Puts them to `sQ`, tiles of 16 rows; rotated ones, which take chunks from two places, are read here.
  CUTE_DEVICE void put(Params const& params, Output<Traits> const& output, Walk<Traits::TileKeys> const& walk,
                       Element* sQ) const {
    if (Ahead && !params.rotary.cos) {
      CUTE_UNROLL
      for (int i = 0; i < Each; ++i) put_chunk(sQ, i * Traits::Threads + threadIdx.x, ahead_[Ahead ? i : 0]);
    } else if (!params.rotary.cos) {
#pragma unroll 2
      for (int index = threadIdx.x; index < Traits::Rows * Chunks; index += Traits::Threads)
        put_chunk(sQ, index, query_chunk<Traits>(params, output, walk, index / Chunks, index % Chunks, false));
    } else {
      CUTE_NO_UNROLL
      for (int index = threadIdx.x; index < Traits::Rows * Chunks; index += Traits::Threads)
        put_chunk(sQ, index, query_chunk<Traits>(params, output, walk, index / Chunks, index % Chunks, true));
    }
  }

 private:
  CUTE_DEVICE static void put_chunk(Element* sQ, int index, uint4 const& x) {
    int const row = index / Chunks;
    *reinterpret_cast<uint4*>(sQ + row / kWarpRows * kWarpRows * Traits::HeadDim +
                              chunk_offset<Element, kWarpRows>(row % kWarpRows, index % Chunks)) = x;
  }
};

CUTE_DEVICE float4 scaled(float4 const& x, float f) { return make_float4(x.x * f, x.y * f, x.z * f, x.w * f); }

/// Where part `part` of a sequence left its sums (not normalised, relative to m), and each row's m and l.
template <class Traits>
struct Partial {
  float* o;
  float2* ml;

  CUTE_DEVICE Partial(Params const& params, Place const& place, Work const& work, unsigned part) {
    int64_t const cta = int64_t(work.first_slot_group + part) * place.lanes + place.lane;
    int64_t const slot = params.fixed_splits ? cta : kSlots * cta + (part == 0 && work.begins_inside);
    o = params.o_partial + slot * Traits::Rows * params.head_dim_v;
    ml = reinterpret_cast<float2*>(params.lse_partial) + slot * Traits::Rows;
  }
};

/// Merges the parts of a sequence, in key order, a warp a row, through `scratch`, as large as the warp's share of a
/// stage. All copies of a batch are under way before the first is waited for (one load after the other took 8 us for 33
/// parts on an H200), and the loops stay loops: code that runs once costs its fetch.
template <class Traits>
CUTE_DEVICE void merge_parts(Params const& params, Place const& place, Work const& work, Output<Traits> const& output,
                             float* scratch) {
  constexpr int HeadDim = Traits::HeadDim, Turns = (HeadDim + 127) / 128,
                Batch = sizeof(typename Traits::Stage) / Traits::RowWarps / (HeadDim * sizeof(float));
  static_assert(32 % Batch == 0);
  unsigned const lane = threadIdx.x % 32;
  int64_t const stride = int64_t(kSlots - params.fixed_splits) * place.lanes * Traits::Rows;  // from part to part
  Partial<Traits> const first(params, place, work, 0), second(params, place, work, 1);
  auto const ml_of = [&](int row, unsigned part) {
    float2 const* ml = part == 0 ? first.ml : second.ml + (part - 1) * stride;
    return part < work.parts ? __ldcg(ml + row) : make_float2(-INFINITY, 0.f);
  };
  for (int row = threadIdx.x / 32; row < output.rows(); row += Traits::Warps) {
    // A lane copies the columns that it reads.
    auto const copy = [&](unsigned part0) {
      float const* from = (part0 == 0 ? first.o : second.o + (part0 - 1) * stride * params.head_dim_v) +
                          row * params.head_dim_v + lane * 4;
      CUTE_NO_UNROLL
      for (unsigned i = 0; i < Batch && part0 + i < work.parts; ++i) {
        CUTE_UNROLL
        for (int turn = 0; turn < Turns; ++turn) {
          if ((turn * 32 + lane) * 4 < params.head_dim_v) {
            cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
                *reinterpret_cast<cute::uint128_t const*>(from + turn * 128),
                *reinterpret_cast<cute::uint128_t*>(scratch + i * HeadDim + (turn * 32 + lane) * 4));
          }
        }
        from = part0 + i == 0 ? second.o + row * params.head_dim_v + lane * 4 : from + stride * params.head_dim_v;
      }
      cp_async_fence();
    };
    copy(0);
    float2 ml = ml_of(row, lane);
    float m = ml.x;
    for (unsigned part = 32 + lane; part < work.parts; part += 32) m = fmaxf(m, ml_of(row, part).x);
    m = warp_max<32, 1>(m);
    float const base = m == -INFINITY ? 0.f : m;
    float l = 0.f, weight = 0.f;
    float4 acc[Turns] = {};
    CUTE_NO_UNROLL
    for (unsigned part0 = 0; part0 < work.parts; part0 += Batch) {
      if (part0 > 0) copy(part0);
      if (part0 % 32 == 0) {
        if (part0 > 0) ml = ml_of(row, part0 + lane);
        weight = exp2_approx(ml.x - base);
        l = fmaf(ml.y, weight, l);
      }
      cp_async_wait<0>();
#pragma unroll 2
      for (unsigned i = 0; i < Batch && part0 + i < work.parts; ++i) {
        float const w = __shfl_sync(0xffffffffu, weight, (part0 + i) % 32);
        CUTE_UNROLL
        for (int turn = 0; turn < Turns; ++turn) {
          if ((turn * 32 + lane) * 4 < params.head_dim_v) {
            acc[turn] =
                fma(*reinterpret_cast<float4 const*>(scratch + i * HeadDim + (turn * 32 + lane) * 4), w, acc[turn]);
          }
        }
      }
    }
    float const factor = output.finish(work.batch, row, m, warp_sum<32, 1>(l), lane == 0);
    CUTE_UNROLL
    for (int turn = 0; turn < Turns; ++turn) {
      int const col = (turn * 32 + lane) * 4;
      if (col < params.head_dim_v) output.store(output.out(work.batch, row) + col, scaled(acc[turn], factor));
    }
  }
}

/// The zeros of sequences of which no query row sees a key: they are nobody's work.
template <class Traits>
CUTE_DEVICE void write_empty(Params const& params, Place const& place, Tokens const& tokens,
                             Output<Traits> const& output) {
  for (int b = place.group + threadIdx.x * params.groups; b < params.batch; b += Traits::Threads * params.groups) {
    if (tiles_of(sequence_of(params, b), tokens, Traits::TileKeys).size() > 0) continue;
    for (int row = 0; row < output.rows(); ++row) {
      output.finish(b, row, -INFINITY, 0.f, true);
      for (int col = 0; col < params.head_dim_v; col += 4)
        output.store(output.out(b, row) + col, make_float4(0.f, 0.f, 0.f, 0.f));
    }
  }
}

/// Until the other warps that read the same tile are here.
template <class Traits>
CUTE_DEVICE void meet() {
  if constexpr (Traits::RowWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// The parameters with what `is_plain` has found out as constants, or as they are.
template <bool Plain>
CUTE_DEVICE Params specialised(Params const& params) {
  Params p = params;
  if constexpr (Plain) {
    p.n_new = 0;
    p.rotary.cos = nullptr;
    p.softcap = 0.f;
    p.alibi_slopes = p.sink = nullptr;
    p.batch_idx = p.leftpad_k = nullptr;
    p.fixed_splits = false;
  }
  return p;
}

template <class Traits, bool Plain>
__global__ void __launch_bounds__(Traits::Threads, 2) decode_kernel(__grid_constant__ Params const all_params) {
  Params const params = specialised<Plain>(all_params);
  using Element = typename Traits::Element;
  constexpr int HeadDim = Traits::HeadDim, TileKeys = Traits::TileKeys, Stages = Traits::Stages,
                kWarpTile = kWarpRows * HeadDim;
  extern __shared__ __align__(128) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const key_warp = Traits::RowWarps == 1 ? warp : 0, row_warp = Traits::RowWarps == 1 ? 0 : warp;
  auto& ring = shared.ring[key_warp];

  Walk<Traits::TileKeys>& walk = shared.walk;  // like `place` in shared memory, since registers are for the main loop
  Place const& place = shared.place;
  {
    Place const here(params, blockIdx.x);
    Walk<TileKeys> const first = first_walk<Traits>(params, here.group, here.tokens(params, Traits::Rows), shared);
    if (threadIdx.x == 0) {
      shared.place = here;
      shared.free_stage = Stages - 1;
      walk = shared.next = first;
      if (!first.done()) shared.next.next(params);
    }
    if (lane == 0) shared.ahead[warp] = first;
    __syncthreads();
  }
  Output<Traits> const output{params, place};
  Query<Traits> query;
  if (!walk.done() || params.fixed_splits) query.ask(params, output, walk);
  Loader<Traits> loader(params, shared.ahead[warp], place.head, warp);
  CUTE_NO_UNROLL
  for (int stage = 0; stage < Stages - 1; ++stage) loader.load(ring[stage]);

  if (!params.fixed_splits && (walk.done() || !all_alike(params)))
    write_empty<Traits>(params, place, walk.tokens(), output);

  float const query_scale = ScoreMod::query_scale(params);
  bool const score_mod_active = params.softcap > 0.f || params.alibi_slopes;
  bool const rotates_keys = params.n_new > 0 && params.rotary.cos;
  // The lane's rows of the tile, and the keys of its scores counted from its first.
  int const row0 = row_warp * kWarpRows + lane / 4;
  auto const key_of = [](int j) { return j / 2 * 8 + j % 2; };
  int stage = 0, last_stage = 0;

  for (bool once = params.fixed_splits; once || !walk.done(); once = false) {
    Visibility const& visibility = walk.sequence().visibility;
    Range const tiles = walk.here();
    if (params.n_new > 0) {
      append<Traits>(params, walk, place.head, tiles);
      __syncthreads();
    }
    Range const seen_by_all = {visibility.keys_of_row(walk.tokens().last).begin,
                               visibility.keys_of_row(walk.tokens().first).end};

    Math<Traits> math;
    // Where Q does not stay in shared memory it passes through the tile that warp 0 has no copy under way to.
    Element* const tile_Q = Traits::QueryInRegisters ? shared.ring[0][shared.free_stage].k : shared.q;
    Element const* const sQ = tile_Q + row_warp * kWarpTile;
    query.put(params, output, walk, tile_Q);
    __syncthreads();
    math.take_query(sQ, lane);
    if (Traits::QueryInRegisters) __syncthreads();
    if (!shared.next.done()) query.ask(params, output, shared.next);

    Fragment<HeadDim> O = {};
    OnlineSoftmax<2, 4, 1> softmax;
    bool worked = false;
    for (int tile = tiles.begin + key_warp; tile < tiles.end; tile += Traits::KeyWarps) {
      cp_async_wait<Stages - 2>();
      meet<Traits>();
      loader.load(ring[(stage + Stages - 1) % Stages]);
      int const first_key = tile * TileKeys;
      if (rotates_keys && first_key + TileKeys > walk.sequence().cached) {
        take_rotated<Traits>(params, walk, place.head, first_key, ring[stage].k);
        meet<Traits>();
      }

      Fragment<TileKeys> scores;
      Tensor S = make_tensor(make_rmem_ptr(&scores[0][0]), make_layout(make_shape(_2{}, Shape<_2, Int<TileKeys / 8>>{}),
                                                                       make_stride(_2{}, Stride<_1, _4>{})));
      math.scores(scores, sQ, ring[stage].k, lane);
      if (score_mod_active) {
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          Tensor S_row = make_tensor(
              make_rmem_ptr(&scores[0][2 * i]),
              make_layout(make_shape(_1{}, Shape<_2, Int<TileKeys / 8>>{}), make_stride(_0{}, Stride<_1, _4>{})));
          int const row = row0 + 8 * i;
          ScoreMod(params, walk.batch(), output.head(row))
              .apply(S_row, visibility.start_pos + output.token(row) - first_key - lane % 4 * 2,
                     [&](int, int j) { return -key_of(j); });
        }
      }
      if (first_key < seen_by_all.begin || first_key + TileKeys > seen_by_all.end) {
        int const tokens[2] = {output.token(row0), output.token(row0 + 8)};
        mask(S, visibility.counted_from(first_key + lane % 4 * 2), 0, [&](int i) { return tokens[i]; }, key_of);
      }
      float rescale[2];
      Tensor rescale_rows = make_tensor(make_rmem_ptr(rescale), Shape<_2>{});
      softmax.update(S, rescale_rows, score_mod_active ? 1.f : query_scale);
      math.values(O, scores, rescale, ring[stage].v, lane);

      worked = true;
      last_stage = stage;
      stage = stage + 1 == Stages ? 0 : stage + 1;
    }

    Work const work = walk.work(params, place.group);
    // The sequence's part is done: of the warps that have had keys of their own, then of the CTAs.
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) softmax.l[i] = warp_sum<4, 1>(softmax.l[i]);
    Partial<Traits> const partial(params, place, work, work.part);
    if constexpr (Traits::KeyWarps > 1) {
      __syncwarp();  // the lanes are done with the tile that this overwrites
      auto* const scratch =
          reinterpret_cast<float*>(&ring[last_stage]);  // nobody reads it any more; the next copy waits
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = lane / 4 + 8 * i;
        if (lane % 4 == 0) {
          shared.m[warp][row] = softmax.m[i];
          shared.l[warp][row] = softmax.l[i];
        }
        if (worked && row < output.rows()) {
          CUTE_UNROLL
          for (int n = 0; n < HeadDim / 8; ++n) {
            *reinterpret_cast<float2*>(scratch + row * HeadDim + (n ^ lane / 4) * 8 + lane % 4 * 2) =
                make_float2(O[n][2 * i], O[n][2 * i + 1]);
          }
        }
      }
      if (lane == 0) shared.scratch_stage[warp] = last_stage;
      __syncthreads();
      for (int row = warp; row < output.rows(); row += Traits::Warps) {
        float m = -INFINITY, l = 0.f;
        CUTE_UNROLL
        for (int w = 0; w < Traits::KeyWarps; ++w) m = fmaxf(m, shared.m[w][row]);
        float const base = m == -INFINITY ? 0.f : m;
        float weights[Traits::KeyWarps];
        CUTE_UNROLL
        for (int w = 0; w < Traits::KeyWarps; ++w) {
          weights[w] = exp2_approx(shared.m[w][row] - base);
          l = fmaf(shared.l[w][row], weights[w], l);
        }
        float const factor = work.parts == 1 ? output.finish(work.batch, row, m, l, lane == 0) : 1.f;
        if (work.parts > 1 && lane == 0) partial.ml[row] = make_float2(m, l);
        for (int col = lane * 4; col < params.head_dim_v; col += 128) {
          float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
          CUTE_UNROLL
          for (int w = 0; w < Traits::KeyWarps; ++w) {
            auto const* from = reinterpret_cast<float const*>(&shared.ring[w][shared.scratch_stage[w]]) +
                               row * HeadDim + (col / 8 ^ row % 8) * 8 + col % 8;
            if (weights[w] > 0.f) acc = fma(*reinterpret_cast<float4 const*>(from), weights[w], acc);
          }
          if (work.parts == 1) {
            output.store(output.out(work.batch, row) + col, scaled(acc, factor));
          } else {
            *reinterpret_cast<float4*>(partial.o + row * params.head_dim_v + col) = acc;
          }
        }
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = row0 + 8 * i;
        if (row >= output.rows()) continue;
        float const factor =
            work.parts == 1 ? output.finish(work.batch, row, softmax.m[i], softmax.l[i], lane % 4 == 0) : 1.f;
        if (work.parts > 1 && lane % 4 == 0) partial.ml[row] = make_float2(softmax.m[i], softmax.l[i]);
        CUTE_UNROLL
        for (int n = 0; n < HeadDim / 8; ++n) {
          int const col = n * 8 + lane % 4 * 2;
          if (col >= params.head_dim_v) continue;
          if (work.parts == 1) {
            *reinterpret_cast<uint32_t*>(output.out(work.batch, row) + col) =
                pack<Element>(O[n][2 * i] * factor, O[n][2 * i + 1] * factor);
          } else {
            *reinterpret_cast<float2*>(partial.o + row * params.head_dim_v + col) =
                make_float2(O[n][2 * i], O[n][2 * i + 1]);
          }
        }
      }
    }

    if (work.parts > 1) {
      __syncthreads();
      if (threadIdx.x == 0) {
        unsigned* const counter = params.counters + int64_t(work.batch) * place.lanes + place.lane;
        shared.is_last = count_up(counter, work.parts) == work.parts - 1;
      }
      __syncthreads();
      if (shared.is_last) {
        auto& free = ring[(stage + Stages - 1) % Stages];
        merge_parts<Traits>(params, place, work, output,
                            reinterpret_cast<float*>(&free) + row_warp * (sizeof(free) / Traits::RowWarps / 4));
      }
    }
    __syncthreads();  // everyone has read `walk`
    if (threadIdx.x == 0) {
      walk = shared.next;
      if (!walk.done()) shared.next.next(params);
      shared.free_stage = (stage + Stages - 1) % Stages;
    }
    __syncthreads();  // the scratch tiles are free for copies again
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
      feature::KeyLengths | feature::StartPositions | feature::FewerKeys | feature::Pages;
  static constexpr Features kTakes =
      Plain ? kPlain
            : kPlain | feature::kScoreMods | feature::Sink | feature::kUnlike | feature::kCache | feature::FixedSplits;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedBytes <= 99 * 1024, "what a block has on compute capability 8.6");
  static constexpr auto kernel = &decode_kernel<Traits, Plain>;
};

}  // namespace cutlass_ext::decode

// dBias on Hopper: the sum of dS over the sequences, heads and rows that share an element, always in the same order.
// Persistent CTAs have tiles of it in turn, in registers, and go through those that share one: S = Q K^T and dP = dO
// V^T by WGMMA, and dBias += P (dP - delta). One warp copies tiles by TMA, Q with K and dO with V, in one ring; CTAs of
// neighbouring keys are a cluster and copy Q and dO once for all, since L2 is what the kernel would wait for. The bias
// is the same in all turns: it stays in shared memory. Instantiated by csrc/kernels/sm90_dbias.cu.
#pragma once

#include <climits>

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../../cute_tensor.hpp"
#include "../../features.hpp"
#include "../../score.hpp"
#include "../../sm90/dropout.hpp"
#include "../../sm90/tensor_maps.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../../softmax.hpp"
#include "../bias_tiles.hpp"

namespace cutlass_ext::sm90 {

/// What the copying warp says of a turn.
struct BiasTurnInRing {
  int cluster;  // of tiles; past the last: there are no more turns
  BiasTurn of;
  Sequence sequence;
  bool hidden;  // whether no row sees a key of the CTA's tile: another one of the cluster has the turn
  bool mixed;   // whether some row does not see some key of it
};

template <int HeadDim_, class Element_, int Slots_>
struct BiasTraits {
  static constexpr int HeadDim = HeadDim_, HeadDimV = HeadDim, B_r = 128, B_c = 128, Slots = Slots_;
  using Element = Element_;
  static constexpr int Consumers = B_r / kAtomRows, Warps = 4 * Consumers;
  static constexpr int Threads = (Consumers + 1) * kWarpgroup;
  static constexpr int ProducerRegisters = 40, ConsumerRegisters = 232;  // 504 are there, as in ../../sm90/traits.hpp
  // Softcap would spill 76 bytes a thread.
  static constexpr Features kTakes = feature::Alibi | feature::kPairs | feature::Sink | feature::kUnlike;
  // What is said of a turn, until both of its slots are free again.
  static constexpr int Turns = (Slots + 1) / 2;

  using Layout =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<B_r>, Int<HeadDim>, Int<Slots>>{}));
  using Mma = Product<B_c, Element, SourceOfA::Shared>;
  static constexpr int TileElements = B_r * HeadDim;
  static constexpr int BiasBytes = 16 * B_c * 2;  // of a warp's rows

  struct SharedStorage {
    alignas(1024) Element rows[Slots * TileElements];  // Q, dO, Q, ...
    alignas(1024) Element keys[Slots * TileElements];  // K, V, K, ...
    alignas(1024) unsigned char biases[Warps * BiasBytes];
    alignas(16) RowStatistics statistics[Turns][B_r];
    BiasTurnInRing turns[Turns];
    Barrier full[Slots], empty[Slots];
  };
  static_assert(B_r == B_c && B_r == StatisticsRows::kTile, "tiles of rows, keys and statistics lie alike");
};

/// The clusters of tiles that a CTA has in turn, parts after parts.
struct ItsBiasTiles {
  BiasTiles const& tiles;
  int rank, first, step, clusters, end;

  CUTE_DEVICE ItsBiasTiles(BackwardParams const& params, BiasTiles const& tiles)
      : tiles(tiles),
        rank(block_rank_in_cluster()),
        first(blockIdx.x / tiles.cluster),
        step(gridDim.x / tiles.cluster),
        clusters(static_cast<int>(tiles.clusters())),
        end(clusters * params.dbias_parts) {}
  CUTE_DEVICE int part(int cluster) const { return cluster / clusters; }
  CUTE_DEVICE BiasTile tile(int cluster, int of_rank) const { return tiles.tile(cluster % clusters, of_rank); }
};

/// Which pairs of a turn's rows and the keys of a tile, counted from the first real one, count.
template <class Traits>
CUTE_DEVICE Seen seen_in_turn(BackwardParams const& params, Sequence const& sequence, BiasTurn const& turn,
                              int first_key) {
  constexpr int B_r = Traits::B_r, B_c = Traits::B_c;
  Visibility const& visibility = sequence.visibility;
  Range const first = visibility.keys_of_row(turn.row0),
              last = visibility.keys_of_row(visibility.last_row(turn.row0, B_r));
  int const end = first_key + B_c;
  Seen seen{first.begin < end && last.end > max(first_key, 0),
            first_key >= 0 && last.begin <= first_key && first.end >= end};
  if (seen.some && params.mask.bits) {
    Seen const by_mask = PairMod(params, sequence, turn.batch, turn.head)
                             .seen_of(params, {turn.row0, turn.row0 + B_r}, {first_key, end});
    seen.some = by_mask.some;
    seen.all &= by_mask.all;
  }
  return seen;
}

/// The warp that copies. Each lane looks at one of 32 turns; those in which some CTA of the cluster sees something have
/// their copies started by the lane that looked. All CTAs of a cluster find the same ones.
template <class Traits>
CUTE_DEVICE void copy_turns(BackwardParams const& params, BiasTiles const& tiles, BiasMaps const& maps,
                            typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kTile = Traits::B_r;
  constexpr auto kHint = TMA::CacheHintSm90::EVICT_LAST;
  ItsBiasTiles const its(params, tiles);
  int const lane = threadIdx.x % 32;
  RingPosition<Traits::Slots> ring;
  RingPosition<Traits::Turns> at;
  // Of rows each CTA copies a part, to all.
  auto const copy = [&](CUtensorMap const& of_rows, CUtensorMap const& of_keys, BiasTurn const& turn, int key0) {
    int const box = kTile / tiles.cluster, first = box * its.rank;
    Barrier& full = shared.full[ring.stage];
    Element* const to = shared.rows + ring.stage * Traits::TileElements + first * kPanel;
    if (tiles.cluster > 1) {
      copy_box_to_all<kTile, Traits::HeadDim>(of_rows, full, to, turn.row0 + first, turn.head, turn.batch,
                                              static_cast<uint16_t>((1 << tiles.cluster) - 1), kHint);
    } else {  // launched without clusters, of which multicast may be in need
      copy_box<kTile, Traits::HeadDim>(of_rows, full, to, turn.row0, turn.head, turn.batch, kHint);
    }
    copy_box<kTile, Traits::HeadDim>(of_keys, full, shared.keys + ring.stage * Traits::TileElements, key0,
                                     params.heads_per_kv.div(turn.head), turn.batch, kHint);
  };
  for (int cluster = its.first; cluster < its.end; cluster += its.step) {
    BiasTile const tile = its.tile(cluster, its.rank);
    Range const turns = tiles.turns_of(its.part(cluster), params.dbias_parts);
    CUTE_NO_UNROLL
    for (int first = turns.begin; first < turns.end; first += 32) {
      Seen own{false, true};
      bool some = false;
      if (first + lane < turns.end) {
        BiasTurn const turn = tiles.turn(tile, first + lane);
        Sequence const sequence = sequence_of(params, turn.batch);
        CUTE_NO_UNROLL
        for (int rank = 0; rank < tiles.cluster; ++rank) {
          int const key0 = tile.key0 + (rank - its.rank) * Traits::B_c;
          Seen const seen = seen_in_turn<Traits>(params, sequence, turn, key0 - sequence.leftpad);
          some |= seen.some;
          if (rank == its.rank) own = seen;
        }
      }
      for (uint32_t left = __ballot_sync(0xffffffffu, some); left; left &= left - 1) {
        bool const mine = lane == __ffs(left) - 1;
        BiasTurn const turn = tiles.turn(tile, first + lane);
        shared.empty[ring.stage].wait_for(ring.phase ^ 1);
        if (mine) {
          Sequence const sequence = sequence_of(params, turn.batch);
          shared.turns[at.stage] = {cluster, turn, sequence, !own.some, !own.all};
          constexpr int kStatistics = kTile * sizeof(RowStatistics);
          Barrier& full = shared.full[ring.stage];
          full.arrive_and_expect_tx(2 * Traits::TileElements * sizeof(Element) + kStatistics);
          copy(maps.q, maps.k, turn, tile.key0);
          SM90_BULK_COPY_G2S::copy(
              params.row_statistics + StatisticsRows(params).first(params, sequence, turn.batch, turn.head) + turn.row0,
              reinterpret_cast<uint64_t*>(&full), shared.statistics[at.stage], kStatistics);
        }
        ring.advance();
        shared.empty[ring.stage].wait_for(ring.phase ^ 1);
        if (mine) {
          shared.full[ring.stage].arrive_and_expect_tx(2 * Traits::TileElements * sizeof(Element));
          copy(maps.dout, maps.v, turn, tile.key0);
        }
        ring.advance();
        at.advance();
        __syncwarp();
      }
    }
  }
  shared.empty[ring.stage].wait_for(ring.phase ^ 1);
  if (lane == 0) {
    shared.turns[at.stage].cluster = INT_MAX;
    shared.full[ring.stage].arrive();
  }
}

/// The bias of a warp's rows of a tile, in shared memory: 16 bits each, in vectors of eight keys that neither their
/// copies nor ldmatrix find in a bank in use.
template <class Traits>
struct WarpBias {
  static constexpr int kChunks = Traits::B_c / 8;
  unsigned char* data;

  CUTE_DEVICE static int at(int row, int chunk) { return row * (Traits::B_c * 2) + (chunk ^ (row % 8)) * 16; }

  /// Asks for the tile's, of the rows from `row` on. Rows behind the last have what that has, keys 0.
  CUTE_DEVICE void ask(BackwardParams const& params, BiasTile const& tile, int row, int lane) const {
    Bias const& of = bias_of(params);
    auto const* const from =
        static_cast<uint16_t const*>(of.data) + tile.batch * of.batch + tile.head * of.head + tile.key0;
    uint32_t const to = cast_smem_ptr_to_uint(data);
    CUTE_UNROLL
    for (int i = lane; i < 16 * kChunks; i += 32) {
      int const of_row = i / kChunks, chunk = i % kChunks;
      int const bytes = 2 * min(max(params.n_kv - tile.key0 - chunk * 8, 0), 8);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + at(of_row, chunk)),
                   "l"(from + min(row + of_row, params.n_q - 1) * of.row + chunk * 8), "r"(bytes)
                   : "memory");
    }
  }
  CUTE_DEVICE static void wait() {
    cp_async_wait<0>();
    __syncwarp();
  }

  /// Adds it, times `factor`, to scores.
  template <class ScoreTensor>
  CUTE_DEVICE void add(ScoreTensor& S, BiasType type, float factor, int lane) const {
    uint32_t const from = cast_smem_ptr_to_uint(data) + at(lane % 16, lane / 16);
    add_bias_of_quads<kChunks / 2>(S, factor, type,
                                   [&](int m, uint32_t (&x)[4]) { load_matrices(x, from ^ (m * 32)); });
  }
};

/// What `store_rows` has to know of a tile of dBias in 16 bits.
template <class Element_>
struct StoredBias {
  using Element = Element_;
  static constexpr int HeadDimV = 128, PanelsV = 2, StagedPanels = 2;
};

/// A consumer warpgroup: 64 rows of the tiles.
template <class Traits>
CUTE_DEVICE void add_up(BackwardParams const& params, BiasTiles const& tiles, typename Traits::SharedStorage& shared,
                        int row_block) {
  using Mma = typename Traits::Mma;
  constexpr int kSteps = Traits::HeadDim / 16;
  ItsBiasTiles const its(params, tiles);
  GradientThread const thread;
  int const lane = thread.lane, row_in_tile = thread.warp_row + lane / 4, column = lane % 4 * 2;

  auto const tiles_at = [](typename Traits::Element* data) {
    return make_tensor(make_smem_ptr(data), typename Traits::Layout{});
  };
  Tensor rows =
      local_tile(tiles_at(shared.rows), Shape<Int<kAtomRows>, Int<Traits::HeadDim>>{}, make_coord(row_block, _0{}));
  Tensor fRows = Mma::operand_a(rows);  // no thread index in a descriptor
  Tensor fKeys = Mma::operand_b(tiles_at(shared.keys));
  auto const scores_of_a_tile = [] { return Mma::template sums<Traits::B_c>(); };
  Tensor cB = scores_of_a_tile();
  Tensor dB = rows_and_columns(cB);
  clear(cB);

  WarpBias<Traits> const kept_bias{shared.biases + thread.warp_row / 16 * Traits::BiasBytes};
  cutlass_ext::Scores const scores = specialised<Traits::kTakes>(params);
  bool const stays = is_in_vectors(bias_of(params)), changes = ScoreMod::changes(scores);
  float const query_scale = ScoreMod::query_scale(scores), scale = changes ? 1.f : query_scale,
              bias_unit = changes ? kLog2e : reciprocal(ScoreMod::gradient_scale(params));
  auto const ask = [&](int cluster) {
    if (!stays || cluster >= its.end) return;
    BiasTile const tile = its.tile(cluster, its.rank);
    kept_bias.ask(params, tile, tile.row0 + thread.warp_row, lane);
  };

  auto const store = [&](int cluster) {
    BiasTile const tile = its.tile(cluster, its.rank);
    int const part = its.part(cluster), first_row = tile.row0 + row_in_tile;
    auto const store_one = [&](int row, int key, float value) {
      store_bias(params, tiles, tile, part, row, key, value);
    };
    WarpBias<Traits>::wait();  // what is written to its place
    if (!params.dbias_row) {
      auto const sums_of = [&](int warp) { return reinterpret_cast<float*>(shared.biases + warp * Traits::BiasBytes); };
      CUTE_UNROLL
      for (int j = 0; j < size<1>(dB); ++j) {
        float const sum = warp_sum<8, 4>(dB(0, j) + dB(1, j));
        if (lane < 4) sums_of(thread.warp_row / 16)[column + key_of(j)] = sum;
      }
      cutlass::arch::NamedBarrier::sync(Traits::Consumers * kWarpgroup, 1);
      if (int const key = threadIdx.x - kWarpgroup; key < Traits::B_c) {
        float sum = 0.f;
        for (int warp = 0; warp < Traits::Warps; ++warp) sum += sums_of(warp)[key];
        store_one(0, tile.key0 + key, sum);
      }
      cutlass::arch::NamedBarrier::sync(Traits::Consumers * kWarpgroup, 1);
      return;
    }
    BiasType const type = dtype_of_bias(params);
    if (type != BiasType::Float32 && params.dbias_parts == 1 && params.n_kv % 8 == 0) {
      int const row = tile.row0 + thread.warp_row;
      int64_t const at = bias_row_at(params, tile, row + lane / 8) + tile.key0;
      auto const store_as = [&](auto element) {
        using T = decltype(element);
        store_rows<StoredBias<T>>(
            static_cast<T*>(params.dbias) + at, [&](int pass) { return pass * 4 * params.dbias_row; }, params.n_q - row,
            max(params.n_kv - tile.key0, 0), dB, reinterpret_cast<T*>(kept_bias.data), lane);
      };
      if (type == BiasType::Float16) {
        store_as(half_t{});
      } else {
        store_as(bfloat16_t{});
      }
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (first_row + row_of(i) >= params.n_q) continue;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(dB); ++j) store_one(first_row + row_of(i), tile.key0 + column + key_of(j), dB(i, j));
    }
  };

  RingPosition<Traits::Slots> ring;
  RingPosition<Traits::Turns> at;
  auto const release = [&](int slot) {
    finish_loads_of_shared();  // of statistics
    if (lane < tiles.cluster) shared.empty[slot].arrive_at(lane);
  };
  int cluster = its.first;
  ask(cluster);
  CUTE_NO_UNROLL
  while (true) {
    shared.full[ring.stage].wait_for(ring.phase);
    BiasTurnInRing const& turn = shared.turns[at.stage];
    for (int const here = min(turn.cluster, its.end); cluster < here;) {
      store(cluster);
      clear(cB);
      ask(cluster = min(cluster + its.step, its.end));
    }
    if (cluster >= its.end) break;
    int const of_scores = ring.stage;
    ring.advance();
    if (turn.hidden) {
      release(of_scores);
      shared.full[ring.stage].wait_for(ring.phase);
      release(ring.stage);
      ring.advance();
      at.advance();
      continue;
    }

    Tensor cS = scores_of_a_tile();
    Tensor cdP = scores_of_a_tile();
    Tensor S = rows_and_columns(cS);
    Tensor dP = rows_and_columns(cdP);
    Sequence const& sequence = turn.sequence;
    Visibility const& visibility = sequence.visibility;
    int const first_row = turn.of.row0 + row_in_tile, first_key = its.tile(cluster, its.rank).key0 - sequence.leftpad;
    // Which of the thread's columns its rows see, and dropout keeps.
    TileMask<Traits::B_c / 4> mask;
    uint2 kept = {};
    if (turn.mixed || has_dropout(params)) {
      PairMod const pairs(params, sequence, turn.of.batch, turn.of.head);
      int const query_rows[2] = {first_row, first_row + row_of(1)};
      if (turn.mixed) {
        mask = {visibility.counted_from(first_key), query_rows, lane};
        int const padding = columns_before(-first_key - column);  // keys in front of the first real one
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          uint32_t by_mask = ~0u;
          if (params.mask.bits) {
            CUTE_UNROLL
            for (int word = 0; word < 4; ++word) {
              uint32_t const seen =
                  columns_of_word(pairs.seen(params, visibility, query_rows[i], first_key + 32 * word), lane);
              by_mask = word == 0 ? seen : by_mask | seen << 8 * word;
            }
          }
          mask.visible[i][0] &= padding < 32 ? by_mask & ~0u << padding : 0;
        }
      }
      if (has_dropout(params)) {
        static_assert(Traits::B_c == DropoutBits::kKeys, "as many keys as are drawn for");
        kept = DropoutBits(threshold_of(params), pairs, first_row - lane / 4, first_key, lane).bits();
      }
    }
    if (!stays) {  // the products are added to it
      load_bias(S, bias_unit, PairMod(params, sequence, turn.of.batch, turn.of.head), params, visibility, first_row,
                first_key + column, row_of, key_of);
    }
    gemm_async<kSteps>(Mma{}, fRows(_, _, _, of_scores), fKeys(_, _, _, of_scores), cS, stays);
    shared.full[ring.stage].wait_for(ring.phase);
    gemm_async<kSteps>(Mma{}, fRows(_, _, _, ring.stage), fKeys(_, _, _, ring.stage), cdP, true);

    warpgroup_wait<1>();
    warpgroup_fence_operand(cS);
    release(of_scores);

    if (changes) {
      CUTE_UNROLL
      for (int e = 0; e < size(S); ++e) S(e) *= query_scale;
      ScoreMod(scores, turn.of.batch, turn.of.head)
          .apply(S, visibility.offset(first_row, first_key + column),
                 [](int i, int j) { return row_of(i) - key_of(j); });
    }
    if (stays) {
      WarpBias<Traits>::wait();
      kept_bias.add(S, dtype_of_bias(params), bias_unit, lane);
    }
    if (turn.mixed) mask.apply(S);
    RowStatistics of_rows[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) of_rows[i] = shared.statistics[at.stage][row_in_tile + row_of(i)];
    CUTE_UNROLL
    for (int j = 0; j < size<1>(S); ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) S(i, j) = exp2_approx(fmaf(S(i, j), scale, -of_rows[i].lse_log2));
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(cdP);
    release(ring.stage);
    ring.advance();
    at.advance();

    // What counts nowhere may be anything, NaN too: of rows and keys that do not exist or are hidden, where P is 0, and
    // of rows that see no key, where it may be NaN.
    auto const add = [&](auto const& dp_of) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(S); ++j) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (S(i, j) > 0.f) dB(i, j) = fmaf(S(i, j), dp_of(i, j) - of_rows[i].delta, dB(i, j));
        }
      }
    };
    if (has_dropout(params)) {
      DropoutBits const drawn(kept);
      add([&](int i, int j) {
        uint4 const mask = drawn.mask(j / 4);  // of two neighbouring keys a word
        uint32_t const first = i == 0 ? mask.x : mask.y, second = i == 0 ? mask.z : mask.w;
        uint32_t const of_pair = j / 2 % 2 == 0 ? first : second;
        return of_pair & (j % 2 == 0 ? 1u : 0x10000u) ? dP(i, j) * params.dropout.scale : 0.f;
      });
    } else {
      add([&](int i, int j) { return dP(i, j); });
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::Threads, 1)
    bias_gradients_kernel(__grid_constant__ BackwardParams const params, __grid_constant__ BiasTiles const tiles,
                          __grid_constant__ BiasMaps const maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(smem);
  int const warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (CUtensorMap const* map : {&maps.q, &maps.dout, &maps.k, &maps.v}) cute::prefetch_tma_descriptor(map);
    int const readers = Traits::Warps * tiles.cluster;  // every consumer warp that the CTA copies for
    __builtin_assume(readers != 0);                     // the call of an assertion would keep WGMMA from running on
    CUTE_UNROLL
    for (int i = 0; i < Traits::Slots; ++i) shared.full[i].init(1), shared.empty[i].init(readers);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();  // barriers of other CTAs are there, too
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::ProducerRegisters>();
    if (warp == 0) copy_turns<Traits>(params, tiles, maps, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::ConsumerRegisters>();
    add_up<Traits>(params, tiles, shared, warpgroup - 1);
  }
  __syncwarp();
  cute::cluster_sync();  // others may arrive here until they are done
}

/// The gradient of the bias at one tile shape: persistent CTAs, in clusters that BiasTiles has.
template <int HeadDim, class Element, int Slots>
struct BiasGradients {
  using Traits = BiasTraits<HeadDim, Element, Slots>;
  static constexpr char const* kFamily = "sm90";
  static constexpr Kind kKind = Kind::BiasGradients;
  static constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static constexpr auto kernel = &bias_gradients_kernel<Traits>;
  static constexpr Features kTakes = Traits::kTakes;
  /// Scores that are changed cannot begin with the bias, as those of one that is not kept in shared memory do.
  static bool takes_shape(Params const& params) {
    Bias const& of = bias_of(params);
    return is_in_vectors(of) || is_alignable(of) || !ScoreMod::changes(params);
  }
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have on Hopper");
};

}  // namespace cutlass_ext::sm90

// What a tile of keys adds to dQ: dS K, to sums in memory, in shared memory, or on their way from one CTA of a cluster
// to the next. Used by most of the other files here.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm75.hpp>

#include "../../cute_tensor.hpp"
#include "../params.hpp"
#include "traits.hpp"

namespace cutlass_ext::sm90 {

/// Four matrices of 8 x 8, a row of one for each lane: to what begins at the lane's byte address in shared memory.
CUTE_DEVICE void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

/// Adds four numbers that lie side by side to as many in memory.
CUTE_DEVICE void add_to_memory(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

/// Has the copy engine add `bytes` of shared memory, as floats, to as many in memory; one thread, and a bulk group of
/// its own. The sums stay in L2 as long as they can: every tile of keys adds to them.
CUTE_DEVICE void add_to_memory(float* to, void const* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(to),
      "r"(cast_smem_ptr_to_uint(from)), "r"(bytes), "l"(static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST))
      : "memory");
  tma_store_arrive();
}

/// Until all that the thread has had the copy engine add is there.
CUTE_DEVICE void wait_for_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// What the keys in hand add to dQ of a tile of rows: dS K, computed by all warpgroups together, of each a part of the
/// columns, or by one that does nothing else (`HasDqWarpgroup`). `buffer` is where dS of the tile lies.
template <class Traits>
struct DqGemm {
  using Element = typename Traits::Element;
  static constexpr int Columns = Traits::DqColumns;
  using Mma = typename Traits::template MmaDq<Columns>;
  // Describe panels of K as they lie there.
  static constexpr int Described = Traits::template Padded<Columns>;
  using MmaOfPanels = typename Traits::template MmaDq<Described>;
  static constexpr int kVectors = Columns * 4;  // of a warp's 16 rows

  typename Traits::SharedStorage& shared;
  int warpgroup;
  uint32_t ds_at;  // chunk lane / 16, swizzled, of the lane's row of dS: bits are flipped for the others

  CUTE_DEVICE DqGemm(typename Traits::SharedStorage& shared, int warpgroup) : shared(shared), warpgroup(warpgroup) {
    auto const [lane, warp_row] = GradientThread();
    int const key = (Traits::SplitsDkDv ? warp_row % Traits::Held : warp_row) + lane % 16;
    ds_at = cast_smem_ptr_to_uint(shared.ds) + key * (kPanel * sizeof(Element)) + ((lane / 16) ^ (key & 7)) * 16;
    materialize(ds_at);
  }

  /// Leaves dS^T of the warp's 16 keys to all.
  template <class Words>
  CUTE_DEVICE void store_ds(Words const& words, int buffer) const {
    uint32_t const at = ds_at + buffer * Traits::Held * (kPanel * sizeof(Element));
    CUTE_UNROLL
    for (int m = 0; m < Traits::B_r / 16; ++m) {
      store_matrices(at ^ (m * 32), words(4 * m), words(4 * m + 1), words(4 * m + 2), words(4 * m + 3));
    }
    // WGMMA reads it there, or the copy engine.
    if constexpr (!Traits::SplitsDkDv || Traits::Cluster > 1) cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (elect_one_sync()) shared.ds_full[buffer].arrive();
  }

  /// Sends what the warp has left so to the other CTA of a cluster.
  CUTE_DEVICE void send_ds(int buffer) const {
    if (!elect_one_sync()) return;
    constexpr int kOfAWarp = 16 * kPanel;
    int const of_warp = threadIdx.x / 32 % 4 * kOfAWarp;
    copy_to(other_rank(), shared.other_ds + of_warp, shared.ds + buffer * Traits::Held * kPanel + of_warp,
            kOfAWarp * sizeof(Element), shared.cluster.ds_full);
  }

  /// dS of the warp's 16 rows of a tile, as operand A: of the CTA's own keys, and of a cluster's others.
  CUTE_DEVICE static auto operand() { return Mma::template registers_a<Traits::B_c>(); }
  /// Brings it to registers, once another warpgroup has left it, and the other CTA has sent it.
  template <class Operand>
  CUTE_DEVICE void load_ds(Operand& ds, int buffer) const {
    take_from(shared.ds + buffer * Traits::Held * kPanel, recast<uint32_t>(ds), 0);
    if constexpr (Traits::Cluster > 1) take_from(shared.other_ds, recast<uint32_t>(ds), Traits::Held / 4);
  }
  /// Says that it has been read, once a product has been issued of it: only then it is in registers. Loads wait behind
  /// what is added to memory, and an arrival at another CTA's barrier does not.
  CUTE_DEVICE void release(int buffer) const {
    __syncwarp();
    if (!elect_one_sync()) return;
    shared.ds_empty[buffer].arrive();
    if constexpr (Traits::Cluster > 1) shared.cluster.sent_ds_empty.arrive_at(other_rank());
  }

  /// dS^T of the warpgroup's own keys, as operand A of dK's product.
  CUTE_DEVICE auto own_ds(int buffer) const {
    using Rows = LayoutAlongColumns<Element, Traits::Held, kPanel>;
    Tensor rows = local_tile(make_tensor(make_smem_ptr(shared.ds + buffer * Traits::Held * kPanel), Rows{}),
                             Shape<Int<kAtomRows>, Int<kPanel>>{}, make_coord(warpgroup, _0{}));
    return Traits::MmaKeys::operand_a(rows);
  }

  /// Of a cluster of two, the other CTA's.
  CUTE_DEVICE static uint32_t other_rank() { return cute::block_rank_in_cluster() ^ 1; }
  CUTE_DEVICE int part() const { return Traits::AlternatesDq ? 0 : warpgroup; }
  CUTE_DEVICE static auto accumulator() { return Mma::template sums<Columns>(); }
  /// K in hand from a column on, as operand B.
  CUTE_DEVICE auto keys_from(int column) const { return keys_of(shared.held, column); }
  /// The same of the keys of a cluster's other CTA, whose panels here begin with the columns' first.
  CUTE_DEVICE auto others_keys_from(int column) const {
    return keys_of(shared.other_held, column - first_column() / kPanel * kPanel);
  }
  CUTE_DEVICE static auto keys_of(Element* held, int column) {
    constexpr int kKeys = Traits::Held;
    return MmaOfPanels::operand_b(make_tensor(make_smem_ptr(held + column / kPanel * kPanel * kKeys + column % kPanel),
                                              LayoutAlongRows<Element, kKeys, Described>{}));
  }
  /// Of those that the CTA adds to.
  CUTE_DEVICE static int first_column() {
    return Traits::Cluster > 1 ? cute::block_rank_in_cluster() * (Traits::HeadDim / 2) : 0;
  }
  template <class Sums>
  CUTE_DEVICE void issue(Sums& sums, int buffer) const {
    Tensor fDS = Mma::operand_a(make_tensor(make_smem_ptr(shared.ds), typename Traits::LayoutDS{}));
    gemm_async<Traits::Held / 16>(Mma{}, fDS(_, _, _, buffer), keys_from(part() * Columns), sums, true);
  }

  /// Adds to the CTA's columns of a tile of rows, `Columns` at a time, of which two are under way; calls `released`
  /// when `ds` is in registers.
  template <class Operand, class Released>
  CUTE_DEVICE void add_tile(Operand const& ds, float* to, Released const& released) const {
    constexpr int kSteps = Traits::HeadDim / Columns / Traits::Cluster, kVectorsOfLanes = 32 * 4;
    Tensor both = make_tensor<float>(append(accumulator().layout(), Layout<_2>{}).shape());
    for_each(make_int_sequence<kSteps + 1>{}, [&](auto step) {
      constexpr int kNext = decltype(step)::value, kDone = kNext - 1;
      if constexpr (kNext < kSteps) {
        Tensor sums = both(_, _, _, kNext % 2);
        int const column = first_column() + kNext * Columns;
        if constexpr (Traits::Cluster > 1) {
          gemm_async<Traits::Held / 16>(Mma{}, ds, keys_from(column), others_keys_from(column), sums);
        } else {
          gemm_async<Traits::Held / 16>(Mma{}, ds, keys_from(column), sums, true);
        }
        if constexpr (kNext == 0) released();
      }
      if constexpr (kDone >= 0) {
        Tensor sums = both(_, _, _, kDone % 2);
        warpgroup_wait<(kNext < kSteps ? 1 : 0)>();
        warpgroup_fence_operand(sums);
        int const column = first_column() + kDone * Columns;
        add(sums,
            to + SumsOfTile::first(Traits::HeadDim, column / kPanel, 0) * 4 + column % kPanel / 8 * kVectorsOfLanes);
      }
    });
  }

  /// 16 rows of dS to registers, from word `first` on.
  template <class Words>
  CUTE_DEVICE void take_from(Element const* ds, Words words, int first) const {
    int const thread = opaque(threadIdx.x);  // an address for each turn: there is no register for one
    auto const* const from = ds + row_for_operand_a<Element>(thread % 32, thread / 32 % 4);
    CUTE_UNROLL
    for (int m = 0; m < Traits::Held / 16; ++m) {
      auto const word = [&](int i) -> uint32_t& { return words(first + 4 * m + i); };
      SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(from + m * 16 * kPanel), word(0), word(1), word(2),
                              word(3));
    }
  }

  /// `to`: as `first` says. Sums lie in memory in the order in which threads hold them: each adds whole vectors, side
  /// by side with its neighbours', those of a warp in one piece. SumsOfTile knows the order.
  template <class Sums>
  CUTE_DEVICE void add(Sums const& sums, float* to) const {
    if constexpr (Traits::StagesSums) {
      auto* const warps = reinterpret_cast<float4*>(shared.staging + part_of_warp<Traits>() * Traits::Staged);
      tma_store_wait<0>();  // what the warp left there last has been read: by the thread that had it copied
      __syncwarp();
      CUTE_UNROLL
      for (int e = 0; e < size(sums); e += 4)
        warps[e * 8 + threadIdx.x % 32] = make_float4(sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (elect_one_sync()) add_to_memory(to, warps, kVectors * sizeof(float4));
    } else {
      CUTE_UNROLL
      for (int e = 0; e < size(sums); e += 4)
        add_to_memory(to + e * 32, sums(e), sums(e + 1), sums(e + 2), sums(e + 3));
    }
  }
  /// The vectors of tile `tile` of those that shared memory has, 32 apart, that the thread alone reads and writes.
  CUTE_DEVICE float4* at(int tile) const {
    constexpr int kTileVectors = Traits::B_r * Traits::HeadDim / 4;
    return shared.sums + tile * kTileVectors + SumsOfTile::first(Traits::HeadDim, part(), threadIdx.x / 32 % 4) +
           threadIdx.x % 32;
  }
  template <class Sums>
  CUTE_DEVICE void add_to_shared(Sums const& sums, int tile) const {
    float4* const to = at(tile);
    CUTE_UNROLL
    for (int e = 0; e < size(sums); e += 4) {
      float4 const x = to[e * 8];
      to[e * 8] = make_float4(x.x + sums(e), x.y + sums(e + 1), x.z + sums(e + 2), x.w + sums(e + 3));
    }
  }
  /// Of sums that pass from CTA to CTA, where those for the thread are left, and for its warp: a place that it asks the
  /// CTA of the next keys to fill, a tile after the other.
  CUTE_DEVICE float4* place() const { return at(Traits::AlternatesDq ? warpgroup : 0); }
  /// The warp's, before it asks.
  CUTE_DEVICE Element* staging() const { return reinterpret_cast<Element*>(place() - threadIdx.x % 32); }
  CUTE_DEVICE Barrier& of_warp(Barrier* barriers) const { return barriers[warpgroup * 4 + threadIdx.x / 32 % 4]; }
  CUTE_DEVICE void ask(GradientTile<Traits> const& tile) const {
    if (!elect_one_sync()) return;
    of_warp(shared.sums_full).arrive_and_expect_tx(kVectors * sizeof(float4));
    of_warp(shared.sums_empty[tile.way]).arrive_at(tile.rank_behind());
  }
  /// Adds what has been left there.
  template <class Sums>
  CUTE_DEVICE void receive(Sums& sums, uint32_t phase) const {
    of_warp(shared.sums_full).wait_for(phase);
    float4 const* const from = place();
    CUTE_UNROLL
    for (int e = 0; e < size(sums); e += 4) {
      float4 const x = from[e * 8];
      sums(e) += x.x, sums(e + 1) += x.y, sums(e + 2) += x.z, sums(e + 3) += x.w;
    }
    __syncwarp();  // all have read them
  }
  /// Passes them on to the CTA of the keys before, once it has asked.
  template <class Sums>
  CUTE_DEVICE void send(Sums const& sums, GradientTile<Traits> const& tile, uint32_t phase) const {
    of_warp(shared.sums_empty[tile.way]).wait_for(phase);
    uint32_t const rank = tile.rank_before(), to = address_in(rank, place()),
                   barrier = address_in(rank, &of_warp(shared.sums_full));
    CUTE_UNROLL
    for (int e = 0; e < size(sums); e += 4)
      push(to + e * 8 * sizeof(float4), make_float4(sums(e), sums(e + 1), sums(e + 2), sums(e + 3)), barrier);
  }
  /// Where the thread adds, or the warp, counted from the sums of a tile.
  CUTE_DEVICE int first() const {
    int const lane = Traits::StagesSums ? 0 : threadIdx.x % 32;
    return (SumsOfTile::first(Traits::HeadDim, part(), threadIdx.x / 32 % 4) + lane) * 4;
  }
};

/// What `store_rows` has to know of sums with `Columns` columns.
template <class Traits, int Columns>
struct Stored {
  using Element = typename Traits::Element;
  static constexpr int HeadDimV = Columns, PanelsV = Traits::template Padded<Columns> / kPanel,
                       StagedPanels = Traits::DqThroughCluster && PanelsV > 1 ? 2 : 1;
};

/// dQ of a tile of rows, all of whose keys have been gone through, and of the warpgroup's columns, through `staging`:
/// 16 rows of a panel that are the warp's own.
template <class Traits, class Sums>
CUTE_DEVICE void store_queries(BackwardParams const& params, GradientTile<Traits> const& tile, int head, int t,
                               int part, Sums& sums, typename Traits::Element* staging) {
  using Element = typename Traits::Element;
  constexpr int kColumns = Traits::DqColumns;
  int const lane = threadIdx.x % 32, row = t * Traits::Step + threadIdx.x / 32 % 4 * 16, column = part * kColumns;
  CUTE_UNROLL
  for (int e = 0; e < size(sums); ++e) sums(e) *= factor_of_gradients(params);
  auto* const to =
      row_at<Element>(params.dq, params.dq_stride, tile.sequence.batch, tile.sequence.q_row0 + row + lane / 8, head) +
      column;
  store_rows<Stored<Traits, kColumns>>(
      to, [&](int pass) { return pass * 4 * params.dq_stride.row; }, tile.sequence.visibility.n_q - row,
      max(params.head_dim - column, 0), rows_and_columns(sums), staging, lane);
}

/// Phases of barriers: for sums that come from another CTA of a cluster, and for those that go either way, a bit each.
struct PhasesOfSums {
  uint32_t received = 0, sent = 0;
};

/// What the next tile that is due adds to dQ. Where, is worked out when it is wanted: registers of what is being added,
/// its address among them, wait for memory before they are written again.
template <class Traits>
struct DqAccumulator {
  BackwardParams const& params;
  typename Traits::SharedStorage& shared;
  GradientTile<Traits> const& tile;
  int row_block;
  DqGemm<Traits> sums;
  PhasesOfSums& phases;
  float* to = nullptr;
  Range tiles;  // of a head
  StreamIterator<Traits> order;
  int held = 0;  // the tile's number of those of a head
  int tiles_of_rows;

  CUTE_DEVICE DqAccumulator(BackwardParams const& params, typename Traits::SharedStorage& shared,
                            GradientTile<Traits> const& tile, int row_block, PhasesOfSums& phases)
      : params(params),
        shared(shared),
        tile(tile),
        row_block(row_block),
        sums(shared, row_block),
        phases(phases),
        tiles(tile.tiles),
        order(tile, tiles),
        tiles_of_rows(tiles_of_head(tile.sequence.visibility.n_q, Traits::Step)) {
    if constexpr (!Traits::SkipsTiles) {
      if constexpr (!Traits::OwnsHeads) to = sums_of_tile(params, tile, order.head, order.t()) + sums.first();
      [[maybe_unused]] int64_t const rows = order.step_back(params);
      if constexpr (!Traits::OwnsHeads) to -= rows * Traits::HeadDim;
    }
    if constexpr (Traits::DqThroughCluster) {
      if (tile.begins_head() && tiles.size() < tiles_of_rows) clear_unseen();
    }
    if constexpr (Traits::DqInShared) {
      if (!tile.begins_head()) return;
      for (int held = row_block; held < tile.heads * tiles_of_rows; held += Traits::Consumers) {
        CUTE_UNROLL
        for (int i = 0; i < Traits::HeadDim / 8; ++i) sums.at(held)[i * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  }

  /// dQ of rows that no key sees, by the CTA of a head's first keys.
  CUTE_DEVICE void clear_unseen() const {
    CUTE_NO_UNROLL
    for (int held = 0; held < tile.heads * tiles_of_rows; ++held) {
      int const head = held / tiles_of_rows, t = held - head * tiles_of_rows;
      bool seen = !is_owner(held);
      for (int row0 = 0; row0 < tile.keys_of_launch(params) && !seen; row0 += Traits::Held)
        seen = tile.row_tiles_of(row0).contains(t);
      if (seen) continue;
      Tensor none = sums.accumulator();
      clear(none);
      store_queries(params, tile, tile.head_q + head, t, sums.part(), none, sums.staging());
    }
  }
  /// Whether the warpgroup adds to a tile, by its number, where dQ of a head is the CTA's, or its cluster's: always the
  /// same one, so that each thread reads what it has written, or what the thread of its number in another CTA has.
  CUTE_DEVICE bool is_owner(int held) const { return !Traits::AlternatesDq || held % Traits::Consumers == row_block; }

  /// Where a mask hides tiles: to that of the rows that passed by, of which the copying warp has said this.
  CUTE_DEVICE void set(StreamedTileInfo const& said) {
    if constexpr (Traits::DqInShared) {
      held = (said.head - tile.head_q) * tiles_of_rows + said.tile;
    } else {
      to = said.sums;
    }
  }
  /// To the tile that `set` named or, where no mask hides tiles, to the next one.
  CUTE_DEVICE void advance() {
    if constexpr (Traits::SkipsTiles) {
      if constexpr (!Traits::DqInShared) to += sums.first();
      return;
    }
    int const rows = order.advance(params, tile, tiles);
    if constexpr (Traits::OwnsHeads) {
      held = (order.head - tile.head_q) * tiles_of_rows + order.t();
    } else {
      to += int64_t(rows) * Traits::HeadDim;
    }
    if constexpr (Traits::DqThroughCluster) {
      // At the beginning of the turn at whose end they are wanted.
      if (is_owner(held) && tile.behind.contains(order.t())) sums.ask(tile);
    }
  }
  /// Of dS in buffer `stage`, which is free then.
  template <class Accumulator>
  CUTE_DEVICE void add(Accumulator& of_tile, int stage) {
    warpgroup_fence_operand(of_tile);
    if constexpr (!Traits::AlternatesDq && !Traits::DqThroughCluster) advance();
    if constexpr (Traits::HasDsEmpty) {
      if (elect_one_sync()) shared.ds_empty[stage].arrive();
    }
    if constexpr (Traits::DqInShared) {
      sums.add_to_shared(of_tile, held);
    } else if constexpr (Traits::DqThroughCluster) {
      pass_on(of_tile);
    } else {
      sums.add(of_tile, to);
    }
  }
  /// To what the next keys have added before: to the CTA of the keys before or, if there is none, to memory.
  template <class Accumulator>
  CUTE_DEVICE void pass_on(Accumulator& of_tile) {
    int const t = order.t();
    if (tile.behind.contains(t)) {
      sums.receive(of_tile, phases.received);
      phases.received ^= 1;
    }
    if (tile.before.contains(t)) {
      sums.send(of_tile, tile, phases.sent >> tile.way & 1);
      phases.sent ^= 1 << tile.way;
    } else {
      store_queries(params, tile, order.head, t, sums.part(), of_tile, sums.staging());
    }
  }
  /// Whether the warpgroup adds what is due before turn `turn`.
  CUTE_DEVICE bool is_own(int turn) const {
    if constexpr (Traits::OwnsHeads) return is_owner(held);
    return !Traits::AlternatesDq || (turn + row_block) % Traits::Consumers == Traits::Consumers - 1;
  }
};

}  // namespace cutlass_ext::sm90

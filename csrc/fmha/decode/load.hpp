// What the decode kernel brings to shared memory: tiles of K and V from the cache, its pages and the call's new keys,
// and the tile of Q. Called by fmha.hpp.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "../cache.hpp"
#include "../pack_gqa.hpp"
#include "traits.hpp"

namespace cutlass_ext::decode {

/// A warp's way through the tiles ahead of those that it works on: which tile it copies next, and from where.
template <class Traits>
class Loader {
  using Element = typename Traits::Element;
  using Stage = typename Traits::Stage;

 public:
  /// `walk` is the warp's own, in shared memory: only a change of sequence needs it. Rows that do not begin at 16 bytes
  /// are not `aligned`.
  CUTE_DEVICE Loader(Params const& params, Walk<Traits::TileKeys>& walk, int head, int warp, bool aligned)
      : params_(params),
        walk_(walk),
        head_(head),
        key_warp_(Traits::RowWarps == 1 ? warp : 0),
        row0_(Traits::row0_of(warp)),
        lane_(threadIdx.x % 32),
        aligned_(aligned) {
    enter();
    settle(true);
  }

  /// Starts the copy of the next tile of K and V, if there is one, and commits a group either way.
  CUTE_DEVICE void load(Stage& stage) {
    if (tile_ < tile_end_) {
      KvRow<Element const> const mine = rows();
      if (__builtin_expect(aligned_, true)) {
        copy(stage.k, mine.k, params_.head_dim);
        copy(stage.v, mine.v, params_.head_dim_v);
      } else {
        copy_elements(stage, mine);
      }
      tile_ += Traits::KeyWarps;
      settle(false);
    }
    cute::cp_async_fence();
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
    if (!params_.paged() && !walk_.done()) {
      page_ = params_.batch_idx ? nearest_page(params_.batch_idx[walk_.batch()], params_.pages) : walk_.batch();
    }
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
    if (params_.paged()) {
      page_ = entered ? page_of(tile_) : next_page_;
      next_page_ = page_of(tile_ + Traits::KeyWarps);
    }
  }

  CUTE_DEVICE int key_of(int tile) const { return tile * Traits::TileKeys + row0_ + lane_ % Traits::LoadRows; }

  /// The page of the lane's row of a tile, as the table has it.
  CUTE_DEVICE int page_of(int tile) const {
    int const key = key_of(tile);
    return tile < tile_end_ && key < cached_ ? params_.pages_of(walk_.batch())[params_.page_rows.div(key + leftpad_)]
                                             : 0;
  }

  /// The rows that the lane speaks for.
  CUTE_DEVICE KvRow<Element const> rows() const {
    int const key = key_of(tile_), batch = walk_.batch();
    if (key < cached_) {
      int const page = params_.paged() ? nearest_page(page_, params_.pages) : page_,
                row = row_in_page(params_, key + leftpad_);
      return {row_at<Element const>(params_.k, params_.k_stride, page, row, head_),
              row_at<Element const>(params_.v, params_.v_stride, page, row, head_)};
    }
    if (params_.n_new == 0 || key >= len_) return {};
    return {row_at<Element const>(params_.k_new, params_.k_new_stride, batch, key - cached_, head_),
            row_at<Element const>(params_.v_new, params_.v_new_stride, batch, key - cached_, head_)};
  }

  /// `lanes_row`: the row of the tile that the lane speaks for.
  CUTE_DEVICE void copy(Element* tile, Element const* lanes_row, int cols) const {
    CUTE_UNROLL
    for (int pass = 0; pass < Traits::LoadRows / 4; ++pass) {
      int const row = pass * 4 + lane_ / 8;
      Element const* from = row_of_lane(lanes_row, row);
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

  /// The same of both tiles where rows begin anywhere, through registers.
  CUTE_DEVICE void copy_elements(Stage& stage, KvRow<Element const> const& lanes_row) const {
    CUTE_NO_UNROLL
    for (int row = 0; row < Traits::LoadRows; ++row) {
      Element const *const k = row_of_lane(lanes_row.k, row), *const v = row_of_lane(lanes_row.v, row);
      CUTE_NO_UNROLL
      for (int chunk = lane_; chunk < Traits::Chunks; chunk += 32) {
        int const col = chunk * Traits::Vector, at = chunk_offset<Element, Traits::TileKeys>(row0_ + row, chunk);
        auto const put = [&](Element* tile, Element const* from, int cols) {
          *reinterpret_cast<uint4*>(tile + at) =
              from && col < cols ? load_chunk(from + col, false) : make_uint4(0, 0, 0, 0);
        };
        put(stage.k, k, params_.head_dim);
        put(stage.v, v, params_.head_dim_v);
      }
    }
  }

  CUTE_DEVICE static Element const* row_of_lane(Element const* lanes_row, int lane) {
    return reinterpret_cast<Element const*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(lanes_row), lane));
  }

  Params const& params_;
  Walk<Traits::TileKeys>& walk_;
  int head_, key_warp_, row0_, lane_;
  int tile_, tile_end_;
  int leftpad_, cached_, len_;    // of the sequence: see Sequence
  int page_ = 0, next_page_ = 0;  // of the lane's row, now and in the next tile; or the cache's batch index
  bool aligned_;
};

/// The new keys of a tile in shared memory that begins with key `first_key`, of the rows that the warp has copied:
/// turned where they lie, and written to the cache by the CTA of the last query rows. Those of the others turn copies
/// of their own, so that nobody reads what another one writes.
template <class Traits>
CUTE_DEVICE void take_new_keys(Params const& params, Walk<Traits::TileKeys> const& walk, int head, int first_key,
                               typename Traits::Stage& stage, bool aligned) {
  using Element = typename Traits::Element;
  Sequence const& s = walk.sequence();
  int const row0 = Traits::row0_of(threadIdx.x / 32);
  auto const chunk_of = [](Element* tile) {
    return [=](int row, int chunk) -> uint4& {
      return *reinterpret_cast<uint4*>(tile + chunk_offset<Element, Traits::TileKeys>(row, chunk));
    };
  };
  take_new_rows<Traits::HeadDim, Element>(
      max(s.cached - first_key, row0), min(s.visibility.len_kv - first_key, row0 + Traits::LoadRows), params.rotary,
      first_key + s.k_row0, walk.tokens().ends, aligned, params.head_dim, params.head_dim_v, chunk_of(stage.k),
      chunk_of(stage.v), [&](int i) -> KvRow<Element> {
        int const batch = walk.batch(), key_row = first_key + i + s.k_row0, page = page_of_row(params, batch, key_row),
                  row = row_in_page(params, key_row);
        if (page < 0) return {};
        return {row_at<Element>(params.k, params.k_stride, page, row, head),
                row_at<Element>(params.v, params.v_stride, page, row, head)};
      });
}

/// The tile of Q on its way from global to shared memory: under way before the copies of K and V queue up in front of
/// it (7 us for it on an H200 where it was asked for after them). A small one waits in registers, so that the next
/// sequence's can be asked for while its place is in use.
template <class Traits>
class Query {
  using Element = typename Traits::Element;
  static constexpr int Chunks = Traits::Chunks, All = Traits::Rows * Chunks,
                       Each = (All + Traits::Threads - 1) / Traits::Threads;  // chunks of a thread

 public:
  static constexpr bool Waits = Each <= 2;  // registers for more than 2 are not there
  static_assert(Waits || All % Traits::Threads == 0, "what is copied straight to its place has one there");

  /// Asks for the rows of the sequence that `walk` stands at, which go to `sQ`, tiles of kWarpRows rows.
  CUTE_DEVICE void ask(Params const& params, Place const& place, Walk<Traits::TileKeys> const& walk, Element* sQ,
                       bool aligned) {
    constexpr int Unroll = Waits ? Each : 2;
#pragma unroll Unroll
    for (int i = 0; i < Each; ++i) {
      int const index = i * Traits::Threads + threadIdx.x;
      Element const* const from = chunk(params, place, walk.rows(params), index);
      if (Waits || !aligned) {
        uint4 const x = from ? load_chunk(from, aligned) : make_uint4(0, 0, 0, 0);
        (Waits ? waiting_[Waits ? i : 0] : chunk_of(sQ, index / Chunks, index % Chunks)) = x;
      } else {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(
            *reinterpret_cast<uint4 const*>(from), chunk_of(sQ, index / Chunks, index % Chunks), from != nullptr);
      }
    }
    if (!Waits) cute::cp_async_fence();
  }

  /// Has them in `sQ`, turned if the call asks for it. The copies of K and V that were under way before they were asked
  /// for have then come too.
  CUTE_DEVICE void put(Params const& params, Place const& place, Walk<Traits::TileKeys> const& walk, Element* sQ) {
    if constexpr (Waits) {
      CUTE_UNROLL
      for (int i = 0; i < Each; ++i) {
        int const index = i * Traits::Threads + threadIdx.x;
        if (All % Traits::Threads == 0 || index < All) chunk_of(sQ, index / Chunks, index % Chunks) = waiting_[i];
      }
    } else if (first_) {
      cute::cp_async_wait<Traits::Stages - 1>();
    } else {
      cute::cp_async_wait<0>();
    }
    first_ = false;
    if (!params.rotary.cos) return;
    __syncthreads();
    int const first_new = walk.sequence().cached + walk.sequence().k_row0;
    CUTE_NO_UNROLL
    for (int row = threadIdx.x / 32; row < Traits::rows_of(params, place, walk.rows(params)); row += Traits::Warps) {
      int const token = Traits::packed_row(params, place, row).token;
      rotate_row<Element>(params.rotary, rotary_position(params.rotary, first_new, token),
                          [&](int c) -> uint4& { return chunk_of(sQ, row, c); });
    }
  }

 private:
  /// 16 bytes of the tile, counted row by row; null where it has none.
  CUTE_DEVICE static Element const* chunk(Params const& params, Place const& place, QueryRows const& rows, int index) {
    int const row = index / Chunks, col = index % Chunks * Traits::Vector;
    if (row >= Traits::rows_of(params, place, rows) || col >= params.head_dim) return nullptr;
    PackedRow const packed = Traits::packed_row(params, place, row);
    return row_at<Element const>(params.q, params.q_stride, rows.batch, rows.row0 + packed.token, packed.head) + col;
  }
  CUTE_DEVICE static uint4& chunk_of(Element* sQ, int row, int chunk) {
    return *reinterpret_cast<uint4*>(sQ + Traits::query_tile(row) +
                                     chunk_offset<Element, kWarpRows>(row % kWarpRows, chunk));
  }

  uint4 waiting_[Waits ? Each : 1];
  bool first_ = true;
};

}  // namespace cutlass_ext::decode

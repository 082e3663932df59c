// Tiles from global to shared memory by the tensor memory accelerator (TMA), in panels of 64 columns swizzled over 128
// bytes. Used by the warps of the Hopper kernels that copy.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>

#include "../sm90/pipeline.hpp"
#include "../visibility.hpp"

namespace cutlass_ext::sm90 {

using namespace cute;

constexpr int kPanel = 64;  // 16-bit columns of one copy: 128 bytes, the widest swizzle

/// Copies a box of rows of one head to a tile of `Rows` rows, in panels; `barrier` counts the bytes as they land.
/// `smem` is where the box begins in the first panel. The tile's first `lead` columns lie before the head's own and
/// arrive as zeros.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_box(CUtensorMap const& map, Barrier& barrier, Element* smem, int row, int head, int batch,
                          TMA::CacheHintSm90 hint, int lead = 0) {
  CUTE_UNROLL
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), static_cast<uint64_t>(hint),
                           smem + panel * Rows * kPanel, panel * kPanel - lead, row, head, batch);
  }
}

/// The same, to the same place of those CTAs of the cluster whose bits are set in `ctas`, of each of which its own
/// barrier counts the bytes.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_box_to_all(CUtensorMap const& map, Barrier& barrier, Element* smem, int row, int head, int batch,
                                 uint16_t ctas, TMA::CacheHintSm90 hint) {
  CUTE_UNROLL
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    SM90_TMA_LOAD_MULTICAST_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), ctas, static_cast<uint64_t>(hint),
                                     smem + panel * Rows * kPanel, panel * kPanel, row, head, batch);
  }
}

/// A box that is the whole tile, by one thread, which tells `barrier` of the bytes.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_panels(CUtensorMap const& map, Barrier& barrier, Element* smem, int row, int head, int batch,
                             TMA::CacheHintSm90 hint, int lead = 0) {
  barrier.arrive_and_expect_tx(Rows * Cols * sizeof(Element));
  copy_box<Rows, Cols>(map, barrier, smem, row, head, batch, hint, lead);
}

/// The same of a tile of Q whose rows are `rows` / tokens heads of as many tokens as the map's box holds: packed head
/// `head`, from token `token` on.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void copy_packed_panels(CUtensorMap const& map, Barrier& barrier, Element* smem, int rows, int token,
                                    int head, int batch, TMA::CacheHintSm90 hint, int lead = 0) {
  barrier.arrive_and_expect_tx(rows * Cols * sizeof(Element));
  CUTE_UNROLL
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), static_cast<uint64_t>(hint),
                           smem + panel * Rows * kPanel, panel * kPanel - lead, 0, token, head, batch);
  }
}

/// Zeroes the rows of a tile but those of `kept`. By a whole warp.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void zero_rows(Element* tile, Range kept) {
  for (int panel = 0; panel < Cols / kPanel; ++panel) {
    auto* const chunks = reinterpret_cast<uint4*>(tile + panel * Rows * kPanel);
    for (Range const rows : {Range{0, kept.begin}, Range{kept.end, Rows}}) {
      for (int chunk = rows.begin * 8 + threadIdx.x % 32; chunk < rows.end * 8; chunk += 32)
        chunks[chunk] = make_uint4(0, 0, 0, 0);
    }
  }
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

/// Zeroes the rows of a tile whose bits are set in `rows`. By a whole warp, before zero_rows, which makes it seen.
template <int Rows, int Cols, class Element>
CUTE_DEVICE void zero_chosen_rows(Element* tile, uint32_t const* rows) {
  for (int chunk = threadIdx.x % 32; chunk < Rows * 8; chunk += 32) {
    if (!(__ldg(rows + chunk / 8 / 32) >> chunk / 8 % 32 & 1)) continue;
    for (int panel = 0; panel < Cols / kPanel; ++panel)
      reinterpret_cast<uint4*>(tile + panel * Rows * kPanel)[chunk] = make_uint4(0, 0, 0, 0);
  }
}

/// Copies tiles whose rows may end inside them and zeroes the rows that do not exist, before anyone sees them, where
/// the tensor goes on there; what lies past its own end arrives as zeros. V, because P is 0 there, but 0 times NaN is
/// not; Q, because warps ask all of their rows whether m is to rise (LazySoftmax), and bits must not depend on what
/// lies behind a sequence. Used by a whole warp.
struct TailCopy {
  Barrier& landed;
  uint32_t phase = 0;

  /// A tile of which, where it is `cut`, the rows outside `kept` are to be zeroed, and those in `left_out`, bits, where
  /// that is not null. `copy(barrier)` starts its copies.
  template <int Rows, int Cols, class Element, class Copy>
  CUTE_DEVICE void tile(Barrier& full, Element* to, bool cut, Range kept, Copy const& copy,
                        uint32_t const* left_out = nullptr) {
    copy(cut ? landed : full);
    if (cut) {
      landed.wait_for(phase);
      phase ^= 1;
      if (left_out) zero_chosen_rows<Rows, Cols>(to, left_out);
      zero_rows<Rows, Cols>(to, kept);
      if (threadIdx.x % 32 == 0) full.arrive();
    }
  }
};

}  // namespace cutlass_ext::sm90

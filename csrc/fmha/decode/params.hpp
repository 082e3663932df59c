// Sizes that the decode kernels and the choice among them share.
#pragma once

namespace cutlass_ext::decode {

/// Packed query rows of the narrow kernels (narrow.hpp, cluster.hpp), the sequences that they take, and log2 of the
/// keys of a tile, which lies in one page.
constexpr int kNarrowRows = 8, kNarrowBatch = 256, kNarrowTileShift = 4;

/// Of the kernel of cluster.hpp: the largest cluster, and the warps of a CTA.
constexpr int kMaxCluster = 8, kClusterWarps = 8;

/// Tiles for each warp of cluster.hpp at most: it holds their pages in its lanes.
constexpr int kClusterTurns = 16;

}  // namespace cutlass_ext::decode

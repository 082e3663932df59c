// Features: what a call asks of a kernel beyond plain attention, a bit each. A kernel says which bits it takes; a call
// runs on none that does not take all of its bits. Used by the kernels' structs, host/plan.cpp and the tests.
#pragma once

#include <cstdint>

#include "params.hpp"

namespace cutlass_ext {

using Features = uint32_t;

/// How a kernel carries a call out; its grid and its workspace follow from it.
enum class Kind {
  Persistent,      ///< CTAs that take query tiles until there are none left
  Tiles,           ///< a CTA for each query tile and split
  Short,           ///< a CTA for each query tile, for launches that are over before a pipeline is full
  Heads,           ///< a CTA for each query head, of few rows and keys
  Decode,          ///< few query rows, those of all heads that share a KV head in one tile
  Narrow,          ///< the same of at most decode::kNarrowRows such rows, reading only
  Cluster,         ///< the same, a cluster of CTAs for each sequence and KV head
  KeyGradients,    ///< of the backward pass: dK and dV, a CTA for each tile of keys
  QueryGradients,  ///< and dQ, a CTA for each tile of query rows
  AllGradients,    ///< dK and dV, and dQ or sums for it, which CTAs add to in any order or in their own
  HeadGradients,   ///< dK, dV and dQ of a KV head, by one CTA or cluster
  BiasGradients,   ///< dBias, by CTAs that go through its tiles
};
constexpr int kKinds = static_cast<int>(Kind::BiasGradients) + 1;

/// CTAs that a cluster may have on any Hopper GPU.
constexpr int kMostInCluster = 8;

/// How the CTAs of a gradients kernel go through tiles: what its family's Backward::kLoop says.
struct TileLoop {
  bool persistent = false;          ///< one tile, or head, after the other
  bool splits = false;              ///< several may share a tile: of each some of the heads and tiles that pass by
  bool any_order = false;           ///< rows may pass by in either order
  bool fuses_postprocess = false;   ///< dQ may be made beside the tiles
  bool dq_through_cluster = false;  ///< each CTA of a cluster has a tile of a head, and passes sums of dQ on
  bool preprocesses_rows = false;   ///< CTAs make the statistics of rows of their next head
  bool in_order = false;            ///< tiles of keys may add to dQ in their order
  bool waits = false;               ///< it waits for the launch before it by itself (launch_order.hpp)
  unsigned cluster = 1;             ///< CTAs that have a tile together
};

// A bit, the argument that asks for it, when a call `p` does, and what makes it a call that does not. A new line here
// is taken by no kernel until one says so.
#define CUTLASS_EXT_FEATURES(FEATURE)                                                                            \
  FEATURE(Softcap, "softcap", p.softcap > 0.f, p.softcap = 0.f)                                                  \
  FEATURE(Alibi, "alibi_slopes", p.alibi_slopes, p.alibi_slopes = nullptr)                                       \
  FEATURE(Sink, "sink", p.sink, p.sink = nullptr)                                                                \
  FEATURE(Packed, "cu_seqlens_q", p.packed(), p.cu_seqlens_q = p.cu_seqlens_k = nullptr)                         \
  FEATURE(KeyLengths, "seqused_k", p.seqused_k, p.seqused_k = nullptr)                                           \
  FEATURE(LeftPadding, "leftpad_k", p.leftpad_k, p.leftpad_k = nullptr)                                          \
  FEATURE(StartPositions, "start_pos", p.start_pos_kind == StartPos::PerBatch, p.start_pos_kind = StartPos::End) \
  FEATURE(FewerKeys, "cache_seqlens", p.n_cached < p.n_kv, p.n_cached = p.n_kv)                                  \
  FEATURE(Pages, "block_table", p.block_table, p.block_table = nullptr)                                          \
  FEATURE(BatchIndex, "cache_batch_idx", p.batch_idx, p.batch_idx = nullptr)                                     \
  FEATURE(NewKeys, "k", p.k_new, (p.k_new = nullptr, p.n_new = 0))                                               \
  FEATURE(RotaryEmbedding, "rotary_cos", p.rotary.cos, p.rotary.cos = nullptr)                                   \
  FEATURE(FixedSplits, "num_splits", p.fixed_splits, p.fixed_splits = false)                                     \
  FEATURE(Bias, "bias", p.bias.data, p.bias.data = nullptr)                                                      \
  FEATURE(Mask, "mask", p.mask.bits, p.mask.bits = nullptr)                                                      \
  FEATURE(Dropout, "dropout_p", p.dropout.seed, p.dropout.seed = nullptr)                                        \
  FEATURE(Float32Results, "out_dtype", p.widens, p.widens = false)                                               \
  FEATURE(UnalignedRows, "q, k, v", !rows_are_aligned(p), void())                                                \
  FEATURE(ScatteredBias, "bias", is_scattered(p.bias), void())

namespace feature {
enum Index : int {
#define FEATURE(name, argument, asked, cleared) name##Index,
  CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE
      kCount
};
#define FEATURE(name, argument, asked, cleared) constexpr Features name = Features(1) << name##Index;
CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE

/// What changes scores between the two products.
constexpr Features kScoreMods = Softcap | Alibi;
/// A bias that lies in any way; and what pairs of a row and a key have of their own.
constexpr Features kBias = Bias | ScatteredBias, kPairs = kBias | Mask | Dropout;
constexpr Features kMods = kScoreMods | kPairs;
/// What tells the sequences of a padded batch apart by numbers on the device.
constexpr Features kUnlike = KeyLengths | LeftPadding | StartPositions;
/// What belongs to a cache.
constexpr Features kCache = FewerKeys | Pages | BatchIndex | NewKeys | RotaryEmbedding;
}  // namespace feature

/// Whether every row that is read begins at a multiple of 16 bytes, as vectors and the copy engine (TMA) want it.
/// Strides of dimensions of size 1 are never used.
CUTE_HOST_DEVICE bool rows_are_aligned(Params const& p) {
  auto const aligned = [&](void const* data, Strides const& stride, int batch, int rows, int heads) {
    auto const step = [&](int64_t elements, int size) { return size <= 1 || elements * p.element_bytes % 16 == 0; };
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && step(stride.batch, batch) && step(stride.row, rows) &&
           step(stride.head, heads);
  };
  int const batch = p.stored_batch(), keys = p.paged() ? p.page_rows.divisor : p.stored_keys(),
            places = p.pages > 0 ? p.pages : batch;
  return aligned(p.q, p.q_stride, batch, p.stored_rows(), p.heads_q) &&
         aligned(p.k, p.k_stride, places, keys, p.heads_kv) && aligned(p.v, p.v_stride, places, keys, p.heads_kv) &&
         aligned(p.k_new, p.k_new_stride, batch, p.n_new, p.heads_kv) &&
         aligned(p.v_new, p.v_new_stride, batch, p.n_new, p.heads_kv);
}

/// Whether several heads or sequences read the same elements of a bias, so that a copy of it whose rows are whole
/// vectors pays in the forward pass, too; not behind padding in front, where the copy engine brings none. An H200's ms,
/// as it lies and with the copy: (8, 1024, 16, 64) three elements off 0.243 and 0.161, (128, 197, 12, 64) 0.198 and
/// 0.142. Gradients gain by any: (8, 1023, 16, 64) of one for each sequence 2.62 and 0.60.
inline bool shares_bias(Params const& p) {
  Bias const& of = p.bias;
  if (p.leftpad_k) return false;
  return (of.batch == 0 && p.batch > 1) || (of.head == 0 && p.heads_q > 1);
}

/// The bits of a call.
CUTE_HOST_DEVICE Features features_of(Params const& p) {
  Features features = 0;
#define FEATURE(name, argument, asked, cleared) features |= (asked) ? feature::name : 0;
  CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE
  return features;
}

/// The parameters for a kernel that takes the features `Takes` alone: those of the others as constants. Code for plain
/// calls is then a quarter smaller and runs straight through, which counts where a kernel of a few microseconds finds
/// its instructions in device memory: with L2 cold, decoding 1024 keys of 8 heads takes 18.4 us on an H200 with
/// everything in the way, 12.7 without.
template <Features Takes>
CUTE_HOST_DEVICE Params specialised(Params const& params) {
  Params p = params;
#define FEATURE(name, argument, asked, cleared) \
  if constexpr ((Takes & feature::name) == 0) cleared;
  CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE
  return p;
}

/// The parameters of a call as if it did not ask for `bit`.
inline Params without(Params p, Features bit) {
#define FEATURE(name, argument, asked, cleared) \
  if (bit == feature::name) cleared;
  CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE
  return p;
}

/// The argument that asks for the lowest bit of `features`, which is not 0.
inline char const* argument_of(Features features) {
  static constexpr char const* kArguments[] = {
#define FEATURE(name, argument, asked, cleared) argument,
      CUTLASS_EXT_FEATURES(FEATURE)
#undef FEATURE
  };
  int index = 0;
  while (!(features >> index & 1)) ++index;
  return index < feature::kCount ? kArguments[index] : "(unknown)";
}

}  // namespace cutlass_ext

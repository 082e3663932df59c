// A CTA's place, its query rows and the key tiles that they see, and its way through the sequences that it works on.
// Called by the decode kernels, and by the tests on the host.
#pragma once

#include "../pack_gqa.hpp"
#include "partition.hpp"

namespace cutlass_ext::decode {

/// The query rows of a CTA: tokens [first, last] of each sequence.
struct Tokens {
  int first, last;
  bool ends;  // the sequence's last ones: the CTA that writes the new keys

  /// Those that sequence `s` has: packed ones lie in one tile, and have rows of their own number.
  CUTE_HOST_DEVICE Tokens of(Lengths const& lengths, Sequence const& s) const {
    return {first, lengths.packed() ? s.visibility.n_q - 1 : last, ends};
  }
};

/// The key tiles that some of the CTA's rows sees, and, for the CTA of the last ones, the tiles of the new keys, which
/// are written whoever sees them, even where there is no query row.
CUTE_HOST_DEVICE Range tiles_of(Lengths const& lengths, Sequence const& s, Tokens const& of_cta, int tile_keys) {
  Tokens const tokens = of_cta.of(lengths, s);
  Range const seen = tokens.last < tokens.first
                         ? Range{0, 0}
                         : s.visibility.tiles_of(tokens.first, tokens.last - tokens.first + 1, tile_keys);
  if (lengths.n_new == 0 || s.cached >= s.visibility.len_kv || !tokens.ends) return seen;
  Range const fresh = {s.cached / tile_keys, (s.visibility.len_kv + tile_keys - 1) / tile_keys};
  if (seen.size() == 0) return fresh;
  return {seen.begin < fresh.begin ? seen.begin : fresh.begin, seen.end > fresh.end ? seen.end : fresh.end};
}

/// The place of a CTA in the grid: KV heads fastest, so that CTAs that run together read the same rows of the cache.
struct Place {
  int head, row_tile;
  unsigned group, cta, ctas;  // CTA `cta` of the group's `ctas`

  CUTE_HOST_DEVICE Place(Params const& params, unsigned index) : ctas(params.heads_kv * params.row_tiles) {
    group = index / ctas;
    cta = index - group * ctas;
    row_tile = params.row_tiles == 1 ? 0 : cta / params.heads_kv;
    head = cta - row_tile * params.heads_kv;
  }

  /// The query rows of the CTA, of tiles of `rows` packed ones.
  CUTE_HOST_DEVICE Tokens tokens(Params const& params, int rows) const {
    int const last = ((row_tile + 1) * rows - 1) / params.heads_per_kv.divisor;
    return {row_tile * rows / params.heads_per_kv.divisor, last < params.n_q ? last : params.n_q - 1,
            row_tile == params.row_tiles - 1};
  }
};

/// Part of a sequence's key tiles, and of how many parts it is which.
struct KeyShare {
  int batch;
  Range tiles;
  unsigned part, parts;
  unsigned first_group;  // whose CTAs have part 0
  bool begins_inside;
};

/// A CTA's walk over its work: sequence by sequence, from tile `at` to tile `end` of the batch.
template <int TileKeys>
class Walk {
 public:
  /// For a caller-fixed number of splits: one sequence, its tiles cut by its own length.
  CUTE_HOST_DEVICE static Walk of_split(Params const& params, unsigned group, Tokens const& tokens) {
    Walk walk(Partition(0, 1, 1), tokens);
    walk.split_ = group % params.num_splits;
    walk.batch_ = group / params.num_splits;
    walk.enter(params);
    unsigned const tiles = walk.tiles_.size(), split = walk.split_;
    unsigned const each = tiles / params.num_splits, more = tiles % params.num_splits;  // the first ones have one more
    walk.at_ = split * each + (split < more ? split : more);
    walk.end_ = walk.at_ + each + (split < more);
    return walk;
  }

  /// For equal chunks of the batch: from its tile `at` to `end`; sequence `batch` begins at tile `first`.
  CUTE_HOST_DEVICE static Walk of_chunk(Params const& params, Partition const& partition, unsigned group,
                                        unsigned batch, unsigned first, Tokens const& tokens) {
    Walk walk(partition, tokens);
    walk.at_ = partition.begin_of(group);
    walk.end_ = partition.end_of(group);
    walk.batch_ = batch;
    walk.first_ = first;
    if (!walk.done()) walk.enter(params);
    return walk;
  }

  CUTE_HOST_DEVICE bool done() const { return at_ >= end_; }

  /// The tiles of the sequence that the walk stands at.
  CUTE_HOST_DEVICE Range here() const {
    int const begin = static_cast<int>(at_ - first_), end = static_cast<int>(end_ - first_);
    return {tiles_.begin + begin, end < tiles_.size() ? tiles_.begin + end : tiles_.end};
  }

  CUTE_HOST_DEVICE void next(Params const& params) {
    do {
      first_ += tiles_.size();
      at_ = first_;
      if (done()) return;
      ++batch_;
      enter(params);
    } while (tiles_.size() == 0);
  }

  CUTE_HOST_DEVICE Tokens const& tokens() const { return tokens_; }  // of any sequence: Tokens::of
  CUTE_HOST_DEVICE int batch() const { return batch_; }
  CUTE_HOST_DEVICE Sequence const& sequence() const { return sequence_; }
  CUTE_HOST_DEVICE QueryRows rows(Params const& params) const { return query_rows(params, batch_, sequence_); }

  CUTE_HOST_DEVICE KeyShare share(Params const& params, unsigned group) const {
    if (params.fixed_splits) {
      return {batch_, here(), unsigned(split_), unsigned(params.num_splits), unsigned(batch_ * params.num_splits),
              false};
    }
    Sharing const sharing(partition_, first_, tiles_.size());
    return {batch_, here(), group - sharing.first_group, sharing.parts, sharing.first_group, sharing.begins_inside};
  }

 private:
  CUTE_HOST_DEVICE Walk(Partition const& partition, Tokens const& tokens) : partition_(partition), tokens_(tokens) {}

  CUTE_HOST_DEVICE void enter(Params const& params) {
    sequence_ = sequence_of(params, batch_);
    tiles_ = tiles_of(params, sequence_, tokens_, TileKeys);
  }

  Partition partition_;
  Tokens tokens_;
  unsigned at_ = 0, end_ = 0, first_ = 0;  // tiles of the batch; `first_` is the sequence's first
  int batch_ = 0, split_ = 0;
  Sequence sequence_{};
  Range tiles_{0, 0};
};

}  // namespace cutlass_ext::decode

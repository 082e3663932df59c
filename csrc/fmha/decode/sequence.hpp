// What a CTA knows of one sequence of the cache: its keys, which of them are new, where its query rows stand, and where
// a key's row lies. Called by the decode kernel, and by the tests on the host.
#pragma once

#include "../visibility.hpp"
#include "params.hpp"

namespace cutlass_ext::decode {

struct Sequence {
  Visibility visibility;  // keys counted from the first real one, the new ones included
  int leftpad;
  int cached;  // keys in the cache, likewise counted; at or past this a key is new
};

/// Reads the lengths of sequence `b`. Whatever the device holds stays in bounds.
CUTE_HOST_DEVICE Sequence sequence_of(DecodeParams const& params, int b) {
  auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
  int const cached = clamp(params.seqused_k ? params.seqused_k[b] : params.cached, 0, params.n_kv);
  int const len = clamp(cached + params.n_new, 0, params.n_kv);
  int const leftpad = params.leftpad_k ? clamp(params.leftpad_k[b], 0, cached) : 0;
  int const start = params.start_pos_kind == StartPos::Scalar ? params.start_pos
                    : params.start_pos_kind == StartPos::PerBatch
                        ? clamp(params.start_positions[b], -kMaxPosition, kMaxPosition)
                        : len - params.n_q;
  return {
      {params.n_q, len - leftpad, start - leftpad, params.window_left, params.window_right}, leftpad, cached - leftpad};
}

/// The query rows of a CTA: tokens [first, last] of each sequence.
struct Tokens {
  int first, last;
  bool ends;  // `last` is the sequence's last
};

/// The key tiles that some of `tokens` sees, and, for the CTA of the last ones, the tiles of the new keys, which are
/// written whoever sees them.
CUTE_HOST_DEVICE Range tiles_of(Sequence const& s, Tokens const& tokens, int tile_keys) {
  Range const tiles = s.visibility.tiles_of(tokens.first, tokens.last - tokens.first + 1, tile_keys);
  if (s.cached >= s.visibility.len_kv || !tokens.ends) return tiles;
  Range const fresh = {s.cached / tile_keys, (s.visibility.len_kv + tile_keys - 1) / tile_keys};
  if (tiles.size() == 0) return fresh;
  return {tiles.begin < fresh.begin ? tiles.begin : fresh.begin, tiles.end > fresh.end ? tiles.end : fresh.end};
}

}  // namespace cutlass_ext::decode

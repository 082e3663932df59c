// The query rows of a decode kernel's CTA and the key tiles that they see, the new keys' among them. Called by the
// decode kernels, and by the tests on the host.
#pragma once

#include "../sequence.hpp"

namespace cutlass_ext::decode {

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

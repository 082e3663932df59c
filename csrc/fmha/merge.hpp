// The one merge of parts: several (O, m, l) of a row, each over keys of its own, become one (Flash-Decoding's second
// step). Called by kernels whose warps, warpgroups or CTAs share a row's keys; what a launch of its own merges is in
// merge_splits.hpp.
#pragma once

#include "params.hpp"
#include "sequence.hpp"
#include "softmax.hpp"

namespace cutlass_ext {

/// How often what a part has summed up (l, O) counts beside parts whose common maximum has `base_of` it `base`.
CUTE_DEVICE float weight_of(Part const& part, float base) { return exp2_approx(part.m - base); }

/// All parts of a row as one, in their order; O is to be the sum of the parts' O times `weights`.
template <int Parts>
CUTE_DEVICE Part merge(Part const (&parts)[Parts], float (&weights)[Parts]) {
  Part all{parts[0].m, 0.f};
  CUTE_UNROLL
  for (int i = 1; i < Parts; ++i) all.m = fmaxf(all.m, parts[i].m);
  CUTE_UNROLL
  for (int i = 0; i < Parts; ++i) {
    weights[i] = weight_of(parts[i], base_of(all.m));
    all.l = fmaf(parts[i].l, weights[i], all.l);
  }
  return all;
}

}  // namespace cutlass_ext

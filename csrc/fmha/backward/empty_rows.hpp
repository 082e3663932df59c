// Which rows may see none of the keys that are there, by what the forward pass left of them. Asked by preprocess.hpp
// and sm80_whole_heads.hpp, which then look.
#pragma once

#include "../params.hpp"

namespace cutlass_ext {

/// The lse that a row has to pass to be taken for one that sees some key. Of one that sees none it is -inf, or the
/// sink's logit but for rounding, or NaN where NaN met a bias of -inf, as that of other rows may be, too. An lse of
/// more keys than there are passes it, and is believed where bias or mask hide all that are there.
CUTE_DEVICE float lse_without_keys(Params const& params, int head) {
  float const logit = params.sink_of(head);
  return logit == -INFINITY ? logit : logit + 1e-4f * (1.f + fabsf(logit));
}

}  // namespace cutlass_ext

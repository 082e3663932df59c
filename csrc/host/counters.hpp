// Counters that the CTAs of a launch share (work taken, parts done): zero when a kernel begins, and left zero by it.
// Used by plan.cpp.
#pragma once

#include <cstddef>
#include <functional>

#include <cuda_runtime.h>

namespace cutlass_ext {

/// `count` zero counters for a launch on `stream` of the current device. Calls on one stream follow each other and
/// share theirs. So do the calls on one stream of a graph's capture, until the graph and all that was instantiated from
/// it are gone; two instances of one graph must not run at the same time (they share every temporary tensor as well).
/// Nothing is allocated and nothing waits, unless there are no such counters left or a launch wants very many: then
/// `allocate` gives memory, which is zeroed in stream order.
unsigned* zero_counters(int device, cudaStream_t stream, size_t count, std::function<void*(size_t)> const& allocate);

}  // namespace cutlass_ext

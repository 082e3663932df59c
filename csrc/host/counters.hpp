// Counters that the CTAs of a launch share (work taken, parts done): zero when a kernel begins, and left zero by it.
// Used by plan.cpp.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace cutlass_ext {

/// `count` zero counters for a launch on `stream` of the current device; null where there are none to be had: then the
/// caller zeroes some of its own in stream order. Calls on one stream follow each other and share theirs. So do the
/// calls on one stream of a graph's capture, until the graph and all that was instantiated from it are gone; two
/// instances of one graph must not run at the same time (they share every temporary tensor as well). Nothing is
/// allocated and nothing waits.
unsigned* zero_counters(int device, cudaStream_t stream, size_t count);

}  // namespace cutlass_ext

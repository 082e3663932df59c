// Counters that the CTAs of a launch share (work taken, parts done): zero when a kernel begins, and left zero by it.
// Used by plan.cpp.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "workspace.hpp"

namespace cutlass_ext {

/// `count` zero counters for a launch on `stream` of the current device. Calls on one stream follow each other and
/// share theirs, and so do the calls on one stream of a graph's capture; two instances of one graph must not run at the
/// same time (they share every temporary tensor as well). Nothing is allocated and nothing waits, until the 4 MB that
/// the module has are used up: what a stream or a capture was given stays its own, since nobody says when it will have
/// run for the last time (a graph that holds a user object would, and takes 1.2 us longer a replay on an H200). From
/// then on `allocate` gives memory, which is zeroed in stream order.
unsigned* zero_counters(int device, cudaStream_t stream, size_t count, Allocate const& allocate);

/// Zeroes what zero_counters gave, in stream order: for a call of which a launch failed, since one that ran may have
/// waited for the CTAs of the other before it left its counters zero.
void zero_again(unsigned* counters, size_t count, cudaStream_t stream);

}  // namespace cutlass_ext

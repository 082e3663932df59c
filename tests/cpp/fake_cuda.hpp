// A CUDA runtime without a GPU: what host/device.cpp asks of one, answered for the GPUs listed here. Linked into the
// C++ tests in place of libcudart; used by plan_test.cpp and backward_test.cpp.
#pragma once

#include <cstddef>

namespace cutlass_ext::fake {

// Compute capability 9.0, 8.0, 8.6; and what a process of MPS may have been left of the first.
enum Gpu : int { kH200, kA100, kA40, kSevenOfH200 };

/// Makes `gpu` the current device.
void use(Gpu gpu);

/// Bytes that were set to 0 since the test last said so.
extern size_t cleared_bytes;

/// How many biases `align_bias` was given since then, to copy or not.
extern int biases_seen;

}  // namespace cutlass_ext::fake

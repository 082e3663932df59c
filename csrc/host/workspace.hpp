// Where launches have memory of their own from. Used by host/ and by kernels/dbias.cu.
#pragma once

#include <cstddef>
#include <functional>

namespace cutlass_ext {

/// Gives so many bytes of device memory, which live until the work of the call's stream is done with them. What fills
/// new memory does so on that stream: PyTorch's deterministic mode, and cudaMallocAsync, which has it in stream order.
/// So none is asked for while work runs beside the stream.
using Allocate = std::function<void*(size_t)>;

}  // namespace cutlass_ext

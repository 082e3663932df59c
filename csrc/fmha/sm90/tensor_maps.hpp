// The tensor maps of a launch: what the copy engine (TMA) is told of q, k and v. Made by kernels/tensor_maps.hpp, read
// by the Hopper kernels.
#pragma once

#include <cuda.h>

namespace cutlass_ext::sm90 {

struct TensorMaps {
  CUtensorMap q, k, v;
};

}  // namespace cutlass_ext::sm90

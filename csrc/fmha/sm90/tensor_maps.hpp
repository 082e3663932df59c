// The tensor maps of a launch: what the copy engine (TMA) is told of q, k and v. Made by kernels/tensor_maps.hpp, read
// by the Hopper kernels.
#pragma once

#include <cuda.h>

namespace cutlass_ext::sm90 {

struct TensorMaps {
  CUtensorMap q, k, v;
};

/// The same with that of a bias, where it is copied.
struct TensorMapsOfPairs : TensorMaps {
  CUtensorMap biases;
};

/// The same of one side's launch of the backward pass, of the tensors with the columns of q and k, and of those with
/// the columns of v and dout: what a CTA holds, and what it goes through.
struct GradientMaps {
  CUtensorMap held, held_v;
  CUtensorMap streamed, streamed_v;
  CUtensorMap dq;  // to write 16 rows, where CTAs make it of sums themselves
};

/// The same with that of a bias, where it is copied: in boxes of 64 rows and 64 keys.
struct GradientMapsOfBias : GradientMaps {
  CUtensorMap biases;
};

/// What the gradient of the bias reads: of rows, and of keys.
struct BiasMaps {
  CUtensorMap q, dout;
  CUtensorMap k, v;
};

}  // namespace cutlass_ext::sm90

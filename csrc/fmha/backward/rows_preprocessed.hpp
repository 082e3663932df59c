// Who makes the statistics of rows of calls whose CTAs have whole heads. Asked by host/backward.cpp and by
// sm90/producer.hpp.
#pragma once

#include <cstdint>

#include "../features.hpp"
#include "params.hpp"

namespace cutlass_ext {

/// Whether the CTAs make them themselves, while they work on the head before, for all heads but the first of each. They
/// can where the statistics follow from rows of 16 bits that begin at multiples of 16 bytes, and nothing else wants
/// them earlier. It pays where a head has work for as long: an H200's ms, with it and with a launch for all, (32, 512,
/// 32, 64) 0.447 and 0.468, causal 0.338 and 0.363, (128, 197, 12, 64) 0.215 and 0.237, (256, 64, 16, 64) 0.138 and
/// 0.162, (256, 100, 16, 64) 0.215 and 0.225; but of one tile of keys (256, 128, 16, 64) 0.244 and 0.227, (128, 128, 32
/// on 8, 64) 0.192 and 0.176.
CUTE_HOST_DEVICE bool preprocesses_in_kernel(BackwardParams const& p) {
  constexpr int kKeysOfATile = 128, kFewRows = 100;
  auto const is_aligned = [](void const* data, Strides const& stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (stride.batch | stride.row | stride.head) % 8 == 0;
  };
  bool const pays = p.n_kv > kKeysOfATile || int64_t(p.n_q) * p.heads_q <= int64_t(kFewRows) * p.heads_kv;
  return pays && !(features_of(p) & feature::Sink) && !p.delta && !p.dlse && is_aligned(p.dout, p.dout_stride) &&
         is_aligned(p.o, p.o_stride);
}

}  // namespace cutlass_ext

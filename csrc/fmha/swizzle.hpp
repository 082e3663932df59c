// The swizzle that every shared-memory tile of 128-byte panel rows has, by hand: for the copies and the lanes that
// read. tests/cpp holds it against CuTe's layouts.
#pragma once

#include <cute/config.hpp>

namespace cutlass_ext {

/// Offset, in its row of a panel, of chunk `chunk` of a row whose swizzle moves chunks by `moved`. A chunk is 16 bytes,
/// a panel's row 8 of them.
template <class Element>
CUTE_HOST_DEVICE constexpr int swizzled_chunk(int chunk, int moved) {
  return (chunk ^ (moved & 7)) * int(16 / sizeof(Element));
}

}  // namespace cutlass_ext

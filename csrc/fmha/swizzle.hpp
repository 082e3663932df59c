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

/// Offset, in a panel whose rows are columns of an operand A, of the row that `lane` names to a transposing load of
/// four matrices (ldmatrix.trans): of the operand's rows 16 `warp` on, and of its first 16 columns; others lie whole
/// rows of the panel further.
template <class Element>
CUTE_HOST_DEVICE constexpr int row_for_operand_a(int lane, int warp) {
  int const column = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  return column * int(128 / sizeof(Element)) + swizzled_chunk<Element>(chunk, column);
}

}  // namespace cutlass_ext

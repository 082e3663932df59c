// lse and delta of rows as columns of a product: a number that each row of B adds to a column of C = A B, by a product
// of ones and the number in three parts. Used by traits.hpp, producer.hpp and mainloop.hpp.
#pragma once

#include "../../cute_tensor.hpp"
#include "../../mma/wgmma.hpp"

namespace cutlass_ext::sm90 {

constexpr int kColumns = 64;  // of C

// A score that is nothing, as a number: its exp2 is 0 for every factor of scores from kLeastFactor on.
constexpr float kHidesRows = 1e30f, kLeastFactor = 1e-18f;

/// A row's number as the sum of three bfloat16, of 8 bits each, and zeros: eight of the sixteen that a product adds up.
/// Rows lie one behind the other, eight of them a core matrix of WGMMA's layout without swizzle.
struct alignas(16) ColumnsOfRow {
  uint32_t words[4];

  ColumnsOfRow() = default;
  CUTE_DEVICE explicit ColumnsOfRow(float number) {
    auto const upper = [](float x) { return __float_as_uint(x) & 0xffff0000; };
    uint32_t const high = upper(number);
    float const rest = number - __uint_as_float(high);
    uint32_t const middle = upper(rest);
    words[0] = high >> 16 | middle, words[1] = __float_as_uint(rest - __uint_as_float(middle)) >> 16;
    words[2] = words[3] = 0;
  }
};

/// A of that product, as a thread has it: ones in the first three of 16 columns.
struct OnesOfColumns {
  uint32_t words[2];
  CUTE_DEVICE OnesOfColumns() : words{threadIdx.x % 4 == 0 ? 0x3f803f80u : threadIdx.x % 4 == 1 ? 0x3f80u : 0u, 0u} {}
};

/// A product of A in registers, of 64 rows and columns and 16 steps, from nothing: elements `E` of C.
template <class C, size_t... E>
CUTE_DEVICE void begin_with(uint32_t const (&a)[2], uint64_t b, C& c, std::index_sequence<E...>) {
  SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<GMMA::Major::K, GMMA::Major::K>::fma(a[0], a[0], a[1], a[1], b, c(E)...,
                                                                               GMMA::ScaleOut::Zero);
}

/// C = A B and what `rows` add to its columns, over `Steps` times 16, issued and not waited for. In one piece:
/// with a fence between the two products the assembler makes a group of its own of the first.
template <int Steps, class Mma, class A, class B, class C>
CUTE_DEVICE void gemm_async(Mma, A const& a, B const& b, C& c, OnesOfColumns const& ones, ColumnsOfRow const* rows) {
  static_assert(decltype(size(c))::value == kColumns / 2, "a warpgroup's 64 rows");
  GmmaDescriptor of_rows;
  of_rows.desc_ = 0;  // the last eight of 16 are the first eight again, times 0
  of_rows.bitfield.start_address_ = cast_smem_ptr_to_uint(rows) >> 4;
  of_rows.bitfield.stride_byte_offset_ = 8 * sizeof(ColumnsOfRow) >> 4;
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  begin_with(ones.words, of_rows.desc_, c, std::make_index_sequence<kColumns / 2>{});
  CUTE_UNROLL
  for (int i = 0; i < Steps; ++i) Mma::issue(a(_, _, i), b(_, _, i), c, GMMA::ScaleOut::One);
  warpgroup_commit_batch();
  warpgroup_fence_operand(c);
}

}  // namespace cutlass_ext::sm90

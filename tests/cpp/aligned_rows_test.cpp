// Which tensors vectors and Hopper's copy engine can read: every base, stride and size around what they want. Others
// ask for feature::UnalignedRows.
#include <gtest/gtest.h>

#include "fmha/features.hpp"

namespace cutlass_ext {
namespace {

char* const kBase = reinterpret_cast<char*>(uintptr_t(1) << 30);

/// Contiguous [2, 5, 4, 64] queries and [2, 7, 2, 64] keys and values.
Params contiguous() {
  Params p;
  p.q = p.k = p.v = p.o = kBase;
  p.batch = 2;
  p.n_q = 5;
  p.n_kv = 7;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.head_dim = p.head_dim_v = 64;
  p.element_bytes = 2;
  p.q_stride = p.o_stride = {5 * 4 * 64, 4 * 64, 64};
  p.k_stride = p.v_stride = {7 * 2 * 64, 2 * 64, 64};
  return p;
}

struct Operand {
  void const* Params::* data;
  Strides Params::* strides;
  int Params::* rows;
  int Params::* heads;
};
Operand const kOperands[] = {
    {&Params::q, &Params::q_stride, &Params::n_q, &Params::heads_q},
    {&Params::k, &Params::k_stride, &Params::n_kv, &Params::heads_kv},
    {&Params::v, &Params::v_stride, &Params::n_kv, &Params::heads_kv},
};

TEST(AlignedRows, BasesAreWholeUnitsOf16Bytes) {
  for (Operand const& operand : kOperands) {
    for (int offset = 0; offset <= 64; offset += 2) {
      Params p = contiguous();
      p.*operand.data = kBase + offset;
      EXPECT_EQ(rows_are_aligned(p), offset % 16 == 0) << offset;
    }
  }
}

TEST(AlignedRows, StridesAreWholeUnitsOf16Bytes) {
  for (Operand const& operand : kOperands) {
    for (int64_t Strides::* stride : {&Strides::batch, &Strides::row, &Strides::head}) {
      for (int64_t n : {int64_t(0), int64_t(1), int64_t(4), int64_t(7), int64_t(8), int64_t(12), int64_t(68),
                        int64_t(72), (int64_t(1) << 39) - 8, (int64_t(1) << 39) + 4}) {
        Params p = contiguous();
        p.*operand.strides.*stride = n;
        EXPECT_EQ(rows_are_aligned(p), n % 8 == 0) << n;
        p.element_bytes = 4;
        EXPECT_EQ(rows_are_aligned(p), n % 4 == 0) << n;
      }
    }
  }
}

TEST(AlignedRows, StridesOfDimensionsOfOneMeanNothing) {
  for (Operand const& operand : kOperands) {
    for (int64_t Strides::* stride : {&Strides::batch, &Strides::row, &Strides::head}) {
      for (int size : {0, 1, 2}) {
        Params p = contiguous();
        (stride == &Strides::batch ? p.batch : stride == &Strides::row ? p.*operand.rows : p.*operand.heads) = size;
        p.*operand.strides.*stride = 3;
        EXPECT_EQ(rows_are_aligned(p), size < 2) << size;
      }
    }
  }
}

TEST(AlignedRows, PackedSequencesAreABatchOfOneOfAllTheirRows) {
  int const ends[] = {0, 1, 2};
  for (Operand const& operand : kOperands) {
    for (int total : {1, 2}) {
      Params p = contiguous();
      p.cu_seqlens_q = p.cu_seqlens_k = ends;
      p.total_q = p.total_k = total;
      (p.*operand.strides).batch = 3;  // never used
      EXPECT_TRUE(rows_are_aligned(p));
      (p.*operand.strides).row = 3;
      EXPECT_EQ(rows_are_aligned(p), total == 1);
    }
  }
}

TEST(AlignedRows, NewKeysCountWhereThereAreAny) {
  Params p = contiguous();
  p.k_new = p.v_new = kBase + 2;
  EXPECT_FALSE(rows_are_aligned(p));
  p.k_new = p.v_new = kBase;
  p.v_new_stride.row = 12;
  for (int n : {0, 1, 2}) {
    p.n_new = n;
    EXPECT_EQ(rows_are_aligned(p), n < 2) << n;
  }
}

}  // namespace
}  // namespace cutlass_ext

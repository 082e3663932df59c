// Which tensors Hopper's copy engine can read: every base, stride and size around what it wants. Where it cannot, the
// dispatch takes another family.
#include <gtest/gtest.h>

#include "fmha/sm90/tensor_map.hpp"

namespace cutlass_ext::sm90 {
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

TEST(TensorMaps, BasesAreWholeUnitsOf16Bytes) {
  for (Operand const& operand : kOperands) {
    for (int offset = 0; offset <= 64; offset += 2) {
      Params p = contiguous();
      p.*operand.data = kBase + offset;
      EXPECT_EQ(tensor_maps_possible(p), offset % 16 == 0) << offset;
    }
  }
}

TEST(TensorMaps, StridesAreWholeUnitsOf16BytesBelow2To40) {
  int64_t const limit = int64_t(1) << 39;  // elements of 2 bytes
  for (Operand const& operand : kOperands) {
    for (int64_t Strides::* stride : {&Strides::batch, &Strides::row, &Strides::head}) {
      for (int64_t n : {int64_t(0), int64_t(1), int64_t(4), int64_t(7), int64_t(8), int64_t(12), int64_t(68),
                        int64_t(72), int64_t(-8), limit - 8, limit, limit + 8, int64_t(1) << 62}) {
        Params p = contiguous();
        p.*operand.strides.*stride = n;
        EXPECT_EQ(tensor_maps_possible(p), n % 8 == 0 && n >= 0 && n < limit) << n;
      }
    }
  }
}

TEST(TensorMaps, StridesOfDimensionsOfOneMeanNothing) {
  for (Operand const& operand : kOperands) {
    for (int64_t Strides::* stride : {&Strides::batch, &Strides::row, &Strides::head}) {
      for (int size : {0, 1, 2}) {
        Params p = contiguous();
        (stride == &Strides::batch ? p.batch : stride == &Strides::row ? p.*operand.rows : p.*operand.heads) = size;
        p.*operand.strides.*stride = 3;
        EXPECT_EQ(tensor_maps_possible(p), size < 2) << size;
      }
    }
  }
}

TEST(TensorMaps, PackedSequencesAreABatchOfOneOfAllTheirRows) {
  int const ends[] = {0, 1, 2};
  for (Operand const& operand : kOperands) {
    for (int total : {1, 2}) {
      Params p = contiguous();
      p.cu_seqlens_q = p.cu_seqlens_k = ends;
      p.total_q = p.total_k = total;
      (p.*operand.strides).batch = 3;  // never used
      EXPECT_TRUE(tensor_maps_possible(p));
      (p.*operand.strides).row = 3;
      EXPECT_EQ(tensor_maps_possible(p), total == 1);
    }
  }
}

TEST(TensorMaps, HeadDimsAreMultiplesOf8) {
  for (int d = 4; d <= 256; d += 4) {
    Params p = contiguous(), of_v = contiguous();
    p.head_dim = of_v.head_dim_v = d;
    EXPECT_EQ(tensor_maps_possible(p), d % 8 == 0) << d;
    EXPECT_EQ(tensor_maps_possible(of_v), d % 8 == 0) << d;
  }
}

}  // namespace
}  // namespace cutlass_ext::sm90

// Shared memory of the narrow decode kernels: chunks keep apart, and what eight lanes access at a time falls in
// different groups of four banks.
#include <gtest/gtest.h>

#include <set>

#include "fmha/decode/traits.hpp"

namespace cutlass_ext::decode {
namespace {

/// Rows are whole multiples of 128 bytes, so that a group of four banks is a place modulo 8.
template <class Place>
bool one_pass(Place place) {
  std::set<int> groups;
  for (int lane = 0; lane < 8; ++lane) groups.insert(place(lane) % 8);
  return groups.size() == 8;
}

template <class Place>
void check_row(Place place, int chunks) {
  std::set<int> places;
  for (int chunk = 0; chunk < chunks; ++chunk) places.insert(place(chunk));
  EXPECT_EQ(places.size(), size_t(chunks));
  EXPECT_EQ(*places.rbegin(), chunks - 1);
}

TEST(NarrowLayouts, RowsAreBijective) {
  for (int head_dim : {64, 128}) {
    for (int row = 0; row < 16; ++row) {
      check_row([&](int chunk) { return key_place(row, chunk); }, head_dim / 8);
      check_row([&](int chunk) { return value_place(row, chunk); }, head_dim / 8);
      if (row < 8) check_row([&](int unit) { return output_place(row, unit); }, head_dim / 4);
    }
  }
}

TEST(NarrowLayouts, NothingConflicts) {
  for (int head_dim : {64, 128}) {
    for (int lane0 = 0; lane0 < 32; lane0 += 8) {
      // Q and K: lane 4g + t has chunk c + t of row g; copies, eight chunks of a row.
      for (int c = 0; c < head_dim / 8; c += 4)
        EXPECT_TRUE(one_pass([&](int lane) { return key_place((lane0 + lane) / 4, c + lane % 4); }));
      // V: lane 4g + t has chunk c + g of row 2t + i.
      for (int i : {0, 1, 8, 9}) {
        for (int c = 0; c < head_dim / 8; c += 8)
          EXPECT_TRUE(one_pass([&](int lane) { return value_place(2 * (lane % 4) + i, c + (lane0 + lane) / 4); }));
      }
      // O: lane 4g + t has units 2g and 2g + 1 of row 2t + i, and those 16 on.
      for (int i : {0, 1}) {
        for (int j = 0; j < head_dim / 32; ++j) {
          EXPECT_TRUE(one_pass(
              [&](int lane) { return output_place(2 * (lane % 4) + i, j / 2 * 16 + (lane0 + lane) / 4 * 2 + j % 2); }));
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      EXPECT_TRUE(one_pass([&](int lane) { return key_place(row, lane); }));
      EXPECT_TRUE(one_pass([&](int lane) { return value_place(row, lane); }));
    }
  }
}

}  // namespace
}  // namespace cutlass_ext::decode

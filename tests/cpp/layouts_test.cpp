// Shared-memory layouts of the CUDA-core FMHA: every hand-written offset is the CuTe layout's, no access conflicts on a
// bank.
#include <gtest/gtest.h>

#include "simt_banks.hpp"

namespace cutlass_ext::simt {
namespace {

TEST(SimtLayouts, OffsetsAreTheLayouts) {
  for (auto const& [name, report] : bank_reports()) EXPECT_EQ(report.misplaced, 0) << name;
}

TEST(SimtLayouts, NoAccessConflicts) {
  for (auto const& [name, report] : bank_reports()) {
    EXPECT_EQ(report.conflicts.size(), 8u) << name;  // store and load of Q, K, V and P
    for (auto const& [access, extra] : report.conflicts) EXPECT_EQ(extra, 0) << name << ", " << access;
  }
}

TEST(SimtLayouts, TheCountSeesAConflict) {
  std::array<int, 32> column, row;
  for (int lane = 0; lane < 32; ++lane) column[lane] = lane * 32, row[lane] = lane * 4;
  EXPECT_EQ(extra_passes(column, 1), 31);
  EXPECT_EQ(extra_passes(row, 4), 0);
  EXPECT_EQ(extra_passes(row, 1), 3);
}

TEST(SimtLayouts, TilesAreBijective) {
  PanelLayout<64, 96> const layout;
  std::set<int> offsets;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 96; ++j) offsets.insert(int(layout(i, j)));
  }
  EXPECT_EQ(offsets.size(), 64u * 96u);
  EXPECT_EQ(*offsets.rbegin(), 64 * 96 - 1);
}

TEST(SimtLayouts, LanesCoverTheTile) {
  using T = Traits<128, 64, 64, float, 128>;
  std::set<std::pair<int, int>> owned;
  for (int thread = 0; thread < T::Threads; ++thread) {
    LanePlace const place(thread);
    for (int i = 0; i < T::Rows; ++i) {
      for (int j = 0; j < T::Keys; ++j) {
        int const row = (place.panel + i / kVector * T::PanelsApart) * kPanel + place.row_chunk * kVector + i % kVector;
        EXPECT_TRUE(owned.insert({row, j / kVector * kPanel + place.col * kVector + j % kVector}).second);
      }
    }
  }
  EXPECT_EQ(owned.size(), size_t(T::B_r) * T::B_c);
}

}  // namespace
}  // namespace cutlass_ext::simt

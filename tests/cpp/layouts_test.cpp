// Shared-memory layouts of the CUDA-core FMHA: every hand-written offset is the CuTe layout's, no access conflicts on a
// bank. And what Hopper's warpgroups pass to one another or leave in memory: it arrives where it is meant to.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <utility>

#include "fmha/backward/params.hpp"
#include "fmha/swizzle.hpp"
#include "simt_banks.hpp"

namespace cutlass_ext::simt {
namespace {

TEST(SimtLayouts, OffsetsAreTheLayouts) {
  for (auto const& [name, report] : bank_reports()) EXPECT_EQ(report.misplaced, 0) << name;
}

TEST(SimtLayouts, NoAccessConflicts) {
  for (auto const& [name, report] : bank_reports()) {
    // Store and load of Q, K, V and P; where tiles of keys add to dQ also loads of dS and of keys.
    EXPECT_EQ(report.conflicts.size(), name.find("simt_all") == 0 ? 10u : 8u) << name;
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

namespace cutlass_ext {
namespace {

using Pair = std::pair<int, int>;  // query row and key of an element

/// dS^T of 64 keys and rows as four warps leave it (stmatrix), then as the four warps of another warpgroup take it
/// (ldmatrix.trans): the instructions by what PTX says of their lanes.
TEST(PassedGradients, ArriveAsOperandA) {
  using Element = uint16_t;
  constexpr int kPanelColumns = 64;
  std::map<int, Pair> panel;  // by offset in elements
  for (int warp = 0; warp < 4; ++warp) {
    for (int m = 0; m < 4; ++m) {
      auto const address = [&](int lane) {
        int const key = warp * 16 + lane % 16;
        return key * kPanelColumns + swizzled_chunk<Element>(2 * m + lane / 16, key);
      };
      for (int matrix = 0; matrix < 4; ++matrix) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int half = 0; half < 2; ++half) {
            // Word 4 m + `matrix` of an accumulator: keys 8 apart, then rows 8 apart.
            Pair const held{m * 16 + matrix / 2 * 8 + lane % 4 * 2 + half, warp * 16 + matrix % 2 * 8 + lane / 4};
            int const at = address(matrix * 8 + lane / 4) + lane % 4 * 2 + half;
            EXPECT_TRUE(panel.insert({at, held}).second);
          }
        }
      }
    }
  }
  EXPECT_EQ(panel.size(), 64u * 64u);
  for (int warp = 0; warp < 4; ++warp) {
    for (int m = 0; m < 4; ++m) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::set<int> banks;
        for (int row = 0; row < 8; ++row) {
          int const at = m * 16 * kPanelColumns + row_for_operand_a<Element>(matrix * 8 + row, warp);
          banks.insert(at * 2 / 16 % 8);
        }
        EXPECT_EQ(banks.size(), 8u) << "rows of a matrix in as many groups of banks";
        for (int lane = 0; lane < 32; ++lane) {
          for (int half = 0; half < 2; ++half) {
            int const at =
                m * 16 * kPanelColumns + row_for_operand_a<Element>(matrix * 8 + lane % 4 * 2 + half, warp) + lane / 4;
            // Word 4 m + `matrix` of operand A: rows 8 apart, then columns 8 apart.
            Pair const wanted{warp * 16 + matrix % 2 * 8 + lane / 4, m * 16 + matrix / 2 * 8 + lane % 4 * 2 + half};
            EXPECT_EQ(panel.at(at), wanted);
          }
        }
      }
    }
  }
}

/// A kernel adds parts of a tile's columns in any width, `of_a_piece` of which a warp's lie in one piece; the launch
/// that finishes dQ reads panels of 64.
void expect_sums_in_panels(int head_dim, int columns_at_once, int of_a_piece) {
  std::set<int> vectors;
  for (int first = 0; first < head_dim; first += columns_at_once) {
    for (int warp = 0; warp < 4; ++warp) {
      int const piece = first / of_a_piece * of_a_piece / 64,
                begins = SumsOfTile::first(head_dim, piece, warp) + first % of_a_piece / 8 * 32;
      for (int eight = 0; eight < columns_at_once / 8; ++eight) {
        int const at = begins + eight * 32, column = first + eight * 8;
        EXPECT_EQ(at, SumsOfTile::first(head_dim, column / 64, warp) + column % 64 / 8 * 32);
        EXPECT_TRUE(vectors.insert(at).second);
      }
    }
  }
  EXPECT_EQ(vectors.size(), size_t(head_dim / 8 * 4));
  EXPECT_EQ(*vectors.rbegin() + 32, head_dim * 64 / 4);
}

TEST(SumsOfTile, LieInPanelsWhateverIsAddedAtOnce) {
  expect_sums_in_panels(64, 64, 64);
  expect_sums_in_panels(96, 96, 96);
  expect_sums_in_panels(96, 32, 96);
  expect_sums_in_panels(128, 64, 64);
  expect_sums_in_panels(192, 32, 64);
  expect_sums_in_panels(256, 64, 64);
  expect_sums_in_panels(256, 32, 64);
}

}  // namespace
}  // namespace cutlass_ext

// Visibility, scheduler and splits on the host: the cases that a reader wants to see worked out.
// tests/python/test_host_logic.py holds the same functions against brute force.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "fmha/scheduler.hpp"
#include "fmha/visibility.hpp"

namespace cutlass_ext {
namespace {

TEST(Visibility, FullAttentionMasksOnlyThePartialTile) {
  Visibility const v{.n_q = 100, .len_kv = 100, .start_pos = 0, .window_left = -1, .window_right = -1};
  Range const tiles = v.tiles_of(64, 64, 64);
  EXPECT_EQ(tiles.begin, 0);
  EXPECT_EQ(tiles.end, 2);
  EXPECT_FALSE(v.needs_mask(0, 64, 64, 64));
  EXPECT_TRUE(v.needs_mask(1, 64, 64, 64));
}

TEST(Visibility, CausalSkipsTilesAboveTheDiagonal) {
  Visibility const v{.n_q = 256, .len_kv = 256, .start_pos = 0, .window_left = -1, .window_right = 0};
  EXPECT_EQ(v.tiles_of(0, 64, 64).end, 1);
  EXPECT_EQ(v.tiles_of(128, 64, 64).end, 3);
  EXPECT_TRUE(v.needs_mask(2, 128, 64, 64));
  EXPECT_FALSE(v.needs_mask(1, 128, 64, 64));
}

TEST(Visibility, NegativeStartHidesEverythingFromTheFirstRows) {
  Visibility const v{.n_q = 10, .len_kv = 10, .start_pos = -4, .window_left = -1, .window_right = 0};
  EXPECT_EQ(v.keys_of_row(3).size(), 0);
  EXPECT_EQ(v.keys_of_row(4).size(), 1);
  EXPECT_EQ(v.tiles_of(0, 4, 64).size(), 0);
}

TEST(Visibility, WindowMovesWithTheRow) {
  Visibility const v{.n_q = 512, .len_kv = 512, .start_pos = 0, .window_left = 100, .window_right = 0};
  EXPECT_EQ(v.keys_of_row(300).begin, 200);
  EXPECT_EQ(v.keys_of_row(300).end, 301);
  EXPECT_EQ(v.tiles_of(256, 64, 64).begin, 2);
  EXPECT_EQ(v.tiles_of(256, 64, 64).end, 5);
}

TEST(Visibility, LengthsAndPaddingOfTheDeviceAreHeldInBounds) {
  int const seqused[] = {50, 9000, -3}, leftpad[] = {10, 0, 7};
  ForwardParams params;
  params.n_q = 4;
  params.n_kv = 100;
  params.seqused_k = seqused;
  params.leftpad_k = leftpad;
  params.start_pos_kind = StartPos::End;
  int pad;
  Visibility const first = visibility_of(params, 0, &pad);
  EXPECT_EQ(pad, 10);
  EXPECT_EQ(first.len_kv, 40);
  EXPECT_EQ(first.start_pos, 36);  // 50 - 4, counted from the first real key
  EXPECT_EQ(visibility_of(params, 1, &pad).len_kv, 100);
  EXPECT_EQ(visibility_of(params, 2, &pad).len_kv, 0);
}

TEST(Scheduler, CoversEveryItemLongestFirst) {
  Scheduler const scheduler(2, 3, 130, 64, 2);
  ASSERT_EQ(scheduler.size(), 2 * 3 * 3 * 2);
  std::set<std::tuple<int, int, int, int>> seen;
  int last_row = 1 << 30;
  for (unsigned i = 0; i < scheduler.size(); ++i) {
    WorkItem const w = scheduler(i, 64);
    EXPECT_LE(w.row0, last_row);
    last_row = w.row0;
    EXPECT_TRUE(seen.insert({w.batch, w.head, w.row0, w.split}).second);
  }
}

TEST(Splits, FillAnIdleGpuAndNoMore) {
  EXPECT_EQ(choose_num_splits(256, 128, 264), 1);  // three quarters full already
  EXPECT_EQ(choose_num_splits(4, 8, 396), 4);      // two key tiles a split
  EXPECT_EQ(choose_num_splits(1, 3, 396), 1);
  EXPECT_EQ(choose_num_splits(32, 1000, 396), 12);
  EXPECT_EQ(choose_num_splits(0, 8, 396), 1);
}

}  // namespace
}  // namespace cutlass_ext

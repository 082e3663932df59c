// Visibility, scheduler and splits on the host: the cases that a reader wants to see worked out.
// tests/python/test_host_logic.py holds the same functions against brute force.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "fmha/sequence.hpp"
#include "host/heuristics.hpp"

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

TEST(Visibility, FiniteWindowsSeeTheSameKeys) {
  int const far = kMaxPosition;  // positions and lengths as large as they come: nothing may overflow
  for (int left : {-1, 0, 1, 5, far, (1 << 30) - 1}) {
    for (int right : {-1, 0, 1, 5, far, (1 << 30) - 1}) {
      for (int start : {-far, -3, 0, 4, far}) {
        for (int len : {0, 1, 9, far - 1}) {
          for (int first_key : {0, 8, len / 16 * 16}) {
            Visibility const v = Visibility{
                .n_q = far - 1, .len_kv = len, .start_pos = start, .window_left = left, .window_right = right};
            Visibility const counted = v.counted_from(first_key), w = counted.with_finite_windows();
            for (int row : {0, 1, 2, 7, 8, far - 2}) {
              for (int key : {0, 1, 2, 6, 15}) {
                EXPECT_EQ(w.keys_of_row(row).contains(key), v.keys_of_row(row).contains(first_key + key))
                    << left << " " << right << " " << start << " " << len << " " << first_key << " " << row << " "
                    << key;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Sequence, LengthsAndPaddingOfTheDeviceAreHeldInBounds) {
  int const seqused[] = {50, 9000, -3}, leftpad[] = {10, 0, 7};
  Params params;
  params.n_q = 4;
  params.n_kv = 100;
  params.seqused_k = seqused;
  params.leftpad_k = leftpad;
  params.start_pos_kind = StartPos::End;
  Sequence const first = sequence_of(params, 0);
  EXPECT_EQ(first.batch, 0);
  EXPECT_EQ(first.k_row0, 10);
  EXPECT_EQ(first.visibility.len_kv, 40);
  EXPECT_EQ(first.visibility.start_pos, 36);  // 50 - 4, counted from the first real key
  EXPECT_EQ(sequence_of(params, 1).visibility.len_kv, 100);
  EXPECT_EQ(sequence_of(params, 2).visibility.len_kv, 0);
  EXPECT_EQ(sequence_of(params, 2).batch, 2);
}

/// Sequences of 3, 0 and 5 queries and of 4, 6 and 0 keys.
struct PackedSequences : testing::Test {
  int const cu_q[4] = {0, 3, 3, 8}, cu_k[4] = {0, 4, 10, 10};
  Params params;
  void SetUp() override {
    params.batch = 3;
    params.heads_q = 2;
    params.n_q = 5;
    params.n_kv = 6;
    params.cu_seqlens_q = cu_q;
    params.cu_seqlens_k = cu_k;
    params.total_q = 8;
    params.total_k = 10;
    params.start_pos_kind = StartPos::End;
  }
};

TEST_F(PackedSequences, LieInABatchOfOne) {
  int const q_row0[] = {0, 3, 3}, k_row0[] = {0, 4, 10}, len_q[] = {3, 0, 5}, len_kv[] = {4, 6, 0};
  for (int b = 0; b < 3; ++b) {
    Sequence const s = sequence_of(params, b);
    EXPECT_EQ(s.batch, 0);
    EXPECT_EQ(s.q_row0, q_row0[b]);
    EXPECT_EQ(s.k_row0, k_row0[b]);
    EXPECT_EQ(s.visibility.n_q, len_q[b]);
    EXPECT_EQ(s.visibility.len_kv, len_kv[b]);
    EXPECT_EQ(s.visibility.start_pos, len_kv[b] - len_q[b]);
  }
  EXPECT_EQ(params.result_rows(), 2 * 8);
  EXPECT_EQ(sequence_of(params, 2).result_row0(params, 1, 0), 8 + 3);
  EXPECT_EQ(sequence_of(params, 2).result_row0(params, 1, 2), 2 * 16 + 8 + 3);
}

TEST_F(PackedSequences, RowsPastTheLongestAreLeftOutAndMoveNothing) {
  params.n_q = 2;
  EXPECT_EQ(sequence_of(params, 0).visibility.n_q, 2);
  EXPECT_EQ(sequence_of(params, 0).visibility.start_pos, 4 - 3);
  EXPECT_EQ(sequence_of(params, 2).q_row0, 3);
}

TEST(Sequence, WhateverCuSeqlensHoldsStaysInBounds) {
  int const ends[] = {INT32_MIN, -1, 0, 1, 3, 4, INT32_MAX};
  for (int begin : ends) {
    for (int end : ends) {
      for (int used : {INT32_MIN, 0, 2, INT32_MAX}) {
        int const cu[] = {begin, end};
        Params params;
        params.batch = 1;
        params.n_q = 2;
        params.cu_seqlens_q = params.cu_seqlens_k = cu;
        params.total_q = 3;
        params.total_k = 4;
        params.seqused_k = params.leftpad_k = &used;
        params.start_pos_kind = StartPos::End;
        Sequence const s = sequence_of(params, 0);
        EXPECT_GE(s.visibility.n_q, 0);
        EXPECT_LE(s.visibility.n_q, 2);
        EXPECT_GE(s.visibility.len_kv, 0);
        EXPECT_GE(s.q_row0, 0);
        EXPECT_LE(s.q_row0 + s.visibility.n_q, 3);
        EXPECT_GE(s.k_row0, 0);
        EXPECT_LE(s.k_row0 + s.visibility.len_kv, 4);
      }
    }
  }
}

TEST(Scheduler, SectionsAreOfOneSizeWhereTheyCanBe) {
  EXPECT_EQ(even_section(32, 7, 1), 4);
  EXPECT_EQ(even_section(64, 60, 4), 32);
  EXPECT_EQ(even_section(31, 7, 1), 7);  // a prime
  EXPECT_EQ(even_section(10, 40, 1), 10);
  for (int group : {1, 2, 5}) {
    for (int pairs = group; pairs <= 60; pairs += group) {
      for (int section = group; section <= 60; section += group) {
        int const even = even_section(pairs, section, group);
        EXPECT_LE(even, section);
        EXPECT_GE(2 * even, std::min(section, pairs));
        EXPECT_EQ(even % group, 0);
      }
    }
  }
}

TEST(Scheduler, CoversEveryItemLongestFirstInEachSection) {
  for (int section : {1, 3, 4, 6, 1 << 30}) {
    Scheduler const scheduler(2, 3, 130, 64, 2, section);
    ASSERT_EQ(scheduler.size(), 2 * 3 * 3 * 2);
    std::set<std::tuple<int, int, int, int>> seen;
    int last_section = 0, last_row = 1 << 30;
    for (unsigned i = 0; i < scheduler.size(); ++i) {
      WorkItem const w = scheduler(i);
      int const of = (w.batch * 3 + w.head) / section;
      EXPECT_GE(of, last_section);
      EXPECT_TRUE(of > last_section || w.row0 <= last_row);
      last_section = of;
      last_row = w.row0;
      EXPECT_TRUE(seen.insert({w.batch, w.head, w.row0, w.split}).second);
    }
  }
}

TEST(Scheduler, SectionsAreWholeGroupsThatFillAPartOfL2) {
  Params params;
  params.resident_ctas = 128;
  params.element_bytes = 2;
  params.n_q = 1 << 10;  // 8 tiles of 128 rows
  params.n_kv = 1 << 10;
  params.head_dim = params.head_dim_v = 128;  // 512 KB a KV head in 16 bits
  params.batch = 12;                          // 96 pairs: all of the sections below divide them
  params.heads_q = 8;
  params.heads_kv = 2;
  int const l2 = 32 << 20;
  EXPECT_EQ(section_for(params, 128, l2), 4 * 8);
  params.element_bytes = 4;
  EXPECT_EQ(section_for(params, 128, l2), 4 * 4);
  params.element_bytes = 2;
  params.window_right = 0;  // three waves are 384 tiles: those of 48 heads
  EXPECT_EQ(section_for(params, 128, l2), 4 * 12);
  EXPECT_EQ(section_for(params, 256, l2), 4 * 8);  // four tiles a head
  params.num_splits = 2;
  EXPECT_EQ(section_for(params, 128, l2), 4 * 6);
  params.n_kv = 1 << 14;  // five eighths of L2 hold the keys and values of two heads
  EXPECT_EQ(section_for(params, 128, l2), 4 * 2);
  params.n_kv = 1 << 20;
  EXPECT_EQ(section_for(params, 128, l2), 4);
  params.n_kv = 0;
  EXPECT_GT(section_for(params, 128, l2), 0);
  params.n_q = 0;
  EXPECT_GT(section_for(params, 128, l2), 0);
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

// Index logic of the decode kernels: packed rows, pages, key tiles of CTAs, limits.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "fmha/cache.hpp"
#include "fmha/decode/params.hpp"
#include "fmha/decode/walk.hpp"
#include "fmha/pack_gqa.hpp"

namespace cutlass_ext::decode {
namespace {

Params call(int batch, int n_q, int heads_q, int heads_kv, int n_kv) {
  Params p;
  p.batch = batch;
  p.n_q = n_q;
  p.n_kv = n_kv;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.heads_per_kv = cutlass::FastDivmod(heads_q / heads_kv);
  return p;
}

TEST(PackedRows, EachRowOfEachHeadOnce) {
  for (int group : {1, 2, 3, 5, 8}) {
    for (int n_q : {0, 1, 3, 7}) {
      Params const p = call(2, n_q, 4 * group, 4, 100);
      QueryRows const rows = query_rows(p, 1, sequence_of(p, 1));
      std::set<int64_t> results;
      for (int head = 0; head < 4; ++head) {
        for (int r = 0; r < packed_rows(p, rows); ++r) {
          PackedRow const row(p, head, r);
          EXPECT_EQ(row.token, r / group);
          EXPECT_EQ(row.head, head * group + r % group);
          results.insert(row.result(p, rows));
        }
      }
      EXPECT_EQ(results.size(), size_t(p.heads_q * n_q));
      EXPECT_TRUE(n_q == 0 || *results.begin() == p.heads_q * n_q);
    }
  }
}

/// Sequences that have rows of their own number: each row of those that are this launch's has one place in lse.
TEST(PackedRows, OfPackedCallsEachSequenceHasItsOwn) {
  constexpr int kBatch = 6, kHeads = 2, kMost = 4;
  int const ends[kBatch + 1] = {0, 2, 2, 5, 12, 16, 17}, counts[kBatch] = {2, 0, 3, 0, 4, 1};  // 7 rows: another's
  for (int group : {1, 2, 4}) {
    Params p = call(kBatch, kMost, kHeads * group, kHeads, 100);
    p.cu_seqlens_q = ends;
    p.total_q = 20;
    p.most_q = kMost;
    p.start_pos_kind = StartPos::End;
    std::set<int64_t> results;
    size_t rows_of_all = 0;
    for (int b = 0; b < kBatch; ++b) {
      Sequence const s = sequence_of(p, b);
      QueryRows const rows = query_rows(p, b, s);
      EXPECT_EQ(rows.batch, 0);
      ASSERT_EQ(rows.count, counts[b]);
      rows_of_all += packed_rows(p, rows) * kHeads;
      for (int head = 0; head < kHeads; ++head) {
        for (int r = 0; r < packed_rows(p, rows); ++r) {
          PackedRow const row(p, head, r);
          EXPECT_TRUE(row.token < counts[b] && row.head / group == head);
          EXPECT_EQ(row.result(p, rows), s.result_row0(p, row.head, 0) + row.token);
          results.insert(row.result(p, rows));
        }
      }
      Tokens const tokens = Place(p, 0).tokens(p, 16);
      EXPECT_EQ(tokens.of(p, s).last, counts[b] - 1);
      EXPECT_EQ(tiles_of(p, s, tokens, 16).size(), counts[b] > 0 ? 7 : 0) << "sequence " << b;
    }
    EXPECT_EQ(results.size(), rows_of_all);
    EXPECT_LT(*results.rbegin(), p.result_rows());
  }
}

TEST(PackedRows, DivisionIsExact) {
  for (int divisor = 1; divisor <= 256; ++divisor) {
    RowDivisor const narrow(divisor);
    cutlass::FastDivmod const wide(divisor);
    for (int row = 0; row < 32768 / divisor; ++row) EXPECT_EQ(narrow.div(row), row / divisor);
    for (int row : {0x7fffffff, 0x7ffffffe, 0x7fffffff / divisor * divisor - 1})
      EXPECT_EQ(wide.div(row), row / divisor);
  }
}

TEST(Pages, WhatTheTableHoldsStaysInside) {
  int const table[] = {0, 3, -1, 4, 1 << 30, -(1 << 30)}, nearest[] = {0, 3, 0, 3, 3, 0};
  Cache cache;
  EXPECT_EQ(page_of_row(cache, 7, 1000), 7) << "without table or index a sequence has its own place";
  cache.pages = 4;
  cache.block_table = table;
  cache.block_table_stride = 6;
  cache.page_rows = cutlass::FastDivmod(16);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(nearest_page(table[i], 4), nearest[i]);
    EXPECT_EQ(page_of_row(cache, 0, 16 * i + 5), table[i] == nearest[i] ? table[i] : -1);
  }
  EXPECT_EQ(row_in_page(cache, 16 * 3 + 5), 5);
  cache.block_table = nullptr;
  cache.batch_idx = table;
  EXPECT_EQ(page_of_row(cache, 1, 1 << 20), 3);
  EXPECT_EQ(page_of_row(cache, 2, 0), -1);
  EXPECT_EQ(page_of_row(cache, 3, 0), -1);
}

TEST(Rotary, RowsMoveWithAMaskOrAWindow) {
  Rotary rotary;
  EXPECT_EQ(rotary_position(rotary, 40, 3), 40);
  rotary.rows_move = true;
  EXPECT_EQ(rotary_position(rotary, 40, 3), 43);
}

TEST(KeyTiles, NewKeysAreVisitedWhoeverSeesThem) {
  Params p = call(1, 0, 2, 1, 200);
  p.n_cached = 100;
  p.n_new = 30;
  p.row_tiles = row_tiles_of(p, 16);
  ASSERT_EQ(p.row_tiles, 1) << "a tile without rows appends";
  Tokens const none = Place(p, 0).tokens(p, 16);
  EXPECT_LT(none.last, none.first);
  EXPECT_TRUE(none.ends);
  for (int window_right : {-1, 0}) {
    p.window_right = window_right;
    Range const tiles = tiles_of(p, sequence_of(p, 0), none, 16);
    EXPECT_EQ(tiles.begin, 6);
    EXPECT_EQ(tiles.end, 9) << "those of keys 100 to 129";
  }
  p.n_new = 0;
  EXPECT_EQ(tiles_of(p, sequence_of(p, 0), none, 16).size(), 0);

  p = call(1, 40, 1, 1, 200);  // causal from position 0: the first row tile sees 16 keys, the last one 40 and the new
  p.n_cached = 100;
  p.n_new = 30;
  p.window_right = 0;
  p.row_tiles = row_tiles_of(p, 16);
  ASSERT_EQ(p.row_tiles, 3);
  Range const first = tiles_of(p, sequence_of(p, 0), Place(p, 0).tokens(p, 16), 16),
              last = tiles_of(p, sequence_of(p, 0), Place(p, 2).tokens(p, 16), 16);
  EXPECT_EQ(std::pair(first.begin, first.end), std::pair(0, 1));
  EXPECT_EQ(std::pair(last.begin, last.end), std::pair(0, 9));
}

TEST(Limits, PackedSequencesLieInPagesAndInOneTile) {
  int const ends[] = {0, 4, 8}, table[] = {0, 1};
  Params p = call(2, 4, 8, 2, 64);
  p.cu_seqlens_q = ends;
  EXPECT_FALSE(fits(p, 16));
  p.block_table = table;
  EXPECT_TRUE(fits(p, 16));
  p.n_q = 5;
  EXPECT_FALSE(fits(p, 16));
  EXPECT_TRUE(fits(p, 64));
}

TEST(Limits, CountersStayBelow32Bits) {
  EXPECT_TRUE(fits(call(64, 1, 8, 8, 1 << 20), 16));
  Params many = call(32768, 1, 8, 8, 1 << 20);
  EXPECT_FALSE(fits(many, 16)) << "2^32 tiles of 8 keys";
  many.fixed_splits = true;
  EXPECT_TRUE(fits(many, 16)) << "each sequence has parts of its own";
  EXPECT_FALSE(fits(call(1, 1 << 28, 8, 1, 64), 16)) << "2^31 packed rows";
  Params p = call(3, 1, 8, 4, 64);
  p.groups = 1;
  EXPECT_EQ(partial_rows(p, 16), 0) << "one group leaves nothing to merge";
  p.groups = 5;
  EXPECT_EQ(partial_rows(p, 16), 2 * 5 * 4 * 16);
  p.fixed_splits = true;
  EXPECT_EQ(partial_rows(p, 16), 0);
  p.num_splits = 7;
  EXPECT_EQ(partial_rows(p, 16), 3 * 7 * 4 * 16);
}

}  // namespace
}  // namespace cutlass_ext::decode

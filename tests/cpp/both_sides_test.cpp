// A tile from both sides: what rows see keys as well as which keys rows see, work over either axis, the derivatives of
// what changes scores. Against brute force, for every small case; tests/python/test_host_logic.py goes beyond.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "fmha/cute_tensor.hpp"
#include "fmha/scheduler.hpp"
#include "fmha/score.hpp"
#include "fmha/sequence.hpp"
#include "fmha/visibility.hpp"

namespace cutlass_ext {
namespace {

using namespace cute;

/// Who sees whom (docs/semantics.md), element by element.
bool sees(Visibility const& v, int row, int key) {
  int const p = v.start_pos + row;
  return row >= 0 && row < v.n_q && key >= 0 && key < v.len_kv && (v.window_left < 0 || key >= p - v.window_left) &&
         (v.window_right < 0 || key <= p + v.window_right);
}

template <class Check>
void for_every_small_case(Check check) {
  for (int n_q = 1; n_q <= 5; ++n_q) {
    for (int len_kv = 0; len_kv <= 7; ++len_kv) {
      for (int start = -8; start <= 9; ++start) {
        for (int left : {-1, 0, 1, 2, 4}) {
          for (int right : {-1, 0, 1, 3}) check(Visibility{n_q, len_kv, start, left, right});
        }
      }
    }
  }
}

TEST(BothSides, RowsOfAKeyAreThoseThatSeeIt) {
  for_every_small_case([](Visibility const& v) {
    for (int key = 0; key < 9; ++key) {
      for (int row = 0; row < v.n_q; ++row) ASSERT_EQ(v.rows_of_key(key).contains(row), sees(v, row, key));
    }
  });
}

TEST(BothSides, RowsWithKeysAreThoseThatSeeOne) {
  for_every_small_case([](Visibility const& v) {
    Range const rows = v.rows_with_keys();
    Visibility const left = v.of_rows(rows);
    ASSERT_EQ(left.n_q, rows.size());
    for (int row = 0; row < v.n_q; ++row) {
      ASSERT_EQ(rows.contains(row), v.keys_of_row(row).size() > 0);
      for (int key = 0; rows.contains(row) && key < v.len_kv; ++key) {
        ASSERT_EQ(sees(left, row - rows.begin, key), sees(v, row, key));
      }
    }
  });
}

TEST(BothSides, TilesOfRowsThatSeeATileOfKeys) {
  constexpr int B_r = 2, B_c = 3;
  for_every_small_case([](Visibility const& v) {
    for (int key0 = 0; key0 < v.len_kv; key0 += B_c) {
      Range const tiles = v.row_tiles_of(key0, B_c, B_r), unmasked = v.unmasked_row_tiles_of(key0, B_c, B_r);
      for (int tile = 0; tile * B_r < v.n_q; ++tile) {
        int pairs = 0;
        for (int i = 0; i < B_r; ++i) {
          for (int j = 0; j < B_c; ++j) pairs += sees(v, tile * B_r + i, key0 + j);
        }
        ASSERT_EQ(tiles.contains(tile), pairs > 0);
        ASSERT_EQ(v.tiles_of(tile * B_r, B_r, B_c).contains(key0 / B_c), pairs > 0);
        ASSERT_TRUE(pairs == 0 || unmasked.contains(tile) == (pairs == B_r * B_c));
      }
    }
  });
}

TEST(BothSides, MasksOfSAndOfItsTransposeHideTheSame) {
  constexpr int B_r = 4, B_c = 6;
  auto const twice = [](int i) { return 2 * i; };  // a thread's rows and keys lie apart
  for_every_small_case([&](Visibility const& v) {
    for (int first_row : {0, 1}) {
      for (int first_key : {0, 1, 3}) {
        Tensor S = make_tensor<float>(Shape<Int<B_r / 2>, Int<B_c / 2>>{});
        Tensor St = make_tensor<float>(Shape<Int<B_c / 2>, Int<B_r / 2>>{});
        clear(S), clear(St);
        mask(S, v.counted_from(first_key), first_row, twice, twice);
        mask_transposed(St, v, first_key, twice, [&](int j) { return first_row + twice(j); });
        for (int i = 0; i < B_r / 2; ++i) {
          for (int j = 0; j < B_c / 2; ++j) {
            bool const seen = sees(v, first_row + 2 * i, first_key + 2 * j);
            ASSERT_TRUE(first_row + 2 * i >= v.n_q || (S(i, j) == 0.f) == seen);
            ASSERT_EQ(St(j, i) == 0.f, seen);
          }
        }
      }
    }
  });
}

TEST(BothSides, PositionsAtTheEndsOfTheirRangeDoNotOverflow) {
  int const far = kMaxPosition, wide = (1 << 30) - 1;
  Visibility const late{far - 1, far - 1, far, wide, wide}, early{far - 1, far - 1, -far, wide, wide};
  EXPECT_EQ(late.rows_of_key(far - 2).begin, 0);
  EXPECT_EQ(late.rows_of_key(0).end, far - 1);  // the window reaches from the last row, at 2^30 - 2, to key 0
  EXPECT_EQ(early.rows_of_key(far - 2).end, far - 1);
}

TEST(BothSides, SchedulersOverKeysTakeTheFirstTileFirst) {
  for (int section : {1, 3, 4, 6, 1 << 30}) {
    Scheduler const scheduler(2, 3, 130, 64, 2, section, Axis::Keys);
    ASSERT_EQ(scheduler.size(), 2 * 3 * 3 * 2);
    std::set<std::tuple<int, int, int, int>> seen;
    int last_section = 0, last_key = 0;
    for (int i = 0; i < scheduler.size(); ++i) {
      WorkItem const w = scheduler(i);
      int const of = (w.batch * 3 + w.head) / section;
      EXPECT_GE(of, last_section);
      EXPECT_TRUE(of > last_section || w.row0 >= last_key);
      last_section = of, last_key = w.row0;
      EXPECT_TRUE(w.row0 >= 0 && w.row0 < 130 && w.row0 % 64 == 0);
      EXPECT_TRUE(seen.insert({w.batch, w.head, w.row0, w.split}).second);
    }
  }
}

/// Under a causal mask the first work item of either axis has the most to do.
TEST(BothSides, TheLongestTileComesFirst) {
  Visibility const causal{300, 300, 0, -1, 0};
  auto const keys_of = [&](WorkItem const& w) { return causal.tiles_of(w.row0, 64, 32).size(); };
  auto const rows_of = [&](WorkItem const& w) { return causal.row_tiles_of(w.row0, 32, 64).size(); };
  Scheduler const rows(1, 1, 300, 64, 1, 1), keys(1, 1, 300, 32, 1, 1, Axis::Keys);
  for (int i = 1; i < rows.size(); ++i) EXPECT_LE(keys_of(rows(i)), keys_of(rows(i - 1)));
  for (int i = 1; i < keys.size(); ++i) EXPECT_LE(rows_of(keys(i)), rows_of(keys(i - 1)));
}

/// The size alone tells the host that a launch of so many work items cannot be.
TEST(BothSides, MorePairsThan32BitsAreCounted) {
  Scheduler const many(1 << 20, 1 << 12, 64, 64, 1, 1 << 30);
  EXPECT_EQ(many.size(), int64_t(1) << 32);
  EXPECT_EQ(Scheduler(1 << 20, 1 << 12, INT32_MAX, 128, 1, 4).size(), int64_t(1) << 56);
}

TEST(BothSides, WhatAllSequencesSeeIsKnownWithoutTheDevice) {
  Params params;
  params.batch = 3, params.n_q = 4, params.n_kv = 100, params.n_cached = 90, params.n_new = 2;
  params.start_pos_kind = StartPos::End;
  EXPECT_EQ(visibility_of_all(params).len_kv, 92);
  EXPECT_EQ(visibility_of_all(params).start_pos, 88);
#ifndef NDEBUG
  params.seqused_k = reinterpret_cast<int const*>(16);  // an address of the device
  EXPECT_DEATH(visibility_of_all(params), "all_alike");
#endif
}

TEST(ScoreMod, DerivativesAreThoseOfFiniteDifferences) {
  float const slope = 0.3f, scale = 0.125f;
  for (float softcap : {0.f, 2.f, 30.f}) {
    for (float const* slopes : {static_cast<float const*>(nullptr), &slope}) {
      Params params;
      params.softmax_scale = scale, params.softcap = softcap, params.alibi_slopes = slopes;
      ScoreMod const mod(params, 0, 0);
      auto const score = [&](double product, int offset) {  // in the log2 domain, of <q, k>
        Tensor S = make_tensor<float>(Shape<_1, _1>{});
        S(0, 0) = float(product * ScoreMod::query_scale(params));
        mod.apply(S, offset, [](int, int) { return 0; });
        return S(0, 0);
      };
      for (int offset : {-7, 0, 1, 40}) {
        for (double product = -300; product <= 300; product += 7.5) {
          double const step = 0.5, x = step * scale;
          double const difference = (double(score(product + step, offset)) - score(product - step, offset)) / (2 * x);
          EXPECT_NEAR(mod.derivative(score(product, offset), offset), difference / kLog2e, 2e-3)
              << softcap << " " << product << " " << offset;
          Tensor S = make_tensor<float>(Shape<_1, _1>{}), dS = make_tensor<float>(Shape<_1, _1>{});
          S(0, 0) = score(product, offset), dS(0, 0) = 2.f;
          mod.differentiate(dS, S, offset, [](int, int) { return 0; });
          EXPECT_NEAR(dS(0, 0), 2 * mod.derivative(S(0, 0), offset), 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cutlass_ext

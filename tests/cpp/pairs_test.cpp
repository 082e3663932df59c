// What dropout draws, on the host: Philox4x32-7 against Random123's answers, and against Python's (test_scores.py).
#include "fmha/pairs.hpp"

#include <algorithm>

#include <gtest/gtest.h>

namespace cutlass_ext {
namespace {

/// Of a counter and a key whose words are all the same.
void expect_answer(uint32_t word, uint32_t const (&answer)[4]) {
  uint32_t const key[] = {word, word};
  Philox const philox(key, word, word);
  uint32_t x[4];
  philox.draw(philox.of_row(word), philox.of_sixteen(word), x);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(x[i], answer[i]);
}

TEST(Philox, GivesRandom123sAnswers) {
  expect_answer(0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48});
  expect_answer(~0u, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662});
}

TEST(Philox, MixesEveryWordOfItsCounter) {
  uint32_t const key[] = {0x12345678u, 0x9abcdef0u}, counter[] = {5, 1000, 3, 77};
  uint32_t words[4] = {5, 1000, 3, 77}, key0 = key[0], key1 = key[1];
  for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    uint64_t const a = uint64_t(0xD2511F53u) * words[0], b = uint64_t(0xCD9E8D57u) * words[2];
    uint32_t const mixed[] = {uint32_t(b >> 32) ^ words[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ words[3] ^ key1,
                              uint32_t(a)};
    std::copy(mixed, mixed + 4, words);
  }
  Philox const philox(key, counter[2], counter[3]);
  uint32_t x[4];
  philox.draw(philox.of_row(counter[1]), philox.of_sixteen(counter[0]), x);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(x[i], words[i]);
}

TEST(Dropout, ComparesAllNumbersOfABlockAtOnce) {
  uint32_t const key[] = {7, 9};
  Philox const philox(key, 1, 2);
  auto const rotated = [](uint32_t x, int by) { return x << by | x >> (32 - by); };
  for (uint32_t row = 0; row < 64; row += kBlockRows) {
    uint32_t words[kBlockRows][4];
    for (int odd = 0; odd < kBlockRows; ++odd)
      philox.draw(philox.of_row(row + odd), philox.of_sixteen(row % 5), words[odd]);
    uint32_t const shared = (words[0][0] ^ rotated(words[0][1], 11) ^ rotated(words[0][2], 22)) >> 8;
    for (uint32_t top : {0u, 1u, 0x19u, 0x7fu, 0x80u, 0x81u, 0xc0u, 0xffu}) {
      for (uint32_t low : {0u, 1u, shared, shared + 1, 0xffffffu}) {
        uint32_t const threshold = top << 24 | (low & 0xffffffu);
        uint32_t const kept = kept_of_block(philox, row, philox.of_sixteen(row % 5), threshold);
        for (int bit = 0; bit < 32; ++bit) {
          uint32_t number = shared;
          for (int i = 0; i < 8; ++i) number |= (words[i / 4][i % 4] >> bit & 1) << (24 + i);
          EXPECT_EQ(kept >> bit & 1, number >= threshold) << threshold;
        }
      }
    }
  }
}

TEST(Dropout, HasABitForEachPairOfABlock) {
  uint32_t seen = 0;
  for (int key = 0; key < kBlockKeys; ++key) {
    for (int row = 0; row < kBlockRows; ++row) seen |= 1u << bit_of_pair(key, row);
  }
  EXPECT_EQ(seen, ~0u);
}

TEST(Mask, HasRoomForItsMap) {
  for (int keys = 1; keys < 5000; ++keys) {
    EXPECT_GE(Mask::words_of(keys) * 32, keys);
    EXPECT_LE((Mask::blocks_of(keys) + 31) / 32 * 2, Mask::words_of(keys)) << keys;
  }
  Mask const each(2, 3, 130, 200), one(1, 1, 1, 200);
  EXPECT_EQ(each.row, 8);
  EXPECT_EQ(each.head, (130 + 3) * 8);
  EXPECT_EQ(each.batch, 3 * (130 + 3) * 8);
  EXPECT_EQ(one.row + one.head + one.batch, 0);
}

}  // namespace
}  // namespace cutlass_ext

// What dropout draws, on the host: Philox4x32-7 against Random123's answers, and against Python's (test_scores.py).
#include "fmha/pairs.hpp"

#include <gtest/gtest.h>

namespace cutlass_ext {
namespace {

TEST(Philox, GivesRandom123sAnswers) {
  uint32_t zeros[4] = {}, ones[4] = {~0u, ~0u, ~0u, ~0u};
  philox(zeros, 0, 0);
  philox(ones, ~0u, ~0u);
  uint32_t const of_zeros[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};
  uint32_t const of_ones[4] = {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(zeros[i], of_zeros[i]);
    EXPECT_EQ(ones[i], of_ones[i]);
  }
}

}  // namespace
}  // namespace cutlass_ext

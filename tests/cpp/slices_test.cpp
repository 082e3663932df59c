// Who owns which counters of the pool: streams and captures of two devices, until there are none left.
#include <gtest/gtest.h>

#include "host/slices.hpp"

namespace cutlass_ext {
namespace {

constexpr size_t kPool = 4 * Slices::kLeast;

TEST(Slices, AStreamKeepsItsOwn) {
  Slices slices(kPool);
  size_t const place = slices.place_of({0, 0, 7}, 2);
  EXPECT_EQ(slices.place_of({0, 0, 7}, Slices::kLeast), place) << "it has more than it asked for";
  size_t const other = slices.place_of({0, 0, 8}, 2), captured = slices.place_of({0, 5, 7}, 2);
  EXPECT_GE(other, place + Slices::kLeast);
  EXPECT_EQ(captured, other + Slices::kLeast) << "a capture on the same stream is another owner";
  EXPECT_EQ(slices.place_of({0, 6, 7}, 2), captured + 2) << "and is given no more than it asks for";
  EXPECT_EQ(slices.place_of({0, 0, 7}, 2), place);
}

TEST(Slices, WhoWantsMoreMoves) {
  Slices slices(kPool);
  size_t const place = slices.place_of({0, 0, 7}, 2);
  size_t const larger = slices.place_of({0, 0, 7}, Slices::kLeast + 1);
  EXPECT_GE(larger, place + Slices::kLeast);
  EXPECT_EQ(slices.place_of({0, 0, 7}, 2), larger);
}

TEST(Slices, WhereTooFewAreLeftNobodyElseLosesAny) {
  Slices slices(kPool);
  EXPECT_EQ(slices.place_of({0, 0, 7}, kPool), kPool) << "twice as many are wanted for a stream's next calls";
  EXPECT_EQ(slices.place_of({0, 1, 7}, kPool), 0u);
  EXPECT_EQ(slices.place_of({0, 2, 7}, 1), kPool);
  EXPECT_EQ(slices.place_of({0, 1, 7}, 5), 0u);
}

TEST(Slices, EachDeviceHasItsOwnPool) {
  Slices slices(kPool);
  EXPECT_EQ(slices.place_of({0, 1, 7}, kPool), 0u);
  EXPECT_EQ(slices.place_of({1, 1, 7}, kPool), 0u);
}

}  // namespace
}  // namespace cutlass_ext

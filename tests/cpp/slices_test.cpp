// Who owns which slice of the pool of counters: streams and captures of two devices, until there are none left.
#include <gtest/gtest.h>

#include "host/slices.hpp"

namespace cutlass_ext {
namespace {

using Key = SliceOwners::Key;  // device, capture, stream

TEST(Slices, AStreamKeepsItsOwn) {
  SliceOwners owners(2);
  bool fresh;
  int const slice = owners.slice_of(Key{0, 0, 7}, &fresh);
  EXPECT_TRUE(fresh);
  EXPECT_NE(owners.slice_of(Key{0, 5, 7}, &fresh), slice) << "a capture on the same stream";
  EXPECT_TRUE(fresh);
  EXPECT_EQ(owners.slice_of(Key{0, 0, 7}, &fresh), slice);
  EXPECT_FALSE(fresh);
}

TEST(Slices, WhereNoneIsLeftOneIsHadAfterAnotherComesBack) {
  SliceOwners owners(3);
  bool fresh;
  for (unsigned stream = 0; stream < 3; ++stream) EXPECT_EQ(owners.slice_of(Key{0, 0, stream}, &fresh), int(stream));
  EXPECT_EQ(owners.slice_of(Key{0, 0, 3}, &fresh), -1);
  EXPECT_EQ(owners.slice_of(Key{0, 0, 3}, &fresh), -1) << "who was refused owns nothing";
  EXPECT_EQ(owners.slice_of(Key{0, 0, 2}, &fresh), 2) << "the others keep theirs";

  owners.give_back(Key{0, 0, 1});
  EXPECT_EQ(owners.slice_of(Key{0, 0, 3}, &fresh), 1);
  EXPECT_TRUE(fresh);
  EXPECT_EQ(owners.slice_of(Key{0, 0, 1}, &fresh), -1);
}

TEST(Slices, EachDeviceHasItsOwnPool) {
  SliceOwners owners(1);
  bool fresh;
  EXPECT_EQ(owners.slice_of(Key{0, 0, 7}, &fresh), 0);
  EXPECT_EQ(owners.slice_of(Key{1, 0, 7}, &fresh), 0);
  EXPECT_TRUE(fresh);
  owners.give_back(Key{0, 0, 7});
  EXPECT_EQ(owners.slice_of(Key{1, 0, 8}, &fresh), -1) << "what came back is the other device's";
  EXPECT_EQ(owners.slice_of(Key{0, 0, 8}, &fresh), 0);
}

}  // namespace
}  // namespace cutlass_ext

// Shared-memory layouts of the mma.sync FMHA: every hand-written offset is the CuTe layout's, no ldmatrix phase and no
// copy conflicts on a bank.
#include <gtest/gtest.h>

#include <set>

#include "fmha/sm80/traits.hpp"

namespace cutlass_ext::sm80 {
namespace {

/// Eight 16-byte accesses are served in one pass when they fall in different groups of four banks: one phase of
/// ldmatrix, a quarter warp of a copy.
template <class Offset>
bool one_pass(Offset offset) {
  std::set<int> groups;
  for (int lane = 0; lane < 8; ++lane) groups.insert(offset(lane) / kVector % 8);
  return groups.size() == 8;
}

template <class T>
void check() {
  typename T::LayoutQ const layout_q;
  typename T::LayoutKV const layout_kv;
  for (int chunk = 0; chunk < T::HeadDim / kVector; ++chunk) {
    for (int row = 0; row < T::B_r; ++row)
      EXPECT_EQ(chunk_offset<T::B_r>(row, chunk), int(layout_q(row, chunk * kVector)));
    for (int row = 0; row < T::B_c; ++row)
      EXPECT_EQ(chunk_offset<T::B_c>(row, chunk), int(layout_kv(row, chunk * kVector)));
    // A phase reads one chunk of eight rows that follow each other: of Q, K and, transposed, V.
    for (int row = 0; row < T::B_r; row += 8)
      EXPECT_TRUE(one_pass([&](int lane) { return chunk_offset<T::B_r>(row + lane, chunk); }));
    for (int row = 0; row < T::B_c; row += 8)
      EXPECT_TRUE(one_pass([&](int lane) { return chunk_offset<T::B_c>(row + lane, chunk); }));
  }
  // The copies in and the output's way out take the eight chunks of one row of a panel.
  for (int panel = 0; panel < T::HeadDim / kPanel; ++panel) {
    for (int row = 0; row < T::B_r; ++row)
      EXPECT_TRUE(one_pass([&](int lane) { return chunk_offset<T::B_r>(row, panel * 8 + lane); }));
  }
}

TEST(Sm80Layouts, OffsetsAreTheLayoutsAndNothingConflicts) {
  check<Traits<128, 80, 64, half_t, 128>>();
  check<Traits<64, 64, 64, bfloat16_t, 128>>();
  check<Traits<128, 48, 128, half_t, 128>>();
  check<Traits<64, 80, 192, bfloat16_t, 128>>();
  check<Traits<64, 64, 256, half_t, 128>>();
}

/// A packed pair of the accumulator goes to shared memory as four bytes a lane: rows lane / 4, pairs lane % 4 of a
/// chunk.
TEST(Sm80Layouts, OutputStoresDoNotConflict) {
  for (int chunk = 0; chunk < 8; ++chunk) {
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) banks.insert((chunk_offset<64>(lane / 4, chunk) + lane % 4 * 2) / 2 % 32);
    EXPECT_EQ(banks.size(), 32u);
  }
}

}  // namespace
}  // namespace cutlass_ext::sm80

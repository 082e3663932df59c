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

/// The main loops name a lane's first chunk once and step from there: whatever has no bit in common with its number.
template <int Rows>
void check_steps(int columns) {
  for (int row = 0; row < 16; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      for (int rows = 0; row + rows < Rows; rows += 8) {
        for (int chunks = 0; chunks + chunk < columns / kVector; ++chunks) {
          if (chunk & chunks) continue;
          EXPECT_EQ(chunk_at<Rows>(2 * chunk_offset<Rows>(row, chunk), rows, chunks),
                    2u * chunk_offset<Rows>(row + rows, chunk + chunks));
        }
      }
    }
  }
}

template <class T>
void check() {
  check_steps<T::B_r>(T::HeadDim);
  check_steps<T::B_c>(T::HeadDim);
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
  check<Traits<128, 64, 64, half_t, 128>>();
  check<Traits<64, 64, 64, bfloat16_t, 128>>();
  check<Traits<128, 48, 128, half_t, 128>>();
  check<Traits<64, 80, 192, bfloat16_t, 128, 1>>();
  check<Traits<64, 64, 256, half_t, 128, 1, 2>>();
}

/// A packed pair of an accumulator goes to shared memory as four bytes a lane, on its way out or, of P, to the warp
/// that shares the rows: rows lane / 4, pairs lane % 4 of a chunk.
TEST(Sm80Layouts, StoresOfAccumulatorsDoNotConflict) {
  for (int row = 0; row < 64; row += 8) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      std::set<int> banks;
      for (int lane = 0; lane < 32; ++lane)
        banks.insert((chunk_offset<64>(row + lane / 4, chunk) + lane % 4 * 2) / 2 % 32);
      EXPECT_EQ(banks.size(), 32u);
    }
  }
}

/// Between two warps that share rows P is a panel of its own: what one writes of its keys is what the other reads.
TEST(Sm80Layouts, SharedPIsReadWhereItIsWritten) {
  using T = Traits<64, 64, 256, half_t, 128, 1, 2>;
  constexpr int Chunks = T::WarpKeys / kVector;
  std::set<int> written, read;
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t const to = 2 * (chunk_offset<T::B_r>(lane / 4, Chunks) + lane % 4 * 2);
    for (int rows = 0; rows < 32; rows += 8) {
      for (int chunk = 0; chunk < Chunks; ++chunk) written.insert(chunk_at<T::B_r>(to, rows, chunk) / 16);
    }
    uint32_t const from = 2 * chunk_offset<T::B_r>(lane % kAtom, Chunks + lane / kAtom);
    for (int rows = 0; rows < 32; rows += kAtom) {
      for (int chunk = 0; chunk < Chunks; chunk += 2) read.insert(chunk_at<T::B_r>(from, rows, chunk) / 16);
    }
  }
  EXPECT_EQ(written.size(), 32u * Chunks);
  EXPECT_EQ(written, read);
}

/// Warps that share rows have each a part of the columns of what P multiplies, of which an ldmatrix loads two chunks.
template <class T>
void check_parts() {
  std::set<int> chunks;
  for (int part = 0; part < T::Sharers; ++part) {
    for (int atom = 0; atom < T::OutAtoms; ++atom) {
      int const first = part * T::PartChunks, chunk = T::chunk_of(atom);
      EXPECT_TRUE(chunks.insert(first + chunk).second) << "two warps have chunk " << first + chunk;
      if (atom % 2 == 0) {
        EXPECT_EQ(T::chunk_of(atom + 1), chunk + 1);
        EXPECT_EQ((first + 1) & chunk, 0) << "no step of chunk_at";
      }
    }
  }
  EXPECT_EQ(int(chunks.size()), T::HeadDim / kVector);
  EXPECT_EQ(*chunks.rbegin(), T::HeadDim / kVector - 1);
}

TEST(Sm80Layouts, PartsHaveEveryColumnOnce) {
  check_parts<Traits<128, 64, 128, half_t, 256, 2, 2>>();
  check_parts<Traits<64, 64, 192, half_t, 256, 2, 4>>();
  check_parts<Traits<64, 64, 256, half_t, 256, 2, 4>>();
}

}  // namespace
}  // namespace cutlass_ext::sm80

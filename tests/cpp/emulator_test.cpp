// The emulated GPU of tests/emulator on small kernels written in PTX: what it computes, and that it finds the faults
// that it is there to find. Each runs under many seeds, which draw the order of warps and when copies land.
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "../emulator/machine.hpp"
#include "../emulator/memory.hpp"

namespace cutlass_ext::emulator {
namespace {

constexpr int kSeeds = 20;

/// Memory of the emulated GPU.
template <class T>
class OnGpu {
 public:
  explicit OnGpu(size_t count) : data_(static_cast<T*>(allocate(count * sizeof(T)))) {}
  ~OnGpu() { release(data_); }
  OnGpu(OnGpu const&) = delete;
  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* const data_;
};

/// A kernel of one pointer, %rd0, of which %r0 is the thread's index, with what PTX its text is.
class Kernel {
 public:
  explicit Kernel(std::string const& body)
      : module_(
            ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry kernel(\n.param .u64 p)\n{\n"
            ".reg .pred %p<4>;\n.reg .b32 %r<20>;\n.reg .f32 %f<20>;\n.reg .b64 %rd<9>;\n"
            ".shared .align 1024 .b8 buffer[8192];\n.shared .align 8 .b8 barrier[8];\n"
            "ld.param.u64 %rd0, [p];\nmov.u32 %r0, %tid.x;\n" +
            body + "\nret;\n}\n") {}

  void run(void* memory, unsigned threads = 32) {
    void const* const arguments[] = {&memory};
    module_.launch({"kernel", {1, 1, 1}, {threads, 1, 1}, {1, 1, 1}, 0, arguments});
  }

  /// What is wrong with it; "" where nothing is.
  std::string fault(void* memory, unsigned threads = 32) {
    try {
      run(memory, threads);
    } catch (std::runtime_error const& error) {
      return error.what();
    }
    return "";
  }

 private:
  Module module_;
};

testing::AssertionResult says(std::string const& text, std::string const& what) {
  if (text.find(what) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" does not say \"" << what << "\"";
}

std::string const kStore = "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1; st.global.u32 [%rd1], %r1;";

TEST(Emulator, LanesThatPartMeetAgain) {  // lane i goes round i times; then lanes exchange what they have
  Kernel kernel(
      "mov.u32 %r1, 0; mov.u32 %r2, %r0;\nLOOP: setp.eq.u32 %p0, %r2, 0; @%p0 bra END;\n"
      "add.u32 %r1, %r1, 3; sub.u32 %r2, %r2, 1; bra LOOP;\n"
      "END: shfl.sync.bfly.b32 %r1|%p1, %r1, 1, 31, -1;" +
      kStore);
  OnGpu<uint32_t> out(32);
  kernel.run(out.get());
  for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], 3 * (lane ^ 1));
}

TEST(Emulator, AnAddressOutsideOfEveryTensorIsAFault) {
  Kernel kernel("mov.u32 %r1, 1;" + kStore);
  OnGpu<uint32_t> out(31);
  EXPECT_TRUE(says(kernel.fault(out.get()), "writes to an address that no tensor has"));
  OnGpu<uint32_t> enough(32);
  EXPECT_EQ(kernel.fault(enough.get()), "");
}

TEST(Emulator, AMisalignedAddressIsAFault) {
  Kernel kernel("ld.global.u32 %r1, [%rd0+2];");
  OnGpu<uint32_t> memory(2);
  EXPECT_TRUE(says(kernel.fault(memory.get()), "misaligned"));
}

TEST(Emulator, AHangIsReported) {  // the second warp never comes
  Kernel kernel("setp.gt.u32 %p0, %r0, 31; @%p0 bra END; bar.sync 1, 64;\nEND:");
  EXPECT_TRUE(says(kernel.fault(nullptr, 64), "every warp waits"));
}

/// 64 bytes to shared memory by the copy engine, by one thread.
std::string const kCopy =
    "mov.u32 %r5, buffer; mov.u32 %r6, barrier; setp.eq.u32 %p0, %r0, 0;\n"
    "@%p0 mbarrier.init.shared::cta.b64 [%r6], 1; bar.sync 0;\n"
    "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 128; mov.u32 %r7, 128;\n"
    "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd0], %r7, [%r6];\n";
std::string const kWait =
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r6], 0; @%p1 bra DONE; bra WAIT;\nDONE:\n";
std::string const kLoadAndAdd =
    "shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r5; ld.shared.u32 %r1, [%r8]; add.u32 %r1, %r1, 1;\n";

TEST(Emulator, CopiesLandBeforeTheirBarrierPasses) {
  Kernel kernel(kCopy + kWait + kLoadAndAdd + kStore);
  for (int seed = 0; seed < kSeeds; ++seed) {
    OnGpu<uint32_t> memory(32);
    for (uint32_t i = 0; i < 32; ++i) memory[i] = i;
    kernel.run(memory.get());
    for (uint32_t i = 0; i < 32; ++i) ASSERT_EQ(memory[i], i + 1);
  }
}

TEST(Emulator, AndWhoDoesNotWaitReadsWhatWasThere) {
  Kernel kernel(kCopy + kLoadAndAdd + "bar.sync 0;" + kStore + kWait);
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    OnGpu<uint32_t> memory(32);
    for (uint32_t i = 0; i < 32; ++i) memory[i] = i;
    kernel.run(memory.get());
    wrong += memory[1] != 2;
  }
  EXPECT_GT(wrong, 0);
}

TEST(Emulator, TheCopyEngineReadsNothingThatIsNotFenced) {
  auto const text = [](std::string const& fence) {
    return "mov.u32 %r5, buffer; shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r5; st.shared.u32 [%r8], %r0;" + fence +
           "bar.warp.sync -1; mov.u32 %r7, 128; setp.eq.u32 %p0, %r0, 0;\n"
           "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r5], %r7;\n"
           "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
  };
  Kernel with(text("fence.proxy.async.shared::cta;")), without(text(""));
  OnGpu<uint32_t> memory(32);
  with.run(memory.get());
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(memory[i], i);
  EXPECT_TRUE(says(without.fault(memory.get()), "without fence.proxy.async"));
}

/// Each thread's four sums of a 64 x 8 x 16 product of A = 1 in registers and B = 1 in shared memory, stored.
std::string product(std::string const& before, std::string const& between) {
  return before +
         "mov.u32 %r10, 0x3c003c00; mov.u32 %r11, buffer; shr.u32 %r11, %r11, 4; mov.u32 %r12, 0x40000040;\n"
         "mov.b64 %rd4, {%r11, %r12}; setp.ne.u32 %p2, 0, 0; wgmma.fence.sync.aligned;\n"
         "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r10, %r10, %r10, %r10}, %rd4, %p2, "
         "1, 1, 0;\n"
         "wgmma.commit_group.sync.aligned;" +
         between +
         "wgmma.wait_group.sync.aligned 0;\n"
         "mul.wide.u32 %rd1, %r0, 16; add.s64 %rd1, %rd0, %rd1; st.global.v4.f32 [%rd1], {%f0, %f1, %f2, %f3};";
}
std::string const kFill =  // of `buffer`, 1,024 bytes with ones
    "mov.u32 %r5, buffer; shl.b32 %r8, %r0, 3; add.u32 %r8, %r8, %r5; mov.u32 %r9, 0x3c003c00;\n"
    "st.shared.v2.u32 [%r8], {%r9, %r9};\n";

TEST(Emulator, ProductsAreRight) {
  Kernel kernel(product(kFill + "fence.proxy.async.shared::cta; bar.sync 0;", ""));
  OnGpu<float> out(512);
  kernel.run(out.get(), 128);
  for (size_t i = 0; i < 512; ++i) ASSERT_EQ(out[i], 16.f);
}

TEST(Emulator, ProductsOfWhatIsNotFencedAreNaN) {
  Kernel kernel(product(kFill + "bar.sync 0;", ""));
  OnGpu<float> out(512);
  kernel.run(out.get(), 128);
  for (size_t i = 0; i < 512; ++i) ASSERT_TRUE(std::isnan(out[i]));
}

TEST(Emulator, ProductsWhoseOperandIsWrittenBeforeTheyAreWaitedForAreNaN) {
  Kernel kernel(product(kFill + "fence.proxy.async.shared::cta; bar.sync 0;", "st.shared.v2.u32 [%r8], {%r9, %r9};"));
  OnGpu<float> out(512);
  kernel.run(out.get(), 128);
  EXPECT_TRUE(std::isnan(out[0]));
}

}  // namespace
}  // namespace cutlass_ext::emulator

// What the host makes of backward calls, on GPUs that are not there: one kernel or two, how many tiles, which
// workspace, what is cleared; and what it refuses, by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fake_cuda.hpp"
#include "fmha/backward/bias_tiles.hpp"
#include "host/backward.hpp"
#include "host/backward_steps.hpp"
#include "host/operand_parts.hpp"

namespace cutlass_ext {

// The parts that are compiled by nvcc: they note what they are called with.
static std::vector<std::string> done;
static BackwardParams of_statistics;
static int64_t first_heads;  // 0: all
static float const* finished_sums;
void compute_row_statistics(DType, BackwardParams const& params, int64_t ctas_of_heads, float* to_clear, size_t floats,
                            cudaStream_t) {
  void* const to_be_cleared = params.dq_sums    ? static_cast<void*>(params.dq_sums)
                              : params.counters ? static_cast<void*>(params.counters)
                                                : params.dq;
  EXPECT_EQ(to_clear, floats > 0 ? to_be_cleared : nullptr);
  EXPECT_EQ(floats % 4, 0u);
  fake::cleared_bytes += floats * sizeof(float);
  done.emplace_back("statistics");
  of_statistics = params, first_heads = ctas_of_heads;
}
size_t bytes_of_parts(BackwardParams const&, int head_dim, int) { return head_dim; }
BackwardParams make_parts(BackwardParams const& params, int, int, void*, cudaStream_t) {
  static int const flag = 0;
  done.emplace_back("parts");
  BackwardParams p = params;
  p.out_of_range = &flag;
  return p;
}
void transpose_mask(BackwardParams const&, cudaStream_t) {}
void classify_tiles(BackwardParams const&, bool, int, int, cudaStream_t) {}
void compute_dbias(DType, Kernel const* hopper, BackwardParams, cudaStream_t, Allocate const&) {
  done.emplace_back(hopper ? "dBias by " + std::string(hopper->family) : "dBias");
}
void finish_gradients(Kernel const&, BackwardParams const& params, int64_t head0, cudaStream_t) {
  if (SharedTiles const& tiles = params.shared_tiles; tiles.count > 0) {
    EXPECT_NE(tiles.sums, nullptr);
    EXPECT_EQ(tiles.splits, tiles.head_splits.divisor * tiles.tile_splits.divisor);
    EXPECT_LE(tiles.begin + tiles.count, params.scheduler.size());
    done.emplace_back("splits");
  }
  if (params.dq_sums) done.emplace_back(head0 > 0 ? "dQ from head " + std::to_string(head0) : "dQ");
  finished_sums = params.dq_sums;
}

namespace {

template <class T>
T* somewhere() {
  return reinterpret_cast<T*>(uintptr_t(1) << 30);  // device memory, never read
}

/// A backward call of contiguous tensors, deterministic unless said otherwise, and what is asked besides.
struct Call {
  BackwardParams p;
  Request request;
  fake::Gpu gpu = fake::kH200;

  Call(int batch, int n_q, int n_kv, int heads_q, int heads_kv, int head_dim) {
    p.batch = batch, p.n_q = n_q, p.n_kv = n_kv;
    p.heads_q = heads_q, p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = head_dim;
    p.element_bytes = 2;
    p.q = p.k = p.v = p.dout = p.o = p.dq = p.dk = p.dv = somewhere<void>();
    p.lse = somewhere<float>();
    request.dtype = DType::BFloat16;
    request.deterministic = true;
  }
  Call& in_any_order() { return request.deterministic = false, *this; }
  Call& backend(char const* name) { return request.backend = name, *this; }
  Call& on(fake::Gpu other) { return gpu = other, *this; }
  Call& head_dim_v(int d_v) { return p.head_dim_v = d_v, *this; }
  Call& causal() { return p.window_right = 0, *this; }
  Call& window(int left, int right) { return p.window_left = left, p.window_right = right, *this; }
  Call& scale(float x) { return p.softmax_scale = x, *this; }
  Call& softcap() { return p.softcap = 30.f, *this; }
  Call& alibi() { return p.alibi_slopes = somewhere<float>(), *this; }
  Call& sink() { return p.sink = p.dsink = somewhere<float>(), *this; }
  Call& lengths() { return p.seqused_k = somewhere<int>(), *this; }
  Call& bias() {
    p.bias.data = p.dbias = somewhere<void>();
    p.bias.type = BiasType::BFloat16;
    p.bias.key = 1;
    return *this;
  }
  Call& mask() { return p.mask.bits = somewhere<uint32_t>(), *this; }
  Call& dropout() { return p.dropout.seed = somewhere<int64_t>(), p.dropout.threshold = 6554, *this; }
  Call& float32(Precision precision) {
    p.element_bytes = 4;
    request.dtype = DType::Float32, request.precision = precision;
    return *this;
  }
  Call& pages() { return p.block_table = somewhere<int>(), *this; }
  Call& unaligned_dout() { return p.dout = somewhere<char>() + 4, *this; }
  Call& packed(int total_q, int total_k) {
    p.cu_seqlens_q = p.cu_seqlens_k = somewhere<int>();
    p.total_q = total_q, p.total_k = total_k;
    return *this;
  }
};

BackwardPlan plan_of(Call const& call, BackwardParams* params) {
  BackwardParams& p = *params = call.p;
  auto const strides = [](int64_t rows, int64_t heads, int64_t d) { return Strides{rows * heads * d, heads * d, d}; };
  p.q_stride = p.dq_stride = strides(p.stored_rows(), p.heads_q, p.head_dim);
  p.k_stride = p.dk_stride = strides(p.stored_keys(), p.heads_kv, p.head_dim);
  p.v_stride = p.dv_stride = strides(p.stored_keys(), p.heads_kv, p.head_dim_v);
  p.o_stride = p.dout_stride = strides(p.stored_rows(), p.heads_q, p.head_dim_v);
  fake::use(call.gpu);
  return plan_backward(p, call.request);
}

/// Each kernel's family, tile, head_dim, number of tiles, or of mirrored twos, and splits of one, or the refusal.
std::string line_of(Call const& call) {
  try {
    BackwardParams p;
    BackwardPlan const plan = plan_of(call, &p);
    if (!plan) return plan.refusal;
    std::map<Kind, char const*> const names{
        {Kind::AllGradients, "all "}, {Kind::HeadGradients, "heads "}, {Kind::KeyGradients, "keys "}};
    EXPECT_EQ(plan.is_one(), plan.of_keys.kernel->kind != Kind::KeyGradients);
    std::ostringstream line;
    for (auto const* launch : {&plan.of_keys, &plan.of_queries}) {
      if (!launch->kernel) continue;
      Kernel const& k = *launch->kernel;
      line << (launch == &plan.of_keys ? names.at(k.kind) : ", rows ") << k.family << " " << k.block_r << "x"
           << k.block_c << " d" << k.head_dim << ", " << launch->scheduler.size()
           << (launch->is_mirrored ? " twos" : " tiles");
      SharedTiles const shared = launch->shared_tiles();
      if (shared.count == 0) continue;
      if (shared.begin > 0) line << ", the last " << shared.count;
      line << " in " << launch->splits.heads << " by " << launch->splits.tiles;
    }
    return line.str();
  } catch (std::runtime_error const& error) {
    return error.what();
  }
}

TEST(BackwardPlan, DropoutAloneHasKernelsOfItsOwn) {
  BackwardParams p;
  auto const mods_of = [&](Call const& call) { return plan_of(call, &p).of_keys.kernel->takes & feature::kMods; };
  EXPECT_EQ(mods_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order()), 0u);
  EXPECT_EQ(mods_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order().dropout()), feature::Dropout);
  EXPECT_EQ(mods_of(Call(32, 512, 512, 16, 16, 64).dropout()), feature::Dropout);
  EXPECT_EQ(mods_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order().dropout().bias()), feature::kMods);
  BackwardPlan const plan = plan_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order().dropout(), &p);
  EXPECT_LT(plan.of_keys.ctas, plan.of_keys.scheduler.size()) << "CTAs take one tile after the other";
  EXPECT_TRUE(plan.of_keys.fuses_postprocess);
  EXPECT_FALSE(plan.of_keys.is_mirrored);
}

TEST(BackwardPlan, ABiasAloneHasKernelsOfItsOwn) {
  BackwardParams p;
  auto const mods_of = [&](Call const& call) { return plan_of(call, &p).of_keys.kernel->takes & feature::kMods; };
  auto const call = [](int64_t row) {
    Call call = Call(8, 2048, 2048, 16, 16, 128).in_any_order().bias();
    call.p.bias.row = row;
    return call;
  };
  EXPECT_EQ(mods_of(call(2048)), feature::Bias);
  EXPECT_EQ(mods_of(call(2049)), feature::Bias) << "of which a copy is made";
  EXPECT_EQ(mods_of(call(2048).lengths().sink()), feature::Bias);
  EXPECT_EQ(mods_of(call(0)), feature::kBias) << "a row for all";
  EXPECT_EQ(mods_of(call(2048).dropout()), feature::kMods);
  Call other = call(2048);
  other.p.bias.type = BiasType::Float32;
  EXPECT_EQ(mods_of(other), feature::kBias);
  other = call(2048);
  other.p.leftpad_k = somewhere<int>();
  EXPECT_EQ(mods_of(other), feature::kBias);
  BackwardPlan const plan = plan_of(call(2048), &p);
  EXPECT_LT(plan.of_keys.ctas, plan.of_keys.scheduler.size()) << "CTAs take one tile after the other";
  EXPECT_TRUE(plan.of_keys.fuses_postprocess);
  EXPECT_FALSE(plan.stores_dbias) << "of which each element is the sum of eight";
  other = call(2048);
  other.p.bias.batch = other.p.bias.head = 2048;  // any but 0
  EXPECT_TRUE(plan_of(other, &p).stores_dbias);
  EXPECT_FALSE(plan_of(other.dropout(), &p).stores_dbias);
  EXPECT_EQ(plan_of(call(0), &p).of_keys.ctas, plan.of_keys.scheduler.size());
}

TEST(BackwardPlan, AMaskAloneHasKernelsOfItsOwn) {
  BackwardParams p;
  auto const call = [] { return Call(8, 2048, 2048, 16, 16, 128).in_any_order().mask(); };
  auto const mods_of = [&](Call const& call) { return plan_of(call, &p).of_keys.kernel->takes & feature::kMods; };
  EXPECT_EQ(mods_of(call()), feature::Mask);
  EXPECT_EQ(mods_of(call().lengths().sink()), feature::Mask);
  Call both = call().bias();
  both.p.bias.row = 2048;
  EXPECT_EQ(mods_of(both), feature::Bias | feature::Mask);
  EXPECT_EQ(mods_of(call().bias()), feature::kMods) << "of one row for all";
  EXPECT_EQ(mods_of(call().dropout()), feature::kMods);
  EXPECT_EQ(mods_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order()), 0u) << "a call without one";
  EXPECT_EQ(mods_of(Call(32, 512, 512, 16, 16, 64).mask()), feature::Mask) << "and of whole heads";
  EXPECT_EQ(plan_of(Call(32, 512, 512, 16, 16, 64).mask(), &p).of_keys.kernel->kind, Kind::HeadGradients);
  BackwardPlan const plan = plan_of(call(), &p);
  EXPECT_LT(plan.of_keys.ctas, plan.of_keys.scheduler.size()) << "CTAs take one tile after the other";
  EXPECT_TRUE(plan.of_keys.fuses_postprocess);
  Call const long_rows = Call(4, 4096, 4096, 28, 4, 128).in_any_order().causal();
  EXPECT_TRUE(plan_of(long_rows, &p).of_keys.is_mirrored);
  EXPECT_FALSE(plan_of(Call(long_rows).mask(), &p).of_keys.is_mirrored) << "tiles that it hides are no image's";
}

TEST(BackwardPlan, PassesSumsOfWideHeadsOnWhereAClusterHasAllOfThem) {
  auto const launch_of = [](Call const& call) {
    BackwardParams p;
    return plan_of(call, &p).of_keys;
  };
  auto const passes = [&](Call const& call) { return launch_of(call).kernel->loop.dq_through_cluster; };
  auto const of = [](int batch, int n, int heads, int heads_kv, int head_dim) {
    return Call(batch, n, n, heads, heads_kv, head_dim).in_any_order();
  };
  EXPECT_TRUE(passes(of(64, 256, 16, 16, 128)));
  EXPECT_TRUE(passes(of(64, 256, 16, 16, 128).causal()));
  EXPECT_TRUE(passes(of(128, 197, 16, 16, 80)));
  EXPECT_TRUE(passes(of(64, 150, 16, 8, 128).packed(9600, 9600)));
  EXPECT_TRUE(passes(of(2, 256, 16, 16, 128))) << "64 of 132 CTAs work, and no launch adds up";
  EXPECT_TRUE(passes(of(32, 256, 16, 4, 128)));
  EXPECT_FALSE(passes(of(1, 256, 8, 1, 128))) << "each of two CTAs would go through eight heads";
  EXPECT_FALSE(passes(Call(4, 4096, 77, 17, 17, 128).in_any_order())) << "64 turns of half of the CTAs";
  EXPECT_TRUE(passes(Call(8, 4096, 77, 16, 16, 128).in_any_order()));
  EXPECT_FALSE(passes(of(128, 384, 16, 16, 128).packed(13000, 13000))) << "a tile a head, nearly always";
  EXPECT_FALSE(passes(of(64, 256, 16, 16, 64))) << "in shared memory";
  EXPECT_FALSE(passes(of(32, 512, 16, 16, 128))) << "clusters of four leave multiprocessors idle";
  EXPECT_TRUE(passes(Call(32, 512, 512, 16, 16, 128))) << "fixed bits, which seven products would take else";
  EXPECT_FALSE(passes(Call(32, 1024, 1024, 16, 16, 128))) << "of eight still more";
  GradientLaunch const two = launch_of(of(64, 256, 16, 16, 128)), three = launch_of(of(4, 300, 5, 5, 128).causal()),
                       one = launch_of(of(64, 128, 16, 16, 128));
  EXPECT_EQ(two.cluster, 2u);
  EXPECT_EQ(two.ctas, 132);
  EXPECT_FALSE(two.is_mirrored);
  EXPECT_EQ(three.cluster, 3u);
  EXPECT_EQ(three.ctas, 3 * 20);
  EXPECT_TRUE(three.is_mirrored);
  EXPECT_EQ(three.scheduler.size(), 3 * 20) << "all tiles, whichever CTA has one";
  EXPECT_EQ(one.cluster, 1u);
  EXPECT_EQ(one.ctas, 132);
}

TEST(BackwardPlan, HasThreeWarpgroupsWhereTilesFillTheGpu) {
  auto const line = [](int batch, int n, int heads, int heads_kv) {
    return line_of(Call(batch, n, n, heads, heads_kv, 64).in_any_order());
  };
  EXPECT_EQ(line(8, 2048, 32, 32), "all sm90 64x192 d64, 2816 tiles");
  EXPECT_EQ(line(2, 8192, 16, 16), "all sm90 64x192 d64, 1376 tiles");
  EXPECT_EQ(line(1, 4096, 4, 4), "all sm90 64x128 d64, 128 tiles") << "88 would leave a third of the GPU idle";
  EXPECT_EQ(line(4, 4096, 32, 8), "all sm90 64x128 d64, 1024 tiles") << "8 waves, for six that last as long as 8.2";
  EXPECT_EQ(line_of(Call(4, 4096, 4096, 32, 8, 64).in_any_order().causal()), "all sm90 64x192 d64, 704 tiles");
  EXPECT_EQ(line_of(Call(1, 16384, 16384, 2, 2, 64).in_any_order().causal()), "all sm90 64x128 d64, 256 tiles")
      << "the longest of 192 keys would take longer than all together, unless it were split";
}

TEST(BackwardPlan, MirrorsTilesWhereGroupsAreLargerThanL2) {
  auto const is_mirrored = [](Call const& call) {
    BackwardParams p;
    return plan_of(call, &p).of_keys.is_mirrored;
  };
  auto const causal = [](int batch, int n, int heads, int heads_kv, int head_dim) {
    return Call(batch, n, n, heads, heads_kv, head_dim).in_any_order().causal();
  };
  EXPECT_TRUE(is_mirrored(causal(4, 2048, 28, 4, 128)));
  EXPECT_TRUE(is_mirrored(causal(2, 4096, 40, 8, 128)));
  EXPECT_TRUE(is_mirrored(causal(2, 4096, 16, 1, 128))) << "whose tiles are split";
  EXPECT_TRUE(is_mirrored(causal(3, 2048, 24, 1, 128))) << "whose splits have 5 and 4 heads";
  EXPECT_TRUE(is_mirrored(causal(4, 2047, 28, 4, 128)));
  EXPECT_TRUE(is_mirrored(causal(4, 2048, 28, 4, 128).window(2048, 0))) << "which hides nothing";
  EXPECT_FALSE(is_mirrored(causal(4, 2048, 28, 4, 128).window(1500, 0)));
  EXPECT_TRUE(is_mirrored(causal(86, 513, 5, 1, 128))) << "of five tiles one has no image";
  EXPECT_FALSE(is_mirrored(Call(4, 2048, 2048, 28, 4, 128).in_any_order()));
  EXPECT_FALSE(is_mirrored(causal(4, 2048, 28, 28, 128)));
  EXPECT_FALSE(is_mirrored(causal(1, 2048, 8, 1, 128))) << "17 MB";
  EXPECT_EQ(line_of(causal(4, 4096, 28, 4, 64)), "all sm90 64x192 d64, 176 twos, the last 44 in 3 by 1");
  EXPECT_FALSE(is_mirrored(causal(4, 4096, 24, 12, 64))) << "2.1 waves, of two heads, would last as long as three";
  EXPECT_FALSE(is_mirrored(causal(2, 8192, 32, 8, 128))) << "four waves, and 67 MB under way";
  EXPECT_TRUE(is_mirrored(causal(8, 4096, 28, 4, 128))) << "four waves, and 117 MB";
  EXPECT_FALSE(is_mirrored(Call(4, 2048, 4096, 28, 4, 128).in_any_order().causal())) << "the first tiles see all rows";
  EXPECT_FALSE(is_mirrored(causal(4, 2048, 28, 4, 128).lengths()));
  EXPECT_FALSE(is_mirrored(Call(4, 2048, 2048, 28, 4, 128).causal())) << "which adds to nothing";
}

TEST(BackwardPlan, MakesDqBesideTilesThatTakeLongEnough) {
  auto const fuses_postprocess = [](Call const& call) {
    BackwardParams p;
    BackwardPlan const plan = plan_of(call, &p);
    if (!plan.of_keys.fuses_postprocess) return false;
    EXPECT_GE(plan.of_keys.scheduler.items_a_section(), 132 - 15) << "a wave of tiles";
    return true;
  };
  auto const of = [](int batch, int n, int heads, int heads_kv, int head_dim) {
    return Call(batch, n, n, heads, heads_kv, head_dim).in_any_order();
  };
  EXPECT_TRUE(fuses_postprocess(of(16, 1024, 16, 16, 128)));
  EXPECT_TRUE(fuses_postprocess(of(8, 2048, 16, 16, 128)));
  EXPECT_TRUE(fuses_postprocess(of(8, 2048, 16, 16, 128).causal()));
  EXPECT_TRUE(fuses_postprocess(of(9, 1500, 16, 16, 104)));
  EXPECT_TRUE(fuses_postprocess(of(8, 1024, 12, 12, 64).causal()));
  EXPECT_TRUE(fuses_postprocess(of(8, 1024, 32, 16, 64)));
  EXPECT_FALSE(fuses_postprocess(of(16, 1024, 16, 16, 128).causal())) << "tiles see half of the rows";
  EXPECT_FALSE(fuses_postprocess(of(5, 700, 64, 64, 128)));
  EXPECT_FALSE(fuses_postprocess(of(8, 1024, 32, 8, 64))) << "68 MB of sums";
  EXPECT_FALSE(fuses_postprocess(of(1, 2048, 16, 16, 128))) << "two waves";
  EXPECT_FALSE(fuses_postprocess(of(8, 2048, 8, 8, 256))) << "no shared memory";
  EXPECT_TRUE(fuses_postprocess(of(8, 2048, 32, 32, 64))) << "three warpgroups";
  EXPECT_FALSE(fuses_postprocess(of(9, 1500, 32, 32, 64).causal())) << "which leave the warp less of it";
  EXPECT_FALSE(fuses_postprocess(of(8, 2048, 16, 16, 128).lengths()));
  EXPECT_FALSE(fuses_postprocess(of(8, 2048, 16, 16, 128).packed(16384, 16384)));
  EXPECT_FALSE(fuses_postprocess(Call(8, 2048, 2048, 16, 16, 128))) << "which adds to nothing";
  Call unaligned = of(8, 2048, 16, 16, 128);
  unaligned.p.dq = somewhere<char>() + 8;
  EXPECT_FALSE(fuses_postprocess(unaligned)) << "the copy engine writes dQ";
}

TEST(BackwardPlan, HasTilesOfKeysAddInOrderWhereBitsAreFixed) {
  auto const plan = [](Call const& call) {
    BackwardParams p;
    return plan_of(call, &p).of_keys;
  };
  auto const is_ordered = [&](Call const& call) { return plan(call).is_ordered; };
  auto const of = [](int batch, int n, int heads, int heads_kv, int head_dim) {
    return Call(batch, n, n, heads, heads_kv, head_dim);
  };
  EXPECT_TRUE(is_ordered(of(2, 8192, 16, 16, 128)));
  EXPECT_TRUE(is_ordered(of(2, 8192, 16, 16, 64).causal()));
  EXPECT_TRUE(is_ordered(of(4, 1024, 8, 8, 128)));
  EXPECT_TRUE(is_ordered(of(3, 700, 5, 5, 128).causal())) << "one wave of tiles, each shorter than the one before";
  EXPECT_TRUE(is_ordered(of(8, 2048, 16, 16, 128).lengths()));
  EXPECT_FALSE(is_ordered(of(2, 8192, 16, 16, 128).in_any_order()));
  EXPECT_FALSE(is_ordered(of(1, 640, 2, 2, 128))) << "five tiles that follow each other take as long as one";
  EXPECT_FALSE(is_ordered(of(1, 8192, 1, 1, 128))) << "sixty-four of them";
  EXPECT_FALSE(is_ordered(of(2, 2048, 8, 8, 128).causal()));
  EXPECT_FALSE(is_ordered(of(2, 8192, 16, 16, 192))) << "whose kernel adds in any order";
  EXPECT_FALSE(is_ordered(of(8, 2048, 16, 16, 128).dropout()));
  EXPECT_TRUE(is_ordered(of(8, 2048, 16, 16, 128).mask()));
  Call bias = of(8, 2048, 16, 16, 128).bias();
  bias.p.bias.row = 2048;
  EXPECT_TRUE(is_ordered(bias));
  EXPECT_TRUE(is_ordered(bias.mask()));
  EXPECT_FALSE(is_ordered(of(8, 2048, 16, 16, 128).mask().dropout()));

  EXPECT_TRUE(plan(of(2, 8192, 16, 16, 128).causal()).last_keys_first);
  EXPECT_TRUE(plan(of(2, 4096, 32, 16, 64).causal()).last_keys_first);
  EXPECT_FALSE(plan(of(2, 8192, 16, 16, 128)).last_keys_first) << "all tiles see the same rows";
  EXPECT_FALSE(plan(of(2, 8192, 32, 8, 128).causal()).last_keys_first) << "69 MB pass by between two tiles";
  EXPECT_FALSE(plan(of(2, 8192, 16, 16, 128).causal().mask()).last_keys_first) << "rows pass by a mask one way";

  // Waves of 132 tiles, of which a head has 64: four heads are two. Eight tiles of a head at once are sixteen heads.
  EXPECT_EQ(plan(of(2, 8192, 16, 16, 128).causal()).scheduler.pairs_a_section(), 4);
  EXPECT_EQ(plan(of(8, 8192, 32, 8, 128).causal()).scheduler.pairs_a_section(), 16);
}

TEST(BackwardPlan, TakesAWaveOfCausalTilesAtATime) {
  auto const begins = [](Call const& call, int64_t index) {
    BackwardParams p;
    WorkItem const work = plan_of(call, &p).of_keys.scheduler(static_cast<int>(index));
    return std::tuple(work.batch, work.head, work.row0);
  };
  // 32 tiles of keys a head: four heads for 132 CTAs, then the next four.
  Call const call = Call(2, 8192, 8192, 32, 8, 128).in_any_order().causal();
  EXPECT_EQ(begins(call, 0), std::tuple(0, 0, 0));
  EXPECT_EQ(begins(call, 1), std::tuple(0, 1, 0));
  EXPECT_EQ(begins(call, 2), std::tuple(0, 0, 128));
  EXPECT_EQ(begins(call, 128), std::tuple(0, 2, 0));
  // Two waves where lengths differ, three where a window makes tiles alike.
  EXPECT_EQ(begins(Call(call).lengths(), 3), std::tuple(0, 3, 0));
  EXPECT_EQ(begins(Call(call).lengths(), 4), std::tuple(0, 0, 128));
  Call windows = call;
  windows.p.window_left = 1000;
  EXPECT_EQ(begins(windows, 7), std::tuple(0, 7, 0));
}

TEST(BackwardPlan, ChoosesTheFirstFamilyThatTakesTheCall) {
  // B * heads * ceil(N / tile): 2 * 4 * 8 of keys, 2 * 8 * 8 of rows.
  EXPECT_EQ(line_of(Call(2, 1000, 1000, 8, 4, 128)),
            "keys sm90 64x128 d128, 64 tiles in 2 by 2, rows sm90 128x64 d128, 128 tiles");
  EXPECT_EQ(line_of(Call(2, 1000, 1000, 8, 4, 128).causal().sink().lengths()),
            "keys sm90 64x128 d128, 64 tiles in 2 by 2, rows sm90 128x64 d128, 128 tiles");
  EXPECT_EQ(line_of(Call(1, 128, 129, 4, 4, 40)), "keys sm90 64x128 d64, 8 tiles, rows sm90 128x64 d64, 4 tiles");
  EXPECT_EQ(line_of(Call(1, 128, 128, 4, 4, 64).head_dim_v(72)),
            "keys sm90 64x128 d128, 4 tiles, rows sm90 128x64 d128, 4 tiles");
  for (Call const& call :
       {Call(2, 1000, 1000, 8, 4, 128).softcap(), Call(2, 1000, 1000, 8, 4, 128).unaligned_dout(),
        Call(2, 1000, 1000, 8, 4, 128).on(fake::kA100), Call(2, 1000, 1000, 8, 4, 128).backend("sm80")}) {
    EXPECT_EQ(line_of(call), "keys sm80 64x32 d128, 256 tiles, rows sm80 64x64 d128, 256 tiles");
  }
}

TEST(BackwardPlan, AddsToQueriesWhereItIsFasterAndTheOrderIsFree) {
  EXPECT_EQ(line_of(Call(2, 8192, 8192, 8, 4, 128).in_any_order()), "all sm90 64x128 d128, 512 tiles");
  EXPECT_EQ(line_of(Call(1, 16, 1024, 8, 4, 128).in_any_order()), "all sm90 64x128 d128, 32 tiles");
  EXPECT_EQ(line_of(Call(1, 16, 1024, 8, 4, 128)).substr(0, 9), "keys sm90") << "bits are fixed";
  EXPECT_EQ(line_of(Call(1, 0, 1024, 8, 4, 128).in_any_order()).substr(0, 9), "keys sm90") << "nobody clears counters";
  EXPECT_EQ(line_of(Call(32, 32, 512, 16, 16, 128).in_any_order().dropout()).substr(0, 4), "keys");
  EXPECT_EQ(line_of(Call(4, 257, 512, 16, 16, 128).in_any_order()), "all sm90 64x128 d128, 256 tiles");
  EXPECT_EQ(line_of(Call(32, 33, 512, 16, 16, 128).in_any_order().dropout()), "all sm90 64x128 d128, 2048 tiles");
  EXPECT_EQ(line_of(Call(2, 33, 640, 16, 16, 72).in_any_order()), "all sm90 64x128 d96, 160 tiles");
  EXPECT_EQ(line_of(Call(64, 257, 256, 8, 8, 192).in_any_order()), "all sm90 64x128 d192, 1024 tiles");
  EXPECT_EQ(line_of(Call(64, 256, 256, 8, 8, 192).in_any_order()).substr(0, 9), "keys sm90") << "many wide heads";
  EXPECT_EQ(line_of(Call(64, 64, 129, 8, 8, 192).in_any_order()).substr(0, 3), "all") << "of many keys";
  EXPECT_EQ(line_of(Call(10, 64, 64, 8, 8, 192).in_any_order()).substr(0, 3), "all") << "few of them";
}

TEST(BackwardPlan, AddsToQueriesByMmaSyncButForManyHeadsOfFewRowsAndKeys) {
  for (Call const& call : {Call(2, 8192, 8192, 8, 4, 128).softcap(), Call(2, 8192, 8192, 8, 4, 128).backend("sm80"),
                           Call(2, 8192, 8192, 8, 4, 128).on(fake::kA100)}) {
    EXPECT_EQ(line_of(Call(call).in_any_order()), "all sm80 64x128 d128, 512 tiles");
    EXPECT_EQ(line_of(call).substr(0, 9), "keys sm80") << "bits are fixed";
    EXPECT_EQ(line_of(Call(call).in_any_order().unaligned_dout()).substr(0, 9), "keys sm80")
        << "of whole vectors alone";
    EXPECT_EQ(line_of(Call(call).in_any_order().mask()).substr(0, 9), "keys sm80") << "without pairs";
  }
  auto const line = [](Call call) { return line_of(call.backend("sm80").in_any_order()); };
  EXPECT_EQ(line(Call(1, 1024, 1024, 8, 2, 64)), "all sm80 32x128 d64, 16 tiles in 4 by 4") << "of four heads each";
  EXPECT_EQ(line(Call(40, 32, 128, 8, 8, 128)).substr(0, 4), "keys");
  EXPECT_EQ(line(Call(40, 33, 128, 8, 8, 128)).substr(0, 4), "all ");
  EXPECT_EQ(line(Call(40, 32, 129, 8, 8, 128)).substr(0, 4), "all ");
  EXPECT_EQ(line(Call(10, 32, 128, 8, 8, 128)).substr(0, 4), "all ") << "fewer than the GPU has room for";
  EXPECT_EQ(line(Call(100, 512, 128, 8, 8, 128).packed(3200, 6000)).substr(0, 4), "keys") << "32 rows in the mean";
  Call const wide = Call(2, 2048, 2048, 8, 8, 192).alibi().in_any_order();
  EXPECT_EQ(line_of(wide).substr(0, 9), "keys sm90") << "Hopper's are faster in two launches, too";
  EXPECT_EQ(line_of(Call(wide).backend("sm80")).substr(0, 8), "all sm80");
}

TEST(BackwardPlan, AddsToQueriesOnCudaCoresWhereLseIsNotWhatErrsMost) {
  auto const exact = [](Call call) { return call.backend("simt").float32(Precision::Any); };
  Call const large = exact(Call(8, 2048, 2048, 16, 16, 64));
  EXPECT_EQ(line_of(Call(large).in_any_order()), "all simt 32x128 d64, 2048 tiles");
  EXPECT_EQ(line_of(large), "keys simt 32x128 d64, 2048 tiles, rows simt 64x32 d64, 4096 tiles") << "bits are fixed";
  EXPECT_EQ(line_of(Call(large).in_any_order().mask()).substr(0, 9), "keys simt") << "without pairs";
  EXPECT_EQ(line_of(Call(large).in_any_order().float32(Precision::Highest)).substr(0, 9), "keys simt");
  EXPECT_EQ(line_of(Call(large).in_any_order().unaligned_dout()).substr(0, 8), "all simt");
  Call window = Call(large).in_any_order();
  window.p.window_left = 100, window.p.window_right = 0;
  EXPECT_EQ(line_of(window).substr(0, 9), "keys simt") << "rows see few keys";
  EXPECT_EQ(line_of(exact(Call(64, 200, 200, 16, 16, 64)).in_any_order()).substr(0, 9), "keys simt") << "likewise";
  for (bool const deterministic : {false, true}) {
    Call one_tile = exact(Call(64, 999, 128, 16, 16, 64)), packed = exact(Call(99, 100, 90, 16, 16, 128));
    packed.packed(7000, 7000);
    if (!deterministic) one_tile.in_any_order(), packed.in_any_order();
    EXPECT_EQ(line_of(one_tile), "all simt 32x128 d64, 1024 tiles") << "nobody else adds to dQ";
    EXPECT_EQ(line_of(packed).substr(0, 9), "keys simt") << "two tiles of 64";
  }
  EXPECT_EQ(line_of(exact(Call(64, 999, 64, 16, 16, 64))), "all simt 64x64 d64, 1024 tiles") << "the smaller tile";
  EXPECT_EQ(line_of(exact(Call(64, 999, 65, 16, 16, 64))), "all simt 32x128 d64, 1024 tiles");
}

TEST(BackwardPlan, SplitsTilesOfCudaCoresWhereTheyAreFew) {
  auto const line = [](Call call) { return line_of(call.backend("simt").float32(Precision::Any)); };
  EXPECT_EQ(line(Call(1, 1024, 1024, 1, 1, 64)),
            "keys simt 32x128 d64, 8 tiles in 1 by 32, rows simt 64x32 d64, 16 tiles in 1 by 16");
  EXPECT_EQ(line(Call(1, 1024, 1024, 1, 1, 64).in_any_order()), "all simt 32x128 d64, 8 tiles in 1 by 32");
  EXPECT_EQ(line(Call(1, 1024, 1024, 8, 2, 64).in_any_order()), "all simt 32x128 d64, 16 tiles in 4 by 4");
}

TEST(BackwardPlan, HasTwoCtasForATileOfWideHeads) {
  BackwardParams p;
  auto const launch = [&](int batch, int head_dim) {
    return plan_of(Call(batch, 2048, 2048, 8, 8, head_dim).in_any_order(), &p).of_keys;
  };
  EXPECT_EQ(launch(4, 192).kernel->loop.cluster, 2u);
  EXPECT_EQ(launch(4, 192).ctas, 132) << "two for each of 66 tiles that are worked on at once";
  EXPECT_EQ(launch(4, 128).kernel->loop.cluster, 1u);
  EXPECT_EQ(launch(1, 192).splits.all(), 1) << "128 tiles are two waves";
  EXPECT_GT(plan_of(Call(1, 2048, 2048, 2, 2, 192).in_any_order(), &p).of_keys.splits.all(), 1);
}

TEST(BackwardPlan, HasACtaForAllOfAHeadWhereThatFillsTheGpu) {
  std::string const heads = "heads sm90 64x128 d64, ";
  EXPECT_EQ(line_of(Call(32, 512, 512, 32, 32, 64)), heads + "4096 tiles") << "in a fixed order, too";
  EXPECT_EQ(line_of(Call(32, 512, 512, 32, 32, 64).causal().in_any_order()), heads + "4096 tiles");
  EXPECT_EQ(line_of(Call(9, 100, 100, 24, 6, 40)), heads + "54 tiles") << "of one tile, whatever their number";
  EXPECT_EQ(line_of(Call(44, 500, 65, 3, 3, 24).in_any_order()), heads + "132 tiles");
  EXPECT_EQ(line_of(Call(9, 500, 65, 3, 3, 24).in_any_order()).substr(0, 3), "all") << "whose eight turns CTAs share";
  EXPECT_EQ(line_of(Call(60, 200, 250, 4, 2, 120).causal().in_any_order()), "heads sm90 64x128 d128, 240 twos");
  EXPECT_EQ(line_of(Call(32, 100, 200, 24, 6, 64).packed(3000, 5000).sink()), heads + "384 tiles");
  for (Call const& call : {
           Call(32, 513, 512, 32, 32, 64),                  // rows that there is no room for
           Call(32, 129, 512, 32, 8, 64),                   // nor for those of all heads of a KV head
           Call(4, 512, 512, 32, 32, 64),                   // a head for half of the CTAs
           Call(32, 512, 512, 32, 32, 136).in_any_order(),  // no such kernel
           Call(32, 512, 512, 32, 32, 64).softcap(),        //
           Call(32, 0, 512, 32, 32, 64),                    // nothing to clear counters before it
           Call(32, 512, 0, 32, 32, 64),                    // nobody to write dQ
       })
    EXPECT_NE(line_of(call).substr(0, 6), "heads ");
}

TEST(BackwardPlan, HasACtaForASmallHeadWhateverTheCall) {
  EXPECT_EQ(line_of(Call(1024, 49, 49, 6, 6, 32).in_any_order()), "heads sm80 64x64 d64, 6144 tiles");
  EXPECT_EQ(line_of(Call(1024, 49, 64, 6, 6, 32).bias().dropout()), "heads sm80 64x64 d64, 6144 tiles");
  EXPECT_EQ(line_of(Call(64, 64, 64, 6, 6, 64).on(fake::kA100)), "heads sm80 64x64 d64, 384 tiles");
  // Of up to 128 rows and keys Hopper's are faster, where they take the call.
  EXPECT_EQ(line_of(Call(64, 128, 100, 12, 12, 64)), "heads sm90 64x128 d64, 768 tiles");
  EXPECT_EQ(line_of(Call(64, 128, 100, 12, 12, 64).dropout()), "heads sm90 64x128 d64, 768 tiles");
  EXPECT_EQ(line_of(Call(64, 128, 100, 12, 12, 64).bias()), "heads sm80 128x128 d64, 768 tiles");
  EXPECT_EQ(line_of(Call(64, 128, 100, 12, 12, 64).on(fake::kA100)), "heads sm80 128x128 d64, 768 tiles");
  for (Call const& call : {Call(64, 128, 129, 12, 12, 64).bias(), Call(64, 49, 49, 12, 12, 72),
                           Call(64, 49, 49, 12, 12, 64).unaligned_dout(), Call(64, 49, 0, 12, 12, 64)})
    EXPECT_NE(line_of(call).substr(0, 10), "heads sm80");
}

TEST(BackwardPlan, MultipliesFloat32InPartsWhereThatIsAskedFor) {
  auto const call = [](int d) { return Call(2, 1000, 1000, 8, 4, d); };
  std::string const in_parts = "keys sm90 64x128 d64, 64 tiles, rows sm90 128x64 d64, 128 tiles",
                    portable = "keys sm80 32x64 d64, 128 tiles, rows sm80 64x32 d64, 256 tiles",
                    exact = "keys simt 32x128 d64, 64 tiles in ";
  EXPECT_EQ(line_of(call(40).float32(Precision::High)), in_parts);
  EXPECT_EQ(line_of(call(64).float32(Precision::High).causal().sink().lengths().in_any_order()), in_parts);
  EXPECT_EQ(line_of(call(64).float32(Precision::Any).backend("sm90")), in_parts);
  EXPECT_EQ(line_of(call(64).float32(Precision::Any)), in_parts) << "they pay";
  EXPECT_EQ(line_of(call(64).float32(Precision::High).head_dim_v(72)),
            "keys sm90 64x64 d128, 128 tiles, rows sm90 128x32 d128, 128 tiles");
  // By mma.sync on other GPUs, and what changes scores.
  for (Call const& other :
       {call(64).float32(Precision::High).softcap(), call(64).float32(Precision::High).on(fake::kA100),
        call(64).float32(Precision::Any).backend("sm80")}) {
    EXPECT_EQ(line_of(other), portable);
  }
  // A wish: what parts are not for is computed on CUDA cores.
  for (Call const& other :
       {call(64).float32(Precision::High).unaligned_dout(), call(64).float32(Precision::High).scale(1e-10f),
        call(64).float32(Precision::High).scale(1e6f), call(64).float32(Precision::Highest),
        call(64).float32(Precision::Any).on(fake::kA100), call(64).float32(Precision::Any).backend("simt")}) {
    EXPECT_EQ(line_of(other).substr(0, exact.size()), exact);
  }
  EXPECT_EQ(line_of(Call(1, 100, 100, 2, 2, 64).float32(Precision::Any)).substr(0, 8), "all simt");
  EXPECT_EQ(line_of(call(64).float32(Precision::Any).softcap().backend("sm90")).substr(0, 9), "softcap: ");
}

TEST(BackwardPlan, CountsTilesOfPackedSequencesByTheLongest) {
  EXPECT_EQ(line_of(Call(5, 100, 300, 2, 1, 64).packed(333, 777)),
            "keys sm90 64x128 d64, 15 tiles, rows sm90 128x64 d64, 10 tiles");
}

/// Whose rows are a fraction of a tile of Hopper's.
TEST(BackwardPlan, TakesWideHeadsOfFewRowsByMmaSync) {
  auto const of = [](int batch, int n_q, int n_kv, int head_dim) {
    return Call(batch, n_q, n_kv, 4, 4, head_dim).in_any_order();
  };
  EXPECT_EQ(line_of(of(25, 32, 64, 192)).substr(0, 8), "all sm80");
  for (Call const& call : {of(50, 32, 64, 192), of(200, 1, 1, 136)}) {
    EXPECT_EQ(line_of(call).substr(0, 9), "keys sm80");
    Call fixed = call;
    fixed.request.deterministic = true;
    EXPECT_EQ(line_of(fixed).substr(0, 9), "keys sm80");
    EXPECT_EQ(line_of(Call(call).backend("sm90")).substr(0, 9), "keys sm90");
  }
  for (Call const& call : {of(24, 32, 64, 192), of(25, 33, 64, 192), of(25, 32, 65, 192), of(25, 32, 64, 128)})
    EXPECT_NE(line_of(call).find("sm90"), std::string::npos) << line_of(call);
}

/// Of a last wave that would be all but empty.
TEST(BackwardPlan, SplitsTheLastTiles) {
  auto const line = [](Call call) { return line_of(call.in_any_order()); };
  EXPECT_EQ(line(Call(1, 4605, 4605, 28, 4, 128)), "all sm90 64x128 d128, 144 tiles, the last 12 in 1 by 8");
  EXPECT_EQ(line(Call(2, 1025, 4352, 32, 4, 128)), "all sm90 64x128 d128, 272 tiles, the last 8 in 8 by 2");
  EXPECT_EQ(line(Call(1, 4096, 4096, 28, 4, 128)), "all sm90 64x128 d128, 128 tiles") << "all but a wave";
  EXPECT_EQ(line(Call(27, 900, 600, 4, 1, 80)), "all sm90 64x128 d96, 135 tiles, the last 3 in 2 by 15");
  EXPECT_EQ(line(Call(27, 1500, 513, 1, 1, 128)), "all sm90 64x128 d128, 135 tiles, the last 3 in 1 by 24");
  EXPECT_EQ(line(Call(14, 700, 520, 4, 1, 192)), "all sm90 64x128 d192, 70 tiles, the last 4 in 4 by 4");
  EXPECT_EQ(line(Call(50, 513, 513, 5, 1, 128).causal()), "all sm90 64x128 d128, 150 twos, the last 18 in 5 by 1");
  Call const call(1, 4605, 4605, 28, 4, 128);
  for (Call const& unlike : {Call(call).causal(), Call(call).lengths(), Call(call).packed(4605, 4605)})
    EXPECT_EQ(line(unlike).find("last"), std::string::npos) << line(unlike);
  EXPECT_EQ(line_of(call).find("last"), std::string::npos) << "of fixed bits";
}

TEST(BackwardPlan, SplitsTilesWhereCtasAreFew) {
  // Only where that is expected to take less time; of what takes as long the most of the heads.
  EXPECT_EQ(line_of(Call(2, 4096, 4096, 16, 1, 128).causal().in_any_order()),
            "all sm90 64x128 d128, 32 twos in 4 by 1");
  EXPECT_EQ(line_of(Call(1, 4096, 4096, 1, 1, 128).in_any_order()), "all sm90 64x128 d128, 32 tiles in 1 by 4");
  EXPECT_EQ(line_of(Call(1, 4096, 4096, 6, 1, 128).in_any_order()), "all sm90 64x128 d128, 32 tiles in 2 by 2");
  EXPECT_EQ(line_of(Call(2, 128, 128, 7, 1, 128).in_any_order()), "all sm90 64x128 d128, 2 tiles in 7 by 2");
  EXPECT_EQ(line_of(Call(8, 1378, 1378, 7, 1, 128).causal().in_any_order()), "all sm90 64x128 d128, 88 tiles in 3 by 1")
      << "seven would ask for more workspace";
  EXPECT_EQ(line_of(Call(3, 2048, 2048, 24, 1, 128).causal().in_any_order()),
            "all sm90 64x128 d128, 24 twos in 5 by 1");
  EXPECT_EQ(line_of(Call(16, 1000, 1000, 7, 1, 128).causal()), "all sm90 64x128 d128, 128 tiles in 2 by 1");
  EXPECT_EQ(line_of(Call(1, 16, 16, 8, 1, 128).in_any_order()), "all sm90 64x128 d128, 1 tiles in 8 by 1")
      << "a head's own CTA would have its turns one after the other";
  EXPECT_EQ(line_of(Call(1, 128, 128, 8, 8, 128).in_any_order()), "heads sm90 64x128 d128, 8 tiles");
  EXPECT_EQ(line_of(Call(1, 4096, 4096, 1, 1, 128)),
            "keys sm90 64x128 d128, 32 tiles in 1 by 8, rows sm90 128x64 d128, 32 tiles in 1 by 8");
  EXPECT_EQ(line_of(Call(1, 70, 70, 8, 1, 128)),
            "keys sm90 64x128 d128, 1 tiles in 8 by 2, rows sm90 128x64 d128, 8 tiles");
  EXPECT_EQ(line_of(Call(1, 100, 1100, 1, 1, 128)),
            "keys sm90 64x128 d128, 9 tiles, rows sm90 128x64 d128, 1 tiles in 1 by 18");
  EXPECT_EQ(line_of(Call(8, 4096, 4096, 16, 1, 128).in_any_order()), "all sm90 64x128 d128, 256 tiles");
  EXPECT_EQ(line_of(Call(1, 4096, 4096, 1, 1, 128).float32(Precision::High)),
            "keys sm90 64x64 d128, 64 tiles, rows sm90 128x32 d128, 32 tiles")
      << "sums in parts are scaled before they are stored";
  EXPECT_EQ(line_of(Call(1, 4096, 4096, 1, 1, 128).backend("sm80")),
            "keys sm80 64x32 d128, 128 tiles, rows sm80 64x64 d128, 64 tiles");
}

/// Whatever the call: so many splits that each has a head and a tile, and 64 MB of workspace at most.
TEST(BackwardPlan, BoundsSplits) {
  for (int const batch : {1, 3, 40}) {
    for (int const n : {1, 63, 129, 700, 5000, 70000}) {
      for (int const group : {1, 6, 7, 128}) {
        for (int const heads_kv : {1, 5}) {
          for (bool const packed : {false, true}) {
            Call call(batch, n, n, group * heads_kv, heads_kv, 128);
            if (packed) call.packed(n + 5 * batch, n + 7 * batch);
            for (Call const& c : {call, Call(call).causal(), Call(call).in_any_order()}) {
              BackwardParams p;
              BackwardPlan const plan = plan_of(c, &p);
              for (auto const* launch : {&plan.of_keys, &plan.of_queries}) {
                if (!launch->kernel) continue;
                bool const of_keys = launch == &plan.of_keys;
                int const splits = launch->splits.all();
                EXPECT_LE(launch->splits.heads, of_keys ? group : 1);
                if (splits == 1) continue;
                EXPECT_LE(launch->splits.tiles, Scheduler::tiles_of(n, of_keys ? 64 : launch->kernel->block_c));
                p.shared_tiles = launch->shared_tiles(), p.is_mirrored = launch->is_mirrored;
                SplitSums const sums(p, of_keys ? Axis::Keys : Axis::Rows,
                                     of_keys ? launch->kernel->block_c : launch->kernel->block_r);
                EXPECT_LE(sums.size(of_keys ? 256 : 128) * 4, 64 << 20);
              }
            }
          }
        }
      }
    }
  }
}

TEST(Splits, TakeEveryHeadAndTileOnce) {
  for (int const heads : {1, 2, 7, 16}) {
    for (Range const tiles : {Range{0, 0}, Range{0, 1}, Range{3, 5}, Range{2, 19}}) {
      for (int const head_splits : {1, 2, 7}) {
        for (int const tile_splits : {1, 2, 8}) {
          if (head_splits > heads || head_splits * tile_splits == 1) continue;
          SharedTiles const shared = GradientSplits{head_splits, tile_splits}.of(Scheduler(1, 1, 1, 1, 1, 1));
          std::map<std::array<int, 2>, int> taken;
          for (int split = 0; split < shared.splits; ++split) {
            Range own_tiles = tiles;
            Range const own = shared.turns(split, heads, &own_tiles);
            EXPECT_GT(own.size(), 0);
            for (int head = own.begin; head < own.end; ++head) {
              for (int tile = own_tiles.begin; tile < own_tiles.end; ++tile) ++taken[{head, tile}];
            }
          }
          EXPECT_EQ(taken.size(), size_t(heads) * tiles.size());
          for (auto const& [at, count] : taken) {
            EXPECT_TRUE(0 <= at[0] && at[0] < heads && tiles.contains(at[1]));
            EXPECT_EQ(count, 1);
          }
        }
      }
    }
  }
}

/// Each item is one CTA's, or all splits of it are, each with sums of its own.
TEST(Splits, AreOfAllItemsOrTheLast) {
  for (int const section : {1, 2, 3, 5, 12}) {
    Scheduler const scheduler(4, 3, 5 * 128, 128, 1, section, Axis::Keys);
    int const items = static_cast<int>(scheduler.size());
    for (int const begin : {0, 1, 30, items - 1}) {
      for (bool const mirrored : {false, true}) {
        BackwardParams p;
        p.shared_tiles = GradientSplits{3, 2, begin}.of(scheduler), p.is_mirrored = mirrored;
        SplitSums const sums(p, Axis::Keys, 128);
        std::map<std::array<int, 2>, int> taken;
        std::map<int64_t, int> begun;
        int last = 0;
        for (int cta = 0; cta < p.shared_tiles.ctas(items); ++cta) {
          SharedTiles::Item const item = p.shared_tiles(cta);
          EXPECT_EQ((++taken[{item.index, item.split}]), 1);
          EXPECT_EQ(item.split >= 0, begin <= item.index && item.index < items);
          if (item.split < 0) continue;
          if (begin == 0) {
            EXPECT_GE(scheduler(item.index).row0 + 1000 * scheduler.section_of(item.index), last) << "longest first";
            last = scheduler(item.index).row0 + 1000 * scheduler.section_of(item.index);
          }
          for (int image = 0; image <= mirrored; ++image) {
            int64_t const row = sums.first_row(item, image, {}, 0, 0, 0);
            EXPECT_EQ(row % 128, 0);
            EXPECT_TRUE(0 <= row && (row + 128) * 64 <= sums.size(64));
            EXPECT_EQ(++begun[row], 1);
          }
        }
        EXPECT_EQ(taken.size(), size_t(begin + 6 * (items - begin)));
        EXPECT_EQ(sums.size(64), int64_t(begun.size()) * 128 * 64);
      }
    }
  }
  EXPECT_EQ(SharedTiles().ctas(7), 7);
  EXPECT_EQ(SharedTiles().splits, 1);
  EXPECT_EQ(SharedTiles()(6).index, 6);
  EXPECT_EQ(SharedTiles()(6).split, -1);
}

TEST(BackwardPlan, ComputesTheGradientOfTheBiasOnHopperWhereItsKernelTakesTheCall) {
  auto const head_dim = [](Call const& call) {
    BackwardParams p;
    Kernel const* const kernel = plan_of(call, &p).of_bias;
    return kernel ? kernel->head_dim : 0;
  };
  EXPECT_EQ(head_dim(Call(2, 1000, 1000, 8, 4, 40).bias()), 64);
  EXPECT_EQ(head_dim(Call(2, 1000, 1000, 8, 4, 64).head_dim_v(72).causal().sink().lengths().bias()), 128);
  for (Call const& call :
       {Call(2, 1000, 1000, 8, 4, 64), Call(2, 1000, 1000, 8, 4, 256).bias(),
        Call(2, 1000, 1000, 8, 4, 64).bias().unaligned_dout(), Call(2, 1000, 1000, 8, 4, 64).bias().on(fake::kA100),
        Call(2, 1000, 1000, 8, 4, 64).bias().backend("sm80")}) {
    EXPECT_EQ(head_dim(call), 0);
  }
}

TEST(BackwardPlan, RefusesByName) {
  auto const begins = [](Call const& call, std::string const& text) {
    EXPECT_EQ(line_of(call).substr(0, text.size()), text) << line_of(call);
  };
  begins(Call(2, 100, 100, 4, 4, 128).pages(), "block_table: ");
  begins(Call(2, 100, 100, 4, 4, 128).softcap().backend("sm90"), "softcap: ");
  begins(Call(2, 100, 100, 4, 4, 128).unaligned_dout().backend("sm90"), "q, k, v: ");
  begins(Call(2, 100, 100, 4, 4, 64).float32(Precision::Any).scale(1e-10f).backend("sm90"), "softmax_scale: ");
  begins(Call(2, 100, 100, 4, 4, 256), "q: no kernel for this GPU takes bfloat16 with head_dim 256");
  begins(Call(2, 100, 100, 4, 4, 128).backend("simt"), "q: no kernel of backend \"simt\"");
  Call half(2, 100, 100, 4, 4, 128);
  half.request.dtype = DType::Float16;
  begins(half, "q: no kernel for this GPU takes float16");
}

TEST(BiasTiles, GoThroughEverySequenceHeadAndTileOnce) {
  int const batch = 3, heads = 4, n_q = 300;
  for (int const n_kv : {1, 128, 129, 300, 513}) {
    for (int shape = 0; shape < 8; ++shape) {
      for (int const most : {1, 2, 4}) {
        BackwardParams p;
        p.batch = batch, p.heads_q = heads, p.n_q = n_q, p.n_kv = n_kv;
        p.dbias_batch = shape & 1, p.dbias_head = shape & 2, p.dbias_row = shape & 4;
        BiasTiles const tiles(p, 128, 128, most);
        EXPECT_LE(tiles.cluster, most);
        EXPECT_LT(tiles.clusters_a_row() * tiles.cluster - tiles.key_tiles, tiles.cluster);
        std::map<std::array<int, 4>, int> visits;  // batch, head, row tile, key tile; and of how many tiles of dBias
        for (int parts : {1, 5}) {
          for (int cluster = 0; cluster < tiles.clusters(); ++cluster) {
            for (int rank = 0; rank < tiles.cluster; ++rank) {
              BiasTile const tile = tiles.tile(cluster, rank);
              int next = 0;
              for (int part = 0; part < parts; ++part) {
                Range const turns = tiles.turns_of(part, parts);
                EXPECT_EQ(turns.begin, next);
                next = turns.end;
                for (int t = turns.begin; t < turns.end; ++t) {
                  BiasTurn const turn = tiles.turn(tile, t);
                  EXPECT_EQ(tile.batch, p.dbias_batch ? turn.batch : 0);
                  EXPECT_EQ(tile.head, p.dbias_head ? turn.head : 0);
                  EXPECT_EQ(tile.row0, p.dbias_row ? turn.row0 : 0);
                  if (tile.key0 < n_kv) ++visits[{turn.batch, turn.head, turn.row0, tile.key0}];
                }
              }
              EXPECT_EQ(next, tiles.turns());
            }
          }
        }
        EXPECT_EQ(visits.size(), size_t(batch) * heads * 3 * tiles.key_tiles);
        for (auto const& [at, count] : visits) {
          EXPECT_TRUE(at[0] < batch && at[1] < heads && at[2] < n_q && at[3] < n_kv);
          EXPECT_EQ(count, 2) << "once for each number of parts";
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ the launches
/// CTAs of the fake kernels for which kH200 has room at once: of those that add to dQ in memory one a multiprocessor.
constexpr int64_t kResident = 2 * 132, kResidentOfAll = 132;

/// What is launched and cleared for a call, in order, and the bytes of workspace.
std::string run_of(Call const& call, size_t* workspace) {
  BackwardParams p;
  BackwardPlan plan = plan_of(call, &p);
  Kernel of_keys = *plan.of_keys.kernel, of_queries = plan.is_one() ? of_keys : *plan.of_queries.kernel;
  static bool has_heads;
  has_heads = of_keys.kind == Kind::HeadGradients;
  of_keys.launch = [](Params const& params, Grid const& grid, cudaStream_t) {
    auto const& p = static_cast<BackwardParams const&>(params);
    bool const of_heads = p.counters && has_heads, persistent = p.counters;
    int64_t const items = of_heads ? int64_t(p.batch) * p.heads_kv : p.shared_tiles.ctas(p.scheduler.size()),
                  resident = p.dq_sums || grid.cluster > 1 ? kResidentOfAll / grid.cluster : kResident;
    EXPECT_EQ(static_cast<int64_t>(grid.ctas.x), (persistent ? std::min(items, resident) : items) * grid.cluster);
    EXPECT_EQ(params.counters != nullptr, persistent);
    done.emplace_back("keys");
  };
  of_queries.launch = [](Params const& params, Grid const& grid, cudaStream_t) {
    auto const& p = static_cast<BackwardParams const&>(params);
    EXPECT_EQ(static_cast<int64_t>(grid.ctas.x), p.shared_tiles.ctas(p.scheduler.size()));
    done.emplace_back("rows");
  };
  plan.of_keys.kernel = &of_keys, plan.of_queries.kernel = &of_queries;
  done.clear(), *workspace = 0, fake::cleared_bytes = 0, fake::biases_seen = 0;
  run_backward(plan, p, nullptr, [&](size_t bytes) {
    *workspace += bytes;
    return somewhere<void>();
  });
  std::string text;
  for (std::string const& x : done) text += (text.empty() ? "" : ", ") + x;
  return text;
}

TEST(BackwardRun, ComputesTheStatisticsOfRowsFirst) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(32, 250, 1000, 8, 4, 128), &workspace), "statistics, rows, keys");
  EXPECT_EQ(workspace, 32u * 8 * 256 * sizeof(RowStatistics));
  EXPECT_EQ(fake::cleared_bytes, 0u) << "every row and key is some tile's";
  EXPECT_NE(of_statistics.row_statistics, nullptr);
}

TEST(BackwardRun, ClearsTheCountsOfWhatHasBeenAdded) {
  size_t workspace = 0;
  EXPECT_EQ(run_of(Call(4, 1000, 1000, 8, 8, 128), &workspace), "statistics, keys, dQ");
  constexpr size_t kRows = 4 * 8 * 1024, kCounts = kRows / 64;
  EXPECT_EQ(fake::cleared_bytes, (kRows * 128 + 4 + kCounts) * sizeof(float));
}

TEST(BackwardRun, LeavesStatisticsToTheCtasThatHaveWholeHeads) {
  size_t workspace;
  auto const heads_of = [&](Call const& call) {
    EXPECT_EQ(run_of(call, &workspace), "statistics, keys");
    return first_heads;
  };
  Call const plain(32, 512, 512, 32, 32, 64);
  EXPECT_EQ(heads_of(plain), kResident);
  EXPECT_EQ(of_statistics.scheduler.size(), 32 * 32 * 4) << "where a CTA's first head is, follows from it";
  EXPECT_EQ(heads_of(Call(32, 100, 100, 32, 32, 64)), kResident);
  EXPECT_EQ(heads_of(Call(32, 128, 128, 32, 32, 64)), 0) << "one tile of keys is no work for as long";
  Call lse = plain, delta = plain, unaligned = plain;
  lse.p.dlse = delta.p.delta = somewhere<float>();
  unaligned.p.o = somewhere<char>() + 4;
  for (Call call : {lse, delta, unaligned, Call(plain).sink()}) EXPECT_EQ(heads_of(call), 0);
  run_of(Call(8, 2048, 2048, 16, 16, 64).in_any_order(), &workspace);
  EXPECT_EQ(first_heads, 0) << "another kernel";
}

TEST(BackwardRun, HasNoLaunchBeforeSmallHeadsButForWhatOthersAreToKnow) {
  size_t workspace;
  Call const small(1024, 49, 49, 6, 6, 32);
  EXPECT_EQ(run_of(small, &workspace), "keys");
  EXPECT_EQ(workspace, 0u);
  EXPECT_EQ(run_of(Call(small).sink(), &workspace), "statistics, keys");
  EXPECT_EQ(run_of(Call(small).bias(), &workspace), "statistics, dBias by sm90, keys");
  EXPECT_EQ(run_of(Call(small).bias().on(fake::kA100), &workspace), "statistics, dBias, keys");
  EXPECT_EQ(run_of(Call(small).lengths(), &workspace), "keys");
  EXPECT_EQ(fake::cleared_bytes, 2u * 1024 * 49 * 6 * 32 * 2) << "keys behind the last of a sequence";
}

TEST(BackwardRun, ClearsTheSumsOfQueriesAndFinishesThem) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(32, 1000, 1000, 8, 4, 128).in_any_order(), &workspace), "statistics, keys, dQ");
  EXPECT_EQ(fake::cleared_bytes, 32u * 8 * 1024 * 128 * sizeof(float) + 16) << "and the count of tiles";
  EXPECT_EQ(workspace, fake::cleared_bytes + 32u * 8 * 1024 * sizeof(RowStatistics));
}

TEST(BackwardRun, HasNoSumsWhereTheyPassFromCtaToCta) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(64, 250, 250, 16, 16, 128).in_any_order(), &workspace), "statistics, keys");
  EXPECT_EQ(fake::cleared_bytes, 16u);
  EXPECT_EQ(first_heads, 0) << "statistics are made of all heads before";
  EXPECT_EQ(workspace, 16 + 64u * 16 * 256 * sizeof(RowStatistics));
}

TEST(BackwardRun, HasRoomForSumsOfSectionsAndFinishesTheLast) {
  size_t workspace;
  // 16 sections of 8 heads.
  EXPECT_EQ(run_of(Call(8, 2048, 2048, 16, 16, 128).in_any_order(), &workspace), "statistics, keys, dQ from head 120");
  size_t const of_a_section = 8 * 2048 * 128 * sizeof(float);
  EXPECT_EQ(fake::cleared_bytes, kSectionsOfSums * of_a_section + 16 + 16 * sizeof(SectionCounts));
  EXPECT_EQ(finished_sums, somewhere<float>() + 15 % kSectionsOfSums * of_a_section / sizeof(float));
}

TEST(BackwardRun, TakesTilesOfKeysOneAfterTheOther) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(8, 2048, 2048, 16, 16, 64).in_any_order(), &workspace), "statistics, keys, dQ from head 112");
}

TEST(BackwardRun, AddsUpWhatSplitsLeave) {
  size_t workspace;
  Call const few(1, 4096, 4096, 1, 1, 128);
  size_t const statistics = 4096 * sizeof(RowStatistics), a_split = 4096 * 128 * sizeof(float);
  EXPECT_EQ(run_of(few, &workspace), "statistics, rows, splits, keys, splits");
  EXPECT_EQ(workspace, statistics + 8 * a_split + 8 * 2 * a_split);
  EXPECT_EQ(run_of(Call(few).in_any_order(), &workspace), "statistics, keys, splits, dQ");
  EXPECT_EQ(workspace, statistics + 4 * 2 * a_split + a_split + 16);
}

TEST(BackwardRun, AddsToTheGradientItselfOnCudaCores) {
  size_t workspace;
  Call const call = Call(8, 2048, 2048, 16, 16, 64).backend("simt").float32(Precision::Any);
  EXPECT_EQ(run_of(Call(call).in_any_order(), &workspace), "statistics, keys");
  EXPECT_EQ(fake::cleared_bytes, 8u * 2048 * 16 * 64 * sizeof(float));
  EXPECT_EQ(workspace, 8u * 16 * 2048 * sizeof(RowStatistics));
  Call packed = Call(8, 2048, 2048, 16, 16, 64).backend("simt").float32(Precision::Any).packed(9000, 9000);
  EXPECT_EQ(run_of(packed.in_any_order(), &workspace), "statistics, keys");
  EXPECT_EQ(fake::cleared_bytes, 3 * 9000u * 16 * 64 * sizeof(float)) << "each gradient once";
  packed.p.n_q = 0;  // rows, but no sequence has any
  run_of(packed, &workspace);
  EXPECT_EQ(fake::cleared_bytes, 3 * 9000u * 16 * 64 * sizeof(float));
}

TEST(BackwardRun, HasRoomForWhatRowsSumToBesideTheirSplits) {
  size_t workspace;
  Call const call = Call(1, 1024, 1024, 1, 1, 64).backend("simt").float32(Precision::Any);
  EXPECT_EQ(run_of(call, &workspace), "statistics, rows, splits, keys, splits");
  EXPECT_EQ(workspace, 1024 * (sizeof(RowStatistics) + (16 * (64 + 1) + 32 * 2 * 64) * sizeof(float)));
}

TEST(BackwardRun, MakesPartsAndHasLaunchesStandBy) {
  BackwardParams p;
  BackwardPlan plan = plan_of(Call(2, 1000, 1000, 8, 4, 128).float32(Precision::High), &p);
  ASSERT_TRUE(plan.out_of_range);
  EXPECT_STREQ(plan.out_of_range->of_keys.kernel->family, "simt");
  EXPECT_STREQ(plan.out_of_range->of_queries.kernel->family, "simt");
  BackwardPlan exact = *plan.out_of_range;
  std::array<Kernel, 4> kernels;
  size_t next = 0;
  for (GradientLaunch* launch : {&plan.of_queries, &plan.of_keys, &exact.of_queries, &exact.of_keys}) {
    Kernel& kernel = kernels[next++] = *launch->kernel;
    kernel.launch = [](Params const& params, Grid const&, cudaStream_t) {
      done.emplace_back(params.is_skipped() ? "stands by" : "computes");
    };
    launch->kernel = &kernel;
  }
  plan.out_of_range = std::make_shared<BackwardPlan const>(exact);
  done.clear();
  size_t workspace = 0;
  run_backward(plan, p, nullptr, [&](size_t bytes) {
    workspace += bytes;
    return somewhere<void>();
  });
  EXPECT_EQ(done, (std::vector<std::string>{"statistics", "parts", "computes", "computes", "stands by", "stands by"}));
  EXPECT_EQ(workspace, 2u * 8 * 1024 * sizeof(RowStatistics) + 128) << "bytes_of_parts, above";
}

TEST(BackwardRun, RefusesWhatItsLastLaunchHasNoRoomForBeforeTheFirst) {
  BackwardParams p;
  BackwardPlan const plan = plan_of(Call(1 << 17, 1 << 20, 4096, 1, 1, 128).in_any_order(), &p);
  ASSERT_TRUE(plan.adds_to_queries());
  done.clear();
  try {
    run_backward(plan, p, nullptr, [](size_t) { return somewhere<void>(); });
    FAIL() << "2^17 sequences of 2^13 tiles of rows, two panels of dQ each";
  } catch (std::runtime_error const& error) {
    EXPECT_EQ(std::string(error.what()),
              "cutlass_ext.ValueError: q: asks for 2147483648 CTAs; a launch has room for fewer than 2^31");
  }
  EXPECT_TRUE(done.empty());
}

TEST(BackwardRun, ClearsWhatMayLieOutsideEverySequence) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(50, 250, 600, 8, 4, 128).head_dim_v(64).lengths(), &workspace), "statistics, rows, keys");
  EXPECT_EQ(fake::cleared_bytes, 50u * 600 * 4 * (128 + 64) * 2);
  EXPECT_EQ(run_of(Call(3, 100, 200, 8, 4, 64).packed(250, 333), &workspace), "statistics, rows, keys");
  EXPECT_EQ(fake::cleared_bytes, 333u * 4 * (64 + 64) * 2 + 250u * 8 * 64 * 2);
  EXPECT_EQ(workspace, 8u * 640 * sizeof(RowStatistics));  // of 250 rows and a tile a sequence, in whole tiles
}

TEST(BackwardRun, ComputesTheGradientOfTheBiasBehindTheStatistics) {
  size_t workspace;
  EXPECT_EQ(run_of(Call(2, 1000, 1000, 8, 4, 128).bias(), &workspace), "statistics, dBias by sm90, rows, keys");
  EXPECT_EQ(run_of(Call(2, 1000, 1000, 8, 4, 128).bias().backend("sm80"), &workspace), "statistics, dBias, rows, keys");
}

TEST(BackwardRun, HasABiasLookedAtForHoppersKernels) {
  size_t workspace;
  auto const seen = [&](Call const& call) {
    run_of(call, &workspace);
    return fake::biases_seen;
  };
  Call const call = Call(2, 1000, 1000, 8, 4, 128).bias(), small = Call(1024, 49, 49, 6, 6, 32).bias();
  EXPECT_EQ(seen(call), 1);
  EXPECT_EQ(seen(Call(call).backend("sm80")), 0);
  EXPECT_EQ(seen(small), 1) << "for its gradient's";
  Call fixed = small;
  fixed.p.dbias = nullptr;
  EXPECT_EQ(seen(fixed), 0);
}

TEST(BackwardRun, LaunchesWhatThereIs) {
  size_t workspace;
  // Of keys without rows the gradients are 0, which the kernel writes; and the same of rows without keys.
  EXPECT_EQ(run_of(Call(2, 0, 100, 8, 4, 128), &workspace), "statistics, keys");
  EXPECT_EQ(workspace, 0u);
  EXPECT_EQ(run_of(Call(2, 100, 0, 8, 4, 128), &workspace), "statistics, rows");
  EXPECT_EQ(run_of(Call(2, 100, 0, 8, 4, 128).in_any_order(), &workspace), "statistics, dQ") << "which is of no sums";
  EXPECT_EQ(run_of(Call(0, 100, 100, 8, 4, 128), &workspace), "statistics");
  EXPECT_EQ(workspace, 0u);
}

}  // namespace
}  // namespace cutlass_ext

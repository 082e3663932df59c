// What the host makes of calls, on GPUs that are not there: which kernel, how many splits, which grid, which workspace;
// and that each call has a kernel that takes all of it, or a refusal that names an argument.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda.hpp"
#include "fmha/decode/params.hpp"
#include "host/align_bias.hpp"
#include "host/append.hpp"
#include "host/counters.hpp"
#include "host/merge.hpp"
#include "host/operand_parts.hpp"
#include "host/plan.hpp"
#include "host/side_stream.hpp"

namespace cutlass_ext {

// The parts of host/ that are compiled by nvcc: they note what is asked of them.
static size_t counters_asked = 0, counters_zeroed = 0;
static int merges = 0, appends = 0, parts_made = 0, forks = 0, forked = 0;
unsigned* zero_counters(int, cudaStream_t, size_t count, Allocate const&) {
  EXPECT_EQ(forked, 0) << "zeroed on the call's stream, which what runs beside it does not wait for";
  static unsigned counters[2];
  counters_asked = count;
  return counters;
}
void zero_again(unsigned*, size_t count, cudaStream_t) {
  counters_zeroed = count;
  EXPECT_EQ(forked, 0) << "before what runs beside the call's stream has joined it";
}
Pairs align_bias(Params const& params, cudaStream_t, Allocate const&) {
  fake::biases_seen += params.bias.data != nullptr;
  return params;
}
void merge_splits(DType, Params const&, cudaStream_t) {
  ++merges;
  EXPECT_EQ(forked, 0);
}
size_t bytes_of_parts(Params const&, int head_dim, int) { return head_dim; }
Params make_parts(Params const& params, int, int, void*, cudaStream_t) {
  ++parts_made;
  return params;
}
SideStream::SideStream(int, cudaStream_t stream) : stream_(stream), beside_(stream), joined_() { ++forks, ++forked; }
SideStream::~SideStream() { --forked; }
void append_new_keys(DType, Params const& params, void* rotated_q, cudaStream_t) {
  ++appends;
  EXPECT_EQ(params.k_new != nullptr, params.n_new > 0);
  EXPECT_EQ(params.rotary.cos != nullptr, rotated_q != nullptr);
}

namespace {

constexpr auto kAnywhere = uintptr_t(1) << 30;  // device memory, never read

template <class T = int>
T* somewhere() {
  return reinterpret_cast<T*>(kAnywhere);
}

/// A call of contiguous tensors, and what is asked besides.
struct Call {
  Params p;
  Request request;
  fake::Gpu gpu = fake::kH200;

  Call& dtype(DType t) { return request.dtype = t, *this; }
  Call& backend(char const* name) { return request.backend = name, *this; }
  Call& precision(Precision x) { return request.precision = x, *this; }
  Call& splits(int n) { return request.num_splits = n, *this; }
  Call& on(fake::Gpu other) { return gpu = other, *this; }
  Call& head_dim_v(int d_v) { return p.head_dim_v = d_v, *this; }
  Call& window(int left, int right) { return p.window_left = left, p.window_right = right, *this; }
  Call& causal() { return window(-1, 0); }
  Call& scale(float x) { return p.softmax_scale = x, *this; }
  Call& softcap(float x = 30.f) { return p.softcap = x, *this; }
  Call& alibi() { return p.alibi_slopes = somewhere<float>(), *this; }
  Call& bias(int64_t row = 0) {
    p.bias = {somewhere<void>(), BiasType::BFloat16, 0, 0, row, 1};
    return *this;
  }
  Call& mask(int64_t row = 0) { return p.mask.bits = somewhere<uint32_t>(), p.mask.row = row, *this; }
  Call& dropout() { return p.dropout.seed = somewhere<int64_t>(), *this; }
  Call& sink() { return p.sink = somewhere<float>(), *this; }
  Call& lengths() { return p.seqused_k = somewhere(), *this; }
  Call& starts() { return p.start_pos_kind = StartPos::PerBatch, p.start_positions = somewhere(), *this; }
  Call& unaligned() { return p.k = somewhere<char>() + 4, *this; }
  Call& packed(int total_q, int total_k) {
    p.cu_seqlens_q = p.cu_seqlens_k = somewhere();
    p.total_q = total_q, p.total_k = total_k;
    return *this;
  }
  Call& pages(int rows) {
    p.block_table = somewhere();
    p.cu_seqlens_k = nullptr;
    p.page_rows = cutlass::FastDivmod(rows);
    p.pages = 1000;
    return *this;
  }
  Call& new_keys(int n) {
    p.n_new = n;
    if (n > 0) p.k_new = p.v_new = somewhere<void>();
    return *this;
  }
  Call& rotary() { return p.rotary.cos = p.rotary.sin = somewhere<void>(), *this; }
  Call& batch_index(int batch) { return p.batch_idx = somewhere(), p.pages = batch, *this; }
};

Call fmha(int batch, int n_q, int n_kv, int heads_q, int heads_kv, int head_dim) {
  Call call;
  Params& p = call.p;
  p.batch = batch, p.n_q = n_q, p.n_kv = n_kv;
  p.heads_q = heads_q, p.heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = head_dim;
  p.q = p.k = p.v = somewhere<void>();
  call.request.dtype = DType::BFloat16;
  return call;
}

/// Of float32.
Call fmha32(int batch, int n_q, int n_kv, int heads_q, int heads_kv, int head_dim) {
  return fmha(batch, n_q, n_kv, heads_q, heads_kv, head_dim).dtype(DType::Float32);
}

/// Of the cache operator.
Call kvcache(int batch, int n_q, int n_kv, int heads_q, int heads_kv, int head_dim) {
  Call call = fmha(batch, n_q, n_kv, heads_q, heads_kv, head_dim);
  call.request.is_cache = true;
  call.p.pages = batch;
  call.p.start_pos_kind = StartPos::End;
  return call;
}

Plan plan_of(Call const& call) {
  Params p = call.p;
  auto const strides = [](int64_t rows, int64_t heads, int64_t d) { return Strides{rows * heads * d, heads * d, d}; };
  int64_t const keys = p.block_table ? p.page_rows.divisor : p.stored_keys();
  p.q_stride = strides(p.stored_rows(), p.heads_q, p.head_dim);
  p.k_stride = strides(keys, p.heads_kv, p.head_dim);
  p.v_stride = strides(keys, p.heads_kv, p.head_dim_v);
  p.k_new_stride = strides(p.n_new, p.heads_kv, p.head_dim);
  p.v_new_stride = strides(p.n_new, p.heads_kv, p.head_dim_v);
  p.element_bytes = call.request.dtype == DType::Float32 ? 4 : 2;
  fake::use(call.gpu);
  return plan(p, call.request);
}

/// A plan in a line: family, kind, tile with its head_dim, the warpgroups of a short kernel, whether a kernel that
/// there is with and without some features is the plain one; splits; grid; counters; whether splits are merged apart.
std::string line_of(Call const& call) {
  std::ostringstream line;
  try {
    Plan const plan = plan_of(call);
    if (!plan.kernel) return plan.refusal;
    Kernel const& k = *plan.kernel;
    dim3 const& ctas = plan.grid.ctas;
    line << k.family << " " << name_of(k.kind) << " " << k.block_r << "x" << k.block_c << " d" << k.head_dim;
    if (k.kind == Kind::Short) line << " by " << k.threads / 128;
    if (k.kind == Kind::Tiles && k.takes_shape) line << " for few";
    if (k.kind == Kind::Persistent || k.kind == Kind::Decode) line << (k.takes & feature::Softcap ? "" : " plain");
    line << ", ";
    if (plan.splits == 0)
      line << "shared out";
    else
      line << plan.splits << (plan.splits == 1 ? " split" : " splits");
    line << ", grid " << ctas.x;
    if (ctas.y != 1 || ctas.z != 1) line << " " << ctas.y << " " << ctas.z;
    if (plan.grid.cluster > 1) line << " in clusters of " << plan.grid.cluster;
    if (plan.counters > 0) line << ", " << plan.counters << " counters";
    if (plan.merges_apart) line << ", merged apart";
    if (plan.appends_apart) line << ", appended apart";
    if (plan.relief > 0) line << ", " << plan.relief << " behind";
    if (plan.few) {
      Kernel const& few = *plan.few->kernel;
      line << ", " << few.family << " " << name_of(few.kind) << " " << few.block_r << "x" << few.block_c << " by "
           << few.threads / 32 << ", grid " << plan.few->grid.ctas.x;
    }
  } catch (std::runtime_error const& error) {
    return error.what();
  }
  return line.str();
}

struct Case {
  char const* text;
  Call call;
  char const* expected;
};
#define CASE(call, expected) {#call, call, expected}

void check(std::vector<Case> const& cases) {
  for (Case const& c : cases) EXPECT_EQ(line_of(c.call), c.expected) << c.text;
}

// ------------------------------------------------------------------------------------------------ which plan
TEST(Plan, OfManyQueryRows) {
  check({
      CASE(fmha(2, 4096, 4096, 16, 16, 128), "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 128).causal(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 128).dtype(DType::Float16).window(100, 0),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(4, 4096, 4096, 32, 8, 64), "sm90 persistent 192x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(4, 2000, 2000, 4, 4, 64), "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 32, 8, 96), "sm90 persistent 192x96 d96 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 32, 8, 72), "sm90 persistent 192x96 d80 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 300, 4096, 20, 20, 80), "sm90 persistent 128x128 d80 plain, 1 split, grid 120, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 104), "sm90 persistent 192x96 d112 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 112), "sm90 persistent 128x128 d112 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 112).softcap(), "sm90 persistent 128x128 d128, 1 split, grid 132, 2 counters"),
      // 96 tiles of 192 rows for 144 of 128, which are two waves: where all rows see all keys.
      CASE(fmha(3, 1477, 1477, 4, 4, 128), "sm90 persistent 192x80 d128 plain, 1 split, grid 96, 2 counters"),
      CASE(fmha(3, 739, 1477, 8, 4, 128), "sm90 persistent 192x80 d128 plain, 1 split, grid 96, 2 counters"),
      CASE(fmha(3, 1477, 1477, 4, 4, 128).causal(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(3, 1477, 1477, 4, 4, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(3, 1477, 1477, 4, 4, 128).splits(1),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(3, 60, 1477, 4, 4, 128).splits(1), "sm90 persistent 128x128 d128 plain, 1 split, grid 12, 2 counters"),
      CASE(fmha(2, 4096, 4096, 32, 8, 72).softcap(), "sm90 persistent 128x128 d96, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 192), "sm90 persistent 128x96 d192 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 192).softcap(), "sm90 persistent 128x80 d192, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 192).head_dim_v(128),
           "sm90 persistent 128x112 d192 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 4096, 4096, 16, 16, 256).lengths(),
           "sm90 persistent 128x64 d256 plain, 1 split, grid 132, 2 counters"),
      // Few tiles: split keys, unless the caller says how many there are to be.
      CASE(fmha(1, 2048, 16384, 1, 1, 128),
           "sm90 persistent 128x128 d128 plain, 8 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(1, 2048, 16384, 1, 1, 128).window(500, 0), "sm90 short 64x64 d128 by 2, 1 split, grid 1 32 1"),
      CASE(fmha(1, 2048, 16384, 1, 1, 128).splits(1),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 16, 2 counters"),
      CASE(fmha(1, 2048, 16384, 1, 1, 128).splits(3),
           "sm90 persistent 128x128 d128 plain, 3 splits, grid 48, 2 counters, merged apart"),
      // Packed.
      CASE(fmha(4, 1000, 1000, 16, 16, 128).packed(2500, 2500),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(4, 1, 1000, 16, 16, 128).packed(4, 2500),
           "sm90 persistent 128x128 d128 plain, 2 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(4, 1, 1000, 16, 16, 64).packed(4, 2500).splits(1),
           "sm90 persistent 192x128 d64 plain, 1 split, grid 64, 2 counters"),
      // Over before a pipeline is full, or just not.
      CASE(fmha(1, 384, 384, 32, 8, 128), "sm90 persistent 128x128 d128 plain, 1 split, grid 96, 2 counters"),
      CASE(fmha(1, 256, 256, 32, 8, 128).causal(), "sm90 short 64x64 d128 by 2, 1 split, grid 32 4 1"),
      // Tiles of 128 would compute a third more, three quarters more, as much.
      CASE(fmha(16, 128, 128, 32, 32, 128).causal(), "sm90 short 64x64 d128 by 1, 1 split, grid 32 2 16"),
      CASE(fmha(16, 192, 192, 32, 32, 128), "sm90 short 64x64 d128 by 1, 1 split, grid 32 3 16"),
      CASE(fmha(8, 256, 256, 16, 16, 128), "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(32, 197, 197, 32, 8, 64).causal().sink(), "sm90 short 64x64 d64 by 1, 1 split, grid 32 4 32"),
      CASE(fmha(8, 64, 64, 32, 8, 64).softcap(), "sm80 heads 64x64 d64, 1 split, grid 256"),
      CASE(fmha(8, 64, 65, 32, 8, 64).softcap(), "sm80 tiles 64x64 d64, 1 split, grid 256"),
      CASE(fmha(256, 49, 64, 32, 8, 64).bias().dropout(), "sm80 heads 64x64 d64, 1 split, grid 8192"),
      CASE(fmha(256, 49, 64, 32, 8, 64), "sm90 short 64x64 d64 by 1, 1 split, grid 32 1 256"),
      CASE(fmha(256, 49, 64, 32, 8, 64).on(fake::kA100), "sm80 heads 64x64 d64, 1 split, grid 8192"),
      CASE(fmha(8, 64, 64, 32, 8, 64).softcap().splits(1),
           "sm90 persistent 128x128 d64, 1 split, grid 128, 2 counters"),
      CASE(fmha(8, 64, 64, 32, 8, 64).softcap().backend("sm90"),
           "sm90 persistent 128x128 d64, 1 split, grid 128, 2 counters"),
      // Forced, unaligned, other GPUs.
      CASE(fmha(2, 4096, 4096, 16, 16, 128).backend("sm80"), "sm80 tiles 128x48 d128, 1 split, grid 1024"),
      CASE(fmha(2, 4096, 4096, 16, 16, 128).unaligned(), "sm80 tiles 128x48 d128, 1 split, grid 1024"),
      CASE(fmha(1, 8, 4096, 16, 16, 128).unaligned(), "sm80 tiles 64x64 d128, 32 splits, grid 512, merged apart"),
      CASE(fmha(2, 4096, 4096, 16, 16, 128).on(fake::kA100), "sm80 tiles 128x48 d128, 1 split, grid 1024"),
      CASE(fmha(1, 100, 4096, 16, 16, 128).on(fake::kA100), "sm80 tiles 64x64 d128, 10 splits, grid 320, merged apart"),
      CASE(fmha(2, 4096, 4096, 16, 16, 192).on(fake::kA40), "sm80 tiles 64x80 d192, 1 split, grid 2048"),
      CASE(fmha(2, 4096, 4096, 16, 16, 256).on(fake::kA100), "sm80 tiles 64x64 d256, 1 split, grid 2048"),
      CASE(fmha(2, 4096, 4096, 16, 16, 256).on(fake::kA40), "sm80 tiles 64x64 d256, 1 split, grid 2048"),
  });
}

TEST(Plan, OfShortSequencesWithAMaskOrUnlike) {
  check({
      // A mask, of tiles that see up to 11 blocks of keys.
      CASE(fmha(64, 128, 128, 12, 12, 64).mask(), "sm90 short 64x64 d64 by 1, 1 split, grid 12 2 64"),
      CASE(fmha(2, 704, 704, 32, 8, 104).mask(24).causal(), "sm90 short 64x64 d128 by 1, 1 split, grid 32 11 2"),
      CASE(fmha(2, 1500, 1500, 32, 8, 128).mask(48).window(300, 0),
           "sm90 short 64x64 d128 by 1, 1 split, grid 32 24 2"),
      CASE(fmha(2, 1500, 1500, 32, 8, 128).mask(48).window(500, 0),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(8, 705, 705, 32, 8, 64).mask(), "sm90 persistent 192x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(64, 128, 128, 12, 12, 64).mask().splits(1),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(64, 128, 128, 12, 12, 64).mask().lengths(),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(64, 128, 128, 12, 12, 64).mask().on(fake::kA100), "sm80 tiles 128x64 d64, 1 split, grid 768"),
      // Sequences that only the device knows.
      CASE(fmha(16, 128, 128, 12, 12, 64).lengths(), "sm90 short 64x64 d64 by 1, 1 split, grid 12 2 16"),
      CASE(fmha(128, 197, 197, 12, 12, 64).packed(19000, 19000), "sm90 short 64x64 d64 by 1, 1 split, grid 12 4 128"),
      CASE(fmha(16, 256, 256, 16, 16, 128).packed(3000, 3000).causal(),
           "sm90 short 64x64 d128 by 1, 1 split, grid 16 4 16"),
      CASE(fmha(64, 256, 256, 8, 8, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(32, 512, 512, 12, 12, 64).lengths(),
           "sm90 persistent 192x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(16, 128, 128, 12, 12, 64).lengths().splits(1),
           "sm90 persistent 192x128 d64 plain, 1 split, grid 132, 2 counters"),
      // A tile of 128 rows holds four heads of 20.
      CASE(fmha(64, 20, 200, 32, 8, 64).lengths(), "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(70000, 60, 60, 1, 1, 64).packed(70000, 70000), "sm80 heads 64x64 d64, 1 split, grid 70000"),
      // Rows may stand behind all keys, and most sequences have few.
      CASE(fmha(1, 128, 32768, 8, 8, 128).causal().starts(),
           "sm90 persistent 128x128 d128 plain, 16 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(16, 128, 128, 12, 12, 64).causal().starts(), "sm90 short 64x64 d64 by 1, 1 split, grid 12 2 16"),
      CASE(fmha(10000, 4096, 128, 12, 12, 64).packed(100000, 1000000),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      // Plain ones: up to 80 blocks a multiprocessor at head_dim 64, or more where tiles of 128 keys would be cut.
      CASE(fmha(128, 197, 197, 12, 12, 64), "sm90 short 64x64 d64 by 1, 1 split, grid 12 4 128"),
      CASE(fmha(128, 256, 256, 12, 12, 64), "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
  });
}

TEST(Plan, OfShortSequencesWithDropoutOrABias) {
  char const* const persistent = "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters";
  check({
      // Dropout: up to 16 blocks, any number where tiles fill the GPU, more of them where they are unequal.
      CASE(fmha(64, 128, 128, 12, 12, 64).dropout(), "sm90 short 64x64 d64 by 1, 1 split, grid 12 2 64"),
      CASE(fmha(1, 704, 704, 2, 2, 64).dropout().mask(), "sm90 short 64x64 d64 by 1, 1 split, grid 2 11 1"),
      CASE(fmha(8, 1024, 1024, 16, 16, 64).dropout().causal(), "sm90 short 64x64 d64 by 1, 1 split, grid 16 16 8"),
      CASE(fmha(8, 1025, 1025, 16, 16, 64).dropout(), "sm90 short 64x64 d64 by 1, 1 split, grid 16 17 8"),
      CASE(fmha(1, 1024, 1024, 2, 2, 64).dropout(), "sm90 short 64x64 d64 by 1, 1 split, grid 2 16 1"),
      CASE(fmha(4, 2048, 2048, 2, 2, 64).dropout(), "sm90 persistent 128x128 d64 plain, 1 split, grid 128, 2 counters"),
      CASE(fmha(8, 2048, 2048, 16, 16, 64).dropout().causal(), "sm90 short 64x64 d64 by 1, 1 split, grid 16 32 8"),
      CASE(fmha(8, 2048, 2048, 4, 4, 64).dropout().causal(), persistent),
      CASE(fmha(8, 2048, 2048, 16, 16, 64).dropout().mask(), "sm90 short 64x64 d64 by 1, 1 split, grid 16 32 8"),
      CASE(fmha(8, 2049, 2049, 16, 16, 64).dropout().mask(), persistent),
      CASE(fmha(2, 8192, 8192, 16, 16, 128).dropout(), "sm90 short 64x64 d128 by 1, 1 split, grid 16 128 2"),
      CASE(fmha(2, 8193, 8193, 16, 16, 128).dropout(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(1, 4096, 4096, 16, 16, 128).dropout(), "sm90 short 64x64 d128 by 1, 1 split, grid 16 64 1"),
      CASE(fmha(1, 4096, 4096, 12, 12, 128).dropout().causal(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(64, 128, 128, 12, 12, 64).dropout().splits(1), persistent),
      CASE(fmha(64, 128, 128, 12, 12, 64).dropout().lengths(), persistent),
      // A bias, of few blocks, or where large tiles would be half empty; its copy where rows are no vectors.
      CASE(fmha(64, 128, 128, 12, 12, 64).bias(128), "sm90 short 64x64 d64 by 1, 1 split, grid 12 2 64"),
      CASE(fmha(128, 197, 197, 12, 12, 64).bias(197), "sm90 short 64x64 d64 by 1, 1 split, grid 12 4 128"),
      CASE(fmha(32, 512, 512, 12, 12, 64).bias(512),
           "sm90 persistent 192x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(32, 540, 540, 12, 12, 64).bias(540), "sm90 short 64x64 d64 by 1, 1 split, grid 12 9 32"),
      CASE(fmha(16, 300, 300, 16, 16, 128).bias(304).mask(), "sm90 short 64x64 d128 by 1, 1 split, grid 16 5 16"),
      CASE(fmha(32, 512, 512, 12, 12, 64).bias(512).mask(), "sm90 short 64x64 d64 by 1, 1 split, grid 12 8 32"),
      CASE(fmha(64, 128, 128, 12, 12, 64).bias(), persistent),
      // Both: of any length, where tiles fill.
      CASE(fmha(8, 4096, 4096, 16, 16, 128).bias(4096).dropout(), "sm90 short 64x64 d128 by 1, 1 split, grid 16 64 8"),
      CASE(fmha(8, 2100, 2100, 16, 16, 64).bias(2104).dropout().mask(),
           "sm90 persistent 128x128 d64, 1 split, grid 132, 2 counters"),
      CASE(fmha(1, 704, 704, 2, 2, 64).bias(704).dropout(),
           "sm90 persistent 128x128 d64, 6 splits, grid 72, 2 counters, merged apart"),
      // Small heads have short kernels, too.
      CASE(fmha(1024, 49, 49, 6, 6, 32).bias(56).mask(), "sm90 short 64x64 d64 by 1, 1 split, grid 6 1 1024"),
  });
}

TEST(Plan, OfOneThingThatChangesScoresHasAKernelOfItsOwn) {
  auto const mods_of = [](Call const& call) { return plan_of(call).kernel->takes & feature::kMods; };
  for (int const head_dim : {64, 128}) {
    auto const call = [&] { return fmha(8, 2048, 2048, 16, 16, head_dim); };
    Features const scattered = head_dim == 64 ? feature::kBias : feature::kMods,
                   drops = feature::Mask | feature::Dropout;
    EXPECT_EQ(mods_of(call()), 0u);
    EXPECT_EQ(mods_of(call().softcap()), feature::kScoreMods);
    EXPECT_EQ(mods_of(call().alibi().softcap()), feature::kScoreMods);
    EXPECT_EQ(mods_of(call().bias()), scattered) << "one row for all";
    EXPECT_EQ(mods_of(call().bias(2048)), feature::Bias);
    EXPECT_EQ(mods_of(call().bias(2049)), feature::Bias) << "of which a copy is made, since all read it";
    Call each = call().bias(2049);
    each.p.bias.batch = 16 * 2049 * 2048, each.p.bias.head = 2049 * 2048;
    EXPECT_EQ(mods_of(each), scattered);
    Call padded = call().bias(2048);
    padded.p.leftpad_k = somewhere();
    EXPECT_EQ(mods_of(padded), scattered);
    EXPECT_EQ(mods_of(call().mask()), feature::Mask);
    EXPECT_EQ(plan_of(call().mask()).kernel->block_r, head_dim == 64 ? 192 : 128) << "of keys alone";
    EXPECT_EQ(plan_of(call().mask(64)).kernel->block_r, 128) << "tiles of 192 rows see more blocks of a mask of 128";
    EXPECT_EQ(mods_of(call().bias(2048).mask(64)), feature::Bias | feature::Mask);
    EXPECT_EQ(mods_of(call().dropout()), drops);
    EXPECT_EQ(mods_of(call().mask().dropout().sink().lengths()), drops);
    for (Call const& both :
         {call().bias().mask(), call().bias().dropout(), call().softcap().mask(), call().alibi().dropout()})
      EXPECT_EQ(mods_of(both), feature::kMods);
  }
  // There are none between: what is not head_dim 64 or 128 at most has the kernels for everything.
  EXPECT_EQ(mods_of(fmha(8, 2048, 2048, 16, 16, 96).mask()), feature::kMods);
}

TEST(Plan, OfFloat32) {
  check({
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).precision(Precision::Highest),
           "simt tiles 128x64 d64, 1 split, grid 1024"),
      CASE(fmha32(1, 1024, 1024, 16, 16, 64).backend("simt"), "simt tiles 32x64 d64, 1 split, grid 512"),
      // Half of a tile or more is not to be empty.
      CASE(fmha32(64, 65, 1024, 16, 16, 64), "simt tiles 128x64 d64, 1 split, grid 1024"),
      CASE(fmha32(64, 64, 1024, 16, 16, 64), "simt tiles 32x64 d64, 1 split, grid 2048"),
      CASE(fmha32(64, 64, 1024, 16, 16, 64).splits(1), "simt tiles 32x64 d64, 1 split, grid 2048"),
      CASE(fmha32(1, 20, 1024, 4, 4, 64), "simt tiles 64x32 d64, 16 splits, grid 64, merged apart"),
      // Few tiles of few keys have two warps for each row, as long as the number of splits is the library's.
      CASE(fmha32(8, 59, 59, 16, 16, 64).causal(), "simt tiles 32x64 d64 for few, 1 split, grid 256"),
      CASE(fmha32(8, 59, 59, 16, 16, 64).causal().splits(1), "simt tiles 32x64 d64, 1 split, grid 256"),
      CASE(fmha32(1, 20, 192, 4, 4, 64), "simt tiles 32x64 d64 for few, 1 split, grid 4"),
      CASE(fmha32(1, 20, 193, 4, 4, 64), "simt tiles 64x32 d64, 3 splits, grid 12, merged apart"),
      CASE(fmha32(32, 64, 64, 16, 16, 64), "simt tiles 32x64 d64, 1 split, grid 1024"),
      CASE(fmha32(1, 100, 100, 16, 16, 128), "simt tiles 32x64 d128 for few, 1 split, grid 64"),
      CASE(fmha32(1, 100, 100, 16, 16, 32), "simt tiles 32x64 d32 for few, 1 split, grid 64"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 128).backend("simt"), "simt tiles 128x96 d128, 1 split, grid 1024"),
      CASE(fmha32(1, 1000, 1000, 16, 16, 128).splits(1), "simt tiles 128x96 d128, 1 split, grid 128"),
      CASE(fmha32(1, 100, 1000, 16, 16, 128), "simt tiles 64x32 d128, 11 splits, grid 352, merged apart"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 128).on(fake::kA100), "simt tiles 64x64 d128, 1 split, grid 2048"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 128).on(fake::kA40), "simt tiles 64x32 d128, 1 split, grid 2048"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 200).backend("simt"), "simt tiles 32x32 d224, 1 split, grid 4096"),
      CASE(fmha32(1, 4, 4096, 32, 8, 128), "simt decode 16x8 d128, shared out, grid 264, 8 counters"),
      CASE(fmha32(1, 4, 4096, 32, 8, 128).splits(3), "simt decode 16x8 d128, 3 splits, grid 24, 8 counters"),
      // In parts on Hopper's tensor cores, where that pays, or where it is asked for.
      CASE(fmha32(2, 4096, 4096, 16, 16, 64), "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 128), "sm90 persistent 128x64 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(1, 64, 64, 1, 1, 40).precision(Precision::High),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 1, 2 counters"),
      CASE(fmha32(1, 1, 64, 1, 1, 40).backend("sm90"),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 1, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).softcap(), "sm90 persistent 128x128 d64, 1 split, grid 132, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).splits(1), "simt tiles 128x64 d64, 1 split, grid 1024"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 192).head_dim_v(128),
           "sm90 persistent 128x48 d192 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 160).head_dim_v(72).softcap(),
           "sm90 persistent 128x48 d192, 1 split, grid 132, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 192).backend("simt"), "simt tiles 64x32 d192, 1 split, grid 2048"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 192), "sm80 tiles 64x32 d256, 1 split, grid 2048"),
      // Of a factor of scores that would be 0, or leave float32, beside the operands' powers of two, not unasked.
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).scale(1e-9f),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).scale(1e-10f), "simt tiles 128x64 d64, 1 split, grid 1024"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).scale(1e6f), "simt tiles 128x64 d64, 1 split, grid 1024"),
      // On tensor cores of other GPUs where it is asked for, and on Hopper with their kernels.
      CASE(fmha32(2, 4096, 4096, 16, 16, 128).precision(Precision::High).on(fake::kA100),
           "sm80 tiles 64x48 d128, 1 split, grid 2048"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 16).softcap().precision(Precision::High).on(fake::kA40),
           "sm80 tiles 64x64 d64, 1 split, grid 2048"),
      CASE(fmha32(1, 4, 4096, 32, 8, 128).backend("sm80").on(fake::kA40),
           "sm80 tiles 64x48 d128, 2 splits, grid 64, merged apart"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 128).backend("sm80"), "sm80 tiles 64x48 d128, 1 split, grid 2048"),
      CASE(fmha32(2, 4096, 4096, 16, 16, 64).mask(), "sm80 tiles 64x64 d64, 1 split, grid 2048"),
      CASE(fmha32(1, 100, 100, 4, 4, 200).precision(Precision::High),
           "sm80 tiles 64x32 d256, 2 splits, grid 16, merged apart"),
      // Over pages, where parts of all that the table has room for are no more than the pages hold; and asked for.
      CASE(fmha32(4, 1000, 4096, 16, 4, 64).packed(4000, 0).lengths().pages(32),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(8, 1000, 4096, 16, 4, 64).packed(8000, 0).lengths().pages(32),
           "simt tiles 128x64 d64, 1 split, grid 1024"),
      CASE(fmha32(8, 1000, 4096, 16, 4, 64).packed(8000, 0).lengths().pages(32).precision(Precision::High),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(8, 1000, 4096, 16, 4, 64).lengths().pages(64),
           "sm90 persistent 128x128 d64 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha32(8, 20, 4096, 4, 4, 64).lengths().pages(64),
           "simt tiles 64x32 d64, 16 splits, grid 512, merged apart"),
  });
}

TEST(Plan, OfFewQueryRows) {
  check({
      CASE(fmha(1, 1, 4096, 32, 8, 128), "sm90 cluster 8x16 d128, 8 splits, grid 8 8 1 in clusters of 8"),
      CASE(fmha(4, 1, 4096, 32, 8, 128), "sm90 cluster 8x16 d128, 4 splits, grid 4 8 4 in clusters of 4"),
      CASE(fmha(1, 1, 100000, 32, 8, 128), "sm80 narrow 8x16 d128, shared out, grid 8 16 1, 8 counters"),
      CASE(fmha(64, 1, 4096, 32, 8, 128), "sm80 narrow 8x16 d128, shared out, grid 8 16 1, 512 counters"),
      CASE(fmha(64, 1, 4096, 32, 8, 128).lengths(), "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters"),
      CASE(fmha(300, 1, 4096, 32, 8, 128), "sm80 decode 16x16 d128 plain, shared out, grid 264, 2400 counters"),
      CASE(fmha(4, 2, 4096, 32, 8, 128).softcap(), "sm80 decode 16x16 d128, shared out, grid 128, 32 counters"),
      CASE(fmha(4, 4, 4096, 32, 8, 128).alibi(), "sm80 decode 16x16 d128, shared out, grid 128, 32 counters"),
      CASE(fmha(4, 4, 4096, 32, 8, 128),
           "sm90 persistent 128x128 d128 plain, 3 splits, grid 96, 2 counters, merged apart"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).softcap(), "sm80 decode 16x16 d128, shared out, grid 128, 32 counters"),
      CASE(fmha(4, 1, 4096, 64, 4, 128),
           "sm90 persistent 128x128 d128 plain, 7 splits, grid 112, 2 counters, merged apart"),
      // Of other head dims than 64 and 128 there are no narrow kernels.
      CASE(fmha(4, 1, 4096, 8, 8, 256).lengths(),
           "sm90 persistent 128x64 d256 plain, 4 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(4, 1, 4096, 8, 8, 256).lengths().pages(8),
           "sm80 decode 16x16 d256 plain, shared out, grid 264, 32 counters"),
      CASE(fmha(4, 1, 4096, 32, 1, 256).lengths(),
           "sm90 persistent 128x64 d256 plain, 32 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(4, 1, 4096, 32, 1, 256).lengths().softcap(),
           "sm90 persistent 128x64 d256, 32 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(1, 1, 1 << 20, 32, 1, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 64 splits, grid 64, 2 counters, merged apart"),
      CASE(fmha(4, 16, 4096, 64, 8, 128),
           "sm90 persistent 128x128 d128 plain, 3 splits, grid 96, 2 counters, merged apart"),
      CASE(fmha(4, 16, 4096, 64, 8, 128).backend("sm80"), "sm80 decode 64x64 d128, shared out, grid 256, 64 counters"),
      CASE(fmha(4, 16, 4096, 64, 8, 128).on(fake::kA100), "sm80 decode 64x64 d128, shared out, grid 96, 64 counters"),
      CASE(fmha(4, 17, 4096, 64, 8, 128),
           "sm90 persistent 192x80 d128 plain, 4 splits, grid 128, 2 counters, merged apart"),
      CASE(fmha(4, 1, 4096, 32, 8, 192).head_dim_v(128),
           "sm90 persistent 128x112 d192 plain, 3 splits, grid 96, 2 counters, merged apart"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).splits(1), "sm80 decode 16x16 d128, 1 split, grid 32"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).splits(3), "sm80 decode 16x16 d128, 3 splits, grid 96, 32 counters"),
      CASE(fmha(32768, 1, 1 << 20, 32, 8, 128), "sm80 decode 16x16 d128, 1 split, grid 262144"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).backend("sm80"), "sm80 narrow 8x16 d128, shared out, grid 8 16 1, 32 counters"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).on(fake::kA100), "sm80 narrow 8x16 d128, shared out, grid 8 13 1, 32 counters"),
      CASE(fmha(4, 1, 4096, 32, 8, 128).on(fake::kA40),
           "sm80 decode 16x16 d128 plain, shared out, grid 80, 32 counters"),
      CASE(fmha(64, 1, 4096, 32, 8, 128).backend("sm90"),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
  });
}

TEST(Plan, OfFewPackedRowsOverPages) {
  auto const packed = [](int n_q, int heads_q, int page) {
    return fmha(64, n_q, 4096, heads_q, 8, 128).packed(64 * n_q, 0).lengths().pages(page).causal();
  };
  check({
      CASE(packed(1, 32, 16), "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters"),
      CASE(packed(2, 32, 48), "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters"),
      CASE(packed(1, 32, 16).splits(3), "sm80 decode 16x16 d128, 3 splits, grid 1536, 512 counters"),
      CASE(packed(3, 32, 16), "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(packed(3, 32, 16).splits(1), "sm80 decode 16x16 d128, 1 split, grid 512"),
      CASE(packed(1, 256, 16), "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(packed(1, 32, 1), "sm80 decode 16x16 d128 plain, shared out, grid 264, 512 counters"),
      CASE(packed(16, 32, 16), "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(packed(1, 32, 16).sink(), "sm80 decode 16x16 d128, shared out, grid 264, 512 counters"),
  });
}

TEST(Plan, OfFewPackedRowsBesideMany) {
  auto const packed = [](int heads_q, int heads_kv, int head_dim) {
    return fmha(65, 512, 8192, heads_q, heads_kv, head_dim).packed(64 + 512, 0).lengths().pages(16).causal();
  };
  check({
      CASE(packed(32, 8, 128),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 52, 2 counters, 80 behind, "
           "sm90 decode 16x16 by 12, grid 80"),
      CASE(packed(32, 8, 128).sink(),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 52, 2 counters, 80 behind, "
           "sm90 decode 16x16 by 8, grid 80"),
      CASE(packed(32, 32, 128),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 36, 2 counters, 96 behind, "
           "sm90 decode 16x16 by 12, grid 96"),
      CASE(packed(32, 8, 128).splits(2),
           "sm90 persistent 128x128 d128 plain, 2 splits, grid 132, 2 counters, merged apart, "
           "sm80 decode 16x16 by 4, grid 1040"),
      CASE(packed(32, 8, 192),
           "sm90 persistent 128x96 d192 plain, 1 split, grid 132, 2 counters, "
           "sm80 decode 16x16 by 2, grid 104"),
      CASE(packed(32, 8, 128).on(fake::kA40),
           "sm80 tiles 128x48 d128, 1 split, grid 8320, sm80 decode 16x16 by 4, grid 64"),
  });
}

/// Whatever the device has: of each sequence one launch computes all rows, and its CTAs take all work.
TEST(Plan, OfPackedRowsOverPagesLeavesNoSequenceOut) {
  auto const rows_of = [](Params p, int rows) {
    int const ends[] = {0, rows};
    p.cu_seqlens_q = ends;
    return std::min(query_rows_of(p, 0).size(), p.n_q);
  };
  int mixed = 0, relieved = 0;
  for (fake::Gpu gpu : {fake::kH200, fake::kSevenOfH200, fake::kA100}) {
    for (DType dtype : {DType::Float32, DType::BFloat16}) {
      for (int group : {1, 2, 4, 5, 8, 16, 17, 32, 64, 65, 128}) {
        for (int n_q : {0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 65, 512}) {
          for (int batch : {1, 3, 65}) {
            for (int splits : {0, 2}) {
              Call call = fmha(batch, n_q, 4096, 8 * group, 8, 128).packed(std::max(batch * n_q - 1, n_q), 0);
              call.lengths().pages(128).causal().dtype(dtype).splits(splits).on(gpu);
              SCOPED_TRACE(line_of(call));
              Plan const plan = plan_of(call);
              Params const& p = plan.params;
              ASSERT_TRUE(plan.kernel);
              EXPECT_EQ(plan.grid.ctas.x > 0, n_q > 0);
              for (int rows = 0; rows <= n_q; ++rows) {
                int const of_few = plan.few ? rows_of(plan.few->params, rows) : 0, of_many = rows_of(p, rows);
                EXPECT_EQ(of_few + of_many, rows);
                EXPECT_TRUE(of_few == 0 || of_many == 0) << rows;
                if (plan.out_of_range) {
                  EXPECT_EQ(rows_of(plan.out_of_range->params, rows), of_many);
                }
              }
              mixed += plan.few != nullptr, relieved += plan.relief > 0;
              EXPECT_TRUE(plan.relief == 0 || plan.few) << "it waits for a launch that decodes";
              if (plan.kernel->kind != Kind::Persistent || n_q == 0) continue;
              EXPECT_EQ(p.dealt_ctas, static_cast<int>(plan.grid.ctas.x));
              EXPECT_EQ(p.queue_ctas, static_cast<int>(plan.grid.ctas.x + plan.relief));
              EXPECT_LE(p.queue_ctas, std::min<int64_t>(p.scheduler.size(), p.resident_ctas));
            }
          }
        }
      }
    }
  }
  EXPECT_TRUE(mixed > 300 && relieved > 50) << mixed << " " << relieved;
}

TEST(Plan, OfACache) {
  check({
      CASE(kvcache(4, 1, 4096, 32, 8, 128).lengths(), "sm90 cluster 8x16 d128, 4 splits, grid 4 8 4 in clusters of 4"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths(), "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths().pages(16),
           "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths().pages(8),
           "sm80 decode 16x16 d128 plain, shared out, grid 264, 512 counters"),
      CASE(kvcache(4, 1, 4096, 32, 8, 128).lengths().new_keys(1),
           "sm90 cluster 8x16 d128, 4 splits, grid 4 8 4 in clusters of 4"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths().new_keys(1),
           "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters, appended apart"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths().new_keys(1).rotary().batch_index(99),
           "sm80 narrow 8x16 d128, shared out, grid 8 33 1, 512 counters, appended apart"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).lengths().new_keys(1).pages(8),
           "sm80 decode 16x16 d128, shared out, grid 264, 512 counters"),
      CASE(kvcache(64, 0, 4096, 32, 8, 128).lengths().new_keys(20),
           "sm80 decode 16x16 d128, shared out, grid 264, 512 counters"),
      CASE(kvcache(2, 0, 4096, 32, 8, 128).lengths().new_keys(20),
           "sm90 cluster 8x16 d128, 8 splits, grid 8 8 2 in clusters of 8"),
      CASE(kvcache(64, 0, 4096, 32, 8, 128).lengths(), "sm80 narrow 8x16 d128, shared out, grid 0, 512 counters"),
      CASE(kvcache(4, 1, 4096, 32, 8, 128).lengths().unaligned(),
           "sm80 decode 16x16 d128, shared out, grid 128, 32 counters"),
      CASE(kvcache(4, 16, 4096, 32, 8, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 4 splits, grid 128, 2 counters, merged apart"),
      CASE(kvcache(4, 8, 4096, 32, 8, 256).lengths().unaligned(),
           "sm80 decode 64x32 d256, shared out, grid 264, 32 counters"),
      CASE(kvcache(4, 1, 4096, 32, 8, 128).backend("sm90"),
           "sm90 cluster 8x16 d128, 4 splits, grid 4 8 4 in clusters of 4"),
      CASE(kvcache(4, 1, 4096, 32, 8, 128).backend("sm90").splits(3),
           "sm90 persistent 128x128 d128 plain, 3 splits, grid 96, 2 counters, merged apart"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).backend("sm90"),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(kvcache(64, 1, 4096, 32, 8, 128).backend("sm90").alibi(),
           "sm90 persistent 128x128 d128, 1 split, grid 132, 2 counters"),
      CASE(kvcache(64, 0, 4096, 32, 8, 128).lengths().new_keys(20).backend("sm90"),
           "sm90 short 64x64 d128 by 1, 1 split, grid 0, appended apart"),
  });
}

TEST(Plan, OfAChunkOverACache) {
  check({
      CASE(kvcache(4, 17, 4096, 8, 8, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 4 splits, grid 128, 2 counters, merged apart"),
      CASE(kvcache(4, 16, 4096, 40, 8, 128).lengths(),
           "sm90 persistent 128x128 d128 plain, 4 splits, grid 128, 2 counters, merged apart"),
      CASE(kvcache(1, 1000, 4096, 8, 8, 64).splits(3),
           "sm90 persistent 192x128 d64 plain, 3 splits, grid 132, 2 counters, merged apart"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).lengths().new_keys(300),
           "sm90 persistent 128x128 d128 plain, 1 split, grid 132, 2 counters, appended apart"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).lengths().new_keys(300).rotary().on(fake::kA100),
           "sm80 tiles 128x48 d128, 1 split, grid 384, appended apart"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).lengths().rotary().on(fake::kA100),
           "sm80 tiles 128x48 d128, 1 split, grid 384, appended apart"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).lengths().pages(48).on(fake::kA100),
           "sm80 tiles 128x48 d128, 1 split, grid 384"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).lengths().new_keys(7).batch_index(9).on(fake::kA100),
           "sm80 tiles 128x48 d128, 1 split, grid 384, appended apart"),
      CASE(kvcache(4, 300, 4096, 32, 8, 128).dtype(DType::Float32).lengths().new_keys(7).pages(16),
           "simt tiles 128x96 d128, 1 split, grid 384, appended apart"),
      // By decoding, where no kernel of query tiles has room.
      CASE(kvcache(4, 300, 4096, 32, 8, 256).dtype(DType::Float32).new_keys(7).on(fake::kA40),
           "simt decode 16x8 d256, shared out, grid 600"),
  });
}

TEST(Plan, OfNothing) {
  check({
      CASE(fmha(0, 4096, 4096, 16, 16, 128), "sm90 persistent 128x128 d128 plain, 1 split, grid 0, 2 counters"),
      CASE(fmha(2, 0, 4096, 16, 16, 128), "sm90 cluster 8x16 d128, 4 splits, grid 0 in clusters of 4"),
      CASE(fmha(2, 4096, 0, 16, 16, 128), "sm90 persistent 192x80 d128 plain, 1 split, grid 132, 2 counters"),
      CASE(fmha(2, 1, 0, 16, 16, 128), "sm90 cluster 8x16 d128, 4 splits, grid 4 16 2 in clusters of 4"),
      CASE(fmha(0, 0, 0, 16, 16, 128).packed(0, 0), "sm90 short 64x64 d128 by 1, 1 split, grid 0"),
      // Few rows, where clusters have no kernel of that head_dim.
      CASE(fmha(0, 1, 4096, 32, 8, 128), "sm90 cluster 8x16 d128, 8 splits, grid 0 in clusters of 8"),
      CASE(fmha(0, 1, 4096, 8, 8, 256), "sm90 persistent 128x64 d256 plain, 1 split, grid 0, 2 counters"),
      CASE(kvcache(0, 1, 4096, 8, 8, 256).new_keys(1).splits(2).unaligned(),
           "sm80 decode 16x16 d256, 2 splits, grid 0"),
  });
}

/// How the refusals begin; what would do instead follows.
TEST(Plan, OfNone) {
  std::pair<Call, std::string> const refusals[] = {
      {fmha(2, 4096, 4096, 16, 16, 128).backend("simt"),
       R"(q: no kernel of backend "simt" for this GPU takes bfloat16 with head_dim 128)"},
      {fmha(2, 4096, 4096, 16, 16, 128).on(fake::kA100).backend("sm90"), R"(q: no kernel of backend "sm90" for this)"},
      {fmha(2, 4096, 4096, 16, 16, 128).backend("sm90").unaligned(), R"(q, k, v: no kernel of backend "sm90" takes)"},
      {fmha32(2, 4096, 4096, 16, 16, 256).on(fake::kA40), "q: no kernel for this GPU takes float32 with head_dim 256"},
      {fmha32(2, 4096, 4096, 16, 16, 192).on(fake::kA40).precision(Precision::High), "precision: no kernel for this"},
      {fmha32(2, 4096, 4096, 16, 16, 64).splits(2).backend("sm80"), R"(num_splits: no kernel of backend "sm80" takes)"},
      {fmha32(2, 4096, 4096, 16, 16, 192).on(fake::kA40).backend("sm80"),
       R"(q: no kernel of backend "sm80" for this GPU takes)"},
      {fmha32(2, 4096, 4096, 16, 16, 64).scale(1e-10f).backend("sm80"),
       R"(softmax_scale: no kernel of backend "sm80")"},
      {fmha32(2, 4096, 4096, 16, 16, 64).softcap(1e-9f).backend("sm90"), R"(softcap: no kernel of backend "sm90")"},
      {fmha32(2, 4096, 4096, 16, 16, 64).scale(1e-10f).precision(Precision::High),
       "precision: no kernel of tensor cores takes float32 together with a factor of scores"},
      {kvcache(4, 1, 4096, 32, 8, 128).dtype(DType::Float32).backend("sm80"), R"(q: no kernel of backend "sm80")"},
      {fmha32(2, 4096, 4096, 16, 16, 64).unaligned().precision(Precision::High),
       "precision: no kernel of tensor cores takes float32 together with q, k, v"},
      {fmha32(2, 4096, 4096, 16, 16, 64).splits(2).precision(Precision::High),
       "precision: no kernel of tensor cores takes float32 together with num_splits"},
      {kvcache(4, 1, 4096, 32, 8, 128).on(fake::kA100).backend("sm90"), R"(q: no kernel of backend "sm90" for this)"},
      {kvcache(4, 33, 4096, 8, 8, 64).backend("sm90").unaligned(), R"(q, k, v: no kernel of backend "sm90" takes)"},
      {kvcache(4, 8, 4096, 8, 8, 256).backend("sm90").unaligned(), R"(q, k, v: no kernel of backend "sm90" takes)"},
      {kvcache(4, 1, 4096, 8, 8, 64).new_keys(1).backend("sm90").unaligned(),
       R"(q, k, v: no kernel of backend "sm90" takes)"},
      // More CTAs than a launch has.
      {fmha(65536, 17, 64, 32768, 1, 64), "cutlass_ext.ValueError: q: has 2147483648 tiles of query rows"},
      {kvcache(65536, 8, 64, 32768, 32768, 64).splits(1), "cutlass_ext.ValueError: q: asks for 2147483648 CTAs"},
  };
  for (auto const& [call, begins] : refusals) EXPECT_EQ(line_of(call).substr(0, begins.size()), begins);
}

// ------------------------------------------------------------------------------------------------ whatever the call
/// A call that the checks of torch/ would let through, now and then a very large one.
Call random_call(std::mt19937& random) {
  auto const one_in = [&](unsigned n) { return random() % n == 0; };
  auto const pick = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int const far = kMaxPosition - 1;
  bool const huge = one_in(8), is_cache = one_in(3);
  int const batch = huge ? pick({1, 1000, 65535, 65536, 1 << 20}) : pick({0, 1, 1, 2, 3, 8, 33, 64, 257});
  int const n_q =
      huge ? pick({0, 1, 16, 17, 1000, 131072, far}) : pick({0, 1, 1, 1, 2, 4, 8, 16, 17, 64, 100, 128, 513, 4096});
  int const n_kv = huge ? pick({0, 1, 64, 1000, 131072, far}) : pick({0, 1, 5, 64, 129, 1000, 4096, 32768});
  int const heads_kv = huge ? pick({1, 8, 32768, 65536}) : pick({1, 2, 8, 32});
  int const heads_per_kv = huge ? pick({1, 16, 16384}) : pick({1, 1, 2, 5, 8, 16});
  Call call = (is_cache ? kvcache : fmha)(batch, n_q, n_kv, heads_kv * heads_per_kv, heads_kv,
                                          pick({8, 64, 64, 72, 96, 104, 128, 128, 160, 192, 200, 256}));
  Params& p = call.p;
  call.on(static_cast<fake::Gpu>(pick({0, 0, 0, 1, 2})));
  call.dtype(static_cast<DType>(pick({0, 1, 2})));
  if (one_in(3)) call.backend(one_in(3) ? "simt" : one_in(2) ? "sm80" : "sm90");
  if (one_in(4)) call.splits(pick({1, 2, 3, 7, 1024}));
  if (one_in(4)) call.head_dim_v(pick({8, 64, 128, 192, 256}));
  if (one_in(3)) call.window(pick({-1, 0, 3, 1000, (1 << 30) - 1}), pick({-1, 0, 0, 200, (1 << 30) - 1}));
  if (one_in(6)) call.softcap();
  if (one_in(6)) p.alibi_slopes = somewhere<float>();
  if (one_in(5)) call.sink();
  if (one_in(3)) call.lengths();
  if (one_in(6)) p.leftpad_k = somewhere();
  if (one_in(12)) call.unaligned();
  p.start_pos_kind = static_cast<StartPos>(pick({0, 0, 1, 2, 2}));
  if (p.start_pos_kind == StartPos::PerBatch) p.start_positions = somewhere();
  if (p.start_pos_kind == StartPos::Scalar) p.start_pos = pick({0, 0, -3, 1000, far, -far});
  if (is_cache) {
    if (one_in(2)) call.new_keys(std::min(p.n_kv, pick({1, 1, 4, 20})));
    if (!p.seqused_k && one_in(2)) p.n_cached = p.n_kv - p.n_new;
    if (p.n_new > 0 && one_in(3)) call.rotary();
    if (one_in(3)) {
      call.pages(pick({1, 8, 16, 256}));
    } else if (one_in(4)) {
      call.batch_index(p.batch);
    }
  } else if (one_in(4)) {
    call.packed(static_cast<int>(std::min<int64_t>(far, int64_t(batch) * n_q)),
                static_cast<int>(std::min<int64_t>(far, int64_t(batch) * n_kv)));
    p.n_q = std::min(n_q, p.total_q), p.n_kv = std::min(n_kv, p.total_k);
    if (one_in(3)) call.pages(pick({1, 16, 48, 256}));
  }
  return call;
}

/// Whether there can be such tensors: of fewer than 2^60 elements, in a cache fewer than 2^34 keys. Packed sequences
/// count as if all were as long as the longest.
bool can_be(Params const& p, bool is_cache) {
  double const rows_and_heads = std::max(1. * p.n_q * p.heads_q, 1. * p.n_kv * p.heads_kv);
  return p.batch * rows_and_heads * 256 < 0x1p60 &&
         (!is_cache || int64_t(p.batch) * (p.n_kv / 8 + 1) < int64_t(1) << 31);
}

/// Whether `kernel` can do all that the call asks for, however slowly.
bool would_do(Kernel const& kernel, Call const& call, Params const& p) {
  std::string const& backend = call.request.backend;
  return kernel.dtype == call.request.dtype && (backend == "auto" || backend == kernel.family) &&
         runs_on(kernel, current_device()) && kernel.takes_sizes(p) && kernel.takes_features(features_of(p));
}

/// Whether `text` begins with the name of an argument.
bool names_an_argument(std::string const& text) {
  std::string const name = text.substr(0, text.find(": "));
  if (name == "q" || name == "backend") return true;
  for (int bit = 0; bit < feature::kCount; ++bit) {
    if (name == argument_of(Features(1) << bit)) return true;
  }
  return false;
}

void check_launch(Call const& call, Plan const& plan) {
  Params const& p = plan.params;
  Kernel const& kernel = *plan.kernel;
  dim3 const& ctas = plan.grid.ctas;
  bool const decodes = kernel.kind >= Kind::Decode;
  EXPECT_TRUE(would_do(kernel, call, plan.appends_apart ? after_append(p, nullptr) : p));
  EXPECT_TRUE(!plan.appends_apart || (call.request.is_cache && kernel.kind != Kind::Decode));
  if (p.batch == 0 || (p.n_q == 0 && (p.n_new == 0 || plan.appends_apart))) {
    EXPECT_EQ(ctas.x, 0u);
    return;
  }
  EXPECT_TRUE(ctas.x > 0 && ctas.x <= INT32_MAX);
  EXPECT_TRUE(ctas.y > 0 && ctas.y < 65536 && ctas.z > 0 && ctas.z < 65536);
  EXPECT_TRUE(ctas.x % plan.grid.cluster == 0 && (kernel.kind == Kind::Cluster) == (plan.grid.cluster > 1));
  if (p.fixed_splits) {  // as asked, or where there are too many keys to share them out
    int const asked = call.request.num_splits;
    EXPECT_EQ(plan.splits, asked > 0 ? asked : decode::parts_of_many_keys(p));
  }
  EXPECT_EQ(plan.merges_apart, !decodes && plan.splits > 1);
  if (plan.merges_apart) {
    EXPECT_EQ(plan.partial_rows, plan.splits * p.result_rows());
  }
  if (kernel.kind == Kind::Tiles) {
    EXPECT_EQ(ctas.x, p.scheduler.size());
  }
  EXPECT_NE(plan.reason(call.request), "");
}

TEST(Plan, OfWhateverCall) {
  std::mt19937 random(13);
  int planned = 0, refused = 0, too_large = 0;
  for (int i = 0; i < 20000; ++i) {
    SCOPED_TRACE(testing::Message() << "call " << i);
    Call const call = random_call(random);
    if (!can_be(call.p, call.request.is_cache)) continue;
    try {
      Plan const plan = plan_of(call);
      if (plan.kernel) {
        ++planned;
        check_launch(call, plan);
        continue;
      }
      ++refused;
      EXPECT_TRUE(names_an_argument(plan.refusal)) << plan.refusal;
      for (Kernel const& kernel : kernels()) {
        bool const in_question = call.request.is_cache ? kernel.kind == Kind::Decode
                                                       : kernel.kind == Kind::Persistent || kernel.kind == Kind::Tiles;
        EXPECT_FALSE(in_question && would_do(kernel, call, plan.params)) << plan.refusal;
      }
    } catch (std::runtime_error const& error) {
      ++too_large;
      EXPECT_EQ(std::string(error.what()).find("cutlass_ext.ValueError: q: "), 0u) << error.what();
      Params const& p = call.p;
      int const splits = std::max(call.request.num_splits, decode::parts_of_many_keys(p));
      EXPECT_GE(1. * p.batch * p.heads_q * std::max(p.n_q, 1) * splits, 0x1p31) << error.what();
    }
  }
  EXPECT_TRUE(planned > 10000 && refused > 500 && too_large > 50) << planned << " " << refused << " " << too_large;
}

/// With the number of splits fixed a sequence's bits do not depend on those that it comes with.
TEST(Plan, OfFixedSplitsForgetsTheBatch) {
  auto const expect_same = [](Call const& one, Call const& many) {
    Plan const a = plan_of(one), b = plan_of(many);
    ASSERT_TRUE(a.kernel);
    EXPECT_EQ(a.kernel->entry, b.kernel->entry) << line_of(one) << " and " << line_of(many);
    EXPECT_EQ(a.splits, b.splits);
  };
  for (fake::Gpu gpu : {fake::kH200, fake::kA100}) {
    for (DType dtype : {DType::Float32, DType::BFloat16}) {
      for (int head_dim : {32, 64, 96, 112, 128, 192, 256}) {
        for (int splits : {1, 3}) {
          for (int n_q : {1, 4, 16, 17, 33, 64, 65, 100, 129, 1000}) {
            for (int n_kv : {0, 64, 1000}) {
              auto const full = [&](auto const& of, int batch) {
                return of(batch, n_q, n_kv, 8, 2, head_dim).dtype(dtype).splits(splits).on(gpu);
              };
              auto const padded = [&](auto const& of, int batch) { return full(of, batch).causal(); };
              expect_same(full(fmha, 1), full(fmha, 64));
              expect_same(padded(fmha, 1), padded(fmha, 64));
              expect_same(padded(kvcache, 1), padded(kvcache, 64));
              // Packed sequences come with longer ones, too.
              expect_same(padded(fmha, 1).packed(n_q, n_kv), fmha(64, 2000, 3000, 8, 2, head_dim)
                                                                 .dtype(dtype)
                                                                 .splits(splits)
                                                                 .on(gpu)
                                                                 .causal()
                                                                 .packed(20000, 30000));
            }
          }
        }
      }
    }
  }
}

TEST(Plan, OfFixedSplitsForgetsWhoElseIsPacked) {
  // What computes a sequence of `n_q` rows of a plan.
  auto const of_rows = [](Plan const& plan, int n_q) {
    bool const few = plan.few && n_q <= plan.few->params.most_q;
    return few ? plan.few->kernel->entry : plan.kernel ? plan.kernel->entry : nullptr;
  };
  for (fake::Gpu gpu : {fake::kH200, fake::kA100}) {
    for (auto const [heads_q, heads_kv] : {std::pair(8, 8), {8, 2}, {32, 2}, {17, 1}, {64, 2}, {130, 1}}) {
      for (int head_dim : {64, 112, 128, 192, 256}) {
        for (int n_q : {1, 2, 4, 8, 16, 17, 64}) {
          auto const packed = [&](int longest, int rows) {
            return plan_of(fmha(64, longest, 4096, heads_q, heads_kv, head_dim)
                               .packed(rows, 0)
                               .lengths()
                               .pages(16)
                               .causal()
                               .splits(2)
                               .on(gpu));
          };
          Plan const alike = packed(n_q, 64 * n_q), beside = packed(500, 64 * n_q + 499);
          ASSERT_TRUE(alike.kernel);
          EXPECT_EQ(of_rows(alike, n_q), of_rows(beside, n_q))
              << n_q << " rows, " << heads_q << " heads on " << heads_kv << ", " << head_dim << " columns";
        }
      }
    }
  }
}

TEST(Plan, WithAKernelThatTheCallerChose) {
  for (Kernel const& kernel : kernels()) {
    if (kernel.kind != Kind::Tiles && kernel.kind != Kind::Persistent) continue;
    Params p = fmha(2, 1000, 1000, 8, 8, 64).p;
    p.num_splits = 3;
    fake::use(fake::kH200);
    Plan const plan = plan_with(kernel, p);
    EXPECT_EQ(plan.kernel, &kernel);
    EXPECT_EQ(plan.splits, 3);
    EXPECT_EQ(plan.params.scheduler.size(), 2 * 8 * 3 * Scheduler::tiles_of(1000, kernel.block_r));
  }
}

/// Of its first two KV heads: columns that tiles leave empty in front of k, and of v.
std::vector<int> leads_of(Call const& call) {
  Params const p = plan_of(call).params;
  return {p.lead_k(0), p.lead_k(1), p.lead_v(0), p.lead_v(1)};
}

TEST(Plan, HasTilesBeginBeforeRowsAtOddMultiplesOf16Bytes) {
  using Leads = std::vector<int>;
  for (int d : {72, 88, 104, 120, 136, 168, 200, 248})
    EXPECT_EQ(leads_of(fmha(2, 4096, 4096, 16, 4, d)), Leads({0, 8, 0, 8})) << d;
  for (int d : {40, 48, 56, 64, 80, 96, 112, 128, 160, 256})
    EXPECT_EQ(leads_of(fmha(2, 4096, 4096, 16, 4, d)), Leads({0, 0, 0, 0})) << d;
  EXPECT_EQ(leads_of(fmha(2, 4096, 4096, 16, 4, 72).head_dim_v(96)), Leads({0, 8, 0, 0}));
  EXPECT_EQ(leads_of(fmha(8, 4096, 4096, 16, 4, 104).packed(20000, 30000)), Leads({0, 8, 0, 8}));
  EXPECT_EQ(leads_of(fmha(8, 4096, 4096, 16, 4, 104).packed(20000, 0).pages(16)), Leads({0, 8, 0, 8}));
  EXPECT_EQ(leads_of(fmha32(2, 4096, 4096, 16, 4, 104)), Leads({0, 0, 0, 0}));
  // Every second row of a head would begin elsewhere.
  EXPECT_EQ(leads_of(fmha(2, 4096, 4096, 15, 3, 104)), Leads({0, 0, 0, 0}));
  // A part of wider rows.
  auto const off = [](int d) {
    Call call = fmha(2, 4096, 4096, 16, 4, d);
    call.p.k = somewhere<char>() + 16;
    return leads_of(call);
  };
  EXPECT_EQ(off(72), Leads({8, 0, 0, 8}));
  EXPECT_EQ(off(80), Leads({0, 0, 0, 0}));
}

// ------------------------------------------------------------------------------------------------ features
TEST(Features, OneThatNoKernelKnowsIsTakenByNone) {
  Features const last = Features(1) << (feature::kCount - 1), made_up = last << 1;
  Features all = 0;
  for (Kernel const& kernel : kernels()) {
    all |= kernel.takes;
    EXPECT_TRUE(kernel.takes_features(kernel.takes));
    EXPECT_FALSE(kernel.takes_features(kernel.takes | made_up));
  }
  EXPECT_EQ(all, made_up - 1) << "every bit below is taken by some kernel";
  EXPECT_STREQ(argument_of(last), "bias");
  EXPECT_STREQ(argument_of(last | made_up), "bias");
  EXPECT_STREQ(argument_of(made_up), "(unknown)");
  EXPECT_STREQ(argument_of(feature::Sink | last), "sink");
}

// ------------------------------------------------------------------------------------------------ the launch
/// What the kernel was launched with.
struct Launched {
  int times = 0;
  Params params;
};
Launched launched;
int launch_that_fails = 0;       // of a call's, from 1 on; 0: none
uint32_t const packed_mask = 0;  // what a call's becomes once it has been planned

void launch_of(Call const& call, size_t* bytes) {
  launched = {};
  counters_asked = counters_zeroed = 0, merges = 0, appends = 0, parts_made = 0, forks = 0, *bytes = 0;
  Plan plan = plan_of(call);
  if (plan.params.mask.bits) plan.params.mask.bits = &packed_mask;
  Kernel kernel = *plan.kernel;
  kernel.launch = [](Params const& params, Grid const&, cudaStream_t) {
    if (++launched.times == launch_that_fails) throw std::runtime_error("out of resources");
    launched.params = params;
  };
  plan.kernel = &kernel;
  if (plan.few) {
    Plan few = *plan.few;
    few.kernel = &kernel;
    plan.few = std::make_shared<Plan const>(few);
  }
  if (plan.out_of_range) {
    Plan exact = *plan.out_of_range;
    exact.kernel = &kernel;
    plan.out_of_range = std::make_shared<Plan const>(exact);
  }
  run(plan, nullptr, [&](size_t asked) {
    EXPECT_EQ(forked, 0) << "PyTorch's deterministic mode fills it on the call's stream";
    *bytes += asked;
    return somewhere<void>();
  });
  EXPECT_EQ(forked, 0);
}

TEST(Run, GivesAKernelTheWorkspaceThatItWants) {
  size_t bytes;
  launch_of(fmha(2, 1000, 1000, 8, 8, 128).splits(3).head_dim_v(64), &bytes);
  EXPECT_EQ(launched.times, 1);
  EXPECT_EQ(counters_asked, 2u);
  EXPECT_EQ(merges, 1);
  EXPECT_EQ(bytes, 3u * 2 * 8 * 1000 * (64 + 1) * 4);  // O and lse of three splits
  EXPECT_EQ(launched.params.lse_partial - launched.params.o_partial, 3 * 2 * 8 * 1000 * 64);

  launch_of(kvcache(4, 1, 4096, 32, 8, 128).splits(3), &bytes);
  EXPECT_EQ(launched.times, 1);
  EXPECT_EQ(counters_asked, 4u * 8);
  EXPECT_EQ(merges, 0);                               // in the same launch
  EXPECT_EQ(bytes, 4u * 3 * 8 * 16 * (128 + 2) * 4);  // O, m and l of whole tiles

  launch_of(fmha(1, 256, 256, 32, 8, 128), &bytes);
  EXPECT_EQ(launched.times, 1);
  EXPECT_EQ(counters_asked + bytes + merges, 0u);
}

TEST(Run, LooksAtABiasThatIsSharedForHoppersKernels) {
  size_t bytes;
  auto const seen = [&](Call call, int64_t batch, int64_t head) {
    call.p.bias.batch = batch, call.p.bias.head = head, call.p.bias.row = call.p.bias.key = 1;
    fake::biases_seen = 0;
    launch_of(call, &bytes);
    return fake::biases_seen;
  };
  Call const call = fmha(2, 1000, 1001, 8, 8, 64).bias();
  EXPECT_EQ(seen(call, 0, 1), 1);
  EXPECT_EQ(seen(call, 1, 0), 1);
  EXPECT_EQ(seen(call, 1, 1), 0) << "a copy would take what it wins";
  Call padded = call;
  padded.p.leftpad_k = somewhere();
  EXPECT_EQ(seen(padded, 0, 1), 0) << "which the copy engine does not bring";
  EXPECT_EQ(seen(fmha(2, 1000, 1001, 8, 8, 256).bias(), 0, 1), 0) << "other kernels read it element by element";
}

TEST(Run, MakesPartsAndHasALaunchStandBy) {
  size_t bytes;
  launch_of(fmha32(2, 4096, 4096, 16, 16, 64), &bytes);
  EXPECT_EQ(parts_made, 1);
  EXPECT_EQ(bytes, 64u);  // bytes_of_parts, above
  EXPECT_EQ(launched.times, 2);
  EXPECT_TRUE(launched.params.if_out_of_range) << "the second is on CUDA cores";
  EXPECT_FALSE(launched.params.is_skipped()) << "without a flag there is nothing to stand aside for";

  launch_of(fmha32(2, 4096, 4096, 16, 16, 64).mask(), &bytes);
  EXPECT_EQ(launched.times, 2);
  EXPECT_EQ(launched.params.mask.bits, &packed_mask);
}

TEST(Run, DecodesBesideChunksInParts) {
  size_t bytes;
  launch_of(fmha32(4, 1000, 4096, 16, 4, 64).packed(2500, 0).lengths().pages(32), &bytes);
  EXPECT_EQ(parts_made, 1);
  EXPECT_EQ(launched.times, 3) << "what decodes, the chunks in parts, and on CUDA cores";
  EXPECT_TRUE(launched.params.if_out_of_range);
  EXPECT_EQ(launched.params.least_q, 5) << "rows that decode are not its own";
  EXPECT_EQ(launched.params.page_rows.divisor, 32);

  launch_of(fmha32(4, 1000, 4096, 16, 4, 64).packed(2500, 0).lengths().pages(32).precision(Precision::High), &bytes);
  EXPECT_EQ(launched.times, 2) << "all rows in parts";
  EXPECT_EQ(launched.params.least_q, 0);
}

TEST(Run, ZeroesTheCountersOfACallOfWhichALaunchFails) {
  size_t bytes;
  Call const call = fmha(65, 512, 8192, 32, 8, 128).packed(64 + 512, 0).lengths().pages(16).causal();
  launch_of(call, &bytes);
  EXPECT_EQ(counters_zeroed, 0u);
  for (launch_that_fails = 1; launch_that_fails <= 3; ++launch_that_fails) {
    EXPECT_THROW(launch_of(call, &bytes), std::runtime_error);
    EXPECT_EQ(forked, 0);
    EXPECT_GT(counters_asked, 2u);
    EXPECT_EQ(counters_zeroed, counters_asked) << "those of what decodes, too";
  }
  launch_that_fails = 0;
}

TEST(Run, HasAReliefTakeTheWorkThatIsLeft) {
  size_t bytes;
  launch_of(fmha(65, 512, 8192, 32, 8, 128).packed(64 + 512, 0).lengths().pages(16).causal(), &bytes);
  EXPECT_EQ(launched.times, 3) << "what decodes, the chunks, and the rest of them";
  EXPECT_TRUE(launched.params.is_relief);
  EXPECT_EQ(launched.params.dealt_ctas, 52) << "items that the CTAs of the launch before begin with";
  EXPECT_EQ(launched.params.queue_ctas, 132);
}

TEST(Run, WritesWhatIsNewBeforeAKernelReadsIt) {
  size_t bytes;
  launch_of(kvcache(64, 1, 4096, 32, 8, 128).lengths().new_keys(1).rotary().batch_index(99), &bytes);
  EXPECT_EQ(appends, 1);
  EXPECT_EQ(launched.times, 1);
  EXPECT_EQ(features_of(launched.params), feature::KeyLengths | feature::Pages);
  EXPECT_EQ(launched.params.n_new, 1) << "they count among the keys";

  launch_of(kvcache(64, 0, 4096, 32, 8, 128).lengths().new_keys(20).backend("sm90"), &bytes);
  EXPECT_EQ(appends, 1);
  EXPECT_EQ(launched.times, 0) << "of no row";

  launch_of(kvcache(4, 300, 4096, 32, 8, 128).lengths().new_keys(200).batch_index(9).on(fake::kA100), &bytes);
  EXPECT_EQ(appends, 1);
  EXPECT_EQ(launched.times, 1);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(features_of(launched.params), feature::KeyLengths | feature::Pages);
  EXPECT_EQ(launched.params.n_new, 200) << "they count among the keys";
  EXPECT_EQ(launched.params.page_rows.divisor, 4096) << "a page is a sequence's part of the cache";

  launch_of(kvcache(4, 300, 4096, 32, 8, 128).lengths().rotary().on(fake::kA100), &bytes);
  EXPECT_EQ(appends, 1);
  EXPECT_EQ(bytes, 4u * 300 * 32 * 128 * 2);  // q, rotated
  EXPECT_EQ(features_of(launched.params), feature::KeyLengths);
  EXPECT_EQ(launched.params.q_stride.batch, 300 * 32 * 128);

  launch_of(kvcache(4, 300, 4096, 32, 8, 128).lengths(), &bytes);
  EXPECT_EQ(appends, 0);
}

TEST(Run, LaunchesNothingWhereThereIsNothingToDo) {
  size_t bytes;
  for (Call const& call :
       {fmha(0, 1000, 1000, 8, 8, 128), fmha(2, 0, 1000, 8, 8, 128).splits(3), kvcache(2, 0, 1000, 8, 8, 128)}) {
    launch_of(call, &bytes);
    EXPECT_EQ(launched.times + counters_asked + bytes + merges + appends, 0u);
  }
}

}  // namespace
}  // namespace cutlass_ext

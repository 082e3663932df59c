// What PTX's instructions of barriers, of the copy engine and of the tensor cores do (PTX ISA 9.0, sections 9.7.9 to
// 9.7.15). Copies land when the machine draws it; products are computed at once, and their shared memory is watched
// until they are waited for.
#include <algorithm>
#include <array>

#include "numbers.hpp"
#include "tensor_map.hpp"
#include "warp.hpp"

namespace cutlass_ext::emulator {

using Words = std::vector<std::string>;

void read_address(Instruction&, std::string const& operand, int which, int64_t& offset, Reader&);  // instructions.cpp

namespace {

bool has(Words const& words, std::string const& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

template <class F>
void each(Lanes mask, F const& f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

int trailing_number(std::string const& text, char behind) { return std::atoi(text.c_str() + text.find(behind) + 1); }

/// A shared address held in a register of 4 bytes or, generic, of 8.
uint64_t shared_address(Warp& w, Instruction const& i, int lane) {
  uint64_t const base = i.flag ? w.at<uint64_t>(i.operands[0], lane) : w.at<uint32_t>(i.operands[0], lane);
  return (base + i.offset) & 0xffffffff;
}

Mbarrier& barrier_at(Cta& cta, uint64_t address) {
  auto const [owner, offset] = cta.cluster.owner(cta, address, 8);
  if (offset % 8) fault("an mbarrier that is not at a multiple of 8 bytes");
  return *reinterpret_cast<Mbarrier*>(owner->shared.data() + offset);
}

// ---------------------------------------------------------------------------------------------------------- mbarrier
enum class OfBarrier : uint8_t { Init, Invalidate, Arrive, ExpectAndArrive, Expect, Complete, Test };

void of_barrier(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    Mbarrier& barrier = barrier_at(w.cta, shared_address(w, i, lane));
    uint32_t const n = i.count ? w.at<uint32_t>(i.operands[1], lane) : 1;
    switch (OfBarrier(i.kind)) {
      case OfBarrier::Init:
        return barrier.init(n);
      case OfBarrier::Invalidate:
        return;
      case OfBarrier::Arrive:
        barrier.arrive(n, 0);
        break;
      case OfBarrier::ExpectAndArrive:
        barrier.arrive(1, int32_t(n));
        break;
      case OfBarrier::Expect:
        barrier.arrive(0, int32_t(n));
        break;
      case OfBarrier::Complete:
        barrier.complete(n);
        break;
      case OfBarrier::Test: {
        bool const passed = barrier.has_passed(w.at<uint32_t>(i.operands[1], lane));
        w.set(i.operands[2], Lanes(1) << lane, passed ? ~Lanes(0) : 0);
        w.yielded |= !passed;
        return;
      }
    }
    ++w.cta.cluster.machine.progress;
  });
}

// ---------------------------------------------------------------------------------------------------- named barriers
void barrier(Warp& w, Instruction const& i, Lanes mask) {
  int const lane = __builtin_ctz(mask);
  uint32_t const id = w.at<uint32_t>(i.operands[0], lane);
  int const threads = i.count ? int(w.at<uint32_t>(i.operands[1], lane)) : int(w.cta.cluster.machine.threads());
  if (id >= 16) fault("there are 16 barriers, this is number " + std::to_string(id));
  if (threads % 32 || threads <= 0) fault("a barrier of " + std::to_string(threads) + " threads");
  w.cta.arrive(int(id), 32, threads, i.flag ? &w : nullptr);
}

void cluster_arrive(Warp& w, Instruction const&, Lanes mask) {
  w.cluster_phase = w.cta.cluster.phase + 1;
  w.cta.cluster.arrive(__builtin_popcount(mask));
}

void cluster_wait(Warp& w, Instruction const&, Lanes) {
  if (w.cta.cluster.phase >= w.cluster_phase) return;
  w.blocked = true;
  w.cta.cluster.blocked.push_back(&w);
}

void map_to_cta(Warp& w, Instruction const& i, Lanes mask) {  // mapa: the same place of another CTA
  each(mask, [&](int lane) {
    uint64_t const address = i.flag ? w.at<uint64_t>(i.operands[1], lane) : w.at<uint32_t>(i.operands[1], lane);
    uint64_t const offset = address & ((1u << kRankBits) - 1);
    uint64_t const there = offset | uint64_t(w.at<uint32_t>(i.operands[2], lane) + 1) << kRankBits;
    if (i.flag) {
      w.at<uint64_t>(i.operands[0], lane) = there | (address & kSharedWindow);
    } else {
      w.at<uint32_t>(i.operands[0], lane) = uint32_t(there);
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- cp.async
/// Begins a copy that lands when it is drawn, at the latest when `groups` are waited for.
void begin(Warp& w, Groups& groups, Work work) {
  if (w.cta.cluster.machine.draws(3)) {
    work();
  } else {
    groups.open.push_back(std::move(work));
  }
}

void copy_async(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const to = shared_address(w, i, lane);
    uint64_t const from = w.at<uint64_t>(i.operands[1], lane) + i.offset_2;
    unsigned const bytes = i.bytes, there = i.count ? std::min(w.at<uint32_t>(i.operands[2], lane), bytes) : bytes;
    if (there) w.memory(Global, from, there, false);
    if (from % (there ? bytes : 1)) fault("cp.async from an address that is no multiple of its size");
    begin(w, w.copies[lane], [&w, to, from, bytes, there] {
      char* const place = w.memory(Shared, to, bytes, true);
      std::memset(place, 0, bytes);
      if (there) std::memcpy(place, reinterpret_cast<char const*>(from), there);
    });
  });
}

void commit_copies(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) { (i.flag ? w.bulk_copies : w.copies)[lane].commit(); });
}

void wait_for_copies(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    Groups& groups = (i.flag ? w.bulk_copies : w.copies)[lane];
    if (i.count) groups.commit();  // wait_all
    groups.finish(size_t(i.offset));
  });
}

void arrive_after_copies(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const address = shared_address(w, i, lane);
    w.copies[lane].commit();
    w.cta.under_way.push_back([&w, lane, address, counted = bool(i.kind)] {
      w.copies[lane].finish(0);
      if (counted) barrier_at(w.cta, address).arrive(1, 0);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- bulk copies
void check_aligned(uint64_t address, uint64_t bytes, char const* what) {
  if (address % 16 || bytes % 16)
    fault(std::string("a bulk copy whose ") + what + " or size is no multiple of 16 bytes");
}

/// cp.async.bulk of bytes to shared memory, of this CTA or another of the cluster; kind 1: from shared memory.
void bulk_load(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    bool const from_shared = i.kind == 1;
    uint64_t const to = shared_address(w, i, lane),
                   from = (from_shared ? w.at<uint32_t>(i.operands[1], lane) : w.at<uint64_t>(i.operands[1], lane)) +
                          i.offset_2;
    uint32_t const bytes = w.at<uint32_t>(i.operands[2], lane), barrier = w.at<uint32_t>(i.operands[3], lane);
    check_aligned(to, bytes, "destination");
    check_aligned(from, bytes, "source");
    if (!from_shared) w.memory(Global, from, bytes, false);
    w.cta.under_way.push_back([&cta = w.cta, to, from, from_shared, bytes, barrier] {
      char const* const source = from_shared ? cta.async_read(from, bytes) : reinterpret_cast<char const*>(from);
      std::memcpy(cta.async_write(to, bytes), source, bytes);
      barrier_at(cta, barrier).complete(bytes);
    });
  });
}

/// cp.async.bulk and cp.reduce.async.bulk of bytes from shared memory; kind 1 adds floats.
void bulk_store(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const to = w.at<uint64_t>(i.operands[0], lane) + i.offset,
                   from = w.at<uint32_t>(i.operands[1], lane) + i.offset_2;
    uint32_t const bytes = w.at<uint32_t>(i.operands[2], lane);
    check_aligned(to, bytes, "destination");
    check_aligned(from, bytes, "source");
    w.memory(Global, to, bytes, true);
    begin(w, w.bulk_copies[lane], [&w, to, from, bytes, adds = i.kind == 1] {
      char const* const source = w.cta.async_read(from, bytes);
      if (!adds) return void(std::memcpy(reinterpret_cast<char*>(to), source, bytes));
      for (uint32_t n = 0; n < bytes / 4; ++n)
        reinterpret_cast<float*>(to)[n] += reinterpret_cast<float const*>(source)[n];
    });
  });
}

uint64_t swizzled(uint64_t address, int swizzle) {  // CU_TENSOR_MAP_SWIZZLE_*: none, 32, 64, 128 bytes
  return address ^ (address >> 7 & ((1u << swizzle) - 1)) << 4;
}

/// Calls f(global address or null, shared address) for each element of a box.
template <class F>
void of_box(TensorMap const& map, std::array<int32_t, 5> const& at, uint64_t shared, F const& f) {
  int place[5] = {};
  uint64_t linear = shared;
  for (;;) {
    bool inside = true;
    char* global = map.data;
    for (int n = 0; n < map.rank; ++n) {
      int64_t const index = int64_t(at[n]) + int64_t(place[n]) * map.steps[n];
      inside &= index >= 0 && index < int64_t(map.sizes[n]);
      global += index * int64_t(map.strides[n]);
    }
    f(inside ? global : nullptr, swizzled(linear, map.swizzle));
    linear += map.element_bytes;
    int n = 0;
    while (n < map.rank && ++place[n] == map.box[n]) place[n++] = 0;
    if (n == map.rank) return;
  }
}

uint32_t bytes_of_box(TensorMap const& map) {
  uint32_t bytes = map.element_bytes;
  for (int n = 0; n < map.rank; ++n) bytes *= map.box[n];
  return bytes;
}

/// cp.async.bulk.tensor to shared memory, of this CTA or of all whose bits are set. many: the coordinates.
void tensor_load(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const to = shared_address(w, i, lane);
    auto const* const map = reinterpret_cast<TensorMap const*>(w.at<uint64_t>(i.operands[1], lane));
    if (map->magic != TensorMap::kMagic) fault("a tensor map that nobody encoded");
    if (map->rank != i.many.size()) fault("a tensor map of another rank");
    if (to % 128) fault("a box that does not begin at a multiple of 128 bytes");
    std::array<int32_t, 5> at{};
    for (size_t n = 0; n < i.many.size(); ++n) at[n] = w.at<int32_t>(i.many[n], lane);
    uint32_t const barrier = w.at<uint32_t>(i.operands[2], lane);
    uint32_t ctas = i.kind ? w.at<uint32_t>(i.operands[3], lane) & 0xffff : 0;
    auto const land = [map, at, to, barrier](Cta& cta) {
      uint32_t const bytes = bytes_of_box(*map);
      cta.async_write(to, bytes);
      auto const [owner, begin] = cta.cluster.owner(cta, to, bytes);
      of_box(*map, at, begin, [&, shared = owner->shared.data()](char const* from, uint64_t place) {
        if (from && !is_allocated(from, map->element_bytes)) fault("the copy engine reads what no tensor has");
        from ? void(std::memcpy(shared + place, from, map->element_bytes))
             : void(std::memset(shared + place, 0, map->element_bytes));
      });
      barrier_at(cta, barrier).complete(bytes);
    };
    if (!i.kind) w.cta.under_way.push_back([land, &cta = w.cta] { land(cta); });
    for (int rank = 0; ctas; ++rank, ctas >>= 1) {
      if (ctas & 1) w.cta.under_way.push_back([land, &cta = *w.cta.cluster.ctas.at(rank)] { land(cta); });
    }
  });
}

/// cp.async.bulk.tensor from shared memory. many: the coordinates. What lies outside the tensor is left out.
void tensor_store(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    auto const* const map = reinterpret_cast<TensorMap const*>(w.at<uint64_t>(i.operands[0], lane));
    uint64_t const from = w.at<uint32_t>(i.operands[1], lane) + i.offset_2;
    if (map->magic != TensorMap::kMagic) fault("a tensor map that nobody encoded");
    if (map->rank != i.many.size()) fault("a tensor map of another rank");
    if (from % 128) fault("a box that does not begin at a multiple of 128 bytes");
    std::array<int32_t, 5> at{};
    for (size_t n = 0; n < i.many.size(); ++n) at[n] = w.at<int32_t>(i.many[n], lane);
    begin(w, w.bulk_copies[lane], [&cta = w.cta, map, at, from] {
      cta.async_read(from, bytes_of_box(*map));
      auto const [owner, begin] = cta.cluster.owner(cta, from, bytes_of_box(*map));
      of_box(*map, at, begin, [&, shared = owner->shared.data()](char* to, uint64_t place) {
        if (!to) return;
        if (!is_allocated(to, map->element_bytes)) fault("the copy engine writes what no tensor has");
        std::memcpy(to, shared + place, map->element_bytes);
      });
    });
  });
}

/// st.async: numbers to a CTA's shared memory, whose barrier counts their bytes. many: the numbers.
void store_async(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const to = shared_address(w, i, lane);
    uint32_t const barrier = uint32_t(w.at<uint32_t>(i.operands[1], lane) + i.offset_2);
    std::vector<char> data;
    for (uint32_t place : i.many) {
      char const* const value = w.registers.data() + (place & ~1u) + (place & 1 ? 8 : 4) * lane;
      data.insert(data.end(), value, value + i.bytes);
    }
    w.cta.under_way.push_back([&cta = w.cta, to, barrier, data] {
      std::memcpy(cta.async_write(to, unsigned(data.size())), data.data(), data.size());
      barrier_at(cta, barrier).complete(uint32_t(data.size()));
    });
  });
}

// ------------------------------------------------------------------------------------------------------ tensor cores
float number(uint16_t bits, bool is_bfloat) {
  if (is_bfloat) {
    BFloat x;
    x.bits = bits;
    return x;
  }
  Half x;
  x.bits = bits;
  return x;
}

float upper_or_lower(uint32_t both, bool upper, bool is_bfloat) {
  return number(uint16_t(upper ? both >> 16 : both), is_bfloat);
}

/// The 16 x 16 that 4 registers of a warp hold: rows lane / 4 and 8 below, columns 2 (lane % 4) and 8 on.
void rows_of(Warp& w, uint32_t const (&places)[4], bool is_bfloat, float (&a)[16][16]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      uint32_t const both = w.at<uint32_t>(places[r], lane);
      for (int x = 0; x < 2; ++x)
        a[lane / 4 + r % 2 * 8][lane % 4 * 2 + r / 2 * 8 + x] = upper_or_lower(both, x, is_bfloat);
    }
  }
}

/// C (+)= A B of 16 rows and so many columns in eights, C as tensor cores have it: 4 registers a column of eights.
void product(Warp& w, uint32_t const* c_in, uint32_t const* c, float const (&a)[16][16], float const* b, int columns,
             bool adds) {
  std::vector<float> sums(16 * columns, 0.f);
  for (int row = 0; row < 16; ++row) {
    float* const sum = sums.data() + row * columns;
    for (int k = 0; k < 16; ++k) {
      float const x = a[row][k];
      for (int n = 0; n < columns; ++n) sum[n] += x * b[k * columns + n];
    }
  }
  for (int n = 0; n < columns / 8; ++n) {
    for (int x = 0; x < 4; ++x) {
      for (int lane = 0; lane < 32; ++lane) {
        float const old = adds ? w.at<float>(c_in[4 * n + x], lane) : 0.f;
        w.at<float>(c[4 * n + x], lane) = old + sums[(lane / 4 + x / 2 * 8) * columns + 8 * n + lane % 4 * 2 + x % 2];
      }
    }
  }
}

/// many: C (4), A (4), B (2), C before (4); kind 1: bfloat16.
void mma(Warp& w, Instruction const& i, Lanes) {
  float a[16][16], b[16 * 8];
  rows_of(w, reinterpret_cast<uint32_t const(&)[4]>(i.many[4]), i.kind, a);
  for (int lane = 0; lane < 32; ++lane) {
    for (int x = 0; x < 4; ++x) {
      uint32_t const both = w.at<uint32_t>(i.many[8 + x / 2], lane);
      b[(lane % 4 * 2 + x % 2 + x / 2 * 8) * 8 + lane / 4] = upper_or_lower(both, x % 2, i.kind);
    }
  }
  product(w, i.many.data() + 10, i.many.data(), a, b, 8, true);
}

/// What a descriptor says of an operand in shared memory (PTX ISA, "Shared Memory Matrix Layout"): rows or columns
/// swizzled in 128 bytes, or rows in cores of 8 by 16 bytes that are not.
class Operand {
 public:
  Operand(Warp& w, uint64_t descriptor, bool runs_along_rows)
      : warp_(w),
        begin_(uint32_t(descriptor & 0x3fff) << 4),
        leading_(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride_(uint32_t(descriptor >> 32 & 0x3fff) << 4),
        is_swizzled_(descriptor >> 62 == 1),
        runs_along_rows_(runs_along_rows) {
    if (!is_swizzled_ && (descriptor >> 62 != 0 || runs_along_rows))
      fault("a descriptor of a swizzle that is not of 128 bytes");
  }

  /// Element (row, k): rows are those of A, or the columns of B.
  float operator()(int row, int k, bool is_bfloat) const {
    uint32_t const linear = runs_along_rows_ ? row / 64 * leading_ + row % 64 * 2 + k % 8 * 128 + k / 8 * stride_
                            : is_swizzled_   ? row / 8 * stride_ + row % 8 * 128 + k * 2
                                             : row / 8 * stride_ + row % 8 * 16 + k / 8 * leading_ + k % 8 * 2;
    uint64_t const address = is_swizzled_ ? swizzled(begin_ + linear, 3) : begin_ + linear;
    uint32_t const granule = uint32_t(address / 16);
    if (granule != granule_) read(granule);
    uint16_t bits;
    std::memcpy(&bits, warp_.cta.shared.data() + address, 2);
    return number(bits, is_bfloat);
  }
  /// Whether all that has been read was there for WGMMA to see.
  bool is_fenced() const { return is_fenced_; }

 private:
  void read(uint32_t granule) const {
    auto const& [cta, offset] = warp_.cta.cluster.owner(warp_.cta, uint64_t(granule) * 16, 16);
    granule_ = granule;
    is_fenced_ &= cta->is_fenced(granule);
    ++cta->granules[granule].readers;
    ++cta->products;
    warp_.open_products.back().granules.push_back(offset / 16);
  }

  Warp& warp_;
  uint32_t const begin_, leading_, stride_;
  bool const is_swizzled_, runs_along_rows_;
  mutable uint32_t granule_ = ~0u;
  mutable bool is_fenced_ = true;
};

/// many: C; then A where it is in registers (count 1). kind: 1 bfloat16, 2 A runs along its rows, 4 B does.
void wgmma(Warp& w, Instruction const& i, Lanes mask) {
  if (mask != ~Lanes(0)) fault("a WGMMA without all lanes");
  int const columns = i.bytes;
  bool const is_bfloat = i.kind & 1;
  float a[16][16];
  bool is_fenced = true;
  w.open_products.push_back({&i, {}});
  if (i.count) {
    rows_of(w, reinterpret_cast<uint32_t const(&)[4]>(i.many[columns / 2]), is_bfloat, a);
  } else {
    Operand const of_a(w, w.at<uint64_t>(i.operands[0], 0), i.kind & 2);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) a[row][k] = of_a(w.index % 4 * 16 + row, k, is_bfloat);
    }
    is_fenced = of_a.is_fenced();
  }
  Operand const of_b(w, w.at<uint64_t>(i.operands[1], 0), i.kind & 4);
  std::vector<float> b(16 * columns);
  if (i.kind & 4) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < columns; ++n) b[k * columns + n] = of_b(n, k, is_bfloat);
    }
  } else {
    for (int n = 0; n < columns; ++n) {
      for (int k = 0; k < 16; ++k) b[k * columns + n] = of_b(n, k, is_bfloat);
    }
  }
  product(w, i.many.data(), i.many.data(), a, b.data(), columns, w.predicates[i.operands[2]] & 1);
  if (!is_fenced || !of_b.is_fenced()) w.spoil(i);  // reads what was written without fence.proxy.async
}

void commit_products(Warp& w, Instruction const&, Lanes) {
  w.products.push_back(std::move(w.open_products));
  w.open_products.clear();
  ++w.committed;
  ++w.cta.cluster.machine.progress;
}

/// A product is its four warps': it ends for all of them, once all have begun it. Waited for are all but the last
/// `offset`.
void wait_for_products(Warp& w, Instruction const& i, Lanes) {
  uint64_t const ended = w.committed - std::min(uint64_t(i.offset), w.committed);
  auto const* const warpgroup = &w.cta.warps[size_t(w.index / 4 * 4)];
  bool const have_begun = std::all_of(warpgroup, warpgroup + 4, [&](auto& warp) { return warp->committed >= ended; });
  if (have_begun) {
    for (int n = 0; n < 4; ++n) warpgroup[n]->end_products(ended);
  } else {
    w.yielded = true;
    --w.pc;  // asks again
  }
}

/// ldmatrix and stmatrix of matrices of 8 x 8; flag: transposed. many: their registers.
template <bool Stores>
void matrices(Warp& w, Instruction const& i, Lanes mask) {
  if (mask != ~Lanes(0)) fault("ldmatrix without all lanes");
  for (size_t n = 0; n < i.many.size(); ++n) {
    for (int row = 0; row < 8; ++row) {
      int const asker = int(8 * n) + row;
      bool const wide = i.count;
      uint64_t const base = wide ? w.at<uint64_t>(i.operands[0], asker) : w.at<uint32_t>(i.operands[0], asker);
      auto* const numbers = reinterpret_cast<uint16_t*>(w.memory(Shared, (base + i.offset) & 0xffffffff, 16, Stores));
      for (int column = 0; column < 8; ++column) {
        int const lane = i.flag ? column * 4 + row / 2 : row * 4 + column / 2;
        auto* const place = &w.at<uint16_t>(i.many[n], lane) + (i.flag ? row % 2 : column % 2);
        Stores ? void(numbers[column] = *place) : void(*place = numbers[column]);
      }
    }
  }
}

/// movmatrix: a matrix of 8 x 8 in registers, transposed. many: where it goes, and where it is.
void transpose(Warp& w, Instruction const& i, Lanes mask) {
  if (mask != ~Lanes(0)) fault("movmatrix without all lanes");
  uint16_t turned[8][8];
  auto const place = [&](int operand, int row, int column) -> uint16_t& {
    return (&w.at<uint16_t>(i.many[operand], row * 4 + column / 2))[column % 2];
  };
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 8; ++column) turned[column][row] = place(1, row, column);
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 8; ++column) place(0, row, column) = turned[row][column];
}

Words inside(std::string const& operand) {  // of [map, {a, b}]
  Words parts;
  size_t const comma = operand.find(',');
  parts.push_back(operand.substr(1, comma - 1));
  size_t const brace = operand.find('{');
  for (auto const& name : members(operand.substr(brace, operand.rfind('}') + 1 - brace))) parts.push_back(name);
  return parts;
}

}  // namespace

void Mbarrier::init(uint32_t expected) {
  transactions = 0;
  state = expected << 1 | expected << 16 | 1u << 31;
}

void Mbarrier::turn() {
  if ((state >> 1 & 0x7fff) == 0 && transactions == 0) state = ((state & 0xffff0001) ^ 1) | (state >> 16 & 0x7fff) << 1;
}

void Mbarrier::arrive(uint32_t count, int32_t expected_bytes) {
  if (!(state >> 31)) fault("an mbarrier that nobody initialised");
  if ((state >> 1 & 0x7fff) < count) fault("more arrivals at an mbarrier than its phase expects");
  transactions += expected_bytes;
  state -= count << 1;
  turn();
}

void Mbarrier::complete(uint32_t bytes) {
  if (!(state >> 31)) fault("an mbarrier that nobody initialised");
  transactions -= int32_t(bytes);
  turn();
}

bool Mbarrier::has_passed(uint32_t parity) const {
  if (!(state >> 31)) fault("an mbarrier that nobody initialised");
  return (state & 1) != (parity & 1);
}

/// Whether it is one of these.
bool decode_async(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  std::string const& name = op[0];
  auto const word = [&](std::string const& operand) { return reader.value(operand, 4, false).place; };
  auto const address = [&](std::string const& operand, int which, int64_t& offset) {
    read_address(i, operand, which, offset, reader);
  };
  if (name == "mbarrier") {
    bool const tests = op[1] == "try_wait" || op[1] == "test_wait";
    static std::map<std::string, OfBarrier> const kinds{
        {"init", OfBarrier::Init},        {"inval", OfBarrier::Invalidate},     {"arrive", OfBarrier::Arrive},
        {"expect_tx", OfBarrier::Expect}, {"complete_tx", OfBarrier::Complete}, {"try_wait", OfBarrier::Test},
        {"test_wait", OfBarrier::Test}};
    auto const found = kinds.find(op[1]);
    if (found == kinds.end() || (tests && !has(op, "parity"))) return false;
    i.kind = uint8_t(found->second == OfBarrier::Arrive && has(op, "expect_tx") ? OfBarrier::ExpectAndArrive
                                                                                : found->second);
    bool const gives = tests || op[1] == "arrive";
    size_t const first = gives ? 1 : 0;
    address(operands[first], 0, i.offset);
    if (operands.size() > first + 1) i.count = 1, i.operands[1] = word(operands[first + 1]);
    if (tests) i.operands[2] = reader.predicate(operands[0]);
    i.run = of_barrier;
  } else if ((name == "bar" || name == "barrier") && op[1] != "cluster") {
    if (!has(op, "sync") && !has(op, "arrive")) return false;
    i.operands[0] = word(operands[0]);
    if (operands.size() > 1) i.count = 1, i.operands[1] = word(operands[1]);
    i.flag = has(op, "sync");
    i.together = Together::Everyone;
    i.run = barrier;
  } else if (name == "barrier") {
    bool const waits = op[2] == "wait";
    i.together = Together::Everyone;
    i.run = waits ? cluster_wait : cluster_arrive;
  } else if (name == "mapa") {
    i.flag = op.back() == "u64";
    int const bytes = i.flag ? 8 : 4;
    i.operands[0] = reader.value(operands[0], bytes, false).place;
    i.operands[1] = reader.value(operands[1], bytes, false).place;
    i.operands[2] = word(operands[2]);
    i.run = map_to_cta;
  } else if (name == "cp" && op[1] == "async" &&
             (has(op, "commit_group") || has(op, "wait_group") || has(op, "wait_all"))) {
    bool const bulk = has(op, "bulk");
    if (has(op, "commit_group")) {
      i.run = commit_copies;
    } else {
      i.run = wait_for_copies;
      i.count = has(op, "wait_all");
      i.offset = operands.empty() ? 0 : std::atoi(operands[0].c_str());
    }
    i.flag = bulk;
  } else if (name == "cp" && has(op, "mbarrier") && has(op, "arrive")) {
    address(operands[0], 0, i.offset);
    i.kind = has(op, "noinc");
    i.run = arrive_after_copies;
  } else if (name == "cp" && has(op, "tensor")) {
    bool const stores = has(op, "bulk_group");
    if (!has(op, "global") || (!stores && op[5] != "shared::cluster") || has(op, "reduce")) return false;
    if (stores) {
      auto const parts = inside(operands[0]);
      i.operands[0] = reader.value(parts[0], 8, false).place;
      for (size_t n = 1; n < parts.size(); ++n) i.many.push_back(word(parts[n]));
      address(operands[1], 1, i.offset_2);
      i.run = tensor_store;
      return true;
    }
    address(operands[0], 0, i.offset);
    auto const parts = inside(operands[1]);
    i.operands[1] = reader.value(parts[0], 8, false).place;
    for (size_t n = 1; n < parts.size(); ++n) i.many.push_back(word(parts[n]));
    int64_t none;
    address(operands[2], 2, none);
    i.kind = has(op, "multicast::cluster");
    if (i.kind) i.operands[3] = word(operands[3]);
    i.run = tensor_load;
  } else if (name == "cp" && has(op, "bulk")) {
    bool const reduces = op[1] == "reduce", stores = has(op, "bulk_group");
    if (reduces && op.back() != "f32") return false;
    address(operands[0], 0, i.offset);
    address(operands[1], 1, i.offset_2);
    i.operands[2] = word(operands[2]);
    int64_t none;
    if (!stores) address(operands[3], 3, none);
    i.kind = stores ? reduces : has(op, "shared::cta");
    i.run = stores ? bulk_store : bulk_load;
  } else if (name == "cp" && op[1] == "async") {
    address(operands[0], 0, i.offset);
    address(operands[1], 1, i.offset_2);
    i.bytes = uint16_t(std::atoi(operands[2].c_str()));
    bool const sized = operands.size() > 3;
    i.count = sized;
    if (sized) i.operands[2] = word(operands[3]);
    i.run = copy_async;
  } else if (name == "st" && op[1] == "async") {
    address(operands[0], 0, i.offset);
    for (auto const& number : members(operands[1])) {
      Register const found = reader.value(number, 4, true);
      i.many.push_back(found.place | (found.width == Width::Long));
    }
    i.bytes = op.back().find("64") != std::string::npos ? 8 : 4;
    address(operands[2], 1, i.offset_2);
    i.run = store_async;
  } else if (name == "mma" && has(op, "m16n8k16") && op[op.size() - 1] == "f32" && op[op.size() - 4] == "f32") {
    for (int const n : {0, 1, 2, 3}) {
      for (auto const& part : members(operands[n])) i.many.push_back(reader.value(part, 4, true).place);
    }
    i.kind = has(op, "bf16");
    i.together = Together::Everyone;
    i.run = mma;
  } else if (name == "wgmma") {
    i.together = Together::Everyone;
    if (op[1] == "fence") {
      i.run = [](Warp&, Instruction const&, Lanes) {};
    } else if (op[1] == "commit_group") {
      i.run = commit_products;
    } else if (op[1] == "wait_group") {
      i.offset = std::atoi(operands[0].c_str());
      i.run = wait_for_products;
    } else {
      std::string const& shape = op[4];
      if (op[5] != "f32" || shape.substr(shape.rfind('k')) != "k16") return false;
      i.bytes = uint16_t(trailing_number(shape, 'n'));
      for (auto const& part : members(operands[0])) i.many.push_back(reader.value(part, 4, true).place);
      bool const in_registers = operands[1][0] == '{';
      i.count = in_registers;
      if (in_registers) {
        for (auto const& part : members(operands[1])) i.many.push_back(word(part));
      } else {
        i.operands[0] = reader.value(operands[1], 8, false).place;
      }
      i.operands[1] = reader.value(operands[2], 8, false).place;
      i.operands[2] = reader.predicate(operands[3]);
      if (operands[4] != "1" || operands[5] != "1") return false;
      bool const a_along_rows = !in_registers && operands[6] == "1", b_along_rows = operands.back() == "1";
      i.kind = uint8_t(has(op, "bf16") | a_along_rows << 1 | b_along_rows << 2);
      i.run = wgmma;
    }
  } else if (name == "ldmatrix" || name == "stmatrix") {
    bool const loads = name == "ldmatrix";
    address(operands[loads ? 1 : 0], 0, i.offset);
    i.count = i.flag;
    i.flag = has(op, "trans");
    for (auto const& part : members(operands[loads ? 0 : 1])) i.many.push_back(word(part));
    i.together = Together::Everyone;
    i.run = loads ? matrices<false> : matrices<true>;
  } else if (name == "movmatrix") {
    for (int n = 0; n < 2; ++n) i.many.push_back(word(operands[n]));
    i.together = Together::Everyone;
    i.run = transpose;
  } else {
    return false;
  }
  return true;
}

}  // namespace cutlass_ext::emulator

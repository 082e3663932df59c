// See memory.hpp.
#include "memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace cutlass_ext::emulator {
namespace {

constexpr size_t kAlignment = 512;  // of the blocks of PyTorch's allocator; and the gap on either side of ours

struct Piece {
  uintptr_t begin = 0, end = 0;
};

struct Pieces {
  std::shared_mutex mutex;
  std::map<uintptr_t, uintptr_t> end_of;  // by where each begins
  std::atomic<uint64_t> version{1};       // what a thread remembers holds as long as this does
};

Pieces& pieces() {
  static auto& all = *new Pieces;  // tensors may outlive static objects
  return all;
}

}  // namespace

bool is_allocated(void const* begin, size_t bytes) {
  thread_local Piece last;
  thread_local uint64_t version = 0;
  Pieces& all = pieces();
  auto const first = reinterpret_cast<uintptr_t>(begin);
  auto const inside = [&](Piece piece) { return first >= piece.begin && first + bytes <= piece.end; };
  if (version == all.version.load(std::memory_order_acquire) && inside(last)) return true;
  std::shared_lock const lock(all.mutex);
  auto const next = all.end_of.upper_bound(first);
  if (next == all.end_of.begin()) return false;
  auto const found = std::prev(next);
  last = {found->first, found->second};
  version = all.version.load();
  return inside(last);
}

void add_memory(void const* begin, size_t bytes) {
  Pieces& all = pieces();
  std::unique_lock const lock(all.mutex);
  auto const first = reinterpret_cast<uintptr_t>(begin);
  all.end_of[first] = first + bytes;
}

void remove_memory(void const* begin) {
  Pieces& all = pieces();
  std::unique_lock const lock(all.mutex);
  auto const found = all.end_of.find(reinterpret_cast<uintptr_t>(begin));
  if (found == all.end_of.end()) return;
  all.end_of.erase(found);
  ++all.version;
}

Usage& usage() {
  static Usage held{};
  return held;
}

void* allocate(size_t bytes) {
  size_t const rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* const block = static_cast<char*>(std::aligned_alloc(kAlignment, rounded + 2 * kAlignment));
  if (!block) throw std::bad_alloc();
  std::memset(block, 0xFF, rounded + 2 * kAlignment);
  char* const begin = block + kAlignment;
  add_memory(begin, bytes);
  std::unique_lock const lock(pieces().mutex);
  usage().now += bytes;
  usage().most = std::max(usage().most, usage().now);
  return begin;
}

void release(void* begin) {
  {
    std::unique_lock const lock(pieces().mutex);
    auto const first = reinterpret_cast<uintptr_t>(begin);
    usage().now -= pieces().end_of.at(first) - first;
  }
  remove_memory(begin);
  std::free(static_cast<char*>(begin) - kAlignment);
}

}  // namespace cutlass_ext::emulator

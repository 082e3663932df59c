// What runs: warps, CTAs and clusters, their memory and barriers. Used by instructions.cpp, run by machine.cpp.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <random>

#include "memory.hpp"
#include "program.hpp"

namespace cutlass_ext::emulator {

struct Cta;
struct Cluster;
struct Machine;

[[noreturn]] inline void fault(std::string const& what) { throw std::runtime_error(what); }

/// An address of shared memory by whichever CTA of the cluster: its rank and one in front of the offset. 0: its own.
constexpr int kRankBits = 24;
/// Generic addresses of shared memory: what no host pointer begins with.
constexpr uint64_t kSharedWindow = uint64_t(0xF0) << 56;

using Work = std::function<void()>;

/// Copies of a thread's that are waited for in groups.
struct Groups {
  std::vector<Work> open;
  std::deque<std::vector<Work>> closed;

  void commit() { closed.push_back(std::move(open)), open.clear(); }
  /// All groups but the last `left`.
  void finish(size_t left) {
    for (; closed.size() > left; closed.pop_front()) {
      for (Work& work : closed.front()) {
        if (work) work();
      }
    }
  }
};

/// A WGMMA under way.
struct Product {
  Instruction const* instruction;
  std::vector<uint32_t> granules;  // of shared memory, that it reads
};

struct Warp {
  Cta& cta;
  Program const& program;
  std::vector<char> registers;
  std::vector<Lanes> predicates;
  std::vector<char> local;  // of its lanes, one after the other
  int const index;          // in the CTA

  Lanes live = 0;     // lanes that have not left
  Lanes active = 0;   // those that are at `pc` and run
  Lanes waiting = 0;  // those that wait for others of the warp at an instruction
  uint32_t pc = 0;
  uint32_t pcs[32] = {};   // of the others
  uint32_t next_pc = ~0u;  // the least of theirs

  unsigned pace = 1;     // runs in one of so many rounds: others may get far ahead of it
  bool blocked = false;  // at a barrier
  bool yielded = false;  // asked in vain for something that another warp does
  uint64_t fences = 0;   // between its writes to shared memory and the copy engine's or WGMMA's reads
  uint64_t cluster_phase = 0;
  Groups copies[32], bulk_copies[32];
  std::deque<std::vector<Product>> products;  // groups of WGMMAs under way
  std::vector<Product> open_products;
  uint64_t committed = 0;  // groups

  Warp(Cta&, int index, int threads);

  template <class T>
  T& at(uint32_t place, int lane) {
    return *reinterpret_cast<T*>(registers.data() + place + (sizeof(T) == 8 ? 8 : 4) * lane);
  }
  void set(uint32_t predicate, Lanes mask, Lanes values) {
    predicates[predicate] = (predicates[predicate] & ~mask) | (values & mask);
  }
  /// Where an address points to; checked.
  char* memory(uint8_t space, uint64_t address, unsigned bytes, bool writes);
  void run(int instructions);
  /// The groups before number `ended`.
  void end_products(uint64_t ended);
  /// Makes NaN of what a product has given, wherever it has been moved since.
  void spoil(Instruction const& product);

 private:
  void choose(bool at_random);
  Lanes released();
  bool are_together(Instruction const&, Lanes mask);
};

struct Barrier {
  int arrived = 0;
  std::vector<Warp*> blocked;
};

/// 16 bytes of shared memory: what WGMMA and the copy engine may not see, or may still be reading.
struct Granule {
  uint32_t writer = 0;   // a warp's index and one: what it wrote is not fenced off if it has made no fence since
  uint32_t readers = 0;  // products under way
  uint64_t fences = 0;   // of the writer's, when it wrote
};

struct Cta {
  Cluster& cluster;
  int const rank;  // in the cluster
  uint32_t index[3];
  std::vector<char> shared;
  std::vector<Granule> granules;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[16];
  std::vector<Work> under_way;  // copies that land some time
  int products = 0;             // under way

  Cta(Cluster&, int rank, uint32_t linear);
  bool is_done() const;
  /// What the copy engine or a WGMMA reads; what the copy engine writes.
  char* async_read(uint64_t address, unsigned bytes);
  char* async_write(uint64_t address, unsigned bytes);
  bool is_fenced(uint32_t granule) const;
  /// Products under way that read there give NaN.
  void spoil_readers(uint32_t offset, unsigned bytes);
  void arrive(int barrier, int threads, int expected, Warp* blocks);
};

struct Cluster {
  Machine& machine;
  std::vector<std::unique_ptr<Cta>> ctas;
  int arrived = 0;
  uint64_t phase = 0;
  std::vector<Warp*> blocked;

  Cluster(Machine&, uint32_t first_cta);
  /// The CTA that a shared address is of, and the offset in it.
  std::pair<Cta*, uint32_t> owner(Cta& asking, uint64_t address, unsigned bytes);
  void arrive(int threads);
};

/// A launch that runs.
struct Machine {
  Program& program;
  std::array<unsigned, 3> grid, block, cluster;
  uint32_t shared_bytes;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint64_t progress = 0;  // steps that another warp may have waited for
  unsigned landing = 1;   // a copy lands after one of so many turns

  unsigned threads() const { return block[0] * block[1] * block[2]; }
  bool draws(unsigned one_of) { return random() % one_of == 0; }
  void run(unsigned resident);

 private:
  bool land_one();
  [[noreturn]] void report_hang();
};

/// Barriers in shared memory (mbarrier), as this machine keeps their 8 bytes.
struct Mbarrier {
  int32_t transactions;
  uint32_t state;  // phase: 1 bit, pending: 15, expected: 15, valid: 1

  void init(uint32_t expected);
  void arrive(uint32_t count, int32_t expected_bytes);
  void complete(uint32_t bytes);
  bool has_passed(uint32_t parity) const;

 private:
  void turn();
};

}  // namespace cutlass_ext::emulator

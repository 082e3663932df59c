// See machine.hpp.
#include "machine.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>

#include "warp.hpp"

namespace cutlass_ext::emulator {
namespace {

std::string hex(uint64_t x) {
  std::ostringstream text;
  text << "0x" << std::hex << x;
  return text.str();
}

constexpr unsigned kResidentCtas = 8;

uint64_t first_seed() {
  char const* const text = std::getenv("CUTLASS_EXT_EMULATOR_SEED");
  return text ? std::strtoull(text, nullptr, 0) : 1;
}

}  // namespace

// -------------------------------------------------------------------------------------------------------------- warps
Warp::Warp(Cta& of, int i, int threads)
    : cta(of),
      program(of.cluster.machine.program),
      registers(program.register_bytes, char(0x5a)),
      predicates(program.predicates),
      local(size_t(program.local_bytes) * 32),
      index(i) {
  live = active = threads >= 32 ? ~Lanes(0) : (Lanes(1) << threads) - 1;
  Machine const& machine = cta.cluster.machine;
  for (auto const& [place, width, value] : program.constants) {
    for (int lane = 0; lane < 32; ++lane)
      width == Width::Long ? void(at<uint64_t>(place, lane) = value)
                           : void(at<uint32_t>(place, lane) = uint32_t(value));
  }
  for (auto const& [place, offset] : program.locals) {
    for (int lane = 0; lane < 32; ++lane)
      at<uint64_t>(place, lane) =
          reinterpret_cast<uint64_t>(local.data() + size_t(program.local_bytes) * lane + offset);
  }
  for (auto const& [place, name] : program.specials) {
    for (int lane = 0; lane < 32; ++lane) {
      auto const thread = unsigned(index * 32 + lane);
      uint32_t const tid[3] = {thread % machine.block[0], thread / machine.block[0] % machine.block[1],
                               thread / machine.block[0] / machine.block[1]};
      int const axis = name.back() - 'x';
      std::string const of_axis = name.substr(0, name.rfind('.'));
      uint32_t value = 0;
      if (of_axis == "%tid")
        value = tid[axis];
      else if (of_axis == "%ntid")
        value = machine.block[axis];
      else if (of_axis == "%ctaid")
        value = cta.index[axis];
      else if (of_axis == "%nctaid")
        value = machine.grid[axis];
      else if (of_axis == "%cluster_ctaid")
        value = axis ? 0 : uint32_t(cta.rank);
      else if (of_axis == "%cluster_nctaid")
        value = machine.cluster[axis];
      else if (of_axis == "%clusterid")
        value = cta.index[axis] / machine.cluster[axis];
      else if (name == "%cluster_ctarank")
        value = uint32_t(cta.rank);
      else if (name == "%cluster_nctarank")
        value = uint32_t(cta.cluster.ctas.size());
      else if (name == "%laneid")
        value = uint32_t(lane);
      else if (name == "%warpid")
        value = uint32_t(index);
      else if (name == "%smid")
        value = cta.index[0];
      else if (name == "%lanemask_lt")
        value = (Lanes(1) << lane) - 1;
      else if (name == "%lanemask_le")
        value = (Lanes(2) << lane) - 1;
      else if (name == "%lanemask_eq")
        value = Lanes(1) << lane;
      else if (name == "%dynamic_smem_size")
        value = machine.shared_bytes - program.dynamic_shared();
      else if (name != "%clock64" && name != "%clock" && name != "%globaltimer")
        fault("an unknown special register " + name);
      at<uint32_t>(place, lane) = value;
    }
  }
}

char* Warp::memory(uint8_t space, uint64_t address, unsigned bytes, bool writes) {
  if (address % std::min(bytes & -bytes, 16u))
    fault("a misaligned address, " + hex(address) + ", of " + std::to_string(bytes) + " bytes");
  if (space == Shared || (space == Generic && address >> 56 == kSharedWindow >> 56)) {
    auto const [owner, offset] = cta.cluster.owner(cta, address & 0xffffffff, bytes);
    if (writes) {
      if (owner->products) owner->spoil_readers(offset, bytes);
      for (uint32_t granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule) {
        owner->granules[granule].writer = uint32_t(index + 1);
        owner->granules[granule].fences = fences;
      }
    }
    return owner->shared.data() + offset;
  }
  auto* const at = reinterpret_cast<char*>(address);
  if (space == Parameter) return at;
  bool const is_local = at >= local.data() && at + bytes <= local.data() + local.size();
  if (is_local && space != Global) return at;
  auto const& parameters = program.parameter_bytes;
  if (!writes && at >= parameters.data() && at + bytes <= parameters.data() + parameters.size()) return at;
  if (space == Local || !is_allocated(at, bytes))
    fault(std::string(writes ? "writes to" : "reads from") + " an address that no tensor has, " + hex(address) + ", " +
          std::to_string(bytes) + " bytes");
  return at;
}

void Warp::end_products(uint64_t ended) {
  for (; committed - products.size() < ended; products.pop_front()) {
    for (auto const& [instruction, granules] : products.front()) {
      for (uint32_t const granule : granules) --cta.granules[granule].readers;
      cta.products -= int(granules.size());
    }
  }
}

void Warp::spoil(Instruction const& product) {
  std::set<std::string> given;
  for (int n = 0; n < product.bytes / 2; ++n) {
    char* const place = registers.data() + product.many[n];
    std::string const lanes(place, 128);
    if (lanes.substr(4) != lanes.substr(0, 124)) given.insert(lanes);  // what all lanes have may be a constant
    std::memset(place, 0xff, 128);
  }
  for (uint32_t place = 0; place < registers.size(); place += 128) {
    if (given.count({registers.data() + place, 128})) std::memset(registers.data() + place, 0xff, 128);
  }
}

/// Of a warp whose lanes all wait, those at one instruction that need no others: the rest may have left.
Lanes Warp::released() {
  for (Lanes rest = live; rest;) {
    uint32_t const at = pcs[__builtin_ctz(rest)];
    Lanes there = 0;
    for (Lanes lanes = rest; lanes; lanes &= lanes - 1) {
      if (pcs[__builtin_ctz(lanes)] == at) there |= lanes & -lanes;
    }
    if (are_together(program.code[at], there)) return there;
    rest &= ~there;
  }
  fault("lanes of a warp wait for each other");
}

/// Takes up the lanes that are furthest behind, or any.
void Warp::choose(bool at_random) {
  Lanes able = live & ~waiting;
  if (!able) able = released();
  int chosen = __builtin_ctz(able);
  if (at_random) {
    int skip = int(cta.cluster.machine.random() % unsigned(__builtin_popcount(able)));
    Lanes left = able;
    while (skip--) left &= left - 1;
    chosen = __builtin_ctz(left);
  } else {
    for (Lanes rest = able; rest; rest &= rest - 1) {
      if (pcs[__builtin_ctz(rest)] < pcs[chosen]) chosen = __builtin_ctz(rest);
    }
  }
  pc = pcs[chosen];
  active = 0, next_pc = ~0u;
  for (Lanes rest = live; rest; rest &= rest - 1) {
    int const lane = __builtin_ctz(rest);
    if (pcs[lane] == pc) {
      active |= Lanes(1) << lane;
    } else if (able >> lane & 1) {
      next_pc = std::min(next_pc, pcs[lane]);
    } else {
      next_pc = std::min(next_pc, pcs[lane] > pc ? pcs[lane] : ~0u);  // meets those that wait
    }
  }
  waiting &= ~active;
}

bool Warp::are_together(Instruction const& i, Lanes mask) {
  Lanes const wanted = i.together == Together::Everyone ? live
                       : i.together == Together::Named  ? at<uint32_t>(i.operands[5], __builtin_ctz(mask)) & live
                                                        : mask;
  return (wanted & ~mask) == 0;
}

void Warp::run(int instructions) {
  auto const keep = [&] {
    for (Lanes rest = active; rest; rest &= rest - 1) pcs[__builtin_ctz(rest)] = pc;
  };
  yielded = false;
  if (active != live) keep(), choose(cta.cluster.machine.draws(8));
  while (instructions-- > 0) {
    Instruction const& i = program.code[pc];
    Lanes mask = active;
    if (i.guard >= 0) mask &= i.guard_negated ? ~predicates[i.guard] : predicates[i.guard];
    if (i.control == Control::None) {
      if (i.together != Together::Nobody && mask && active != live && !are_together(i, mask)) {
        keep();
        waiting |= active;
        choose(false);
        continue;
      }
      ++pc;
      if (mask) {
        try {
          i.run(*this, i, mask);
        } catch (std::runtime_error const& error) {
          std::ostringstream text;
          text << error.what() << "; kernel " << program.name << ", CTA " << cta.index[0] << ", " << cta.index[1]
               << ", " << cta.index[2] << ", warp " << index << ", lanes " << hex(mask) << ": "
               << program.lines[i.line];
          throw std::runtime_error(text.str());
        }
      }
      if (blocked || yielded) break;
    } else if (i.control == Control::Branch) {
      if (mask == active) {
        pc = i.target;
      } else if (!mask) {
        ++pc;
      } else {
        Lanes const stay = active & ~mask;
        for (Lanes rest = mask; rest; rest &= rest - 1) pcs[__builtin_ctz(rest)] = i.target;
        for (Lanes rest = stay; rest; rest &= rest - 1) pcs[__builtin_ctz(rest)] = pc + 1;
        choose(false);
        continue;
      }
    } else {
      for (Lanes rest = mask; rest; rest &= rest - 1) {
        int const lane = __builtin_ctz(rest);
        for (Groups* const groups : {&copies[lane], &bulk_copies[lane]}) groups->commit(), groups->finish(0);
      }
      live &= ~mask;
      active &= ~mask;
      cta.cluster.machine.progress++;
      if (!live) return;
      if (active) {
        ++pc;
      } else {
        choose(false);
        continue;
      }
    }
    if (pc >= next_pc) keep(), choose(false);
  }
  keep();
}

// --------------------------------------------------------------------------------------------------- CTAs and clusters
Cta::Cta(Cluster& of, int r, uint32_t linear) : cluster(of), rank(r) {
  Machine& machine = cluster.machine;
  index[0] = linear % machine.grid[0];
  index[1] = linear / machine.grid[0] % machine.grid[1];
  index[2] = linear / machine.grid[0] / machine.grid[1];
  shared.resize(machine.shared_bytes + 1024, char(0xff));  // NaN of every dtype
  granules.resize(shared.size() / 16 + 1);
  for (unsigned first = 0; first < machine.threads(); first += 32)
    warps.push_back(std::make_unique<Warp>(*this, int(first / 32), int(machine.threads() - first)));
  unsigned const pace = machine.draws(4) ? 16 : 1;
  for (auto const& warp : warps) warp->pace = pace << 2 * (machine.random() % 3);
}

bool Cta::is_done() const {
  return under_way.empty() && std::all_of(warps.begin(), warps.end(), [](auto const& warp) { return !warp->live; });
}

/// A kernel may compute what it does not use of whatever lies there, so that this is no fault by itself.
void Cta::spoil_readers(uint32_t offset, unsigned bytes) {
  for (uint32_t granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule) {
    if (!granules[granule].readers) continue;
    for (auto const& warp : warps) {
      auto const spoil = [&](std::vector<Product> const& group) {
        for (auto const& [instruction, read] : group) {
          if (std::find(read.begin(), read.end(), granule) != read.end()) warp->spoil(*instruction);
        }
      };
      std::for_each(warp->products.begin(), warp->products.end(), spoil);
      spoil(warp->open_products);
    }
  }
}

bool Cta::is_fenced(uint32_t granule) const {
  Granule const& at = granules[granule];
  return !at.writer || warps[at.writer - 1]->fences > at.fences;
}

char* Cta::async_read(uint64_t address, unsigned bytes) {
  auto const [owner, offset] = cluster.owner(*this, address, bytes);
  for (uint32_t granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule) {
    if (!owner->is_fenced(granule))
      fault("the copy engine reads shared memory at " + hex(offset) + ", which warp " +
            std::to_string(owner->granules[granule].writer - 1) + " wrote without fence.proxy.async");
  }
  return owner->shared.data() + offset;
}

char* Cta::async_write(uint64_t address, unsigned bytes) {
  auto const [owner, offset] = cluster.owner(*this, address, bytes);
  if (owner->products) owner->spoil_readers(offset, bytes);
  for (uint32_t granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule)
    owner->granules[granule].writer = 0;
  return owner->shared.data() + offset;
}

void Cta::arrive(int id, int threads, int expected, Warp* blocks) {
  Barrier& barrier = barriers[id];
  barrier.arrived += threads;
  if (barrier.arrived > expected) fault("more threads at barrier " + std::to_string(id) + " than it expects");
  ++cluster.machine.progress;
  if (barrier.arrived == expected) {
    for (Warp* const warp : barrier.blocked) warp->blocked = false;
    barrier.blocked.clear();
    barrier.arrived = 0;
  } else if (blocks) {
    blocks->blocked = true;
    barrier.blocked.push_back(blocks);
  }
}

Cluster::Cluster(Machine& of, uint32_t first_cta) : machine(of) {
  unsigned const size = machine.cluster[0];
  for (unsigned rank = 0; rank < size; ++rank) ctas.push_back(nullptr);
  for (unsigned rank = 0; rank < size; ++rank) ctas[rank] = std::make_unique<Cta>(*this, int(rank), first_cta + rank);
}

std::pair<Cta*, uint32_t> Cluster::owner(Cta& asking, uint64_t address, unsigned bytes) {
  auto const offset = uint32_t(address & ((1u << kRankBits) - 1));
  auto const rank = address >> kRankBits;
  if (rank > ctas.size()) fault("an address of a CTA that the cluster lacks");
  if (offset + bytes > machine.shared_bytes)
    fault("shared memory at " + hex(offset) + ", where a CTA has " + std::to_string(machine.shared_bytes) + " bytes");
  Cta& owner = rank ? *ctas[rank - 1] : asking;
  return {&owner, offset};
}

void Cluster::arrive(int threads) {
  arrived += threads;
  ++machine.progress;
  if (arrived < int(machine.threads() * ctas.size())) return;
  arrived = 0;
  ++phase;
  for (Warp* const warp : blocked) warp->blocked = false;
  blocked.clear();
}

// ------------------------------------------------------------------------------------------------------------ machine
bool Machine::land_one() {
  std::vector<Cta*> able;
  for (auto const& cluster : clusters) {
    for (auto const& cta : cluster->ctas) {
      if (!cta->under_way.empty()) able.push_back(cta.get());
    }
  }
  if (able.empty()) return false;
  auto& works = able[random() % able.size()]->under_way;
  std::swap(works[random() % works.size()], works.back());
  Work const work = std::move(works.back());
  works.pop_back();
  work();
  ++progress;
  return true;
}

void Machine::report_hang() {
  std::ostringstream text;
  text << "every warp waits: kernel " << program.name;
  for (auto const& cluster : clusters) {
    for (auto const& cta : cluster->ctas) {
      for (auto const& warp : cta->warps) {
        if (!warp->live) continue;
        text << ", CTA " << cta->index[0] << ", " << cta->index[1] << ", " << cta->index[2] << ", warp " << warp->index
             << (warp->blocked ? ", at a barrier: " : ": ")
             << program.lines[program.code[warp->pc - (warp->blocked ? 1 : 0)].line];
      }
    }
  }
  throw std::runtime_error(text.str());
}

void Machine::run(unsigned resident) {
  uint32_t const ctas = grid[0] * grid[1] * grid[2], size = cluster[0];
  uint32_t next = 0;
  std::vector<Warp*> runnable;
  uint64_t seen = 0;
  unsigned in_vain = 0;
  bool all_run = false;
  constexpr int kTurns[] = {8, 50, 400, 2000};        // instructions
  constexpr unsigned kLandings[] = {1, 8, 1u << 12};  // the last: mostly once all warps wait
  landing = kLandings[random() % std::size(kLandings)];
  for (;;) {
    clusters.erase(std::remove_if(clusters.begin(), clusters.end(),
                                  [](auto const& cluster) {
                                    return std::all_of(cluster->ctas.begin(), cluster->ctas.end(),
                                                       [](auto const& cta) { return cta->is_done(); });
                                  }),
                   clusters.end());
    while (next < ctas && clusters.size() * size < std::max(resident, size)) {
      clusters.push_back(std::make_unique<Cluster>(*this, next));
      next += size;
    }
    if (clusters.empty()) return;
    runnable.clear();
    for (auto const& cluster : clusters) {
      for (auto const& cta : cluster->ctas) {
        for (auto const& warp : cta->warps) {
          if (warp->live && !warp->blocked) runnable.push_back(warp.get());
        }
      }
    }
    std::shuffle(runnable.begin(), runnable.end(), random);
    bool computes = false;
    for (Warp* const warp : runnable) {
      if (warp->blocked || !(all_run || draws(warp->pace))) continue;
      warp->run(kTurns[random() % std::size(kTurns)]);
      computes |= !warp->yielded && !warp->blocked;
      if (draws(landing)) land_one();
    }
    bool const idle = progress == seen && !computes;
    if (idle && all_run && !land_one() && ++in_vain > (runnable.empty() ? 5 : 5000)) report_hang();
    all_run = idle;  // before all wait for a copy
    if (!idle) in_vain = 0;
    seen = progress;
  }
}

// -------------------------------------------------------------------------------------------------------------- module
Module::Module(std::string ptx)
    : ptx_(std::move(ptx)), declared_(std::make_unique<Declarations const>(declarations(ptx_))) {
  for (size_t at = ptx_.find(".entry "); at != std::string::npos; at = ptx_.find(".entry ", at + 1)) {
    size_t const begin = at + 7;
    entries_[ptx_.substr(begin, ptx_.find_first_of("(\n ", begin) - begin)] = begin;
  }
  for (auto const& [name, bytes] : declared_->global) {
    auto& memory = variables_[name] = std::make_unique<char[]>(bytes);
    add_memory(memory.get(), bytes);
  }
}

Module::~Module() {
  for (auto const& [name, memory] : variables_) remove_memory(memory.get());
}

int Module::target() const { return std::atoi(ptx_.c_str() + ptx_.find(".target sm_") + 11); }

void Module::zero_variables() {
  for (auto const& [name, bytes] : declared_->global) std::memset(variables_.at(name).get(), 0, bytes);
}

void Module::launch(Launch const& launch) {
  auto& program = programs_[launch.kernel];
  if (!program) program = read_program(launch.kernel, ptx_, entries_.at(launch.kernel), *declared_, variables_);
  for (size_t n = 0; n < program->parameters.size(); ++n)
    std::memcpy(program->parameter_memory() + program->parameters[n].offset, launch.arguments[n],
                program->parameters[n].bytes);
  static uint64_t launches = 0;
  Machine machine{*program,
                  launch.grid,
                  launch.block,
                  launch.cluster,
                  program->dynamic_shared() + launch.dynamic_shared_bytes,
                  std::mt19937_64(first_seed() + ++launches),
                  {},
                  0};
  machine.run(kResidentCtas);
}

}  // namespace cutlass_ext::emulator

// The choice among the kernels of the table, the grid, and the launch with its merge. See plan.hpp; what is faster
// where stands in heuristics.hpp.
#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <sstream>
#include <tuple>
#include <vector>

#include "../fmha/operand_parts.hpp"
#include "align_bias.hpp"
#include "append.hpp"
#include "counters.hpp"
#include "error.hpp"
#include "heuristics.hpp"
#include "kernel_selection.hpp"
#include "merge.hpp"
#include "operand_parts.hpp"
#include "side_stream.hpp"

namespace cutlass_ext {
namespace {

/// So many as the caller fixes, or as the library chooses where that is 0.
void set_splits(int num_splits, Params* p) {
  p->fixed_splits = num_splits > 0;
  p->num_splits = std::max(num_splits, 1);
}

// ------------------------------------------------------------------------------------------------ new keys
bool has_new(Params const& p) { return p.k_new || p.rotary.cos; }

/// `cache_batch_idx` as a table of pages, each a sequence's part of the cache: kernels of query tiles, and those that
/// decode from caches that are read alone, know it so.
Params with_one_page_each(Params p) {
  if (!p.batch_idx) return p;
  p.set_one_page_each(p.batch_idx, p.n_kv);
  p.batch_idx = nullptr;
  return p;
}

/// The call as it is once what is new has been written to the cache.
Params once_appended(Params const& p) { return after_append(with_one_page_each(p), nullptr); }

/// The plan of such a call with the launch before it, which writes what is new to the cache of `p`.
Plan with_append(Plan plan, Params const& p) {
  plan.appends_apart = has_new(p);
  Params all = with_one_page_each(p);
  static_cast<Work&>(all) = plan.params;
  plan.params = all;
  return plan;
}

// ------------------------------------------------------------------------------------------------ few query rows
/// Whether a call of `fmha` with padded queries is faster where it decodes: few rows, unless they have to be read
/// element by element.
bool decodes(Call const& call) {
  return !call.params.packed() && call.params.n_q <= kMaxDecodeRows && !(call.features & feature::UnalignedRows);
}

Plan plan_decode(Call const& call);

/// Decoding by the kernels for caches that are read alone: once a launch before has written to them what is new.
std::optional<Plan> plan_decode_of_appended(Call const& call) {
  Params const& p = call.params;
  bool const may_be_narrow = p.n_q > 0 && !p.fixed_splits && decode::has_narrow_kernels(p) &&
                             int64_t(p.n_q) * p.heads_per_kv.divisor <= decode::kNarrowRows;
  if (!may_be_narrow || (!has_new(p) && !p.batch_idx)) return std::nullopt;
  Params const appended = once_appended(p);
  Plan plan = plan_decode(call.with(appended));
  if (!plan.kernel || plan.kernel->kind == Kind::Decode) return std::nullopt;
  return with_append(std::move(plan), call.params);
}

Plan plan_decode(Call const& call) {
  Plan plan(call.params);
  Params& p = plan.params;
  int64_t const rows = int64_t(p.n_q) * p.heads_per_kv.divisor;
  auto const of = [&](Kind kind) {
    // The smallest tile that holds the rows, else the largest; of two that are alike, Hopper's.
    auto const cost = [&](Kernel const& k) {
      return std::tuple(k.head_dim, k.block_r < rows, k.block_r < rows ? -k.block_r : k.block_r, !wants_hopper(k),
                        count_bits(k.takes));
    };
    return cheapest({kind}, call.request.dtype, [&](Kernel const& k) { return call.runs(k); }, cost);
  };
  if (Kernel const* const kernel = of(Kind::Cluster)) {
    if (int const size = cluster_of(p, occupancy_of(*kernel, call.device))) {
      plan.kernel = kernel;
      plan.splits = size;
      plan.grid = {dim3(size, p.heads_kv, p.batch), unsigned(size)};
      return plan;
    }
  }
  plan.kernel = of(Kind::Narrow);
  if (!plan.kernel) {
    if (std::optional<Plan> appended = plan_decode_of_appended(call)) return std::move(*appended);
    plan.kernel = of(Kind::Decode);
  }
  if (!plan.kernel) return plan;

  Kernel const& kernel = *plan.kernel;
  p.row_tiles = decode::row_tiles_of(p, kernel.block_r);
  int64_t const ctas_a_group = int64_t(p.row_tiles) * p.heads_kv;
  p.groups = decode_groups(p, kernel, call.device, call.ctas_a_multiprocessor(kernel), ctas_a_group);
  int64_t const groups = p.fixed_splits ? int64_t(p.batch) * p.num_splits : p.groups;
  int64_t const ctas = groups * ctas_a_group;
  plan.splits = p.fixed_splits ? p.num_splits : 0;
  plan.partial_rows = decode::partial_rows(p, kernel.block_r);
  plan.floats_a_part = 2;
  plan.counters = plan.partial_rows > 0 ? decode::counters_of(p) : 0;
  plan.grid.ctas = kernel.kind == Kind::Narrow ? dim3(p.heads_kv, p.groups) : dim3(grid_of(ctas, "q"));
  return plan;
}

/// The same of a batch that may have more keys than can be shared out: each sequence then has parts of its own.
Plan plan_decode_of_any_length(Call const& call) {
  if (call.params.fixed_splits || !decode::has_too_many_keys(call.params)) return plan_decode(call);
  Params p = call.params;
  set_splits(decode::parts_of_many_keys(p), &p);
  return plan_decode(call.with(p));
}

// ------------------------------------------------------------------------------------------------ query tiles
/// The launch of a kernel of query tiles: its grid, the order of its work and its splits.
Plan lay_out(Params const& params, Kernel const& kernel, Device const& device) {
  Plan plan(params, &kernel);
  Params& p = plan.params;
  bool const persistent = kernel.kind == Kind::Persistent;
  QueryTiles const tiles(p, kernel);
  p.heads_a_tile = cutlass::FastDivmod(tiles.heads_a_tile);
  if (persistent && p.paged()) {
    // A box that begins in a page of all of a sequence's keys ends there too: past the page it is filled with zeros.
    // Parts lie in such pages, whatever the keys did.
    bool const one_page = p.page_rows.divisor >= p.n_kv || multiplies_parts(kernel);
    p.box_rows = one_page                                ? kernel.block_c
                 : features_of(p) & feature::LeftPadding ? 1
                                                         : std::gcd(p.page_rows.divisor, kernel.block_c);
  }
  if (persistent) {
    p.leads_k = leads_rows(p, p.k_stride, p.head_dim);
    p.leads_v = leads_rows(p, p.v_stride, p.head_dim_v);
  }
  p.resident_ctas = occupancy_of(kernel, device).ctas_a_multiprocessor * device.multiprocessors;
  if (kernel.kind == Kind::Short) {
    plan.grid.ctas = dim3(p.heads_q, tiles.of_a_head(), p.batch);
    return plan;
  }
  if (!p.fixed_splits) {
    p.num_splits = persistent ? choose_splits_of_persistent(p, kernel, tiles, p.resident_ctas)
                              : choose_num_splits(tiles.all, key_tiles(p, kernel), p.resident_ctas);
  }
  p.writes_parts = p.num_splits > 1 || p.widens;
  p.scheduler = Scheduler(p.batch, tiles.heads, tiles.rows, tiles.step, p.num_splits,
                          section_for(p, kernel.block_r, device.l2_bytes));
  int64_t const items = p.scheduler.size();
  if (items > INT32_MAX)
    fail("ValueError", "q: has ", items, " tiles of query rows; a launch has room for fewer than 2^31");
  plan.grid.ctas = dim3(static_cast<unsigned>(persistent ? std::min<int64_t>(items, p.resident_ctas) : items));
  p.dealt_ctas = p.queue_ctas = static_cast<int>(plan.grid.ctas.x);
  plan.counters = persistent ? 2 : 0;
  plan.splits = p.num_splits;
  plan.merges_apart = p.writes_parts;
  plan.partial_rows = plan.merges_apart ? p.num_splits * p.result_rows() : 0;
  plan.floats_a_part = 1;
  return plan;
}

/// Of kernels that differ in the sizes of their tiles alone, the largest first, and behind them what is for some calls
/// alone: the first whose query tiles fill the GPU, else the last; of Hopper's persistent ones, unless the number of
/// splits is fixed, the fastest.
Kernel const* of_best_size(Call const& call, std::vector<Kernel const*> const& sizes) {
  Params const& p = call.params;
  Kernel const* best = nullptr;
  double least = INFINITY;
  for (Kernel const* kernel : sizes) {
    QueryTiles const tiles(p, *kernel);
    int const resident_ctas = call.ctas_a_multiprocessor(*kernel) * call.device.multiprocessors;
    if (kernel->kind == Kind::Persistent && kernel->block_r > 128 && !may_be_tall(p, *kernel)) continue;
    if (kernel->kind == Kind::Persistent && !p.fixed_splits) {
      int const splits = choose_splits_of_persistent(p, *kernel, tiles, resident_ctas);
      double const us = microseconds_of(p, *kernel, tiles, resident_ctas, splits);
      if (us < least) least = us, best = kernel;
      continue;
    }
    // Warps that share keys (simt::FewTiles) are faster in one wave alone: 9.5 us for 12.0 at (8, 59, 16, 64) causal in
    // 256 CTAs, 25.7 for 18.9 at (8, 96, 16, 64) in 384.
    if (kernel->kind == Kind::Tiles && kernel->takes_shape && tiles.all > resident_ctas) continue;
    best = kernel;
    bool const tall = 2 * tiles.rows > kernel->block_r;  // else half of the tile or more would be empty
    // With the number of splits fixed a sequence's bits must not depend on the batch that it comes in: then the choice
    // rests on N_q alone, and on nothing where sequences are packed, since each has an N_q of its own.
    if (p.fixed_splits ? tall || p.packed() : tall && fills(p, kernel->block_r, tiles.all, resident_ctas)) break;
  }
  return best;
}

/// Query tiles: Hopper's short kernels where those are faster, else its persistent ones, else tiles, of float32 in
/// parts first.
Plan plan_prefill(Call const& call) {
  Params const& p = call.params;
  std::string const& backend = call.request.backend;
  Features const beside = call.features & ~feature::Sink;
  constexpr Features kPairsOfShort = feature::Bias | feature::Mask | feature::Dropout;
  bool const may_be_short = (beside & ~kPairsOfShort) == 0 || (beside & ~(feature::kUnlike | feature::Packed)) == 0;
  int const warpgroups = may_be_short ? warpgroups_of_short(p, call.device) : 0;
  // With the number of splits fixed nothing may depend on the batch; few rows that sm80 would have decode.
  bool const could_decode = p.n_q <= kMaxDecodeRows && (call.request.is_cache || !p.packed());
  bool const tiny = backend == "auto" && !p.fixed_splits && !could_decode && is_tiny(p, call.device);
  DType const dtype = call.request.dtype;
  bool const parts_hold = !call.request.is_cache && operand_parts::takes_scale(p);
  auto const accepts = [&](Kernel const& k) {
    if (multiplies_parts(k))
      return parts_hold && call.runs(k) && (asks_for_parts(call.request) || parts_pay(p, k, call.device));
    if (k.kind == Kind::Short) return k.threads / 128 == warpgroups && call.runs(k);
    return !(k.kind == Kind::Persistent && tiny) && call.runs(k);
  };
  Kernel const* best = warpgroups > 0 ? cheapest({Kind::Short}, dtype, accepts, cost_of) : nullptr;
  // Small heads, where no short kernel takes the call. An H200's ms there, in the persistent kernels and in the short
  // ones: (1024, 49, 6, 32) with a bias 0.073, 0.193 and 0.050, with dropout 0.057, 0.205 and 0.045, plain 0.053 and,
  // in the short ones, 0.040.
  if (!best) {
    Kernel const* const of_heads = cheapest({Kind::Heads}, dtype, accepts, cost_of);
    if (of_heads && (backend != "auto" || small_heads_pay(p, call.device))) best = of_heads;
  }
  if (!best) best = cheapest({Kind::Persistent}, dtype, accepts, cost_of);  // Hopper's come first
  auto const accepts_parts = [&](Kernel const& k) { return multiplies_parts(k) && accepts(k); };
  if (!best) best = cheapest({Kind::Tiles}, dtype, accepts_parts, cost_of);
  if (!best) best = cheapest({Kind::Tiles}, dtype, accepts, cost_of);
  if (!best) return Plan(p);

  std::vector<Kernel const*> sizes;
  for (Kernel const* k : kernels_of(best->kind, dtype)) {
    if (cost_of(*k) == cost_of(*best) && accepts(*k)) sizes.push_back(k);
  }
  std::sort(sizes.begin(), sizes.end(), [](Kernel const* a, Kernel const* b) {
    auto const size = [](Kernel const* k) {
      return std::tuple(!k->takes_shape, k->block_r * k->block_c, k->block_c, k->shared_bytes);
    };
    return size(a) > size(b);
  });
  Plan plan = lay_out(p, *of_best_size(call, sizes), call.device);
  if (best->kind != Kind::Tiles || dtype == DType::Float32 || call.device.capability != 90) return plan;
  if (backend != "auto") return plan;
  if (tiny) plan.passed_over = "sm90 would not have its pipeline full before so few scores are done";
  if (call.features & feature::UnalignedRows)
    plan.passed_over = "sm90 wants rows of q, k and v that begin at multiples of 16 bytes";
  return plan;
}

/// The same, and where the kernel multiplies parts the launch that computes what these do not hold.
Plan plan_tiles(Call const& call) {
  Plan plan = plan_prefill(call);
  if (!plan.kernel || !multiplies_parts(*plan.kernel)) return plan;
  Request request = call.request;
  request.backend = "simt";
  request.precision = Precision::Highest;
  plan.out_of_range = std::make_shared<Plan const>(plan_prefill({call.params, request, call.device, call.features}));
  return plan;
}

/// Whether a planned call's query tiles hold the rows of all heads that share a KV head. Those of a single head read
/// the keys for every head, and would have few rows.
bool packs_heads(Plan const& plan) {
  Params const& p = plan.params;
  return plan.kernel && plan.kernel->kind == Kind::Persistent && p.heads_a_tile.divisor == p.heads_per_kv.divisor;
}

/// Whether a kernel is for calls of so few keys that it does not matter that it reads them for every query head.
bool is_for_few_keys(Kernel const& kernel) { return kernel.kind == Kind::Short || kernel.kind == Kind::Heads; }

/// Whether a call has query rows for query tiles; one that could decode, if they pack heads, as Hopper's alone do.
bool is_chunk(Call const& call) {
  Params const& p = call.params;
  if (p.n_q > kMaxDecodeRows) return true;
  bool const may_pack = call.device.capability == 90 && call.request.dtype != DType::Float32;
  return may_pack && p.n_q > few_rows_of(p);
}

/// A chunk of a prompt over its keys: by a prefill kernel, once what is new has been written to the cache.
Plan plan_chunk(Call const& call) {
  Params const appended = once_appended(call.params);
  return with_append(plan_prefill(call.with(appended)), call.params);
}

/// Has a persistent launch leave `taken` multiprocessors to one that decodes beside it, and come to them after that:
/// whichever begins first, both run side by side.
void make_room(Device const& device, int64_t taken, Plan* plan) {
  constexpr int64_t kLeast = 8;  // of the GPU, one part in so many is left, and a multiprocessor of a slice of it
  Params& p = plan->params;
  if (plan->kernel->kind != Kind::Persistent) return;
  int64_t const all = device.multiprocessors, least = std::max<int64_t>(all / kLeast, 1),
                left = std::max(all - taken, least) * p.resident_ctas / all;
  if (p.queue_ctas <= left) return;
  p.dealt_ctas = static_cast<int>(left);
  plan->relief = static_cast<unsigned>(p.queue_ctas - left);
  plan->grid.ctas.x = static_cast<unsigned>(left);
}

/// Packed sequences over pages, of which some may have as few rows as decode, and others more: a launch for each. Only
/// the device knows which have; the host, whether all may be of one kind.
Plan plan_mixed(Call const& call) {
  Params const& p = call.params;
  bool const depends = p.n_q <= kMaxDecodeRows || p.heads_per_kv.divisor > kMaxDecodeRows,
             packs = depends && is_chunk(call) && packs_heads(plan_prefill(call));
  int const few = few_rows_beside(p, packs);
  int most = few;
  if (!p.fixed_splits && !packs && few < p.n_q && p.n_q <= kMaxDecodeRows)
    most = std::max(few, kTallRows / p.heads_per_kv.divisor);
  // All have few rows, but more than decode best. With the number of splits fixed that may not depend on the others.
  if (packs && p.n_q <= few && !p.fixed_splits) return plan_tiles(call);
  bool const all_decode = p.n_q <= most;
  bool const all_have_as_many = p.total_q == int64_t(p.batch) * p.n_q;  // no sequence has more
  Params of_few = p;
  if (!all_decode) of_few.n_q = of_few.most_q = few;
  if (of_few.n_q == 0 || (all_have_as_many && !all_decode)) return plan_tiles(call);
  Plan decoding = plan_decode(call.with(of_few));
  if (!decoding.kernel) return plan_tiles(call);
  if (all_decode) return decoding;
  Params of_many = p;
  of_many.least_q = few + 1;
  Plan plan = plan_tiles(call.with(of_many));
  if (!plan.kernel) return plan;
  if (leaves_no_room(*decoding.kernel)) make_room(call.device, decoding.grid.ctas.x, &plan);
  plan.few = std::make_shared<Plan const>(decoding);
  return plan;
}

/// By whichever of the ways above there is.
Plan plan_of(Call const& call) {
  Params const& p = call.params;
  Request const& request = call.request;
  if (p.packed() && p.paged()) return plan_mixed(call);
  bool const few_rows = decodes(call) && request.precision != Precision::High;
  if (!request.is_cache && !few_rows) return plan_tiles(call);
  if (is_chunk(call)) {
    Plan const chunk = plan_chunk(call);
    if (chunk.kernel && (p.n_q > kMaxDecodeRows || packs_heads(chunk) || is_for_few_keys(*chunk.kernel))) return chunk;
  }
  Plan const decoding = plan_decode_of_any_length(call);
  if (decoding.kernel) return decoding;
  return request.is_cache ? plan_chunk(call) : plan_tiles(call);
}

/// Gives a launch memory for the parts that it writes.
void place_parts(Plan const& plan, Allocate const& allocate, Params* params) {
  if (params->writes_parts && params->num_splits == 1) {  // in float32, where o is to be
    params->o_partial = static_cast<float*>(params->o);
    params->lse_partial = static_cast<float*>(allocate(plan.partial_rows * sizeof(float)));
  } else if (plan.partial_rows > 0) {
    size_t const floats = size_t(plan.partial_rows) * (params->head_dim_v + plan.floats_a_part);
    params->o_partial = static_cast<float*>(allocate(floats * sizeof(float)));
    params->lse_partial = params->o_partial + plan.partial_rows * params->head_dim_v;
  }
}

}  // namespace

Plan plan(Params p, Request const& request) {
  p.heads_per_kv = cutlass::FastDivmod(p.heads_q / p.heads_kv);
  set_splits(request.num_splits, &p);
  Call const call{p, request, current_device(), features_of(p)};
  Plan plan = plan_of(call);
  if (!plan.kernel) {
    bool const decodes = request.is_cache && request.dtype == DType::Float32;
    using Kinds = std::initializer_list<Kind>;
    Params const appended = once_appended(p);
    plan.refusal = refusal_of(decodes ? call : call.with(appended),
                              decodes ? Kinds{Kind::Decode} : Kinds{Kind::Persistent, Kind::Tiles});
  }
  if (p.batch == 0 || (p.n_q == 0 && (p.n_new == 0 || plan.appends_apart))) plan.grid.ctas = dim3(0);
  return plan;
}

Plan plan_with(Kernel const& kernel, Params p) {
  p.heads_per_kv = cutlass::FastDivmod(p.heads_q / p.heads_kv);
  p.fixed_splits = true;
  return lay_out(p, kernel, current_device());
}

Params after_append(Params const& params, void* rotated_q) {
  Params p = params;
  if (p.rotary.cos) {
    int64_t const row = int64_t(p.heads_q) * p.head_dim;
    p.q = rotated_q;
    p.q_stride = {p.n_q * row, row, p.head_dim};
  }
  p.k_new = p.v_new = nullptr;
  p.k_new_stride = p.v_new_stride = {};
  p.rotary = {};
  return p;
}

std::string kernel_name(Kernel const& kernel) {
  return std::string(name_of(kernel.kind)) + (multiplies_parts(kernel) ? "_fp16x2" : "");
}

std::string Plan::reason(Request const& request) const {
  std::ostringstream text;
  text << name_of(kernel->kind) << " kernel, " << name_of(request.dtype) << ", head_dim "
       << std::max(params.head_dim, params.head_dim_v) << " in tiles of B_r " << kernel->block_r << ", B_c "
       << kernel->block_c << ", head_dim " << kernel->head_dim << "; "
       << int64_t(grid.ctas.x) * grid.ctas.y * grid.ctas.z << " CTAs";
  if (relief > 0) text << ", and " << relief << " more once what decodes beside them is done,";
  if (kernel->kind == Kind::Persistent) text << " for " << params.scheduler.size() << " tiles of query rows";
  if (grid.cluster > 1)
    text << " in clusters of " << grid.cluster << " that share the keys of a sequence";
  else if (splits == 0)
    text << ", the keys of the batch shared out among " << params.groups << " groups of them";
  else
    text << ", " << splits << (splits == 1 ? " split" : " splits") << " of the keys";
  if (request.num_splits > 0) text << " as asked";
  if (appends_apart) text << "; a launch of its own before them writes what is new";
  if (few) text << "; sequences of up to " << few->params.most_q << " rows: " << few->reason(request);
  if (out_of_range) {
    text << "; operands in two fp16 parts, made by two launches before; where they do not hold the call: "
         << out_of_range->reason(request);
  }
  if (!passed_over.empty()) text << "; " << passed_over;
  return text.str();
}

void run(Plan const& plan, cudaStream_t stream, Allocate const& allocate) {
  Params params = plan.params;
  if (plan.appends_apart) {
    int64_t const elements =
        params.rotary.cos ? int64_t(params.batch) * params.n_q * params.heads_q * params.head_dim : 0;
    void* const rotated_q = elements > 0 ? allocate(elements * params.element_bytes) : nullptr;
    append_new_keys(plan.kernel->dtype, params, rotated_q, stream);
    params = after_append(params, rotated_q);
  }
  if (plan.grid.ctas.x == 0) return;
  if ((plan.kernel->kind == Kind::Persistent || plan.kernel->kind == Kind::Short) && shares_bias(params))
    static_cast<Pairs&>(params) = align_bias(params, stream, allocate);
  std::optional<Plan> exact;
  if (plan.out_of_range) {
    int const cols = plan.kernel->head_dim, cols_v = plan.kernel->head_dim_v;
    void* const parts = allocate(bytes_of_parts(params, cols, cols_v));
    Params const in_parts = make_parts(params, cols, cols_v, parts, stream);
    exact = *plan.out_of_range;
    static_cast<Results&>(exact->params) = params;
    static_cast<Pairs&>(exact->params) = params;  // a mask has been packed since the plan was made
    exact->params.out_of_range = in_parts.out_of_range;
    exact->params.if_out_of_range = true;
    params = in_parts;
  }
  place_parts(plan, allocate, &params);
  Plan const* const few = plan.few.get();
  std::optional<Params> of_few;
  if (few) {
    of_few = few->params;
    static_cast<Results&>(*of_few) = params;
    place_parts(*few, allocate, &*of_few);
  }
  int const device = current_device().index;
  size_t const counters = plan.counters + (few ? few->counters : 0);
  if (counters > 0) {
    params.counters = zero_counters(device, stream, counters, allocate);
    if (few) of_few->counters = params.counters + plan.counters;
  }
  try {
    std::optional<SideStream> fork;
    if (few) few->kernel->launch(*of_few, few->grid, fork.emplace(device, stream).beside());
    plan.kernel->launch(params, plan.grid, stream);
    if (plan.relief > 0) {
      params.is_relief = true;
      plan.kernel->launch(params, {plan.relief}, fork->beside());
    }
  } catch (...) {  // once what was launched beside has joined the stream
    if (counters > 0) zero_again(params.counters, counters, stream);
    throw;
  }
  if (plan.merges_apart) merge_splits(plan.kernel->dtype, params, stream);
  if (exact) run(*exact, stream, allocate);
}

}  // namespace cutlass_ext

// The choice of the backward kernels, their grids and their launches. See backward.hpp.
#include "backward.hpp"

#include <algorithm>
#include <optional>
#include <tuple>

#include "../fmha/backward/rows_preprocessed.hpp"
#include "../fmha/operand_parts.hpp"
#include "../fmha/pairs.hpp"
#include "align_bias.hpp"
#include "backward_steps.hpp"
#include "error.hpp"
#include "kernel_selection.hpp"
#include "operand_parts.hpp"

namespace cutlass_ext {
namespace {

/// Whether the rows of dout begin at multiples of 16 bytes, as those of q, k and v have to where `UnalignedRows` is not
/// taken.
bool dout_is_aligned(BackwardParams const& p) {
  Params as_q = p;
  as_q.q = p.dout;
  as_q.q_stride = p.dout_stride;
  return rows_are_aligned(as_q);
}

/// Whether rows of dk, dv or dq may lie where no kernel writes: in no sequence, or past its keys.
bool leaves_gaps(Features features) {
  return features & (feature::Packed | feature::KeyLengths | feature::LeftPadding);
}

/// Whether it works out for itself what others are to know of each query row before.
bool preprocesses_itself(Kernel const& kernel) { return kernel.kind == Kind::HeadGradients && !wants_hopper(kernel); }

/// CTAs of a cluster of a launch: as many as a tile has or, where they pass sums on, a head has tiles.
int cluster_of(Kernel const& kernel, Params const& p) {
  return kernel.loop.dq_through_cluster ? std::max(Scheduler::tiles_of(p.n_kv, kernel.block_c), 1)
                                        : kernel.loop.cluster;
}

/// How many of its CTAs the device holds at once; and how many tiles, or heads whose tiles are a cluster's.
int64_t resident_ctas(Kernel const& kernel, Device const& device) {
  return int64_t(occupancy_of(kernel, device).ctas_a_multiprocessor) * device.multiprocessors;
}
int64_t resident_tiles(Kernel const& kernel, Params const& p, Device const& device) {
  int const cluster = cluster_of(kernel, p);
  if (kernel.loop.dq_through_cluster && cluster > 1)
    return cluster > kMostInCluster ? 0 : occupancy_of(kernel, device).clusters[cluster];
  return resident_ctas(kernel, device) / cluster;
}

/// Whether the copy engine can write rows of dQ.
bool takes_rows_of_dq(BackwardParams const& params) {
  Strides const& stride = params.dq_stride;
  return reinterpret_cast<uintptr_t>(params.dq) % 16 == 0 && (stride.batch | stride.row | stride.head) % 8 == 0;
}

/// What a launch may do: have tiles of keys add to dQ in their order, make dQ of its sums, have CTAs share a tile.
struct Allowed {
  bool order = false, postprocess = false, splits = true;
};

/// The launch of a kernel, or of none.
GradientLaunch launch_with(Kernel const* kernel, Params const& p, Device const& device, Allowed const& allowed = {}) {
  GradientLaunch launch;
  launch.kernel = kernel;
  if (!kernel) return launch;
  Kind const kind = kernel->kind;
  bool const of_keys = kind != Kind::QueryGradients;
  int const block = of_keys ? kernel->block_c : kernel->block_r;
  int const heads = of_keys ? p.heads_kv : p.heads_q, length = of_keys ? p.n_kv : p.n_q;
  // What every tile of a head reads: the rows of its query heads and their gradients, or its keys and values; and what
  // it adds to.
  int64_t const rows_a_head = of_keys ? int64_t(p.n_q) * (p.heads_q / p.heads_kv) : p.n_kv;
  int64_t const sums_a_row = kind == Kind::AllGradients ? kernel->head_dim * sizeof(float) : 0;
  int64_t const bytes_a_head = rows_a_head * ((p.head_dim + p.head_dim_v) * p.element_bytes + sums_a_row);
  launch.cluster = cluster_of(*kernel, p);
  int64_t const resident = resident_tiles(*kernel, p, device);
  ChosenSplits chosen;
  if (kernel->loop.splits && allowed.splits)
    chosen =
        gradient_splits(p, *kernel, gradient_costs_of(*kernel, allowed.order), of_keys, static_cast<int>(resident));
  launch.splits = chosen.of_all_tiles;
  int64_t const tiles = Scheduler::tiles_of(length, block);
  launch.is_ordered =
      allowed.order && kernel->loop.in_order && adds_in_order(p, *kernel, launch.splits.all(), resident);
  launch.last_keys_first =
      launch.is_ordered && kernel->loop.any_order && takes_last_keys_first(p, *kernel, resident, device);
  if (kernel->loop.dq_through_cluster) {
    launch.is_mirrored = has_unequal_tiles(p) || !have_one_length(p);
  } else if (!launch.is_ordered) {
    std::optional<GradientSplits> mirrored;
    if (kernel->loop.any_order)
      mirrored = splits_if_mirrored(p, *kernel, launch.splits, bytes_a_head, resident, device);
    launch.is_mirrored = mirrored.has_value();
    launch.splits = mirrored.value_or(chosen.best);
  }
  launch.fuses_postprocess = allowed.postprocess && kernel->loop.fuses_postprocess && !launch.is_mirrored &&
                             !launch.is_ordered && launch.splits.all() == 1 &&
                             fused_postprocess_pays(p, *kernel, device);
  // A CTA, or a cluster, that has all of a head finds its tiles one after the other.
  int64_t const all_heads = int64_t(p.batch) * heads;
  int64_t section = 1;
  if (launch.fuses_postprocess) {
    section = section_of_fused_postprocess(all_heads, tiles, device);
  } else if (launch.is_ordered) {
    section = section_in_order(p, all_heads, tiles * launch.splits.all(), launch.last_keys_first, resident);
  } else if (kind != Kind::HeadGradients && !launch.is_mirrored) {
    section = gradient_section_for(p, wants_hopper(*kernel), all_heads, tiles * launch.splits.all() * launch.cluster,
                                   bytes_a_head, device);
  }
  // Of mirrored tiles the first half is taken, but where a cluster has all of a head.
  int const taken = launch.is_mirrored && !kernel->loop.dq_through_cluster
                        ? ceil_div(Scheduler::tiles_of(length, block), 2) * block
                        : length;
  launch.scheduler = Scheduler(p.batch, heads, taken, block, 1, section, of_keys ? Axis::Keys : Axis::Rows);
  if (launch.scheduler.size() > INT32_MAX)
    fail("ValueError", of_keys ? "k" : "q", ": has ", launch.scheduler.size(),
         " tiles of rows; a launch has room for fewer than 2^31");
  launch.ctas =
      kind == Kind::HeadGradients ? int64_t(p.batch) * heads : launch.shared_tiles().ctas(launch.scheduler.size());
  if (kernel->loop.persistent) launch.ctas = std::min(launch.ctas, resident);
  launch.ctas *= launch.cluster;
  return launch;
}

/// Whether a kernel of tiles of keys may write dBias beside them, which then is dS: where each element is one pair's,
/// and two keys of a row are a word.
bool may_store_dbias(Kernel const& kernel, BackwardParams const& p) {
  Bias const& of = bias_of(p);
  bool const of_one_pair = (of.batch || p.batch == 1) && (of.head || p.heads_q == 1) && of.row;
  return kernel.kind == Kind::AllGradients && (kernel.wants & feature::Bias) && of_one_pair && p.n_kv % 2 == 0 &&
         of.type == (kernel.dtype == DType::Float16 ? BiasType::Float16 : BiasType::BFloat16);
}

/// Whether one tile of keys alone adds to an element of dQ, and no other kernel has fixed bits at less cost, as of 16
/// bits those of whole heads have.
bool adds_once(Kernel const& kernel, Params const& p) {
  return kernel.dtype == DType::Float32 && has_all_keys(p, kernel);
}

Kernel const* kernel_of(Call const& call, Kind kind) {
  bool const in_order = kind == Kind::AllGradients && call.request.deterministic,
             by_mma_sync = have_few_rows_for_hopper(call.params, call.device);
  auto const runs = [&](Kernel const& k) {
    return call.runs(k) && (!in_order || k.loop.in_order || adds_once(k, call.params));
  };
  auto const cost = [&](Kernel const& k) {
    // Of Hopper's the one that takes least time, of CUDA cores' the smallest tile that has all keys.
    double rank = 0;
    if (kind == Kind::AllGradients) {
      rank = wants_hopper(k) ? duration_of_gradients(call.params, k, resident_tiles(k, call.params, call.device))
                             : k.block_c;
    }
    // Of those for whole heads the smallest, then Hopper's, unless rows are too few, then what takes more features: of
    // 64 rows and keys by mma.sync (1024, 49, 6, 32) takes 0.114 ms for 0.202, with dropout 0.119 for 0.225, but of 128
    // (64, 128, 12, 64) 0.069 for 0.055, and 0.077 for 0.063.
    int const held_keys = kind == Kind::HeadGradients ? k.block_c : 0;
    bool const is_second_choice = wants_hopper(k) == by_mma_sync;
    return std::tuple(held_keys, is_second_choice, cost_of(k), rank);
  };
  return cheapest({kind}, call.request.dtype, runs, cost);
}

GradientLaunch launch_of(Call const& call, Kind kind) {
  return launch_with(kernel_of(call, kind), call.params, call.device);
}

/// Whether one launch of `of_all`, which adds to dQ, is faster than two that do not.
bool adds_to_queries(Call const& call, Kernel const& of_all, Precision asked) {
  if (wants_hopper(of_all)) {
    return cutlass_ext::adds_to_queries(call.params, of_all, resident_tiles(of_all, call.params, call.device),
                                        call.request.deterministic);
  }
  if (of_all.dtype == DType::Float32)
    return adds_to_queries_on_cuda_cores(call.params, of_all, asked == Precision::Highest);
  Kernel const* const of_keys = kernel_of(call, Kind::KeyGradients);
  return !(of_keys && wants_hopper(*of_keys)) &&
         adds_to_queries_by_mma_sync(call.params, of_all, resident_ctas(of_all, call.device));
}

/// What Hopper's kernels want of a mask: which tiles it hides, shows or cuts, and its bits from the side of keys.
void prepare_mask(Kernel const& kernel, BackwardParams& params, cudaStream_t stream, Allocate const& allocate) {
  bool const of_keys = kernel.kind != Kind::QueryGradients;
  int const held = of_keys ? kernel.block_c : kernel.block_r, step = of_keys ? kernel.block_r : kernel.block_c;
  if (int64_t const words = TileMap(params, of_keys, held, step).size(params); words > 0) {
    params.tile_map = static_cast<uint32_t*>(allocate(words * sizeof(uint32_t)));
    classify_tiles(params, of_keys, held, step, stream);
  }
  if (int64_t const words = TransposedMask(params).size(params); of_keys && params.mask.row != 0 && words > 0) {
    params.transposed_mask = static_cast<uint32_t*>(allocate(words * sizeof(uint32_t)));
    transpose_mask(params, stream);
  }
}

void launch(GradientLaunch const& gradients, BackwardParams& params, cudaStream_t stream, Allocate const& allocate) {
  params.scheduler = gradients.scheduler;
  params.shared_tiles = gradients.shared_tiles();
  if (params.scheduler.size() == 0) return;
  Kernel const& kernel = *gradients.kernel;
  params.is_mirrored = gradients.is_mirrored;
  params.by_rows = gradients.is_mirrored || gradients.is_ordered;
  params.is_waited_for = gradients.fuses_postprocess || gradients.is_ordered;
  if (gradients.last_keys_first)
    params.last_keys_first = (params.scheduler.sections() - 1) * params.scheduler.items_a_section();
  int const tiles = Scheduler::tiles_of(params.n_kv, kernel.block_c);
  params.mirrored_row0s = ((params.is_mirrored ? 2 * ceil_div(tiles, 2) : tiles) - 1) * kernel.block_c;
  params.rows_a_head = static_cast<int>(StatisticsRows(params).of_a_head);
  if (params.shared_tiles.count > 0) {
    bool const of_keys = kernel.kind != Kind::QueryGradients;
    SplitSums const sums(params, of_keys ? Axis::Keys : Axis::Rows, of_keys ? kernel.block_c : kernel.block_r);
    params.shared_tiles.sums =
        static_cast<float*>(allocate(sums.size(columns_of_splits(kernel, of_keys)) * sizeof(float)));
  }
  if (wants_hopper(kernel) && params.mask.bits) prepare_mask(kernel, params, stream, allocate);
  kernel.launch(params, {dim3(static_cast<unsigned>(gradients.ctas)), gradients.cluster}, stream);
}

/// The two launches of a plan that has as many: dQ first, since that of float32 leaves a better lse.
void launch_both(BackwardPlan const& plan, BackwardParams& params, cudaStream_t stream, Allocate const& allocate) {
  for (GradientLaunch const* gradients : {&plan.of_queries, &plan.of_keys}) {
    launch(*gradients, params, stream, allocate);
    finish_gradients(*gradients->kernel, params, 0, stream);
  }
}

/// Kernels that multiply float32 in parts, where they take the call, and those on CUDA cores for what parts do not
/// hold.
BackwardPlan plan_in_parts(Call const& call) {
  Request request = call.request;
  BackwardPlan plan;
  if (!operand_parts::takes_scale(call.params)) return plan;
  request.precision = Precision::High;
  Call const in_parts{call.params, request, call.device, call.features};
  plan.of_keys = launch_of(in_parts, Kind::KeyGradients);
  if (plan.of_keys.kernel) plan.of_queries = launch_of(in_parts, Kind::QueryGradients);
  if (!plan) return plan;
  request.precision = Precision::Highest;
  request.backend = "simt";
  Call const exact{call.params, request, call.device, call.features};
  Allowed unsplit;  // splits want workspace, and a launch more, of every call that these stand by
  unsplit.splits = false;
  BackwardPlan other;
  other.of_keys = launch_with(kernel_of(exact, Kind::KeyGradients), exact.params, exact.device, unsplit);
  other.of_queries = launch_with(kernel_of(exact, Kind::QueryGradients), exact.params, exact.device, unsplit);
  plan.out_of_range = std::make_shared<BackwardPlan const>(other);
  return plan;
}

}  // namespace

BackwardPlan plan_backward(BackwardParams const& params, Request const& request) {
  Features const features = features_of(params) | (dout_is_aligned(params) ? 0 : feature::UnalignedRows);
  Request on_any = request, on_cuda_cores = request;
  on_any.precision = Precision::Any;
  if (request.dtype == DType::Float32) on_cuda_cores.precision = Precision::Highest;
  Call const any{params, on_any, current_device(), features}, call{params, on_cuda_cores, any.device, features};
  // `High` is a wish here: a forward pass that had it may have gradients that parts are not for.
  if (request.dtype == DType::Float32 && request.precision != Precision::Highest) {
    BackwardPlan const plan = plan_in_parts(call);
    if (plan && (asks_for_parts(request) || parts_pay(params, *plan.of_keys.kernel, any.device))) return plan;
  }
  BackwardPlan plan;
  Kernel const* const of_all = kernel_of(call, Kind::AllGradients);
  if (of_all && adds_to_queries(call, *of_all, request.precision)) {
    GradientLaunch const launch =
        launch_with(of_all, params, any.device, {request.deterministic, takes_rows_of_dq(params)});
    if (!request.deterministic || launch.is_ordered || adds_once(*of_all, params)) plan.of_keys = launch;
  }
  Kernel const* const of_heads = kernel_of(call, Kind::HeadGradients);
  if (of_heads && whole_heads_pay(params, *of_heads, resident_tiles(*of_heads, params, any.device),
                                  resident_ctas(*of_heads, any.device), request.deterministic, plan.of_keys.splits))
    plan.of_keys = launch_with(of_heads, params, any.device);
  if (!plan.of_keys.kernel) {
    plan.of_keys = launch_of(call, Kind::KeyGradients);
    plan.of_queries = launch_of(call, Kind::QueryGradients);
  }
  plan.stores_dbias = plan.of_keys.kernel && may_store_dbias(*plan.of_keys.kernel, params);
  if (has_bias(params) && !plan.stores_dbias) {
    plan.of_bias =
        cheapest({Kind::BiasGradients}, request.dtype, [&](Kernel const& k) { return call.runs(k); }, cost_of);
  }
  if (!plan.of_keys.kernel || !plan)
    plan.refusal = refusal_of(any, {plan.of_keys.kernel ? Kind::QueryGradients : Kind::KeyGradients});
  return plan;
}

BackwardPlan plan_backward_with(Kernel const* of_keys, Kernel const* of_queries, BackwardParams const& params) {
  BackwardPlan plan;
  plan.of_keys = launch_with(of_keys, params, current_device());
  plan.of_queries = launch_with(of_queries, params, current_device());
  return plan;
}

void run_backward(BackwardPlan const& plan, BackwardParams params, cudaStream_t stream, Allocate const& allocate) {
  params.heads_per_kv = cutlass::FastDivmod(params.heads_q / params.heads_kv);
  if (int64_t const rows = StatisticsRows(params).of_a_head; rows > INT32_MAX && wants_hopper(*plan.of_keys.kernel))
    fail("ValueError", "q: takes ", rows, " rows of workspace a head; there is room for fewer than 2^31");
  DType const dtype = plan.of_keys.kernel->dtype;
  // float32 is added up where it goes, other dtypes in workspace.
  bool const adds_in_place = plan.adds_to_queries() && dtype == DType::Float32,
             adds_in_workspace = plan.adds_to_queries() && !adds_in_place;
  if (adds_in_workspace) {  // what the last launch needs is known before the first
    int const tiles = Scheduler::tiles_of(params.n_q, TiledRows::kTile),
              panels = ceil_div(params.head_dim, SumsOfTile::kPanel);
    grid_of(int64_t(params.batch) * params.heads_q * tiles * panels, "q");
  }
  if (wants_hopper(*plan.of_keys.kernel) || (params.dbias && plan.of_bias))
    static_cast<Pairs&>(params) = align_bias(params, stream, allocate);
  if (leaves_gaps(features_of(params))) {
    auto const clear = [&](void* data, int64_t rows, int heads, int cols) {
      size_t const bytes = size_t(rows) * heads * cols * params.element_bytes;
      if (bytes > 0) check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "clearing gradients");
    };
    int64_t const batch = params.stored_batch(), keys = batch * params.stored_keys();
    clear(params.dk, keys, params.heads_kv, params.head_dim);
    clear(params.dv, keys, params.heads_kv, params.head_dim_v);
    if (params.packed()) clear(params.dq, batch * params.stored_rows(), params.heads_q, params.head_dim);
  }
  size_t const rows = StatisticsRows(params).size(params);  // with those that fill up tiles
  auto const place_statistics = [&] {
    if (rows == 0) return;
    params.row_statistics = static_cast<RowStatistics*>(allocate(rows * sizeof(RowStatistics)));
    if (changes_scores(params)) params.empty_rows = static_cast<uint32_t*>(allocate(rows / 8));
  };
  params.stores_dbias = params.dbias && plan.stores_dbias;
  auto const make_dbias = [&] {
    if (!params.dbias) return;
    if (!params.stores_dbias) return compute_dbias(dtype, plan.of_bias, params, stream, allocate);
    size_t const bytes = size_t(params.batch) * params.heads_q * params.n_q * params.n_kv * params.element_bytes;
    if (!sees_all_pairs(params) || has_mask(params))
      check_cuda(cudaMemsetAsync(params.dbias, 0, bytes, stream), "clearing dbias");
  };
  if (preprocesses_itself(*plan.of_keys.kernel)) {
    if (params.dsink || params.dbias) {
      place_statistics();
      compute_row_statistics(dtype, params, 0, nullptr, 0, stream);
      make_dbias();
    }
    return launch(plan.of_keys, params, stream, allocate);
  }
  place_statistics();
  Scheduler const& scheduler = plan.of_keys.scheduler;
  bool const fuses_postprocess = plan.of_keys.fuses_postprocess;
  int64_t const heads_a_section = int64_t(scheduler.pairs_a_section()) * params.heads_per_kv.divisor,
                rows_a_section = heads_a_section * StatisticsRows(params).of_a_head;
  float* to_clear = nullptr;
  size_t cleared = 0;
  if (adds_in_place) {
    if (!params.packed()) {  // else it has been: of rows in no sequence the next launch may have no CTA
      to_clear = static_cast<float*>(params.dq);
      cleared = size_t(params.batch) * params.n_q * params.heads_q * params.head_dim;
    }
  } else if (plan.is_one()) {
    // Cleared together: the sums, how many tiles and jobs have been taken, in four more, and the counts of sections.
    size_t const sums_rows =
        fuses_postprocess ? std::min(kSectionsOfSums, scheduler.sections()) * rows_a_section : rows;
    size_t const sums = adds_in_workspace ? sums_rows * plan.of_keys.kernel->head_dim : 0;
    size_t const counts = fuses_postprocess         ? (scheduler.sections() * sizeof(SectionCounts) + 15) / 16 * 4
                          : plan.of_keys.is_ordered ? (rows / SumsOfTile::kRows + 3) / 4 * 4
                                                    : 0;
    cleared = sums + 4 + counts;
    to_clear = static_cast<float*>(allocate(cleared * sizeof(float)));
    if (adds_in_workspace) params.dq_sums = to_clear;
    params.counters = reinterpret_cast<unsigned*>(to_clear + sums);
    if (plan.of_keys.is_ordered) params.dq_semaphore = params.counters + 4;
    if (fuses_postprocess) {
      params.sections = reinterpret_cast<SectionCounts*>(params.counters + 4);
      auto& jobs = params.section_jobs;
      jobs.of_a_head = Scheduler::tiles_of(params.n_q, TiledRows::kTile);
      jobs.of_a_section = heads_a_section * jobs.of_a_head;
      jobs.size = (scheduler.sections() - 1) * jobs.of_a_section;
    }
  }
  bool const of_first_heads = plan.of_keys.kernel->loop.preprocesses_rows && preprocesses_in_kernel(params);
  if (of_first_heads) params.scheduler = scheduler;
  compute_row_statistics(dtype, params, of_first_heads ? plan.of_keys.ctas : 0, to_clear, cleared, stream);
  make_dbias();
  if (plan.is_one()) {
    launch(plan.of_keys, params, stream, allocate);
    int64_t head0 = 0;
    if (fuses_postprocess) {  // the last section is left
      int const last = scheduler.sections() - 1;
      head0 = last * heads_a_section;
      params.dq_sums += last % kSectionsOfSums * rows_a_section * plan.of_keys.kernel->head_dim;
    }
    return finish_gradients(*plan.of_keys.kernel, params, head0, stream);
  }
  std::optional<BackwardParams> exact;
  if (plan.out_of_range) {
    int const cols = plan.of_keys.kernel->head_dim, cols_v = plan.of_keys.kernel->head_dim_v;
    exact = params;
    params = make_parts(params, cols, cols_v, allocate(bytes_of_parts(params, cols, cols_v)), stream);
    exact->out_of_range = params.out_of_range;
    exact->if_out_of_range = true;
  }
  launch_both(plan, params, stream, allocate);
  if (exact) launch_both(*plan.out_of_range, *exact, stream, allocate);
}

}  // namespace cutlass_ext

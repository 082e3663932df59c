// Merges the splits of prefill kernels in a launch of its own. Instantiated by kernels/merge.cu.
#pragma once

#include "merge.hpp"
#include "sequence.hpp"

namespace cutlass_ext {

/// Warps of a CTA, and CTAs of a multiprocessor: with registers for more of these ptxas puts loads behind the use of
/// others. Columns that a warp has of a row.
constexpr int kMergeWarps = 4, kMergeCtas = 8, kMergeColumns = 32 * 4;

/// Every so many splits of a row are summed up together, in their order, and then these sums in theirs: so several
/// warps may share a row and leave the same bits. As many splits of a warp are under way at a time.
constexpr int kMergeSums = 4;

/// Which rows a CTA has. A lane has four columns; of narrow heads a warp has several rows.
struct MergedRows {
  int rows;       // of a head, of all sequences if they are packed
  int log_warps;  // 2^log_warps share a row, 2^log_lanes of each
  int log_lanes;
  cutlass::FastDivmod ctas_a_head, heads;

  MergedRows(Params const& params, int log_warps)
      : rows(params.stored_rows()),
        log_warps(log_warps),
        log_lanes(params.head_dim_v <= 32   ? 3
                  : params.head_dim_v <= 64 ? 4
                                            : 5),
        ctas_a_head(rows > 0 ? (rows - 1) / of_cta() + 1 : 1),
        heads(params.heads_q) {}

  CUTE_HOST_DEVICE int of_warp() const { return 32 >> log_lanes; }
  CUTE_HOST_DEVICE int of_cta() const { return kMergeWarps * 32 >> (log_warps + log_lanes); }
};

/// Four columns of a row's O over some keys, relative to the row's maximum there.
struct ColumnsOfRow {
  Part row;
  float o[4] = {};

  /// Lets in more keys of the row.
  CUTE_DEVICE void add(Part const& part, float const (&columns)[4]) {
    float const before = row.m;
    row.m = fmaxf(row.m, part.m);
    float const base = base_of(row.m), weight = weight_of(part, base);
    rescale(exp2_approx(before - base));
    row.l = fmaf(weight, part.l, row.l);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) o[j] = fmaf(weight, columns[j], o[j]);
  }
  CUTE_DEVICE void rescale(float factor) {
    row.l *= factor;
    CUTE_UNROLL
    for (float& x : o) x *= factor;
  }
};

/// A warp's splits of a row: where the next one lies, and how far apart they are.
struct SplitsOfRow {
  float const* lse;
  float const* o;
  int64_t lse_step, o_step;

  /// Adds the next `Count` splits, each to the next of `sums`, or all to the only one.
  template <int Count, int Sums>
  CUTE_DEVICE void add_to(ColumnsOfRow (&sums)[Sums]) {
    float lses[Count];
    float4 columns[Count];
    CUTE_UNROLL
    for (int i = 0; i < Count; ++i) {
      lses[i] = *lse, columns[i] = *reinterpret_cast<float4 const*>(o);
      lse += lse_step, o += o_step;
    }
    CUTE_UNROLL
    for (int i = 0; i < Count; ++i)
      sums[i % Sums].add({lses[i], 1.f}, {columns[i].x, columns[i].y, columns[i].z, columns[i].w});
  }
};

/// Four numbers to memory: by one store where they are aligned for it, which strides of o need not leave them.
template <class Element>
CUTE_DEVICE void store_columns(Element* to, float const (&x)[4]) {
  struct alignas(4 * sizeof(Element)) Vector {
    Element elements[4];
  } const rounded{{Element(x[0]), Element(x[1]), Element(x[2]), Element(x[3])}};
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0) {
    *reinterpret_cast<Vector*>(to) = rounded;
  } else {
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) to[j] = rounded.elements[j];
  }
}

/// Merges the splits of each query row and lets the sink in, a row by `Warps`. The bits depend on the number of splits
/// alone. Launched after a kernel that wrote parts. One part alone, in float32, lies where o does, and rows stay
/// as they are that nothing changes.
template <class Element, int Warps>
__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtas)
    merge_splits_kernel(__grid_constant__ Params const params, __grid_constant__ MergedRows const merged) {
  static_assert(Warps == 1 || Warps == kMergeSums);
  int batch_head, cta, b, head;
  merged.ctas_a_head(batch_head, cta, static_cast<int>(blockIdx.x));
  merged.heads(b, head, batch_head);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % Warps,
            row0 = cta * merged.of_cta() + warp / Warps * merged.of_warp(), row = row0 + (lane >> merged.log_lanes);
  bool exists = row < merged.rows && !params.is_skipped();
  if (params.packed()) {
    CUTE_NO_UNROLL
    for (int i = 0; i < merged.of_warp(); ++i) {
      bool const is_computed_too = is_computed(params, row0 + i);
      if (row == row0 + i) exists = exists && is_computed_too;
    }
  }
  // Lanes without a row, or without columns, read what another lane of the warp does: loads without a condition are all
  // under way at once. Where no lane has a row, none has of the warps that share these.
  unsigned const existing = __ballot_sync(0xffffffffu, exists);
  if (existing == 0) return;
  int const read_row = __shfl_sync(0xffffffffu, row, exists ? lane : __ffs(existing) - 1);
  float const sink_log2 = params.sink_of(head) * kLog2e;  // asked for first, not to come behind the parts
  int const columns = params.head_dim_v, col = blockIdx.y * kMergeColumns + (lane & ((1 << merged.log_lanes) - 1)) * 4;
  int64_t const first = int64_t(batch_head) * merged.rows, rows = params.result_rows();  // as lse is laid out
  int64_t const read = share * rows + first + read_row;
  SplitsOfRow of_warp{params.lse_partial + read, params.o_partial + read * columns + min(col, columns - 4),
                      Warps * rows, Warps * rows * columns};
  ColumnsOfRow sums[kMergeSums / Warps];
  int left = (params.num_splits - share + Warps - 1) / Warps;
  CUTE_NO_UNROLL
  for (; left >= kMergeSums; left -= kMergeSums) of_warp.add_to<kMergeSums>(sums);
  static_assert(kMergeSums == 4);
  if (left == 3) of_warp.add_to<3>(sums);
  if (left == 2) of_warp.add_to<2>(sums);
  if (left == 1) of_warp.add_to<1>(sums);
  ColumnsOfRow all = sums[0];
  if constexpr (Warps == 1) {
    CUTE_UNROLL
    for (int i = 1; i < kMergeSums; ++i) all.add(sums[i].row, sums[i].o);
  } else {
    __shared__ float2 rows_of[kMergeWarps][32];
    __shared__ float4 columns_of[kMergeWarps][32];
    rows_of[warp][lane] = make_float2(all.row.m, all.row.l);
    columns_of[warp][lane] = make_float4(all.o[0], all.o[1], all.o[2], all.o[3]);
    __syncthreads();
    if (share > 0) return;
    CUTE_UNROLL
    for (int i = 1; i < Warps; ++i) {
      float2 const other = rows_of[warp + i][lane];
      float4 const o = columns_of[warp + i][lane];
      all.add({other.x, other.y}, {o.x, o.y, o.z, o.w});
    }
  }
  if (!exists) return;
  Finish const finished = finish<Element>(all.row, sink_log2);
  if (col == 0 && params.lse) params.lse[first + row] = finished.lse();
  bool const stays = params.o_partial == params.o && finished.factor == 1.f;
  if (col >= columns || stays) return;
  all.rescale(finished.factor);
  store_columns(static_cast<Element*>(params.o) + b * params.o_stride.batch + row * params.o_stride.row +
                    head * params.o_stride.head + col,
                all.o);
}

}  // namespace cutlass_ext

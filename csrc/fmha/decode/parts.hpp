// The parts of a sequence's rows, of warps in shared memory and of CTAs in the workspace: adding them up, finding out
// which CTA is the last, writing results. Called by the decode kernels.
#pragma once

#include <cuda_runtime.h>

#include "../merge.hpp"
#include "../operand.hpp"
#include "../pack_gqa.hpp"
#include "params.hpp"

namespace cutlass_ext::decode {

CUTE_DEVICE float4 fma(float4 const& x, float f, float4 const& sum) {
  return make_float4(fmaf(x.x, f, sum.x), fmaf(x.y, f, sum.y), fmaf(x.z, f, sum.z), fmaf(x.w, f, sum.w));
}

/// Four columns of a row of O over some keys, relative to the row's maximum there, and the row's (m, l). `unit` i of a
/// row are its columns from 4i on.
struct UnitPart {
  float4 o{};
  Part row;
};

CUTE_DEVICE Part part_of(float2 const& ml) { return {ml.x, ml.y}; }

/// The first `count` of at most `Most` parts as one, in their order: `ml(i)` and `o(i)` of part i.
template <int Most, class Ml, class O>
CUTE_DEVICE UnitPart merge_units(int count, Ml const& ml, O const& o) {
  Part parts[Most];
  float weights[Most];
  CUTE_UNROLL
  for (int i = 0; i < Most; ++i) {
    if (i < count) parts[i] = part_of(ml(i));
  }
  UnitPart all;
  all.row = merge(parts, weights);
  CUTE_UNROLL
  for (int i = 0; i < Most; ++i) {
    if (i < count) all.o = fma(o(i), weights[i], all.o);
  }
  return all;
}

/// Whether o is float32 whatever the inputs are; of parameters that do not say so it is not.
CUTE_DEVICE bool widens(Params const& params) { return params.widens; }
template <class P>
CUTE_DEVICE bool widens(P const&) {
  return false;
}

/// Writes a unit of a row of a sequence, normalised, and with unit 0 the row's lse if it was asked for.
template <class Element, class P>
CUTE_DEVICE void write_unit(P const& params, QueryRows const& rows, PackedRow const& row, int unit, float4 const& o,
                            Finish const& finished) {
  float const f = finished.factor;
  auto const write = [&](auto type, auto const& x) {
    using T = decltype(type);
    T* const to = row_at<T>(params.o, params.o_stride, rows.batch, rows.row0 + row.token, row.head);
    reinterpret_cast<std::decay_t<decltype(x)>*>(to)[unit] = x;
  };
  if (sizeof(Element) == 4 || widens(params)) {
    write(float{}, make_float4(o.x * f, o.y * f, o.z * f, o.w * f));
  } else if constexpr (sizeof(Element) == 2) {
    write(Element{}, make_uint2(pack<Element>(o.x * f, o.y * f), pack<Element>(o.z * f, o.w * f)));
  }
  if (unit == 0 && params.lse) params.lse[row.result(params, rows)] = finished.lse();
}

/// Where the parts of a sequence lie in the workspace: of each CTA `of_cta` partial results of `rows` rows, of those
/// `units` float4 of O, and (m, l). The CTAs of successive parts lie `ctas` apart.
struct Partials {
  float4* o;
  float2* ml;
  int64_t row0, row1, step;  // of part 0, of part 1, and from there on from part to part
  int units;

  template <class P>
  CUTE_DEVICE Partials(P const& params, int64_t first_cta, int ctas, int of_cta, bool begins_inside, int rows,
                       int units)
      : o(reinterpret_cast<float4*>(params.o_partial)),
        ml(reinterpret_cast<float2*>(params.lse_partial)),
        row0((first_cta * of_cta + begins_inside) * rows),
        row1((first_cta + ctas) * of_cta * rows),
        step(int64_t(ctas) * of_cta * rows),
        units(units) {}

  /// What part `part` has of row `row`.
  CUTE_DEVICE int64_t row_of(unsigned part, int row) const {
    return (part == 0 ? row0 : row1 + int64_t(part - 1) * step) + row;
  }
  CUTE_DEVICE void put(unsigned part, int row, int unit, UnitPart const& x) const {
    int64_t const at = row_of(part, row);
    o[at * units + unit] = x.o;
    if (unit == 0) ml[at] = make_float2(x.row.m, x.row.l);
  }
};

/// Merges `count` parts of `rows` rows in their order, a warp a row: `write(row, unit, x)` takes the whole of each. A
/// round of parts is under way before the first is waited for: one load after the other took 8 us for 33 parts on an
/// H200.
template <int Warps, class Write>
CUTE_DEVICE void merge_partials(Partials const& partials, unsigned count, int rows, Write const& write) {
  constexpr unsigned Round = 16;
  int const lane = threadIdx.x % 32, units = partials.units;
  for (int row = threadIdx.x / 32; row < rows; row += Warps) {
    auto const part_at = [&](unsigned part) {
      return part < count ? part_of(__ldcg(partials.ml + partials.row_of(part, row))) : Part{};
    };
    CUTE_NO_UNROLL
    for (int unit0 = 0; unit0 < units; unit0 += 32) {
      int const unit = unit0 + lane, read = min(unit, units - 1);
      float4 const *from = partials.o + partials.row_of(0, row) * units + read,
                   *next = partials.o + partials.row_of(1, row) * units + read;
      Part of_lane = part_at(lane);
      float weight = 0.f;
      UnitPart all;
      CUTE_NO_UNROLL
      for (unsigned part0 = 0; part0 < count; part0 += Round) {
        float4 x[Round];
        CUTE_UNROLL
        for (unsigned i = 0; i < Round; ++i) {
          x[i] = part0 + i < count ? __ldcg(from) : make_float4(0.f, 0.f, 0.f, 0.f);
          from = next;
          next += partials.step * units;
        }
        if (part0 == 0) {
          all.row.m = of_lane.m;
          for (unsigned part = 32 + lane; part < count; part += 32) all.row.m = fmaxf(all.row.m, part_at(part).m);
          all.row.m = warp_max<32, 1>(all.row.m);
        }
        if (part0 % 32 == 0) {
          if (part0 > 0) of_lane = part_at(part0 + lane);
          weight = weight_of(of_lane, base_of(all.row.m));
          all.row.l = fmaf(of_lane.l, weight, all.row.l);
        }
        CUTE_UNROLL
        for (unsigned i = 0; i < Round; ++i)
          all.o = fma(x[i], __shfl_sync(0xffffffffu, weight, (part0 + i) % 32), all.o);
      }
      all.row.l = warp_sum<32, 1>(all.row.l);
      if (unit < units) write(row, unit, all);
    }
  }
}

/// Whether the calling CTA is the last of `parts` to count at `counter`, which goes around to 0: it sees what the
/// others have written to the workspace. All its threads call; `is_last` lies in shared memory.
CUTE_DEVICE bool is_last_of(unsigned parts, unsigned* counter, bool& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(parts - 1)
                 : "memory");
    is_last = before == parts - 1;
  }
  __syncthreads();
  return is_last;
}

/// Ends part `part` of a sequence's `parts`: of the only one `write(row, unit, x)` takes every unit, `sum(row, unit)`;
/// of several they go to the workspace, and the last CTA to finish, by `counter`, merges all and has them written. All
/// threads call.
template <int Warps, int Units, class Sum, class Write>
CUTE_DEVICE void end_part(Partials const& partials, unsigned part, unsigned parts, unsigned* counter, bool& is_last,
                          int rows, Sum const& sum, Write const& write) {
  CUTE_NO_UNROLL
  for (unsigned index = threadIdx.x; index < rows * Units; index += 32 * Warps) {
    int const row = index / Units, unit = index % Units;
    if (unit >= partials.units) continue;
    UnitPart const x = sum(row, unit);
    if (parts == 1) {
      write(row, unit, x);
    } else {
      partials.put(part, row, unit, x);
    }
  }
  if (parts > 1 && is_last_of(parts, counter, is_last)) merge_partials<Warps>(partials, parts, rows, write);
}

}  // namespace cutlass_ext::decode

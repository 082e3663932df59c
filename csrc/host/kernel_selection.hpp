// How a kernel is chosen of the table: which ones run a call, the cheapest of them, and what is said where there is
// none. Used by plan.cpp and backward.cpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <sstream>
#include <string>
#include <tuple>

#include "../fmha/score.hpp"
#include "plan.hpp"

namespace cutlass_ext {

/// Whether a kernel multiplies float32 on tensor cores, in parts of 16 bits (fmha/operand_parts.hpp).
inline bool multiplies_parts(Kernel const& kernel) {
  return kernel.dtype == DType::Float32 && std::strcmp(kernel.family, "simt") != 0;
}

/// Whether a call of float32 asks for them, by its precision or by families that multiply it in no other way.
inline bool asks_for_parts(Request const& request) {
  return request.precision == Precision::High || request.backend == "sm90" || request.backend == "sm80";
}

/// A call on its way to a plan.
struct Call {
  Params const& params;
  Request const& request;
  Device const& device;
  Features features;

  /// The same of parameters that differ.
  Call with(Params const& other) const { return {other, request, device, features_of(other)}; }

  bool may_use(Kernel const& kernel) const {
    if (kernel.dtype == DType::Float32 &&
        request.precision == (multiplies_parts(kernel) ? Precision::Highest : Precision::High))
      return false;
    return (request.backend == "auto" || request.backend == kernel.family) && runs_on(kernel, device);
  }
  bool runs(Kernel const& kernel) const {
    return may_use(kernel) && kernel.takes_sizes(params) && kernel.takes_features(features);
  }

  int ctas_a_multiprocessor(Kernel const& kernel) const { return occupancy_of(kernel, device).ctas_a_multiprocessor; }
};

inline int count_bits(Features features) {
  int bits = 0;
  for (; features; features &= features - 1) ++bits;
  return bits;
}

/// Smaller tiles of head_dim come first, then kernels without what the call does not need.
inline std::tuple<int, int> cost_of(Kernel const& kernel) {
  return {kernel.head_dim + kernel.head_dim_v, count_bits(kernel.takes)};
}

/// Of the kernels of `kinds` that `accepts`, the one of the least `cost`.
template <class Accepts, class Cost>
Kernel const* cheapest(std::initializer_list<Kind> kinds, DType dtype, Accepts const& accepts, Cost const& cost) {
  Kernel const* best = nullptr;
  for (Kind const kind : kinds) {
    for (Kernel const* kernel : kernels_of(kind, dtype)) {
      if (accepts(*kernel) && (!best || cost(*kernel) < cost(*best))) best = kernel;
    }
  }
  return best;
}

/// Of the features of a call whose sizes a kernel does not take the first without which it would; 0: none.
inline Features feature_that_keeps(Kernel const& kernel, Call const& call) {
  for (Features rest = call.features; rest; rest &= rest - 1) {
    Features const bit = rest & ~(rest - 1);
    if (kernel.takes_sizes(without(call.params, bit))) return bit;
  }
  return 0;
}

/// What keeps every kernel from the call: the head dims, or the argument that the nearest one does not take.
inline std::string refusal_of(Call const& call, std::initializer_list<Kind> kinds) {
  auto const missing = [&](Kernel const& k) { return call.features & ~k.takes; };
  auto const holds = [&](Kernel const& k) {
    return call.may_use(k) && k.is_for(call.features) && call.params.head_dim <= k.head_dim &&
           call.params.head_dim_v <= k.head_dim_v;
  };
  auto const cost = [&](Kernel const& k) { return std::tuple(!k.takes_sizes(call.params), count_bits(missing(k))); };
  bool const high = call.request.precision == Precision::High;
  Kernel const* const nearest = cheapest(kinds, call.request.dtype, holds, cost);
  std::string const where = call.request.backend == "auto" ? "" : " of backend \"" + call.request.backend + "\"";
  constexpr char kFactor[] = "a factor of scores so large or so small";  // operand_parts::takes_scale
  std::ostringstream text;
  if (high && !nearest) {
    text << "precision: no kernel" << where << " for this GPU computes float32 with head_dim "
         << std::max(call.params.head_dim, call.params.head_dim_v) << " on tensor cores";
  } else if (high) {
    text << "precision: no kernel" << where << " of tensor cores takes float32 together with "
         << (missing(*nearest) ? argument_of(missing(*nearest)) : kFactor);
  } else if (!nearest) {
    text << "q: no kernel" << where << " for this GPU takes " << name_of(call.request.dtype) << " with head_dim "
         << std::max(call.params.head_dim, call.params.head_dim_v);
  } else if (missing(*nearest) & feature::UnalignedRows) {
    text << "q, k, v: no kernel" << where << " takes rows that do not begin at multiples of 16 bytes; copy them with "
         << ".contiguous()";
  } else if (Features const kept_by = missing(*nearest) | feature_that_keeps(*nearest, call); kept_by != 0) {
    text << argument_of(missing(*nearest) ? missing(*nearest) : kept_by) << ": no kernel" << where
         << " takes it together with what else is asked";
  } else if (multiplies_parts(*nearest)) {
    text << ScoreMod::argument_of_scale(call.params) << ": no kernel" << where << " takes float32 together with "
         << kFactor;
  } else {
    text << "backend: no kernel" << where << " is for a call of these sizes";
  }
  if (high) {
    text << "; use precision=None or \"highest\"";
    return text.str();
  }
  text << "; use backend=\"" << (call.request.backend == "auto" ? "torch\"" : "auto\" or \"torch\"");
  return text.str();
}

}  // namespace cutlass_ext

// Describes one instantiation of a kernel to the table, with its launch. Included by kernels/*.cu, each of which names
// its tiles.
#pragma once

#include <type_traits>

#include <cutlass/numeric_types.h>

#include "../fmha/backward/params.hpp"
#include "../host/error.hpp"
#include "../host/kernel_table.hpp"

namespace cutlass_ext {

template <class Element>
constexpr DType dtype_of = std::is_same_v<Element, float>             ? DType::Float32
                           : std::is_same_v<Element, cutlass::half_t> ? DType::Float16
                                                                      : DType::BFloat16;

/// What a kernel is given of a call, for each type of parameter that there is: made from Params, unless a
/// specialisation says how.
template <class Parameter, class Traits>
struct Argument {
  static Parameter of(Params const& params) { return Parameter(params); }
};

template <class Traits>
struct Argument<BackwardParams, Traits> {
  static BackwardParams const& of(Params const& params) { return static_cast<BackwardParams const&>(params); }
};

/// The one launch. A kernel's parameters say by their types what it is given.
template <class Traits, int SharedBytes, class... Parameters>
void launch(void (*kernel)(Parameters...), Params const& params, Grid const& grid, cudaStream_t stream, bool waits) {
  LaunchConfig const launch(grid, Traits::Threads, SharedBytes, stream, waits);
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, Argument<Parameters, Traits>::of(params)...),
             "launching the kernel");
}

/// `Fmha::takes_shape`, where there is one.
template <class Fmha>
constexpr auto shape_of(int) -> decltype(&Fmha::takes_shape) {
  return &Fmha::takes_shape;
}
template <class Fmha>
constexpr bool (*shape_of(long))(Params const&) {
  return nullptr;
}

/// `Fmha::kWants` and `Fmha::kLoop`, likewise.
template <class Fmha>
constexpr auto wants_of(int) -> std::remove_cv_t<decltype(Fmha::kWants)> {
  return Fmha::kWants;
}
template <class Fmha>
constexpr Features wants_of(long) {
  return 0;
}
template <class Fmha>
constexpr auto loop_of(int) -> std::remove_cv_t<decltype(Fmha::kLoop)> {
  return Fmha::kLoop;
}
template <class Fmha>
constexpr TileLoop loop_of(long) {
  return {};
}

/// Whether the kernel waits for the launch before a call's by itself (fmha/launch_order.hpp).
template <class Fmha>
constexpr auto waits_of(Params const& params, int) -> decltype(Fmha::waits(params)) {
  return Fmha::waits(params);
}
template <class Fmha>
constexpr bool waits_of(Params const&, long) {
  return loop_of<Fmha>(0).waits;
}

template <class Fmha>
Kernel kernel_of() {
  using Traits = typename Fmha::Traits;
  return {Fmha::kFamily,
          Fmha::kKind,
          dtype_of<typename Traits::Element>,
          Traits::HeadDim,
          Traits::HeadDimV,
          Traits::B_r,
          Traits::B_c,
          Fmha::kTakes,
          Traits::Threads,
          Fmha::kSharedBytes,
          reinterpret_cast<void const*>(Fmha::kernel),
          shape_of<Fmha>(0),
          [](Params const& params, Grid const& grid, cudaStream_t stream) {
            launch<Traits, Fmha::kSharedBytes>(Fmha::kernel, params, grid, stream, waits_of<Fmha>(params, 0));
          },
          wants_of<Fmha>(0),
          loop_of<Fmha>(0)};
}

}  // namespace cutlass_ext

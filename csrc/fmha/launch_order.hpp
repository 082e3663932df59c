// Launches that begin before the one ahead of them in the stream has ended (programmatic dependent launch): CTAs are
// placed and set up meanwhile. Used by Hopper's backward kernels and the small ones around them, and by the short ones
// behind the launch that packs a mask; elsewhere nothing.
#pragma once

#include <cute/config.hpp>

namespace cutlass_ext {

/// Waits until the launch before has ended and what it wrote can be read: in front of every access to global memory, of
/// kernels that LaunchConfig launches so; or of every one to what that launch writes, where it is itself an ordinary
/// one, before which all else has ended.
CUTE_DEVICE void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next launch begin once all CTAs of this one are there.
CUTE_DEVICE void let_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace cutlass_ext

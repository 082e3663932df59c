// The emulated GPU's memory: which bytes of the host it owns. tensors.cpp allocates of it; the machine asks before each
// access, so that one outside of every tensor shows.
#pragma once

#include <cstddef>

namespace cutlass_ext::emulator {

/// Whether all of them lie inside of one piece of memory. Cheap where the thread's last question was of the same piece.
bool is_allocated(void const* begin, size_t bytes);

/// Makes memory that others own (a module's variables) known, and unknown again.
void add_memory(void const* begin, size_t bytes);
void remove_memory(void const* begin);

/// Memory of its own, at a multiple of 512 bytes, none of it beside another's. Every byte is 0xFF: NaN in every dtype.
void* allocate(size_t bytes);
void release(void* begin);

struct Usage {
  size_t now, most;  // bytes that `allocate` gave
};
Usage& usage();

}  // namespace cutlass_ext::emulator

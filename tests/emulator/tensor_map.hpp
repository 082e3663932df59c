// What the emulated driver writes into the 128 bytes of a CUtensorMap. Written by runtime.cpp, read by the machine.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace cutlass_ext::emulator {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;  // of a map that the emulator encoded

  uint64_t magic;
  char* data;
  uint64_t sizes[5];    // in elements, the innermost dimension first
  uint64_t strides[5];  // in bytes; [0] is an element's
  uint16_t box[5];
  uint8_t steps[5];  // between elements that are copied
  uint8_t rank, dtype, element_bytes;
  uint8_t interleave, swizzle, fill;  // as the driver's enumerations number them
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace cutlass_ext::emulator

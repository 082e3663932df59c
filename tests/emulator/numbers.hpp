// The GPU's 16-bit floats, and two 16-bit numbers in a register. Used by instructions.cpp and async.cpp.
#pragma once

#include <cstdint>
#include <cstring>

namespace cutlass_ext::emulator {

struct Half {
  uint16_t bits = 0;
  Half() = default;
  Half(float x) {
    _Float16 const rounded = static_cast<_Float16>(x);
    std::memcpy(&bits, &rounded, 2);
  }
  operator float() const {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return x;
  }
};

struct BFloat {
  uint16_t bits = 0;
  BFloat() = default;
  BFloat(float x) {
    uint32_t all;
    std::memcpy(&all, &x, 4);
    bits = x != x ? 0x7fff : uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  operator float() const {
    uint32_t const all = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
  }
};

template <class T>
struct Pair {
  T x, y;  // y in the upper half
};

template <class T>
constexpr bool is_pair = false;
template <class T>
constexpr bool is_pair<Pair<T>> = true;

}  // namespace cutlass_ext::emulator

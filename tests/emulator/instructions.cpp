// What PTX's instructions do (PTX ISA 9.0, section 9): arithmetic, memory and what a warp does together. Those of the
// copy engine, of barriers and of the tensor cores are in async.cpp.
#include <cmath>
#include <limits>
#include <type_traits>

#include "numbers.hpp"
#include "warp.hpp"

namespace cutlass_ext::emulator {
namespace {

using Words = std::vector<std::string>;

bool has(Words const& words, std::string const& word) {
  for (auto const& w : words) {
    if (w == word) return true;
  }
  return false;
}

template <class F>
inline void each(Lanes mask, F const& f) {
  if (mask == ~Lanes(0)) {
    for (int lane = 0; lane < 32; ++lane) f(lane);
  } else {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
  }
}

// ------------------------------------------------------------------------------------------------ element by element
/// d = F(a...) of each lane.
template <class F, class D, class... S, size_t... N>
void map_sources(Warp& w, Instruction const& i, Lanes mask, std::index_sequence<N...>) {
  each(mask, [&](int lane) {
    D const result = F()(w.at<S>(i.operands[N + 1], lane)...);
    if constexpr (sizeof(D) < 4) w.at<uint32_t>(i.operands[0], lane) = 0;
    w.at<D>(i.operands[0], lane) = result;
  });
}
template <class F, class D, class... S>
void map(Warp& w, Instruction const& i, Lanes mask) {
  map_sources<F, D, S...>(w, i, mask, std::index_sequence_for<S...>());
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
constexpr bool is_number = std::is_arithmetic_v<T>;

/// Whole numbers wrap round; floats are computed in float or double and rounded to T.
template <class T, class F>
T computed(F const& f, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return T(f(uint64_t(Unsigned<T>(a)), uint64_t(Unsigned<T>(b))));
  } else if constexpr (is_pair<T>) {
    return {f(float(a.x), float(b.x)), f(float(a.y), float(b.y))};
  } else if constexpr (std::is_same_v<T, double>) {
    return f(a, b);
  } else {
    return T(f(float(a), float(b)));
  }
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return computed([](auto a, auto b) { return a + b; }, a, b);
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return computed([](auto a, auto b) { return a - b; }, a, b);
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return computed([](auto a, auto b) { return a * b; }, a, b);
  }
};
struct MulHi {
  template <class T>
  T operator()(T a, T b) const {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return T(Wide(a) * Wide(b) >> 8 * sizeof(T));
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return T(-1);
      if (std::is_signed_v<T> && b == T(-1)) return T(-Unsigned<T>(a));
      return a / b;
    } else {
      return a / b;
    }
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return a % b;
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_pair<T>) {
      return {(*this)(a.x, b.x), (*this)(a.y, b.y)};
    } else if constexpr (std::is_integral_v<T>) {
      return b < a ? b : a;
    } else {
      return T(std::fmin(double(a), double(b)));
    }
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_pair<T>) {
      return {(*this)(a.x, b.x), (*this)(a.y, b.y)};
    } else if constexpr (std::is_integral_v<T>) {
      return a < b ? b : a;
    } else {
      return T(std::fmax(double(a), double(b)));
    }
  }
};
template <class Of>
struct OrNan {  // .NaN: a NaN stays one
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_pair<T>) {
      return {(*this)(a.x, b.x), (*this)(a.y, b.y)};
    } else {
      return std::isnan(float(a)) || std::isnan(float(b)) ? T(NAN) : Of()(a, b);
    }
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return ~a;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    if constexpr (is_pair<T>) {
      return {-float(a.x), -float(a.y)};
    } else if constexpr (std::is_integral_v<T>) {
      return T(-Unsigned<T>(a));
    } else if constexpr (is_number<T>) {
      return -a;
    } else {
      return T(-float(a));
    }
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (is_pair<T>) {
      return {std::fabs(float(a.x)), std::fabs(float(a.y))};
    } else if constexpr (std::is_integral_v<T>) {
      return a < 0 ? T(-Unsigned<T>(a)) : a;
    } else {
      return T(std::fabs(float(a)));
    }
  }
};
struct ShiftLeft {
  template <class T>
  T operator()(T a, uint32_t by) const {
    return by >= 8 * sizeof(T) ? T(0) : T(Unsigned<T>(a) << by);
  }
};
struct ShiftRight {
  template <class T>
  T operator()(T a, uint32_t by) const {
    if (by >= 8 * sizeof(T)) return a < 0 ? T(-1) : T(0);
    return T(a >> by);
  }
};
struct MulAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add()(Mul()(a, b), c);
  }
};
struct MulHiAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add()(MulHi()(a, b), c);
  }
};
template <class Wide>
struct MulWide {
  template <class T>
  Wide operator()(T a, T b) const {
    return Wide(a) * Wide(b);
  }
};
template <class Wide>
struct MulWideAdd {
  template <class T>
  Wide operator()(T a, T b, Wide c) const {
    return Add()(Wide(Wide(a) * Wide(b)), c);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    if constexpr (is_pair<T>) {
      return {std::fma(float(a.x), float(b.x), float(c.x)), std::fma(float(a.y), float(b.y), float(c.y))};
    } else if constexpr (is_number<T>) {
      return std::fma(a, b, c);
    } else {
      return T(std::fma(float(a), float(b), float(c)));
    }
  }
};
struct CopySign {
  float operator()(float sign, float of) const { return std::copysign(of, sign); }
};
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
struct Exp2 {
  float operator()(float x) const { return flushed(std::exp2(flushed(x))); }
};
struct Log2 {
  float operator()(float x) const { return std::log2(flushed(x)); }
};
struct Reciprocal {
  float operator()(float x) const { return flushed(1 / flushed(x)); }
};
struct SquareRoot {
  float operator()(float x) const { return std::sqrt(x); }
};
struct ReciprocalRoot {
  float operator()(float x) const { return 1 / std::sqrt(x); }
};
struct Tanh {
  float operator()(float x) const { return std::tanh(x); }
};
struct Sine {
  float operator()(float x) const { return std::sin(x); }
};
struct Cosine {
  float operator()(float x) const { return std::cos(x); }
};
struct Funnel {
  bool left, wraps;
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t by) const {
    by = wraps ? by & 31 : std::min(by, 32u);
    uint64_t const both = uint64_t(high) << 32 | low;
    return left ? uint32_t((by == 32 ? both << 32 : both << by) >> 32) : uint32_t(both >> by);
  }
};
template <bool Left, bool Wraps>
struct FunnelShift {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const { return Funnel{Left, Wraps}(a, b, c); }
};
struct InsertField {
  template <class T>
  T operator()(T field, T into, uint32_t at, uint32_t bits) const {
    at &= 255, bits &= 255;
    T mask = bits >= 8 * sizeof(T) ? T(-1) : T((T(1) << bits) - 1);
    mask = at >= 8 * sizeof(T) ? T(0) : T(mask << at);
    return at >= 8 * sizeof(T) ? into : T((into & ~mask) | (T(field << at) & mask));
  }
};
struct ExtractField {
  template <class T>
  T operator()(T from, uint32_t at, uint32_t bits) const {
    at &= 255, bits &= 255;
    int constexpr width = 8 * sizeof(T);
    if (bits == 0 || (at >= unsigned(width) && !std::is_signed_v<T>)) return 0;
    T result = 0;
    unsigned const last = std::min<unsigned>(at + bits - 1, width - 1);
    for (unsigned b = 0; b < unsigned(width); ++b) {
      unsigned const source = b < bits ? std::min(at + b, last) : last;
      bool const bit =
          b < bits && at + b < unsigned(width) ? from >> source & 1 : std::is_signed_v<T> && (from >> last & 1);
      result |= T(Unsigned<T>(bit) << b);
    }
    return result;
  }
};
struct FindHighest {  // the place of the highest bit
  uint32_t operator()(uint32_t a) const { return a ? 31 - __builtin_clz(a) : ~0u; }
};
struct FindHighestShift {  // by how much it would be shifted to the top
  uint32_t operator()(uint32_t a) const { return a ? __builtin_clz(a) : ~0u; }
};
struct LeadingZeros {
  uint32_t operator()(uint32_t a) const { return a ? __builtin_clz(a) : 32; }
};
struct LeadingZeros64 {
  uint32_t operator()(uint64_t a) const { return a ? __builtin_clzll(a) : 64; }
};
struct CountBits {
  uint32_t operator()(uint32_t a) const { return __builtin_popcount(a); }
};
struct CountBits64 {
  uint32_t operator()(uint64_t a) const { return __builtin_popcountll(a); }
};
struct Reverse {
  uint32_t operator()(uint32_t a) const {
    uint32_t r = 0;
    for (int b = 0; b < 32; ++b) r |= (a >> b & 1) << (31 - b);
    return r;
  }
};
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
    uint64_t const bytes = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
      uint32_t const s = selector >> 4 * i & 15;
      uint32_t byte = bytes >> 8 * (s & 7) & 255;
      if (s & 8) byte = byte & 128 ? 255 : 0;
      r |= byte << 8 * i;
    }
    return r;
  }
};
struct Move {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};

/// The function of `F` for operands of `type`; null where there is none.
template <class F, class... T>
Function integers(std::string const& type) {
  if (type == "u16" || type == "b16") return map<F, uint16_t, std::conditional_t<true, uint16_t, T>...>;
  if (type == "s16") return map<F, int16_t, std::conditional_t<true, int16_t, T>...>;
  if (type == "u32" || type == "b32") return map<F, uint32_t, std::conditional_t<true, uint32_t, T>...>;
  if (type == "s32") return map<F, int32_t, std::conditional_t<true, int32_t, T>...>;
  if (type == "u64" || type == "b64") return map<F, uint64_t, std::conditional_t<true, uint64_t, T>...>;
  if (type == "s64") return map<F, int64_t, std::conditional_t<true, int64_t, T>...>;
  return nullptr;
}

template <class F, class... T>
Function floats(std::string const& type) {
  if (type == "f32") return map<F, float, std::conditional_t<true, float, T>...>;
  if (type == "f16") return map<F, Half, std::conditional_t<true, Half, T>...>;
  if (type == "bf16") return map<F, BFloat, std::conditional_t<true, BFloat, T>...>;
  if (type == "f16x2") return map<F, Pair<Half>, std::conditional_t<true, Pair<Half>, T>...>;
  if (type == "bf16x2") return map<F, Pair<BFloat>, std::conditional_t<true, Pair<BFloat>, T>...>;
  return nullptr;
}

template <class F>
Function doubles(std::string const& type) {
  return type == "f64" ? map<F, double, double, double> : nullptr;
}

template <class F, class... T>
Function numbers(std::string const& type) {
  Function const found = integers<F, T...>(type);
  return found ? found : floats<F, T...>(type);
}

template <class F>
Function packed_integers(std::string const& type) {
  if (type == "u16x2") return map<F, Pair<uint16_t>, Pair<uint16_t>, Pair<uint16_t>>;
  if (type == "s16x2") return map<F, Pair<int16_t>, Pair<int16_t>, Pair<int16_t>>;
  return nullptr;
}

struct PackedAdd {
  template <class T>
  T operator()(T a, T b) const {
    using Element = decltype(a.x);
    return {Element(a.x + b.x), Element(a.y + b.y)};
  }
};

Function first_of(std::initializer_list<Function> functions) {
  for (Function f : functions) {
    if (f) return f;
  }
  return nullptr;
}

template <class F>
Function wide(std::string const& type, bool adds) {
  using std::conditional_t;
  if (type == "u16")
    return adds ? map<MulWideAdd<uint32_t>, uint32_t, uint16_t, uint16_t, uint32_t>
                : map<MulWide<uint32_t>, uint32_t, uint16_t, uint16_t>;
  if (type == "s16")
    return adds ? map<MulWideAdd<int32_t>, int32_t, int16_t, int16_t, int32_t>
                : map<MulWide<int32_t>, int32_t, int16_t, int16_t>;
  if (type == "u32")
    return adds ? map<MulWideAdd<uint64_t>, uint64_t, uint32_t, uint32_t, uint64_t>
                : map<MulWide<uint64_t>, uint64_t, uint32_t, uint32_t>;
  if (type == "s32")
    return adds ? map<MulWideAdd<int64_t>, int64_t, int32_t, int32_t, int64_t>
                : map<MulWide<int64_t>, int64_t, int32_t, int32_t>;
  return nullptr;
}

template <class F, class T>
constexpr Function shift_of = map<F, T, T, uint32_t>;

template <class F>
Function shifts(std::string const& type) {
  if (type == "u16" || type == "b16") return shift_of<F, uint16_t>;
  if (type == "s16") return shift_of<F, int16_t>;
  if (type == "u32" || type == "b32") return shift_of<F, uint32_t>;
  if (type == "s32") return shift_of<F, int32_t>;
  if (type == "u64" || type == "b64") return shift_of<F, uint64_t>;
  if (type == "s64") return shift_of<F, int64_t>;
  return nullptr;
}

// ------------------------------------------------------------------------------------------------------- conversions
enum class Rounding { None, Nearest, Zero, Down, Up };

template <Rounding R>
float whole(float x) {
  switch (R) {
    case Rounding::Nearest:
      return std::nearbyint(x);
    case Rounding::Zero:
      return std::trunc(x);
    case Rounding::Down:
      return std::floor(x);
    case Rounding::Up:
      return std::ceil(x);
    default:
      return x;
  }
}

template <class D, class S, Rounding R, bool Saturates>
struct Convert {
  D operator()(S x) const {
    if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
      if (Saturates) {
        __int128 const low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
        return D(std::min(std::max(__int128(x), low), high));
      }
      return D(x);
    } else if constexpr (std::is_integral_v<D>) {  // to whole numbers: saturated, NaN gives 0
      double const value = whole<R>(float(x));
      if (std::isnan(value)) return 0;
      if (value <= double(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
      if (value >= double(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
      return D(value);
    } else if constexpr (std::is_same_v<D, double> || std::is_same_v<S, double>) {
      return D(double(x));
    } else if constexpr (std::is_integral_v<S>) {
      return D(float(x));
    } else {
      float value = R == Rounding::None || !std::is_same_v<D, S> ? float(x) : whole<R>(float(x));
      if (Saturates) value = value > 0 ? std::min(value, 1.f) : 0.f;
      return D(value);
    }
  }
};

template <class D, class S, Rounding R>
Function converting(bool saturates) {
  return saturates ? map<Convert<D, S, R, true>, D, S> : map<Convert<D, S, R, false>, D, S>;
}

template <class D, Rounding R>
Function converting_from(std::string const& type, bool saturates) {
  if (type == "u8") return converting<D, uint8_t, R>(saturates);
  if (type == "s8") return converting<D, int8_t, R>(saturates);
  if (type == "u16") return converting<D, uint16_t, R>(saturates);
  if (type == "s16") return converting<D, int16_t, R>(saturates);
  if (type == "u32") return converting<D, uint32_t, R>(saturates);
  if (type == "s32") return converting<D, int32_t, R>(saturates);
  if (type == "u64") return converting<D, uint64_t, R>(saturates);
  if (type == "s64") return converting<D, int64_t, R>(saturates);
  if (type == "f32") return converting<D, float, R>(saturates);
  if (type == "f64") return converting<D, double, R>(saturates);
  if (type == "f16") return converting<D, Half, R>(saturates);
  if (type == "bf16") return converting<D, BFloat, R>(saturates);
  return nullptr;
}

template <Rounding R>
Function conversion(std::string const& to, std::string const& from, bool saturates) {
  if (to == "u8") return converting_from<uint8_t, R>(from, saturates);
  if (to == "s8") return converting_from<int8_t, R>(from, saturates);
  if (to == "u16") return converting_from<uint16_t, R>(from, saturates);
  if (to == "s16") return converting_from<int16_t, R>(from, saturates);
  if (to == "u32") return converting_from<uint32_t, R>(from, saturates);
  if (to == "s32") return converting_from<int32_t, R>(from, saturates);
  if (to == "u64") return converting_from<uint64_t, R>(from, saturates);
  if (to == "s64") return converting_from<int64_t, R>(from, saturates);
  if (to == "f32") return converting_from<float, R>(from, saturates);
  if (to == "f64") return converting_from<double, R>(from, saturates);
  if (to == "f16") return converting_from<Half, R>(from, saturates);
  if (to == "bf16") return converting_from<BFloat, R>(from, saturates);
  return nullptr;
}

/// Of a source in a wider register than its type: the lower half, into one of its own width.
void from_lower_half(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) { w.at<uint32_t>(i.operands[1], lane) = uint32_t(w.at<uint64_t>(i.operands[5], lane)); });
  i.then(w, i, mask);
}

template <class T>
struct PackFloats {  // the first is the upper one
  Pair<T> operator()(float a, float b) const { return {b, a}; }
};

// ------------------------------------------------------------------------------------------------------- comparisons
enum class Compare : uint8_t { Eq, Ne, Lt, Le, Gt, Ge, Num, Nan };

template <class T>
bool compares(Compare how, T a, T b) {
  switch (how) {
    case Compare::Eq:
      return a == b;
    case Compare::Ne:
      return a != b && !(a != a) && !(b != b);
    case Compare::Lt:
      return a < b;
    case Compare::Le:
      return a <= b;
    case Compare::Gt:
      return a > b;
    case Compare::Ge:
      return a >= b;
    case Compare::Num:
      return a == a && b == b;
    default:
      return a != a || b != b;
  }
}

/// kind: the comparison, plus 8 where it holds of NaN too; bytes: 1 and, 2 or, 3 xor with another predicate.
template <class T>
void set_predicate(Warp& w, Instruction const& i, Lanes mask) {
  Lanes holds = 0;
  auto const how = Compare(i.kind & 7);
  bool const of_nan = i.kind & 8;
  each(mask, [&](int lane) {
    using Value = std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;
    auto const a = Value(w.at<T>(i.operands[2], lane)), b = Value(w.at<T>(i.operands[3], lane));
    bool const answer = compares(how, a, b) || (of_nan && (a != a || b != b));
    holds |= Lanes(answer) << lane;
  });
  Lanes other = 0;
  if (i.bytes) other = w.predicates[i.operands[4]] ^ (i.flag ? ~Lanes(0) : 0);
  auto const combined = [&](Lanes x) {
    return i.bytes == 1 ? x & other : i.bytes == 2 ? x | other : i.bytes == 3 ? x ^ other : x;
  };
  w.set(i.operands[0], mask, combined(holds));
  if (i.count) w.set(i.operands[1], mask, combined(~holds));
}

Function predicate_setter(std::string const& type) {
  if (type == "u16" || type == "b16") return set_predicate<uint16_t>;
  if (type == "s16") return set_predicate<int16_t>;
  if (type == "u32" || type == "b32") return set_predicate<uint32_t>;
  if (type == "s32") return set_predicate<int32_t>;
  if (type == "u64" || type == "b64") return set_predicate<uint64_t>;
  if (type == "s64") return set_predicate<int64_t>;
  if (type == "f32") return set_predicate<float>;
  if (type == "f64") return set_predicate<double>;
  if (type == "f16") return set_predicate<Half>;
  if (type == "bf16") return set_predicate<BFloat>;
  return nullptr;
}

template <class T>
void select(Warp& w, Instruction const& i, Lanes mask) {
  Lanes const chosen = w.predicates[i.operands[3]] ^ (i.flag ? ~Lanes(0) : 0);
  each(mask, [&](int lane) { w.at<T>(i.operands[0], lane) = w.at<T>(i.operands[chosen >> lane & 1 ? 1 : 2], lane); });
}

template <class F>
void of_predicates(Warp& w, Instruction const& i, Lanes mask) {
  w.set(i.operands[0], mask, F()(w.predicates[i.operands[1]], w.predicates[i.operands[2]]));
}

// ------------------------------------------------------------------------------------------------------------ memory
/// Whether a register's lane is extended with its sign: kind 1.
void load(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const base = i.flag ? w.at<uint64_t>(i.operands[0], lane) : w.at<uint32_t>(i.operands[0], lane);
    char const* const from = w.memory(i.space, base + i.offset, i.bytes * i.count, false);
    for (int n = 0; n < i.count; ++n) {
      uint64_t value = 0;
      std::memcpy(&value, from + n * i.bytes, i.bytes);
      if (i.kind == 1) value = uint64_t(int64_t(value << (64 - 8 * i.bytes)) >> (64 - 8 * i.bytes));
      uint32_t const place = i.many[n];
      if (place & 1) {  // a register of 8 bytes (places are multiples of 128)
        w.at<uint64_t>(place & ~1u, lane) = value;
      } else {
        w.at<uint32_t>(place, lane) = uint32_t(value);
      }
    }
  });
}

void store(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint64_t const base = i.flag ? w.at<uint64_t>(i.operands[0], lane) : w.at<uint32_t>(i.operands[0], lane);
    char* const to = w.memory(i.space, base + i.offset, i.bytes * i.count, true);
    for (int n = 0; n < i.count; ++n) {
      uint32_t const place = i.many[n];
      uint64_t const value = place & 1 ? w.at<uint64_t>(place & ~1u, lane) : w.at<uint32_t>(place, lane);
      std::memcpy(to + n * i.bytes, &value, i.bytes);
    }
  });
}

enum class Atomic : uint8_t { Add, Inc, Dec, Min, Max, And, Or, Xor, Exchange, CompareAndSwap };

template <class T>
T after(Atomic what, T old, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    switch (what) {
      case Atomic::Inc:
        return old >= a ? T(0) : T(old + 1);
      case Atomic::Dec:
        return old == 0 || old > a ? a : T(old - 1);
      case Atomic::And:
        return old & a;
      case Atomic::Or:
        return old | a;
      case Atomic::Xor:
        return old ^ a;
      default:
        break;
    }
  }
  switch (what) {
    case Atomic::Add:
      return Add()(old, a);
    case Atomic::Min:
      return Min()(old, a);
    case Atomic::Max:
      return Max()(old, a);
    case Atomic::Exchange:
      return a;
    case Atomic::CompareAndSwap:
      return std::memcmp(&old, &a, sizeof(T)) == 0 ? b : old;
    default:
      fault("an atomic of floats that there is not");
  }
}

/// many: results where there are any (flag 2 in bytes), then what is added, `count` of each.
template <class T>
void atomic(Warp& w, Instruction const& i, Lanes mask) {
  ++w.cta.cluster.machine.progress;
  each(mask, [&](int lane) {
    uint64_t const base = i.flag ? w.at<uint64_t>(i.operands[0], lane) : w.at<uint32_t>(i.operands[0], lane);
    char* const at = w.memory(i.space, base + i.offset, sizeof(T) * i.count, true);
    for (int n = 0; n < i.count; ++n) {
      T old;
      std::memcpy(&old, at + n * sizeof(T), sizeof(T));
      uint32_t const* const operands = i.many.data() + (i.bytes ? i.count : 0);
      T const a = w.at<T>(operands[n], lane);
      T const b = Atomic(i.kind) == Atomic::CompareAndSwap ? w.at<T>(operands[i.count + n], lane) : T();
      T const now = after(Atomic(i.kind), old, a, b);
      std::memcpy(at + n * sizeof(T), &now, sizeof(T));
      if (i.bytes) w.at<T>(i.many[n], lane) = old;
    }
  });
}

Function atomic_of(std::string const& type) {
  if (type == "u32" || type == "b32") return atomic<uint32_t>;
  if (type == "s32") return atomic<int32_t>;
  if (type == "u64" || type == "b64") return atomic<uint64_t>;
  if (type == "s64") return atomic<int64_t>;
  if (type == "f32") return atomic<float>;
  if (type == "f16x2") return atomic<Pair<Half>>;
  if (type == "bf16x2") return atomic<Pair<BFloat>>;
  return nullptr;
}

// ------------------------------------------------------------------------------------------------ what a warp does
enum class Shuffle : uint8_t { Index, Up, Down, Butterfly };

/// kind: which; flag: with a predicate, whether the source is one of the segment's.
void shuffle(Warp& w, Instruction const& i, Lanes mask) {
  uint32_t result[32];
  Lanes valid = 0;
  each(mask, [&](int lane) {
    int const b = w.at<uint32_t>(i.operands[3], lane) & 31;
    uint32_t const c = w.at<uint32_t>(i.operands[4], lane);
    int const clamp = c & 31, segments = c >> 8 & 31;
    int const most = (lane & segments) | (clamp & ~segments), least = lane & segments;
    int from = lane;
    bool inside = true;
    switch (Shuffle(i.kind)) {
      case Shuffle::Up:
        from = lane - b, inside = from >= most;
        break;
      case Shuffle::Down:
        from = lane + b, inside = from <= most;
        break;
      case Shuffle::Butterfly:
        from = lane ^ b, inside = from <= most;
        break;
      case Shuffle::Index:
        from = least | (b & ~segments), inside = from <= most;
        break;
    }
    if (!inside) from = lane;
    if (!(mask >> from & 1)) fault("a shuffle from lane " + std::to_string(from) + ", which is not there");
    result[lane] = w.at<uint32_t>(i.operands[2], from);
    valid |= Lanes(inside) << lane;
  });
  each(mask, [&](int lane) { w.at<uint32_t>(i.operands[0], lane) = result[lane]; });
  if (i.flag) w.set(i.operands[1], mask, valid);
}

enum class Vote : uint8_t { All, Any, Uniform, Ballot };

void vote(Warp& w, Instruction const& i, Lanes mask) {
  Lanes const holds = (w.predicates[i.operands[1]] ^ (i.flag ? ~Lanes(0) : 0)) & mask;
  if (Vote(i.kind) == Vote::Ballot) {
    each(mask, [&](int lane) { w.at<uint32_t>(i.operands[0], lane) = holds; });
    return;
  }
  bool const answer = Vote(i.kind) == Vote::All   ? holds == mask
                      : Vote(i.kind) == Vote::Any ? holds != 0
                                                  : holds == mask || holds == 0;
  w.set(i.operands[0], mask, answer ? ~Lanes(0) : 0);
}

void elect(Warp& w, Instruction const& i, Lanes mask) {
  int const leader = __builtin_ctz(mask);
  if (i.flag) each(mask, [&](int lane) { w.at<uint32_t>(i.operands[0], lane) = leader; });
  w.set(i.operands[1], mask, Lanes(1) << leader);
}

template <class T, class F>
void reduce(Warp& w, Instruction const& i, Lanes mask) {
  T result = w.at<T>(i.operands[1], __builtin_ctz(mask));
  each(mask & (mask - 1), [&](int lane) { result = F()(result, w.at<T>(i.operands[1], lane)); });
  each(mask, [&](int lane) { w.at<T>(i.operands[0], lane) = result; });
}

void active_mask(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) { w.at<uint32_t>(i.operands[0], lane) = mask; });
}

void nothing(Warp&, Instruction const&, Lanes) {}

void yield(Warp& w, Instruction const&, Lanes) { w.yielded = true; }

void fence_async(Warp& w, Instruction const&, Lanes) { ++w.fences; }

[[noreturn]] void unknown(Warp&, Instruction const&, Lanes) { fault("an instruction that the emulator does not know"); }

void join(Warp& w, Instruction const& i, Lanes mask) {  // mov.b32 d, {a, b}
  each(mask, [&](int lane) {
    uint64_t value = 0;
    for (int n = 0; n < i.count; ++n) {
      uint64_t part = w.at<uint32_t>(i.many[n], lane);
      if (i.bytes == 2) part &= 0xffff;
      value |= part << 8 * i.bytes * n;
    }
    i.flag ? void(w.at<uint64_t>(i.operands[0], lane) = value)
           : void(w.at<uint32_t>(i.operands[0], lane) = uint32_t(value));
  });
}

void part(Warp& w, Instruction const& i, Lanes mask) {  // mov.b32 {a, b}, d
  each(mask, [&](int lane) {
    uint64_t const value = i.flag ? w.at<uint64_t>(i.operands[0], lane) : w.at<uint32_t>(i.operands[0], lane);
    for (int n = 0; n < i.count; ++n) {
      if (i.many[n] == ~0u) continue;
      uint32_t const piece = uint32_t(value >> 8 * i.bytes * n);
      w.at<uint32_t>(i.many[n], lane) = i.bytes == 2 ? piece & 0xffff : piece;
    }
  });
}

void logic3(Warp& w, Instruction const& i, Lanes mask) {
  each(mask, [&](int lane) {
    uint32_t const a = w.at<uint32_t>(i.operands[1], lane), b = w.at<uint32_t>(i.operands[2], lane),
                   c = w.at<uint32_t>(i.operands[3], lane);
    uint32_t result = 0;
    for (int n = 0; n < 8; ++n) {
      if (i.offset >> n & 1) result |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    }
    w.at<uint32_t>(i.operands[0], lane) = result;
  });
}

int bytes_of(std::string const& type) {
  if (type == "f16x2" || type == "bf16x2" || type == "u16x2" || type == "s16x2") return 4;
  size_t const digit = type.find_first_of("0123456789");
  return digit == std::string::npos ? 0 : std::atoi(type.c_str() + digit) / 8;
}

bool is_float(std::string const& type) { return type[0] == 'f' || type.compare(0, 2, "bf") == 0; }

}  // namespace

void read_address(Instruction& i, std::string const& operand, int which, int64_t& offset, Reader& reader) {
  std::string const inside = operand.substr(1, operand.rfind(']') - 1);
  size_t const plus = inside.find('+', 1);
  std::string const base = inside.substr(0, plus);
  offset = plus == std::string::npos ? 0 : std::strtoll(inside.c_str() + plus + 1, nullptr, 0);
  Register const found = reader.value(base, 8, false);
  i.operands[which] = found.place;
  if (which == 0) i.flag = found.width == Width::Long;
}

bool decode_async(Instruction&, Words const& opcode, Words const& operands, Reader&);  // async.cpp

/// The registers of operands in braces; of 8 bytes with their lowest bit set.
static void read_many(Instruction& i, std::string const& operand, int bytes, bool of_floats, Reader& reader) {
  for (auto const& name : members(operand)) {
    Register const found = reader.value(name, bytes, of_floats);
    i.many.push_back(found.place | (found.width == Width::Long));
  }
}

static void decode_memory(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  for (auto const& word : op) {
    if (word == "global") i.space = Global;
    if (word == "shared" || word == "shared::cta" || word == "shared::cluster") i.space = Shared;
    if (word == "local") i.space = Local;
    if (word == "param" || word == "const") i.space = word == "param" ? Parameter : Global;
  }
  bool const loads = op[0] == "ld" || op[0] == "ldu";
  std::string const& type = op.back();
  i.bytes = uint16_t(bytes_of(type));
  i.kind = type[0] == 's';
  read_address(i, operands[loads ? 1 : 0], 0, i.offset, reader);
  read_many(i, operands[loads ? 0 : 1], i.bytes, is_float(type), reader);
  i.count = uint16_t(i.many.size());
  i.run = loads ? load : store;
}

static void decode_atomic(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  bool const gives = op[0] == "atom";
  for (auto const& word : op) {
    if (word == "global") i.space = Global;
    if (word == "shared" || word == "shared::cta" || word == "shared::cluster") i.space = Shared;
  }
  static std::map<std::string, Atomic> const kinds{
      {"add", Atomic::Add},       {"inc", Atomic::Inc},           {"dec", Atomic::Dec}, {"min", Atomic::Min},
      {"max", Atomic::Max},       {"and", Atomic::And},           {"or", Atomic::Or},   {"xor", Atomic::Xor},
      {"exch", Atomic::Exchange}, {"cas", Atomic::CompareAndSwap}};
  for (auto const& word : op) {
    if (auto const found = kinds.find(word); found != kinds.end()) i.kind = uint8_t(found->second);
  }
  std::string const& type = op.back();
  i.bytes = gives && operands[0] != "_";
  i.count = uint16_t(members(operands[gives ? 2 : 1]).size());
  read_address(i, operands[gives], 0, i.offset, reader);
  if (i.bytes) read_many(i, operands[0], bytes_of(type), is_float(type), reader);
  for (size_t n = gives ? 2 : 1; n < operands.size(); ++n)
    read_many(i, operands[n], bytes_of(type), is_float(type), reader);
  for (uint32_t& place : i.many) place &= ~1u;
  i.run = atomic_of(type);
}

static void decode_warp(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  auto const word = [&](std::string const& operand) { return reader.value(operand, 4, false).place; };
  i.together = Together::Named;
  i.operands[5] = word(operands.back());  // who takes part
  if (op[0] == "shfl") {
    i.kind = uint8_t(has(op, "up")     ? Shuffle::Up
                     : has(op, "down") ? Shuffle::Down
                     : has(op, "bfly") ? Shuffle::Butterfly
                                       : Shuffle::Index);
    size_t const bar = operands[0].find('|');
    i.operands[0] = word(operands[0].substr(0, bar));
    if (bar != std::string::npos) i.flag = true, i.operands[1] = reader.predicate(operands[0].substr(bar + 1));
    for (int n = 1; n <= 3; ++n) i.operands[n + 1] = word(operands[n]);
    i.run = shuffle;
  } else if (op[0] == "vote") {
    i.kind = uint8_t(has(op, "all")   ? Vote::All
                     : has(op, "any") ? Vote::Any
                     : has(op, "uni") ? Vote::Uniform
                                      : Vote::Ballot);
    i.operands[0] = Vote(i.kind) == Vote::Ballot ? word(operands[0]) : reader.predicate(operands[0]);
    i.flag = operands[1][0] == '!';
    i.operands[1] = reader.predicate(operands[1].substr(i.flag));
    i.run = vote;
  } else if (op[0] == "elect") {
    size_t const bar = operands[0].find('|');
    std::string const leader = operands[0].substr(0, bar);
    if ((i.flag = leader != "_")) i.operands[0] = word(leader);
    i.operands[1] = reader.predicate(operands[0].substr(bar + 1));
    i.run = elect;
  } else if (op[0] == "redux") {
    i.operands[0] = word(operands[0]), i.operands[1] = word(operands[1]);
    bool const is_signed = op.back() == "s32";
    i.run = has(op, "add")   ? reduce<uint32_t, Add>
            : has(op, "and") ? reduce<uint32_t, And>
            : has(op, "or")  ? reduce<uint32_t, Or>
            : has(op, "xor") ? reduce<uint32_t, Xor>
            : has(op, "min") ? (is_signed ? reduce<int32_t, Min> : reduce<uint32_t, Min>)
                             : (is_signed ? reduce<int32_t, Max> : reduce<uint32_t, Max>);
  } else {  // bar.warp.sync
    i.run = nothing;
  }
}

static void decode_set_predicate(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  static std::map<std::string, uint8_t> const how{
      {"eq", 0}, {"ne", 1}, {"lt", 2}, {"le", 3},  {"gt", 4},  {"ge", 5},   {"num", 6},  {"nan", 7},  {"lo", 2},
      {"ls", 3}, {"hi", 4}, {"hs", 5}, {"equ", 8}, {"neu", 9}, {"ltu", 10}, {"leu", 11}, {"gtu", 12}, {"geu", 13}};
  std::string const& type = op.back();
  i.kind = how.at(op[1]);
  i.bytes = has(op, "and") ? 1 : has(op, "or") ? 2 : has(op, "xor") ? 3 : 0;
  size_t const bar = operands[0].find('|');
  i.operands[0] = reader.predicate(operands[0].substr(0, bar));
  i.count = bar != std::string::npos;
  if (i.count) i.operands[1] = reader.predicate(operands[0].substr(bar + 1));
  i.operands[2] = reader.value(operands[1], bytes_of(type), is_float(type)).place;
  i.operands[3] = reader.value(operands[2], bytes_of(type), is_float(type)).place;
  if (i.bytes) {
    i.flag = operands[3][0] == '!';
    i.operands[4] = reader.predicate(operands[3].substr(i.flag));
  }
  i.run = predicate_setter(type);
}

static void decode_conversion(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  std::string const &to = op[op.size() - 2], &from = op.back();
  bool const saturates = has(op, "sat");
  i.operands[0] = reader.value(operands[0], bytes_of(to), false).place;
  for (size_t n = 1; n < operands.size(); ++n)
    i.operands[n] = reader.value(operands[n], bytes_of(from), is_float(from)).place;
  if (to == "f16x2") {
    i.run = map<PackFloats<Half>, Pair<Half>, float, float>;
  } else if (to == "bf16x2") {
    i.run = map<PackFloats<BFloat>, Pair<BFloat>, float, float>;
  } else if (has(op, "rzi") || has(op, "rz")) {
    i.run = conversion<Rounding::Zero>(to, from, saturates);
  } else if (has(op, "rmi")) {
    i.run = conversion<Rounding::Down>(to, from, saturates);
  } else if (has(op, "rpi")) {
    i.run = conversion<Rounding::Up>(to, from, saturates);
  } else if (has(op, "rni")) {
    i.run = conversion<Rounding::Nearest>(to, from, saturates);
  } else {
    i.run = conversion<Rounding::None>(to, from, saturates);
  }
  Register const source = reader.value(operands[1], bytes_of(from), is_float(from));
  if (source.width == Width::Long && bytes_of(from) <= 4) {
    i.operands[5] = source.place;
    i.operands[1] = reader.scratch(Width::Word).place;
    i.then = i.run;
    i.run = from_lower_half;
  }
}

static void decode_move(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  int const bytes = bytes_of(op.back());
  bool const joins = operands[1][0] == '{', parts = operands[0][0] == '{';
  if (op.back() == "pred") {
    i.operands[0] = reader.predicate(operands[0]);
    if (std::isdigit(operands[1][0]) || operands[1][0] == '-') {
      i.offset = std::atoi(operands[1].c_str()) ? -1 : 0;
      i.run = [](Warp& w, Instruction const& i, Lanes mask) { w.set(i.operands[0], mask, Lanes(i.offset)); };
    } else {
      i.operands[1] = i.operands[2] = reader.predicate(operands[1]);
      i.run = of_predicates<And>;
    }
  } else if (joins || parts) {
    auto const names = members(operands[joins]);
    i.count = uint16_t(names.size());
    i.bytes = uint16_t(bytes / i.count);
    for (auto const& name : names) i.many.push_back(name == "_" ? ~0u : reader.value(name, i.bytes, false).place);
    i.operands[0] = reader.value(operands[parts], bytes, false).place;
    i.flag = bytes == 8;
    i.run = joins ? join : part;
  } else {
    i.operands[0] = reader.value(operands[0], bytes, false).place;
    i.operands[1] = reader.value(operands[1], bytes, is_float(op.back())).place;
    i.run = bytes == 8   ? map<Move, uint64_t, uint64_t>
            : bytes == 2 ? map<Move, uint16_t, uint16_t>
                         : map<Move, uint32_t, uint32_t>;
  }
}

/// Instructions that work element by element, all operands of the type but where said.
static Function elementwise(Words const& op) {
  std::string const &name = op[0], &type = op.back();
  bool const is_nan = has(op, "NaN"), is_wide = has(op, "wide"), is_high = has(op, "hi");
  using T = void;
  if (name == "add") return first_of({numbers<Add, T, T>(type), doubles<Add>(type), packed_integers<PackedAdd>(type)});
  if (name == "sub") return first_of({numbers<Sub, T, T>(type), doubles<Sub>(type)});
  if (name == "mul" && is_wide) return wide<T>(type, false);
  if (name == "mul" && is_high) return integers<MulHi, T, T>(type);
  if (name == "mul") return first_of({numbers<Mul, T, T>(type), doubles<Mul>(type)});
  if (name == "mad" && is_wide) return wide<T>(type, true);
  if (name == "mad" && is_high) return integers<MulHiAdd, T, T, T>(type);
  if (name == "mad" && !is_float(type)) return integers<MulAdd, T, T, T>(type);
  if (name == "fma" || name == "mad") return floats<Fma, T, T, T>(type);
  if (name == "div")
    return first_of({integers<Div, T, T>(type), type == "f32" ? map<Div, float, float, float> : nullptr});
  if (name == "rem") return integers<Rem, T, T>(type);
  if (name == "min")
    return is_nan ? floats<OrNan<Min>, T, T>(type) : first_of({numbers<Min, T, T>(type), packed_integers<Min>(type)});
  if (name == "max")
    return is_nan ? floats<OrNan<Max>, T, T>(type) : first_of({numbers<Max, T, T>(type), packed_integers<Max>(type)});
  if (name == "and") return integers<And, T, T>(type);
  if (name == "or") return integers<Or, T, T>(type);
  if (name == "xor") return integers<Xor, T, T>(type);
  if (name == "not") return integers<Not, T>(type);
  if (name == "neg") return numbers<Neg, T>(type);
  if (name == "abs") return numbers<Abs, T>(type);
  if (name == "shl") return shifts<ShiftLeft>(type);
  if (name == "shr") return shifts<ShiftRight>(type);
  if (name == "shf")
    return has(op, "l") ? (has(op, "wrap") ? map<FunnelShift<true, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                                           : map<FunnelShift<true, false>, uint32_t, uint32_t, uint32_t, uint32_t>)
                        : (has(op, "wrap") ? map<FunnelShift<false, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                                           : map<FunnelShift<false, false>, uint32_t, uint32_t, uint32_t, uint32_t>);
  if (name == "bfi")
    return type == "b64" ? map<InsertField, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>
                         : map<InsertField, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;
  if (name == "bfe")
    return type == "u32"   ? map<ExtractField, uint32_t, uint32_t, uint32_t, uint32_t>
           : type == "s32" ? map<ExtractField, int32_t, int32_t, uint32_t, uint32_t>
           : type == "u64" ? map<ExtractField, uint64_t, uint64_t, uint32_t, uint32_t>
                           : map<ExtractField, int64_t, int64_t, uint32_t, uint32_t>;
  if (name == "bfind" && type == "u32")
    return has(op, "shiftamt") ? map<FindHighestShift, uint32_t, uint32_t> : map<FindHighest, uint32_t, uint32_t>;
  if (name == "clz")
    return type == "b64" ? map<LeadingZeros64, uint32_t, uint64_t> : map<LeadingZeros, uint32_t, uint32_t>;
  if (name == "popc") return type == "b64" ? map<CountBits64, uint32_t, uint64_t> : map<CountBits, uint32_t, uint32_t>;
  if (name == "brev" && type == "b32") return map<Reverse, uint32_t, uint32_t>;
  if (name == "prmt" && op.size() == 2) return map<Permute, uint32_t, uint32_t, uint32_t, uint32_t>;
  if (type == "f32") {
    if (name == "copysign") return map<CopySign, float, float, float>;
    if (name == "ex2") return map<Exp2, float, float>;
    if (name == "lg2") return map<Log2, float, float>;
    if (name == "rcp") return map<Reciprocal, float, float>;
    if (name == "sqrt") return map<SquareRoot, float, float>;
    if (name == "rsqrt") return map<ReciprocalRoot, float, float>;
    if (name == "tanh") return map<Tanh, float, float>;
    if (name == "sin") return map<Sine, float, float>;
    if (name == "cos") return map<Cosine, float, float>;
  }
  if (name == "cvta") return type == "u64" ? map<Move, uint64_t, uint64_t> : nullptr;
  return nullptr;
}

void decode(Instruction& i, Words const& op, Words const& operands, Reader& reader) {
  std::string const &name = op[0], &type = op.back();
  if (name == "bra") {
    i.control = Control::Branch;
    i.target = reader.label(operands[0]);
  } else if (name == "ret" || name == "exit") {
    i.control = Control::Exit;
  } else if (name == "ld" || (name == "st" && op[1] != "async") || name == "ldu") {
    decode_memory(i, op, operands, reader);
  } else if (name == "atom" || name == "red") {
    decode_atomic(i, op, operands, reader);
  } else if (name == "shfl" || name == "vote" || name == "elect" || name == "redux" ||
             (name == "bar" && op[1] == "warp")) {
    decode_warp(i, op, operands, reader);
  } else if (name == "activemask") {
    i.operands[0] = reader.value(operands[0], 4, false).place;
    i.run = active_mask;
  } else if (name == "setp") {
    decode_set_predicate(i, op, operands, reader);
  } else if (name == "selp") {
    int const bytes = bytes_of(type);
    for (int n = 0; n < 3; ++n) i.operands[n] = reader.value(operands[n], bytes, is_float(type)).place;
    i.flag = operands[3][0] == '!';
    i.operands[3] = reader.predicate(operands[3].substr(i.flag));
    i.run = bytes == 8 ? select<uint64_t> : select<uint32_t>;
  } else if (name == "cvt") {
    decode_conversion(i, op, operands, reader);
  } else if (name == "mov") {
    decode_move(i, op, operands, reader);
  } else if (name == "lop3" && type == "b32") {
    for (int n = 0; n < 4; ++n) i.operands[n] = reader.value(operands[n], 4, false).place;
    i.offset = std::strtol(operands[4].c_str(), nullptr, 0);
    i.run = logic3;
  } else if (type == "pred") {
    for (size_t n = 0; n < operands.size(); ++n) i.operands[n] = reader.predicate(operands[n]);
    if (name == "not")
      i.run = [](Warp& w, Instruction const& i, Lanes m) { w.set(i.operands[0], m, ~w.predicates[i.operands[1]]); };
    if (name == "and") i.run = of_predicates<And>;
    if (name == "or") i.run = of_predicates<Or>;
    if (name == "xor") i.run = of_predicates<Xor>;
  } else if (name == "cvta" && has(op, "shared")) {
    bool const to = has(op, "to");
    i.operands[0] = reader.value(operands[0], 8, false).place;
    i.operands[1] = reader.value(operands[1], 8, false).place;
    i.flag = to;
    i.run = [](Warp& w, Instruction const& i, Lanes mask) {
      each(mask, [&](int lane) {
        uint64_t const address = w.at<uint64_t>(i.operands[1], lane);
        w.at<uint64_t>(i.operands[0], lane) = i.flag ? address & 0xffffffff : address | kSharedWindow;
      });
    };
  } else if (name == "nanosleep") {
    i.run = yield;
  } else if (name == "fence" && has(op, "async")) {
    i.run = fence_async;
  } else if (name == "cp" && has(op, "prefetch")) {
    i.run = nothing;  // there is no L2
  } else if (name == "fence" || name == "membar" || name == "prefetch" || name == "prefetchu" || name == "setmaxnreg" ||
             name == "griddepcontrol" || name == "discard" || name == "applypriority") {
    i.run = nothing;
  } else if (name == "createpolicy") {
    i.run = nothing;
  } else if (name == "trap" || name == "brkpt") {
    i.run = [](Warp&, Instruction const&, Lanes) { fault("a trap"); };
  } else if (!decode_async(i, op, operands, reader)) {
    i.run = elementwise(op);
    if (i.run) {
      for (size_t n = 0; n < operands.size() && n < 6; ++n) {
        bool const is_amount = n >= (name == "bfi" ? 3 : 2) && (name == "shl" || name == "shr" || name == "bfe" ||
                                                                name == "bfi");  // shl, shr, bfe, bfi
        bool const is_wide = has(op, "wide") && (n == 0 || n == 3);
        int const bytes = is_amount ? 4 : is_wide ? 2 * bytes_of(type) : bytes_of(type);
        i.operands[n] = reader.value(operands[n], bytes, is_float(type)).place;
      }
    }
  }
  if (!i.run && i.control == Control::None) i.run = unknown;
}

}  // namespace cutlass_ext::emulator

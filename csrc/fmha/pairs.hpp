// What pairs of a row and a key have of their own: bias, mask and dropout of one sequence and head. Called by the main
// loops beside score.hpp. Rows and keys are those of Visibility, keys counted from the first real one, throughout.
// Mask and dropout come as bits, 32 keys of a row in a word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cute_tensor.hpp"
#include "optimization_barriers.hpp"
#include "params.hpp"
#include "score.hpp"
#include "sequence.hpp"

#if defined(__CUDACC__)
#include "copy/cp_async.hpp"
#endif

namespace cutlass_ext {

/// Philox4x32-7 under one key, of the counters (sixteen keys, row, head, sequence) of one head and sequence.
struct Philox {
  uint32_t key0, key1, sequence;
  uint32_t head_low, head_high;  // of what the first round makes of the head

  CUTE_HOST_DEVICE Philox(uint32_t const (&key)[2], uint32_t head, uint32_t sequence)
      : key0(key[0]), key1(key[1]), sequence(sequence) {
    multiply(kM1, head, head_low, head_high);
  }

  /// Rounds mix a word with one other at a time: of the first three some products are of the row alone, ...
  struct OfRow {
    uint32_t mixed2, mixed3;
  };
  CUTE_HOST_DEVICE OfRow of_row(uint32_t row) const {
    uint32_t low, high;
    multiply(kM0, head_high ^ row ^ key0, low, high);
    return {high ^ key1_of(1), low};
  }

  /// ... others of the keys.
  struct OfSixteen {
    uint32_t mixed2, next0, next2, next3;
  };
  CUTE_HOST_DEVICE OfSixteen of_sixteen(uint32_t sixteen) const {
    OfSixteen of;
    uint32_t low, high;
    multiply(kM0, sixteen, of.mixed2, high);
    multiply(kM1, high ^ sequence ^ key1, low, high);
    of.next0 = low ^ key0_of(2);
    multiply(kM0, high ^ head_low ^ key0_of(1), of.next3, high);
    of.next2 = high ^ key1_of(2);
    return of;
  }

  CUTE_HOST_DEVICE void draw(OfRow const& row, OfSixteen const& keys, uint32_t (&x)[4]) const {
    uint32_t high;
    multiply(kM1, row.mixed2 ^ keys.mixed2, x[1], high);
    x[0] = high ^ keys.next0;
    x[2] = row.mixed3 ^ keys.next2;
    x[3] = keys.next3;
    CUTE_UNROLL
    for (int round = 3; round < 7; ++round) {
      uint32_t low0, high0, low1, high1;
      multiply(kM0, x[0], low0, high0);
      multiply(kM1, x[2], low1, high1);
      x[0] = high1 ^ x[1] ^ key0_of(round);
      x[2] = high0 ^ x[3] ^ key1_of(round);
      x[1] = low1;
      x[3] = low0;
    }
  }

 private:
  static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;
  CUTE_HOST_DEVICE static void multiply(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__)
    // Of a product in C++ the compiler adds zeros to the upper halves: 32 instructions of a draw.
    asm("{ .reg .b64 x; mul.wide.u32 x, %2, %3; mov.b64 {%0, %1}, x; }" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
#else
    uint64_t const product = uint64_t(a) * b;
    low = uint32_t(product);
    high = uint32_t(product >> 32);
#endif
  }
  CUTE_HOST_DEVICE uint32_t key0_of(int round) const { return key0 + round * 0x9E3779B9u; }
  CUTE_HOST_DEVICE uint32_t key1_of(int round) const { return key1 + round * 0xBB67AE85u; }
};

/// Pairs whose bits come of one word (`Dropout`): sixteen keys of two rows.
constexpr int kBlockKeys = 16, kBlockRows = 2;

/// The bit of a pair of a block, by its key and row there.
CUTE_HOST_DEVICE constexpr int bit_of_pair(int key, int row) {
  return key % 4 * 8 + key / 4 % 2 * 4 + key / 8 * 2 + row;
}

/// What the numbers of pairs are compared with, as the comparison wants it.
struct Threshold {
  uint32_t shared;     // the lower 24 bits, at the top of a word
  uint32_t enough[8];  // of the other bits, the lowest first: all ones where it has a 0, and as much is enough

  CUTE_HOST_DEVICE Threshold(uint32_t threshold) : shared(threshold << 8) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) enough[i] = (threshold >> (24 + i) & 1) - 1;
  }
};

/// Which pairs of a block are kept, those whose numbers are the threshold or more: of `keys` with the row at the even
/// position `row` and the next one. A word has one bit of all 32 numbers, and they are compared bit by bit from the
/// lowest on: what a bit decides is a majority.
CUTE_HOST_DEVICE uint32_t kept_of_block(Philox const& philox, uint32_t row, Philox::OfSixteen const& keys,
                                        Threshold const& threshold) {
  uint32_t x[4], kept;
  auto const compare = [&](int first) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) kept = (x[i] & kept) | (threshold.enough[first + i] & (x[i] | kept));
  };
  auto const rotated = [](uint32_t word, int by) { return word << by | word >> (32 - by); };
  philox.draw(philox.of_row(row), keys, x);
  uint32_t const shared = x[0] ^ rotated(x[1], 11) ^ rotated(x[2], 22);
  kept = shared < threshold.shared ? 0 : ~0u;
  compare(0);
  philox.draw(philox.of_row(row + 1), keys, x);
  compare(4);
  return kept;
}

/// Whether a call has a bias; scores that a bias or a mask changes; dropout; any of all this.
CUTE_HOST_DEVICE Bias const& bias_of(Pairs const& pairs) { return pairs.bias; }
CUTE_HOST_DEVICE bool has_bias(Pairs const& pairs) { return pairs.bias.data; }
CUTE_HOST_DEVICE BiasType dtype_of_bias(Pairs const& pairs) { return pairs.bias.type; }
CUTE_HOST_DEVICE bool has_mask(Pairs const& pairs) { return pairs.mask.bits; }
CUTE_HOST_DEVICE bool changes_scores(Pairs const& pairs) { return pairs.bias.data || pairs.mask.bits; }
CUTE_HOST_DEVICE bool has_dropout(Pairs const& pairs) { return pairs.dropout.seed; }
CUTE_HOST_DEVICE Threshold threshold_of(Pairs const& pairs) { return pairs.dropout.threshold; }
CUTE_HOST_DEVICE bool has_pairs(Pairs const& pairs) { return changes_scores(pairs) || has_dropout(pairs); }

template <class T>
CUTE_DEVICE float float_of(T x) {
  if constexpr (std::is_same_v<T, __half>) return __half2float(x);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat162float(x);
  if constexpr (std::is_same_v<T, float>) return x;
}

/// In accumulators of tensor cores, a lane's columns of a row that lie in 32 keys, and the key of one, counted from the
/// lane's first. The quad's lanes begin at keys 0, 2, 4, 6.
constexpr int kQuadColumns = 8;
CUTE_HOST_DEVICE constexpr int key_of_quad(int j) { return j / 2 * 8 + j % 2; }

/// Of a block's first row, or, shifted, its second: a bit for each key, in their order; and the other way round.
CUTE_HOST_DEVICE uint32_t keys_of_block(uint32_t block) {
  uint32_t keys = 0;
  CUTE_UNROLL
  for (int four = 0; four < kBlockKeys; four += 4)
    keys |= ((block >> bit_of_pair(four, 0) & 0x01010101u) * 0x01020408u >> 24) << four;
  return keys;
}
CUTE_HOST_DEVICE uint32_t block_of_keys(uint32_t keys) {
  uint32_t block = 0;
  CUTE_UNROLL
  for (int four = 0; four < kBlockKeys; four += 4)
    block |= ((keys >> four & 15) * 0x204081u & 0x01010101u) << bit_of_pair(four, 0);
  return block;
}

#if defined(__CUDACC__)
/// Each byte of the result is that of a and b which its digit of the selector names, or, of that plus 8, all bits are
/// its top one. `__byte_perm` has the former alone, and masks the selector for it.
CUTE_DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
}

/// Lanes whose numbers differ in bit `LaneBit` trade bits of their words: after it what was that bit of the lane's
/// number is bit `Place` of a bit's place in the word, and the other way round.
template <int LaneBit, int Place>
CUTE_DEVICE uint32_t trade(uint32_t word, int lane) {
  uint32_t const others = __shfl_xor_sync(0xffffffffu, word, 1 << LaneBit);
  uint32_t upper = lane >> LaneBit & 1;
  materialize(upper);  // that it is 0 or 1 the compiler would make selections of, on the unit that draws are short of
  auto const of_half = [&](uint32_t lower_lane, uint32_t upper_lane) {
    return lower_lane + upper * (upper_lane - lower_lane);
  };
  if constexpr (Place == 4) return bytes_of(word, others, of_half(0x5410, 0x3276));
  if constexpr (Place == 3) return bytes_of(word, others, of_half(0x6240, 0x3715));
  constexpr int kApart = 1 << Place;
  constexpr uint32_t kLower = ~0u / ((1u << kApart) + 1);
  uint32_t own = of_half(kLower, ~kLower);
  materialize(own);  // and not ~own besides
  return (word & own) | (__funnelshift_l(others, others, of_half(kApart, 32 - kApart)) & ~own);
}

/// Of the mask's word of 32 keys those of a lane's columns in accumulators, a bit each.
CUTE_DEVICE uint32_t columns_of_word(uint32_t word, int lane) {
  uint32_t const of_lane = word >> lane % 4 * 2 & 0x03030303u;  // two in each byte, which a product brings together
  return of_lane * 0x01041040u >> 24;
}

/// Of the bits of 64 keys those of a lane's columns in accumulators: of each byte two, which a product brings together
/// in the top byte of each word.
CUTE_DEVICE uint32_t columns_of_words(uint2 words, int lane) {
  int const shift = lane % 4 * 2;
  uint32_t const of_lane = 0x03030303u << shift, gather = 0x01041040u >> shift;
  return __byte_perm((words.x & of_lane) * gather, (words.y & of_lane) * gather, 0x0073);
}

/// The same of 128 keys.
CUTE_DEVICE uint32_t columns_of_words(uint4 words, int lane) {
  return __byte_perm(columns_of_words(make_uint2(words.x, words.y), lane),
                     columns_of_words(make_uint2(words.z, words.w), lane), 0x5410);
}

#endif

/// What a mask says of all pairs of some rows and keys; of none that nothing is seen and nothing hidden.
struct Seen {
  bool some, all;
};

/// Bias, mask and dropout of one sequence and head: where they begin.
struct PairMod {
  void const* bias;                  // of row 0 and the first real key; null: none
  uint32_t const* mask;              // of row 0
  int leftpad;                       // keys before the first real one
  bool bias_in_pairs;                // whether a load may bring two neighbouring keys of the bias, the first even
  int position;                      // of row 0
  int origin;                        // of the first real key, a position too
  uint32_t seed[2], head, sequence;  // of Philox, the latter with the seed's offset

  int words;  // of a row of the mask

  PairMod() = default;
#if defined(__CUDACC__)
  CUTE_DEVICE PairMod(Params const& params, Sequence const& of, int b, int h)
      : bias(nullptr), mask(nullptr), leftpad(of.leftpad), bias_in_pairs(false) {
    if (Bias const& x = params.bias; x.data) {
      int const bytes = x.type == BiasType::Float32 ? 4 : 2;
      int64_t const at = b * x.batch + h * x.head + leftpad * x.key;
      bias = static_cast<char const*>(x.data) + at * bytes;
      bias_in_pairs = x.key == 1 && reinterpret_cast<uintptr_t>(bias) % (2 * unsigned(bytes)) == 0 &&
                      (x.row | params.n_kv | leftpad) % 2 == 0;
    }
    words = Mask::words_of(opaque(params.n_kv));
    if (params.mask.bits) mask = params.mask.bits + b * params.mask.batch + h * params.mask.head;
    if (params.dropout.seed) place_dropout(params.dropout, of.visibility, b, h);
  }

  /// With dropout alone, where no keys are cut off in front.
  CUTE_DEVICE PairMod(Dropout const& dropout, Visibility const& visibility, int b, int h)
      : bias(nullptr), mask(nullptr), leftpad(0), bias_in_pairs(false) {
    place_dropout(dropout, visibility, b, h);
  }

  /// Goes on to another head, `heads` further.
  CUTE_DEVICE void advance(Params const& params, int heads) {
    int const bytes = params.bias.type == BiasType::Float32 ? 4 : 2;
    if (bias) bias = static_cast<char const*>(bias) + heads * params.bias.head * bytes;
    if (mask) mask += heads * params.mask.head;
    head += heads;
  }
  CUTE_DEVICE PairMod of_head(Params const& params, int heads) const {
    PairMod other = *this;
    other.advance(params, heads);
    return other;
  }

  /// The same where the bias is in the scores already.
  CUTE_DEVICE PairMod without_bias() const {
    PairMod other = *this;
    other.bias = nullptr;
    return other;
  }
  CUTE_DEVICE bool changes_scores() const { return bias || mask; }

  /// Whether eight neighbouring keys of the bias of 16 bits, the first one a multiple of eight, are a vector of 16
  /// bytes, of this head and the `heads` - 1 that follow.
  CUTE_DEVICE bool bias_in_chunks(Params const& params, int heads) const {
    Bias const& x = params.bias;
    int64_t const steps = x.row | (heads > 1 ? x.head : 0);
    return bias && x.type != BiasType::Float32 && x.key == 1 && reinterpret_cast<uintptr_t>(bias) % 16 == 0 &&
           steps % 8 == 0;
  }

  /// Which of the 32 keys from `key` on a row sees by the mask. A row that does not exist sees what the last one does.
  CUTE_DEVICE uint32_t seen(Params const& params, Visibility const& visibility, int row, int key) const {
    int const at = (key + leftpad) / 32, shift = (key + leftpad) % 32;
    uint32_t const* const of_row = mask + min(row, visibility.n_q - 1) * params.mask.row;
    uint32_t low = 0, high = 0;  // without a branch: of several rows all loads are under way at once
    if (at < words) low = __ldg(of_row + at);
    if (shift != 0 && at + 1 < words) high = __ldg(of_row + at + 1);
    return __funnelshift_r(low, high, shift);
  }

  /// Which of 128 keys a row sees by the mask, of those from `key` on, a multiple of 128: of a lane's columns in
  /// accumulators, a bit each. By the four lanes of a quad, which share the row.
  CUTE_DEVICE uint32_t columns_seen(Params const& params, Visibility const& visibility, int row, int key,
                                    int lane) const {
    if (leftpad % 128 == 0) {
      uint32_t const* const of_row = mask + min(row, visibility.n_q - 1) * params.mask.row;
      return columns_of_words(__ldg(reinterpret_cast<uint4 const*>(of_row + (key + leftpad) / 32)), lane);
    }
    uint32_t const word = seen(params, visibility, row, key + lane % 4 * 32);
    auto const of_lane = [&](int i) { return __shfl_sync(0xffffffffu, word, i, 4); };
    return columns_of_words(make_uint4(of_lane(0), of_lane(1), of_lane(2), of_lane(3)), lane);
  }

  /// What the map says of the blocks in which rows and keys lie. So `some` may be true because of a neighbour, and
  /// `all` false; never the other way round.
  CUTE_DEVICE Seen seen_of(Params const& params, Range rows, Range keys) const {
    Mask const& of = params.mask;
    int const row_blocks = Mask::blocks_of(of.rows);
    if (of.row == 0) rows = {0, rows.end > rows.begin ? 1 : 0};
    int const last_row = min(Mask::blocks_of(rows.end), row_blocks),
              end = min(Mask::blocks_of(keys.end + leftpad), Mask::blocks_of(params.n_kv));
    Seen seen{false, true};
    for (int row = rows.begin / Mask::kBlock; row < last_row; ++row) {
      auto const* const of_row = reinterpret_cast<uint2 const*>(mask + (of.rows + row) * int64_t(words));
      for (int at = (keys.begin + leftpad) / Mask::kBlock; at < end; at = (at / 32 + 1) * 32) {
        uint2 const word = __ldg(of_row + at / 32);
        uint32_t const blocks = ~0u << at % 32 & ~0u >> (31 - min(end - 1 - at / 32 * 32, 31));
        seen.some |= (word.x & blocks) != 0;
        seen.all &= (~word.y & blocks) == 0;
      }
    }
    return seen;
  }

  /// Which pairs dropout keeps of sixteen keys and two rows, from these on: bits as `bit_of_pair` has them. They may
  /// lie anywhere; where they are a block of `Dropout` it is one draw, else one of each that has some of them.
  CUTE_DEVICE uint32_t kept_of_two(Threshold const& threshold, int row, int key) const {
    Philox const philox(seed, head, sequence);
    int const at_row = position + row, at_key = key + origin;
    uint32_t kept = kept_of_block(philox, at_row & ~1, philox.of_sixteen(at_key >> 4), threshold);
    int const more = (at_row & 1) | (at_key % kBlockKeys != 0 ? 2 : 0);  // blocks of later rows, of later keys
    if (more == 0) return kept;
    kept = part_of_block(kept, 0, more, at_key);
    CUTE_NO_UNROLL
    for (int of = more & 1 ? 1 : 2; of <= more; of += more == 2 ? 2 : 1) {
      uint32_t const block = kept_of_block(philox, (at_row & ~1) + of % 2 * kBlockRows,
                                           philox.of_sixteen((at_key >> 4) + of / 2), threshold);
      kept |= part_of_block(block, of, more, at_key);
    }
    return kept;
  }

  /// Which of the `count` keys from `key` on dropout keeps of a row, 32 at most, wherever they lie; bits of some that
  /// follow are behind theirs.
  CUTE_DEVICE uint32_t kept(uint32_t threshold, int row, int key, int count) const {
    int const first = key + origin, shift = first & (kBlockKeys - 1);
    uint32_t word = 0;
    CUTE_NO_UNROLL
    for (int got = -shift; got < count; got += kBlockKeys) {
      uint32_t const sixteen = keys_of_block(block_of(threshold, row, (first + got) >> 4));
      word |= got < 0 ? sixteen >> shift : sixteen << got;
    }
    return word;
  }

  /// Where eight keys of the bias lie that are a vector; `bytes`: those of keys that exist.
  CUTE_DEVICE uint16_t const* bias_chunk(Pairs const& pairs, Visibility const& visibility, int row, int key,
                                         int& bytes) const {
    bytes = 2 * min(max(visibility.len_kv - key, 0), 8);
    return static_cast<uint16_t const*>(bias) + min(row, visibility.n_q - 1) * pairs.bias.row + key;
  }

  /// Where the 16-bit bias of row `row` of the head that is `heads` further begins, at the first real key.
  CUTE_DEVICE uint16_t const* bias_row(Pairs const& pairs, int heads, int row) const {
    return static_cast<uint16_t const*>(bias) + heads * pairs.bias.head + row * pairs.bias.row;
  }

  /// Adds the bias to `Count` scores of a row, those of the keys `key + key_of(e)`.
  template <int Count, class KeyOf>
  CUTE_DEVICE void add_bias(float (&scores)[Count], Pairs const& pairs, Visibility const& visibility, int row, int key,
                            KeyOf key_of) const {
    Bias const& of = pairs.bias;
    if (row >= visibility.n_q) return;
    auto const add = [&](auto type) {
      using T = decltype(type);
      T const* const from = static_cast<T const*>(bias) + row * of.row + key * of.key;
      float x[Count];
      CUTE_UNROLL
      for (int e = 0; e < Count; ++e)
        x[e] = key_of(e) < visibility.len_kv - key ? float_of(__ldg(from + key_of(e) * of.key)) : 0.f;
      CUTE_UNROLL
      for (int e = 0; e < Count; ++e) scores[e] = fmaf(x[e], kLog2e, scores[e]);
    };
    of.type == BiasType::Float32 ? add(float{}) : of.type == BiasType::Float16 ? add(__half{}) : add(__nv_bfloat16{});
  }

  /// The same, and hides what the mask hides; the keys lie within 32.
  template <int Count, class KeyOf>
  CUTE_DEVICE void apply(float (&scores)[Count], Params const& params, Visibility const& visibility, int row, int key,
                         KeyOf key_of) const {
    if (bias) add_bias(scores, params, visibility, row, key, key_of);
    if (mask) {
      uint32_t const of_keys = seen(params, visibility, row, key);
      CUTE_UNROLL
      for (int e = 0; e < Count; ++e) scores[e] = of_keys >> key_of(e) & 1 ? scores[e] : -INFINITY;
    }
  }

  /// Makes 0 of what dropout does not keep of the keys from `key` on, and `scale` times as much of the others.
  template <int Count>
  CUTE_DEVICE void drop(float (&p)[Count], uint32_t threshold, int row, int key, float scale = 1.f) const {
    uint32_t const of_keys = kept(threshold, row, key, Count);
    CUTE_UNROLL
    for (int e = 0; e < Count; ++e) p[e] = of_keys >> e & 1 ? p[e] * scale : 0.f;
  }

  /// Which of 1024 pairs, from these on, dropout keeps, by the whole warp: a bit for each of the lane's in accumulators
  /// of rows, those of 16 rows and 64 keys, or of 32 and 32. Each lane draws for a block and trades with seven others
  /// for the bits of its own.
  template <int Keys = 64>
  CUTE_DEVICE uint32_t kept_of_rows(Threshold const& threshold, int row, int key, int lane) const {
    static_assert(Keys == 64 || Keys == 32, "a block a lane");
    int const far = lane / 2 % 2;
    uint32_t const block = kept_of_two(threshold, row + lane / 8 * 2 + lane / 4 % 2 * 8 + (Keys == 32 ? far * 16 : 0),
                                       key + lane % 2 * kBlockKeys + (Keys == 64 ? far * 32 : 0));
    return trade<0, 4>(trade<1, 2>(trade<2, 0>(block, lane), lane), lane);
  }
  /// Where the bit of a pair lies there: of the lane's first or second row, `i`, and of its first or second key, `odd`,
  /// of the keys 8 m to 8 m + 7. Keys from 32 on share their place with rows from 16 on.
  CUTE_HOST_DEVICE static constexpr int bit_of_rows(int m, int odd, int i) {
    return m / 2 % 2 * 16 + odd * 8 + (m / 4 + i / 2) % 2 * 4 + m % 2 * 2 + i % 2;
  }

  /// The same in accumulators of keys: of 16 keys and 64 rows, or of 32 and 32.
  template <int Rows = 64>
  CUTE_DEVICE uint32_t kept_of_keys(Threshold const& threshold, int row, int key, int lane) const {
    static_assert(Rows == 64 || Rows == 32, "a block a lane");
    constexpr int kLanes = Rows / kBlockRows;
    uint32_t const block = kept_of_two(threshold, row + lane % kLanes * kBlockRows, key + lane / kLanes * kBlockKeys);
    return trade<4, 2>(trade<3, 4>(trade<2, 3>(block, lane), lane), lane);
  }
  /// Where the bit of a pair lies there: of the lane's first or second key, `i`, and of its first or second row, `odd`,
  /// of the rows 8 m to 8 m + 7. Rows from 32 on share their place with keys from 16 on.
  CUTE_HOST_DEVICE static constexpr int bit_of_keys(int m, int odd, int i) {
    return m % 4 * 8 + (m / 4 + i / 2) % 2 * 4 + i % 2 * 2 + odd;
  }

 private:
  CUTE_DEVICE void place_dropout(Dropout const& of, Visibility const& visibility, int b, int h) {
    uint64_t const offset = uint64_t(of.seed[1]) * Dropout::kSpread;
    seed[0] = uint32_t(of.seed[0]), seed[1] = uint32_t(uint64_t(of.seed[0]) >> 32);
    origin = leftpad + (of.key_starts ? clamp(of.key_starts[b], -kMaxPosition, kMaxPosition) : of.key_start);
    position = visibility.offset(0, 0) + origin;
    head = uint32_t(h) + uint32_t(of.head_start) + uint32_t(offset);
    sequence = uint32_t(b) + uint32_t(of.sequence_start) + uint32_t(offset >> 32);
  }

  /// Of block `of` of several, of the earlier or later row (bit 0) and keys (bit 1), the pairs that are wanted, where
  /// they are wanted.
  CUTE_DEVICE static uint32_t part_of_block(uint32_t block, int of, int more, int at_key) {
    constexpr uint32_t kFirstRow = 0x55555555u;
    if (more & 1) block = of & 1 ? (block & kFirstRow) << 1 : block >> 1 & kFirstRow;
    if (!(more & 2)) return block;
    int const shift = at_key & (kBlockKeys - 1);
    uint32_t moved = 0;
    CUTE_NO_UNROLL
    for (int r = 0; r < kBlockRows; ++r) {
      uint32_t const of_row = keys_of_block(block >> r);
      moved |= block_of_keys(of & 2 ? of_row << (kBlockKeys - shift) : of_row >> shift) << r;
    }
    return moved;
  }

  /// Of the block that a row has with the keys whose positions, divided by sixteen, are `group`: the row's bits are
  /// where those of a block's first row are.
  CUTE_DEVICE uint32_t block_of(uint32_t threshold, int row, int group) const {
    Philox const philox(seed, head, sequence);
    int const at = position + row;
    materialize(threshold);  // its nine words around a main loop of CUDA cores spilled
    return kept_of_block(philox, at & ~1, philox.of_sixteen(group), threshold) >> (at & 1);
  }
#endif
};

#if defined(__CUDACC__)

/// Changes scores in accumulators by the columns that lie in 32 keys: `change(scores, row, first column)`. Unless
/// `Unrolled` they go through local memory: where registers are few the changes would spill what these hold.
template <bool Unrolled, class ScoreTensor, class Change>
CUTE_DEVICE void change_by_columns(ScoreTensor& S, Change const& change) {
  constexpr int Rows = decltype(cute::size<0>(S))::value, Columns = decltype(cute::size<1>(S))::value;
  constexpr int Words = (Columns + kQuadColumns - 1) / kQuadColumns;
  float scores[Rows * Words][kQuadColumns];
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < Columns; ++j) scores[i * Words + j / kQuadColumns][j % kQuadColumns] = S(i, j);
  }
  auto const change_word = [&](int word) { change(scores[word], word / Words, word % Words * kQuadColumns); };
  if constexpr (Unrolled) {
    CUTE_UNROLL
    for (int word = 0; word < Rows * Words; ++word) change_word(word);
  } else {
    CUTE_NO_UNROLL
    for (int word = 0; word < Rows * Words; ++word) change_word(word);
  }
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < Columns; ++j) S(i, j) = scores[i * Words + j / kQuadColumns][j % kQuadColumns];
  }
}

/// Makes accumulators of scores begin with the bias times `factor`: element (i, j) is row `first_row + row_of(i)` and
/// key `first_key + key_of(j)`, columns in pairs, of neighbouring keys where these are `Neighbours`. Its loads are then
/// out of the way of the product, and in the registers of what comes of them. Rows that do not exist get what the last
/// one has.
template <bool Neighbours = true, class ScoreTensor, class RowOf, class KeyOf>
CUTE_DEVICE void load_bias(ScoreTensor& S, float factor, PairMod const& pairs, Pairs const& of,
                           Visibility const& visibility, int first_row, int first_key, RowOf row_of, KeyOf key_of) {
  constexpr int Rows = decltype(cute::size<0>(S))::value, Columns = decltype(cute::size<1>(S))::value;
  Bias const& bias = of.bias;
  int const keys = visibility.len_kv - first_key;
  auto const row_at = [&](auto type, int i) {
    return static_cast<decltype(type) const*>(pairs.bias) + min(first_row + row_of(i), visibility.n_q - 1) * bias.row +
           first_key * bias.key;
  };
  // `take(i, j, from)` with the place of the bias of elements (i, j) and (i, j + 1).
  auto const for_each_pair = [&](auto type, auto const& take) {
    decltype(row_at(type, 0)) of_row[Rows];
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) of_row[i] = row_at(type, i);
    CUTE_UNROLL
    for (int j = 0; j < Columns; j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < Rows; ++i) {
        if (key_of(j) < keys) take(i, j, of_row[i] + key_of(j));
      }
    }
  };
  // The same of each element. Places are walked to: multiples of the stride would be registers, for all rows at once.
  auto const for_each_element = [&](auto type, auto const& take) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      auto const* from = row_at(type, i) + key_of(0) * bias.key;
      CUTE_UNROLL
      for (int j = 0; j < Columns; ++j) {
        if (key_of(j) < keys) take(i, j, from);
        if (j + 1 == Columns) continue;
        from += (key_of(j + 1) - key_of(j)) * bias.key;
        materialize(from);
      }
    }
  };
  bool const in_pairs = Neighbours && pairs.bias_in_pairs;
  if (bias.type == BiasType::Float32) {
    CUTE_UNROLL
    for (int e = 0; e < cute::size(S); ++e) S(e) = 0.f;
    if (in_pairs) {
      for_each_pair(float{}, [&](int i, int j, float const* from) {
        float2 const x = __ldg(reinterpret_cast<float2 const*>(from));
        S(i, j) = x.x, S(i, j + 1) = x.y;
      });
    } else {
      for_each_element(float{}, [&](int i, int j, float const* from) { S(i, j) = __ldg(from); });
    }
    CUTE_UNROLL
    for (int e = 0; e < cute::size(S); ++e) S(e) *= factor;
    return;
  }
  uint32_t words[Rows][Columns / 2] = {};
  if (in_pairs) {
    for_each_pair(uint16_t{}, [&](int i, int j, uint16_t const* from) {
      words[i][j / 2] = __ldg(reinterpret_cast<uint32_t const*>(from));
    });
  } else {
    for_each_element(uint16_t{}, [&](int i, int j, uint16_t const* from) {
      words[i][j / 2] |= uint32_t(__ldg(from)) << j % 2 * 16;
    });
  }
  auto const convert = [&](auto const& low, auto const& high) {
    CUTE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Columns; j += 2) {
        S(i, j) = low(words[i][j / 2]) * factor;
        S(i, j + 1) = high(words[i][j / 2]) * factor;
      }
    }
  };
  if (bias.type == BiasType::Float16) {
    auto const of = [](uint32_t x) { return __half2float(__ushort_as_half(static_cast<uint16_t>(x))); };
    convert(of, [&](uint32_t x) { return of(x >> 16); });
  } else {
    convert([](uint32_t x) { return __uint_as_float(x << 16); },
            [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); });
  }
}

/// Hides what the mask hides: element (i, j) is row `first_row + row_of(i)` and, of the lane's columns in accumulators,
/// the `j`th of the keys from `first_key` on.
template <class ScoreTensor, class RowOf>
CUTE_DEVICE void hide_by_mask(ScoreTensor& S, PairMod const& pairs, Params const& params, Visibility const& visibility,
                              int first_row, int first_key, int lane, RowOf row_of) {
  constexpr int Rows = decltype(cute::size<0>(S))::value, Columns = decltype(cute::size<1>(S))::value;
  constexpr int Words = (Columns + kQuadColumns - 1) / kQuadColumns;
  uint32_t seen[Rows][Words];
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int word = 0; word < Words; ++word)
      seen[i][word] =
          columns_of_word(pairs.seen(params, visibility, first_row + row_of(i), first_key + word * 32), lane);
  }
  CUTE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < Columns; ++j) {
      if (!(seen[i][j / kQuadColumns] & 1u << j % kQuadColumns)) S(i, j) = -INFINITY;
    }
  }
}

/// The two halves of a word of a bias.
CUTE_DEVICE float2 floats_of(uint32_t word, BiasType type) {
  if (type == BiasType::Float16) return __half22float2(*reinterpret_cast<__half2 const*>(&word));
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

#endif

}  // namespace cutlass_ext

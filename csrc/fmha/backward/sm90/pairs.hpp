// What pairs have, in the scores of Hopper's backward kernels: their accumulators see pairs from the side of the rows
// or from that of the keys. What a tile wants of memory, and its draws, are asked for a turn ahead. Used by
// traits.hpp, producer.hpp and mainloop.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "../../copy/cp_async.hpp"
#include "../../cute_tensor.hpp"
#include "../../mma/wgmma.hpp"
#include "../../pairs.hpp"
#include "../../sm90/warpgroup.hpp"
#include "../params.hpp"

namespace cutlass_ext::sm90 {

/// What the copying warp says of a streamed tile.
struct alignas(16) StreamedTileInfo {
  int tile, head;
  float* sums;               // of dQ of its rows, where that is added to
  uint32_t const* mask;      // from the side of keys: of its rows and key 0, or of all rows, where they share it
  uint16_t const* bias_row;  // its first row's, at the first real key, where chunks of it are copied
  int mixed;                 // whether the mask hides some of its pairs
};

/// Which part of shared memory that every consumer warp has one of is the calling warp's. Bias, sums of dQ and finished
/// gradients pass through the same memory, so that all ask this.
template <class Traits>
CUTE_DEVICE int part_of_warp() {
  return threadIdx.x / 32 % (4 * Traits::Consumers);
}

/// What pairs have in a warp's scores of a tile: its 16 rows or keys in hand, `Step` of the other side.
template <class Traits>
class TilePairs {
  static constexpr bool OfKeys = Traits::OfKeys;
  static constexpr int Step = Traits::Step, Words = Step / 32, Eights = Step / 8;
  static constexpr int ChunksOfLane = 16 * Eights / 32;  // vectors of eight keys of a row in the warp's scores

 public:
  static constexpr int kStagedBytes = 16 * Step * 2;  // of a warp in shared memory

  template <class Tile>
  struct Place {
    Tile const& tile;
    GradientThread thread;
    int row, key;  // of the warp's first score
    CUTE_DEVICE Place(Tile const& tile, int streamed_tile) : tile(tile) {
      int const held = tile.work.row0 + thread.warp_row % Traits::Held, streamed = streamed_tile * Step;
      row = OfKeys ? streamed : held, key = OfKeys ? held : streamed;
    }
    CUTE_DEVICE PairMod pairs(BackwardParams const& params, int head) const {
      return OfKeys ? tile.pairs.of_head(params, head - tile.head_q) : tile.pairs;
    }
  };

  // What a call has, where the kernel takes it.
  CUTE_DEVICE static bool has_bias(BackwardParams const& params) {
    return (Traits::Mods & feature::Bias) && cutlass_ext::has_bias(params);
  }
  CUTE_DEVICE static bool has_dropout(BackwardParams const& params) {
    return Traits::DropsAlone || ((Traits::Mods & feature::Dropout) && cutlass_ext::has_dropout(params));
  }
  CUTE_DEVICE static bool is_mixed(StreamedTileInfo const& tile) {
    return (Traits::Mods & feature::Mask) && tile.mixed;
  }
  /// Whether it changes scores, or what becomes of them, of every pair: a mask alone does not.
  CUTE_DEVICE static bool changes_every_tile(BackwardParams const& params) {
    return (Traits::ScoreMods && ScoreMod::changes(params)) || has_bias(params) || has_dropout(params);
  }

  /// `StreamedTileInfo::mask`.
  CUTE_DEVICE static uint32_t const* mask_of_tile(BackwardParams const& params, int batch, int head, int tile) {
    if (params.mask.row == 0) return params.mask.bits + batch * params.mask.batch + head * params.mask.head;
    return params.transposed_mask + TransposedMask(params).first(params, batch, head, 0) + tile * Words;
  }

  /// Asks for what `next` wants; unless `Changed`, of the mask alone, since calls have no bias or dropout then.
  template <bool Changed, class Shared, class Tile>
  CUTE_DEVICE void ask(BackwardParams const& params, Shared& shared, Tile const& tile, StreamedTileInfo const& next) {
    Place<Tile> const place(tile, next.tile);
    if constexpr (Changed && (Traits::Mods & feature::Bias) && !Traits::PlainBias) {
      if (cutlass_ext::has_bias(params) && tile.bias_in_chunks) {
        if constexpr (OfKeys) {
          copy_bias_across(params, shared, place, next.bias_row);
        } else {
          copy_bias(params, shared, place, place.pairs(params, next.head));
        }
      }
    }
    if (is_mixed(next)) read_mask(params, place, next);
    if constexpr (Changed && (Traits::Mods & feature::Dropout)) {
      if (has_dropout(params)) draw_for(params, tile, next.tile, next.head);
    }
  }

  /// Draws for tile `streamed_tile` and query head `head`.
  template <class Tile>
  CUTE_DEVICE void draw_for(BackwardParams const& params, Tile const& tile, int streamed_tile, int head) {
    Place<Tile> const place(tile, streamed_tile);
    if constexpr (OfKeys) {
      draw_across(threshold_of(params), place, place.pairs(params, head));
    } else {
      draw(threshold_of(params), place, place.pairs(params, head));
    }
  }

  /// Adds the bias to scores.
  template <class Shared, class Tile, class ScoreTensor>
  CUTE_DEVICE void add_bias(ScoreTensor& S, BackwardParams const& params, Shared& shared, Tile const& tile,
                            StreamedTileInfo const& here) const {
    Place<Tile> const place(tile, here.tile);
    if (!tile.bias_in_chunks) {
      add_elements(S, tile.bias_unit, params, place, place.pairs(params, here.head));
    } else {
      add_chunks(S, tile.bias_unit, dtype_of_bias(params), shared, place);
    }
  }

  /// Hides what the mask hides of a mixed tile.
  template <class ScoreTensor>
  CUTE_DEVICE void hide(ScoreTensor& S) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < Step / 4; ++j) {
        if (!(seen_[i][j / kQuadColumns] & 1u << key_of_quad(j % kQuadColumns))) S(i, j) = -INFINITY;
      }
    }
  }

  /// a b + c where dropout keeps element (i, j), else c: an instruction under a predicate.
  CUTE_DEVICE float add_if_kept(int i, int j, float a, float b, float c) const {
    return kept_[j / 16] & 1u << bit_of(j / 2, j % 2, i) ? fmaf(a, b, c) : c;
  }

  /// Drops of P, an operand of 16-bit pairs of rows.
  template <class OperandWords>
  CUTE_DEVICE void drop(OperandWords& words) const {
    static_assert(OfKeys, "P is an operand there");
    CUTE_UNROLL
    for (int m = 0; m < Eights; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        auto const highest = [&](int odd) { return kept_[0] << (7 - bit_of(m, odd, i) % 8); };  // of the byte
        words(2 * m + i) &= bytes_of(highest(0), highest(1), 0xCC88 + m % 4 * 0x1111);
      }
    }
  }

  /// add_bias() of one that is fp32, or that vectors cannot be read of, or that all rows share: each thread reads its
  /// own elements.
  template <class ScoreTensor, class Place>
  CUTE_DEVICE static void add_elements(ScoreTensor& S, float factor, BackwardParams const& params, Place const& place,
                                       PairMod const& pairs) {
    Bias const& of = bias_of(params);
    Visibility const& visibility = place.tile.sequence.visibility;
    int const held = place.thread.lane / 4, streamed = place.thread.lane % 4 * 2;
    int const row = place.row + (OfKeys ? streamed : held), key = place.key + (OfKeys ? held : streamed);
    auto const add = [&](auto const* elements, auto const& float_of) {
      auto const element = [&](int rows, int keys) {
        auto const* const from = elements + min(row + rows, visibility.n_q - 1) * of.row + (key + keys) * of.key;
        return key + keys < visibility.len_kv ? float_of(__ldg(from)) : 0.f;
      };
      if (OfKeys && of.row == 0) {
        float const x[2] = {element(0, row_of(0)), element(0, row_of(1))};
        CUTE_UNROLL
        for (int e = 0; e < size(S); ++e) S(e % 2, e / 2) = fmaf(x[e % 2], factor, S(e % 2, e / 2));
        return;
      }
      // Unrolled, it would spill beside what else changes scores.
      change_by_columns<!Traits::ScoreMods>(S, [&](float (&scores)[kQuadColumns], int i, int j) {
        float x[kQuadColumns];
        CUTE_UNROLL
        for (int e = 0; e < kQuadColumns; ++e) {
          int const of_held = row_of(i), of_streamed = key_of(j) + key_of_quad(e);
          x[e] = element(OfKeys ? of_streamed : of_held, OfKeys ? of_held : of_streamed);
        }
        CUTE_UNROLL
        for (int e = 0; e < kQuadColumns; ++e) scores[e] = fmaf(x[e], factor, scores[e]);
      });
    };
    void const* const first = pairs.bias_row(params, 0, 0);
    if (of.type == BiasType::Float32) {
      add(static_cast<float const*>(first), [](float x) { return x; });
    } else {
      add(static_cast<uint16_t const*>(first), [&](uint16_t x) { return floats_of(x, of.type).x; });
    }
  }

 private:
  /// Vector `index` of a warp's, of eight keys of a row; and where it lies, so that neither its copy nor ldmatrix finds
  /// a bank in use.
  CUTE_DEVICE static uint32_t row_of_chunk(uint32_t index) { return OfKeys ? index / 2 : index / Eights; }
  CUTE_DEVICE static uint32_t eight_of_chunk(uint32_t index) { return OfKeys ? index % 2 : index % Eights; }
  CUTE_DEVICE static uint32_t at(uint32_t row, uint32_t eight) {
    return OfKeys ? row * 32 + (eight ^ (row / 4 % 2)) * 16 : row * (Step * 2) + (eight ^ (row % 8)) * 16;
  }
  template <class Shared>
  CUTE_DEVICE static unsigned char* staged(Shared& shared) {
    static_assert(Traits::StagesPairs || kStagedBytes == Traits::Staged * sizeof(uint16_t), "a warp's own part");
    auto* const staging = Traits::StagesPairs ? shared.pairs_staging : shared.staging;
    return reinterpret_cast<unsigned char*>(staging) + part_of_warp<Traits>() * kStagedBytes;
  }

  template <class Shared, class Place>
  CUTE_DEVICE static void copy_bias(BackwardParams const& params, Shared& shared, Place const& place,
                                    PairMod const& pairs) {
    uint32_t const to = cast_smem_ptr_to_uint(staged(shared)), lane = place.thread.lane;
    __syncwarp();  // what is there has been read
    CUTE_UNROLL
    for (int k = 0; k < ChunksOfLane; ++k) {
      int const row = row_of_chunk(lane) + row_of_chunk(32 * k), eight = eight_of_chunk(lane);
      int bytes;
      auto const* const from =
          pairs.bias_chunk(params, place.tile.sequence.visibility, place.row + row, place.key + eight * 8, bytes);
      copy_chunk(to + at(row, eight), from, bytes);
    }
  }

  /// The same from the side of keys, of a tile's bias from its first row on: rows that do not exist get zeros, too.
  template <class Shared, class Place>
  CUTE_DEVICE static void copy_bias_across(BackwardParams const& params, Shared& shared, Place const& place,
                                           uint16_t const* first_row) {
    int const lane = place.thread.lane, row = row_of_chunk(lane), eight = eight_of_chunk(lane),
              key = place.key + eight * 8;
    Visibility const& visibility = place.tile.sequence.visibility;
    int const rows = visibility.n_q - place.row - row, bytes = 2 * min(max(visibility.len_kv - key, 0), 8);
    uint32_t const to = cast_smem_ptr_to_uint(staged(shared)) + at(row, eight);
    int64_t const stride = bias_of(params).row;
    uint16_t const* const from = first_row + (row * stride + key);
    __syncwarp();  // what is there has been read
    CUTE_UNROLL
    for (int k = 0; k < ChunksOfLane; ++k) {
      constexpr int kRows = 16;  // of a chunk for each lane
      copy_chunk(to + k * at(kRows, 0), from + k * kRows * stride, k * kRows < rows ? bytes : 0);
    }
  }

  CUTE_DEVICE static void copy_chunk(uint32_t to, uint16_t const* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }

  template <class ScoreTensor, class Shared, class Place>
  CUTE_DEVICE static void add_chunks(ScoreTensor& S, float factor, BiasType type, Shared& shared, Place const& place) {
    int const lane = place.thread.lane;
    uint32_t const from = cast_smem_ptr_to_uint(staged(shared)) +
                          (OfKeys ? at(lane / 16 * 8 + lane % 8, lane / 8 % 2) : at(lane % 16, lane / 16));
    cp_async_wait<0>();
    __syncwarp();
    add_bias_of_quads<Step / 16>(S, factor, type, [&](int m, uint32_t (&x)[4]) {
      if constexpr (OfKeys) {
        load_matrices_transposed(x, from + m * 512);
      } else {
        load_matrices(x, from ^ (m * 32));
      }
    });
  }

  template <class Place>
  CUTE_DEVICE void read_mask(BackwardParams const& params, Place const& place, StreamedTileInfo const& next) {
    int const along = place.thread.lane / 4, across = place.thread.lane % 4 * 2;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (OfKeys) {
        static_assert(Words == 2, "a vector");
        unsigned const key = min(place.key + along + row_of(i) + place.tile.sequence.leftpad, params.n_kv - 1);
        if (params.mask.row == 0) {  // the same for all rows
          seen_[i][0] = seen_[i][1] = 0 - (__ldg(next.mask + key / 32) >> key % 32 & 1);
        } else {
          uint2 const rows =
              __ldg(reinterpret_cast<uint2 const*>(next.mask + uint64_t(key) * unsigned(TransposedMask(params).words)));
          seen_[i][0] = rows.x >> across, seen_[i][1] = rows.y >> across;
        }
      } else {
        PairMod const pairs = place.pairs(params, next.head);
        CUTE_UNROLL
        for (int word = 0; word < Words; ++word)
          seen_[i][word] = pairs.seen(params, place.tile.sequence.visibility, place.row + along + row_of(i),
                                      place.key + 32 * word) >>
                           across;
      }
    }
  }

  /// Where the bit of an element of the eight `m` lies in its word of `kept_`: of the side in hand the thread's first
  /// or second, `i`, of the other `odd`. As the draws leave it.
  CUTE_DEVICE static constexpr int bit_of(int m, int odd, int i) {
    return OfKeys ? PairMod::bit_of_keys(m, odd, i) : PairMod::bit_of_rows(m, odd, i);
  }

  /// Draws for the warp's 16 rows.
  template <class Place>
  CUTE_DEVICE void draw(Threshold const& threshold, Place const& place, PairMod const& pairs) {
    static_assert(OfKeys || Step % 64 == 0, "whole words");
    CUTE_UNROLL
    for (int word = 0; word < Step / 64; ++word)
      kept_[word] = pairs.kept_of_rows(threshold, place.row, place.key + word * 64, place.thread.lane);
  }

  /// The same from the side of keys, for the warp's 16 keys and 64 rows.
  template <class Place>
  CUTE_DEVICE void draw_across(Threshold const& threshold, Place const& place, PairMod const& pairs) {
    static_assert(!OfKeys || Step == 64, "as many rows as are drawn for");
    kept_[0] = pairs.kept_of_keys(threshold, place.row, place.key, threadIdx.x % 32);
  }

  uint32_t seen_[2][Words];   // of a mixed tile, from the thread's first column on
  uint32_t kept_[Step / 64];  // bits of elements (i, j), where bit_of() says
};

}  // namespace cutlass_ext::sm90

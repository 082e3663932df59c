// A table of kernels that cannot be launched: the tiles, the threads and the shared memory of those in csrc/kernels/,
// as they were when this was written. plan_test.cpp says what the host makes of them, backward_test.cpp of those of the
// backward pass.
#include <cstdint>

#include "fmha/decode/params.hpp"
#include "fmha/features.hpp"
#include "fmha/pairs.hpp"
#include "host/kernel_table.hpp"

namespace cutlass_ext {
namespace {

using namespace feature;

constexpr Features kTiles =
    kScoreMods | kPairs | Sink | Packed | kUnlike | FewerKeys | Pages | FixedSplits | Float32Results | UnalignedRows;
constexpr Features kPersistent = Sink | Packed | kUnlike | FewerKeys | Pages | FixedSplits | Float32Results;
constexpr Features kPlainDecode = KeyLengths | StartPositions | FewerKeys | Pages;
constexpr Features kDecode =
    kScoreMods | Sink | Packed | kUnlike | kCache | FixedSplits | Float32Results | UnalignedRows;

/// Something that no other kernel has: the host knows kernels by their entries.
void const* new_entry() {
  static uintptr_t entries = 0;
  return reinterpret_cast<void const*>(++entries);
}

Kernel simt(int d, int b_r, int b_c, int threads, int shared) {
  return {"simt", Kind::Tiles, DType::Float32, d, d, b_r, b_c, kTiles, threads, shared, new_entry(), nullptr, nullptr};
}
Kernel few_tiles(int d, int shared) {
  Kernel kernel = simt(d, 32, 64, 128, shared);
  kernel.takes_shape = [](Params const& p) {
    return !p.fixed_splits && (p.longest_kv > 0 ? p.longest_kv : p.n_kv) <= 192;
  };
  return kernel;
}
Kernel sm80(DType dtype, int d, int b_r, int b_c, int shared) {
  return {"sm80", Kind::Tiles, dtype, d, d, b_r, b_c, kTiles, 128, shared, new_entry(), nullptr, nullptr};
}
Kernel sm90(DType dtype, int d, int d_v, int b_r, int b_c, int shared, Features more = 0) {
  return {"sm90",        Kind::Persistent, dtype,       d,       d_v,    b_r, b_c, kPersistent | more,
          2 * b_r + 128, shared,           new_entry(), nullptr, nullptr};
}
/// Of calls with a bias that the copy engine brings, and with a mask.
Kernel plain_bias(DType dtype, int d, int b_r, Features mask = 0) {
  Kernel kernel = sm90(dtype, d, d, b_r, 128, 231424, feature::Bias | mask);
  kernel.takes &= ~LeftPadding;
  kernel.wants = feature::Bias | mask;
  kernel.takes_shape = [](Params const& p) { return is_copyable(p.bias) || shares_bias(p); };
  return kernel;
}
/// Of calls with a mask: in tiles of more than 128 rows one of keys alone.
Kernel mask_alone(DType dtype, int d, int b_r, int shared) {
  Kernel kernel = sm90(dtype, d, d, b_r, 128, shared, feature::Mask);
  kernel.wants = feature::Mask;
  if (b_r > 128) kernel.takes_shape = [](Params const& p) { return p.mask.row == 0; };
  return kernel;
}
/// Of calls with dropout, with or without a mask.
Kernel dropping(DType dtype, int d, int threads, int shared) {
  Kernel kernel = sm90(dtype, d, d, 128, 128, shared, feature::Mask | feature::Dropout);
  kernel.threads = threads;
  kernel.wants = feature::Dropout;
  return kernel;
}
Kernel in_parts(int d, int d_v, int b_c, int shared, Features more = 0) {
  Features const takes = (kPersistent & ~(FixedSplits | Float32Results)) | more;
  return {"sm90", Kind::Persistent, DType::Float32, d,       d_v,    128, b_c, takes,
          384,    shared,           new_entry(),    nullptr, nullptr};
}
/// The same of any GPU.
Kernel in_portable_parts(int d, int b_c, int threads, int shared) {
  Features const takes = kTiles & ~(FixedSplits | Float32Results | UnalignedRows);
  return {"sm80", Kind::Tiles, DType::Float32, d, d, 64, b_c, takes, threads, shared, new_entry(), nullptr, nullptr};
}
Kernel brief(DType dtype, int d, int warpgroups, int shared, Features more = 0) {
  int const threads = 128 * warpgroups + 32;
  return {"sm90", Kind::Short, dtype, d, d, 64, 64, Sink | more, threads, shared, new_entry(), nullptr, nullptr};
}
/// Of calls with a mask; with dropout, too, or with dropout alone; and with a bias, and whatever of both.
Kernel brief_with(Features wants, Features more, DType dtype, int d, int shared) {
  Kernel kernel = brief(dtype, d, 1, shared, wants | more);
  kernel.wants = wants;
  kernel.takes_shape = [](Params const& p) {
    return (!has_mask(p) || p.n_kv <= 2048) && (!has_bias(p) || is_copyable(bias_of(p)) || shares_bias(p));
  };
  return kernel;
}
Kernel decode(DType dtype, int d, int b_r, int b_c, int threads, int shared, Features takes = kDecode) {
  char const* const family = dtype == DType::Float32 ? "simt" : "sm80";
  auto const short_tile = [](Params const& p) { return decode::fits(p, 16); };
  auto const tall_tile = [](Params const& p) { return decode::fits(p, 64); };
  return {family, Kind::Decode, dtype,   d,      d,           b_r,
          b_c,    takes,        threads, shared, new_entry(), b_r == 16 ? +short_tile : +tall_tile,
          nullptr};
}
/// Hopper's, beside a launch that prefills.
Kernel decode_beside(DType dtype, int d, int threads, int shared, Features takes = kDecode & ~FixedSplits) {
  Kernel kernel = decode(dtype, d, 16, 16, threads, shared, takes);
  kernel.family = "sm90";
  kernel.takes_shape = [](Params const& p) { return p.is_beside_chunks() && decode::fits(p, 16); };
  return kernel;
}
template <int d, bool packed = false>
Kernel narrow(DType dtype, int shared) {
  auto const takes_shape = [](Params const& p) {
    return decode::is_narrow(p, d) && p.batch <= decode::kNarrowBatch && p.packed() == packed;
  };
  Features const takes = kPlainDecode | (packed ? Packed : 0);
  return {"sm80", Kind::Narrow, dtype, d, d, 8, 16, takes, 128, shared, new_entry(), takes_shape, nullptr};
}
template <int d>
Kernel cluster(DType dtype, int shared, Features more = 0) {
  auto const takes_shape = [](Params const& p) {
    return decode::is_narrow(p, d) && p.batch < 65536 && p.heads_kv < 65536;
  };
  Features const takes = kPlainDecode | more;
  return {"sm90", Kind::Cluster, dtype, d, d, 8, 16, takes, 256, shared, new_entry(), takes_shape, nullptr};
}

/// The kernels of the backward pass: a CTA of dQ's has `b_r` rows, of the others `b_c` keys.
Kernel gradients(Kind kind, char const* family, DType dtype, int d, int b_r, int b_c, Features takes,
                 int shared = 98304) {
  return {family, kind, dtype, d, d, b_r, b_c, takes, 256, shared, new_entry(), nullptr, nullptr};
}
Kernel in_splits(Kernel kernel) {
  kernel.loop.splits = true;
  return kernel;
}
/// Hopper's that have sums for dQ, of calls without more, or with what they want.
Kernel adding(DType dtype, int d, int b_c, int shared, Features wants = 0) {
  Features const takes = Sink | Packed | (kUnlike & ~(wants & feature::Bias ? LeftPadding : 0)) | wants;
  Kernel kernel = gradients(Kind::AllGradients, "sm90", dtype, d, 64, b_c, takes, shared);
  kernel.wants = wants;
  kernel.loop.persistent = true;
  kernel.loop.splits = wants != feature::Dropout;
  kernel.loop.any_order = !(wants & (feature::Mask | feature::Dropout));
  kernel.loop.in_order = !(wants & feature::Dropout) && d <= 128;
  kernel.loop.fuses_postprocess = d <= 128;
  kernel.loop.cluster = d == 192 ? 2 : 1;
  return kernel;
}
/// Hopper's that have none, of calls without pairs.
Kernel splitting(Kind kind, DType dtype, int d, int b_r, int b_c) {
  Kernel kernel = gradients(kind, "sm90", dtype, d, b_r, b_c, Sink | Packed | kUnlike);
  kernel.loop.splits = true;
  return kernel;
}
/// The same of slopes.
Kernel splitting_alibi(Kind kind, DType dtype, int d, int b_r, int b_c) {
  Kernel kernel = splitting(kind, dtype, d, b_r, b_c);
  kernel.takes |= Alibi;
  return kernel;
}
/// Of heads of eight tiles of 64 rows at most.
Kernel of_heads(DType dtype, int d, Features more = 0) {
  Kernel kernel = gradients(Kind::HeadGradients, "sm90", dtype, d, 64, 128, Sink | Packed | kUnlike | more);
  kernel.wants = more;
  kernel.loop.persistent = kernel.loop.preprocesses_rows = true;
  kernel.takes_shape = [](Params const& p) { return (p.n_q + 63) / 64 * (p.heads_q / p.heads_kv) <= 8; };
  return kernel;
}
/// Of heads that a cluster has, whose CTAs pass sums of dQ on.
Kernel passing(DType dtype, int d) {
  Kernel kernel = of_heads(dtype, d);
  kernel.loop.dq_through_cluster = true, kernel.loop.preprocesses_rows = false;
  kernel.shared_bytes = 220000;
  kernel.takes_shape = [](Params const& p) { return p.head_dim > 64 && p.n_kv <= 1024; };
  return kernel;
}
/// Of heads of `most` rows and keys at most, without a launch before them.
template <int most>
Kernel whole_heads(Kind kind, DType dtype, int shared) {
  auto const takes_shape = [](Params const& p) { return p.n_q <= most && p.n_kv <= most; };
  Features const takes = kMods | Sink | Packed | kUnlike;
  return {"sm80", kind, dtype, 64, 64, most, most, takes, 2 * most, shared, new_entry(), takes_shape, nullptr};
}
RegisteredKernels of_gradients(DType t) {
  constexpr Features kPlain = Sink | Packed | kUnlike, kAll = kPlain | kScoreMods | kPairs | UnalignedRows;
  constexpr Kind kKeys = Kind::KeyGradients, kRows = Kind::QueryGradients;
  return {
      splitting(kKeys, t, 64, 64, 128),
      splitting(kRows, t, 64, 128, 64),
      splitting(kKeys, t, 128, 64, 128),
      splitting(kRows, t, 128, 128, 64),
      splitting_alibi(kKeys, t, 192, 64, 64),
      splitting_alibi(kRows, t, 192, 64, 64),
      gradients(kKeys, "sm80", t, 64, 64, 64, kAll),
      gradients(kRows, "sm80", t, 64, 64, 64, kAll),
      gradients(kKeys, "sm80", t, 128, 64, 32, kAll),
      gradients(kRows, "sm80", t, 128, 64, 64, kAll),
      in_splits(gradients(Kind::AllGradients, "sm80", t, 64, 32, 128, kPlain | kScoreMods, 65536)),
      in_splits(gradients(Kind::AllGradients, "sm80", t, 128, 64, 128, kPlain | kScoreMods, 163840)),
      in_splits(gradients(Kind::AllGradients, "sm80", t, 192, 64, 64, kPlain | kScoreMods, 165000)),
      adding(t, 64, 128, 200000),
      adding(t, 64, 192, 225000),
      adding(t, 96, 128, 220000),
      adding(t, 128, 128, 220000),
      adding(t, 192, 128, 230000),
      adding(t, 128, 128, 98304, feature::Dropout),
      adding(t, 128, 128, 220000, feature::Bias),
      adding(t, 128, 128, 220000, feature::Mask),
      adding(t, 128, 128, 220000, feature::Bias | feature::Mask),
      gradients(Kind::AllGradients, "sm90", t, 128, 64, 128, kPlain | feature::kBias),
      of_heads(t, 64),
      of_heads(t, 64, feature::Dropout),
      of_heads(t, 64, feature::Mask),
      passing(t, 96),
      passing(t, 128),
      whole_heads<64>(Kind::HeadGradients, t, 49152),
      whole_heads<128>(Kind::HeadGradients, t, 98304),
      gradients(Kind::BiasGradients, "sm90", t, 64, 128, 128, Sink | kUnlike | Alibi | kPairs),
      gradients(Kind::BiasGradients, "sm90", t, 128, 128, 128, Sink | kUnlike | Alibi | kPairs),
      gradients(kKeys, "sm80", t, 256, 32, 32, kAll),  // and there is no dQ of so large a head_dim
  };
}

RegisteredKernels of_16_bits(DType t) {
  return {
      sm80(t, 64, 128, 64, 49280),
      sm80(t, 64, 64, 64, 41088),
      sm80(t, 128, 128, 48, 82048),
      sm80(t, 128, 64, 64, 49280),
      sm80(t, 192, 64, 80, 86144),
      sm80(t, 192, 64, 32, 73856),
      sm80(t, 256, 64, 64, 107136),  // two warps share rows
      sm80(t, 256, 64, 64, 98432),
      sm90(t, 64, 64, 192, 128, 173056),
      sm90(t, 64, 64, 128, 128, 148480),
      sm90(t, 64, 64, 128, 128, 231424, kScoreMods | kPairs),
      sm90(t, 64, 64, 128, 128, 148480, kScoreMods),
      plain_bias(t, 64, 192),
      plain_bias(t, 64, 192, feature::Mask),
      sm90(t, 64, 64, 128, 128, 231424, feature::kBias),
      mask_alone(t, 64, 192, 190464),
      mask_alone(t, 64, 128, 165888),
      dropping(t, 64, 640, 216064),
      sm90(t, 80, 80, 192, 96, 197632),
      sm90(t, 80, 80, 128, 128, 230400),
      sm90(t, 96, 96, 192, 96, 197632),
      sm90(t, 96, 96, 128, 128, 230400),
      sm90(t, 96, 96, 128, 128, 230400, kScoreMods | kPairs),
      sm90(t, 112, 112, 192, 96, 197632),
      sm90(t, 112, 112, 128, 128, 230400),
      sm90(t, 128, 128, 192, 80, 181248),
      sm90(t, 128, 128, 128, 128, 230400),
      sm90(t, 128, 128, 128, 128, 231424, kScoreMods | kPairs),
      sm90(t, 128, 128, 128, 128, 230400, kScoreMods),
      plain_bias(t, 128, 128),
      plain_bias(t, 128, 128, feature::Mask),
      mask_alone(t, 128, 128, 231424),
      dropping(t, 128, 384, 231424),
      sm90(t, 192, 128, 128, 112, 226304),
      sm90(t, 192, 128, 128, 112, 226304, kScoreMods),
      sm90(t, 192, 192, 128, 96, 230400),
      sm90(t, 192, 192, 128, 80, 205824, kScoreMods),
      sm90(t, 256, 256, 128, 64, 230400),
      sm90(t, 256, 256, 128, 64, 230400, kScoreMods),
      whole_heads<64>(Kind::Heads, t, 24576),
      brief(t, 64, 1, 25600),
      brief(t, 64, 1, 25600, Packed | kUnlike),
      brief_with(feature::Mask, 0, t, 64, 25600),
      brief_with(feature::Dropout, feature::Mask, t, 64, 25600),
      brief_with(feature::Bias, feature::Mask | feature::Dropout, t, 64, 33792),
      brief(t, 64, 2, 93184),
      brief(t, 128, 1, 50176),
      brief(t, 128, 1, 50176, Packed | kUnlike),
      brief_with(feature::Mask, 0, t, 128, 50176),
      brief_with(feature::Dropout, feature::Mask, t, 128, 50176),
      brief_with(feature::Bias, feature::Mask | feature::Dropout, t, 128, 58368),
      brief(t, 128, 2, 183296),
      decode(t, 64, 16, 16, 128, 99456, kPlainDecode | Packed),
      decode(t, 64, 16, 16, 128, 99456),
      decode(t, 64, 64, 64, 128, 99072),
      decode(t, 128, 16, 16, 128, 99456, kPlainDecode | Packed),
      decode(t, 128, 16, 16, 128, 99456),
      decode(t, 128, 64, 64, 128, 99072),
      decode(t, 192, 16, 16, 64, 80512, kPlainDecode | Packed),
      decode(t, 192, 16, 16, 64, 80512),
      decode(t, 192, 64, 32, 128, 99072),
      decode(t, 256, 16, 16, 64, 74368, kPlainDecode | Packed),
      decode(t, 256, 16, 16, 64, 74368),
      decode(t, 256, 64, 32, 128, 99072),
      decode_beside(t, 64, 384, 199552, kPlainDecode | Packed),
      decode_beside(t, 64, 256, 198784),
      decode_beside(t, 128, 384, 199552, kPlainDecode | Packed),
      decode_beside(t, 128, 256, 198784),
      narrow<64>(t, 55680),
      narrow<64, true>(t, 57728),
      narrow<128>(t, 105856),
      narrow<128, true>(t, 107904),
      cluster<64>(t, 214144),
      cluster<64>(t, 214144, NewKeys | RotaryEmbedding),
      cluster<128>(t, 230528),
      cluster<128>(t, 230528, NewKeys | RotaryEmbedding),
  };
}

RegisteredKernels const kHalf = of_16_bits(DType::Float16), kBFloat = of_16_bits(DType::BFloat16);
RegisteredKernels const kGradients = of_gradients(DType::BFloat16);
RegisteredKernels of_float_gradients(int d, int keys, int step) {
  constexpr Features kPlain = Sink | Packed | kUnlike, kParts = kPlain | kScoreMods | kPairs,
                     kAll = kParts | UnalignedRows;
  constexpr Kind kKeys = Kind::KeyGradients, kRows = Kind::QueryGradients;
  return {
      gradients(kKeys, "sm90", DType::Float32, d, 64, keys, kPlain),
      gradients(kRows, "sm90", DType::Float32, d, 128, step, kPlain),
      gradients(kKeys, "sm80", DType::Float32, d, step / 2, 64, kParts),
      gradients(kRows, "sm80", DType::Float32, d, 64, step / 2, kParts),
      in_splits(gradients(kKeys, "simt", DType::Float32, d, 32, d == 64 ? 128 : 64, kAll)),
      in_splits(gradients(kRows, "simt", DType::Float32, d, 64, 32, kAll)),
      in_splits(gradients(Kind::AllGradients, "simt", DType::Float32, d, 32, d == 64 ? 128 : 64, kAll & ~kPairs)),
  };
}
RegisteredKernels const kFloatGradients[] = {of_float_gradients(64, 128, 64), of_float_gradients(128, 64, 32)};
Kernel of_one_tile() {
  Kernel kernel = in_splits(gradients(Kind::AllGradients, "simt", DType::Float32, 64, 64, 64, Sink | Packed | kUnlike));
  kernel.takes |= kScoreMods | UnalignedRows;
  kernel.takes_shape = [](Params const& p) { return p.n_kv <= 64; };
  return kernel;
}
RegisteredKernels const kFloatGradientsOfOneTile{of_one_tile()};
RegisteredKernels const kFloat{
    simt(32, 128, 64, 128, 65536),
    simt(32, 64, 32, 128, 24576),
    few_tiles(32, 28672),
    simt(64, 128, 64, 128, 98304),
    simt(64, 32, 64, 64, 49152),
    simt(64, 64, 32, 128, 40960),
    few_tiles(64, 49152),
    simt(96, 64, 64, 128, 90112),
    simt(96, 64, 32, 128, 57344),
    simt(128, 128, 96, 256, 212992),
    simt(128, 64, 64, 128, 114688),
    simt(128, 64, 32, 128, 73728),
    few_tiles(128, 90112),
    simt(192, 64, 32, 128, 106496),
    simt(192, 32, 32, 64, 77824),
    simt(224, 32, 32, 64, 90112),
    simt(256, 128, 32, 256, 212992),
    simt(256, 64, 32, 128, 139264),
    in_parts(64, 64, 128, 197760),
    in_parts(64, 64, 128, 197760, kScoreMods),
    in_parts(128, 128, 64, 197760),
    in_parts(128, 128, 64, 197760, kScoreMods),
    in_parts(192, 128, 48, 222336),
    in_parts(192, 128, 48, 222336, kScoreMods),
    in_portable_parts(64, 64, 128, 82304),
    in_portable_parts(128, 48, 128, 82304),
    in_portable_parts(256, 32, 256, 141056),
    decode(DType::Float32, 64, 16, 8, 128, 70784),
    decode(DType::Float32, 128, 16, 8, 128, 74880),
    decode(DType::Float32, 256, 16, 8, 64, 82560),
};

}  // namespace
}  // namespace cutlass_ext

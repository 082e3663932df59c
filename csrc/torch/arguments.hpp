// The operators' arguments as one struct, with their schemas and the reader of boxed calls, all made of options.def;
// and what becomes of them. Used by torch/ alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../fmha/pack_mask.hpp"
#include "../host/backward.hpp"
#include "tensor.hpp"

namespace cutlass_ext {

/// `fmha` has q, k, v; `fmha_backward` these, the forward's results and their gradients; `fmha_kvcache` q, k_cache,
/// v_cache and perhaps new k and v. `fmha_out` and `fmha_kvcache_out` have out beside them, and write the result there.
enum class Operator { Fmha, FmhaOut, Backward, KVCache, KVCacheOut };

struct Arguments {
  Operator of;
  Tensor q, k, v;                 // k and v are the caches of fmha_kvcache
  Tensor k_new, v_new;            // of fmha_kvcache
  Tensor out;                     // what is written, or the forward's result of fmha_backward
  Tensor dout, lse, delta, dlse;  // of fmha_backward
  bool bias_grad = false;         // of fmha_backward: whether dbias is asked for
#define SHARED_OPTION(schema, type, name, default_value) type name{};
#define PREFILL_OPTION(schema, type, name, default_value) type name{};
#define CACHE_OPTION(schema, type, name, default_value) type name{};
#include "../options.def"

  /// Reads the arguments off a boxed call's stack, which owns them no longer.
  Arguments(Operator of, StableIValue const* stack);

  bool is_cache() const { return of == Operator::KVCache || of == Operator::KVCacheOut; }
  bool writes_out() const { return of == Operator::FmhaOut || of == Operator::KVCacheOut; }
  bool is_backward() const { return of == Operator::Backward; }
  bool packed() const { return bool(cu_seqlens_q); }
  bool on_cuda() const { return q.device_type == kCuda; }
  /// Whether PyTorch's operators carry the call out.
  bool by_torch() const { return !on_cuda() || backend == "torch"; }
  /// What lse, slopes and sinks have, in which scores are computed.
  int32_t dtype_of_scores() const { return q.dtype == kFloat64 ? kFloat64 : kFloat32; }
  int64_t batch() const { return packed() ? cu_seqlens_q.size(0) - 1 : q.size(0); }
  int64_t sinks() const { return sink ? q.size(-2) : 0; }
  /// What the fifth gradient is of; none where nobody asked for it.
  Tensor const* with_dbias() const { return bias && bias_grad ? &bias : nullptr; }
  /// Whether results are float32 beside inputs of 16 bits.
  bool widens() const { return out_dtype && q.dtype != kFloat32; }
  int32_t dtype_of_results() const { return out_dtype ? kFloat32 : q.dtype; }
  int64_t new_keys() const { return k_new ? k_new.size(1) : 0; }
  int64_t page_rows() const { return k.size(1); }
  /// Keys that a sequence of a cache or of pages has room for.
  int64_t capacity() const { return block_table ? block_table.size(1) * page_rows() : page_rows(); }

  static inline int32_t const kCuda = aoti_torch_device_type_cuda();
};

/// "name(arguments) -> returns". A cache that is written to is marked so where `appends`.
std::string schema_of(Operator of, std::string const& name, bool appends, char const* returns);

/// Throws what is wrong with the arguments, naming the argument, what came and what would do.
void check(Arguments const& arguments);

/// The same of what pack_mask is given.
void check_mask_to_pack(Tensor const& mask);

/// Of [batch, row, head, head_dim], or of packed [row, head, head_dim].
Strides strides_of(Tensor const& t);

/// What checked arguments come to, what is written and work aside.
Params params_of(Arguments const& arguments);
BackwardParams backward_params_of(Arguments const& arguments);
Request request_of(Arguments const& arguments);

/// A bool tensor of scores; `once`: of which a dimension that repeats its elements has one.
ByteMask bytes_of(Tensor const& mask, bool once = true);

}  // namespace cutlass_ext

// Schemas and the reader of boxed calls, and Params from arguments. See arguments.hpp.
#include "arguments.hpp"

#include <cmath>

namespace cutlass_ext {
namespace {

constexpr int64_t kUnboundedWindow = int64_t(1) << 30;

template <class T>
void read(StableIValue from, T* to) {
  *to = torch::stable::detail::to<T>(from);
}
void read(StableIValue from, Tensor* to) { *to = Tensor(torch::stable::detail::to<AtenTensorHandle>(from)); }
/// torch 2.10's own conversion leaks a string a call.
void read(StableIValue from, std::string* to) {
  auto const handle = torch::stable::detail::to<StringHandle>(from);
  size_t length;
  char const* text;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
  to->assign(text, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
}
void read(StableIValue from, std::optional<std::string>* to) {
  if (auto* const found = torch::stable::detail::to<StableIValue*>(from)) {
    read(*found, &to->emplace());
    delete found;
  }
}
void read_optional(StableIValue from, Tensor* to) {
  if (auto* const found = torch::stable::detail::to<StableIValue*>(from)) {
    read(*found, to);
    delete found;
  }
}

/// `schema` tells optional tensors from others; every other type says so itself.
template <class T>
void read(char const*, StableIValue from, T* to) {
  read(from, to);
}
void read(char const* schema, StableIValue from, Tensor* to) {
  schema[6] == '?' ? read_optional(from, to) : read(from, to);
}

void look(Tensor* t) { t->look(); }
template <class T>
void look(T*) {}

int bounded_window(int64_t window) { return window >= kUnboundedWindow ? -1 : static_cast<int>(window); }

/// Keys that lie in pages, or in a cache that may have more sequences than the call.
void set_places(Arguments const& a, Params* p) {
  p->n_kv = a.k.size(0) > 0 ? static_cast<int>(a.capacity()) : 0;  // without pages there is nothing to read
  p->pages = static_cast<int>(a.k.size(0));
  if (a.block_table) {
    p->block_table = a.block_table.as<int>();
    p->block_table_stride = a.block_table.stride(0);
    p->page_rows = cutlass::FastDivmod(static_cast<int>(a.page_rows()));
  }
}

/// The stride of a dimension of a tensor of scores: 0 where it has one element for all.
int64_t broadcast_stride(Tensor const& t, int i, int64_t stride) { return t.size(i) == 1 ? 0 : stride; }

/// The rows of a mask that was packed to so many: one for all, or `n_q`.
int packed_rows_of(int stored_rows, int n_q) { return stored_rows == Mask::stored_rows(n_q) ? n_q : 1; }

/// Bias, mask and dropout. The bits of the mask are those that operators.cpp packs; until then its bytes stand for
/// them.
void set_pairs(Arguments const& a, Params* p) {
  if (Tensor const& t = a.bias) {
    p->bias.data = t.data;
    p->bias.type = t.dtype == kFloat32   ? BiasType::Float32
                   : t.dtype == kFloat16 ? BiasType::Float16
                                         : BiasType::BFloat16;
    p->bias.batch = broadcast_stride(t, 0, t.stride(0));
    p->bias.head = broadcast_stride(t, 1, t.stride(1));
    p->bias.row = broadcast_stride(t, 2, t.stride(2));
    p->bias.key = t.stride(3);
  }
  if (Tensor const& t = a.mask) {
    ByteMask const of = bytes_of(t);
    bool const packed = t.dtype == kInt32;
    int const rows = packed ? packed_rows_of(of.rows, p->n_q) : of.rows;
    p->mask = Mask(of.batch, of.heads, rows, packed ? p->n_kv : of.keys);
    p->mask.bits = t.as<uint32_t>();
  }
  auto const threshold = static_cast<uint32_t>(std::round(a.dropout_p * 0x1p32));
  if (threshold > 0) {
    p->dropout = {a.dropout_seed.as<int64_t>(),
                  threshold,
                  static_cast<float>(1.0 / (1.0 - a.dropout_p)),
                  static_cast<int>(a.head_start),
                  static_cast<int>(a.sequence_start),
                  static_cast<int>(a.key_start),
                  a.key_starts.as<int>()};
  }
}

void set_cache(Arguments const& a, Params* p) {
  p->n_cached = static_cast<int>(a.cache_len.value_or(p->n_kv));
  p->seqused_k = a.cache_seqlens.as<int>();
  p->leftpad_k = a.cache_leftpad.as<int>();
  p->batch_idx = a.cache_batch_idx.as<int>();
  if (a.new_keys() > 0) {
    p->k_new = a.k_new.data;
    p->v_new = a.v_new.data;
    p->k_new_stride = strides_of(a.k_new);
    p->v_new_stride = strides_of(a.v_new);
    p->n_new = static_cast<int>(a.new_keys());
  }
  if (a.rotary_cos) {
    p->rotary = {a.rotary_cos.data,
                 a.rotary_sin.data,
                 a.rotary_cos.stride(0),
                 static_cast<int>(a.rotary_cos.size(0)),
                 static_cast<int>(2 * a.rotary_cos.size(1)),
                 a.rotary_interleaved,
                 p->window_left >= 0 || p->window_right >= 0};
  }
}

}  // namespace

Arguments::Arguments(Operator of, StableIValue const* stack) : of(of) {
  if (is_backward()) read(*stack++, &dout);
  read(*stack++, &q);
  read(*stack++, &k);
  read(*stack++, &v);
  if (writes_out()) read(*stack++, &out);
  if (is_backward()) {
    read_optional(*stack++, &out);
    read(*stack++, &lse);
    read_optional(*stack++, &delta);
    read_optional(*stack++, &dlse);
    read(*stack++, &bias_grad);
  }
  if (is_cache()) {
    read_optional(*stack++, &k_new);
    read_optional(*stack++, &v_new);
  }
#define SHARED_OPTION(schema, type, name, default_value) read(schema, *stack++, &name);
#define PREFILL_OPTION(schema, type, name, default_value) \
  if (!is_cache()) read(schema, *stack++, &name);
#define CACHE_OPTION(schema, type, name, default_value) \
  if (is_cache()) read(schema, *stack++, &name);
#include "../options.def"
  for (Tensor* const t : {&q, &k, &v, &k_new, &v_new, &dout, &out, &lse, &delta, &dlse}) t->look();
#define SHARED_OPTION(schema, type, name, default_value) look(&name);
#define PREFILL_OPTION(schema, type, name, default_value) look(&name);
#define CACHE_OPTION(schema, type, name, default_value) look(&name);
#include "../options.def"
}

Strides strides_of(Tensor const& t) { return {t.dim() == 4 ? t.stride(0) : 0, t.stride(-3), t.stride(-2)}; }

std::string schema_of(Operator of, std::string const& name, bool appends, char const* returns) {
  bool const is_cache = of == Operator::KVCache || of == Operator::KVCacheOut;
  bool const is_backward = of == Operator::Backward;
  std::string text = name + (is_backward ? "(Tensor dout, Tensor q, Tensor k, Tensor v"
                             : !is_cache ? "(Tensor q, Tensor k, Tensor v"
                             : appends   ? "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache"
                                         : "(Tensor q, Tensor k_cache, Tensor v_cache");
  if (of == Operator::FmhaOut || of == Operator::KVCacheOut) text += ", Tensor(c!) out";
  if (is_cache) text += ", Tensor? k=None, Tensor? v=None";
  if (is_backward) text += ", Tensor? out, Tensor lse, Tensor? delta=None, Tensor? dlse=None, bool bias_grad=True";
  auto const add = [&](char const* schema, char const* option, char const* default_value) {
    text = text + ", " + schema + " " + option + "=" + default_value;
  };
#define SHARED_OPTION(schema, type, name, default_value) add(schema, #name, default_value);
#define PREFILL_OPTION(schema, type, name, default_value) \
  if (!is_cache) add(schema, #name, default_value);
#define CACHE_OPTION(schema, type, name, default_value) \
  if (is_cache) add(schema, #name, default_value);
#include "../options.def"
  return text + ") -> " + returns;
}

ByteMask bytes_of(Tensor const& mask, bool once) {
  auto const size = [&](int i) {
    return static_cast<int>(once && mask.size(i) > 1 && mask.stride(i) == 0 ? 1 : mask.size(i));
  };
  return {mask.as<uint8_t>(), size(0),        size(1),        size(2),       static_cast<int>(mask.size(3)),
          mask.stride(0),     mask.stride(1), mask.stride(2), mask.stride(3)};
}

Params params_of(Arguments const& a) {
  Params p;
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.q_stride = strides_of(a.q);
  p.k_stride = strides_of(a.k);
  p.v_stride = strides_of(a.v);
  p.element_bytes = a.q.dtype == kFloat32 ? 4 : 2;
  p.batch = static_cast<int>(a.batch());
  p.n_q = static_cast<int>(a.q.size(-3));
  p.heads_q = static_cast<int>(a.q.size(-2));
  p.head_dim = static_cast<int>(a.q.size(-1));
  p.n_kv = static_cast<int>(a.k.size(-3));
  p.heads_kv = static_cast<int>(a.k.size(-2));
  p.head_dim_v = static_cast<int>(a.v.size(-1));
  p.seqused_k = a.seqused_k.as<int>();
  p.leftpad_k = a.leftpad_k.as<int>();
  if (a.packed()) {
    p.cu_seqlens_q = a.cu_seqlens_q.as<int>();
    p.total_q = p.n_q;
    p.n_q = static_cast<int>(std::min<int64_t>(*a.max_seqlen_q, p.total_q));
  }
  if (a.cu_seqlens_k) {
    p.cu_seqlens_k = a.cu_seqlens_k.as<int>();
    p.total_k = p.n_kv;
    p.n_kv = static_cast<int>(std::min<int64_t>(*a.max_seqlen_k, p.total_k));
  }
  if (a.is_cache() || a.block_table) set_places(a, &p);
  p.longest_kv = static_cast<int>(std::min<int64_t>(a.max_seqlen_k.value_or(p.n_kv), p.n_kv));
  p.softmax_scale =
      static_cast<float>(a.softmax_scale ? *a.softmax_scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = static_cast<float>(a.softcap);
  p.alibi_slopes = a.alibi_slopes.as<float>();
  p.alibi_batch_stride = a.alibi_slopes && a.alibi_slopes.dim() == 2 ? a.alibi_slopes.stride(0) : 0;
  p.sink = a.sink.as<float>();
  p.start_pos_kind = a.start_positions ? StartPos::PerBatch : a.start_pos ? StartPos::Scalar : StartPos::End;
  p.start_pos = static_cast<int>(a.start_pos.value_or(0));
  p.start_positions = a.start_positions.as<int>();
  p.window_left = bounded_window(a.window_left);
  p.window_right = a.causal ? 0 : bounded_window(a.window_right);
  p.widens = a.widens();
  if (a.is_cache()) set_cache(a, &p);
  set_pairs(a, &p);
  return p;
}

BackwardParams backward_params_of(Arguments const& a) {
  BackwardParams p;
  static_cast<Params&>(p) = params_of(a);
  // The forward's results, which this pass reads alone.
  p.o = const_cast<void*>(a.out.data);
  if (a.out) p.o_stride = strides_of(a.out);
  p.lse = const_cast<float*>(a.lse.as<float>());
  p.dout = a.dout.data;
  p.dout_stride = strides_of(a.dout);
  p.delta = a.delta.as<float>();
  p.dlse = a.dlse.as<float>();
  return p;
}

Request request_of(Arguments const& a) {
  return {a.q.dtype == kFloat32   ? DType::Float32
          : a.q.dtype == kFloat16 ? DType::Float16
                                  : DType::BFloat16,
          a.backend,
          static_cast<int>(a.num_splits),
          a.is_cache(),
          a.deterministic,
          !a.precision             ? Precision::Any
          : *a.precision == "high" ? Precision::High
                                   : Precision::Highest};
}

}  // namespace cutlass_ext

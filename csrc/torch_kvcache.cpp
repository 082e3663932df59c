// torch.ops.cutlass_ext.fmha_kvcache*: attention to a key/value cache that may be paged and grow by the call. Checks
// arguments, fills DecodeParams, launches. Registers its operators next to torch_ops.cpp's.
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch_decode.hpp"

namespace cutlass_ext {
namespace {

/// "CACHE" stands for Tensor, and for Tensor(a!) where the call writes to it.
constexpr char kParameters[] =
    "(Tensor q, CACHEa k_cache, CACHEb v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "SymInt? cache_len, Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "bool rotary_interleaved, Tensor? alibi_slopes, Tensor? sink, SymInt? start_pos, Tensor? start_positions, "
    "SymInt num_splits, str backend)";

struct Arguments {
  View q, k_cache, v_cache;
  OptionalView k, v, rotary_cos, rotary_sin;
  std::optional<int64_t> cache_len;
  OptionalView cache_seqlens, cache_batch_idx, cache_leftpad, block_table;
  std::optional<double> softmax_scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
  bool rotary_interleaved;
  OptionalView alibi_slopes, sink;
  std::optional<int64_t> start_pos;  // none, and no start_positions: "end"
  OptionalView start_positions;
  int64_t num_splits;
  std::string const& backend;

  int64_t page_rows() const { return k_cache.size(1); }
  /// Keys that a sequence has room for.
  int64_t capacity() const { return block_table ? block_table->size(1) * page_rows() : page_rows(); }
};

/// An operator's boxed form from a function of Arguments, so that the parameter list stands once.
template <auto Body>
auto unpacked(Tensor q, Tensor k_cache, Tensor v_cache, OptionalTensor k, OptionalTensor v, OptionalTensor rotary_cos,
              OptionalTensor rotary_sin, std::optional<int64_t> cache_len, OptionalTensor cache_seqlens,
              OptionalTensor cache_batch_idx, OptionalTensor cache_leftpad, OptionalTensor block_table,
              std::optional<double> softmax_scale, bool causal, int64_t window_left, int64_t window_right,
              double softcap, bool rotary_interleaved, OptionalTensor alibi_slopes, OptionalTensor sink,
              std::optional<int64_t> start_pos, OptionalTensor start_positions, int64_t num_splits,
              std::string backend) {
  return Body(Arguments{View(q),
                        View(k_cache),
                        View(v_cache),
                        view_of(k),
                        view_of(v),
                        view_of(rotary_cos),
                        view_of(rotary_sin),
                        cache_len,
                        view_of(cache_seqlens),
                        view_of(cache_batch_idx),
                        view_of(cache_leftpad),
                        view_of(block_table),
                        softmax_scale,
                        causal,
                        window_left,
                        window_right,
                        softcap,
                        rotary_interleaved,
                        view_of(alibi_slopes),
                        view_of(sink),
                        start_pos,
                        view_of(start_positions),
                        num_splits,
                        backend});
}

// ---------------------------------------------------------------------------------------------- checks
void check_cache(Arguments const& a) {
  int64_t const batch = a.q.size(0), heads_q = a.q.size(2), heads_kv = a.k_cache.size(2);
  if (a.k_cache.size(3) != a.q.size(3))
    fail("ValueError", "k_cache: has head_dim ", a.k_cache.size(3), " and q has ", a.q.size(3), "; they must be equal");
  for (int i = 0; i < 3; ++i) {
    if (a.v_cache.size(i) != a.k_cache.size(i)) {
      fail("ValueError", "v_cache: has shape ", a.v_cache.shape_text(), " and k_cache ", a.k_cache.shape_text(),
           "; they must agree in all but the last dimension");
    }
  }
  check_groups(heads_q, "k_cache", heads_kv, "the cache");
  if (a.block_table) {
    View const& t = *a.block_table;
    if (t.dtype != ScalarType::Int) fail("TypeError", "block_table: has dtype ", t.dtype_name(), "; expected Int");
    if (t.dim() != 2 || t.size(0) != batch) {
      fail("ValueError", "block_table: has shape ", t.shape_text(),
           "; expected [batch, pages of a sequence], batch = ", batch);
    }
    if (t.size(1) > 1 && t.strides[1] != 1)
      fail("ValueError", "block_table: its last dimension is not contiguous; call .contiguous() on it");
    check_same_device("block_table", t, a.q);
    int64_t const rows = a.page_rows();
    if (rows < 1 || rows > 256 || (rows & (rows - 1)) != 0) {
      fail("ValueError", "k_cache: has pages of ", rows,
           " rows; with a block_table its shape is [pages, page size, heads, head_dim], the page size a power of two "
           "up to 256");
    }
    if (a.cache_batch_idx) fail("ValueError", "cache_batch_idx: does not go with block_table, whose rows say the same");
  } else if (!a.cache_batch_idx && a.k_cache.size(0) != batch) {
    fail("ValueError", "k_cache: has batch ", a.k_cache.size(0), " and q has ", batch,
         "; they must be equal, or cache_batch_idx say which sequence is where");
  }
  if (a.capacity() >= kMaxLength || batch * (a.capacity() / 8 + 1) >= (int64_t(1) << 31)) {
    fail("ValueError", a.block_table ? "block_table" : "k_cache", ": has room for ", batch, " x ", a.capacity(),
         " keys; expected fewer than 2^29 a sequence and 2^34 in all");
  }
}

void check_new(Arguments const& a) {
  int64_t const batch = a.q.size(0);
  if (a.k.has_value() != a.v.has_value())
    fail("ValueError", a.k ? "v" : "k", ": is None and ", a.k ? "k" : "v", " is not; give both or neither");
  if (a.k) {
    View const *const both[] = {&*a.k, &*a.v}, *const caches[] = {&a.k_cache, &a.v_cache};
    for (int i = 0; i < 2; ++i) {
      char const* name = i ? "v" : "k";
      View const& t = *both[i];
      check_heads(name, t, a.q, 4, "[batch, new tokens, heads, head_dim]");
      if (t.size(0) != batch || t.size(1) != a.k->size(1) || t.size(2) != a.k_cache.size(2) ||
          t.size(3) != caches[i]->size(3)) {
        fail("ValueError", name, ": has shape ", t.shape_text(), "; expected [batch, new tokens, heads of ", name,
             "_cache, its head_dim] = [", batch, ", ", a.k->size(1), ", ", a.k_cache.size(2), ", ", caches[i]->size(3),
             "]");
      }
    }
    if (!a.cache_len && !a.cache_seqlens)
      fail("ValueError",
           "cache_seqlens: is None; expected where the new k and v go, an int or an int32 tensor [batch]");
  }
  if (a.cache_len && a.cache_seqlens) fail("ValueError", "cache_seqlens: is given twice");
  int64_t const fresh = a.k ? a.k->size(1) : 0;
  if (a.cache_len && (*a.cache_len < 0 || *a.cache_len + fresh > a.capacity())) {
    fail("ValueError", "cache_seqlens: is ", *a.cache_len, ", with ", fresh,
         " new tokens; the cache has room for 0 to ", a.capacity(), " keys");
  }
  if (fresh > a.capacity())
    fail("ValueError", "k: has ", fresh, " new tokens, and the cache has room for ", a.capacity());
}

void check_rotary(Arguments const& a) {
  if (a.rotary_cos.has_value() != a.rotary_sin.has_value()) {
    fail("ValueError", a.rotary_cos ? "rotary_sin" : "rotary_cos", ": is None and ",
         a.rotary_cos ? "rotary_cos" : "rotary_sin", " is not; give both or neither");
  }
  if (!a.rotary_cos) return;
  if (!a.k) fail("ValueError", "rotary_cos: rotates q and the new keys; give k and v");
  View const* const tables[] = {&*a.rotary_cos, &*a.rotary_sin};
  for (View const* t : tables) {
    char const* name = t == tables[0] ? "rotary_cos" : "rotary_sin";
    if (t->dtype != a.q.dtype)
      fail("TypeError", name, ": has dtype ", t->dtype_name(), " and q ", a.q.dtype_name(), "; they must be equal");
    if (t->dim() != 2 || t->size(0) < 1 || t->size(1) < 1 || 2 * t->size(1) > a.q.size(3)) {
      fail("ValueError", name, ": has shape ", t->shape_text(),
           "; expected [positions, rotary_dim / 2], rotary_dim at most head_dim = ", a.q.size(3));
    }
    if (t->size(0) != tables[0]->size(0) || t->size(1) != tables[0]->size(1))
      fail("ValueError", name, ": has shape ", t->shape_text(), " and rotary_cos ", tables[0]->shape_text());
    if (t->strides[1] != 1 || t->strides[0] != tables[0]->strides[0])
      fail("ValueError", name, ": is not contiguous; call .contiguous() on it");
    check_same_device(name, *t, a.q);
    if (t->size(0) >= kMaxLength) fail("ValueError", name, ": has ", t->size(0), " rows; expected fewer than 2^29");
  }
}

void check(Arguments const& a) {
  check_heads("q", a.q, a.q, 4, "[batch, seq, heads, head_dim]");
  char const* layout = a.block_table ? "[pages, page size, heads, head_dim]" : "[batch, seq, heads, head_dim]";
  check_heads("k_cache", a.k_cache, a.q, 4, layout);
  check_heads("v_cache", a.v_cache, a.q, 4, layout);
  int64_t const batch = a.q.size(0);
  check_cache(a);
  check_new(a);
  check_rotary(a);
  check_vector("cache_seqlens", a.cache_seqlens, a.q, ScalarType::Int, batch, "[batch]");
  check_vector("cache_batch_idx", a.cache_batch_idx, a.q, ScalarType::Int, batch, "[batch]");
  check_vector("cache_leftpad", a.cache_leftpad, a.q, ScalarType::Int, batch, "[batch]");
  check_vector("start_pos", a.start_positions, a.q, ScalarType::Int, batch, "[batch]");
  check_options(a.q, batch, a.q.size(2), a.alibi_slopes, a.sink, a.start_pos, a.window_left, a.window_right,
                a.softmax_scale, a.softcap, a.num_splits, a.backend);
}

// ---------------------------------------------------------------------------------------------- parameters
decode::DecodeParams params_of(Arguments const& a) {
  decode::DecodeParams p;
  p.q = a.q.data;
  p.k = a.k_cache.data;
  p.v = a.v_cache.data;
  p.q_stride = strides_of(a.q);
  p.k_stride = strides_of(a.k_cache);
  p.v_stride = strides_of(a.v_cache);
  p.batch = static_cast<int>(a.q.size(0));
  p.n_q = static_cast<int>(a.q.size(1));
  p.heads_q = static_cast<int>(a.q.size(2));
  p.head_dim = static_cast<int>(a.q.size(3));
  p.n_kv = static_cast<int>(a.capacity());
  p.heads_kv = static_cast<int>(a.k_cache.size(2));
  p.head_dim_v = static_cast<int>(a.v_cache.size(3));
  set_options(p, a);
  p.seqused_k = data_of<int>(a.cache_seqlens);
  p.cached = static_cast<int>(a.cache_len.value_or(p.n_kv));
  p.leftpad_k = data_of<int>(a.cache_leftpad);
  p.block_table = data_of<int>(a.block_table);
  if (a.block_table) {
    p.block_table_stride = a.block_table->strides[0];
    p.page_shift = 0;
    while ((int64_t(1) << p.page_shift) < a.page_rows()) ++p.page_shift;
  }
  p.batch_idx = data_of<int>(a.cache_batch_idx);
  if (a.k && a.k->size(1) > 0) {
    p.k_new = a.k->data;
    p.v_new = a.v->data;
    p.k_new_stride = strides_of(*a.k);
    p.v_new_stride = strides_of(*a.v);
    p.n_new = static_cast<int>(a.k->size(1));
  }
  if (a.rotary_cos) {
    p.rotary = {a.rotary_cos->data,
                a.rotary_sin->data,
                a.rotary_cos->strides[0],
                static_cast<int>(a.rotary_cos->size(0)),
                static_cast<int>(2 * a.rotary_cos->size(1)),
                a.rotary_interleaved};
  }
  return p;
}

// ---------------------------------------------------------------------------------------------- operators
std::tuple<Tensor, Tensor> fmha_kvcache(Arguments const& a) {
  check(a);
  decode::DecodeParams params = params_of(a);
  DType const dtype = *dtype_of(a.q);
  if (!decode::aligned(params, dtype)) {
    fail("NotImplementedError",
         "q, k_cache, v_cache, k, v: have rows that do not start at multiples of 16 bytes; copy them to contiguous "
         "tensors, or use backend=\"torch\"");
  }
  DeviceGuard const guard(a.q.device_index);
  decode::Plan const plan = plan_decode(params, a.q, a.num_splits, a.backend, false);
  if (!plan.launch) {
    fail("NotImplementedError", "backend: \"", a.backend, "\" has no kernel for this call on a cache in ",
         a.q.dtype_name(), "; use \"auto\", \"", decode::family_of(dtype), "\" or \"torch\"");
  }
  std::vector<Tensor> const results = launch_decode(plan, params, a.q, true);
  return {results[0], results[1]};
}

void fmha_kvcache_check(Arguments const& a) { check(a); }

std::string schema(char const* name, bool writes, char const* returns) {
  std::string text = std::string(name) + kParameters + " -> " + returns;
  for (char const* cache : {"CACHEa", "CACHEb"})
    text.replace(text.find(cache), 6, writes ? std::string("Tensor(") + cache[5] + "!)" : "Tensor");
  return text;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cutlass_ext, library) {
  library.def(schema("fmha_kvcache", false, "(Tensor out, Tensor lse)").c_str());
  library.def(schema("fmha_kvcache_append", true, "(Tensor out, Tensor lse)").c_str());
  library.def(schema("fmha_kvcache_check", false, "()").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CUDA, library) {
  library.impl("fmha_kvcache", TORCH_BOX(&unpacked<fmha_kvcache>));
  library.impl("fmha_kvcache_append", TORCH_BOX(&unpacked<fmha_kvcache>));
  library.impl("fmha_kvcache_check", TORCH_BOX(&unpacked<fmha_kvcache_check>));
}

STABLE_TORCH_LIBRARY_IMPL(cutlass_ext, CPU, library) {
  library.impl("fmha_kvcache_check", TORCH_BOX(&unpacked<fmha_kvcache_check>));
}

}  // namespace cutlass_ext

// The checks of the operators' arguments: the only ones there are, on every device. See arguments.hpp.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <initializer_list>
#include <tuple>
#include <utility>

#include "arguments.hpp"

namespace cutlass_ext {
namespace {

constexpr int64_t kMaxLength = kMaxPosition;
constexpr int64_t kMaxSplits = 1024;
constexpr int64_t kMostPageRows = 4096;

void check_same_device(char const* name, Tensor const& t, Tensor const& q) {
  if (t.device_type != q.device_type || t.device_index != q.device_index)
    fail("ValueError", name, ": is on another device than q; move it there");
}

void check_dtype(char const* name, Tensor const& t, int32_t dtype) {
  if (t.dtype != dtype) fail("TypeError", name, ": has dtype ", dtype_name(t.dtype), "; expected ", dtype_name(dtype));
}

void check_contiguous_rows(char const* name, Tensor const& t) {
  if (t.size(-1) > 1 && t.stride(-1) != 1)
    fail("ValueError", name, ": its last dimension is not contiguous; call .contiguous() on it");
}

void check_vector(char const* name, Tensor const& t, Tensor const& q, int32_t dtype, int64_t length,
                  char const* meaning) {
  if (!t) return;
  check_dtype(name, t, dtype);
  if (t.dim() != 1 || t.size(0) != length)
    fail("ValueError", name, ": has shape ", t.shape_text(), "; expected ", meaning, "[", length, "]");
  if (length > 1 && t.stride(0) != 1) fail("ValueError", name, ": is not contiguous; call .contiguous() on it");
  check_same_device(name, t, q);
}

/// A tensor of heads next to q: `layout` are its `dims` dimensions, the last of them rows, heads and the head dim.
void check_heads(char const* name, Tensor const& t, Arguments const& a, int dims, char const* layout) {
  Tensor const& q = a.q;
  if (t.dim() != dims)
    fail("ValueError", name, ": has shape ", t.shape_text(), "; expected ", dims, " dimensions ", layout);
  bool const takes_float64 = a.by_torch() && !a.is_cache();
  if (t.dtype != kFloat32 && t.dtype != kFloat16 && t.dtype != kBFloat16 && !(takes_float64 && t.dtype == kFloat64)) {
    fail("TypeError", name, ": has dtype ", dtype_name(t.dtype), "; expected float32, float16 or bfloat16",
         t.dtype == kFloat64 && !a.is_cache() ? ", or backend=\"torch\", which takes float64" : "");
  }
  if (t.dtype != q.dtype) {
    fail("TypeError", name, ": has dtype ", dtype_name(t.dtype), " and q ", dtype_name(q.dtype),
         "; give all operands one dtype");
  }
  check_same_device(name, t, q);
  int64_t const step = t.dtype == kFloat16 || t.dtype == kBFloat16 ? 8 : 4, d = t.size(-1);
  if (d < step || d > 256 || d % step != 0) {
    fail("ValueError", name, ": has head_dim ", d, "; expected a multiple of ", step, " from ", step, " to 256",
         d < 256 ? ": pad the last dimension with zeros" : "");
  }
  if (t.stride(-1) != 1 && !t.empty()) {
    fail("ValueError", name, ": its last dimension has stride ", t.stride(-1),
         "; expected 1: call .contiguous() on it");
  }
  if (t.size(-3) >= kMaxLength) fail("ValueError", name, ": has ", t.size(-3), " rows; expected fewer than 2^29");
}

void check_operands(Arguments const& a) {
  char const* const k_name = a.is_cache() ? "k_cache" : "k";
  char const* const v_name = a.is_cache() ? "v_cache" : "v";
  char const* const plain = a.is_cache() ? "[batch, seq, heads, head_dim]"
                            : a.packed() ? "[total, heads, head_dim], which is what cu_seqlens_q goes with"
                                         : "[batch, seq, heads, head_dim], or cu_seqlens_q for packed sequences";
  char const* const layout = a.block_table ? "[pages, page size, heads, head_dim]" : plain;
  int const dims = a.packed() ? 3 : 4;
  check_heads("q", a.q, a, dims, plain);
  int const key_dims = a.block_table ? 4 : dims;
  check_heads(k_name, a.k, a, key_dims, layout);
  check_heads(v_name, a.v, a, key_dims, layout);
  if (!a.is_cache() && !a.packed() && !a.block_table) {
    for (auto [name, t] : {std::pair("k", &a.k), std::pair("v", &a.v)}) {
      if (t->size(0) != a.q.size(0))
        fail("ValueError", name, ": has batch ", t->size(0), " and q has ", a.q.size(0), "; they must be equal");
    }
  }
  int64_t const heads_q = a.q.size(-2), heads_kv = a.k.size(-2);
  if (a.q.size(-1) != a.k.size(-1)) {
    fail("ValueError", k_name, ": has head_dim ", a.k.size(-1), " and q has ", a.q.size(-1), "; they must be equal");
  }
  for (int i = 0; i < key_dims - 1; ++i) {
    if (a.v.size(i) != a.k.size(i)) {
      fail("ValueError", v_name, ": has shape ", a.v.shape_text(), " and ", k_name, " ", a.k.shape_text(),
           "; they must agree in all but the last dimension");
    }
  }
  if (heads_q < 1) fail("ValueError", "q: has no heads; expected at least 1");
  if (heads_kv < 1 || heads_q % heads_kv != 0) {
    fail("ValueError", k_name, ": has ", heads_kv, " heads and q has ", heads_q,
         "; the heads of q must be a multiple of those of ", a.is_cache() ? "the cache" : "k and v");
  }
  for (auto [name, t] : {std::pair("q", &a.q), std::pair(k_name, &a.k)}) {
    if (t->size(0) > INT32_MAX) fail("ValueError", name, ": has ", t->size(0), " sequences; expected fewer than 2^31");
  }
}

void check_packing(Arguments const& a) {
  bool const paged = bool(a.block_table);  // its keys need neither ends nor a longest
  struct {
    char const* name;
    bool given, needed;
  } const arguments[] = {{"cu_seqlens_q", bool(a.cu_seqlens_q), true},
                         {"cu_seqlens_k", bool(a.cu_seqlens_k), !paged},
                         {"max_seqlen_q", a.max_seqlen_q.has_value(), true},
                         {"max_seqlen_k", a.max_seqlen_k.has_value(), !paged}};
  for (auto const& [name, n] : {std::pair("max_seqlen_q", a.max_seqlen_q), std::pair("max_seqlen_k", a.max_seqlen_k)}) {
    if (n.value_or(0) < 0) fail("ValueError", name, ": is ", *n, "; expected the length of the longest sequence");
  }
  bool any = false;
  for (auto const& x : arguments) any |= x.given && (x.needed || !paged);
  if (paged && a.cu_seqlens_k) {
    fail("ValueError", "cu_seqlens_k: is for packed keys; with block_table the keys are in pages, and seqused_k says ",
         "how many each sequence has");
  }
  if (!any) return;
  for (auto const& x : arguments) {
    if (x.given || !x.needed) continue;
    fail("ValueError", x.name, ": is None; packed sequences need ",
         paged ? "cu_seqlens_q and max_seqlen_q beside a block_table"
               : "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k");
  }
  Tensor const& ends = a.cu_seqlens_q;
  if (ends.dim() != 1 || ends.size(0) < 1) {
    fail("ValueError", "cu_seqlens_q: has shape ", ends.shape_text(),
         "; expected [batch + 1], the row where each sequence begins and the end of the last");
  }
  if (ends.size(0) > INT32_MAX)
    fail("ValueError", "cu_seqlens_q: has ", ends.size(0), " elements; expected fewer than 2^31");
  check_vector("cu_seqlens_q", a.cu_seqlens_q, a.q, kInt32, ends.size(0), "[batch + 1] = ");
  check_vector("cu_seqlens_k", a.cu_seqlens_k, a.q, kInt32, ends.size(0), "[batch + 1] = ");
}

/// Pages, or a cache, of a call with `batch` sequences.
void check_places(Arguments const& a, int64_t batch) {
  char const* const k_name = a.is_cache() ? "k_cache" : "k";
  if (a.block_table) {
    Tensor const& t = a.block_table;
    check_dtype("block_table", t, kInt32);
    if (t.dim() != 2 || t.size(0) != batch) {
      fail("ValueError", "block_table: has shape ", t.shape_text(),
           "; expected [batch, pages of a sequence], batch = ", batch);
    }
    check_contiguous_rows("block_table", t);
    check_same_device("block_table", t, a.q);
    int64_t const rows = a.page_rows();
    if (rows < 1 || rows > kMostPageRows || ((rows & (rows - 1)) != 0 && rows % 16 != 0)) {
      fail("ValueError", k_name, ": has pages of ", rows,
           " rows; with a block_table its shape is [pages, page size, heads, head_dim], the page size a power of two "
           "or a multiple of 16, up to ",
           kMostPageRows);
    }
  }
  if (a.capacity() >= kMaxLength || batch * (a.capacity() / 8 + 1) >= (int64_t(1) << 31)) {
    fail("ValueError", a.block_table ? "block_table" : k_name, ": has room for ", batch, " x ", a.capacity(),
         " keys; expected fewer than 2^29 a sequence and 2^34 in all");
  }
}

void check_cache(Arguments const& a) {
  int64_t const batch = a.q.size(0);
  if (a.block_table && a.cache_batch_idx)
    fail("ValueError", "cache_batch_idx: does not go with block_table, whose rows say the same");
  if (!a.block_table && !a.cache_batch_idx && a.k.size(0) != batch) {
    fail("ValueError", "k_cache: has batch ", a.k.size(0), " and q has ", batch,
         "; they must be equal, or cache_batch_idx say which sequence is where");
  }
  check_vector("cache_seqlens", a.cache_seqlens, a.q, kInt32, batch, "[batch] = ");
  check_vector("cache_batch_idx", a.cache_batch_idx, a.q, kInt32, batch, "[batch] = ");
  check_vector("cache_leftpad", a.cache_leftpad, a.q, kInt32, batch, "[batch] = ");
}

void check_new(Arguments const& a) {
  int64_t const batch = a.q.size(0), fresh = a.new_keys();
  if (bool(a.k_new) != bool(a.v_new))
    fail("ValueError", a.k_new ? "v" : "k", ": is None and ", a.k_new ? "k" : "v", " is not; give both or neither");
  if (a.k_new) {
    for (auto const& [name, t, cache] : {std::tuple("k", &a.k_new, &a.k), std::tuple("v", &a.v_new, &a.v)}) {
      check_heads(name, *t, a, 4, "[batch, new tokens, heads, head_dim]");
      if (t->size(0) != batch || t->size(1) != fresh || t->size(2) != a.k.size(2) || t->size(3) != cache->size(3)) {
        fail("ValueError", name, ": has shape ", t->shape_text(), "; expected [batch, new tokens, heads of ", name,
             "_cache, its head_dim] = [", batch, ", ", fresh, ", ", a.k.size(2), ", ", cache->size(3), "]");
      }
      for (int i = 0; i < 3; ++i) {
        if (fresh > 0 && cache->size(i) > 1 && cache->stride(i) == 0) {
          fail("ValueError", name, "_cache: is expanded, so that new keys would be written to one place; ",
               "call .contiguous() on it");
        }
      }
    }
    if (!a.cache_len && !a.cache_seqlens)
      fail("ValueError",
           "cache_seqlens: is None; expected where the new k and v go, an int or an int32 tensor [batch]");
  }
  if (a.cache_len && a.cache_seqlens) fail("ValueError", "cache_seqlens: is given twice");
  if (a.cache_len && (*a.cache_len < 0 || *a.cache_len + fresh > a.capacity())) {
    fail("ValueError", "cache_seqlens: is ", *a.cache_len, ", with ", fresh,
         " new tokens; the cache has room for 0 to ", a.capacity(), " keys");
  }
  if (fresh > a.capacity())
    fail("ValueError", "k: has ", fresh, " new tokens, and the cache has room for ", a.capacity());
}

void check_rotary(Arguments const& a) {
  if (bool(a.rotary_cos) != bool(a.rotary_sin)) {
    fail("ValueError", a.rotary_cos ? "rotary_sin" : "rotary_cos", ": is None and ",
         a.rotary_cos ? "rotary_cos" : "rotary_sin", " is not; give both or neither");
  }
  if (!a.rotary_cos) return;
  if (!a.k_new) fail("ValueError", "rotary_cos: rotates q and the new keys; give k and v");
  Tensor const& cos = a.rotary_cos;
  for (auto const& [name, t] : {std::pair("rotary_cos", &a.rotary_cos), std::pair("rotary_sin", &a.rotary_sin)}) {
    if (t->dtype != a.q.dtype) {
      fail("TypeError", name, ": has dtype ", dtype_name(t->dtype), " and q ", dtype_name(a.q.dtype),
           "; they must be equal");
    }
    if (t->dim() != 2 || t->size(0) < 1 || t->size(1) < 1 || 2 * t->size(1) > a.q.size(3)) {
      fail("ValueError", name, ": has shape ", t->shape_text(),
           "; expected [positions, rotary_dim / 2], rotary_dim at most head_dim = ", a.q.size(3));
    }
    if (t->size(0) != cos.size(0) || t->size(1) != cos.size(1))
      fail("ValueError", name, ": has shape ", t->shape_text(), " and rotary_cos ", cos.shape_text());
    if ((t->size(1) > 1 && t->stride(1) != 1) || (t->size(0) > 1 && t->stride(0) != cos.stride(0)))
      fail("ValueError", name, ": is not contiguous; call .contiguous() on it");
    check_same_device(name, *t, a.q);
    if (t->size(0) >= kMaxLength) fail("ValueError", name, ": has ", t->size(0), " rows; expected fewer than 2^29");
  }
  // Lengths on the device are not read: what lies past the last row is turned by that row.
  bool const each_at_its_own = a.causal || a.window_left >= 0 || a.window_right >= 0;
  int64_t const rows_q = each_at_its_own ? a.q.size(1) : std::min<int64_t>(a.q.size(1), 1),
                turned = std::max(a.new_keys(), rows_q);
  if (a.cache_len && turned > 0 && *a.cache_len + turned > cos.size(0)) {
    fail("ValueError", "rotary_cos: has ", cos.size(0), " rows; expected one for each position, here ",
         *a.cache_len + turned, ", of the keys in the cache and of what is turned");
  }
}

/// Whether `x`, which is computed with as float32 times log2(e), is a normal number there.
bool is_normal_float(double x) { return x >= FLT_MIN && x <= FLT_MAX / 2; }

void check_scores(Arguments const& a) {
  int64_t const heads_q = a.q.size(-2);
  int32_t const dtype = a.dtype_of_scores();
  check_vector("sink", a.sink, a.q, dtype, heads_q, "[heads_q] = ");
  Tensor const& slopes = a.alibi_slopes;
  if (slopes && slopes.dim() == 2) {
    check_dtype("alibi_slopes", slopes, dtype);
    if (slopes.size(0) != a.batch() || slopes.size(1) != heads_q) {
      fail("ValueError", "alibi_slopes: has shape ", slopes.shape_text(), "; expected [heads_q] = [", heads_q,
           "] or [batch, heads_q] = [", a.batch(), ", ", heads_q, "]");
    }
    check_contiguous_rows("alibi_slopes", slopes);
    check_same_device("alibi_slopes", slopes, a.q);
  } else {
    check_vector("alibi_slopes", slopes, a.q, dtype, heads_q, "[heads_q] or [batch, heads_q], here [heads_q] = ");
  }
  if (a.softmax_scale && !is_normal_float(*a.softmax_scale)) {
    fail("ValueError", "softmax_scale: is ", *a.softmax_scale,
         "; expected a finite number above 0 that float32 holds, from 1.2e-38 to 1.7e38, or None for 1/sqrt(head_dim)");
  }
  if (a.softcap != 0 && !is_normal_float(a.softcap)) {
    fail("ValueError", "softcap: is ", a.softcap,
         "; expected a finite number above 0 that float32 holds, from 1.2e-38 to 1.7e38, or 0 for none");
  }
  if (a.softcap != 0 && a.softmax_scale && !(*a.softmax_scale / a.softcap <= FLT_MAX)) {
    fail("ValueError", "softcap: is ", a.softcap, " beside a softmax_scale of ", *a.softmax_scale,
         "; expected a ratio that float32 holds");
  }
}

/// A tensor of scores, any of whose dimensions but the last may be 1, and whose strides may be anything.
void check_of_scores(char const* name, Tensor const& t, Arguments const& a) {
  if (a.packed()) {
    fail("NotImplementedError", name, ": does not go with cu_seqlens_q yet, which packs the sequences; expected None, ",
         "or padded sequences");
  }
  int64_t const of_call[] = {a.batch(), a.q.size(-2), a.q.size(-3), a.block_table ? a.capacity() : a.k.size(-3)};
  bool fits = t.dim() == 4 && t.size(3) == of_call[3];
  for (int i = 0; fits && i < 3; ++i) fits = t.size(i) == 1 || t.size(i) == of_call[i];
  if (!fits) {
    fail("ValueError", name, ": has shape ", t.shape_text(),
         "; expected [1 or batch, 1 or heads_q, 1 or rows of q, keys] = [1 or ", of_call[0], ", 1 or ", of_call[1],
         ", 1 or ", of_call[2], ", ", of_call[3], "]");
  }
  check_same_device(name, t, a.q);
}

/// What the operator pack_mask made of a mask.
void check_packed_mask(Arguments const& a) {
  Tensor const& t = a.mask;
  int const keys = static_cast<int>(a.block_table ? a.capacity() : a.k.size(-3));
  auto const rows_are = [&](int64_t rows) { return t.size(2) == Mask::stored_rows(static_cast<int>(rows)); };
  auto const is = [&](int i, int64_t size) { return t.size(i) == 1 || t.size(i) == size; };
  bool fits = !a.packed() && t.dim() == 4 && is(0, a.batch()) && is(1, a.q.size(-2));
  fits = fits && (rows_are(1) || rows_are(a.q.size(-3))) && t.size(3) == Mask::words_of(keys);
  int64_t step = 1;
  for (int i = 3; fits && i >= 0; step *= t.size(i--)) fits = t.size(i) == 1 || t.stride(i) == step;
  if (!fits) {
    fail("TypeError", "mask: is of dtype int32 and shape ", t.shape_text(),
         "; expected a bool tensor, or what pack_mask made of one for the call's sequences");
  }
  check_same_device("mask", t, a.q);
}

void check_bias_and_mask(Arguments const& a) {
  if (a.bias) {
    int32_t const dtype = a.bias.dtype;
    bool const takes_float64 = a.q.dtype == kFloat64;
    if (dtype != kFloat32 && dtype != kFloat16 && dtype != kBFloat16 && !(takes_float64 && dtype == kFloat64)) {
      fail("TypeError", "bias: has dtype ", dtype_name(dtype), "; expected float32, float16 or bfloat16",
           dtype == kBool  ? "; a bool mask is another argument, mask"
           : takes_float64 ? ", or float64"
                           : "");
    }
    check_of_scores("bias", a.bias, a);
  }
  if (a.mask && a.mask.dtype == kInt32 && !a.by_torch()) {
    check_packed_mask(a);
  } else if (a.mask) {
    if (a.mask.dtype != kBool) {
      fail("TypeError", "mask: has dtype ", dtype_name(a.mask.dtype),
           "; expected bool, true where a key is visible; what is added to scores is another argument, bias");
    }
    check_of_scores("mask", a.mask, a);
  }
}

void check_dropout(Arguments const& a) {
  if (!(a.dropout_p >= 0.0 && std::round(a.dropout_p * 0x1p32) < 0x1p32)) {
    fail("ValueError", "dropout_p: is ", a.dropout_p, "; expected a probability from 0 to less than 1 - 2^-33, of ",
         "which it has steps of 2^-32");
  }
  if (a.dropout_p > 0.0 && !a.dropout_seed)
    fail("ValueError", "dropout_seed: is None beside a dropout_p of ", a.dropout_p, "; expected an int64 tensor [2]");
  check_vector("dropout_seed", a.dropout_seed, a.q, kInt64, 2, "");
  for (auto const& [name, start] :
       {std::pair("head_start", a.head_start), std::pair("sequence_start", a.sequence_start)}) {
    if (start < 0 || start > INT32_MAX)
      fail("ValueError", name, ": is ", start, "; expected a number from 0 to less than 2^31");
  }
}

void check_positions(Arguments const& a) {
  auto const fits = [](int64_t position) { return -kMaxLength < position && position < kMaxLength; };
  check_vector("key_start", a.key_starts, a.q, kInt32, a.batch(), "[batch] = ");
  if (!fits(a.key_start))
    fail("ValueError", "key_start: is ", a.key_start, "; expected a position between -2^29 and 2^29");
  check_vector("start_pos", a.start_positions, a.q, kInt32, a.batch(), "[batch] = ");
  if (a.start_pos && !fits(*a.start_pos)) {
    fail("ValueError", "start_pos: is ", *a.start_pos, a.key_start == 0 ? "" : " behind key_start",
         "; expected a position between -2^29 and 2^29");
  }
  for (auto const& [side, before, window] :
       {std::tuple("left", "before", a.window_left), std::tuple("right", "after", a.window_right)}) {
    if (window < -1) {
      fail("ValueError", "window: its ", side, " side is ", window, "; expected the number of keys ", before,
           " a row's own, or -1 for all");
    }
  }
}

void check_execution(Arguments const& a) {
  using torch::headeronly::ScalarType;
  if (a.out_dtype && (*a.out_dtype != ScalarType::Float || a.q.dtype == kFloat64)) {
    fail("ValueError", "out_dtype: is ", torch::headeronly::toString(*a.out_dtype), " beside a q of ",
         dtype_name(a.q.dtype), "; expected None", a.q.dtype == kFloat64 ? "" : " or float32");
  }
  if (a.num_splits < 0 || a.num_splits > kMaxSplits) {
    fail("ValueError", "num_splits: is ", a.num_splits, "; expected 1 to ", kMaxSplits, ", or 0 to have it chosen");
  }
  if (a.backend != "auto" && a.backend != "torch" && a.backend != "simt" && a.backend != "sm80" &&
      a.backend != "sm90") {
    fail("ValueError", "backend: is \"", a.backend, "\"; expected \"auto\", \"simt\", \"sm80\", \"sm90\" or \"torch\"");
  }
  if (!a.on_cuda() && a.backend != "auto" && a.backend != "torch") {
    fail("ValueError", "backend: \"", a.backend,
         "\" runs on a CUDA device and q is not on one; move q, k and v there, or use \"auto\" or \"torch\"");
  }
}

void check_precision(Arguments const& a) {
  if (!a.precision) return;
  std::string const& given = *a.precision;
  if (given != "high" && given != "highest")
    fail("ValueError", "precision: is \"", given, "\"; expected \"high\" or \"highest\", or None to have it chosen");
  if (a.q.dtype != kFloat32) {
    fail("ValueError", "precision: is \"", given, "\" and q has dtype ", dtype_name(a.q.dtype),
         "; it is of float32 alone, expected None");
  }
  if (given == "high" && a.by_torch()) {
    fail("NotImplementedError", "precision: \"high\" is computed on a GPU's tensor cores, and this call by PyTorch's ",
         "operators; use None or \"highest\"");
  }
  if (given == "high" ? a.backend == "simt" : a.backend == "sm80" || a.backend == "sm90") {
    fail("ValueError", "precision: is \"", given, "\" beside backend=\"", a.backend, "\", which has \"",
         given == "high" ? "highest" : "high", "\" alone; give one of them");
  }
}

/// Whether `t` has the dimensions of `like`, but for the last, which are `cols`.
bool has_rows_of(Tensor const& like, int64_t cols, Tensor const& t) {
  if (t.dim() != like.dim() || t.size(-1) != cols) return false;
  for (int i = 0; i + 1 < t.dim(); ++i) {
    if (t.size(i) != like.size(i)) return false;
  }
  return true;
}

/// Where the result goes.
void check_out(Arguments const& a) {
  Tensor const& t = a.out;
  if (!has_rows_of(a.q, a.v.size(-1), t)) {
    fail("ValueError", "out: has shape ", t.shape_text(), "; expected that of the result, rows and heads of q ",
         a.q.shape_text(), " with head_dim ", a.v.size(-1));
  }
  if (t.dtype != a.q.dtype) {
    fail("TypeError", "out: has dtype ", dtype_name(t.dtype), " and q ", dtype_name(a.q.dtype), "; they must be equal");
  }
  for (int i = 0; i + 1 < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) == 0)
      fail("ValueError", "out: is expanded, so that results would be written to one place; call .contiguous() on it");
  }
  if (a.out_dtype) fail("ValueError", "out_dtype: does not go with out, which has the dtype of q; give one of them");
  check_same_device("out", t, a.q);
}

/// The forward's results and their gradients.
void check_gradients(Arguments const& a) {
  if (bool(a.out) == bool(a.delta)) {
    fail("ValueError", "delta: is ", a.delta ? "given beside out" : "None and so is out",
         "; give out, or delta = rowsum(dout * out) - dlse");
  }
  if (a.delta && a.dlse) fail("ValueError", "dlse: does not go with delta, which holds it already");
  int64_t const cols = a.v.size(-1);
  for (auto const& [name, t] : {std::pair("dout", &a.dout), std::pair("out", &a.out)}) {
    if (!*t) continue;
    if (!has_rows_of(a.q, cols, *t)) {
      fail("ValueError", name, ": has shape ", t->shape_text(), "; expected that of the result, rows and heads of q ",
           a.q.shape_text(), " with head_dim ", cols);
    }
    check_heads(name, *t, a, a.q.dim(), "those of q");
  }
  bool const packed = a.packed();
  int64_t const heads = a.q.size(-2), rows = a.q.size(-3), batch = packed ? 1 : a.q.size(0);
  for (auto const& [name, t] : {std::pair("lse", &a.lse), std::pair("delta", &a.delta), std::pair("dlse", &a.dlse)}) {
    if (!*t) continue;
    check_dtype(name, *t, a.dtype_of_scores());
    if (t->dim() != (packed ? 2 : 3) || t->size(-1) != rows || t->size(-2) != heads ||
        (!packed && t->size(0) != batch)) {
      fail("ValueError", name, ": has shape ", t->shape_text(), "; expected ",
           packed ? "[heads_q, total_q] = [" : "[batch, heads_q, rows of q] = [", packed ? "" : std::to_string(batch),
           packed ? "" : ", ", heads, ", ", rows, "]");
    }
    bool const contiguous = (rows <= 1 || t->stride(-1) == 1) && (heads <= 1 || t->stride(-2) == rows) &&
                            (batch <= 1 || t->stride(0) == heads * rows);
    if (!contiguous && !t->empty()) fail("ValueError", name, ": is not contiguous; call .contiguous() on it");
    check_same_device(name, *t, a.q);
  }
}

}  // namespace

void check_mask_to_pack(Tensor const& mask) {
  if (mask.dtype != kBool)
    fail("TypeError", "mask: has dtype ", dtype_name(mask.dtype), "; expected bool, true where a key is visible");
  if (mask.dim() != 4)
    fail("ValueError", "mask: has shape ", mask.shape_text(), "; expected [batch, heads, rows of q, keys], each or 1");
  if (mask.size(0) > INT32_MAX || mask.size(1) > INT32_MAX || mask.size(2) >= kMaxLength || mask.size(3) >= kMaxLength)
    fail("ValueError", "mask: has shape ", mask.shape_text(),
         "; expected fewer than 2^31 sequences and heads, and fewer than 2^29 rows and keys");
}

void check(Arguments const& a) {
  if (a.is_backward() && a.block_table)
    fail("NotImplementedError", "block_table: there is no backward pass of keys in pages; expected None");
  if (!a.is_cache()) check_packing(a);
  check_operands(a);
  if (a.is_cache() || a.block_table) check_places(a, a.batch());
  if (a.is_cache()) {
    check_cache(a);
    check_new(a);
    check_rotary(a);
  }
  check_vector("seqused_k", a.seqused_k, a.q, kInt32, a.batch(), "[batch] = ");
  check_vector("leftpad_k", a.leftpad_k, a.q, kInt32, a.batch(), "[batch] = ");
  check_positions(a);
  check_scores(a);
  check_bias_and_mask(a);
  check_dropout(a);
  check_execution(a);
  check_precision(a);
  if (a.writes_out()) check_out(a);
  if (a.is_backward()) check_gradients(a);
}

}  // namespace cutlass_ext

"""`flash_attn_with_kvcache`: attention to a key/value cache, contiguous or paged, which the call may also extend.

Called by users. What the operators `fmha_kvcache*` do for CPU tensors and for `backend="torch"` is here too.
"""

from numbers import Integral
from types import SimpleNamespace

import torch
from torch import Tensor

from ._ops import func_is_active, lse_if_asked, refuse_grad, register, run
from .flash_attn import engine_arguments
from .interface import UNBOUNDED, Backend, StartPos, check_bool, check_numbers, split_start, window_sides
from .torch_backend import gathered, lengths_of
from .torch_padded import Results, attention

# What arguments of the operators are called here.
_NAMES = dict.fromkeys(("window", "window_left", "window_right"), "window_size") | {"cache_len": "cache_seqlens"}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sink: Tensor | None = None,
    start_pos: StartPos = "end",
    backend: Backend = "auto",
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    **engine,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query rows to the keys in a cache, after the new `k` and `v`, if given, are written to it.

    Sequence `b` has `len_b = cache_seqlens[b] + N_new` keys. Its query row `i` stands at position
    `len_b - N_q + i` (bottom-right alignment), unless `start_pos` says otherwise; causal hides the keys after it. What
    is masked, how scores are made, and what rows without keys give, is as in `fmha`. Positions at or past `len_b`,
    before `cache_leftpad`, and pages of others never reach an output, whatever bits they hold.

    The grid follows from shapes alone: a CUDA graph captured once replays with other lengths, tables and contents.
    `cache_seqlens` is not changed: the caller adds `N_new` to it.

    Args:
        q: `[B, N_q, H_q, d]`, float32, float16 or bfloat16; any `N_q`, and few rows are fast.
        k_cache: `[B_cache, N_cache, H_kv, d]`, or with `block_table` pages `[pages, page_size, H_kv, d]`, the page size
            a power of two or a multiple of 16, up to 4096. Written to where `k` is given. `H_q` is a multiple of
            `H_kv`.
        v_cache: the same with `d_v` columns.
        k: `[B, N_new, H_kv, d]`, new keys, which do not lie in the cache: they are written behind the
            `cache_seqlens[b]` that are there, and seen by this call's queries. Where `cache_seqlens` is on the device,
            what would not fit the cache is dropped.
        v: `[B, N_new, H_kv, d_v]`, given with `k`.
        rotary_cos: `[positions, rotary_dim / 2]`, dtype of q: rotates the first `rotary_dim` columns of `k` (token `i`
            at position `cache_seqlens[b] + i`, padding in front counted, as flash-attn does) and of q (at the same
            positions with causal or a bounded window, else all at `i = 0`) before anything else; needs `k`, which may
            have 0 tokens. Positions past the last row of it, which the host does not see, are turned by that row.
        rotary_sin: the same shape.
        cache_seqlens: keys in the cache before this call: an int, or int32 `[B]` on q's device, never read by the
            host. By default the cache is full.
        cache_batch_idx: int32 `[B]`, the row of a contiguous cache that each sequence has; by default its own. Outside
            the cache, as of an idle slot, it is not followed: new tokens are dropped, the nearest row is read.
        cache_leftpad: int32 `[B]`, the first key of each sequence; by default 0.
        block_table: int32 `[B, pages of a sequence]`: the page that holds keys `j * page_size` and on of sequence `b`
            is `block_table[b, j]`. Pages may lie in any order and be shared; entries of pages past `len_b` may hold
            anything. Entries outside the cache are as those of `cache_batch_idx`.
        softmax_scale, causal, softcap, alibi_slopes, sink, start_pos: as in `fmha`.
        window_size: `(left, right)` in tokens, -1 unbounded, or None for no window.
        rotary_interleaved: columns `2i, 2i + 1` are a pair (GPT-J); otherwise `i, i + rotary_dim / 2` (GPT-NeoX).
        num_splits: 0: the library shares the keys out, those of the whole batch evenly where its sequences may differ
            much, so that ragged batches fill the GPU. Above 0: each sequence's keys are cut into that many parts by its
            own length, and its result is, bit for bit, the same in every batch. Either way the same call gives the same
            bits.
        return_softmax_lse: return `(out, softmax_lse)`.
        backend: `"auto"`, `"sm90"` (float16, bfloat16 on Hopper), `"sm80"` (float16, bfloat16), `"simt"` (float32) or
            `"torch"`. Of `"sm90"`, `"auto"` takes the clusters of few sequences and, for more than 8 packed query
            rows (`N_q * H_q / H_kv`; for any where head_dim is neither 64 nor 128), the tiles of `fmha`; asked for,
            its tiles take every other call too whose rows begin at multiples of 16 bytes.
        out, engine: as in `flash_attn_func`.
        s_aux: `sink` under the name that it has in vLLM, there of float16 or bfloat16 too.

    Returns:
        `out` `[B, N_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[B, H_q, N_q]`, natural logarithm.

    Raises:
        TypeError, ValueError: an argument that does not fit; the text names it.
        NotImplementedError: what `engine` must not be, or an input that requires grad under grad mode.

    Source: Flash-Decoding (Dao et al., 2023), PagedAttention (arXiv:2309.06180, section 4.1), rotary embedding
    (arXiv:2104.09864, section 3.2); the interface of flash-attn 2.8.
    """
    for name, value in (
        ("causal", causal),
        ("rotary_interleaved", rotary_interleaved),
        ("return_softmax_lse", return_softmax_lse),
    ):
        if value is not True and value is not False:
            check_bool(name, value)
    if softmax_scale is not None or type(softcap) is not float:
        check_numbers(softmax_scale=softmax_scale, softcap=softcap)
    if window_size is None or (type(window_size) is tuple and window_size == (-1, -1)):
        left, right = -1, -1
    else:
        left, right = window_sides("window_size", window_size)
    start, start_positions = (None, None) if start_pos == "end" else split_start(start_pos)
    names = _NAMES
    if engine or s_aux is not None:
        aux = engine_arguments("flash_attn_with_kvcache", s_aux, engine, q)
        if aux is not None:
            if sink is not None:
                raise ValueError("s_aux: is another name of sink, which is given too; give one of them")
            sink, names = aux, _NAMES | {"sink": "s_aux"}
    cache_len = None
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (Integral, torch.SymInt)):
            given = f"is of type {type(cache_seqlens).__name__}"
            raise TypeError(f"cache_seqlens: {given}; expected an int, or an int32 tensor [batch]")
        cache_len, cache_seqlens = cache_seqlens, None
    if type(num_splits) is not int:
        check_numbers(num_splits=num_splits)
    arguments = (
        q, k_cache, v_cache, k, v, causal, start, return_softmax_lse, rotary_cos, rotary_sin, cache_len, cache_seqlens,
        cache_batch_idx, cache_leftpad, block_table,
    )  # fmt: skip
    absent = softmax_scale is alibi_slopes is sink is start_positions is None and rotary_interleaved
    if not absent or (left, right, softcap, num_splits, backend) != (-1, -1, 0.0, 0, "auto"):
        arguments += (
            left, right, softmax_scale, softcap, alibi_slopes, sink, rotary_interleaved, start_positions, num_splits,
            backend,
        )  # fmt: skip
    if k is None:
        operator = _read_torch if backend == "torch" else _read
    else:
        operator = _append_torch if backend == "torch" else _append
        refuse_grad(operator, arguments, "a cache")  # before the cache is written to
    if out is not None:
        operator, arguments = _writing_out[operator], (q, k_cache, v_cache, out, *arguments[3:])
        refuse_grad(operator, arguments, "a cache")
        lse = run(operator, arguments, names)
        return (out, lse) if return_softmax_lse else out
    result, lse = run(operator, arguments, names)
    if result.requires_grad or func_is_active():  # autograd has looked at all arguments: to do so takes 0.2 to 0.6 us
        refuse_grad(operator, arguments, "a cache")
    return (result, lse) if return_softmax_lse else result


# ------------------------------------------------------------------------------------------------ on any device
def _on_any_device(o: SimpleNamespace) -> Results:
    """The operators through PyTorch's own: new tokens are written in place, pages gathered. Reads no lengths.

    A contiguous cache is one whose rows are pages, of which each sequence has one.
    """
    B, N_q = o.q.shape[:2]
    table = o.block_table
    if table is None:
        rows = torch.arange(B, device=o.q.device) if o.cache_batch_idx is None else o.cache_batch_idx
        table = rows[:, None]
    capacity = table.shape[1] * o.k_cache.shape[1] if len(o.k_cache) else 0
    if o.cache_seqlens is None:
        cached = table.new_full((B,), capacity if o.cache_len is None else o.cache_len, dtype=torch.int32)
    else:
        cached = o.cache_seqlens.clamp(0, capacity)
    q, used = o.q, cached
    if o.k is not None:
        N_new = o.k.shape[1]
        new = torch.arange(N_new, device=q.device)
        k = o.k
        if o.rotary_cos is not None:
            bounded = any(0 <= side < UNBOUNDED for side in (o.window_left, o.window_right))
            rows = torch.arange(N_q, device=q.device) * int(o.causal or bounded)
            how = o.rotary_cos, o.rotary_sin, o.rotary_interleaved
            q = rotated(q, cached[:, None] + rows, *how)
            k = rotated(k, cached[:, None] + new, *how)
        _write(o.k_cache, o.v_cache, k, o.v, cached[:, None] + new, table.long())
        used = cached + N_new
    lengths = lengths_of(o, N_q, capacity, used, o.cache_leftpad)
    keys, values = o.k_cache, o.v_cache
    if o.block_table is not None or o.cache_batch_idx is not None:
        keys, values = gathered(keys, table), gathered(values, table)
    return attention(q, keys, values, lengths, o)


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` `[B, N, H, d]` with its first `2 * cos.shape[1]` columns rotated by `positions` `[B, N]`."""
    positions = positions.long().clamp(0, cos.shape[0] - 1)
    return turned(x, cos[positions], sin[positions], interleaved)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` `[B, N, H, d]` with its first `rotary_dim` columns rotated by the angles of each row, whose cos and sin are
    `[N, rotary_dim / 2]` or `[B, N, rotary_dim / 2]`; computed in float32."""
    columns = 2 * cos.shape[-1]
    c, s = (of_rows.float().unsqueeze(-2) for of_rows in (cos, sin))
    turning = x[..., :columns].float()
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = a * c - b * s, b * c + a * s
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), x[..., columns:]], -1)


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor, table: Tensor) -> None:
    """Puts token `i` of sequence `b` at `position[b, i]` of the pages `table[b]`; what has no place there is dropped.

    The device is not asked what that is: a token that is dropped repeats the first that is not, so that no two that
    differ are written to one place, or, where all are dropped, what is there.
    """
    pages, page_size = k_cache.shape[:2]
    if position.numel() == 0 or pages == 0:
        return
    page = torch.gather(table, 1, (position // page_size).clamp(max=table.shape[1] - 1))
    fits = (position < table.shape[1] * page_size) & (page >= 0) & (page < pages)
    tokens = torch.arange(position.numel(), device=k.device)
    token = torch.where(fits.flatten(), tokens, fits.flatten().int().argmax())
    place = page.flatten()[token].clamp(0, pages - 1), (position % page_size).flatten()[token]
    bits = torch.int16 if k.element_size() == 2 else torch.int32  # what is put back as it was is so to the last NaN
    for cache, new in ((k_cache.view(bits), k.view(bits)), (v_cache.view(bits), v.view(bits))):
        cache.index_put_(place, torch.where(fits.any(), new.flatten(0, 1)[token], cache[place]))


_read, _read_torch = register("fmha_kvcache", lse_if_asked(_on_any_device))
_append, _append_torch = register("fmha_kvcache_append", lse_if_asked(_on_any_device))
# Of each, the one that writes the result to a tensor of the caller's.
_writing_out = dict(
    zip(
        (_read, _read_torch, _append, _append_torch),
        register("fmha_kvcache_out", lse_if_asked(_on_any_device))
        + register("fmha_kvcache_append_out", lse_if_asked(_on_any_device)),
        strict=True,
    )
)
OPERATORS = *_writing_out, *_writing_out.values()

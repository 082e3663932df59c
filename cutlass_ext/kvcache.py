"""`flash_attn_with_kvcache`: attention to a key/value cache, contiguous or paged, which the call may also extend.

Called by users. The operators `fmha_kvcache*` get their CPU implementation, and their shapes for tracing, here.
"""

import torch
from torch import Tensor

from . import _ops
from .interface import Backend, StartPos, refuse_grad, split_start
from .torch_backend import attention

_read = torch.ops.cutlass_ext.fmha_kvcache.default
_append = torch.ops.cutlass_ext.fmha_kvcache_append.default
_check = torch.ops.cutlass_ext.fmha_kvcache_check.default

_NAMES = {"window": "window_size", "window_left": "window_size", "window_right": "window_size"}  # of the op, here


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
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sink: Tensor | None = None,
    start_pos: StartPos = "end",
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few query rows to the keys in a cache, after the new `k` and `v`, if given, are written to it.

    Sequence `b` has `len_b = cache_seqlens[b] + N_new` keys. Its query row `i` stands at position
    `len_b - N_q + i` (bottom-right alignment), unless `start_pos` says otherwise; causal hides the keys after it. What
    is masked, how scores are made, and what rows without keys give, is as in `fmha`. Positions at or past `len_b`,
    before `cache_leftpad`, and pages of others never reach an output, whatever bits they hold.

    One kernel is launched, whose grid follows from shapes alone: a CUDA graph captured once replays with other lengths,
    tables and contents. `cache_seqlens` is not changed: the caller adds `N_new` to it.

    Args:
        q: `[B, N_q, H_q, d]`, float32, float16 or bfloat16.
        k_cache: `[B_cache, N_cache, H_kv, d]`, or with `block_table` pages `[pages, page_size, H_kv, d]`, the page size
            a power of two up to 256. Written to where `k` is given. `H_q` is a multiple of `H_kv`.
        v_cache: the same with `d_v` columns.
        k: `[B, N_new, H_kv, d]`, new keys, written behind the `cache_seqlens[b]` that are there, and seen by this
            call's queries. What would not fit the cache is dropped.
        v: `[B, N_new, H_kv, d_v]`, given with `k`.
        rotary_cos: `[positions, rotary_dim / 2]`, dtype of q: rotates the first `rotary_dim` columns of `k` (token `i`
            at position `cache_seqlens[b] - cache_leftpad[b] + i`) and of q (at the same positions with causal or a
            window, else all at `i = 0`) before anything else; needs `k`.
        rotary_sin: the same shape.
        cache_seqlens: keys in the cache before this call: an int, or int32 `[B]` on q's device, never read by the
            host. By default the cache is full.
        cache_batch_idx: int32 `[B]`, the row of a contiguous cache that each sequence has; by default its own.
        cache_leftpad: int32 `[B]`, the first key of each sequence; by default 0.
        block_table: int32 `[B, pages of a sequence]`: the page that holds keys `j * page_size` and on of sequence `b`
            is `block_table[b, j]`. Pages may lie in any order and be shared; entries of pages past `len_b` may hold
            anything.
        softmax_scale: factor of the scores; `1 / sqrt(d)` by default.
        causal: hide the keys after the row's position.
        window_size: `(left, right)` in tokens, -1 unbounded.
        softcap: bound of the scores, 0 for none.
        rotary_interleaved: columns `2i, 2i + 1` are a pair (GPT-J); otherwise `i, i + rotary_dim / 2` (GPT-NeoX).
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`.
        num_splits: 0: the library shares the keys out, those of the whole batch evenly where its sequences may differ
            much, so that ragged batches fill the GPU. Above 0: each sequence's keys are cut into that many parts by its
            own length, and its result is, bit for bit, the same in every batch. Either way the same call gives the same
            bits.
        return_softmax_lse: return `(out, softmax_lse)`.
        sink: float32 `[H_q]`, one more logit in each row's softmax, which has no value.
        start_pos: position of the first query row, as in `fmha`: an int, int32 `[B]`, or `"end"`.
        backend: `"auto"`, `"sm80"` (float16, bfloat16), `"simt"` (float32), `"torch"`, or `"sm90"`, which takes the
            calls that `"auto"` gives to clusters on Hopper, and refuses others.

    Returns:
        `out` `[B, N_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[B, H_q, N_q]`, natural logarithm.

    Raises:
        TypeError, ValueError: an argument that does not fit; the text names it.
        NotImplementedError: an input that requires grad under grad mode; rows that do not start at 16 bytes (GPU).

    Source: Flash-Decoding (Dao et al., 2023), PagedAttention (arXiv:2309.06180, section 4.1), rotary embedding
    (arXiv:2104.09864, section 3.2); the interface of flash-attn 2.8.
    """
    cache_len = None
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_len, cache_seqlens = cache_seqlens, None
    try:
        if q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or (k is not None and k.requires_grad):
            refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, k=k)
    except AttributeError:
        for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k}.items():
            if not isinstance(tensor, Tensor) and (name != "k" or tensor is not None):
                raise TypeError(f"{name}: is of type {type(tensor).__name__}; expected a tensor") from None
    try:
        window_left, window_right = window_size
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"window_size: is {window_size!r}; expected a pair of ints (left, right), -1 for unbounded"
        ) from None
    start, start_positions = (None, None) if start_pos == "end" else split_start(start_pos)
    if k is None:
        op = _read_torch if backend == "torch" else _read
    else:
        op = _append_torch if backend == "torch" else _append
    try:
        out, lse = op(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_len, cache_seqlens, cache_batch_idx,
            cache_leftpad, block_table, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved,
            alibi_slopes, sink, start, start_positions, num_splits, backend,
        )  # fmt: skip
    except RuntimeError as error:
        translated = _ops.translated(error)
        if translated is error:
            raise
        raise _ops.renamed(translated, {**_NAMES, "cache_len": "cache_seqlens"}) from None
    return (out, lse) if return_softmax_lse else out


# ------------------------------------------------------------------------------------------------ on any device
@torch.no_grad()
def _on_any_device(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_len, cache_seqlens, cache_batch_idx, cache_leftpad,
    block_table, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, sink,
    start_pos, start_positions, num_splits, backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operators through PyTorch's own: pages are gathered, new tokens written in place. Reads no lengths."""
    _check(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_len, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, sink,
        start_pos, start_positions, num_splits, backend,
    )  # fmt: skip
    B, N_q = q.shape[:2]
    page_rows = k_cache.shape[1]
    capacity = page_rows if block_table is None else block_table.shape[1] * page_rows
    sequences = torch.arange(B, device=q.device)
    if cache_seqlens is None:
        cached = torch.full((B,), capacity if cache_len is None else cache_len, dtype=torch.int32, device=q.device)
    else:
        cached = cache_seqlens.clamp(0, capacity)
    leftpad = cache_leftpad
    if leftpad is not None:
        leftpad = torch.minimum(leftpad.clamp(min=0), cached)
    rows = sequences if cache_batch_idx is None else cache_batch_idx.long()
    length = cached
    if k is not None and k.shape[1] > 0:
        if rotary_cos is not None:
            first = cached if leftpad is None else cached - leftpad
            steps = torch.arange(N_q, device=q.device) * int(causal or window_left >= 0 or window_right >= 0)
            q = _rotated(q, first[:, None] + steps, rotary_cos, rotary_sin, rotary_interleaved)
            steps = torch.arange(k.shape[1], device=q.device)
            k = _rotated(k, first[:, None] + steps, rotary_cos, rotary_sin, rotary_interleaved)
        _write(k_cache, v_cache, k, v, cached, rows, block_table, capacity)
        length = (cached + k.shape[1]).clamp(max=capacity)
    if block_table is not None:
        # Entries past a sequence's pages may be anything; the rows that they would give are never used.
        pages = block_table.clamp(0, max(k_cache.shape[0] - 1, 0)).long()
        keys, values = (
            cache[pages].flatten(1, 2) if cache.shape[0] else cache.new_zeros(B, capacity, *cache.shape[2:])
            for cache in (k_cache, v_cache)
        )
    elif cache_batch_idx is not None:
        keys, values = k_cache[rows], v_cache[rows]
    else:
        keys, values = k_cache, v_cache
    return attention(
        q, keys, values, causal, start_pos, start_positions, window_left, window_right, softmax_scale, softcap,
        alibi_slopes, sink, length.to(torch.int32), leftpad,
    )  # fmt: skip


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` `[B, N, H, d]` with its first `2 * cos.shape[1]` columns rotated by `positions` `[B, N]`, in float32."""
    positions = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[positions].float().unsqueeze(2) for table in (cos, sin))
    turning = x[..., : 2 * cos.shape[1]].float()
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = a * c - b * s, b * c + a * s
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * cos.shape[1] :]], -1)


def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cached: Tensor, rows: Tensor, block_table: Tensor | None,
    capacity: int,
) -> None:  # fmt: skip
    """Puts token `i` of sequence `b` at position `cached[b] + i` of its cache; what does not fit is left out.

    The device is not asked what fits: tokens that do not repeat the last one that does, in the same place, or, where
    none does, what is there.
    """
    fitting = (capacity - cached).clamp(0, k.shape[1])[:, None]
    token = torch.minimum(torch.arange(k.shape[1], device=k.device), fitting - 1).clamp(min=0)
    position = (cached[:, None] + token).clamp(max=capacity - 1).long()
    if block_table is not None:
        size = k_cache.shape[1]
        place = torch.gather(block_table.long(), 1, position // size), position % size
    else:
        place = rows[:, None].expand_as(position), position
    sequence = torch.arange(len(token), device=k.device)[:, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_put_(place, torch.where((fitting > 0)[..., None, None], new[sequence, token], cache[place]))


def _output_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_) -> tuple[Tensor, Tensor]:
    B, N_q, H_q, _d = q.shape
    return q.new_empty(B, N_q, H_q, v_cache.shape[3]), q.new_empty(B, H_q, N_q, dtype=torch.float32)


def _register(op) -> object:
    """The CPU implementation and the fake one of `op`, and its form for `backend="torch"` on any device."""
    name, library = op._schema.name.split("::")[1], _ops._library
    library.define(name + "_torch" + str(op._schema).removeprefix(op._schema.name))
    library.impl(name, _on_any_device, "CPU")
    for device in ("CPU", "CUDA"):
        library.impl(name + "_torch", _on_any_device, device)
    for registered in (name, name + "_torch"):
        torch.library.register_fake("cutlass_ext::" + registered, _output_shapes, lib=library)
    return getattr(torch.ops.cutlass_ext, name + "_torch").default


_read_torch = _register(_read)
_append_torch = _register(_append)

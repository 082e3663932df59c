"""The names, arguments, defaults and alignment of flash-attn 2.8, so that an import line is all that changes.

Called by users. Three things differ from flash-attn, all on purpose: a row that sees no key has `softmax_lse = -inf`
(there `+inf`), `softmax_lse` is not shifted under causal ALiBi and has a gradient, and dropout drops by position
(`fmha`, `dropout_mask`), with a probability in steps of 2^-32, not 2^-8.

Serving engines call the same names with more keywords, those of vLLM's fork and of FlashAttention-3. They are taken by
name, here and in `kvcache.py`, and refused by name where they would change a result.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from ._ops import name_of, renaming
from .interface import check_bool, check_tensors
from .support import attend
from .torch_padded import dtype_of_scores

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]

# Keywords of vLLM's functions and FlashAttention-3's that say how a result is come by, not what it is.
_TAKEN = {"fa_version", "scheduler_metadata", "pack_gqa", "sm_margin"}
_TAKEN |= {"q_descale", "k_descale", "v_descale"}  # of fp8; vLLM gives them with 16 bits too
# Those that would change it, and the values besides None with which they do not.
_REFUSED = dict.fromkeys(("q_v", "qv", "seqused_q", "cp_tot_seqused_k"))
_REFUSED |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"))  # of a cache
_REFUSED |= {"cp_world_size": 1, "cp_rank": 0, "attention_chunk": 0}
_SINKS = torch.float32, torch.float16, torch.bfloat16


def engine_arguments(function: str, s_aux: Tensor | None, others: dict, q: Tensor) -> Tensor | None:
    """Checks what serving engines give `function` beside flash-attn's arguments, and returns `s_aux` as `fmha` takes a
    sink."""
    for name, value in others.items():
        if name not in _TAKEN and name not in _REFUSED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name in _REFUSED and value is not None and not (type(value) is int and value == _REFUSED[name]):
            given = f"of type {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            expected = _REFUSED[name]
            raise NotImplementedError(f"{name}: is {given}; expected {expected}, as {function} does not support it")
    if s_aux is None:
        return None
    in_float64 = getattr(q, "dtype", None) == getattr(s_aux, "dtype", None) == torch.float64
    if not isinstance(s_aux, Tensor) or not (s_aux.dtype in _SINKS or in_float64):
        given = f"has dtype {name_of(s_aux.dtype)}" if isinstance(s_aux, Tensor) else f"is {s_aux!r}"
        raise TypeError(f"s_aux: {given}; expected a tensor of float32, float16 or bfloat16, or of float64 as q")
    return s_aux.to(dtype_of_scores(q)) if isinstance(q, Tensor) else s_aux


def _wants_lse(return_attn_probs: bool, return_softmax_lse: bool) -> bool:
    """Whether one of two arguments asks for it: `fmha` has one, and would name that where they are no bools."""
    for name, value in (("return_attn_probs", return_attn_probs), ("return_softmax_lse", return_softmax_lse)):
        if value is not True and value is not False:
            check_bool(name, value)
    return return_attn_probs or return_softmax_lse


@renaming(window="window_size", sink="s_aux")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    **engine,
) -> Result:
    """Attention with flash-attn's arguments and its bottom-right alignment: the last row sees the last key.

    Row `i` stands at position `p = N_kv - N_q + i`; causal hides the keys after `p`, and a window
    `(left, right)` leaves `p - left` to `p + right`. Rows that see no key are 0.

    Args:
        q: `[B, N_q, H_q, d]`. Head dims that are no multiple of 8 are padded, and a tensor whose last dimension is not
            contiguous is copied, as flash-attn does.
        k: `[B, N_kv, H_kv, d]`; `H_q` is a multiple of `H_kv`.
        v: `[B, N_kv, H_kv, d_v]`.
        dropout_p: the probability with which a weight is dropped, as in `fmha`, whose seed PyTorch's generator draws.
        softmax_scale: factor of the scores; `1 / sqrt(d)` by default.
        causal: hide the keys after the row's position.
        window_size: `(left, right)` in tokens, -1 unbounded, or None for no window.
        softcap: bound of the scores, 0 for none.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`; `-slope * |i + N_kv - N_q - j|` is added to the scores.
        deterministic: the same gradients, bit for bit, run after run; without it `dq` may differ in its last bits.
            Results always have the same bits.
        return_attn_probs: return `(out, softmax_lse, None)`. The probabilities themselves are never written out, so
            the third is None, with dropout too.
        num_splits: as in `fmha`; 0: the library chooses.
        return_softmax_lse: return `(out, softmax_lse)`, as vLLM's functions do; `return_attn_probs` comes first.
        out: where the result is written, as in `fmha`; of head dims that are padded it is copied.
        s_aux: `[H_q]`, float32, float16 or bfloat16: `fmha`'s `sink`, under the name that it has in vLLM.
        engine: `fa_version`, `scheduler_metadata`, `pack_gqa`, `sm_margin` and, as they are of fp8 inputs alone,
            `q_descale`, `k_descale` and `v_descale` are taken and change nothing. `q_v`, `qv`, `seqused_q` and
            `cp_tot_seqused_k` must be None, `cp_world_size` 1, `cp_rank` and `attention_chunk` 0.

    Returns:
        `out` `[B, N_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[B, H_q, N_q]`, natural logarithm. Both are
        differentiable.

    Raises:
        NotImplementedError: what `engine` must not be, or `out` where an input requires grad.
        TypeError, ValueError: as `fmha`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    sink = engine_arguments("flash_attn_func", s_aux, engine, q)
    return_lse = _wants_lse(return_attn_probs, return_softmax_lse)
    results = attend(
        q, k, v, causal=causal, start_pos="end", window=(-1, -1) if window_size is None else window_size,
        softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sink=sink, return_lse=return_lse, num_splits=num_splits,
        deterministic=deterministic, dropout_p=dropout_p, out=out,
    )  # fmt: skip
    return (*results, None) if return_attn_probs else results


@renaming(window="window_size", sink="s_aux")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    *,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    **engine,
) -> Result:
    """`flash_attn_func` for sequences of different lengths, packed one after the other without padding.

    Each sequence is aligned bottom-right by its own lengths: its last row sees its last key. With `block_table` the
    keys lie in pages, and a call may mix chunks of prompts, drafts and single rows, as serving engines do: the
    arguments are those of flash-attn 2.8 in its order, and by name those of vLLM's fork.

    Args:
        q: `[total_q, H_q, d]`.
        k: `[total_k, H_kv, d]`, or with `block_table` pages `[pages, page size, H_kv, d]`; `H_q` is a multiple of
            `H_kv`.
        v: `[total_k, H_kv, d_v]`, or pages.
        cu_seqlens_q: int32 `[B + 1]` on q's device: sequence `b` has the rows `cu_seqlens_q[b]` to
            `cu_seqlens_q[b + 1]` of q, possibly none.
        cu_seqlens_k: int32 `[B + 1]`, the same for the rows of k and v. With `block_table` it may give the keys of each
            sequence, as the differences of its neighbours, where `seqused_k` does not: that costs a small launch.
        max_seqlen_q: query rows of the longest sequence. An int; a tensor of one, as `lengths.max()` gives, is taken as
            flash-attn takes it, but the host then waits for the device.
        max_seqlen_k: the same of keys; with `block_table` a hint, which may be None.
        dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs: as `flash_attn_func`.
        window_size: `(left, right)` in tokens, -1 unbounded, or None for no window.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`; `-slope * |i + len_k - len_q - j|` is added to the scores.
        block_table: int32 `[B, pages of a sequence]`, as in `fmha`.
        seqused_k: int32 `[B]`, keys of each sequence that count, of those that `cu_seqlens_k` gives it or that its
            pages have room for.
        num_splits, return_softmax_lse, out, s_aux, engine: as `flash_attn_func`.

    Returns:
        `out` `[total_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[H_q, total_q]`, natural logarithm. Both are
        differentiable.

    Raises:
        NotImplementedError: what `engine` must not be, or `out` or `block_table` where an input requires grad.
        TypeError, ValueError: as `fmha`.

    Source: FlashAttention-2 (arXiv:2307.08691), PagedAttention (arXiv:2309.06180, section 4.1); the interface of
    flash-attn 2.8.
    """
    sink = engine_arguments("flash_attn_varlen_func", s_aux, engine, q)
    if block_table is not None and cu_seqlens_k is not None:
        seqused_k = lengths_between(cu_seqlens_k, cu_seqlens_q) if seqused_k is None else seqused_k
        cu_seqlens_k = None
    max_seqlen_q, max_seqlen_k = longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return_lse = _wants_lse(return_attn_probs, return_softmax_lse)
    results = attend(
        q, k, v, causal=causal, start_pos="end", window=(-1, -1) if window_size is None else window_size,
        softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        block_table=block_table, return_lse=return_lse, num_splits=num_splits,
        deterministic=deterministic, dropout_p=dropout_p, out=out,
    )  # fmt: skip
    return (*results, None) if return_attn_probs else results


def longest(**lengths: int | Tensor | None) -> list[int | None]:
    """Lengths as `fmha` takes them. flash-attn takes tensors of one integer, which transformers, for one, gives it."""
    for name, n in lengths.items():
        if isinstance(n, Tensor):
            if n.numel() != 1 or n.dtype == torch.bool or n.is_floating_point() or n.is_complex():
                raise TypeError(f"{name}: is {name_of(n.dtype)}{list(n.shape)}; expected an int, or a tensor of one")
            lengths[name] = n.item()
    return [*lengths.values()]


def lengths_between(cu_seqlens_k: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """The keys of each sequence, for pages, which lie one after the other nowhere."""
    if not isinstance(cu_seqlens_k, Tensor) or cu_seqlens_k.dtype != torch.int32:
        given = cu_seqlens_k.dtype if isinstance(cu_seqlens_k, Tensor) else type(cu_seqlens_k).__name__
        raise TypeError(f"cu_seqlens_k: is of type {given}; expected an int32 tensor")
    if isinstance(cu_seqlens_q, Tensor) and (cu_seqlens_k.dim() != 1 or cu_seqlens_k.shape != cu_seqlens_q.shape):
        shapes = list(cu_seqlens_k.shape), list(cu_seqlens_q.shape)
        raise ValueError(f"cu_seqlens_k: has shape {shapes[0]} and cu_seqlens_q {shapes[1]}; they must be equal")
    return cu_seqlens_k.diff()


def _packs(unpacked: Callable, **names: str) -> Callable[[Callable], Callable]:
    """For a function that hands its further arguments on to `unpacked`, whose arguments `names` are in others here."""

    def decorate(function: Callable) -> Callable:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        known = names.keys() | {p.name for p in own}
        others = [p for p in inspect.signature(unpacked).parameters.values() if p.name not in known]
        call = renaming(**names, **{unpacked.__name__: function.__name__})(function)
        call.__signature__ = inspect.Signature([*own, *others], return_annotation=Result)
        return call

    return decorate


def _unpacked(name: str, packed: Tensor, shape: str) -> tuple[Tensor, ...]:
    """The parts that lie along the third dimension from the end; `shape` is what is expected, in words."""
    check_tensors(**{name: packed})
    dims = shape[1:-1].split(", ")
    if packed.dim() != len(dims) or packed.shape[-3] != int(dims[-3]):
        raise ValueError(f"{name}: has shape {list(packed.shape)}; expected {shape}")
    return packed.unbind(-3)


@_packs(flash_attn_func, k="kv", v="kv")
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_func` for k and v in one buffer, read in place, without a copy.

    Args:
        q: `[B, N_q, H_q, d]`, float32, float16 or bfloat16 (float64 on a CPU).
        kv: `[B, N_kv, 2, H_kv, d]`, dtype and device of q: `kv[:, :, 0]` is k, `kv[:, :, 1]` v. `H_q` is a multiple of
            `H_kv`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            num_splits, return_softmax_lse, out, s_aux, engine: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`, with its bottom-right alignment: the last row sees the last key. `kv` gets its gradient as
        one tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; of k and v the text names `kv`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    return flash_attn_func(q, *_unpacked("kv", kv, "[batch, seq, 2, heads, head_dim]"), *args, **kwargs)


@_packs(flash_attn_func, q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(qkv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_func` for q, k and v in one buffer, read in place, without a copy.

    Args:
        qkv: `[B, N, 3, H, d]`, float32, float16 or bfloat16 (float64 on a CPU): `qkv[:, :, 0]` is q, then come k and v.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            num_splits, return_softmax_lse, out, s_aux, engine: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`: `out` is `[B, N, H, d]`. Rows and keys are as many, so row `i` stands at position `i`.
        `qkv` gets its gradient as one tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; of q, k and v the text names `qkv`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    return flash_attn_func(*_unpacked("qkv", qkv, "[batch, seq, 3, heads, head_dim]"), *args, **kwargs)


@_packs(flash_attn_varlen_func, k="kv", v="kv")
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_varlen_func` for k and v in one buffer, read in place, without a copy.

    Args:
        q: `[total_q, H_q, d]`, float32, float16 or bfloat16 (float64 on a CPU).
        kv: `[total_k, 2, H_kv, d]`, dtype and device of q: `kv[:, 0]` is k, `kv[:, 1]` v. `H_q` is a multiple of
            `H_kv`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            num_splits, return_softmax_lse, out, s_aux, engine: as in `flash_attn_varlen_func`.
        block_table: must be None, as pages hold no such buffer.

    Returns:
        As `flash_attn_varlen_func`: each sequence is aligned bottom-right by its own lengths. `kv` gets its gradient as
        one tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_varlen_func`; of k and v the text names `kv`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, "[total, 2, heads, head_dim]"), *args, **kwargs)


@_packs(
    flash_attn_varlen_func, q="qkv", k="qkv", v="qkv", cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen",
)  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, *args, **kwargs
) -> Result:
    """`flash_attn_varlen_func` for q, k and v in one buffer, read in place, without a copy.

    Args:
        qkv: `[total, 3, H, d]`, float32, float16 or bfloat16 (float64 on a CPU): `qkv[:, 0]` is q, then come k and v.
        cu_seqlens: int32 `[B + 1]` on qkv's device, where each sequence begins and ends, of rows and keys alike.
        max_seqlen: rows of the longest sequence, an int or a tensor of one, as in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            seqused_k, num_splits, return_softmax_lse, out, s_aux, engine: as in `flash_attn_varlen_func`.
        block_table: must be None, as pages hold no such buffer.

    Returns:
        As `flash_attn_varlen_func`: `out` is `[total, H, d]`. Row `i` of a sequence stands at position `i`, or with
        `seqused_k` before it by as many keys as do not count. `qkv` gets its gradient as one tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_varlen_func`; of q, k and v the text names `qkv`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    q, k, v = _unpacked("qkv", qkv, "[total, 3, heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)

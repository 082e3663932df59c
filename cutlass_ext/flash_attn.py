"""The names, arguments, defaults and alignment of flash-attn 2.8, so that an import line is all that changes.

Called by users. Three things differ from flash-attn, all on purpose: a row that sees no key has `softmax_lse = -inf`
(there `+inf`), `softmax_lse` is not shifted under causal ALiBi, and there is no backward pass and no dropout yet.
"""

import inspect
from collections.abc import Callable

from torch import Tensor

from ._ops import renaming
from .interface import fmha

Result = Tensor | tuple[Tensor, Tensor, None]


@renaming(window="window_size")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention with flash-attn's arguments and its bottom-right alignment: the last row sees the last key.

    Row `i` stands at position `p = N_kv - N_q + i`; causal hides the keys after `p`, and a window
    `(left, right)` leaves `p - left` to `p + right`. Rows that see no key are 0.

    Args:
        q: `[B, N_q, H_q, d]`.
        k: `[B, N_kv, H_kv, d]`; `H_q` is a multiple of `H_kv`.
        v: `[B, N_kv, H_kv, d_v]`.
        dropout_p: must be 0: there is no dropout.
        softmax_scale: factor of the scores; `1 / sqrt(d)` by default.
        causal: hide the keys after the row's position.
        window_size: `(left, right)` in tokens, -1 unbounded.
        softcap: bound of the scores, 0 for none.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`; `-slope * |i + N_kv - N_q - j|` is added to the scores.
        deterministic: taken for flash-attn's sake; results are always the same bits.
        return_attn_probs: return `(out, softmax_lse, None)`. The probabilities themselves are never written out, so
            the third is None, as it is in flash-attn without dropout.

    Returns:
        `out` `[B, N_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[B, H_q, N_q]`, natural logarithm.

    Raises:
        NotImplementedError: dropout, or an input that requires grad under grad mode.
        TypeError, ValueError: as `fmha`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    _check_dropout(dropout_p)
    out = fmha(
        q, k, v, causal=causal, start_pos="end", window=window_size, softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*out, None) if return_attn_probs else out


@renaming(window="window_size")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Result:
    """`flash_attn_func` for sequences of different lengths, packed one after the other without padding.

    Each sequence is aligned bottom-right by its own lengths: its last row sees its last key.

    Args:
        q: `[total_q, H_q, d]`.
        k: `[total_k, H_kv, d]`; `H_q` is a multiple of `H_kv`.
        v: `[total_k, H_kv, d_v]`.
        cu_seqlens_q: int32 `[B + 1]` on q's device: sequence `b` has the rows `cu_seqlens_q[b]` to
            `cu_seqlens_q[b + 1]` of q, possibly none.
        cu_seqlens_k: int32 `[B + 1]`, the same for the rows of k and v.
        max_seqlen_q: query rows of the longest sequence.
        max_seqlen_k: keys of the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as `flash_attn_func`.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`; `-slope * |i + len_k - len_q - j|` is added to the scores.
        block_table: must be None: pages are for `flash_attn_with_kvcache`.
        seqused_k: int32 `[B]`, keys of each sequence that count, of those that `cu_seqlens_k` gives it.

    Returns:
        `out` `[total_q, H_q, d_v]`, dtype of q. `softmax_lse` is float32 `[H_q, total_q]`, natural logarithm.

    Raises:
        NotImplementedError: dropout, block_table, or an input that requires grad under grad mode.
        TypeError, ValueError: as `fmha`.

    Source: FlashAttention-2 (arXiv:2307.08691); the interface of flash-attn 2.8.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: expected None; for paged keys use flash_attn_with_kvcache")
    _check_dropout(dropout_p)
    out = fmha(
        q, k, v, causal=causal, start_pos="end", window=window_size, softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_attn_probs, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return (*out, None) if return_attn_probs else out


def _check_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p: is {dropout_p}; expected 0, there is no dropout yet")


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
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name}: is of type {type(packed).__name__}; expected a tensor")
    dims = shape[1:-1].split(", ")
    if packed.dim() != len(dims) or packed.shape[-3] != int(dims[-3]):
        raise ValueError(f"{name}: has shape {list(packed.shape)}; expected {shape}")
    return packed.unbind(-3)


@_packs(flash_attn_func, k="kv", v="kv")
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_func` for `kv` `[B, N_kv, 2, H_kv, d]`: k and v in one buffer, read in place, without a copy."""
    return flash_attn_func(q, *_unpacked("kv", kv, "[batch, seq, 2, heads, head_dim]"), *args, **kwargs)


@_packs(flash_attn_func, q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(qkv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_func` for `qkv` `[B, N, 3, H, d]`: q, k and v in one buffer, read in place, without a copy."""
    return flash_attn_func(*_unpacked("qkv", qkv, "[batch, seq, 3, heads, head_dim]"), *args, **kwargs)


@_packs(flash_attn_varlen_func, k="kv", v="kv")
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs) -> Result:
    """`flash_attn_varlen_func` for `kv` `[total_k, 2, H_kv, d]`: k and v in one buffer, read in place."""
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, "[total, 2, heads, head_dim]"), *args, **kwargs)


@_packs(
    flash_attn_varlen_func, q="qkv", k="qkv", v="qkv", cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen",
)  # fmt: skip
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **kwargs) -> Result:
    """`flash_attn_varlen_func` for `qkv` `[total, 3, H, d]`: q, k and v in one buffer, read in place."""
    q, k, v = _unpacked("qkv", qkv, "[total, 3, heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)

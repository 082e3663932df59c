"""`scaled_dot_product_attention` with PyTorch's signature, layout and alignment. Called by users."""

import torch
from torch import Tensor

from ._ops import name_of, renaming
from .interface import fmha
from .support import attend


@renaming(
    q="query", k="key", v="value", causal="is_causal", softmax_scale="scale", bias="attn_mask", mask="attn_mask"
)  # fmt: skip
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by `fmha`.

    Args:
        query: `[..., H_q, N_q, d]`; a two-dimensional `[N_q, d]` is one head. Any head dim up to 256: one that is no
            multiple of 8 (4 in float32) is padded in a copy.
        key: `[..., H_kv, N_kv, d]`, with the leading dimensions of query.
        value: `[..., H_kv, N_kv, d_v]`, with the leading dimensions of query.
        attn_mask: broadcasts to `[..., H_q, N_q, N_kv]`. Bool, true where a key is visible, or float32, float16 or
            bfloat16 (float64 beside float64), added to the scores; that may require grad. It goes with is_causal.
        dropout_p: the probability with which a weight is dropped; PyTorch's generator draws the seed, as in `fmha`.
        is_causal: hide key `j` from row `i` where `j > i` (top-left alignment, as PyTorch has it).
        scale: factor of the scores, greater than 0; `1 / sqrt(d)` by default.
        enable_gqa: allow fewer KV heads than query heads; `H_q` is then a multiple of `H_kv`.

    Returns:
        `[..., H_q, N_q, d_v]`, dtype of query: a transposed view of a `[..., N_q, H_q, d_v]` buffer. Nothing is copied
        on the way in either, but for such head dims, a last dimension that is not contiguous, and leading dimensions of
        which there are several and which no view can merge. It is differentiable;
        `torch.use_deterministic_algorithms(True)` fixes the bits of its gradients. Rows that see no key are 0.

    Raises:
        TypeError, ValueError: as `fmha`; ValueError too where head counts differ without enable_gqa.

    Source: FlashAttention-2 (arXiv:2307.08691); PyTorch's documentation for the semantics.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "attn_mask"):
            raise TypeError(f"{name}: is of type {type(tensor).__name__}; expected a tensor")
        if tensor is not None and tensor.is_nested:
            raise TypeError(
                f"{name}: is nested; expected a strided tensor, or packed sequences (flash_attn_varlen_func)"
            )
    if query.dim() == 4 and key.dim() == 4 and value.dim() == 4:
        q, k, v = query, key, value
    else:
        q, k, v = _four_dimensional(query, key, value)
    if not enable_gqa and not (q.shape[1] == k.shape[1] == v.shape[1]):
        raise ValueError(
            f"enable_gqa: is False, and query has {q.shape[1]} heads, key {k.shape[1]} and value {v.shape[1]}; "
            "expected equal numbers, or enable_gqa=True to let query heads share KV heads"
        )
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"value: has {v.shape[2]} rows and key {k.shape[2]}; they must be equal")
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            given = name_of(attn_mask.dtype)
            raise TypeError(
                f"attn_mask: has dtype {given}; expected bool, true where a key is visible, or float32, float16 or "
                "bfloat16, added to the scores"
            )
        of_scores = _of_scores(attn_mask, (*query.shape[:-1], key.shape[-2]))
        bias, mask = (None, of_scores) if attn_mask.dtype == torch.bool else (of_scores, None)
    # 1.9 us of the host's time less than `attend` where nothing is to be mended
    strides_fit = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    compute = fmha if strides_fit and q.shape[-1] % 8 == k.shape[-1] % 8 == v.shape[-1] % 8 == 0 else attend
    out = compute(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=is_causal, softmax_scale=scale, bias=bias,
        mask=mask, dropout_p=dropout_p,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out if q is query else out.reshape(*query.shape[:-1], value.shape[-1])


def _four_dimensional(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Leading dimensions merged into one, or added: `[B, H, N, d]`, as views where the strides allow."""
    dims = query.dim()
    same_dims = dims == key.dim() == value.dim()
    if dims < 2 or not same_dims or not (query.shape[:-3] == key.shape[:-3] == value.shape[:-3]):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(
            f"query, key, value: have shapes {shapes}; expected [..., heads, seq, head_dim], alike in all but these"
        )
    if dims > 4:
        return [tensor.flatten(0, -4) for tensor in (query, key, value)]
    return [tensor[(None,) * (4 - dims)] for tensor in (query, key, value)]


def _of_scores(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`attn_mask`, which broadcasts to `shape`, that of the scores, as `fmha` takes it: four dimensions, of which all
    but the last may be 1. Where leading dimensions are merged of which some are broadcast, it is copied."""
    given = attn_mask.shape
    if len(given) > len(shape) or any(n not in (1, m) for n, m in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"attn_mask: has shape {list(given)}; expected one that broadcasts to {list(shape)}")
    x = attn_mask[(None,) * (max(len(shape), 4) - attn_mask.dim())]
    if x.dim() > 4:
        of_all = all(n == 1 for n in x.shape[:-3])
        x = (x if of_all else x.expand(*shape[:-3], *x.shape[-3:])).flatten(0, -4)
    return x.expand(*x.shape[:3], shape[-1])

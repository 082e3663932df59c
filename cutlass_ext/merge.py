"""`merge_attention`: one result from those of parts of the keys. Called by users."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from the attention of the same queries to parts of them, by their `lse`.

        lse = log sum_p exp(lse_p)          out = sum_p exp(lse_p - lse) out_p

    Parts are what `fmha(..., return_lse=True)` gives for disjoint sets of keys: chunks of a long context, the ranks of
    sequence parallelism, a shared prefix and each sequence's own keys. A sink belongs to one part alone. Rows that see
    no key of a part have `lse_p = -inf` there, and what `out_p` holds in them does not count, NaN included.

    Args:
        outs: a list or tuple of one or more `[B, N_q, H_q, d_v]`, or packed `[total_q, H_q, d_v]`, of one shape and
            dtype; float32, with `fmha`'s `out_dtype`, if parts of 16 bits are not to be rounded before they are merged.
        lses: as many of `[B, H_q, N_q]`, or packed `[H_q, total_q]`, float32 (float64 for outs of float64).

    Returns:
        `out`, shape and dtype of the parts, and `lse`, shape and dtype of theirs; of rows that no part has a key for, 0
        and -inf. Sums are made in float32, or in float64 where the inputs are. Both are differentiable in all parts.

    Raises:
        TypeError: an argument that is no sequence of tensors, or dtypes that differ.
        ValueError: no parts, or numbers, shapes or devices that do not fit.

    Source: Online normalizer calculation for softmax (arXiv:1805.02867, section 3.1); Flash-Decoding (Dao, 2023).
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if len(outs) != len(lses):
        raise ValueError(f"lses: has {len(lses)} parts and outs {len(outs)}; they must be equal")
    shape = outs[0].shape
    if len(shape) not in (3, 4):
        raise ValueError(f"outs: has shape {list(shape)}; expected [batch, rows, heads, d_v], or [total, heads, d_v]")
    expected = torch.Size([*shape[:-3], shape[-2], shape[-3]])
    if lses[0].shape != expected:
        raise ValueError(f"lses: has shape {list(lses[0].shape)}; expected that of outs' rows, {list(expected)}")
    for name, parts in (("outs", outs), ("lses", lses)):
        for part in parts:
            if part.device != outs[0].device:
                raise ValueError(f"{name}: has a part on {part.device} and one of outs is on {outs[0].device}; move it")
    compute = torch.promote_types(outs[0].dtype, torch.promote_types(lses[0].dtype, torch.float32))

    every = torch.stack([lse.to(compute) for lse in lses])
    m = every.detach().amax(0)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = torch.exp(every - m)
    total = weights.sum(0)
    empty = total == 0  # of all parts; a logarithm and a quotient of 1 instead have gradients that are no NaN
    total = total.masked_fill(empty, 1.0)
    lse = (m + total.log()).masked_fill(empty, -torch.inf)
    merged = torch.zeros(shape, dtype=compute, device=outs[0].device)
    for out, weight in zip(outs, weights / total, strict=True):
        of_rows = weight.transpose(-1, -2).unsqueeze(-1)
        merged = merged + out.to(compute).masked_fill(of_rows == 0, 0.0) * of_rows
    return merged.to(outs[0].dtype), lse.to(lses[0].dtype)


def _parts(name: str, parts: Sequence[Tensor]) -> list[Tensor]:
    # A tensor is no sequence of parts: its first dimension may as well be the batch of one.
    if not isinstance(parts, Sequence) or not all(isinstance(part, Tensor) for part in parts):
        kinds = sorted({type(part).__name__ for part in parts}) if isinstance(parts, Sequence) else []
        given = f"{type(parts).__name__} of {', '.join(kinds)}" if kinds else type(parts).__name__
        raise TypeError(f"{name}: is of type {given}; expected a sequence of tensors")
    if len(parts) == 0:
        raise ValueError(f"{name}: has no parts; expected at least 1")
    parts = list(parts)
    for part in parts:
        if part.dtype != parts[0].dtype or not part.is_floating_point():
            raise TypeError(f"{name}: has dtypes {part.dtype} and {parts[0].dtype}; expected one floating-point dtype")
        if part.shape != parts[0].shape:
            raise ValueError(f"{name}: has shapes {list(part.shape)} and {list(parts[0].shape)}; they must be equal")
    return parts

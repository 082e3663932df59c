"""flash-attn's `layers.rotary`, through PyTorch's operators. `adapters.flash_attn.install` puts it in place."""

import torch
from torch import Tensor, nn

from .._ops import name_of
from ..interface import check_tensors
from ..kvcache import rotated, turned


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first columns of rows by their positions (arXiv:2104.09864, section 3.2); differentiable.

    Args:
        x: `[B, N, H, d]`, or packed `[total, H, d]` with `cu_seqlens`.
        cos, sin: `[positions, rotary_dim / 2]`; `rotary_dim` columns are rotated.
        interleaved: columns `2i, 2i + 1` are a pair; otherwise `i, i + rotary_dim / 2`.
        inplace: write the result to `x`.
        seqlen_offsets: the position of each sequence's first row, an int or int32 `[B]`.
        cu_seqlens: int32 `[B + 1]`, where packed sequences begin and end.
        max_seqlen: rows of the longest packed sequence, an int; by it alone the host sees whether cos has a row for
            each position of theirs.

    Returns:
        Shape and dtype of `x`, computed in float32; `x` itself with `inplace`.

    Raises:
        TypeError: x, cos, sin or cu_seqlens is no tensor.
        ValueError: shapes that do not fit; positions that cos has no row for, as far as ints say so. Where tensors do,
            the nearest row turns those.
    """
    _check(x, cos, sin, 4 if cu_seqlens is None else 3)
    if cu_seqlens is not None:
        check_tensors(cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            given = f"{name_of(cu_seqlens.dtype)} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: is {given}; expected int32 [batch + 1]")
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is not None and not isinstance(longest, Tensor):
        first = 0 if isinstance(seqlen_offsets, Tensor) else seqlen_offsets  # at the least
        last = first + longest - 1
        if first < 0 or last >= len(cos):
            raise ValueError(f"cos: has {len(cos)} rows, and positions go from {first} to {last}; expected one of each")
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        offsets = seqlen_offsets.unsqueeze(-1) if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        out = rotated(x, positions + offsets, cos, sin, interleaved)
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.bucketize(rows, cu_seqlens[1:-1], right=True)
        offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        out = rotated(x[None], (rows - cu_seqlens[sequence] + offsets)[None], cos, sin, interleaved)[0]
    return x.copy_(out) if inplace else out


def _check(x: Tensor, cos: Tensor, sin: Tensor, dims: int) -> None:
    check_tensors(x=x, cos=cos, sin=sin)
    _check_shape_of_x(x, dims)
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        expected = f"[positions, rotary_dim / 2], rotary_dim at most {x.shape[-1]}"
        raise ValueError(f"cos: has shape {list(cos.shape)}; expected {expected}")
    _check_alike(cos, sin)


def _check_shape_of_x(x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        expected = "[batch, seq, heads, head_dim]" if dims == 4 else "[total, heads, head_dim]"
        raise ValueError(f"x: has shape {list(x.shape)}; expected {expected}")


def _check_alike(cos: Tensor, sin: Tensor) -> None:
    if sin.shape != cos.shape:
        raise ValueError(f"sin: has shape {list(sin.shape)} and cos {list(cos.shape)}; they must be equal")


apply_rotary_emb_func = apply_rotary_emb


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Pairs `(a, b)` of columns as `(-b, a)`.

    Args:
        x: `[..., d]`, `d` even.
        interleaved: which columns are a pair, as in `apply_rotary_emb`.

    Returns:
        Shape and dtype of `x`.
    """
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` by the angles of each row.

    Args:
        x: `[B, N, H, d]`.
        cos, sin: `[N, rotary_dim / 2]` or `[B, N, rotary_dim / 2]`; `B` and `N` may be 1, for all.
        interleaved: as in `apply_rotary_emb`.

    Returns:
        Shape and dtype of `x`, computed in float32.

    Raises:
        TypeError: x, cos or sin is no tensor.
        ValueError: shapes that do not fit.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    _check_shape_of_x(x, 4)
    *of_rows, half = cos.shape or (0,)
    fits = all(n in (1, m) for n, m in zip(reversed(of_rows), (x.shape[1], x.shape[0]), strict=False))
    if len(of_rows) not in (1, 2) or not fits or 2 * half > x.shape[-1]:
        expected = f"[{x.shape[1]}, rotary_dim / 2] or [{x.shape[0]}, {x.shape[1]}, rotary_dim / 2]"
        raise ValueError(f"cos: has shape {list(cos.shape)}; expected {expected}, rotary_dim at most {x.shape[-1]}")
    _check_alike(cos, sin)
    return turned(x, cos, sin, interleaved)


def unpacked(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """q, k and v of qkv `[B, N, 3, H, d]`, or `[B, N, H_q + 2 H_kv, d]` with `num_heads_q`."""
    check_tensors(qkv=qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return tuple(qkv[:, :, i] for i in range(3))  # one by one: those of unbind and split forbid writing in place
    if qkv.dim() != 4:
        expected = "[batch, seq, 3, heads, head_dim], or [batch, seq, H_q + 2 H_kv, head_dim] with num_heads_q"
        raise ValueError(f"qkv: has shape {list(qkv.shape)}; expected {expected}")
    if num_heads_q is None:
        raise ValueError(f"num_heads_q: is None; expected the query heads of qkv, of shape {list(qkv.shape)}")
    num_heads_k, left_over = divmod(qkv.shape[2] - num_heads_q, 2)
    if num_heads_q < 1 or num_heads_k < 1 or left_over:
        raise ValueError(
            f"num_heads_q: is {num_heads_q}, and qkv has {qkv.shape[2]} heads; expected num_heads_q + 2 H_kv of them"
        )
    begins = 0, num_heads_q, num_heads_q + num_heads_k
    return tuple(
        qkv.narrow(2, begin, n) for begin, n in zip(begins, (num_heads_q, num_heads_k, num_heads_k), strict=True)
    )


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """`apply_rotary_emb` of q and k, in place.

    Args:
        qkv: `[B, N, 3, H, d]`, or `[B, N, H_q + 2 H_kv, d]` with `num_heads_q`.
        cos, sin: of q; of k, too, where `cos_k` and `sin_k` are None.
        cos_k, sin_k: of k.
        interleaved, seqlen_offsets: as in `apply_rotary_emb`.
        num_heads_q: `H_q`.

    Returns:
        `qkv`.

    Raises:
        TypeError: qkv, cos or sin is no tensor.
        ValueError: shapes that do not fit; a `num_heads_q` that is None where `qkv` has four dimensions, or that leaves
            an odd number of its heads, or none, for k and v; positions as in `apply_rotary_emb`.
    """
    q, k, _ = unpacked(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(
        k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
    )
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """`apply_rotary_emb` of the keys, in place.

    Args:
        kv: `[B, N, 2, H, d]`, the keys before the values.
        cos, sin, interleaved, seqlen_offsets: as in `apply_rotary_emb`.

    Returns:
        `kv`.

    Raises:
        TypeError: kv, cos or sin is no tensor.
        ValueError: shapes that do not fit; positions as in `apply_rotary_emb`.
    """
    check_tensors(kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: has shape {list(kv.shape)}; expected [batch, seq, 2, heads, head_dim]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotary embedding of q and k by positions from `seqlen_offset` on, in place.

    Args:
        dim: columns that are rotated.
        base: of the frequencies `base^(-2i / dim)`.
        interleaved: as in `apply_rotary_emb`.
        scale_base: must be None: there is no xPos.
        device: of the frequencies.

    Raises:
        NotImplementedError: `scale_base`.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None, device=None
    ):
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError(f"scale_base: is {scale_base}; expected None, there is no xPos")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates `qkv`, or q in its place and the keys of `kv`.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with `kv` it is q, `[B, N, H_q, d]`.
            kv: `[B, N, 2, H_kv, d]`.
            seqlen_offset: as `seqlen_offsets` in `apply_rotary_emb`.
            max_seqlen: one more than the last position, needed where `seqlen_offset` is a tensor.
            num_heads_q: as in `apply_rotary_emb_qkv_`.

        Returns:
            `qkv`, or q and `kv`.

        Raises:
            TypeError: a tensor that is none.
            ValueError: `max_seqlen` is None where `seqlen_offset` is a tensor, whose values the host does not read;
                shapes and positions as in `apply_rotary_emb_qkv_`.
        """
        if isinstance(seqlen_offset, Tensor) and max_seqlen is None:
            raise ValueError("max_seqlen: is None; expected the number of positions, as seqlen_offset is a tensor")
        positions = max_seqlen if max_seqlen is not None else qkv.shape[1] + seqlen_offset
        # A module cast to 16 bits has lost the frequencies, and angles want float32 in any case.
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(qkv.device)
        angles = torch.outer(torch.arange(positions, device=qkv.device, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)

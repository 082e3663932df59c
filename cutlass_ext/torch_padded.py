"""Attention of padded sequences through PyTorch's own operators, on any device: the formula, and its gradients.

On a CPU, calls that PyTorch's fused attention computes are left to it. Of others query rows are taken in blocks, so
that scores take O(N_kv) memory a row of a block, and no block touches keys that the host knows to be hidden. Called by
`torch_backend.py` and `kvcache.py`, which bring packed sequences, pages and caches into this form.
"""
# ruff: noqa: E741  (m, l and O are the field's names)

import contextlib
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .philox import kept, threshold_of

# Score elements of a block: on a CPU they should stay in the cache, on a GPU they should outlast a launch.
_CPU_BLOCK = 2**20
GPU_BLOCK = 2**24
_MAX_ROWS = 128  # of a block: more of them compute more hidden scores under causal
_MIN_ROWS = 32  # of a block: fewer of them read K and V more often than their arithmetic pays for
# Keys that a product adds up in a row on a GPU, whose matrix products may be chains of as many float32 additions as
# there are keys, where a CPU's add up a few hundred at a time. The largest error of out in a call of 3 rows of 64 heads
# on 2068 keys (20 draws): 1.6e-7 in one chain, 9e-8 in parts of 1024, 6e-8 of 512, 4e-8 of 256; 1.3e-7 is allowed.
_CHAIN = 512

Results = tuple[Tensor, Tensor]  # out, lse
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, dsink, dbias


class Lengths(NamedTuple):
    """What the sequences of a batch are, padded, packed or cached; `[B]` on the device where that alone knows."""

    start: int | Tensor  # position of the first query row
    used: Tensor | None  # keys at or past it are not the sequence's
    leftpad: Tensor | None  # nor are those before it
    first: int = 0  # which of the call's sequences is the first of these
    origin: int | Tensor = 0  # what key 0 counts as for dropout; positions here are counted from it


def dtype_of_scores(q: Tensor) -> torch.dtype:
    """What scores, softmax and products are computed in, and the dtype of lse."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def empty_results(q: Tensor, v: Tensor, return_lse: bool = True, out_dtype: torch.dtype | None = None) -> Results:
    """`out` and `lse` for q `[B, N_q, H_q, d]` or `[total_q, H_q, d]`; `lse` is empty where nobody asked for it. An out
    of another dtype than q's lies as lse does."""
    *batch, rows, H_q, _d = q.shape
    if out_dtype in (None, q.dtype):
        out = q.new_empty(*batch, rows, H_q, v.shape[-1])
    else:
        out = q.new_empty(*batch, H_q, rows, v.shape[-1], dtype=out_dtype).transpose(-2, -3)
    return out, q.new_empty((*batch, H_q, rows) if return_lse else (0,), dtype=dtype_of_scores(q))


def empty_gradients(o: SimpleNamespace) -> Gradients:
    """Of the shapes of q, k, v, sink and bias, contiguous; `dsink` is empty where there is no sink, `dbias` where it
    is not asked for."""
    dsink = o.q.new_empty(0 if o.sink is None else o.sink.shape, dtype=dtype_of_scores(o.q))
    if o.bias is not None and o.bias_grad:
        dbias = o.bias.new_empty(o.bias.shape)
    else:
        dbias = o.q.new_empty(0, dtype=torch.float32)
    dq, dk, dv = (x.new_empty(x.shape, dtype=o.out_dtype or x.dtype) for x in (o.q, o.k, o.v))
    return dq, dk, dv, dsink, dbias


# PyTorch's own fused attention on a CPU, also while the switch has these operators computed here.
_FUSED, _FUSED_BACKWARD = (
    torch.library.get_kernel(f"aten::_scaled_dot_product_flash_attention_for_cpu{of}", "CPU")
    for of in ("", "_backward")
)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FUSED_DTYPES = torch.float32, torch.float16, torch.bfloat16
# Its exponentials are of 20 ulp, of 16-bit inputs of less, and gradients go by lse. In float32 the largest errors of dq
# were up to 1.74 times what is allowed at 128 rows, 0.46 times at 256. In 16 bits it adds up dk and dv in those: dv was
# at 1.62 times the reference's error for 1.5. So lse and gradients of 16 bits are those of the call in float32.
_ROWS_OF_EXACT_LSE = 256
_MOST_ADDED = 2**24  # elements of a mask or of a bias that is not float32, which become float32


class _Fused(NamedTuple):
    """A call that PyTorch's fused attention computes: every row sees the keys `j`, or row `i` the first `i + 1`; less
    those that a mask hides, and a bias added."""

    j: slice
    causal: bool
    softmax_scale: float
    added: Tensor | None  # to the scores: `[1 or B, 1 or H_q, 1 or N_q, j]`, float32, -inf where a mask hides

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: SimpleNamespace) -> "_Fused | None":
        """None of a call with anything more to it."""
        if q.device.type != "cpu" or q.dtype not in _FUSED_DTYPES or q.shape[-1] != v.shape[-1]:
            return None
        if isinstance(lengths.start, Tensor) or not lengths.used is lengths.leftpad is None:
            return None
        if o.softcap > 0 or threshold_of(o.dropout_p) > 0 or not o.alibi_slopes is o.sink is None:
            return None
        N_q, right = q.shape[1], 0 if o.causal else o.window_right
        j, hidden = _visible_keys(lengths.start, slice(0, N_q), k.shape[1], o.window_left, right)
        causal = hidden and lengths.start == right == 0 and not 0 <= o.window_left < N_q - 1
        if j.start == j.stop or hidden != causal or q.numel() == 0:
            return None
        added = None
        if not o.bias is o.mask is None:
            becoming = [x.numel() for x in (o.bias, o.mask) if x is not None and x.dtype != torch.float32]
            if sum(becoming) > _MOST_ADDED:
                return None
            added = _added(o.bias, o.mask, j)
        return cls(j, causal, q.shape[-1] ** -0.5 if o.softmax_scale is None else o.softmax_scale, added)

    def keys(self, *tensors: Tensor) -> list[Tensor]:
        """`[B, j, H, d]` of tensors of all keys, as `[B, H, j, d]`."""
        all_keys = self.j.stop - self.j.start == tensors[0].shape[1]
        return [(x if all_keys else x[:, self.j]).transpose(1, 2) for x in tensors]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = True) -> Results:
        with _float32_products("cpu"):
            out, lse = _FUSED.call_boxed(
                _CPU, *_with_whole_rows(q.transpose(1, 2), *self.keys(k, v)), 0.0, self.causal,
                attn_mask=self.added, scale=self.softmax_scale,
            )  # fmt: skip
        if not return_lse:
            return out.transpose(1, 2).contiguous(), lse
        if self.added is not None and (unsure := lse == 0).any():  # which is also what it gives a row without keys
            lse.masked_fill_(unsure & self.sees_nothing(q.shape[1]), -torch.inf)
        return out.transpose(1, 2).contiguous(), lse.contiguous()

    def exact_lse(self, q: Tensor, k: Tensor) -> Tensor | None:
        """`lse` alone, of scores that are computed at once; None where there are too many for that."""
        (B, N_q, H_q, d), n = q.shape, self.j.stop - self.j.start
        if B * H_q * N_q * n > _CPU_BLOCK:
            return None
        (K,) = self.keys(k)
        Q, K = q.transpose(1, 2).reshape(-1, N_q * (H_q // K.shape[1]), d), K.flatten(0, 1)
        S = q.new_empty(Q.shape[0], Q.shape[1], n)
        with _float32_products("cpu"):
            S.baddbmm_(Q, K.mT, beta=0, alpha=self.softmax_scale)
        S = S.view(B, H_q, N_q, n)
        if self.causal:
            S.masked_fill_(torch.arange(n) > torch.arange(N_q).unsqueeze(-1), -torch.inf)
        if self.added is not None:
            S.add_(self.added)
        m, largest = S.amax(-1), torch.softmax(S, -1).amax(-1)  # exp(m - lse): softmax keeps no sum
        lse = m - largest.log_()
        return lse if self.added is None else lse.masked_fill_(m == -torch.inf, -torch.inf)

    def sees_nothing(self, N_q: int) -> Tensor:
        """`[1 or B, 1 or H_q, 1 or N_q]`: rows that see no key."""
        visible = self.added != -torch.inf
        last = torch.arange(N_q, device=visible.device) if self.causal else visible.shape[-1]
        return ~visible.any(-1) | (visible.to(torch.uint8).argmax(-1) > last)

    def backward(self, o: SimpleNamespace) -> Gradients:
        """From the results of either way, in float32."""
        q, dout, out = (x.transpose(1, 2).float() for x in (o.q, o.dout, o.out))
        k, v = (x.float() for x in self.keys(o.k, o.v))
        lse, empty = o.lse, o.lse == -torch.inf
        if empty.any():
            lse = lse.masked_fill(empty, torch.inf)  # P of a row without keys, exp(-inf - lse), is 0 and not NaN
            q, dout, out = (x.masked_fill(empty.unsqueeze(-1), 0.0) for x in (q, dout, out))
        with _float32_products("cpu"):
            dq, *of_keys = _FUSED_BACKWARD.call_boxed(
                _CPU, *_with_whole_rows(dout, q, k, v, out), lse, 0.0, self.causal,
                attn_mask=self.added, scale=self.softmax_scale,
            )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, *of_keys))
        if (N_kv := o.k.shape[1]) != self.j.stop - self.j.start:
            dk, dv = (pad(x, (0, 0, 0, 0, self.j.start, N_kv - self.j.stop)) for x in (dk, dv))
        dq, dk, dv = (x.to(o.out_dtype or o.q.dtype).contiguous() for x in (dq, dk, dv))
        nobody_asked = lse.new_empty(0)
        return dq, dk, dv, nobody_asked, nobody_asked.clone()


def _with_whole_rows(*tensors: Tensor) -> list[Tensor]:
    """With rows as PyTorch's fused attention takes for granted: contiguous, and apart from each other. Rows that are
    expanded are not; and `x.float()` of an expanded `x` may put another dimension than the last one innermost."""
    return [
        x if x.stride(-1) == 1 and (x.shape[-2] < 2 or x.stride(-2) >= x.shape[-1]) else x.contiguous() for x in tensors
    ]


def _added(bias: Tensor | None, mask: Tensor | None, j: slice) -> Tensor:
    """What bias and mask add to the scores of the keys `j`, float32."""
    if mask is None:
        added = bias[..., j].float()
    else:
        zero = torch.zeros((), dtype=torch.float32, device=mask.device) if bias is None else bias[..., j].float()
        added = zero.where(mask[..., j], -torch.inf)
    return added if added.stride(-1) == 1 else added.contiguous()


def _finite_heads(heads: int, *tensors: Tensor) -> Tensor | None:
    """`[B, heads]`: whether all is finite that tensors `[B, N, H, d]` have of a KV head's; None where everything is,
    which sums tell in a tenth of the time."""
    if all(math.isfinite(x.sum(dtype=torch.float32).item()) for x in tensors):
        return None
    found = [x.unflatten(2, (heads, -1)).isfinite().all(-1).all(-1).all(1) for x in tensors]
    return torch.stack(found).all(0)


def _chosen(use: Tensor, fused: Tensor, blocks: Tensor) -> Tensor:
    """Of tensors `[B, N, H, d]` the one where `use` `[B, heads]` is true of the KV head, else the other."""
    return fused.where(use.repeat_interleave(fused.shape[2] // use.shape[1], 1)[:, None, :, None], blocks)


class _Block(NamedTuple):
    """Query rows `i` of the sequences `b` and of the query heads of the KV heads `h`, and the keys `j` that they may
    see. `masked` says whether some of the rows may not see some of the keys."""

    b: slice
    h: slice
    i: slice
    j: slice
    Q: Tensor  # [b, h, G, i, d], times softmax_scale
    K: Tensor  # [b, h, j, d]
    V: Tensor  # [b, h, j, d_v]
    by_position: bool
    masked: bool

    @property
    def rows(self) -> tuple[slice, slice, slice, slice]:
        """Where the rows are in a tensor `[B, H_kv, G, N_q, ...]`."""
        return self.b, self.h, slice(None), self.i


class _Blocks:
    """The scores of a padded call, in blocks of O(N_kv) memory a row. Nothing here waits for the device."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: SimpleNamespace):
        (B, N_q, H_q, d), (_, N_kv, H_kv, d_v) = q.shape, v.shape
        self.q, self.k, self.v, self.G, self.softcap = q, k, v, H_q // H_kv, o.softcap
        self.dtype = dtype_of_scores(q)
        self.sums_in_parts = q.is_cuda and q.dtype == torch.float32
        self.softmax_scale = d**-0.5 if o.softmax_scale is None else o.softmax_scale
        self.left, self.right = o.window_left, 0 if o.causal else o.window_right
        self.start = lengths.start.view(B, 1, 1, 1, 1) if isinstance(lengths.start, Tensor) else lengths.start
        slopes = o.alibi_slopes
        self.slopes = None if slopes is None else slopes.reshape(-1, H_kv, self.G, 1, 1).expand(B, -1, -1, -1, -1)
        self.bias, self.mask = (self.scores_by_heads(getattr(o, name, None)) for name in ("bias", "mask"))
        self.threshold = threshold_of(getattr(o, "dropout_p", 0.0))
        if self.threshold > 0:
            self.seed, self.kept_scale = o.dropout_seed, 1 / (1 - o.dropout_p)
            sequences = torch.arange(B, device=q.device) + (lengths.first + o.sequence_start)
            heads = torch.arange(H_q, device=q.device) + o.head_start
            self.sequences, self.q_heads = sequences.view(B, 1, 1, 1, 1), heads.view(1, H_kv, self.G, 1, 1)
            origin = lengths.origin
            self.origin = origin.long().view(B, 1, 1, 1, 1) if isinstance(origin, Tensor) else origin
        self.keys = torch.arange(N_kv, device=q.device)
        self.outside = _outside(self.keys, lengths)
        self.rows, self.heads = _block_shape(q.is_cuda, N_q, N_kv, self.G, d + d_v)

    def __iter__(self) -> Iterator[_Block]:
        (B, N_q), (N_kv, H_kv) = self.q.shape[:2], self.k.shape[1:3]
        q_heads = self.by_heads(self.q)
        for b, h in _head_blocks(B, H_kv, self.heads):
            K, V = (x[b, :, h].transpose(1, 2).to(self.dtype) for x in (self.k, self.v))
            if self.outside is not None:
                # 0 * NaN is NaN: what lies outside a sequence must not even meet a zero probability.
                K, V = (x.masked_fill(self.outside[b, None, :, None], 0.0) for x in (K, V))
            if b.stop - b.start > 1:
                K, V = K.contiguous(), V.contiguous()  # once here, or matmul does it for every block of rows
            start = self.start[b] if isinstance(self.start, Tensor) else self.start
            for first_row in range(0, N_q, self.rows):
                i = slice(first_row, min(first_row + self.rows, N_q))
                j, hidden = _visible_keys(start, i, N_kv, self.left, self.right)
                Q = q_heads[b, h, :, i].to(self.dtype)
                Q = torch.mul(Q, self.softmax_scale, out=Q.new_empty(Q.shape))  # contiguous, or matmul copies it again
                of_tensors = (self.outside, self.bias, self.mask)
                masked = hidden or any(x is not None for x in of_tensors)
                yield _Block(b, h, i, j, Q, K[:, :, j], V[:, :, j], hidden, masked)

    def scores(self, block: _Block, keep_tanh: bool = False) -> tuple[Tensor, Tensor | None]:
        """`S` `[b, h, G, i, j]`, -inf where a key is hidden; and if it is to be kept, the softcap's tanh."""
        b, h, _, j = block[:4]
        S = self.product(block.Q, block.K.mT)
        tanh = None
        if self.softcap > 0:
            S.div_(self.softcap).tanh_()
            tanh = S.clone() if keep_tanh else None
            S.mul_(self.softcap)
        keys, positions = self.keys[j], self.positions(block)
        if self.slopes is not None:
            S.addcmul_(self.slopes[b, h], (keys - positions).abs().to(self.dtype), value=-1.0)
        if self.bias is not None:
            bias = self.of_block(self.bias, block)
            S.add_(bias).masked_fill_(bias == -torch.inf, -torch.inf)  # a NaN of q or k too
        if self.mask is not None:
            S.masked_fill_(~self.of_block(self.mask, block), -torch.inf)
        if block.by_position and self.right >= 0:
            S.masked_fill_(keys > positions + self.right, -torch.inf)
        if block.by_position and self.left >= 0:
            S.masked_fill_(keys < positions - self.left, -torch.inf)
        if self.outside is not None:
            S.masked_fill_(self.outside[b, None, None, None, j], -torch.inf)
        return S, tanh

    def positions(self, block: _Block) -> Tensor:
        """Of a block's rows: `[i, 1]`, or `[b, 1, 1, i, 1]` where sequences have starts of their own."""
        start = self.start[block.b] if isinstance(self.start, Tensor) else self.start
        return torch.arange(block.i.start, block.i.stop, device=self.keys.device).unsqueeze(-1) + start

    def dropped(self, block: _Block) -> Tensor | None:
        """`[b, h, G, i, j]`: where dropout takes a weight away; None where there is none."""
        if self.threshold == 0:
            return None
        sequences, heads = self.sequences[block.b], self.q_heads[:, block.h]
        origin = self.origin[block.b] if isinstance(self.origin, Tensor) else self.origin
        rows = self.positions(block) + origin
        return ~kept(self.seed, self.threshold, sequences, heads, rows, block.j, origin)

    def drop(self, x: Tensor, dropped: Tensor | None) -> Tensor:
        """`x`, in place, times what dropout makes of its weights: 0, or 1 / (1 - dropout_p)."""
        return x if dropped is None else x.mul_(self.kept_scale).masked_fill_(dropped, 0.0)

    def scores_by_heads(self, x: Tensor | None) -> Tensor | None:
        """`[1 or B, 1 or H_q, 1 or N_q, N_kv]` as a view `[1 or B, 1 or H_kv, 1 or G, 1 or N_q, N_kv]`."""
        return x if x is None else x.unflatten(1, (-1, self.G)) if x.shape[1] > 1 else x.unsqueeze(1)

    def of_block(self, x: Tensor, block: _Block) -> Tensor:
        """What of a view of `scores_by_heads` is for a block, broadcast where it is 1."""
        rows = (part if n > 1 else slice(None) for part, n in zip(block.rows, x.shape[:-1], strict=True))
        return x[(*rows, block.j)]

    def product(self, rows: Tensor, of_keys: Tensor) -> Tensor:
        """Of rows `[b, h, G, i, x]` with a matrix of their KV head, `[b, h, x, y]`: `[b, h, G, i, y]`."""
        return torch.matmul(rows.flatten(2, 3), of_keys).unflatten(2, (self.G, -1))

    def sum_over_keys(self, weights: Tensor, of_keys: Tensor) -> Tensor:
        """`product` of weights `[b, h, G, i, j]` with rows of keys `[b, h, j, y]`, of float32 on a GPU in parts of
        `_CHAIN` keys that are summed apart. Of 16 bits no one sees the difference."""
        n = weights.shape[-1]
        if not self.sums_in_parts or n <= _CHAIN:
            return self.product(weights, of_keys)
        rows, of_keys = weights.flatten(2, 3).flatten(0, 1), of_keys.flatten(0, 1)
        total = rows[..., :_CHAIN] @ of_keys[:, :_CHAIN]
        for first in range(_CHAIN, n, _CHAIN):
            j = slice(first, first + _CHAIN)
            total.baddbmm_(rows[..., j], of_keys[:, j])
        return total.view(*weights.shape[:-1], -1)

    def by_heads(self, x: Tensor) -> Tensor:
        """`[B, N_q, H_q, d]` as a view `[B, H_kv, G, N_q, d]`: query heads meet their KV head by broadcasting, and K
        and V are never repeated."""
        return x.unflatten(2, (-1, self.G)).permute(0, 2, 3, 1, 4)

    def rows_by_heads(self, x: Tensor) -> Tensor:
        """`[B, H_q, N_q]` as a view `[B, H_kv, G, N_q, 1]`."""
        return x.unflatten(1, (-1, self.G)).unsqueeze(-1)

    def of_heads(self, x: Tensor) -> Tensor:
        """`[H_q]` as a view `[1, H_kv, G, 1, 1]`."""
        return x.view(1, -1, self.G, 1, 1)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: SimpleNamespace) -> Results:
    """Padded sequences: `out` `[B, N_q, H_q, d_v]` in q's dtype, or another, and `lse` `[B, H_q, N_q]` float32.

    Scores, softmax and both products are computed in float32, whatever the inputs' dtype, or in float64 where they are.
    """
    out_dtype = getattr(o, "out_dtype", None)
    if out_dtype not in (None, q.dtype):
        of_float32, lse = attention(q.float(), k.float(), v.float(), lengths, o)
        return empty_results(q, v, False, out_dtype)[0].copy_(of_float32), lse
    fused = _Fused.of(q, k, v, lengths, o)
    if fused is None:
        return _attention_in_blocks(q, k, v, lengths, o)
    needs_exact_lse = o.return_lse and q.dtype == torch.float32 and q.shape[1] < _ROWS_OF_EXACT_LSE
    if o.return_lse and q.dtype != torch.float32:
        out, lse = fused.attention(q.float(), k.float(), v.float())
        out = out.to(q.dtype)
    else:
        out, lse = fused.attention(q, k, v, o.return_lse and not needs_exact_lse)
    if needs_exact_lse and (lse := fused.exact_lse(q, k)) is None:
        _, lse = _attention_in_blocks(q, k, v, lengths, o, out)
    # Where a mask hides a NaN, it adds -inf to it: of such heads the blocks, which replace it, have the last word.
    if fused.added is not None and (use := _finite_heads(k.shape[2], out)) is not None:
        of_blocks = _attention_in_blocks(q, k, v, lengths, o)
        out = _chosen(use, out, of_blocks[0])
        lse = _chosen(use, lse.transpose(1, 2).unsqueeze(-1), of_blocks[1].transpose(1, 2).unsqueeze(-1))
        lse = lse.squeeze(-1).transpose(1, 2).contiguous()
    return out, lse


def _attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: SimpleNamespace, known: Tensor | None = None
) -> Results:
    """`attention` in blocks of scores; `lse` alone where `out` is known."""
    out, lse = empty_results(q, v)
    if lse.numel() == 0:
        return out, lse
    blocks = _Blocks(q, k, v, lengths, o)
    out_heads, lse_heads = blocks.by_heads(out), blocks.rows_by_heads(lse)
    sinks = None if o.sink is None else blocks.of_heads(o.sink)
    with _float32_products(q.device.type):
        for block in blocks:
            sink = None if sinks is None else sinks[:, block.h]
            if block.j.start == block.j.stop:
                out_heads[block.rows] = 0.0
                lse_heads[block.rows] = -torch.inf if sink is None else sink
                continue
            S, _ = blocks.scores(block)
            m, P = S.amax(-1, keepdim=True), torch.softmax(S, -1)
            del S  # or it, and P below, would last until the next block's replace them
            largest = P.amax(-1, keepdim=True)  # exp(m - lse): softmax keeps no sum
            of_rows = m - largest.log()
            empty = m == -torch.inf
            if known is not None:
                lse_heads[block.rows] = of_rows.masked_fill_(empty, -torch.inf)
                del P
                continue
            O = blocks.sum_over_keys(blocks.drop(P, blocks.dropped(block)), block.V)
            del P
            if sink is not None:
                O.div_(1 + torch.exp(sink - m) * largest)
                of_rows = torch.logaddexp(of_rows, sink)
            out_heads[block.rows] = O.masked_fill_(empty, 0.0)
            lse_heads[block.rows] = of_rows.where(~empty, -torch.inf if sink is None else sink)
    return out if known is None else known, lse


def attention_backward(o: SimpleNamespace, lengths: Lengths) -> Gradients:
    """Padded sequences: the gradients of `attention`, from its results (FlashAttention-2, arXiv:2307.08691, section
    3.1), computed in what the scores are.

        P = exp(S - lse),  dV = (D P)^T dO,  dS = P (D dO V^T - delta),  dQ = dS K,  dK = dS^T Q
        dsink = -sum exp(sink - lse) delta,  dbias = dS, summed where the bias is broadcast

    with delta = rowsum(dO O) - dlse and dropout's factors D, 0 or 1 / (1 - dropout_p). Rows that see no key, and keys
    outside their sequence, have gradients of 0: what stands there is replaced before it meets a zero.
    """
    fused = None
    if o.out is not None and o.delta is o.dlse is None and not (o.bias is not None and o.bias_grad):
        fused = _Fused.of(o.q, o.k, o.v, lengths, o)
    if fused is None:
        return _backward_in_blocks(o, lengths)
    gradients = fused.backward(o)
    if fused.added is None or (use := _finite_heads(o.k.shape[2], *gradients[:3])) is None:
        return gradients
    of_blocks = _backward_in_blocks(o, lengths)
    return *(_chosen(use, *both) for both in zip(gradients[:3], of_blocks[:3], strict=True)), *gradients[3:]


def _backward_in_blocks(o: SimpleNamespace, lengths: Lengths) -> Gradients:
    """`attention_backward` in blocks of scores."""
    dq, dk, dv, dsink, dbias = empty_gradients(o)
    dsink.zero_()
    if o.q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dsink, dbias.zero_()
    blocks = _Blocks(o.q, o.k, o.v, lengths, o)
    dq_heads, dO_heads = blocks.by_heads(dq), blocks.by_heads(o.dout)
    O_heads = None if o.out is None else blocks.by_heads(o.out)
    # P of a row without keys, exp(-inf - lse), is 0 and not NaN
    lse_heads = blocks.rows_by_heads(o.lse.masked_fill(o.lse == -torch.inf, torch.inf))
    delta_heads, dlse_heads = (None if x is None else blocks.rows_by_heads(x) for x in (o.delta, o.dlse))
    dK, dV = (x.new_zeros(x.transpose(1, 2).shape, dtype=blocks.dtype) for x in (o.k, o.v))
    dS_sums = torch.zeros_like(dbias, dtype=blocks.dtype)
    of_bias = blocks.scores_by_heads(dS_sums) if dbias.dim() > 1 else None
    with _float32_products(o.q.device.type):
        for block in blocks:
            sees_keys = block.j.start < block.j.stop
            lse, dO, Q = lse_heads[block.rows], dO_heads[block.rows].to(blocks.dtype), block.Q
            empty = None  # rows that see no key
            if not sees_keys:
                empty = torch.ones_like(lse, dtype=torch.bool)
            else:
                S, tanh = blocks.scores(block, keep_tanh=True)
                if block.masked:
                    empty = (S.amax(-1, keepdim=True) == -torch.inf) | (lse == torch.inf)
                    dO, Q = dO.masked_fill(empty, 0.0), Q.masked_fill(empty, 0.0)
                P = _summing_to_one(
                    S.sub_(lse).exp_(), lse, None if o.sink is None else blocks.of_heads(o.sink)[:, block.h]
                )
            if delta_heads is not None:
                delta = delta_heads[block.rows]
            else:
                delta = (dO * O_heads[block.rows]).sum(-1, keepdim=True)
                if empty is not None:
                    delta.masked_fill_(empty, 0.0)
                if dlse_heads is not None:
                    delta -= dlse_heads[block.rows]
            if o.sink is not None:
                of_sink = (torch.exp(blocks.of_heads(o.sink)[:, block.h] - lse) * delta).sum((0, 3, 4))
                dsink.view(-1, blocks.G)[block.h] -= of_sink
            if not sees_keys:
                dq_heads[block.rows] = 0.0
                continue
            dropped = blocks.dropped(block)
            dP = blocks.drop(blocks.product(dO, block.V.mT), dropped)
            dS = dP.sub_(delta).mul_(P)
            P = blocks.drop(P, dropped)
            dV[block.b, block.h, block.j] += (P.mT @ dO).sum(2)  # head by head: one long sum rounds more
            if of_bias is not None:
                part = blocks.of_block(of_bias, block)
                part += (dS if empty is None else dS.masked_fill(empty, 0.0)).sum_to_size(part.shape)
            if tanh is not None:
                dS.mul_(tanh.square_().neg_().add_(1.0))
            if empty is not None:
                dS.masked_fill_(empty, 0.0)  # delta may be anything there
            dq_heads[block.rows] = blocks.sum_over_keys(dS, block.K).mul_(blocks.softmax_scale)
            dK[block.b, block.h, block.j] += (dS.mT @ Q).sum(2)
    return dq, dk.copy_(dK.transpose(1, 2)), dv.copy_(dV.transpose(1, 2)), dsink, dbias.copy_(dS_sums)


def _summing_to_one(P: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """P of rows, with all of their keys, without what the rounding of lse leaves in their sums. A sum that is further
    from 1 is that of a part of the keys that lse is of: it stays."""
    total = P.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink - lse)
    rounding = 2 * torch.finfo(P.dtype).eps * (4 + lse.abs() / math.log(2))
    return P.div_(torch.where((total - 1).abs() <= rounding.clamp(max=2**-10), total, 1.0))


def _outside(keys: Tensor, lengths: Lengths) -> Tensor | None:
    """`[B, N_kv]`, true for keys that are not their sequence's; None where all are."""
    past = None if lengths.used is None else keys >= lengths.used.unsqueeze(-1)
    before = None if lengths.leftpad is None else keys < lengths.leftpad.unsqueeze(-1)
    return before if past is None else past if before is None else past | before


def _block_shape(on_gpu: bool, N_q: int, N_kv: int, G: int, dims: int) -> tuple[int, int]:
    """Query rows of a block, and how many pairs (sequence, KV head) it takes at once."""
    elements = GPU_BLOCK if on_gpu else _CPU_BLOCK
    keys = max(N_kv, 1)
    rows = max(min(elements // (G * keys), _MAX_ROWS), _MIN_ROWS // G, 1)
    rows = min(rows, N_q)
    return rows, max(elements // (keys * max(rows * G, dims)), 1)


def _head_blocks(B: int, H_kv: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Cuts sequences x KV heads into blocks of about `heads`: whole sequences where they fit, else heads of one."""
    sequences, heads = max(heads // H_kv, 1), min(heads, H_kv)
    for b in range(0, B, sequences):
        for h in range(0, H_kv, heads):
            yield slice(b, min(b + sequences, B)), slice(h, min(h + heads, H_kv))


def _visible_keys(start: int | Tensor, i: slice, N_kv: int, left: int, right: int) -> tuple[slice, bool]:
    """The keys that rows `i` may see, and whether some are hidden from some of them. A start on the device is not read:
    then it is all of them."""
    if isinstance(start, Tensor):
        return slice(0, N_kv), left >= 0 or right >= 0
    first = min(max(start + i.start - left, 0), N_kv) if left >= 0 else 0
    last = max(min(start + i.stop + right, N_kv), first) if right >= 0 else N_kv
    hides_right = right >= 0 and start + i.start + right < last - 1
    hides_left = left >= 0 and start + i.stop - 1 - left > first
    return slice(first, last), hides_right or hides_left


_precision_lock = threading.Lock()
_precision_users: dict[str, int] = {}
_precision_before: dict[str, str] = {}


@contextlib.contextmanager
def _float32_products(device_type: str) -> Iterator[None]:
    """Float32 products in float32, where the user allows TF32 or bfloat16 for the rest of the program.

    The setting belongs to the process, so the first thread to enter changes it and the last to leave restores it.
    """
    setting = torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul
    with _precision_lock:
        if _precision_users.setdefault(device_type, 0) == 0:
            _precision_before[device_type] = setting.fp32_precision
            setting.fp32_precision = "ieee"
        _precision_users[device_type] += 1
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users[device_type] -= 1
            if _precision_users[device_type] == 0:
                setting.fp32_precision = _precision_before[device_type]

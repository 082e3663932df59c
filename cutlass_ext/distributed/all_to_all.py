"""All-to-all: ranks exchange rows for heads, each computes some heads of all rows, and they exchange back. Called by
interface.py."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..interface import fmha
from .spread import Spread, cu_seqlens_of

_Order = tuple[Tensor, Tensor] | None  # a permutation of rows, and its inverse


def takes_heads(H_q: int, H_kv: int, ranks: int) -> bool:
    """Whether heads can be cut among ranks: KV heads too, or each to be had by several ranks."""
    return H_q % ranks == 0 and (H_kv % ranks == 0 or (H_kv > 0 and ranks % H_kv == 0))


class _Exchange(torch.autograd.Function):
    """`x` [sum of sent, ...]: rows for rank 0, then for rank 1, and so on; gives those that came from them.

    `before` says which row of x is sent at each place, `after` which of those that came stands at each place of the
    result; None: as they are. Each comes with its inverse, by which the gradients go back: autograd would add them to
    zeros, by atomic operations.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, before: _Order, after: _Order
    ) -> Tensor:
        ctx.arguments = received, sent, group, after and after[::-1], before and before[::-1]
        x = x.contiguous() if before is None else x.index_select(0, before[0])
        out = x.new_empty(sum(received), *x.shape[1:])
        try:
            dist.all_to_all_single(out, x, received, sent, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {group.rank()} of {group.size()}: heads and rows were not exchanged ({error})"
            ) from error
        return out if after is None else out.index_select(0, after[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return _Exchange.apply(grad, *ctx.arguments), None, None, None, None, None


def _order(spread: Spread, device: torch.device) -> _Order:
    """From the shards of all ranks to the whole."""
    order = spread.order(device)
    return None if order is None else (order, spread.rows_of_all(device))


def _rows_for_heads(cut: list[Tensor], group: dist.ProcessGroup, spread: Spread) -> Tensor:
    """Of tensors `[..., rows of this rank, ranks, columns]` the own columns of all rows, `[..., rows, columns]`."""
    rows = spread.rows
    x = torch.cat([x.movedim(-2, 0).movedim(-2, 1) for x in cut], -1)  # ranks, rows, batch, columns: as they are sent
    sent = [rows[group.rank()]] * spread.ranks
    return _Exchange.apply(x.flatten(0, 1), sent, rows, group, None, _order(spread, x.device)).movedim(0, -2)


def _heads_for_rows(x: Tensor, group: dist.ProcessGroup, spread: Spread) -> Tensor:
    """The way back: of `[..., rows, columns]` this rank's rows, `[..., rows of this rank, ranks * columns]`."""
    rank, rows = group.rank(), spread.rows
    order, received = _order(spread, x.device), [rows[rank]] * spread.ranks
    columns = _Exchange.apply(x.movedim(-2, 0), rows, received, group, order and order[::-1], None)
    return columns.unflatten(0, (spread.ranks, rows[rank])).movedim(0, -2).movedim(0, -3).flatten(-2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, spread: Spread, options: dict,
    slopes: Tensor | None, sink: Tensor | None, head_start: int, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`out`, or `out` and `lse`, of this rank's rows."""
    ranks, rank = spread.ranks, group.rank()
    H_q, H_kv, d, d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    heads, kv_heads = H_q // ranks, max(H_kv // ranks, 1)
    if H_kv < ranks:  # a KV head for all ranks that have query heads of it
        of_rank = torch.arange(ranks, device=k.device) * H_kv // ranks
        k, v = (x.index_select(-2, of_rank) for x in (k, v))
    cut = [x.unflatten(-2, (ranks, -1)).flatten(-2) for x in (q, k, v)]
    whole = _rows_for_heads(cut, group, spread)
    q, k, v = (
        x.unflatten(-1, (-1, of_head))
        for x, of_head in zip(whole.split([heads * d, kv_heads * d, kv_heads * d_v], -1), (d, d, d_v), strict=True)
    )
    own = slice(rank * heads, (rank + 1) * heads)
    options = options | {"alibi_slopes": None if slopes is None else slopes[own].contiguous()}
    options |= {"sink": None if sink is None else sink[own].contiguous()}
    if options.get("dropout_p"):
        options["head_start"] = head_start + own.start
    if spread.packed:
        ends = cu_seqlens_of(spread.lengths, q.device)
        longest = max(spread.lengths, default=0)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    out, lse = fmha(q, k, v, return_lse=True, **options)
    out = _heads_for_rows(out.flatten(-2), group, spread).unflatten(-1, (H_q, d_v))
    if not return_lse:
        return out
    return out, _heads_for_rows(lse.mT, group, spread).mT.contiguous()

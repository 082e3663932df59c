"""All-to-all: ranks exchange rows for heads, each computes some heads of all rows, and they exchange back. Called by
interface.py."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..interface import fmha
from .spread import Spread, cu_seqlens_of


def takes_heads(H_q: int, H_kv: int, ranks: int) -> bool:
    """Whether heads can be cut among ranks: key heads too, or each to be had by several ranks."""
    return H_q % ranks == 0 and (H_kv % ranks == 0 or (H_kv > 0 and ranks % H_kv == 0))


class _Exchange(torch.autograd.Function):
    """`x` [sum of sent, columns]: rows for rank 0, then for rank 1, and so on; gives those that came from them."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        try:
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {group.rank()} of {group.size()}: heads and rows were not exchanged ({error})"
            ) from error
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return _Exchange.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _rows_for_heads(x: Tensor, group: dist.ProcessGroup, spread: Spread) -> Tensor:
    """Of columns `[..., rows of this rank, ranks, columns]` the own ones of all rows, `[..., rows, columns]`."""
    rank, rows = group.rank(), spread.rows
    x = x.movedim(-2, 0).movedim(-2, 1)  # ranks, rows, batch, columns
    shards = _Exchange.apply(x.flatten(0, 1), [rows[rank]] * spread.ranks, rows, group)
    order = spread.order(x.device)
    whole = shards if order is None else shards.index_select(0, order)
    return whole.movedim(0, -2)


def _heads_for_rows(x: Tensor, group: dist.ProcessGroup, spread: Spread) -> Tensor:
    """The way back: of `[..., rows, columns]` this rank's rows, `[..., rows of this rank, ranks * columns]`."""
    rank, rows = group.rank(), spread.rows
    x = x.movedim(-2, 0)
    places = spread.rows_of_all(x.device)
    x = x if places is None else x.index_select(0, places)
    columns = _Exchange.apply(x, rows, [rows[rank]] * spread.ranks, group).unflatten(0, (spread.ranks, rows[rank]))
    return columns.movedim(0, -2).movedim(0, -3).flatten(-2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, spread: Spread, options: dict,
    slopes: Tensor | None, sink: Tensor | None, head_start: int, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`out`, or `out` and `lse`, of this rank's rows."""
    ranks, rank = spread.ranks, group.rank()
    H_q, H_kv, d, d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    heads, kv_heads = H_q // ranks, max(H_kv // ranks, 1)
    if H_kv < ranks:  # a key head for all ranks that have query heads of it
        of_rank = torch.arange(ranks, device=k.device) * H_kv // ranks
        k, v = (x.index_select(-2, of_rank) for x in (k, v))
    cut = [x.unflatten(-2, (ranks, -1)).flatten(-2) for x in (q, k, v)]
    whole = _rows_for_heads(torch.cat(cut, -1), group, spread)
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

"""`shard` and `gather`: from whole tensors to those of the ranks, and back. Called by users."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..interface import check_tensors
from .agreement import agreed, all_gather, group_of, untraced
from .spread import Layout, Spread, spread_of


@untraced
def shard(
    x: Tensor,
    *,
    group: object = None,
    layout: Layout = "zigzag",
    dim: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole. Nothing is sent.

    `zigzag` cuts a sequence into twice as many chunks as there are ranks and gives rank r the chunks r and, from the
    end, r: under causal all ranks then have the same work. `contiguous` gives it chunk r of as many as ranks. Of packed
    sequences each is cut by itself, into chunks whose lengths differ by at most one; a shard is then the rank's first
    chunk of every sequence, then its second. Positions, rotary angles, labels and masks of rows are cut the same way:
    `shard(torch.arange(N), dim=0)` says where the rank's rows stand.

    Args:
        x: any dtype and device; differentiable.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        layout: as above.
        dim: which dimension has the rows; by default 1, or 0 with `cu_seqlens`.
        cu_seqlens: of the whole, where sequences are packed: ints, or a CPU tensor `[B + 1]`, beginning with 0.

    Returns:
        a contiguous copy.

    Raises:
        TypeError: x is no tensor, or group none of these.
        ValueError: rows that the layout does not cut evenly (padded ones: a multiple of the chunks of all ranks), or
            that are not those of `cu_seqlens`; a `cu_seqlens` that is on a GPU, has no integers `[B + 1]`, does not
            begin with 0 or decreases; a `dim` that x does not have; another layout.
        RuntimeError: `torch.distributed` is not initialised.

    Source: Striped Attention (arXiv:2311.09431), for work that is the same on all ranks; Ring Attention
    (arXiv:2310.01889), for contiguous shards.
    """
    group, dim = group_of(group), _dim(dim, cu_seqlens)
    _check_dim(x, dim)
    spread = spread_of(x.shape[dim], cu_seqlens, group.size(), layout, "x")
    _check_rows("x", x.shape[dim], sum(spread.lengths))
    return x.index_select(dim, spread.rows_of(group.rank(), x.device))


@untraced
def gather(
    x: Tensor,
    *,
    group: object = None,
    layout: Layout = "zigzag",
    dim: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole of what the ranks have shards of, on every rank: `gather(shard(x)) == x`.

    Args:
        x, group, layout, dim, cu_seqlens: as in `shard`, x a shard.

    Returns:
        the whole. It is differentiable: the gradients that the ranks have of it are summed.

    Raises:
        TypeError, ValueError: as `shard`, on every rank, with the number of the one whose arguments do not fit; also
            where the layout, the lengths of sequences, x's dtype or its other dimensions differ among ranks.
        RuntimeError: `torch.distributed` is not initialised; or a rank that is gone, when the group notices.
    """
    group, dim = group_of(group), _dim(dim, cu_seqlens)

    def prepare() -> tuple[Spread, dict[str, object]]:
        _check_dim(x, dim)
        spread = spread_of(x.shape[dim] * group.size(), cu_seqlens, group.size(), layout, "x")
        _check_rows("x", x.shape[dim], spread.rows[group.rank()])
        others = [n for i, n in enumerate(x.shape) if i != dim % x.dim()]
        return spread, {"x": f"{x.dtype}, {others} but for rows", "layout": layout, "spread of rows": spread.lengths}

    return _Gather.apply(x, agreed(group, prepare), group, dim)


def _dim(dim: int | None, cu_seqlens: object) -> int:
    return dim if dim is not None else 1 if cu_seqlens is None else 0


def _check_dim(x: Tensor, dim: int) -> None:
    check_tensors(x=x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: is {dim}, and x has shape {list(x.shape)}; expected the dimension that has its rows")


def _check_rows(name: str, rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(f"{name}: has {rows} rows; expected {expected}")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, spread: Spread, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.spread, ctx.group, ctx.dim = spread, group, dim
        x = x.movedim(dim, 0)
        most = max(spread.rows)
        mine = x.new_zeros(most, *x.shape[1:])
        mine[: len(x)] = x
        shards = x.new_empty(spread.ranks * most, *x.shape[1:])  # to a common size, as collectives have it
        all_gather(shards, mine, group=group)
        parts = [shards[rank * most :][:rows] for rank, rows in enumerate(spread.rows)]
        whole, order = torch.cat(parts), spread.order(x.device)
        return (whole if order is None else whole[order]).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(ctx.dim, ctx.spread.rows_of(ctx.group.rank(), grad.device)), None, None, None

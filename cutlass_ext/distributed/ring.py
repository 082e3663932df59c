"""The ring: rows stay, K and V go round, results of parts of the keys are merged by `lse`. Called by interface.py."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backward import fmha_backward
from ..interface import fmha
from ..torch_padded import dtype_of_scores
from .spread import Pair, Spread
from .transfer import Transfer, connect


class Call(NamedTuple):
    """Attention of some parts of a rank's rows to some parts of the keys of one rank."""

    rows: slice
    keys: slice
    options: dict
    has_sink: bool


class Routes:
    """Which parts of whose keys a rank needs, and which of its own others do.

    In step s a rank computes with the keys of the rank s before it, which has sent them. Each rank sends its own, and
    none forwards another's: a chunk that no row of a rank sees (causal, windows) is not sent there. A rank that has
    nothing to do in a step takes it all the same, so that all ranks order their messages alike: NCCL carries them out
    one after the other.
    """

    def __init__(self, spread: Spread, rank: int, sides: tuple[int, int]):
        ranks = spread.ranks
        self.pairs = {source: spread.pairs(rank, source, *sides) for source in range(ranks)}
        self.received = {source: _parts_of(pairs) for source, pairs in self.pairs.items()}
        self.pairs_of_others = {to: spread.pairs(to, rank, *sides) for to in range(ranks)}
        self.sent = {to: _parts_of(pairs) for to, pairs in self.pairs_of_others.items()}


def _parts_of(pairs: list[Pair]) -> range:
    """The parts of keys in pairs: a range, as they are sent in one message."""
    keys = [j for _, j in pairs]
    return range(min(keys), max(keys) + 1) if keys else range(0)


routes_of = functools.lru_cache(maxsize=64)(Routes)  # the layers of a model have the same


class Ring:
    """A rank's place in a ring, and the calls that it makes there."""

    def __init__(self, group: dist.ProcessGroup, spread: Spread, sides: tuple[int, int], options: dict):
        self.group, self.spread, self.options = group, spread, options
        self.rank, self.ranks = group.rank(), group.size()
        self.routes = routes_of(spread, self.rank, sides)
        self.drops = "dropout_p" in options  # by positions themselves; all else goes by distances
        # Where positions matter by their order alone, parts that lie side by side need no calls of their own.
        by_distance = options["alibi_slopes"] is not None or tuple(options["window"]) != (-1, -1)
        self.by_order = not (spread.packed or by_distance or self.drops)

    def calls(self, source: int, device: torch.device) -> Iterator[Call]:
        pairs, every = self.routes.pairs[source], slice(0, self.spread.parts)
        if self.by_order and source == self.rank:
            if pairs:
                yield Call(every, every, self.options | {"start_pos": 0}, True)
            return
        if self.by_order:  # a part of another rank is before or after all of a part of this one
            for j in dict.fromkeys(j for _, j in pairs):
                rows = [i for i, of in pairs if of == j]
                options = self.options | {"causal": False, "start_pos": 0}
                yield Call(slice(min(rows), max(rows) + 1), slice(j, j + 1), options, False)
            return
        for i, j in pairs:
            chunks = self.spread.chunk(self.rank, i), self.spread.chunk(source, j)
            options = self.options | self.spread.options(*chunks, device, self.drops)
            yield Call(slice(i, i + 1), slice(j, j + 1), options, source == self.rank and i == j)

    def rows(self, x: Tensor, rank: int, parts: slice) -> Tensor:
        """Of a tensor of rows `[..., rows, heads, head_dim]`: those of some parts."""
        rows = self.spread.slice_of(rank, parts)
        return x.narrow(-3, rows.start, rows.stop - rows.start)

    def rows_of_lse(self, x: Tensor, parts: slice) -> Tensor:
        """The same of a tensor `[..., heads, rows]` of this rank."""
        return x[..., self.spread.slice_of(self.rank, parts)]


class Message:
    """Keys and values of a rank's rows, part after part in one buffer.

    A range of parts is one message, and k and v of a part are contiguous.
    """

    def __init__(self, ring: Ring, rank: int, k: Tensor, v: Tensor, dtype: torch.dtype, *, zeros: bool = False):
        """For the rows of `rank`, with heads and head dims like those of k and v."""
        self.ends, self.shapes = [0], []
        for part in range(ring.spread.parts):
            rows = ring.spread.rows_of_part(rank, part)
            shapes = [torch.Size([*x.shape[:-3], rows, *x.shape[-2:]]) for x in (k, v)]
            self.shapes.append(shapes)
            self.ends.append(self.ends[-1] + sum(shape.numel() for shape in shapes))
        self.buffer = (k.new_zeros if zeros else k.new_empty)(self.ends[-1], dtype=dtype)

    def of(self, part: int) -> tuple[Tensor, Tensor]:
        """k and v of a part, views of the buffer."""
        flat = self.buffer[self.ends[part] : self.ends[part + 1]]
        k_shape, v_shape = self.shapes[part]
        return flat[: k_shape.numel()].view(k_shape), flat[k_shape.numel() :].view(v_shape)

    def parts(self, parts: range) -> Tensor | None:
        """What is sent of a range of parts."""
        return self.buffer[self.ends[parts[0]] : self.ends[parts[-1] + 1]] if parts else None


def _transfer(ring: Ring, to: int, sent: Tensor | None, source: int, received: Tensor | None, what: str) -> Transfer:
    """The messages of one step."""
    failure = f"rank {ring.rank} of {ring.ranks}: {what} did not come from rank {source}, or go to rank {to}"
    operations = [
        (operation, buffer, peer)
        for operation, buffer, peer in ((dist.irecv, received, source), (dist.isend, sent, to))
        if buffer is not None
    ]
    return Transfer(ring.group, operations, failure)


def _keys(ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[int, Message | None]]:
    """Each rank with its keys: this one first, which has k and v, and no message; nor has one whose keys nobody needs.

    While the caller computes with one message the next one comes; no more than two are there at once.
    """
    ranks, rank, own = ring.ranks, ring.rank, None
    if ranks > 1:
        own = Message(ring, rank, k, v, k.dtype)
        for part in range(ring.spread.parts):
            for to, x in zip(own.of(part), (k, v), strict=True):
                to.copy_(ring.rows(x, rank, slice(part, part + 1)))

    def start(step: int) -> tuple[int, Message | None, Transfer]:
        to, source = (rank + step) % ranks, (rank - step) % ranks
        needed = ring.routes.received[source]
        message = Message(ring, source, k, v, k.dtype) if needed else None
        sent, received = own.parts(ring.routes.sent[to]), message and message.parts(needed)
        return source, message, _transfer(ring, to, sent, source, received, f"k and v of step {step}")

    steps = iter(range(1, ranks))
    coming = [start(step) for step in itertools.islice(steps, 1)]
    yield rank, None
    while coming:
        source, message, transfer = coming.pop()
        transfer.wait()
        coming = [start(step) for step in itertools.islice(steps, 1)]
        yield source, message


def _keys_of(ring: Ring, call: Call, message: Message | None, k: Tensor, v: Tensor) -> list[Tensor]:
    if message is None:
        return [ring.rows(x, ring.rank, call.keys) for x in (k, v)]
    return list(message.of(call.keys.start))  # calls of another rank's keys are of one part


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`merge_attention` of two, in place: it goes over out once, 12 bytes an element where the general one takes 60
    (counted, not measured), which beside short steps counts."""
    weight = torch.sigmoid(part_lse - lse)  # exp(part_lse) of the sum of both
    weight.masked_fill_(part_lse == -torch.inf, 0.0)  # rows without keys in either
    out.lerp_(part_out, weight.transpose(-1, -2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _empty(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and lse."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    return out, q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
        dtype, touched, every = dtype_of_scores(q), set(), set(range(ring.spread.parts))
        out = lse = None
        out_dtype = None if dtype == q.dtype else dtype  # parts are not rounded before they are merged
        for source, message in _keys(ring, k, v):
            for call in ring.calls(source, q.device):
                part_out, part_lse = fmha(
                    ring.rows(q, ring.rank, call.rows), *_keys_of(ring, call, message, k, v),
                    sink=sink if call.has_sink else None, return_lse=True, out_dtype=out_dtype, **call.options,
                )  # fmt: skip
                if out is None and part_out.shape[-3] == q.shape[-3]:  # this rank's own keys, and all of its rows
                    out, lse, touched = part_out, part_lse, every
                    continue
                if out is None:
                    out, lse = _empty(q, v, dtype)
                rows_out, rows_lse = ring.rows(out, ring.rank, call.rows), ring.rows_of_lse(lse, call.rows)
                parts = set(range(call.rows.start, call.rows.stop))
                if parts & touched:
                    _merge(rows_out, rows_lse, part_out, part_lse)
                else:
                    rows_out.copy_(part_out)
                    rows_lse.copy_(part_lse)
                touched = touched | parts
        if out is None:
            out, lse = _empty(q, v, dtype)
        for part in every - touched:  # without keys
            ring.rows(out, ring.rank, slice(part, part + 1)).zero_()
            ring.rows_of_lse(lse, slice(part, part + 1)).fill_(-torch.inf)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        ring, (q, k, v, sink, out, lse) = ctx.ring, ctx.saved_tensors
        rank, ranks, dtype = ring.rank, ring.ranks, lse.dtype
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        dq, dsink = torch.zeros_like(q, dtype=dtype), None if sink is None else torch.zeros_like(sink)
        own = Message(ring, rank, k, v, dtype, zeros=True)
        coming = None  # a share of dk and dv of this rank's keys
        for source, message in _keys(ring, k, v):
            share = own
            if source != rank:
                share = message and Message(ring, source, k, v, dtype, zeros=True)
            for call in ring.calls(source, q.device):
                dq_part, dk, dv, *of_sink = fmha_backward(
                    ring.rows(dout, rank, call.rows), ring.rows(q, rank, call.rows),
                    *_keys_of(ring, call, message, k, v), ring.rows(out, rank, call.rows),
                    ring.rows_of_lse(lse, call.rows).contiguous(),
                    dlse=None if dlse is None else ring.rows_of_lse(dlse, call.rows).contiguous(),
                    sink=sink if call.has_sink else None, **call.options,
                )  # fmt: skip
                ring.rows(dq, rank, call.rows).add_(dq_part)
                begin = 0
                for part in range(call.keys.start, call.keys.stop):
                    for to, x in zip(share.of(part), (dk, dv), strict=True):
                        to.add_(x.narrow(-3, begin, to.shape[-3]))
                    begin += share.of(part)[0].shape[-3]
                if of_sink:
                    dsink.add_(of_sink[0])
            coming = _add(coming)
            if source != rank:  # whose keys they are adds them, while this rank computes on
                to = (2 * rank - source) % ranks  # which has computed with this rank's keys in this step
                sent = share and share.parts(ring.routes.received[source])
                theirs = ring.routes.sent[to]
                mine = Message(ring, rank, k, v, dtype).parts(theirs) if theirs else None
                coming = mine, own.parts(theirs), share, _transfer(ring, source, sent, to, mine, "dk and dv")
        _add(coming)
        gradients = zip(*(own.of(part) for part in range(ring.spread.parts)), strict=True)
        dk, dv = (torch.cat(parts, -3).to(k.dtype) for parts in gradients)
        return dq.to(q.dtype), dk, dv, dsink, None


def _add(coming: tuple[Tensor | None, Tensor | None, Message | None, Transfer] | None) -> None:
    """Adds a share that has come to the own gradients, and lets what was sent in the same step go."""
    if coming is not None:
        share, own, _, transfer = coming
        transfer.wait()
        if share is not None:
            own.add_(share)


def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of this rank's rows."""
    connect(ring.group, q.device)
    return _Attention.apply(q, k, v, sink, ring)

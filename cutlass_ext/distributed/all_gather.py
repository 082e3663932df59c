"""All-gather: every rank gets the keys that its rows see, all of them, and then computes as one GPU would. Called by
interface.py."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backward import fmha_backward
from ..interface import fmha
from ..torch_padded import dtype_of_scores
from .agreement import Agreement
from .model import KEPT_BYTES
from .ring import routes_of
from .spread import Spread
from .transfer import Transfer, connect

# K and V of all ranks come in one piece below so many bytes: a message costs as much as 5 MB of it do. (What is kept
# for the backward pass, up to KEPT_BYTES, it need not gather again: at 16,384 rows of 8 heads of 128, 64 MB, that would
# be a thirtieth of its time.)
PIECES_BYTES = 1 << 23


class Places:
    """Where a rank's rows lie, and where the keys that they see."""

    def __init__(self, spread: Spread, rank: int, sides: tuple[int, int]):
        self.spread, self.rank = spread, rank
        self.routes = routes_of(spread, rank, sides)
        self.own = [spread.chunk(rank, part) for part in range(spread.parts)]
        self.rows = [spread.slice_of(rank, slice(part, part + 1)) for part in range(spread.parts)]
        # Later rows see more keys under causal: what is left to do at the end is then short.
        self.parts = [part for part in reversed(range(spread.parts)) if spread.rows_of_part(rank, part)]
        seen = [[-1] for _ in range(spread.parts)]
        for source, pairs in self.routes.pairs.items():
            for i, j in pairs:
                seen[i].append(spread.chunk(source, j))
        self.chunks = spread.chunks if spread.packed else max(itertools.chain(self.own, *seen)) + 1
        # Rows of keys, chunk after chunk, and up to where a part of the rows sees any: all, where each sequence ends.
        self.of_chunk = [slice(*ends) for ends in itertools.pairwise(spread.places)]
        self.end_of_keys = [spread.places[-1 if spread.packed else max(chunks) + 1] for chunks in seen]
        received, sent = (
            {peer: [spread.chunk(rank if own else peer, j) for j in parts] for peer, parts in of.items()}
            for own, of in ((False, self.routes.received), (True, self.routes.sent))
        )
        self.missing = sorted(set(range(self.chunks)) - {*self.own, *itertools.chain(*received.values())})
        # Of what goes between ranks, and of what is there: chunks that lie side by side are one.
        self.received, self.sent = ({p: self.rows_of(run) for p, run in of.items()} for of in (received, sent))
        self.rows_of_own = self.rows_of(self.own)

    def rows_of(self, chunks: list[int]) -> list[slice]:
        """Rows of keys of some chunks, in order, as few slices as hold them."""
        found: list[slice] = []
        for rows in (self.of_chunk[chunk] for chunk in chunks):
            if found and found[-1].stop == rows.start:
                rows = slice(found.pop().start, rows.stop)
            found.append(rows)
        return found


places_of = functools.lru_cache(maxsize=64)(Places)  # the layers of a model have the same


class Gathering:
    """A call on a rank, and the calls that it is made of: for each part of its rows, and each piece of the heads."""

    def __init__(
        self, group: dist.ProcessGroup, spread: Spread, sides: tuple[int, int], options: dict,
        slopes: Tensor | None, head_start: int, agreement: Agreement | None = None,
    ):  # fmt: skip
        self.group, self.spread, self.options, self.agreement = group, spread, options, agreement
        self.slopes, self.head_start = slopes, head_start
        self.rank, self.ranks = group.rank(), group.size()
        self.places = places_of(spread, self.rank, sides)
        self.routes, self.own = self.places.routes, self.places.own

    def pieces(self, k: Tensor, v: Tensor) -> list[slice]:
        """Of the KV heads: the first is small, and what comes after it comes while it is computed."""
        heads = k.shape[-2]
        first = max(heads // 8, 1)
        if self.ranks == 1 or heads == 1 or self.bytes_of_whole(k, v) < PIECES_BYTES:
            return [slice(0, heads)]
        return [slice(0, first), slice(first, heads)]

    def bytes_of_whole(self, k: Tensor, v: Tensor) -> int:
        rows = math.prod(k.shape[:-3]) * self.spread.places[-1]
        return rows * k.shape[-2] * (k.shape[-1] + v.shape[-1]) * k.element_size()

    def rows(self, x: Tensor, part: int) -> Tensor:
        """Of a tensor of this rank's rows `[..., rows, heads, head_dim]`: those of a part."""
        rows = self.places.rows[part]
        return x.narrow(-3, rows.start, rows.stop - rows.start)

    def rows_of_lse(self, x: Tensor, part: int) -> Tensor:
        """The same of a tensor `[..., heads, rows]`."""
        rows = self.places.rows[part]
        return x.narrow(-1, rows.start, rows.stop - rows.start)

    def part_of(self, x: Tensor, part: int, heads: slice) -> Tensor:
        """Of a tensor of this rank's rows and query heads, what a call computes with or gives."""
        return _of_heads(self.rows(x, part), heads)

    def part_of_lse(self, x: Tensor, part: int, heads: slice) -> Tensor:
        """The same of a tensor `[..., heads, rows]`."""
        return _of_heads(self.rows_of_lse(x, part), heads)

    def keys_of(self, part: int, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K and V for a part. Of one sequence none past the last chunk that it sees."""
        end = self.places.end_of_keys[part]
        return kv if end == kv[0].shape[-3] else tuple(x.narrow(-3, 0, end) for x in kv)

    def options_of(self, part: int, heads: slice, sink: Tensor | None, device: torch.device) -> dict:
        options = self.options | self.spread.options_of_whole(self.own[part], device)
        options |= {"alibi_slopes": None if self.slopes is None else self.slopes[heads].contiguous()}
        options |= {"sink": None if sink is None else sink[heads].contiguous()}
        if options.get("dropout_p"):
            options["head_start"] = self.head_start + heads.start
        return options

    def chunk_of(self, x: Tensor, chunk: int) -> Tensor:
        """Of a gradient of the keys that `keys_of` gave: what one chunk has of it."""
        if len(self.spread.lengths) > 1:
            return x.index_select(-3, self.spread.rows_of_chunk(chunk, x.device))
        rows = self.places.of_chunk[chunk]
        return x.narrow(-3, rows.start, rows.stop - rows.start)

    def connect(self, device: torch.device) -> None:
        """Before the first message: what is done here before runs beside the check of arguments."""
        if self.agreement is not None:
            self.agreement.wait()
            self.agreement = None
        connect(self.group, device)

    def transfer(self, operations: list, what: str, after: Iterable = ()) -> Transfer:
        failure = f"rank {self.rank} of {self.ranks}: {what} did not come from the other ranks, or go to them"
        return Transfer(self.group, operations, failure, tuple(after))


class Launches:
    """Calls on streams of their own, all after what was computed before `begin` and, unless they are told to be, none
    after another: where one ends, and leaves multiprocessors idle, the next is there already. On a CPU one after the
    other."""

    def __init__(self, device: torch.device):
        self.device, self.streams, self.begun = device, [], None

    def begin(self) -> None:
        """What comes next needs what has been computed so far."""
        if self.device.type == "cuda":
            self.begun = torch.cuda.current_stream(self.device).record_event()

    @contextlib.contextmanager
    def next(self, after: Iterable = ()) -> Iterator[None]:
        """A call, after what some streams have been given so far."""
        if self.device.type != "cuda":
            yield
            return
        stream = _stream_of(self.device, len(self.streams))
        self.streams.append(stream)
        stream.wait_event(self.begun)
        for other in after:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield

    def join(self, first: int = 0, end: int | None = None) -> None:
        """What is computed next comes after them, or after some of them."""
        for stream in self.streams[first:end]:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def release(self) -> None:
        """What they allocated has been read: their streams may use its memory again after that."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))


@functools.lru_cache(maxsize=64)
def _stream_of(device: torch.device, index: int) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


def _gathered(place: Gathering, k: Tensor, v: Tensor, pieces: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the KV heads, and K and V of all ranks there, `[..., rows, heads, d + d_v]`.

    Rows lie chunk after chunk, so that each chunk is one message straight to its place, and chunks are in the order of
    the sequence if there is one. Chunks that no row here sees do not come, and are zeros.
    """
    spread, places, transfers = place.spread, place.places, []
    for heads in pieces:
        shape = spread.places[places.chunks], *k.shape[:-3], heads.stop - heads.start, k.shape[-1] + v.shape[-1]
        kv = k.new_empty(shape)
        own, begin = [_of_heads(x, heads).movedim(-3, 0) for x in (k, v)], 0
        for rows in places.rows_of_own:
            n = rows.stop - rows.start
            *parts, whole = _wide(*(x.narrow(0, begin, n) for x in own), kv[rows])
            torch.cat(parts, -1, out=whole)
            begin += n
        for chunk in places.missing:
            kv[places.of_chunk[chunk]].zero_()
        operations = []
        for peer in (peer for peer in range(place.ranks) if peer != place.rank):
            operations += [(dist.irecv, kv[rows], peer) for rows in places.received[peer]]
            operations += [(dist.isend, kv[rows], peer) for rows in places.sent[peer]]
        place.connect(k.device)
        transfers.append((heads, kv, place.transfer(operations, "k and v")))
    order = spread.order_of_chunks(k.device)
    for heads, kv, transfer in transfers:
        transfer.wait()
        kv = kv if order is None else kv.index_select(0, order)
        yield heads, kv.movedim(0, -3)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, place: Gathering, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        d, gathered, launches, lse = k.shape[-1], [], Launches(q.device), None
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        if with_lse:
            lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=dtype_of_scores(q))
        for heads, kv in _gathered(place, k, v, place.pieces(k, v)):
            gathered.append((heads, kv))
            of_q = _query_heads(heads, q, k.shape[-2])
            piece_q, piece_out = (_of_heads(x, of_q) for x in (q, out))
            keys = kv.split((d, v.shape[-1]), -1)
            launches.begin()
            for part in place.places.parts:
                with launches.next():
                    results = fmha(
                        place.rows(piece_q, part), *place.keys_of(part, keys), out=place.rows(piece_out, part),
                        return_lse=with_lse, **place.options_of(part, of_q, sink, q.device),
                    )  # fmt: skip
                    if with_lse:
                        place.part_of_lse(lse, part, of_q).copy_(results[1])
        launches.join()
        ctx.place, ctx.d = place, d
        ctx.kept = [heads for heads, _ in gathered] if place.bytes_of_whole(k, v) <= KEPT_BYTES else None
        saved = (k, v) if ctx.kept is None else [kv for _, kv in gathered]
        ctx.save_for_backward(q, sink, out, lse, *saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        place, (q, sink, out, lse, *saved) = ctx.place, ctx.saved_tensors
        spread, rank = place.spread, place.rank
        if ctx.kept is None:
            ((_, kv),) = _gathered(place, *saved, [slice(0, saved[0].shape[-2])])
            gathered = [(heads, _of_heads(kv, heads)) for heads in place.pieces(*saved)]
        else:
            gathered = list(zip(ctx.kept, saved, strict=True))
        H_kv = gathered[-1][0].stop
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        launches, pieces, before = Launches(q.device), [], []
        launches.begin()
        for heads, kv in reversed(gathered):  # the small piece last: nothing is computed beside its messages
            of_q, first = _query_heads(heads, q, H_kv), len(launches.streams)
            keys = kv.split((ctx.d, out.shape[-1]), -1)
            operations, results, shares = [], [], [_Shares(place, part, keys) for part in range(spread.parts)]
            for part in reversed(range(spread.parts)):  # all ranks name their messages in one order
                for source, pairs in place.routes.pairs_of_others.items():
                    for j in (j for i, j in pairs if i == part and source != rank):
                        operations += [(dist.irecv, x, source) for x in shares[j].next()]
                if part not in place.places.parts:
                    continue
                # Were all calls there at once, some of the small piece would run first, and the messages of the others
                # begin when nothing is left to compute. The earliest rows alone begin where the first call ends.
                with launches.next(before if part else before[:1]):
                    part_dq, dk, dv, *part_dsink = fmha_backward(
                        place.part_of(dout, part, of_q), place.part_of(q, part, of_q), *place.keys_of(part, keys),
                        place.part_of(out, part, of_q), place.part_of_lse(lse, part, of_q).contiguous(),
                        dlse=None if dlse is None else place.part_of_lse(dlse, part, of_q).contiguous(),
                        **place.options_of(part, of_q, sink, q.device),
                    )  # fmt: skip
                    for to, pairs in place.routes.pairs.items():
                        for j in (j for i, j in pairs if i == part):
                            share = [place.chunk_of(x, spread.chunk(to, j)) for x in (dk, dv)]
                            if to == rank:
                                shares[j].keep(share)
                            else:
                                operations += [(dist.isend, x.contiguous(), to) for x in share]
                results.append((part, part_dq, part_dsink))
            end, before = len(launches.streams), launches.streams[first:]
            transfer = place.transfer(operations, "dk and dv", before)
            pieces.append((heads, of_q, (first, end), results, shares, transfer))
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (q.new_empty(*q.shape[:-2], H_kv, n) for n in (ctx.d, out.shape[-1]))
        dsink = None if sink is None else torch.zeros_like(sink)
        for heads, of_q, some, results, shares, transfer in pieces:  # the first beside what the others compute
            launches.join(*some)
            for part, part_dq, part_dsink in results:  # beside the messages, as the next
                _copy(part_dq, place.part_of(dq, part, of_q))
                if dsink is not None:
                    dsink[of_q] += part_dsink[0]
            for of_part in shares:
                of_part.copy_own()
            transfer.wait()
            for j, of_part in enumerate(shares):
                of_part.sum_up([place.part_of(x, j, heads) for x in (dk, dv)])
        launches.release()
        return dq, dk, dv, dsink, None, None


class _Shares:
    """Of dk and dv of a part of the rows here: what the rows of all ranks give, one beside the other, so that one pass
    adds them up in float32 and rounds once. A share that has no other is where it was computed."""

    def __init__(self, place: Gathering, part: int, keys: tuple[Tensor, Tensor]):
        sources = [to for to, pairs in place.routes.pairs_of_others.items() for _, j in pairs if j == part]
        self.alone = sources == [place.rank]
        n, rows = 0 if self.alone else len(sources), place.spread.rows_of_part(place.rank, part)
        self.all = [x.new_empty(n, *x.shape[:-3], rows, *x.shape[-2:]) for x in keys]
        self.places = zip(*self.all, strict=True)
        self.own: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []

    def next(self) -> tuple[Tensor, ...]:
        """Where the dk and dv of a share come."""
        return next(self.places)

    def keep(self, share: list[Tensor]) -> None:
        """The dk and dv of a share computed here."""
        self.own.append((share, () if self.alone else self.next()))

    def copy_own(self) -> None:
        for share, places in () if self.alone else self.own:
            for x, to in zip(share, places, strict=True):
                _copy(x, to)

    def sum_up(self, out: list[Tensor]) -> None:
        if self.alone:
            for x, to in zip(self.own[0][0], out, strict=True):
                _copy(x, to)
        else:
            for x, to in zip(self.all, out, strict=True):
                torch.sum(x, 0, out=to)


def _query_heads(heads: slice, q: Tensor, H_kv: int) -> slice:
    """Those that read some KV heads."""
    of_one = q.shape[-2] // H_kv
    return slice(heads.start * of_one, heads.stop * of_one)


def _of_heads(x: Tensor, heads: slice) -> Tensor:
    """Some of the heads in the dimension before the last."""
    n = heads.stop - heads.start
    return x if n == x.shape[-2] else x.narrow(-2, heads.start, n)


def _copy(x: Tensor, to: Tensor) -> None:
    x, to = _wide(x, to)
    to.copy_(x)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory in elements of 16 bytes, where all have such: PyTorch copies strided tensors one element after
    the other, and those of two bytes at a third of the memory's rate."""
    for x in tensors:
        steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(n * x.element_size() % 16 for n in steps):
            return tensors
    return tuple(x.view(torch.complex128) for x in tensors)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, place: Gathering, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`out` and `lse` of this rank's rows; without gradients or somebody who asks for it there is no lse."""
    return _Attention.apply(q, k, v, sink, place, with_lse)

"""Which rows of which sequences each rank has, and which keys a rank's rows need. Pure arithmetic of the host, the same
on every rank; called by all modules of this package."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["zigzag", "contiguous"]
Pair = tuple[int, int]  # a part of the rows, a part of the keys


@dataclass(frozen=True)
class Spread:
    """Sequences of `lengths` rows over `ranks` ranks.

    Each sequence is cut into chunks of equal length (but for rounding). `contiguous`: rank r has chunk r of ranks.
    `zigzag`: of twice as many chunks, r and the one as far from the end; under causal all ranks then have equal work.
    A rank's shard is its parts one after the other, and a part is its chunk of every sequence, packed. Padded batches
    are one sequence here: all that counts is their length.
    """

    lengths: tuple[int, ...]
    ranks: int
    layout: Layout
    packed: bool

    @property
    def parts(self) -> int:
        """Of a rank's shard."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return self.ranks * self.parts

    def chunk(self, rank: int, part: int) -> int:
        """Which chunk of each sequence a part is."""
        return rank if part == 0 else self.chunks - 1 - rank

    @functools.cached_property
    def _edges(self) -> list[list[tuple[int, int]]]:
        chunks = self.chunks
        return [[(n * i // chunks, n * (i + 1) // chunks) for n in self.lengths] for i in range(chunks)]

    def edges(self, chunk: int) -> list[tuple[int, int]]:
        """First row and end of a chunk in each sequence."""
        return self._edges[chunk]

    @functools.cached_property
    def _chunk_rows(self) -> list[int]:
        return [sum(end - begin for begin, end in edges) for edges in self._edges]

    def rows_of_part(self, rank: int, part: int) -> int:
        return self._chunk_rows[self.chunk(rank, part)]

    @functools.cached_property
    def rows(self) -> list[int]:
        """Of each rank's shard."""
        return [sum(self.rows_of_part(rank, part) for part in range(self.parts)) for rank in range(self.ranks)]

    @functools.cached_property
    def places(self) -> list[int]:
        """Where chunks begin that lie one after the other, each the rows of all sequences; and where the last ends.
        Of one sequence that is its own order."""
        return list(itertools.accumulate(self._chunk_rows, initial=0))

    def slice_of(self, rank: int, parts: slice) -> slice:
        """Where some parts lie in a rank's shard."""
        sizes = [self.rows_of_part(rank, part) for part in range(self.parts)]
        return slice(sum(sizes[: parts.start]), sum(sizes[: parts.stop]))

    def pairs(self, rank: int, source: int, left: int, right: int) -> list[Pair]:
        """Which parts of the rows of `rank` see a key of which parts of `source`; a bound below 0 hides nothing."""
        found = []
        for i, j in itertools.product(range(self.parts), repeat=2):
            rows, keys = self.edges(self.chunk(rank, i)), self.edges(self.chunk(source, j))
            for (row, row_end), (key, key_end) in zip(rows, keys, strict=True):
                before = left < 0 or key_end - 1 >= row - left
                after = right < 0 or key <= row_end - 1 + right
                if row < row_end and key < key_end and before and after:
                    found.append((i, j))
                    break
        return found

    def options(self, rows: int, keys: int, device: torch.device, by_position: bool = False) -> dict:
        """What `cutlass_ext.fmha` is told of the rows of one chunk and the keys of another: `start_pos` is the distance
        of their first positions, or these are told `by_position`, and packed sequences have their ends."""
        if self.packed:
            return _packed_options(self, rows, keys, device, by_position)
        row, key = (self.edges(chunk)[0][0] for chunk in (rows, keys))
        return {"start_pos": row, "key_start": key} if by_position else {"start_pos": row - key}

    def options_of_whole(self, rows: int, device: torch.device) -> dict:
        """The same of the rows of one chunk and all keys, in the order of the sequences."""
        if not self.packed:
            return {"start_pos": self.edges(rows)[0][0]}
        return _packed_options(self, rows, None, device)

    def order(self, device: torch.device) -> Tensor | None:
        """int64 `[rows of the whole]`: where each stands in the shards of all ranks, one after the other. None where
        that is in order."""
        return _orders(self, device)[1]

    def rows_of_all(self, device: torch.device) -> Tensor | None:
        """The inverse: which row of the whole stands at each place of the shards."""
        return _orders(self, device)[0]

    def order_of_chunks(self, device: torch.device) -> Tensor | None:
        """int64 `[rows of the whole]`: where each stands in the chunks, one after the other as `places` has them. None
        where that is in order."""
        return None if len(self.lengths) < 2 else _order_of_chunks(self, device)

    def rows_of_chunk(self, chunk: int, device: torch.device) -> Tensor:
        """int64: which rows of the whole a chunk has."""
        return _rows_of_chunk(self, chunk, device)

    def rows_of(self, rank: int, device: torch.device) -> Tensor:
        """int64: which rows of the whole a rank has, as they stand in its shard."""
        return _rows_of(self, rank, device)


_spread = functools.lru_cache(maxsize=64)(Spread)  # which keeps what it has worked out


def spread_of(rows: int, cu_seqlens: Tensor | Sequence[int] | None, ranks: int, layout: str, name: str) -> Spread:
    """Of `rows` rows of the whole, padded or as `cu_seqlens` packs them; `name` is the argument that has them."""
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f'layout: is {layout!r}; expected "zigzag" or "contiguous"')
    if cu_seqlens is not None:
        return _spread(_lengths("cu_seqlens", cu_seqlens), ranks, layout, True)
    spread = _spread((rows,), ranks, layout, False)
    if rows % spread.chunks:
        raise ValueError(
            f"{name}: the whole has {rows} rows; expected a multiple of {spread.chunks}, the chunks of {ranks} ranks "
            f'with layout="{layout}" (packed sequences, with cu_seqlens, may have any lengths)'
        )
    return spread


def _lengths(name: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.is_cuda:
            raise ValueError(
                f"{name}: is on {cu_seqlens.device}; expected a CPU tensor or ints, as the host cuts the sequences up "
                "by it, and reading a GPU's would make it wait"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(f"{name}: is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; expected integers [B + 1]")
        cu_seqlens = cu_seqlens.tolist()
    ends = [int(end) for end in cu_seqlens]
    lengths = tuple(end - begin for begin, end in itertools.pairwise(ends))
    if not ends or ends[0] != 0 or any(n < 0 for n in lengths):
        raise ValueError(f"{name}: is {ends}; expected rows that begin with 0 and never decrease")
    return lengths


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)
def _packed_options(
    spread: Spread, rows: int, keys: int | None, device: torch.device, by_position: bool = False
) -> dict:
    of_rows, of_keys = spread.edges(rows), [(0, n) for n in spread.lengths] if keys is None else spread.edges(keys)
    row_starts, key_starts = (_on_host([begin for begin, _ in of]) for of in (of_rows, of_keys))
    starts = {"start_pos": row_starts, "key_start": key_starts}
    starts = starts if by_position else {"start_pos": row_starts - key_starts}
    options = {name: _to_device(x, device) for name, x in starts.items()}
    for side, edges in (("q", of_rows), ("k", of_keys)):
        lengths = [end - begin for begin, end in edges]
        options[f"cu_seqlens_{side}"] = cu_seqlens_of(tuple(lengths), device)
        options[f"max_seqlen_{side}"] = max(lengths, default=0)
    return options


def _on_host(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")  # whatever torch.set_default_device says


@functools.lru_cache(maxsize=1024)
@torch.inference_mode(False)
def cu_seqlens_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 `[B + 1]`."""
    return _to_device(_on_host([0, *itertools.accumulate(lengths)]), device)


def _rows(spread: Spread, chunks: Sequence[int]) -> Tensor:
    begins = list(itertools.accumulate(spread.lengths, initial=0))
    pieces = [
        torch.arange(begins[b] + begin, begins[b] + end, device="cpu")
        for chunk in chunks
        for b, (begin, end) in enumerate(spread.edges(chunk))
    ]
    return torch.cat(pieces) if pieces else torch.arange(0, device="cpu")


def _chunks_of(spread: Spread, rank: int) -> list[int]:
    return [spread.chunk(rank, part) for part in range(spread.parts)]


# Numbers of all rows take memory: of the last few spreads, as the layers of a model have one. What is kept may be first
# asked for in inference mode, whose tensors no gradient takes.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _rows_of(spread: Spread, rank: int, device: torch.device) -> Tensor:
    return _to_device(_rows(spread, _chunks_of(spread, rank)), device)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _orders(spread: Spread, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    rows = torch.cat([_rows(spread, _chunks_of(spread, rank)) for rank in range(spread.ranks)])
    if torch.equal(rows, torch.arange(len(rows), device="cpu")):
        return None, None
    return _to_device(rows, device), _to_device(torch.argsort(rows), device)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _order_of_chunks(spread: Spread, device: torch.device) -> Tensor:
    return _to_device(torch.argsort(_rows(spread, range(spread.chunks))), device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _rows_of_chunk(spread: Spread, chunk: int, device: torch.device) -> Tensor:
    return _to_device(_rows(spread, [chunk]), device)


@functools.lru_cache(maxsize=64)
def _copies(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """It is there when this returns: what is kept is read on several streams, none of which waits for another. The host
    waits for the copy, and not for what the device computes."""
    if device.type != "cuda":
        return x
    with torch.cuda.stream(_copies(device)):
        return x.to(device)

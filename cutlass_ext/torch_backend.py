"""Attention through PyTorch's own operators: the whole semantics of the library, on any device.

What the operators run for CPU tensors and for `backend="torch"`. Packed sequences and pages become padded sequences
here; torch_padded.py computes those.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from .torch_padded import (
    GPU_BLOCK,
    Gradients,
    Lengths,
    Results,
    attention,
    attention_backward,
    dtype_of_scores,
    empty_gradients,
    empty_results,
)


def fmha(o: SimpleNamespace) -> Results:
    """`cutlass_ext.fmha`; the attributes of `o` are the operator's arguments, checked already."""
    if o.cu_seqlens_q is not None:
        return _packed_attention(o)
    k, v = (o.k, o.v) if o.block_table is None else (gathered(pages, o.block_table) for pages in (o.k, o.v))
    return attention(o.q, k, v, lengths_of(o, o.q.shape[1], k.shape[1], o.seqused_k, o.leftpad_k), o)


def fmha_backward(o: SimpleNamespace) -> Gradients:
    """`cutlass_ext.fmha_backward`; the attributes of `o` are the operator's arguments, checked already."""
    if o.cu_seqlens_q is not None:
        return _packed_backward(o)
    return attention_backward(o, lengths_of(o, o.q.shape[1], o.k.shape[1], o.seqused_k, o.leftpad_k))


def gathered(pages: Tensor, table: Tensor) -> Tensor:
    """The rows `[B, keys that there is room for, H, d]` of the pages that `table` `[B, pages of a sequence]` names.

    Entries outside the pages are read at the nearest one: those past a sequence's keys may be anything.
    """
    if len(pages) == 0:
        return pages.new_zeros(len(table), 0, *pages.shape[2:])
    return pages[table.clamp(0, len(pages) - 1).long()].flatten(1, 2)


def lengths_of(
    o: SimpleNamespace, n_q: int | Tensor, n_kv: int | Tensor, used: Tensor | None, leftpad: Tensor | None
) -> Lengths:
    """Of sequences with `n_q` query rows and `n_kv` keys, of which `used` count if it is given."""
    if used is not None:
        used = used.clamp(min=0).clamp(max=n_kv)
    if o.start_positions is not None:
        start = o.start_positions
    elif o.start_pos is not None:
        start = o.start_pos
    else:
        start = (n_kv if used is None else used) - n_q
    key_starts = getattr(o, "key_starts", None)
    return Lengths(start, used, leftpad, origin=getattr(o, "key_start", 0) if key_starts is None else key_starts)


def empty_results_of(o: SimpleNamespace) -> Results:
    """The same for an operator's arguments."""
    return empty_results(o.q, getattr(o, "v_cache", o.v), o.return_lse, getattr(o, "out_dtype", None))


class _Sequences(NamedTuple):
    """Some packed sequences, padded to one length."""

    rows: Tensor  # [b, n_q], int64: which rows of q are theirs; padding has a row that there is
    is_row: Tensor  # [b, n_q]: which are not padding
    keys: Tensor  # [b, n_k], the same for keys, unless they lie in pages
    is_key: Tensor
    k: Tensor  # [b, n_k, H_kv, d]
    v: Tensor  # [b, n_k, H_kv, d_v]
    lengths: Lengths
    options: SimpleNamespace

    def q_places(self, nowhere: int) -> Tensor:
        """Where results of rows go: those of padding to row `nowhere`."""
        return self.rows.where(self.is_row, nowhere)

    def k_places(self, nowhere: int) -> Tensor:
        """The same for keys."""
        return self.keys.where(self.is_key, nowhere)


def _sequences(o: SimpleNamespace) -> Iterator[_Sequences]:
    """The sequences of a call of packed queries, over packed keys or over pages.

    On a CPU, where lengths can be read, they come one by one. On a GPU nothing waits for the device: they are padded to
    the longest, or to the room of the pages, as many at a time as a block of elements holds.
    """
    (total_q, H_q, d), (H_kv, d_v) = o.q.shape, o.v.shape[-2:]
    on_cpu, table, used = o.q.device.type == "cpu", o.block_table, o.seqused_k
    if on_cpu:
        _check_ends("q", o.cu_seqlens_q, total_q, o.max_seqlen_q)
    q_begin, q_length = _rows_of_sequences(o.cu_seqlens_q, total_q)
    if table is not None:
        n_k = table.shape[1] * o.k.shape[1] if len(o.k) else 0
        k_begin, k_length = torch.zeros_like(q_length), torch.full_like(q_length, n_k)
    else:
        if on_cpu:
            _check_ends("k", o.cu_seqlens_k, len(o.k), o.max_seqlen_k)
        k_begin, k_length = _rows_of_sequences(o.cu_seqlens_k, len(o.k))
        n_k = min(o.max_seqlen_k, len(o.k))
        used = k_length if used is None and not on_cpu else used  # on a CPU there are no keys but these
    batch = lengths_of(o, q_length, k_length, used, o.leftpad_k)
    n_q = min(o.max_seqlen_q, total_q)
    padded = n_q * H_q * (d + d_v) + n_k * H_kv * (d + d_v)
    step = 1 if on_cpu else max(GPU_BLOCK // max(padded, 1), 1)
    for first in range(0, q_length.shape[0], step):
        b = slice(first, first + step)
        some = Lengths(*(x[b] if isinstance(x, Tensor) else x for x in batch))._replace(first=first)
        if on_cpu:
            n_q, n_k = int(q_length[first]), int((k_length if batch.used is None else batch.used)[first])
            some = some._replace(start=int(some.start), used=None)  # there are no keys but those
            if isinstance(some.origin, Tensor):
                some = some._replace(origin=int(some.origin))
        options = SimpleNamespace(**vars(o))
        if o.alibi_slopes is not None and o.alibi_slopes.dim() == 2:
            options.alibi_slopes = o.alibi_slopes[b]
        rows, is_row = _padded_rows(q_begin[b], q_length[b], n_q)
        keys, is_key = _padded_rows(k_begin[b], k_length[b], n_k)
        if table is not None:
            table_b = table[b, : -(-n_k // o.k.shape[1])]
            k, v = (gathered(pages, table_b)[:, :n_k] for pages in (o.k, o.v))
        else:
            k, v = (x[keys.where(is_key, 0)] for x in (o.k, o.v))
        yield _Sequences(rows.where(is_row, 0), is_row, keys, is_key, k, v, some, options)


def _packed_attention(o: SimpleNamespace) -> Results:
    """Packed queries: `out` `[total_q, H_q, d_v]` and `lse` `[H_q, total_q]`."""
    total_q, H_q, _ = o.q.shape
    results = empty_results(o.q, o.v, True, o.out_dtype)
    out = results[0].new_zeros(total_q + 1, H_q, o.v.shape[-1])  # the last row takes what padding computes
    lse = o.q.new_full((total_q + 1, H_q), -torch.inf, dtype=dtype_of_scores(o.q))
    for some in _sequences(o):
        block_out, block_lse = attention(o.q[some.rows], some.k, some.v, some.lengths, some.options)
        places = some.q_places(total_q)
        out[places] = block_out
        lse[places] = block_lse.transpose(1, 2)
    return results[0].copy_(out[:total_q]), results[1].copy_(lse[:total_q].T)


def _packed_backward(o: SimpleNamespace) -> Gradients:
    """Packed sequences: the gradients of `_packed_attention`; those of rows in no sequence are 0."""
    total_q, total_k = len(o.q), len(o.k)
    *of_rows, dsink, dbias = empty_gradients(o)  # no bias goes with packed sequences
    dq, dk, dv = (x.new_zeros(len(x) + 1, *x.shape[1:]) for x in of_rows)  # the last row is padding's
    dsink.zero_()
    for some in _sequences(o):
        options = some.options
        is_padding = ~some.is_row.unsqueeze(-1)
        # Padding is a row that sees no key: scores that are no NaN, and an lse of -inf.
        options.q = o.q[some.rows].masked_fill(is_padding.unsqueeze(-1), 0.0)
        options.k, options.v, options.dout = some.k, some.v, o.dout[some.rows]
        options.out = None if o.out is None else o.out[some.rows]
        for name, of_padding in (("lse", -torch.inf), ("delta", 0.0), ("dlse", 0.0)):
            if (x := getattr(o, name)) is not None:
                setattr(options, name, x.T[some.rows].masked_fill(is_padding, of_padding).transpose(1, 2))
        block_dq, block_dk, block_dv, block_dsink, _ = attention_backward(options, some.lengths)
        dq[some.q_places(total_q)] = block_dq
        places = some.k_places(total_k)
        dk[places], dv[places] = block_dk, block_dv
        dsink += block_dsink
    return dq[:total_q], dk[:total_k], dv[:total_k], dsink, dbias


def _check_ends(of: str, cu_seqlens: Tensor, total: int, longest: int) -> None:
    """What the device puts right in silence (csrc/fmha/sequence.hpp) is an error where the host can see it."""
    ends = cu_seqlens.tolist()
    if ends[0] < 0 or ends[-1] > total or any(end < begin for begin, end in itertools.pairwise(ends)):
        raise ValueError(
            f"cu_seqlens_{of}: is {ends if len(ends) < 10 else [*ends[:8], '...']}; "
            f"expected rows that never decrease, from 0 to at most {total}, the length of {of}"
        )
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end - begin > longest:
            raise ValueError(f"max_seqlen_{of}: is {longest}, and sequence {b} has {end - begin} rows of {of}")


def _rows_of_sequences(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """First row and length of each sequence, int32 `[B]`, within the `total` rows that there are."""
    begin = cu_seqlens[:-1].clamp(0, total)
    return begin, cu_seqlens[1:].clamp(0, total).sub(begin).clamp(min=0)


def _padded_rows(begin: Tensor, length: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Row numbers of some sequences, `[B, n]`, and which of them are rows of theirs."""
    i = torch.arange(n, device=begin.device)
    return begin.long().unsqueeze(-1) + i, i < length.unsqueeze(-1)

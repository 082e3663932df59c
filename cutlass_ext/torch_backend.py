"""Attention through PyTorch's own operators: the whole semantics of the library, on any device.

What the operators run for CPU tensors and for `backend="torch"`. Query rows are taken in blocks, so that scores take
O(N_kv) memory a row of a block, and no block touches keys that the host knows to be hidden.
"""
# ruff: noqa: E741  (m, l and O are the field's names)

import contextlib
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

# Score elements of a block: on a CPU they should stay in the cache, on a GPU they should outlast a launch.
_CPU_BLOCK = 2**20
_GPU_BLOCK = 2**24
_MAX_ROWS = 128  # of a block: more of them compute more hidden scores under causal
_MIN_ROWS = 32  # of a block: fewer of them read K and V more often than their arithmetic pays for

Results = tuple[Tensor, Tensor]  # out, lse


def fmha(o: SimpleNamespace) -> Results:
    """`cutlass_ext.fmha`; the attributes of `o` are the operator's arguments, checked already."""
    if o.cu_seqlens_q is not None:
        return _packed_attention(o)
    k, v = (o.k, o.v) if o.block_table is None else (gathered(pages, o.block_table) for pages in (o.k, o.v))
    return attention(o.q, k, v, lengths_of(o, o.q.shape[1], k.shape[1], o.seqused_k, o.leftpad_k), o)


def gathered(pages: Tensor, table: Tensor) -> Tensor:
    """The rows `[B, keys that there is room for, H, d]` of the pages that `table` `[B, pages of a sequence]` names.

    Entries outside the pages are read at the nearest one: those past a sequence's keys may be anything.
    """
    if len(pages) == 0:
        return pages.new_zeros(len(table), 0, *pages.shape[2:])
    return pages[table.clamp(0, len(pages) - 1).long()].flatten(1, 2)


class Lengths(NamedTuple):
    """What the sequences of a batch are, padded, packed or cached; `[B]` on the device where that alone knows."""

    start: int | Tensor  # position of the first query row
    used: Tensor | None  # keys at or past it are not the sequence's
    leftpad: Tensor | None  # nor are those before it


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
    return Lengths(start, used, leftpad)


def empty_results(q: Tensor, v: Tensor, return_lse: bool = True) -> Results:
    """`out` and `lse` for q `[B, N_q, H_q, d]` or `[total_q, H_q, d]`; `lse` is empty where nobody asked for it."""
    *batch, rows, H_q, _d = q.shape
    lse = (*batch, H_q, rows) if return_lse else (0,)
    return q.new_empty(*batch, rows, H_q, v.shape[-1]), q.new_empty(lse, dtype=torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: SimpleNamespace) -> Results:
    """Padded sequences: `out` `[B, N_q, H_q, d_v]` in q's dtype and `lse` `[B, H_q, N_q]` float32.

    Scores, softmax and both products are computed in float32, whatever the inputs' dtype. Nothing here waits for the
    device.
    """
    B, N_q, H_q, d = q.shape
    _, N_kv, H_kv, d_v = v.shape
    out, lse = empty_results(q, v)
    if lse.numel() == 0:
        return out, lse

    softmax_scale = d**-0.5 if o.softmax_scale is None else o.softmax_scale
    window_left, window_right = o.window_left, 0 if o.causal else o.window_right
    start = lengths.start.view(B, 1, 1, 1, 1) if isinstance(lengths.start, Tensor) else lengths.start

    # Query heads as [H_kv, G]: they meet their key head by broadcasting, and K and V are never repeated.
    G = H_q // H_kv
    q_heads = q.unflatten(2, (H_kv, G)).permute(0, 2, 3, 1, 4)
    out_heads = out.unflatten(2, (H_kv, G)).permute(0, 2, 3, 1, 4)
    lse_heads = lse.unflatten(1, (H_kv, G)).unsqueeze(-1)
    slopes = None if o.alibi_slopes is None else o.alibi_slopes.reshape(-1, H_kv, G, 1, 1).expand(B, -1, -1, -1, -1)
    sinks = None if o.sink is None else o.sink.reshape(1, H_kv, G, 1, 1)
    keys = torch.arange(N_kv, device=q.device)
    outside = _outside(keys, lengths)

    rows, heads = _block_shape(q.is_cuda, N_q, N_kv, G, d + d_v)
    with _float32_products(q.device.type):
        for b, h in _head_blocks(B, H_kv, heads):
            K = k[b, :, h].transpose(1, 2).to(torch.float32)
            V = v[b, :, h].transpose(1, 2).to(torch.float32)
            if outside is not None:
                # 0 * NaN is NaN: what lies outside a sequence must not even meet a zero probability.
                V = V.masked_fill(outside[b, None, :, None], 0.0)
            if b.stop - b.start > 1:
                K, V = K.contiguous(), V.contiguous()  # once here, or matmul does it for every block of rows

            block_start = start[b] if isinstance(start, Tensor) else start
            for first_row in range(0, N_q, rows):
                i = slice(first_row, min(first_row + rows, N_q))
                j, hidden = _visible_keys(start, i, N_kv, window_left, window_right)
                sink_block = None if sinks is None else sinks[:, h]
                if j.start == j.stop:
                    out_heads[b, h, :, i] = 0.0
                    lse_heads[b, h, :, i] = -torch.inf if sinks is None else sink_block
                    continue

                Q = q_heads[b, h, :, i].to(torch.float32) * softmax_scale
                S = torch.matmul(Q.flatten(2, 3), K[:, :, j].mT).unflatten(2, (G, -1))
                if o.softcap > 0:
                    S.div_(o.softcap).tanh_().mul_(o.softcap)
                ahead = None  # j - p: how far a key stands ahead of the row
                if slopes is not None or hidden:
                    p = torch.arange(i.start, i.stop, device=q.device).unsqueeze(-1) + block_start
                    ahead = keys[j] - p
                if slopes is not None:
                    S.addcmul_(slopes[b, h], ahead.abs().to(torch.float32), value=-1.0)
                if ahead is not None and window_right >= 0:
                    S.masked_fill_(ahead > window_right, -torch.inf)
                if ahead is not None and window_left >= 0:
                    S.masked_fill_(ahead < -window_left, -torch.inf)
                if outside is not None:
                    S.masked_fill_(outside[b, None, None, None, j], -torch.inf)

                m = S.amax(-1, keepdim=True)
                if sinks is not None:
                    m = torch.maximum(m, sink_block)
                m.masked_fill_(m == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) is 0, exp(-inf + inf) NaN
                P = S.sub_(m).exp_()
                l = P.sum(-1, keepdim=True)
                if sinks is not None:
                    l += torch.exp(sink_block - m)
                O = torch.matmul(P.flatten(2, 3), V[:, :, j]).unflatten(2, (G, -1))
                out_heads[b, h, :, i] = O.div_(l).masked_fill_(l == 0, 0.0)
                lse_heads[b, h, :, i] = l.log_().add_(m)
    return out, lse


def _packed_attention(o: SimpleNamespace) -> Results:
    """Packed queries, over packed keys or over pages: `out` `[total_q, H_q, d_v]` and `lse` `[H_q, total_q]`.

    On a CPU, where lengths can be read, the sequences go through `attention` one by one. On a GPU nothing waits for the
    device: they are padded to the longest, or to the room of the pages, as many at a time as a block of elements holds.
    """
    (total_q, H_q, d), (H_kv, d_v) = o.q.shape, o.v.shape[-2:]
    on_cpu, table, used = o.q.device.type == "cpu", o.block_table, o.seqused_k
    if on_cpu:
        _check_ends("q", o.cu_seqlens_q, total_q, o.max_seqlen_q)
    q_begin, q_length = _rows_of_sequences(o.cu_seqlens_q, total_q)
    if table is not None:
        n_k = table.shape[1] * o.k.shape[1] if len(o.k) else 0
        k_length = torch.full_like(q_length, n_k)
    else:
        if on_cpu:
            _check_ends("k", o.cu_seqlens_k, len(o.k), o.max_seqlen_k)
        k_begin, k_length = _rows_of_sequences(o.cu_seqlens_k, len(o.k))
        n_k = min(o.max_seqlen_k, len(o.k))
        used = k_length if used is None and not on_cpu else used  # on a CPU there are no keys but these
    batch = lengths_of(o, q_length, k_length, used, o.leftpad_k)

    out = o.q.new_zeros(total_q + 1, H_q, d_v)  # the last row takes what padding computes
    lse = o.q.new_full((total_q + 1, H_q), -torch.inf, dtype=torch.float32)
    n_q = min(o.max_seqlen_q, total_q)
    padded = n_q * H_q * (d + d_v) + n_k * H_kv * (d + d_v)
    step = 1 if on_cpu else max(_GPU_BLOCK // max(padded, 1), 1)
    for first in range(0, q_length.shape[0], step):
        b = slice(first, first + step)
        some = Lengths(*(x[b] if isinstance(x, Tensor) else x for x in batch))
        if on_cpu:
            n_q, n_k = int(q_length[first]), int((k_length if batch.used is None else batch.used)[first])
            some = some._replace(start=int(some.start))
        options = SimpleNamespace(**vars(o))
        if o.alibi_slopes is not None and o.alibi_slopes.dim() == 2:
            options.alibi_slopes = o.alibi_slopes[b]
        rows, is_row = _padded_rows(q_begin[b], q_length[b], n_q)
        if table is not None:
            table_b = table[b, : -(-n_k // o.k.shape[1])]
            k, v = (gathered(pages, table_b)[:, :n_k] for pages in (o.k, o.v))
        else:
            keys, is_key = _padded_rows(k_begin[b], k_length[b], n_k)
            keys = keys.where(is_key, 0)
            k, v = o.k[keys], o.v[keys]
        block_out, block_lse = attention(o.q[rows.where(is_row, 0)], k, v, some, options)
        rows = rows.where(is_row, total_q)
        out[rows] = block_out
        lse[rows] = block_lse.transpose(1, 2)
    return out[:total_q], lse[:total_q].T.contiguous()


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


def _outside(keys: Tensor, lengths: Lengths) -> Tensor | None:
    """`[B, N_kv]`, true for keys that are not their sequence's; None where all are."""
    past = None if lengths.used is None else keys >= lengths.used.unsqueeze(-1)
    before = None if lengths.leftpad is None else keys < lengths.leftpad.unsqueeze(-1)
    return before if past is None else past if before is None else past | before


def _block_shape(on_gpu: bool, N_q: int, N_kv: int, G: int, dims: int) -> tuple[int, int]:
    """Query rows of a block, and how many pairs (sequence, key head) it takes at once."""
    elements = _GPU_BLOCK if on_gpu else _CPU_BLOCK
    keys = max(N_kv, 1)
    rows = max(min(elements // (G * keys), _MAX_ROWS), _MIN_ROWS // G, 1)
    rows = min(rows, N_q)
    return rows, max(elements // (keys * max(rows * G, dims)), 1)


def _head_blocks(B: int, H_kv: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Cuts sequences x key heads into blocks of about `heads`: whole sequences where they fit, else heads of one."""
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

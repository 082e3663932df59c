"""`fmha` over several GPUs: what is checked, on all ranks alike, and which of the methods runs. Called by users."""

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import cast_before
from ..interface import Backend, check_tensors, draw_seed, explain, window_sides
from . import all_gather, all_to_all, ring
from .agreement import Agreement, group_of, untraced
from .model import MODELS, Attention, Machine
from .spread import Layout, Spread, cu_seqlens_of, spread_of

Method = Literal["ring", "all_to_all", "all_gather", "auto"]

GATHERED_BYTES = 1 << 30  # of K and V of all ranks, up to which "auto" gathers them


@untraced
@cast_before
def fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: object = None,
    layout: Layout = "zigzag",
    method: Method = "auto",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    deterministic: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    head_start: int = 0,
    sequence_start: int = 0,
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cutlass_ext.fmha` of sequences whose rows are spread over the ranks of a group.

    Each rank passes its rows of q, k and v, as `shard` cuts them, and gets its rows of out. All ranks of the group call
    it, forward and backward.

    Query row i and key i stand at the same position; everything else is as in `cutlass_ext.fmha`. Three methods:

    - `"ring"`: K and V go round, while each rank computes its rows' attention to what has come; the results are merged
      by `lse`. K and V of a rank are sent in one message, straight to the rank that needs them, and only the chunks
      that some row of it sees. Any number of heads. Parts of the result are float32 until they are merged.
    - `"all_to_all"`: the ranks exchange rows for heads, each computes some heads of all rows, and they exchange back.
      The number of ranks divides H_q, and is a multiple or a divisor of H_kv. The whole sequence is computed by one
      call, so the result has its bits.
    - `"all_gather"`: every rank gets the keys that its rows see, a few heads first, and computes as one GPU would, each
      row in one call. Any number of heads. Gradients of keys go back in q's dtype, each of a part of the rows, and are
      added up in float32. The fastest while K and V of all ranks are no burden.

    Sizes beyond q, k, v and out, with N rows on P ranks: a ring has K and V of a rank three times (as sent, and two
    as received) and out in float32 twice, while it merges; backward also dq, and dk and dv four times, in float32.
    All-to-all has q, k, v and out of N rows and H / P heads, as sent and as received. All-gather has K and V of all N
    rows, whatever P is (packed sequences for a moment twice); up to 128 MB of K and V are kept for the backward pass,
    which has them, the gradients of them that its rows give, at most twice their size, and those that come, at most
    twice too (causal half of all that), and dq twice. Nothing has N^2 elements.

    Args:
        q, k, v: `[B, N / P, heads, head_dim]`, or packed `[rows of this rank, heads, head_dim]`: dtypes and head dims
            as in `cutlass_ext.fmha`. The same number of rows in all three.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks. With CUDA tensors NCCL's.
        layout: how `shard` cut the rows. `"zigzag"` gives all ranks the same work under causal.
        method: as above. `"auto"` takes what a model of the time, fitted to two H200s (model.py), says is fastest of
            those that take the call: all-gather only while K and V of all ranks are up to 1 GiB; with windows a ring,
            which has those of neighbours alone.
        causal, window, softmax_scale, softcap, backend, deterministic, return_lse: as in `cutlass_ext.fmha`, the same
            on all ranks. `deterministic=True` fixes the bits of gradients.
        alibi_slopes: float32 `[H_q]`, the same on all ranks.
        sink: float32 `[H_q]`, the same on all ranks. Its gradient on a rank is a share: the sum over ranks is the
            whole, as of any parameter that ranks have copies of.
        cu_seqlens: where sequences are packed, the ends of the whole ones, `[B + 1]` beginning with 0, as ints or a CPU
            tensor, the same on all ranks. Sequences may have any lengths, also fewer rows than there are ranks.
        dropout_p, head_start, sequence_start: as in `cutlass_ext.fmha`; the same weights are dropped as on one GPU.
        dropout_seed: int64 `[2]`, the same on all ranks; by default the first rank of the group draws it.
        check: before anything is sent, the ranks compare their arguments, on the host and over gloo: the device does
            not wait, but hosts do, for the slowest. With False a call that differs among ranks may hang until the
            group's timeout.

    Returns:
        `out` `[B, N / P, H_q, d_v]` or `[rows of this rank, H_q, d_v]`, dtype of q; with `return_lse` also `lse`
        `[B, H_q, N / P]` or `[H_q, rows of this rank]`, float32. Both are differentiable, once. The same bits, run
        after run.

    Raises:
        TypeError, ValueError: an argument that does not fit on a rank, or that differs among ranks; on every rank, with
            the number of the rank and the argument.
        NotImplementedError: what `cutlass_ext.fmha` refuses.
        RuntimeError: a rank that is gone, when the group notices; or no `torch.distributed`.

    Source: Ring Attention (arXiv:2310.01889, section 3), with the balance of Striped Attention (arXiv:2311.09431) by
    chunks from both ends; DeepSpeed-Ulysses (arXiv:2309.14509, section 3).
    """
    group = group_of(group)
    rank, ranks = group.rank(), group.size()

    def prepare() -> tuple[tuple[Spread, str, tuple[int, int]], dict[str, object]]:
        tensors = {"alibi_slopes": alibi_slopes, "sink": sink}
        check_tensors(q=q, k=k, v=v, **{name: x for name, x in tensors.items() if x is not None})
        _check_shapes(q, k, v, alibi_slopes, packed=cu_seqlens is not None)
        rows = q.shape[-3]
        spread = spread_of(rows * ranks, cu_seqlens, ranks, layout, "q")
        if rows != spread.rows[rank]:
            raise ValueError(f"q: has {rows} rows; expected {spread.rows[rank]}, the shard of cu_seqlens on this rank")
        left, right = window_sides("window", window)
        chosen = _method(method, q, k, v, spread, causal, (left, right))
        options = {
            "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap,
            "dropout_p": dropout_p, "head_start": head_start, "sequence_start": sequence_start, "backend": backend,
        }  # fmt: skip
        seed = {"dropout_seed": dropout_seed} if dropout_p else {}
        whole = {}
        if spread.packed:
            ends = cu_seqlens_of((rows,), q.device)
            whole = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": rows, "max_seqlen_k": rows}
        explain(q, k, v, **options, **tensors, **seed, **whole)  # raises what a call of this rank's rows alone would
        values = {name: _described(x, spread.packed) for name, x in (("q", q), ("k", k), ("v", v))}
        values |= options | {name: None if x is None else list(x.shape) for name, x in tensors.items()}
        values |= {"layout": layout, "method": chosen, "return_lse": return_lse, "deterministic": deterministic}
        values["cu_seqlens"] = f"of lengths {list(spread.lengths)}" if spread.packed else None
        values |= {"dropout_seed": dropout_seed is None, "requires_grad": _needs_grad(q, k, v, sink)}
        return (spread, chosen, (left, 0 if causal else right)), values

    agreement = Agreement(group, prepare) if check else None
    spread, method, sides = agreement.result if check else prepare()[0]
    draws = dropout_p > 0 and dropout_seed is None
    if check and (draws or method != "all_gather"):
        agreement.wait()
        agreement = None
    options = {
        "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap, "backend": backend,
        "deterministic": deterministic,
    }  # fmt: skip
    if dropout_p:
        if draws:
            dropout_seed = draw_seed(q)
            dist.broadcast(dropout_seed, group=group, group_src=0)
        options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "sequence_start": sequence_start}
    if method == "ring":
        options |= {"alibi_slopes": alibi_slopes} | ({"head_start": head_start} if dropout_p else {})
        out, lse = ring.attention(q, k, v, sink, ring.Ring(group, spread, sides, options))
        return (out, lse) if return_lse else out
    if method == "all_gather":
        place = all_gather.Gathering(group, spread, sides, options, alibi_slopes, head_start, agreement)
        out, lse = all_gather.attention(q, k, v, sink, place, return_lse or _needs_grad(q, k, v, sink))
        return (out, lse) if return_lse else out
    return all_to_all.attention(q, k, v, group, spread, options, alibi_slopes, sink, head_start, return_lse)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, *, packed: bool) -> None:
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            expected = "[rows, heads, head_dim] with cu_seqlens" if packed else "[batch, rows, heads, head_dim]"
            raise ValueError(f"{name}: has shape {list(x.shape)}; expected {expected}")
        if x.shape[dims - 3] != q.shape[dims - 3]:
            raise ValueError(f"{name}: has {x.shape[dims - 3]} rows and q {q.shape[dims - 3]}; they must be equal")
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise ValueError(f"alibi_slopes: has shape {list(alibi_slopes.shape)}; expected [{q.shape[-2]}], for heads")


def _method(method: str, q: Tensor, k: Tensor, v: Tensor, spread: Spread, causal: bool, window: tuple[int, int]) -> str:
    """The method that runs, or why it cannot."""
    if method not in ("ring", "all_to_all", "all_gather", "auto"):
        raise ValueError(f'method: is {method!r}; expected "ring", "all_to_all", "all_gather" or "auto"')
    H_q, H_kv = q.shape[-2], k.shape[-2]
    divides = all_to_all.takes_heads(H_q, H_kv, spread.ranks)
    if method == "all_to_all" and not divides:
        raise ValueError(
            f"method: all_to_all does not cut {H_q} query heads and {H_kv} KV heads into {spread.ranks} ranks; "
            'expected ranks that divide H_q, and are a multiple or a divisor of H_kv, or method="ring"'
        )
    if method == "auto":
        if any(side >= 0 for side in window):
            return "ring"  # which sends to neighbours alone, and fills nothing in
        return _fastest(q, k, v, spread, causal, ["ring", *["all_to_all"] * divides, "all_gather"])
    return method


def _fastest(q: Tensor, k: Tensor, v: Tensor, spread: Spread, causal: bool, methods: list[str]) -> str:
    """Of some methods, by the model of model.py."""
    lengths = spread.lengths * math.prod(q.shape[:-3])
    if sum(lengths) * k.shape[-2] * (k.shape[-1] + v.shape[-1]) * k.element_size() > GATHERED_BYTES:
        methods = [method for method in methods if method != "all_gather"]
    call = Attention(lengths, q.shape[-2], k.shape[-2], q.shape[-1], causal)
    return _fastest_of(call, spread.ranks, _needs_grad(q, k, v), tuple(methods))


@functools.lru_cache(maxsize=64)
def _fastest_of(call: Attention, ranks: int, backward: bool, methods: tuple[str, ...]) -> str:
    times = {method: MODELS[method](call, Machine(), ranks, backward) for method in methods}
    return min(times, key=times.get, default="ring")


def _described(x: Tensor, packed: bool) -> str:
    """What has to be equal on all ranks: of packed rows not their number."""
    shape = list(x.shape[1:] if packed else x.shape)
    return f"{x.dtype} on {x.device.type}, {'[rows, ' + str(shape)[1:] if packed else shape}"


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

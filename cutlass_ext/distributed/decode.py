"""`decode`: few query rows and a cache that is spread over ranks by keys. Called by users."""

import torch
from torch import Tensor

from ..autograd import cast_before
from ..interface import Backend, explain, fmha
from ..merge import merge_attention
from ..torch_padded import dtype_of_scores
from .agreement import agreed, all_gather, group_of, untraced


@untraced
@cast_before
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: object = None,
    start_pos: int | Tensor = 0,
    key_start: int | Tensor = 0,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the same rows on all ranks to keys of which each rank has some; every rank gets the result.

    Each rank computes with its own keys; out and lse, in float32, go round in one all-gather of
    `B N_q H_q (d_v + 1)` numbers a rank, and are merged. No keys are sent. Which rank has which keys does not matter
    where none is hidden by its position: a new token's key goes to any rank, in turn for one. Causal calls, windows and
    ALiBi go by positions: then a rank has keys that follow each other, from `key_start` on.

    Args:
        q: `[B, N_q, H_q, d]`, the same on all ranks.
        k, v: `[B, keys of this rank, H_kv, d]` and `d_v`, or pages with `block_table`, as in `cutlass_ext.fmha`; ranks
            may have different numbers, also none.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        start_pos: the position of the first query row in the whole sequence: an int, or int32 `[B]`.
        key_start: the position of this rank's first key there: an int, or int32 `[B]`.
        causal, window, softmax_scale, softcap, alibi_slopes, sink, backend: as in `cutlass_ext.fmha`, the same on all
            ranks.
        seqused_k: int32 `[B]`, how many keys of each sequence this rank has.
        block_table: int32 `[B, pages of a sequence]`, of this rank's pages.
        check: as in `cutlass_ext.distributed.fmha`.

    Returns:
        `out` `[B, N_q, H_q, d_v]` in q's dtype; with `return_lse` also `lse` `[B, H_q, N_q]`, float32. The same bits on
        all ranks. Parts are float32 until they are merged.

    Raises:
        TypeError, ValueError, RuntimeError: as `cutlass_ext.distributed.fmha`.
        NotImplementedError: an input that requires grad.

    Source: Flash-Decoding (Dao, 2023), with ranks for splits; the merge of arXiv:1805.02867, section 3.1.
    """
    group = group_of(group)

    def prepare() -> tuple[dict, dict[str, object]]:
        same = {
            "causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap, "backend": backend,
        }  # fmt: skip
        tensors = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sink": sink}
        for name, x in tensors.items():
            if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
                raise NotImplementedError(f"{name}: requires grad, and decode has no gradients; use torch.no_grad()")
        if isinstance(start_pos, str) or isinstance(key_start, str):
            raise ValueError("start_pos, key_start: no rank knows where the whole ends; expected int, or int32 [B]")
        own = {"seqused_k": seqused_k, "block_table": block_table, "alibi_slopes": alibi_slopes}
        options = same | own | {"start_pos": start_pos, "key_start": key_start}
        options["out_dtype"] = None if q.dtype == dtype_of_scores(q) else dtype_of_scores(q)
        explain(q, k, v, sink=sink, **options)
        shapes = {"q": [q.dtype, *q.shape], "v": [v.shape[-1]], "k": [k.shape[-2]], "sink": sink is None}
        return options, same | shapes

    options = agreed(group, prepare) if check else prepare()[0]
    out, lse = fmha(q, k, v, sink=sink if group.rank() == 0 else None, return_lse=True, **options)
    mine = torch.cat([out, lse.mT.unsqueeze(-1)], -1)
    parts = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    try:
        all_gather(parts, mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()}: no results from the other ranks ({error})"
        ) from error
    parts = parts.unflatten(0, (group.size(), len(mine)))
    outs, lses = parts[..., :-1].unbind(), parts[..., -1].mT.unbind()
    out, lse = merge_attention(outs, lses)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)

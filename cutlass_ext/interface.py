"""`fmha`, the one function with all features, and `explain`, which says what would run.

The other names of the package (`flash_attn.py`, `sdpa.py`) are thin covers of `fmha`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import _ops
from ._ops import forward, forward_torch, varlen, varlen_torch

Backend = Literal["auto", "simt", "sm80", "sm90", "torch"]
StartPos = int | Tensor | Literal["end"]


def fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    start_pos: StartPos = 0,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact multi-head attention, `softmax(softmax_scale * q k^T + ...) v`, without writing out the scores.

    Query row `i` of a sequence stands at position `p = start_pos + i`. Key `j` is visible to it when all hold:

    - `leftpad_k <= j < seqused_k` (by default `0 <= j < N_kv`),
    - not `causal`, or `j <= p`,
    - `left < 0`, or `j >= p - left`, and `right < 0`, or `j <= p + right`, where `window = (left, right)`.

    The scores, in this order, and the outputs are

        s_ij = softmax_scale * <q_i, k_j>
        s_ij = softcap * tanh(s_ij / softcap)               where softcap > 0
        s_ij = s_ij - alibi_slopes_h * |p - j|              where slopes are given
        out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h))
        lse_i = log(sum_j exp(s_ij) + exp(sink_h))

    and a row that sees no key gives `out = 0` and `lse = -inf` (or the sink's logit). What lies before `leftpad_k`, or
    at or past `seqused_k`, never reaches an output, not even NaN.

    Sequences of different lengths may be packed one after the other, without padding: q, k and v then have no batch
    dimension, `[total, heads, head_dim]`, and `cu_seqlens_q`, `cu_seqlens_k` say where each sequence begins. All four
    packing arguments are given, or none.

    Sizes: `B` sequences, `N_q` query rows, `N_kv` key rows, `H_q` query heads, `H_kv` key heads, head dims `d` of q and
    k and `d_v` of v. `B`, `N_q` and `N_kv` may be 0. Head dims are at most 256, and multiples of 4 (float32) or 8
    (16-bit).

    Args:
        q: `[B, N_q, H_q, d]` or packed `[total_q, H_q, d]`, float32, float16 or bfloat16. Like k and v it may have any
            strides as long as its last dimension is contiguous, so slices of a packed or a permuted buffer need no
            copy.
        k: `[B, N_kv, H_kv, d]` or `[total_k, H_kv, d]`, dtype and device of q. `H_q` is a multiple of `H_kv`: query
            head `h` reads key head `h // (H_q / H_kv)` (multi-query and grouped-query attention).
        v: `[B, N_kv, H_kv, d_v]` or `[total_k, H_kv, d_v]`, dtype and device of q.
        causal: hide the keys after the row's position.
        start_pos: the position of the first query row, in tokens: an int (negative ones too), an int32 tensor `[B]` on
            q's device, or `"end"`, which aligns the last query row of a sequence with its last key: `seqused_k - N_q`,
            or `N_kv - N_q`. The default 0 is PyTorch's convention; flash-attn's is `"end"`.
        window: `(left, right)`, tokens visible before and after the row's position; -1 is unbounded.
        softmax_scale: factor of the scores, greater than 0; `1 / sqrt(d)` by default.
        softcap: bound of the scores (Gemma 2), 0 for none.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`, decrease of a score for each token of distance.
        sink: float32 `[H_q]`, one more logit in each row's softmax, which has no value.
        seqused_k: int32 `[B]`, keys of each sequence, padding in front included; by default `N_kv`, packed all that
            `cu_seqlens_k` gives it.
        leftpad_k: int32 `[B]`, the first key of each sequence; by default 0.
        cu_seqlens_q: int32 `[B + 1]` on q's device: sequence `b` has the rows `cu_seqlens_q[b]` to
            `cu_seqlens_q[b + 1]` of q, possibly none. It never decreases and stays within 0 and `total_q`: on a CPU
            that is checked; on a GPU, where the host does not read it, what lies outside is moved to the nearest row
            inside. Rows of q that belong to no sequence have undefined outputs.
        cu_seqlens_k: int32 `[B + 1]`, the same for the rows of k and v.
        max_seqlen_q: the query rows of the longest sequence, or more: rows past it are not computed (on a CPU: an
            error). The GPU is given work for `B * max_seqlen_q` rows.
        max_seqlen_k: the keys of the longest sequence, or more.
        return_lse: return `(out, lse)` instead of `out`.
        num_splits: parts in which the keys of a query tile are computed, to be merged by `lse`; 0: the library chooses.
            More splits fill a GPU when there are few query tiles. `"torch"` does not split. With a fixed number a
            sequence has the same bits whatever else is in the batch; a packed one, those of a packed call of its own.
        backend: what computes: `"simt"` (CUDA cores), `"sm80"`, `"sm90"` (tensor cores), `"torch"` (PyTorch's own
            operators, on any device), or `"auto"`. `explain` says what `"auto"` chooses.

    Returns:
        `out` `[B, N_q, H_q, d_v]` or `[total_q, H_q, d_v]`, contiguous, dtype of q; with `return_lse` also `lse`
        `[B, H_q, N_q]` or `[H_q, total_q]`, float32, the natural logarithm of each row's sum. The same
        inputs give the same bits.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that does not fit; the text names the argument.
        NotImplementedError: what is not built yet, among it the backward pass: an input that requires grad under grad
            mode is refused instead of being detached silently.

    Source: FlashAttention (arXiv:2205.14135, section 3.1) and FlashAttention-2 (arXiv:2307.08691, section 3.1), with
    the online softmax of arXiv:1805.02867 (section 3). Features: GQA (arXiv:2305.13245, section 2.2), ALiBi
    (arXiv:2108.12409, section 3), attention sinks (arXiv:2309.17453, section 3), softcap (Gemma 2, arXiv:2408.00118,
    section 2).
    """
    arguments = _arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, start_pos, return_lse, window,
        softmax_scale, softcap, alibi_slopes, sink, seqused_k, leftpad_k, num_splits, backend,
    )  # fmt: skip
    if cu_seqlens_q is None:
        operator = forward_torch if backend == "torch" else forward
    else:
        operator = varlen_torch if backend == "torch" else varlen
    try:
        results = operator(*arguments)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    return (results[0], results[1]) if return_lse else results[0]


@dataclass(frozen=True)
class Explanation:
    """What `fmha` would run, and why. Prints as `backend: reason`."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    start_pos: StartPos = 0,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,  # as for fmha, so that a call is explained by changing its name
    num_splits: int = 0,
    backend: Backend = "auto",
) -> Explanation:
    """Which backend `fmha` would run for the same arguments, and why. Computes nothing.

    Raises what `fmha` would raise for them.
    """
    arguments = _arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, start_pos, return_lse, window,
        softmax_scale, softcap, alibi_slopes, sink, seqused_k, leftpad_k, num_splits, backend,
    )  # fmt: skip
    operator = _ops.explain if cu_seqlens_q is None else _ops.varlen_explain
    try:
        name, _, reason = operator(*arguments).partition(": ")
    except RuntimeError as error:
        raise _ops.translated(error) from None
    return Explanation(name, reason)


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    start_pos: StartPos,
    return_lse: bool,
    window: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    num_splits: int,
    backend: str,
) -> tuple:
    """The arguments of the operators, which check them: here is only what they cannot see."""
    try:
        if (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (alibi_slopes is not None and alibi_slopes.requires_grad)
            or (sink is not None and sink.requires_grad)
        ):
            refuse_grad(q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)
    except AttributeError:
        for name, tensor in {"q": q, "k": k, "v": v}.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: is of type {type(tensor).__name__}; expected a tensor") from None
    try:
        window_left, window_right = window
    except (TypeError, ValueError) as error:
        raise type(error)(f"window: is {window!r}; expected a pair of ints (left, right), -1 for unbounded") from None
    start_positions = None
    if type(start_pos) is not int:
        start_pos, start_positions = split_start(start_pos)
    features = causal, start_pos, return_lse
    absent = start_positions is softmax_scale is alibi_slopes is sink is seqused_k is leftpad_k is None
    if not absent or (window_left, window_right, softcap, num_splits, backend) != (-1, -1, 0.0, 0, "auto"):
        features += (
            start_positions, window_left, window_right, softmax_scale, softcap, alibi_slopes, sink, seqused_k,
            leftpad_k, num_splits, backend,
        )  # fmt: skip
    if cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None:
        return q, k, v, *features
    packing = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    for name, value in packing.items():
        if value is None:
            raise ValueError(f"{name}: is None; packed sequences need {', '.join(packing)}")
    return q, k, v, *packing.values(), *features


def split_start(start_pos: StartPos) -> tuple[int | None, Tensor | None]:
    """`start_pos` as the operators take it: an int, a tensor, or neither for "end"."""
    if isinstance(start_pos, Tensor):
        return None, start_pos
    if isinstance(start_pos, str):
        if start_pos != "end":
            raise ValueError(f'start_pos: is {start_pos!r}; expected an int, an int32 tensor [batch] or "end"')
        return None, None
    if start_pos is None:
        raise TypeError('start_pos: is None; expected an int, an int32 tensor [batch] or "end"')
    return start_pos, None  # an integer of another type, such as torch.SymInt


def refuse_grad(**inputs: Tensor | None) -> None:
    """Raises for inputs that require grad under grad mode: without a backward the result would be detached silently."""
    if torch.is_grad_enabled():
        names = [name for name, tensor in inputs.items() if tensor is not None and tensor.requires_grad]
        if names:
            raise NotImplementedError(
                f"{', '.join(names)}: requires grad, and there is no backward pass yet; "
                "call under torch.no_grad() or torch.inference_mode(), or pass detached tensors"
            )

"""`fmha_backward`: the gradients of `fmha`, for those who run the passes themselves. Called by users.

Autograd needs no such call (autograd.py). Sequence parallelism does: each rank has a part of the keys, and the `lse`
and `delta` that it needs are those of all.
"""

from typing import Literal

import torch
from torch import Tensor

from . import autograd
from ._ops import run, without_defaults
from .interface import (
    NAMES,
    Backend,
    StartPos,
    behind_keys,
    check_bool,
    check_dtype,
    check_numbers,
    split_start,
    window_sides,
)


def fmha_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    *,
    delta: Tensor | None = None,
    dlse: Tensor | None = None,
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
    block_table: Tensor | None = None,
    backend: Backend = "auto",
    deterministic: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    head_start: int = 0,
    sequence_start: int = 0,
    bias_grad: bool = True,
    key_start: int | Tensor = 0,
    out_dtype: torch.dtype | None = None,
    precision: Literal["high", "highest"] | None = None,
) -> tuple[Tensor, ...]:
    r"""The gradients of `out, lse = fmha(..., return_lse=True)` in q, k, v, sink and bias, from those of out and lse.

    With the scores `s_ij` and the dropout `keep_ij` of `fmha`, and `s'_ij` the derivative of scores in
    `softmax_scale * <q_i, k_j>` (1 without softcap),

        p_ij = exp(s_ij - lse_i)                            delta_i = <dout_i, out_i> - dlse_i
        dv_j = sum_i keep_ij p_ij dout_i                    dbias_ij = p_ij (keep_ij <dout_i, v_j> - delta_i)
        dq_i = softmax_scale sum_j dbias_ij s'_ij k_j       dk_j = softmax_scale sum_i dbias_ij s'_ij q_i
        dsink_h = -sum_i exp(sink_h - lse_i) delta_i        dbias: summed over sequences, heads, rows that share it

    Nothing in them asks that `lse` and `delta` be of these keys alone. With those of all keys, of which k and v are a
    part (`merge_attention` gives that lse), dk and dv are right as they are, and dq is the part's share of a sum.

    Args:
        dout: the gradient of out, its shape, dtype and device. Any strides, its last dimension contiguous.
        q, k, v: as in `fmha`, packed or padded.
        out: what `fmha` gave, in q's dtype, any strides, its last dimension contiguous; None with `delta`.
        lse: what `fmha` gave, float32 `[B, H_q, N_q]` or packed `[H_q, total_q]`, contiguous (float64 where q is).
        delta: as lse: the rows' sums of `dout * out`, less dlse, which is not given then. By default computed of out.
        dlse: as lse: the gradient of lse, 0 by default.
        causal, start_pos, window, softmax_scale, softcap, alibi_slopes, sink, seqused_k, leftpad_k, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, bias, mask, head_start, sequence_start: as in the call of `fmha`.
        block_table: must be None: keys in pages have no gradients.
        backend: as in `fmha`; of float32 `"sm80"` and `"sm90"` have the gradients of `precision="high"` alone.
        deterministic: the same bits, run after run; without it those of dq may differ. Also on where
            `torch.use_deterministic_algorithms(True)` is.
        dropout_p, dropout_seed: as in the call of `fmha`, which the seed has to be given, too. Where dropout_p is 0 the
            seed, head_start and sequence_start have no effect.
        bias_grad: whether the gradient of bias is computed, where there is one.
        key_start: as in the call of `fmha`.
        out_dtype: of dq, dk and dv: `torch.float32`, for sums of parts that are not to be rounded to 16 bits before, or
            None for that of q. No kernel takes it beside 16-bit inputs yet; PyTorch's operators do.
        precision: as in `fmha`, of float32. `"high"` computes on tensor cores, with workspace of the size of q, k, v
            and dout, where it can (head dims up to 128, rows at multiples of 16 bytes), and on CUDA cores elsewhere;
            `"highest"` on CUDA cores. None: `"high"` where `fmha` would have it.

    Returns:
        `(dq, dk, dv)`, contiguous, shapes and dtype of q, k and v, or out_dtype; with a sink then `dsink`, float32
        `[H_q]`; with a bias, and bias_grad, then `dbias`, shape and dtype of the bias.
        Rows that see no key, keys outside `leftpad_k` and `seqused_k`, and rows in no sequence have gradients of 0,
        whatever bits q, k, v, dout and out hold there.

    Raises:
        TypeError, ValueError: an argument that does not fit; the text names it.
        NotImplementedError: `block_table`, or what no kernel of the backend takes.

    Source: FlashAttention-2 (arXiv:2307.08691, section 3.1).
    """
    check_bool("causal", causal)
    check_bool("deterministic", deterministic)
    check_bool("bias_grad", bias_grad)
    check_dtype("out_dtype", out_dtype)
    check_numbers(
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        head_start=head_start,
        sequence_start=sequence_start,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    left, right = window_sides("window", window)
    start_pos, key_start, key_starts = behind_keys(start_pos, key_start)
    start, start_positions = split_start(start_pos)
    arguments = (
        dout, q, k, v, out, lse, delta, dlse, bias_grad, causal, start, False, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, block_table, left, right, softmax_scale, softcap, alibi_slopes, sink, seqused_k, leftpad_k,
        start_positions, 0, backend, deterministic or torch.are_deterministic_algorithms_enabled(), bias, mask,
        dropout_p, dropout_seed, head_start, sequence_start, key_start, key_starts, out_dtype,
        precision,
    )  # fmt: skip
    operator = autograd.backward_torch if backend == "torch" else autograd.backward
    arguments = without_defaults(operator, arguments)
    *gradients, dsink, dbias = run(autograd.differentiable(operator, arguments), arguments, NAMES)
    if sink is not None:
        gradients.append(dsink)
    if bias is not None and bias_grad:
        gradients.append(dbias)
    return tuple(gradients)

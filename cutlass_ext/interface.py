"""`fmha`, the one function with all features, and `explain`, which says what would run.

The other names of the package (`flash_attn.py`, `sdpa.py`) are thin covers of `fmha`.
"""

import inspect
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, is_grad_enabled
from torch.overrides import TorchFunctionMode

from . import autograd
from ._ops import func_is_active, requires_grad, run
from .block_mask import can_pack, mask_of

Backend = Literal["auto", "simt", "sm80", "sm90", "torch"]
StartPos = int | Tensor | Literal["end"]

_NUMBER_OR_NONE = float, type(None)
# What arguments of the operator are called here.
NAMES = {"window_left": "window", "window_right": "window", "start_positions": "start_pos"}


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
    block_table: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    backend: Backend = "auto",
    deterministic: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: object | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    head_start: int = 0,
    sequence_start: int = 0,
    key_start: int | Tensor = 0,
    precision: Literal["high", "highest"] | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact multi-head attention, `softmax(softmax_scale * q k^T + ...) v`, without writing out the scores.

        q = torch.randn(2, 1024, 16, 64)                    # [batch, seq, heads, head_dim], on any device
        k, v = torch.randn(2, 2, 1024, 4, 64)               # four query heads share a KV head
        out = fmha(q, k, v, causal=True)                    # [2, 1024, 16, 64]
        out, lse = fmha(q, k, v, causal=True, window=(255, 0), return_lse=True)

    Query row `i` of a sequence stands at position `p = start_pos + i`. Key `j` is visible to it when all hold:

    - `leftpad_k <= j < seqused_k` (by default `0 <= j < N_kv`),
    - not `causal`, or `j <= p`,
    - `left < 0`, or `j >= p - left`, and `right < 0`, or `j <= p + right`, where `window = (left, right)`,
    - no `mask` is given, or it is true at the row and the key.

    The scores, in this order, and the outputs are

        s_ij = softmax_scale * <q_i, k_j>
        s_ij = softcap * tanh(s_ij / softcap)               where softcap > 0
        s_ij = s_ij - alibi_slopes_h * |p - j|              where slopes are given
        s_ij = s_ij + bias_ij                               where a bias is given
        out_i = sum_j exp(s_ij) keep_ij v_j / (sum_j exp(s_ij) + exp(sink_h))
        lse_i = log(sum_j exp(s_ij) + exp(sink_h))

    where `keep_ij` is 1, or with dropout 0 or `1 / (1 - dropout_p)`: it drops weights of out alone. A row that sees no
    key gives `out = 0` and `lse = -inf` (or the sink's logit). What lies before `leftpad_k`, or
    at or past `seqused_k`, never reaches an output, not even NaN.

    Sequences of different lengths may be packed one after the other, without padding: q, k and v then have no batch
    dimension, `[total, heads, head_dim]`, and `cu_seqlens_q`, `cu_seqlens_k` say where each sequence begins. All four
    packing arguments are given, or none.

    Keys may lie in pages instead, as serving engines keep them: with `block_table`, k and v are pages
    `[pages, page size, heads, head_dim]`, and `seqused_k` says how many keys each sequence has. q is padded, or packed
    with `cu_seqlens_q` and `max_seqlen_q` alone: chunks of prompts, drafts and single rows then go through one call.

    Sizes: `B` sequences, `N_q` query rows, `N_kv` key rows, `H_q` query heads, `H_kv` KV heads, head dims `d` of q and
    k and `d_v` of v. `B`, `N_q` and `N_kv` may be 0. Head dims are at most 256, and multiples of 4 (float32) or 8
    (16-bit).

    Args:
        q: `[B, N_q, H_q, d]` or packed `[total_q, H_q, d]`, float32, float16 or bfloat16, or float64 where PyTorch's
            operators compute, on a CPU or with `backend="torch"`; slopes, sink and lse are float64 then. Like k and v
            it may have any strides as long as its last dimension is contiguous, so slices of a packed or a permuted
            buffer need no copy.
        k: `[B, N_kv, H_kv, d]` or `[total_k, H_kv, d]`, or pages `[pages, page size, H_kv, d]`, dtype and device of q.
            `H_q` is a multiple of `H_kv`: query head `h` reads KV head `h // (H_q / H_kv)` (multi-query and
            grouped-query attention).
        v: `[B, N_kv, H_kv, d_v]` or `[total_k, H_kv, d_v]`, or pages like those of k, dtype and device of q.
        causal: hide the keys after the row's position.
        start_pos: the position of the first query row, in tokens: an int between -2^29 and 2^29, an int32 tensor `[B]`
            on q's device, or `"end"`, which aligns the last query row of a sequence with its last key:
            `seqused_k - N_q`, or `N_kv - N_q`. The default 0 is PyTorch's convention; flash-attn's is `"end"`.
        window: `(left, right)`, tokens visible before and after the row's position: 0 or more, or -1 for unbounded, as
            2^30 and more are.
        softmax_scale: factor of the scores, a number greater than 0; `1 / sqrt(d)` by default. It has no gradient: q is
            multiplied by a learned one instead.
        softcap: bound of the scores (Gemma 2), a number greater than 0, or 0 for none.
        alibi_slopes: float32 `[H_q]` or `[B, H_q]`, decrease of a score for each token of distance.
        sink: float32 `[H_q]`, one more logit in each row's softmax, which has no value.
        seqused_k: int32 `[B]`, keys of each sequence, padding in front included; by default `N_kv`, packed all that
            `cu_seqlens_k` gives it, of pages all that a row of `block_table` has room for (`N_kv` there).
        leftpad_k: int32 `[B]`, the first key of each sequence; by default 0.
        cu_seqlens_q: int32 `[B + 1]` on q's device: sequence `b` has the rows `cu_seqlens_q[b]` to
            `cu_seqlens_q[b + 1]` of q, possibly none. It never decreases and stays within 0 and `total_q`: on a CPU
            that is checked; on a GPU, where the host does not read it, what lies outside is moved to the nearest row
            inside. Rows of q that belong to no sequence have undefined outputs.
        cu_seqlens_k: int32 `[B + 1]`, the same for the rows of k and v; None with `block_table`.
        max_seqlen_q: the query rows of the longest sequence, or more: rows past it are not computed (on a CPU: an
            error). The GPU is given work for `B * max_seqlen_q` rows.
        max_seqlen_k: the keys of the longest sequence, or more. With `block_table` it may be left out: it is a hint of
            how many splits pay, and changes nothing else.
        block_table: int32 `[B, pages of a sequence]`: the page that holds the keys `j * page size` and on of sequence
            `b` is `block_table[b, j]`. The page size, of any such call, is a power of two or a multiple of 16, up to
            4096. Pages may lie in any order and be shared by sequences. Entries of pages past a sequence's keys may
            hold anything, -1 for one, and are not followed; of the others one outside the pages reads the nearest.
        return_lse: return `(out, lse)` instead of `out`.
        num_splits: parts in which the keys of a query tile are computed, to be merged by `lse`, 1 to 1024; 0: the
            library chooses. More splits fill a GPU when there are few query tiles. `"torch"` does not split. With a
            fixed number a sequence has the same bits whatever else is in the batch; a packed one, those of a packed
            call of its own.
        backend: what computes, the gradients too: `"simt"` (CUDA cores), `"sm80"`, `"sm90"` (tensor cores), `"torch"`
            (PyTorch's own operators, on any device), or `"auto"`. `explain` says what `"auto"` chooses.
        deterministic: the same gradients, bit for bit, run after run; without it `dq` may differ in its last bits.
            `torch.use_deterministic_algorithms(True)` does the same. `out` and `lse` always have the same bits.
        bias: `[1 or B, 1 or H_q, 1 or N_q, N_kv]`, float32, float16 or bfloat16 whatever q is (float64 beside float64),
            any strides: added to the scores; -inf hides a key. Beside 16-bit inputs one of float32 is slower. Row `i`
            and key `j` are those of the sequence, padding in front counted. It may require grad, alone too: its
            gradient has its own shape, so a bias that is shared by sequences, heads or rows should be given with
            dimensions of 1, not expanded.
        mask: bool `[1 or B, 1 or H_q, 1 or N_q, N_kv]`, any strides: true where a key is visible. It goes with causal,
            windows and lengths, each of which may hide a key. A NaN that bias has where a mask hides does not count.
        block_mask: a `torch.nn.attention.flex_attention.BlockMask`, instead of mask. What it shows is kept with it,
            in bits where kernels run and else as a bool tensor, so that its `mask_mod` is evaluated once.
        dropout_p: the probability with which a weight is dropped after the softmax, 0 to less than 1, rounded to
            multiples of 2^-32.
        dropout_seed: int64 `[2]` on q's device. The same seed drops the same weights, in every call, backend and batch,
            and `dropout_mask` shows which; calls that are to differ should differ in it. By default PyTorch's generator
            of q's device draws it, so `torch.manual_seed` fixes it, checkpoints repeat it and CUDA graphs redraw it.
            Like the next two it has no effect where dropout_p is 0.
        head_start: what head 0 counts as for dropout, so that GPUs that have a part of the heads draw what one of all
            would.
        sequence_start: what sequence 0 counts as, the same of a batch in parts.
        key_start: the position of key 0, where k and v are a part of longer ones: an int between -2^29 and 2^29, or an
            int32 tensor `[B]` on q's device. Causal calls, windows, ALiBi and dropout go by positions, so that parts,
            merged by `merge_attention`, are what one call of all keys would be, weights dropped included: key `j`
            stands for `j + key_start` in the rules above, and `start_pos` stays what it is in that call (`"end"` aligns
            with the last of these keys). Bias, mask, `seqused_k` and `leftpad_k` are those of these keys, counted from
            0. Dropout is slower where key_start is no multiple of 16, or start_pos is odd.
        precision: of float32: `"highest"` computes on CUDA cores; `"high"` on tensor cores, each operand in two fp16
            parts with a power-of-two scale: on Hopper large plain calls two to seven times as fast, with errors of the
            size of those of CUDA cores, measured from 512 keys on (docs/float32.md). For a softmax_scale, over
            softcap, from 2^-32 to 2^20, without num_splits; in other calls it is an error. It takes workspace of the
            size of q, k and v, head dims rounded up to 64, 128, 192 or 256, of pages of all that the table has room
            for. Where numbers are too far apart for such parts, or not finite, the GPU sees it and computes the call on
            CUDA cores. `backend="sm80"` and `"sm90"` ask for it too; Hopper's own kernels are for head dims up to 128
            (of q and k 192) without bias, mask and dropout, and where they are not, `mma.sync` has it at half their
            speed. None: `"high"` on Hopper where it can be had, is expected to be faster, and rows see 192 keys or
            more. Neither is TF32, whatever `torch.set_float32_matmul_precision` says. Gradients go the same way where
            they can (`fmha_backward`), and elsewhere on CUDA cores.
        out_dtype: `torch.float32`, so that parts which are to be merged are not rounded to 16 bits before; None is the
            dtype of q. The gradient of such an `out` is rounded to q's dtype where the backward pass begins.
        out: where the result is written, and which is returned then: its shape, dtype of q, any strides but 0. Kernels
            write there themselves if rows are aligned to 16 bytes and q, k and v do not lie between them; else it is
            copied, in a launch of its own. Not where a tensor of the call requires grad.

    Returns:
        `out` `[B, N_q, H_q, d_v]` or `[total_q, H_q, d_v]`, contiguous, dtype of q (with an `out_dtype` float32, and
        beside 16-bit inputs not contiguous: it lies as lse does, heads before rows); with `return_lse` also `lse`
        `[B, H_q, N_q]` or `[H_q, total_q]`, float32, the natural logarithm of each row's sum. Both are differentiable
        in q, k, v, sink and bias, once. Rows that see no key, padding and rows in no sequence have gradients of 0,
        whatever bits stand there. The same inputs give the same bits. In a captured CUDA graph the call may be replayed
        as often as wanted, but two instances of one graph must not run at the same time: they share what the call
        computes in.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a shape, stride, device or value that does not fit; the text names the argument.
        NotImplementedError: what is not built yet, among it gradients of slopes, of keys in pages, and of gradients;
            derivatives of forward mode; bias or mask of packed sequences.

    Source: FlashAttention (arXiv:2205.14135, section 3.1) and FlashAttention-2 (arXiv:2307.08691, section 3.1), with
    the online softmax of arXiv:1805.02867 (section 3). Features: GQA (arXiv:2305.13245, section 2.2), ALiBi
    (arXiv:2108.12409, section 3), attention sinks (arXiv:2309.17453, section 3), softcap (Gemma 2, arXiv:2408.00118,
    section 2), bias (T5, arXiv:1910.10683, section 2.1), dropout (arXiv:1706.03762, section 5.4) by Philox4x32-7
    (Salmon et al., SC 2011).
    """
    if causal is not True and causal is not False:
        check_bool("causal", causal)
    if deterministic is not False:
        check_bool("deterministic", deterministic)
    if return_lse is not False and return_lse is not True:
        check_bool("return_lse", return_lse)
    if out_dtype is not None:
        check_dtype("out_dtype", out_dtype)
    if type(softcap) is not float or type(dropout_p) is not float or type(softmax_scale) not in _NUMBER_OR_NONE:
        check_numbers(softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p)
    if not type(num_splits) is type(head_start) is type(sequence_start) is int:
        check_numbers(num_splits=num_splits, head_start=head_start, sequence_start=sequence_start)
    left, right = (-1, -1) if type(window) is tuple and window == (-1, -1) else window_sides("window", window)
    start_pos, key_start, key_starts = behind_keys(start_pos, key_start)
    start, start_positions = (start_pos, None) if type(start_pos) is int else split_start(start_pos)
    names = NAMES
    has_last = not (
        bias is mask is block_mask is dropout_seed is key_starts is out_dtype is precision is None
        and dropout_p == head_start == sequence_start == key_start == 0
    )
    if has_last:
        if block_mask is not None:
            if mask is not None:
                raise ValueError("block_mask: does not go with mask, which is given too; give one of them")
            packs = backend != "torch" and block_table is None and can_pack(block_mask, q, k)
            mask, names = mask_of(block_mask, packs=packs), NAMES | {"mask": "block_mask"}
        if dropout_p != 0.0 and dropout_seed is None and isinstance(q, Tensor):
            dropout_seed = draw_seed(q)
    in_grad_mode = is_grad_enabled()
    try:
        needs_grad = in_grad_mode and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
            or (alibi_slopes is not None and alibi_slopes.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
    except AttributeError:  # no tensor, which the operator refuses
        needs_grad = False
    if in_grad_mode and (needs_grad or func_is_active()):
        needs_grad = needs_grad or any(map(requires_grad, (q, k, v, sink, alibi_slopes, bias)))
        _check_gradients(needs_grad, alibi_slopes, block_table)
    # In the order of csrc/options.def: what every call has, then up to `deterministic`, then the last ones. Those that
    # a plain call leaves out would cost it 0.3 us each.
    arguments = q, k, v, causal, start, return_lse or needs_grad
    has_none = (
        cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is softmax_scale is alibi_slopes is sink
        is seqused_k is leftpad_k is start_positions is block_table is None
    ) and not has_last  # fmt: skip
    if not has_none or (left, right, softcap, num_splits, backend, deterministic) != (-1, -1, 0.0, 0, "auto", False):
        if not max_seqlen_q is max_seqlen_k is None:
            check_numbers(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        arguments += (
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, left, right, softmax_scale, softcap,
            alibi_slopes, sink, seqused_k, leftpad_k, start_positions, num_splits, backend, deterministic,
        )  # fmt: skip
        if has_last:
            arguments += (
                bias, mask, dropout_p, dropout_seed, head_start, sequence_start, key_start, key_starts, out_dtype,
                precision,
            )  # fmt: skip
    if out is not None:
        if needs_grad or (in_grad_mode and getattr(out, "requires_grad", False)):
            raise NotImplementedError(
                f"out: does not go with gradients, and {'an input' if needs_grad else 'it'} requires grad; "
                "leave it out, or call under torch.no_grad()"
            )
        operator = autograd.forward_out_torch if backend == "torch" else autograd.forward_out
        lse = run(operator, (q, k, v, out, *arguments[3:]), names)
        return (out, lse) if return_lse else out
    if needs_grad:
        operator = autograd.with_grad_torch if backend == "torch" else autograd.with_grad
        operator = autograd.differentiable(operator, arguments)
    else:
        operator = autograd.forward_torch if backend == "torch" else autograd.forward
    out, lse = run(operator, arguments, names)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Explanation:
    """What a call would run, and why. Prints as `backend: reason`.

    Attributes:
        backend: `"simt"`, `"sm80"`, `"sm90"` or `"torch"`.
        kernel: its name.
        tile: `(B_r, B_c)`, query rows and keys of a tile; of kernels that decode, rows of all heads that share a KV
            head. `(0, 0)` of `"torch"`.
        splits: parts of a sequence's keys; 0 where the keys of the batch are shared out by the lengths on the device.
            In a backward pass: CTAs that share a tile of keys, or one of the last tiles.
        ctas: of the launch, 0 of `"torch"`.
        reason: why these, in words, which may change from version to version.
    """

    backend: str
    kernel: str
    tile: tuple[int, int]
    splits: int
    ctas: int
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def explain(*args, **kwargs) -> Explanation:
    """Which backend and kernel `fmha` would run for the same arguments, and why. Computes nothing.

        print(explain(q, k, v, causal=True))
        print(explain(flash_attn_with_kvcache, q, k_cache, v_cache, cache_seqlens=lengths))

    Args:
        args: those of `fmha`, or any function of this package that computes attention, and then its own.
        kwargs: the same by name.

    Returns:
        An `Explanation`, of the first launch of attention that the call makes.

    Raises:
        TypeError: a function that computes no attention here; and whatever the call itself would raise.
    """
    function = fmha
    if args and callable(args[0]):
        function, *args = args
    with _Explaining():
        try:
            function(*args, **kwargs)
        except _Explained as explained:
            return explained.args[0]
    raise TypeError(f"explain: {function!r} is not a function of cutlass_ext that computes attention")


explain.__signature__ = inspect.signature(fmha).replace(return_annotation=Explanation)


class _Explained(Exception):
    """Carries an Explanation from the operator that was called to `explain`."""


class _Explaining(TorchFunctionMode):
    """Where it is active, in this thread, the first operator that computes attention is explained instead."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", None) == "cutlass_ext":
            kinds = "kvcache", "backward", "out"
            name = "_".join(["fmha", *(kind for kind in kinds if kind in function.__name__)])
            function = getattr(torch.ops.cutlass_ext, f"{name}_explain")
            backend, kernel, B_r, B_c, splits, ctas, reason = function(*args)
            raise _Explained(Explanation(backend, kernel, (B_r, B_c), splits, ctas, reason))
        if function is torch.randint:  # a seed of dropout, which is not to be missing from the calls that are made
            kwargs = {"device": "cpu"} | (kwargs or {})
            kwargs.setdefault("generator", torch.Generator(kwargs["device"]))
        return function(*args, **kwargs or {})


def _check_gradients(needs_grad: bool, alibi_slopes: Tensor | None, block_table: Tensor | None) -> None:
    """Raises where a call needs gradients that there are not.

    Where torch.compile traces torch.func, tensors do not say that they require grad, and the graph would have gradients
    of 0. Without fullgraph=True the function then runs as it does without torch.compile.
    """
    if torch.compiler.is_compiling() and func_is_active():
        raise NotImplementedError("fmha: torch.compile does not trace it inside torch.func; leave out fullgraph=True")
    name, reason = None, ""
    if requires_grad(alibi_slopes):
        name, reason = "alibi_slopes", "requires grad, and slopes have no gradient"
    elif needs_grad and block_table is not None:
        name, reason = "block_table", "there is no backward pass of keys in pages, and an input requires grad"
    if name:
        raise NotImplementedError(
            f"{name}: {reason}; call under torch.no_grad() or torch.inference_mode(), or pass detached tensors"
        )


def draw_seed(q: Tensor) -> Tensor:
    """A seed for dropout, by an operator of PyTorch on q's device, where nothing waits for it."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def behind_keys(start_pos: StartPos, key_start: int | Tensor) -> tuple[StartPos, int, Tensor | None]:
    """Positions as the operators take them: `start_pos` counted from key 0, and where that stands, an int or a tensor.

    What a tensor is that does not fit is theirs to say, so nothing is computed with it.
    """
    if type(key_start) is int and key_start == 0:
        return start_pos, 0, None  # without a launch that subtracts it
    if not isinstance(key_start, (Tensor, Integral, torch.SymInt)) or isinstance(key_start, bool):
        raise TypeError(f"key_start: is {key_start!r}; expected an int or an int32 tensor [batch]")
    check_positions(start_pos=start_pos, key_start=key_start)
    tensors = [x for x in (start_pos, key_start) if isinstance(x, Tensor)]
    fits = all(x.dtype == torch.int32 and (x.shape, x.device) == (tensors[0].shape, tensors[0].device) for x in tensors)
    if fits and isinstance(start_pos, (Tensor, Integral, torch.SymInt)) and not isinstance(start_pos, bool):
        start_pos = start_pos - key_start
    return (start_pos, 0, key_start) if isinstance(key_start, Tensor) else (start_pos, key_start, None)


def check_positions(**positions: object) -> None:
    """Of numbers, those that the operators take: what is computed with others would be refused in their place, or be
    another position where it is of 32 bits."""
    for name, x in positions.items():
        if isinstance(x, Integral) and abs(int(x)) > FURTHEST:
            raise ValueError(f"{name}: is {x}; expected a position between -2^29 and 2^29")


def check_tensors(**tensors: object) -> None:
    """Of arguments that this package reads itself, before an operator would look at them."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: is of type {type(x).__name__}; expected a tensor")


def check_bool(name: str, value: bool) -> None:
    """The operators take None for False."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name}: is {value!r}; expected True or False")


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """The operators take the numbers of dtypes, too."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: is {dtype!r}; expected torch.float32 or None")


def check_numbers(**numbers: float | None) -> None:
    """The operators take True for 1, and a tensor of one element for its value: the host would wait for it, and where
    it requires grad, as a learned temperature does, its gradient would be missing without a word."""
    for name, value in numbers.items():
        if isinstance(value, (bool, Tensor)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: is {value}; expected a number")
            learned = "; multiply q by a learned scale instead" if name == "softmax_scale" else ""
            raise TypeError(f"{name}: is a tensor; expected a number, for which the host need not wait{learned}")


FURTHEST = 2**29  # position, before or behind 0
UNBOUNDED = 2**30  # tokens: a window of so many hides nothing, as no position is so far from another


def window_sides(name: str, window: tuple[int, int]) -> list[int]:
    """Left and right of the argument `name`, as the operators take them, whatever the size of the ints."""
    try:
        left, right = window
        for side in (left, right):
            if type(side) is not int and (isinstance(side, bool) or not isinstance(side, (Integral, torch.SymInt))):
                raise TypeError
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: is {window!r}; expected a pair of ints (left, right), -1 for unbounded") from None
    return [-1 if side >= UNBOUNDED else side if side > -UNBOUNDED else -UNBOUNDED for side in (left, right)]


def split_start(start_pos: StartPos) -> tuple[int | None, Tensor | None]:
    """`start_pos` as the operators take it: an int, a tensor, or neither for "end"."""
    if isinstance(start_pos, Tensor):
        return None, start_pos
    if isinstance(start_pos, str) and start_pos == "end":
        return None, None
    if type(start_pos) is not int and (
        isinstance(start_pos, bool) or not isinstance(start_pos, (Integral, torch.SymInt))
    ):
        error = ValueError if isinstance(start_pos, str) else TypeError
        raise error(f'start_pos: is {start_pos!r}; expected an int, an int32 tensor [batch] or "end"')
    return start_pos, None

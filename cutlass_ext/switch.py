"""`activate`: PyTorch's own `scaled_dot_product_attention`, computed here. Called by users, the kernels by PyTorch.

PyTorch chooses one of a few operators by a call's shapes and dtypes, flash attention or the memory-efficient one, which
have gradients of their own. While the switch is on, this library computes those operators.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .support import attend, attend_backward, given, refusal, warn_once

NAME = "cutlass_ext"
_on: dict[str, ExitStack] = {}  # by device; closing one restores what PyTorch had
_switching = threading.RLock()


class Switch:
    """What `activate` returns: a context manager, which on leaving turns off what it turned on."""

    def __init__(self, device: str, turned_on: bool):
        self._device, self._turned_on = device, turned_on

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_) -> None:
        if self._turned_on:
            deactivate(self._device)


def activate(device: str | torch.device = "cuda") -> Switch:
    """Makes `torch.nn.functional.scaled_dot_product_attention` run here, forward and backward.

        cutlass_ext.activate()            # from here on, until cutlass_ext.deactivate()
        with cutlass_ext.activate():      # or for a while
            model(x)

    Everything above it follows: `nn.MultiheadAttention`, `nn.TransformerEncoder`, models of other packages,
    torch.compile, autograd. It is on for the whole process. It is not to be turned while another thread computes
    attention: PyTorch does not take it that operators are replaced while they run. PyTorch's own switch is the same
    one: `torch.nn.attention.activate_flash_attention_impl("cutlass_ext")`, where PyTorch has it (2.11).

    PyTorch's flash attention operators (float16 and bfloat16 without a mask, `varlen_attn` and nested tensors too) and
    its memory-efficient ones (float32, masks, `d != d_v`, causal calls of unequal lengths) are computed by `fmha`.
    On Hopper PyTorch prefers cuDNN to both, so cuDNN's attention is off (`torch.backends.cuda.enable_cudnn_sdp`) while
    the switch is on; `torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` still runs it. What `fmha` does not
    take PyTorch's own kernel computes, with a warning, once, that names why; as before, PyTorch's formula written out
    computes what none of these operators take (head dims of more than 256, float64).

    Args:
        device: "cuda", or "cpu" to try on a machine without a GPU what a program does with the switch on. It is on for
            all GPUs, whatever number a `torch.device` has.

    Returns:
        A context manager; leaving it turns off what this call turned on, and nothing that was on before.

    Raises:
        ValueError: another device.
        RuntimeError: "cuda" with a PyTorch that is built without CUDA.
    """
    device = _kind_of(device)
    with _switching:
        turned_on = device not in _on
        if turned_on and device == "cuda" and _REGISTRY:
            torch.nn.attention.activate_flash_attention_impl(NAME)
        elif turned_on:
            _turn_on(device)
    return Switch(device, turned_on)


def deactivate(device: str | torch.device = "cuda") -> None:
    """Gives PyTorch back its own operators, and cuDNN's precedence. Does nothing where `activate` was not called.

        cutlass_ext.activate()
        ...
        cutlass_ext.deactivate()
        cutlass_ext.deactivate("cpu")     # what activate("cpu") turned on: a switch for each device

    Args:
        device: as in `activate`.

    Raises:
        ValueError: another device.
    """
    device = _kind_of(device)
    with _switching:
        if device not in _on:
            return
        if device == "cuda" and _REGISTRY:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            _on.pop(device).close()


def _kind_of(device: str | torch.device) -> str:
    with suppress(RuntimeError, TypeError):  # PyTorch's, of what names no device
        if (kind := torch.device(device).type) in _OPERATORS:
            return kind
    raise ValueError(f'device: is {device!r}; expected "cuda" or "cpu"')


class _Registered:
    """What PyTorch's registry keeps while this library is its flash attention."""

    def remove(self) -> None:
        _on.pop("cuda").close()


def _turn_on(device: str = "cuda") -> _Registered:
    if device == "cuda" and torch.version.cuda is None:
        raise RuntimeError('device: is "cuda", and this PyTorch is built without it; expected activate("cpu") here')
    stack = ExitStack()
    library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
    with warnings.catch_warnings():
        # That a kernel is replaced, as it is to be.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, compute in _OPERATORS[device].items():
            if hasattr(torch.ops.aten, name):  # not every PyTorch has every one
                _replace(library, name, compute, device.upper())
    if device == "cuda":
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    _on[device] = stack
    return _Registered()


def _replace(library: torch.library.Library, name: str, compute: Callable, key: str) -> None:
    """`compute`, which takes the operator's arguments by name, as attributes, for aten's operator `name`."""
    own = torch.library.get_kernel(f"aten::{name}", key)
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    names, defaults = [a.name for a in arguments], {a.name: a.default_value for a in arguments}

    def call(keys, *args, **kwargs):
        o = SimpleNamespace(**defaults | dict(zip(names, args, strict=False)) | kwargs)
        reason = _refused(o)
        if reason is None:
            return compute(o)
        warn_once("scaled_dot_product_attention", reason)
        return own.call_boxed(keys, *args, **kwargs)

    # A kernel of Python, as FlashAttention-4 has them, is replaced too.
    library.impl(name, call, key, with_keyset=True, allow_override=True)


def _refused(o: SimpleNamespace) -> str | None:
    """The same for the forward and the backward pass of a call, whose results fit no other's."""
    if getattr(o, "return_debug_mask", False):
        return "return_debug_mask is True"
    if (scale := o.scale) is not None and scale <= 0:
        return f"scale is {scale}"
    return refusal(o.query, o.key, o.value, o.dropout_p)


# ------------------------------------------------------------------------------------------------ on [B, N, H, d]
def _options(o: SimpleNamespace, seed: Tensor | None) -> dict:
    return {"causal": o.is_causal, "softmax_scale": o.scale, "dropout_p": o.dropout_p, "dropout_seed": seed}


def _forward(o: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse` and the seed of dropout, int64 `[2]`, anything without."""
    seed = torch.empty(2, dtype=torch.int64, device=q.device)
    options = given(**options, **_options(o, seed.random_() if o.dropout_p else None))
    out, lse = attend(q, k, v, return_lse=True, **options)
    return out, lse, seed


def _backward(o: SimpleNamespace, dout, q, k, v, out, lse: Tensor, seed: Tensor, **options) -> tuple[Tensor, ...]:
    options |= given(**_options(o, seed if o.dropout_p else None))
    return attend_backward(dout, q, k, v, out, lse, **options)


def _heads_second(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, N, d]` as views `[B, N, H, d]`, and back."""
    return [x.transpose(1, 2) for x in tensors]


def _laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides that PyTorch promises a compiler for a result of the shape of `like`."""
    result = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == result.stride() else result.copy_(x)


# ------------------------------------------------------------------------------------------------ flash attention
def _flash(o: SimpleNamespace) -> tuple:
    out, lse, seed = _forward(o, *_heads_second(o.query, o.key, o.value))
    out = _laid_out_like(out.transpose(1, 2), o.query)
    unused, no_mask = seed.new_empty((), dtype=torch.uint64), o.query.new_empty(0)
    return out, lse, None, None, o.query.shape[2], o.key.shape[2], seed.view(torch.uint64), unused, no_mask


def _flash_backward(o: SimpleNamespace) -> tuple[Tensor, ...]:
    tensors = o.query, o.key, o.value
    gradients = _backward(o, *_heads_second(o.grad_out, *tensors, o.out), o.logsumexp, o.philox_seed.view(torch.int64))
    return tuple(_laid_out_like(x, like) for x, like in zip(_heads_second(*gradients), tensors, strict=True))


def _on_cpu(o: SimpleNamespace) -> tuple[Tensor, Tensor]:
    out, lse, _ = _forward(o, *_heads_second(o.query, o.key, o.value), bias=_of_keys(o))
    return _laid_out_like(out.transpose(1, 2), o.query), lse.mT.contiguous().mT


def _on_cpu_backward(o: SimpleNamespace) -> tuple[Tensor, ...]:
    tensors = _heads_second(o.grad_out, o.query, o.key, o.value, o.out)
    no_seed = o.query.new_empty(0)
    options = {"bias": _of_keys(o), "bias_grad": False} if o.attn_mask is not None else {}
    gradients = _backward(o, *tensors, o.logsumexp.contiguous(), no_seed, **options)
    return tuple(_heads_second(*(x.contiguous() for x in gradients)))  # padding that was cut off is not left in strides


def _of_keys(o: SimpleNamespace) -> Tensor | None:
    """`attn_mask`, which PyTorch's operator broadcasts: in four dimensions, the last of them the keys."""
    if (mask := o.attn_mask) is None:
        return None
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, o.key.shape[2])


def _of_sequences(o: SimpleNamespace) -> dict:
    """Rows aligned at the end, as flash-attn has them, and packed sequences."""
    left, right = (-1 if side is None else side for side in (o.window_size_left, o.window_size_right))
    options = {"start_pos": "end", "window": (left, right)}
    if o.cum_seq_q is not None:
        options |= {"cu_seqlens_q": o.cum_seq_q, "max_seqlen_q": o.max_q}
        if getattr(o, "block_table", None) is None:
            options |= {"cu_seqlens_k": o.cum_seq_k, "max_seqlen_k": o.max_k}
    return options


def _sequences(o: SimpleNamespace) -> tuple:
    own = {name: getattr(o, name, None) for name in ("seqused_k", "alibi_slopes", "block_table", "num_splits")}
    out, lse, seed = _forward(o, o.query, o.key, o.value, **_of_sequences(o), **own)
    return out, lse, seed.view(torch.uint64), seed.new_empty((), dtype=torch.uint64), o.query.new_empty(0)


def _sequences_into(o: SimpleNamespace) -> Tensor:
    out, lse, *_ = _sequences(o)
    o.out.copy_(out)
    return lse


def _sequences_backward(o: SimpleNamespace) -> tuple[Tensor, ...]:
    tensors = o.grad_out, o.query, o.key, o.value, o.out
    return _backward(o, *tensors, o.logsumexp, o.rng_state.view(torch.int64), **_of_sequences(o))


# ------------------------------------------------------------------------------------------------ memory-efficient
_ROWS_OF_LSE, _COLUMNS_OF_DBIAS = 32, 16  # that its results have a multiple of


def _shared(bias: Tensor | None) -> Tensor | None:
    """A bias that was expanded, as it was before: the fewer bytes are read."""
    if bias is None:
        return None
    for dim in range(bias.dim() - 1):
        bias = bias if bias.stride(dim) else bias.narrow(dim, 0, 1)
    return bias


def _efficient(o: SimpleNamespace) -> tuple:
    out, lse, seed = _forward(o, *_heads_second(o.query, o.key, o.value), bias=_shared(o.attn_bias))
    lse = pad(lse, (0, -lse.shape[-1] % _ROWS_OF_LSE)) if o.compute_log_sumexp else lse[..., :0]
    # Inductor wants results at multiples of 16 bytes.
    return out.transpose(1, 2), lse, *(x.clone() for x in seed.unbind())


def _efficient_backward(o: SimpleNamespace) -> tuple:
    """The gradient of a bias has the shape that the bias was expanded to: PyTorch sums it."""
    tensors = _heads_second(o.grad_out_, o.query, o.key, o.value, o.out)
    lse = o.logsumexp[..., : o.query.shape[2]].contiguous()
    needs_dbias = o.attn_bias is not None and o.grad_input_mask[3]
    options = {}
    if o.attn_bias is not None:
        options = {"bias": o.attn_bias if needs_dbias else _shared(o.attn_bias), "bias_grad": needs_dbias}
    seed = torch.stack([o.philox_seed, o.philox_offset]) if o.dropout_p else o.philox_seed
    dq, dk, dv, *dbias = _backward(o, *tensors, lse, seed, **options)
    if not dbias:
        return *_heads_second(dq, dk, dv), None
    *rows, N_kv = o.attn_bias.shape
    aligned = dbias[0].new_empty(*rows, -(-N_kv // _COLUMNS_OF_DBIAS) * _COLUMNS_OF_DBIAS)
    return *_heads_second(dq, dk, dv), aligned[..., :N_kv].copy_(dbias[0])


_OPERATORS = {
    "cuda": {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_flash_attention_forward": _sequences,
        "_flash_attention_forward_no_dropout_inplace": _sequences_into,
        "_flash_attention_backward": _sequences_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    },
    "cpu": {
        "_scaled_dot_product_flash_attention_for_cpu": _on_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _on_cpu_backward,
    },
}
_REGISTRY = hasattr(torch.nn.attention, "restore_flash_attention_impl")  # 2.10 has half of it
if _REGISTRY:
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_turn_on)

"""What `fmha` takes of a call that was not made for it. Used by flash-attn's names, the SDPA switch, `cutlass_ext.nn`
and the adapters; all but the first hand on to PyTorch what it does not take, and say so once."""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import autograd
from ._ops import name_of
from .backward import fmha_backward
from .interface import fmha

_DTYPES = torch.float32, torch.float16, torch.bfloat16
_LARGEST_HEAD_DIM = 256
_warned: set[str] = set()


def given(**options) -> dict:
    """The options that ask for something: neither None, nor False, nor 0, which are what `fmha` has by default, but
    for the longest of packed sequences."""

    def asks(name: str, value) -> bool:
        is_zero = type(value) in (int, float) and value == 0 and not name.startswith("max_seqlen")
        return value is not None and value is not False and not is_zero

    return {name: value for name, value in options.items() if asks(name, value)}


def refusal(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> str | None:
    """Why `fmha` would refuse such a call, or None where it would not.

    The one place that knows. It reads nothing but shapes and dtypes, so a forward and a backward pass come to the same
    answer, and torch.compile traces it. Head dims and strides that `readable` mends are no reason.
    """
    if dropout_p == 1:
        return "dropout_p is 1"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES and not (x.dtype == torch.float64 and x.device.type == "cpu"):
            return f"{name} has dtype {name_of(x.dtype)}"
        if x.dtype != q.dtype:
            return f"{name} has dtype {name_of(x.dtype)} and q {name_of(q.dtype)}"
        if not 0 < x.shape[-1] <= _LARGEST_HEAD_DIM:
            return f"{name} has head_dim {x.shape[-1]}, which is not from 1 to {_LARGEST_HEAD_DIM}"
    return None


def warn_once(who: str, reason: str) -> None:
    """Says, the first time, that PyTorch computes what `who` was asked for, and why."""
    if torch.compiler.is_compiling():
        return
    text = f"{who}: PyTorch's own attention computes this call: {reason}"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def readable(x: Tensor) -> Tensor:
    """`x` as `fmha` reads it: a head dim that is no multiple of 8 (4 in more than 16 bits) is padded with zeros, and a
    last dimension that is not contiguous copied."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested or x.dim() == 0:
        return x  # which the operator refuses by its name
    d = x.shape[-1]
    if d % 8:
        step = 8 if x.element_size() == 2 or autograd.autocast_is_on(x) else 4
        x = pad(x, (0, -d % step)) if d % step else x  # which keeps the order of strides
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, out: Tensor | None = None, **options
):
    """`fmha` of any head dims up to 256, and of any strides."""
    strided = all(isinstance(x, Tensor) and not x.is_nested for x in (q, k))
    alike = strided and q.shape[-1:] == k.shape[-1:]
    if strided and not alike and q.dim() > 0 and k.dim() > 0:
        raise ValueError(f"k: has head_dim {k.shape[-1]} and q has {q.shape[-1]}; they must be equal")
    for name, x in (("q", q), ("v", v)) if alike and isinstance(v, Tensor) else ():
        if x.dim() > 0 and x.shape[-1] > _LARGEST_HEAD_DIM:  # padding would make another number of it
            raise ValueError(f"{name}: has head_dim {x.shape[-1]}; expected one from 1 to {_LARGEST_HEAD_DIM}")
    tensors = (readable(q), readable(k), readable(v)) if alike else (q, k, v)  # padding would hide what is not
    if softmax_scale is None and tensors[0] is not q:
        softmax_scale = q.shape[-1] ** -0.5
    wide = out if tensors[2] is v else readable(out)  # as the result of such a v is
    results = fmha(*tensors, softmax_scale=softmax_scale, out=wide, **options)
    if tensors[2] is v:
        return results
    first = (results if isinstance(results, Tensor) else results[0])[..., : v.shape[-1]]
    if out is not None:
        first = out if wide is out else out.copy_(first)
    return first if isinstance(results, Tensor) else (first, results[1])


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, softmax_scale: float | None = None,
    **options,
):  # fmt: skip
    """`fmha_backward` of what `attend` gave."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5  # not that of a padded head dim
    tensors = [readable(x) for x in (dout, q, k, v, out)]
    dq, dk, dv, *more = fmha_backward(*tensors, lse, softmax_scale=softmax_scale, **options)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], *more

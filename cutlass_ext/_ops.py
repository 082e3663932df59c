"""Loads the compiled operators `torch.ops.cutlass_ext.*` and adds what they need from Python: shapes for tracing,
the CPU implementation, and the exceptions that a failed check stands for. Used by `interface.py`.
"""

import builtins
import ctypes
import re
import warnings
from pathlib import Path

import torch
from torch import Tensor

from .torch_backend import attention, attention_varlen

try:
    import cutlass_ext._C as _C  # importing it registers the operators; `from . import` would hide why it fails
except ImportError as error:
    raise ImportError(
        f"cutlass_ext: its compiled part, cutlass_ext._C, cannot be loaded ({error}). "
        "Build it for this Python and this PyTorch: run `pip install .` in the repository "
        "(or `pip install --no-build-isolation -e .` to work in it)."
    ) from error


def _warn_of_old_driver() -> None:
    """Says at import, not at the first launch, that the driver is too old. Does not initialise CUDA."""
    if torch.version.cuda is None:
        return
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")  # the driver, or the newer one of NVIDIA's compatibility package
    except OSError:
        return  # no driver, no GPU
    needed = getattr(_C, "CUDART_VERSION", 13000) // 1000  # the major version of the runtime inside the binary
    version = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value // 1000 >= needed:
        return
    try:
        kernel_module = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        kernel_module = None
    number = " (580 or newer)" if needed == 13 else ""
    installed = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if kernel_module:
        installed = f"{kernel_module[1]} ({installed})"
    warnings.warn(
        f"cutlass_ext needs an NVIDIA driver for CUDA {needed}{number}; installed is {installed}. "
        "Calls with CUDA tensors will fail. Update the driver, or build cutlass_ext from source with a CUDA 12 "
        "toolkit, 12.8 or newer.",
        RuntimeWarning,
        stacklevel=2,
    )


_warn_of_old_driver()

_ops = torch.ops.cutlass_ext
forward, explain = _ops.fmha_forward.default, _ops.fmha_explain.default
varlen, varlen_explain = _ops.fmha_varlen.default, _ops.fmha_varlen_explain.default

# backend="torch" is an operator of its own: for CUDA tensors fmha_forward is the compiled one, and torch.compile should
# see one opaque operator here too, not a loop over blocks whose number depends on the shapes.
_library = torch.library.Library("cutlass_ext", "FRAGMENT")
_library.define("fmha_torch" + str(forward._schema).removeprefix("cutlass_ext::fmha_forward"))
_library.define("fmha_varlen_torch" + str(varlen._schema).removeprefix("cutlass_ext::fmha_varlen"))
forward_torch, varlen_torch = _ops.fmha_torch.default, _ops.fmha_varlen_torch.default


# What the operators' last arguments, from start_positions on, are where a call leaves them out.
PLAIN = tuple(argument.default_value for argument in forward._schema.arguments if argument.has_default_value())


def _checked_attention(q, k, v, causal, start_pos, return_lse, *rest) -> list[Tensor]:
    rest += PLAIN[len(rest) :]  # PyTorch leaves defaults out
    _ops.fmha_check(q, k, v, causal, start_pos, return_lse, *rest)
    *features, _num_splits, _backend = rest
    return list(attention(q, k, v, causal, start_pos, *features)[: 1 + return_lse])


def _checked_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal, start_pos, return_lse, *rest) -> list[Tensor]:
    rest += PLAIN[len(rest) :]
    _ops.fmha_varlen_check(q, k, v, cu_q, cu_k, max_q, max_k, causal, start_pos, return_lse, *rest)
    *features, _num_splits, _backend = rest
    return list(attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal, start_pos, *features)[: 1 + return_lse])


def _output_shapes(q: Tensor, k: Tensor, v: Tensor, _causal, _start_pos, return_lse, *_) -> list[Tensor]:
    B, N_q, H_q, _d = q.shape
    results = [q.new_empty(B, N_q, H_q, v.shape[3]), q.new_empty(B, H_q, N_q, dtype=torch.float32)]
    return results[: 1 + return_lse]


def _output_shapes_varlen(
    q: Tensor, k: Tensor, v: Tensor, _cu_q, _cu_k, _max_q, _max_k, _causal, _start_pos, return_lse, *_
) -> list[Tensor]:
    total_q, H_q, _d = q.shape
    results = [q.new_empty(total_q, H_q, v.shape[2]), q.new_empty(H_q, total_q, dtype=torch.float32)]
    return results[: 1 + return_lse]


for _names, _on_cpu, _shapes in (
    (("fmha_forward", "fmha_torch"), _checked_attention, _output_shapes),
    (("fmha_varlen", "fmha_varlen_torch"), _checked_attention_varlen, _output_shapes_varlen),
):
    for _name in _names:
        _library.impl(_name, _on_cpu, "CPU")
        torch.library.register_fake(f"cutlass_ext::{_name}", _shapes, lib=_library)
    _library.impl(_names[1], _on_cpu, "CUDA")


_FAILED_CHECK = re.compile(r"cutlass_ext\.(ValueError|TypeError|NotImplementedError|RuntimeError): ([^\n]*)")
_WRONG_TYPE = re.compile(r"Expected a value of type '(.*?)' for argument '(\w+)' but instead found type '(.*?)'")


def translated(error: RuntimeError) -> Exception:
    """The exception that a RuntimeError of an operator stands for: a failed check, a wrong type, or itself."""
    message = str(error)
    if found := _FAILED_CHECK.search(message):
        name, text = found.groups()
        return getattr(builtins, name)(text)
    if found := _WRONG_TYPE.search(message):
        expected, argument, came = found.groups()
        return TypeError(f"{argument}: is of type {came}; expected {expected}")
    return error


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same exception for a caller who knows the arguments by other names than `fmha`'s."""
    return type(error)(re.sub(r"\b(" + "|".join(names) + r")\b", lambda name: names[name[1]], str(error)))

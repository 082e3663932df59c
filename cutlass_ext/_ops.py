"""Loads the compiled operators `torch.ops.cutlass_ext.*` and adds what they need from Python: the implementation for
CPU tensors, shapes for tracing, and the exceptions that a failed check stands for. Used by the modules that call them.
"""

import builtins
import ctypes
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .torch_backend import empty_results_of

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

library = torch.library.Library("cutlass_ext", "FRAGMENT")
_names: dict = {}  # of an operator's arguments: torch.compile does not read schemas
_defaults: dict = {}  # of an operator's arguments, by name: reading a schema takes 20 us
_default_values: dict = {}  # of those that may be left out, in their order


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU).add(torch._C.DispatchKey.AutocastCUDA)

Tensors = tuple[Tensor, ...]

func_is_active = torch._C._are_functorch_transforms_active  # whether torch.func is at work


def requires_grad(x: object) -> bool:
    """Whether gradients of `x` are wanted. Inside torch.vmap a tensor says no where the one outside says yes."""
    if func_is_active() and not torch.compiler.is_compiling():
        while isinstance(x, Tensor) and not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
    return getattr(x, "requires_grad", False)


@torch.library.register_fake("cutlass_ext::pack_mask", lib=library)
def _shape_of_packed(mask: Tensor) -> Tensor:
    batch, heads, rows, keys = mask.shape
    return mask.new_empty((batch, heads, rows + -(-rows // 64), -(-keys // 128) * 4), dtype=torch.int32)


def lse_if_asked(compute: Callable[[SimpleNamespace], Tensors]) -> Callable[[SimpleNamespace], Tensors]:
    """`compute`, which gives `out` and `lse`, with an empty tensor for an lse that nobody asked for."""

    def call(o: SimpleNamespace) -> Tensors:
        out, lse = compute(o)
        return out, lse if o.return_lse else lse.new_empty(0)

    return call


def _written_to_out(compute: Callable[[SimpleNamespace], Tensors]) -> Callable[[SimpleNamespace], Tensor]:
    """`compute`, which gives `out` and `lse`, for an operator that has `out` among its arguments."""

    def call(o: SimpleNamespace) -> Tensor:
        out, lse = compute(o)
        o.out.copy_(out)
        return lse

    return call


def register(
    name: str,
    compute: Callable[[SimpleNamespace], Tensors],
    shapes: Callable[[SimpleNamespace], Tensors] = empty_results_of,
) -> tuple:
    """The compiled operator `name`, with an implementation for CPU tensors and shapes for tracing, and `NAME_torch`.

    The second runs `compute` on any device, for backend="torch". It is an operator of its own: for CUDA tensors the
    first is the compiled one, and torch.compile should see one opaque operator here too, not a loop over blocks whose
    number depends on the shapes. `compute` and `shapes` take the operator's arguments by name, as attributes. Both give
    `out` first, of an operator too that writes it to an argument.
    """
    operator = getattr(torch.ops.cutlass_ext, name).default
    check = getattr(torch.ops.cutlass_ext, re.sub("_append|_with_grad", "", name) + "_check").default
    schema = operator._schema
    if name.endswith("_out"):
        compute, all_shapes = _written_to_out(compute), shapes
        shapes = lambda o: all_shapes(o)[1]  # noqa: E731

    @torch.no_grad()
    def on_any_device(*arguments) -> Tensors:
        check(*arguments)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # or products of float32 are taken in 16 bits
            return compute(SimpleNamespace(**named(operator, arguments)))

    def traced(*arguments) -> Tensors:
        by_name = named(operator, arguments)
        _check_on_one_device(by_name)
        return shapes(SimpleNamespace(**by_name))

    library.define(f"{name}_torch" + str(schema).removeprefix(schema.name))
    library.impl(name, on_any_device, "CPU")
    for device in ("CPU", "CUDA"):
        library.impl(f"{name}_torch", on_any_device, device)
    for registered in (name, f"{name}_torch"):
        torch.library.register_fake(f"cutlass_ext::{registered}", traced, lib=library)
    both = operator, getattr(torch.ops.cutlass_ext, f"{name}_torch").default
    _names.update(dict.fromkeys(both, tuple(argument.name for argument in schema.arguments)))
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    _defaults.update(dict.fromkeys(both, defaults))
    optional = tuple(argument.default_value for argument in schema.arguments if argument.has_default_value())
    _default_values.update(dict.fromkeys(both, optional))
    return both


def _check_on_one_device(arguments: dict) -> None:
    """Raises as a failed check does. One tensor on the device "meta" brings a call here, where nothing is computed,
    from whatever device the others are on."""
    tensors = {name: argument for name, argument in arguments.items() if isinstance(argument, Tensor)}
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if "meta" in (tensor.device.type, tensors[first].device.type) and tensor.device != tensors[first].device:
            raise RuntimeError(f"cutlass_ext.ValueError: {name}: is on another device than {first}; move it there")


def named(operator, arguments: tuple) -> dict:
    """An operator's arguments by their names; PyTorch leaves out those at the end that have their defaults."""
    defaults = _defaults[operator]
    return defaults | dict(zip(defaults, arguments, strict=False))


def without_defaults(operator, arguments: tuple) -> tuple:
    """The arguments but for those at the end that have their defaults: PyTorch takes 0.3 us for each."""
    defaults = _default_values[operator]
    end, required = len(arguments), len(_names[operator]) - len(defaults)
    for argument, default in zip(arguments[: required - 1 : -1], defaults[end - required - 1 :: -1], strict=True):
        if type(argument) is not type(default) or argument != default:
            break
        end -= 1
    return arguments[:end]


def run(operator, arguments: tuple, names: dict[str, str]) -> Tensors:
    """Calls an operator; `names` are what the caller calls arguments that have other names there."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(operator, arguments, names)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        refused = _refusal(error, operator, arguments)
        if refused is None:
            raise
        raise _renamed(refused, names) from None


def _refuse_tangents(operator, arguments: tuple, names: dict[str, str]) -> None:
    """Raises if an argument has a tangent (`torch.func.jvp`, `jacfwd`), whose result's would be 0 without a word."""
    for argument, value in zip(operator._schema.arguments, arguments, strict=False):
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and forward_ad.unpack_dual(value).tangent is not None
        ):
            error = NotImplementedError(
                f"{argument.name}: has a tangent, and attention has no derivatives of forward mode; "
                "use those of reverse mode, as torch.func.vjp and jacrev do"
            )
            raise _renamed(error, names)


def refuse_grad(operator, arguments: tuple, of: str) -> None:
    """Raises if an argument requires grad: without a backward pass `of` this the result would be detached silently."""
    if torch.is_grad_enabled():
        for name, value in zip(_names[operator], arguments, strict=False):
            if value is not None and requires_grad(value):
                raise NotImplementedError(
                    f"{name}: requires grad, and there is no backward pass of {of}; "
                    "call under torch.no_grad() or torch.inference_mode(), or pass detached tensors"
                )


def register_autograd(operator, backward: Callable, setup_context: Callable | None = None) -> None:
    """The gradients of an operator that `register` gave, as `torch.library.register_autograd` takes them."""
    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=library)


def position(operator, name: str) -> int:
    """Where the argument `name` of an operator stands."""
    return _names[operator].index(name)


_FAILED_CHECK = re.compile(r"cutlass_ext\.(ValueError|TypeError|NotImplementedError|RuntimeError): ([^\n]*)")
_DTYPES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"}
_DTYPES |= {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"}
_DTYPES |= {"ComplexHalf": "complex32", "ComplexFloat": "complex64", "ComplexDouble": "complex128"}
_DTYPES |= {name: name.lower() for name in ("UInt16", "UInt32", "UInt64", "Float8_e4m3fn", "Float8_e5m2")}
_DTYPE = re.compile(rf"\b({'|'.join(_DTYPES)})\b")  # C++'s names
_NOT_VMAPPED = re.compile(r"Batching rule not implemented for cutlass_ext::(\w+_(?:out|append)\w*)")
_WRONG_TYPE = re.compile(r"Expected a value of type '(.*?)' for argument '(\w+)' but instead found type '(.*?)'")


def _refusal(error: RuntimeError, operator, arguments: tuple) -> Exception | None:
    """What a RuntimeError of an operator says of the arguments, a wrong type or a failed check, as what it is."""
    message = str(error)
    for argument, value in zip(operator._schema.arguments, arguments, strict=False):
        if str(argument.type) == "Tensor" and not isinstance(value, Tensor):  # the operators take None for a tensor
            return TypeError(f"{argument.name}: is of type {type(value).__name__}; expected a tensor")
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return TypeError(f"{argument.name}: is a {layout} tensor; expected a dense one, with strides")
    if found := _FAILED_CHECK.search(message):
        name, text = found.groups()
        return getattr(builtins, name)(_DTYPE.sub(lambda dtype: _DTYPES[dtype[0]], text))
    if found := _NOT_VMAPPED.search(message):
        written = "out" if "_out" in found[1] else "k_cache"
        return NotImplementedError(f"{written}: is written to, which torch.vmap does not take; call once for each")
    if found := _WRONG_TYPE.search(message):
        expected, name, came = found.groups()
        or_none = " or None" if expected.startswith("Optional[") else ""
        expected = expected.removeprefix("Optional[").removesuffix("]")
        if expected == came == "int":  # which it has no room for
            return ValueError(f"{name}: is an int of more than 64 bits")
        expected = {"int": "an int of 64 bits", "Tensor": "a tensor", "float": "a number"}.get(expected, expected)
        return TypeError(f"{name}: is of type {came}; expected {expected}{or_none}")
    return None


def _renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same exception for a caller who knows the arguments by other names."""
    if not names:
        return error
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda name: names[name[1]], str(error))
    # Several arguments that are one there ("k and v" of a packed kv) are named once.
    return type(error)(re.sub(rf"\b({'|'.join(names.values())})((, | and )\1\b)+", r"\1", text))


def name_of(dtype: torch.dtype) -> str:
    """As errors say it: float16."""
    return str(dtype).removeprefix("torch.")


Function = TypeVar("Function", bound=Callable)


def renaming(**names: str) -> Callable[[Function], Function]:
    """For a function whose arguments have other names than those of the function that it calls, which errors name."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as error:
                # A keyword that the caller gave under another function's name is not to be blamed on his own.
                raise _renamed(error, {name: own for name, own in names.items() if name not in kwargs}) from None

        return call

    return decorate

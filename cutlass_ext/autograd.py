"""The operators that compute attention and its gradients, and how autograd gets from the one to the other.

`fmha` calls `forward` where nothing requires grad, and `with_grad` where something does: an operator that autograd
knows, for torch.compile to trace, or a `torch.autograd.Function` around `forward`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import torch_backend
from ._ops import Tensors, func_is_active, lse_if_asked, position, register, register_autograd, run

forward, forward_torch = register("fmha", lse_if_asked(torch_backend.fmha))
forward_out, forward_out_torch = register("fmha_out", lse_if_asked(torch_backend.fmha))
with_grad, with_grad_torch = register("fmha_with_grad", lse_if_asked(torch_backend.fmha))
backward, backward_torch = register("fmha_backward", torch_backend.fmha_backward, torch_backend.empty_gradients)

_DETERMINISTIC, _OUT_DTYPE = (position(with_grad, name) for name in ("deterministic", "out_dtype"))
_DEFAULTS = [argument.default_value for argument in with_grad._schema.arguments]
# Where the arguments stand whose gradients are the results dq, dk, ... of the backward operator.
_DIFFERENTIATED = [position(with_grad, gradient.name[1:]) for gradient in backward._schema.returns]
_BIAS = _DIFFERENTIATED[-1]


def autocast(arguments: tuple, device: str) -> tuple:
    """The arguments of an operator with q, k and v in autocast's dtype for `device`, as PyTorch casts those of its own
    attention; slopes and sinks stay float32."""
    dtype = torch.get_autocast_dtype(device)
    return *(_cast(x, dtype, device) for x in arguments[:3]), *arguments[3:]


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast is at work where `x` lies."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def cast_before(function: Callable) -> Callable:
    """`function` of q, k and v, which under autocast are cast once, before anything is sent or merged; the rest runs
    without autocast."""

    @functools.wraps(function)
    def call(q, k, v, **options):
        if not isinstance(q, Tensor) or not autocast_is_on(q):
            return function(q, k, v, **options)
        q, k, v = autocast((q, k, v), q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, k, v, **options)

    return call


def _cast(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type != device:
        return x
    cast = x.to(dtype)
    # An expanded x may come back with its dimensions in another order, and rows that no kernel reads.
    return cast.contiguous() if x.stride(-1) == 1 != cast.stride(-1) else cast


def _function_of(operator, plain, backward: Callable, setup_context: Callable | None) -> Callable:
    """The same gradients for eager mode, and for torch.func, which does not take those that `torch.library` registers.

    A call through those costs the host 0.33 ms more than one without gradients, this one 0.12: PyTorch converts all
    arguments twice there, and reads the schema for the defaults of those that are left out. `plain` computes what
    `operator` does.
    """
    arguments_of = operator._schema.arguments
    defaults = tuple(argument.default_value for argument in arguments_of)
    tensors = [i for i, argument in enumerate(arguments_of) if "Tensor" in str(argument.type)]

    class Eager(torch.autograd.Function):
        """With `setup_context` in `forward`: where they are two, PyTorch reads the signature in every call. Of
        `arguments`, without those at the end that have their defaults, the tensors stand beside them, which are all
        that PyTorch has to look at: 10 us less."""

        @staticmethod
        def forward(ctx, arguments, *_):
            output = plain(*arguments)
            if setup_context:
                setup_context(ctx, arguments, output)
                ctx.bias_at = 1 + tensors.index(_BIAS)  # 1: the first input is `arguments` itself
            return output

        @staticmethod
        def backward(ctx, *gradients):
            results = backward(ctx, *gradients)
            return None, *(results[i] for i in tensors if i < len(results))

    class Function(torch.autograd.Function):
        generate_vmap_rule = True  # of the operators' own

        @staticmethod
        def forward(*arguments):
            return plain(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            if setup_context:
                setup_context(ctx, inputs, output)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(
                "fmha: there are no derivatives of forward mode, as torch.func.hessian wants them"
            )

    def call(*arguments):
        if operator in (with_grad, with_grad_torch) and autocast_is_on(arguments[0]):
            arguments = autocast(arguments, arguments[0].device.type)  # before the inputs are kept for the gradients
        if func_is_active():
            return Function.apply(*arguments, *defaults[len(arguments) :])
        return Eager.apply(arguments, *(arguments[i] for i in tensors if i < len(arguments)))

    Function.backward = staticmethod(backward)
    call._schema = operator._schema  # for the errors of `run`
    return call


def _save(ctx, inputs: tuple, output: Tensors) -> None:
    """Keeps the inputs and results, which are all that the gradients are computed from."""
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    ctx.save_for_backward(*output, *tensors.values())
    ctx.others = list(inputs)
    for i in tensors:
        ctx.others[i] = None
    ctx.tensors, ctx.bias_at = tuple(tensors), _BIAS
    ctx.set_materialize_grads(False)


def _gradients(operator, ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors
    inputs = list(ctx.others)  # without those at the end that have their defaults
    for i, tensor in zip(ctx.tensors, tensors, strict=True):
        inputs[i] = tensor
    if torch.are_deterministic_algorithms_enabled():
        inputs += _DEFAULTS[len(inputs) : _DETERMINISTIC + 1]
        inputs[_DETERMINISTIC] = True
    delta, dout = None, torch.zeros_like(out) if dout is None else dout
    if out.dtype != inputs[0].dtype:  # float32 beside 16 bits, which the kernels take neither of
        inputs[_OUT_DTYPE] = None
        dout = dout.to(inputs[0].dtype)
        delta = (dout * out).masked_fill(out == 0, 0.0).sum(-1).transpose(-1, -2)  # rows without keys take any dout
        delta, out, dlse = (delta if dlse is None else delta - dlse).contiguous(), None, None
    dout = readable_dout(dout)
    dlse = None if dlse is None else dlse.contiguous()
    bias_grad = len(inputs) > _BIAS and inputs[_BIAS] is not None and ctx.needs_input_grad[ctx.bias_at]
    q, k, v, *options = inputs  # the gradients take the same options, in the same order
    arguments = dout, q, k, v, out, lse, delta, dlse, bias_grad, *options
    results = run(differentiable(operator, arguments), arguments, {})
    gradients: list[Tensor | None] = [None] * len(ctx.others)
    for i, gradient in zip(_DIFFERENTIATED, results, strict=True):
        if i < len(gradients) and inputs[i] is not None and (i != _BIAS or bias_grad):
            gradients[i] = gradient
    return tuple(gradients)


def readable_dout(dout: Tensor) -> Tensor:
    """`dout` as the kernels read it: a copy where it is expanded, or its rows are not contiguous or aligned."""
    if dout.is_contiguous():
        return dout
    steps = [dout.stride(i) * dout.element_size() for i in range(dout.dim() - 1) if dout.shape[i] > 1]
    if dout.stride(-1) == 1 and not any(step == 0 or step % 16 for step in steps):
        return dout
    return dout.contiguous()


def _no_second_gradient(ctx, *_) -> None:
    raise NotImplementedError("fmha: there is no double backward; the gradients have no gradients of their own")


def _gradients_by(operator) -> Callable:
    """A function, as compiled autograd wants it."""

    def gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        return _gradients(operator, ctx, dout, dlse)

    return gradients


_functions = {}  # of each operator
for _operator, _plain, _backward, _setup in (
    (with_grad, forward, _gradients_by(backward), _save),
    (with_grad_torch, forward_torch, _gradients_by(backward_torch), _save),
    (backward, backward, _no_second_gradient, None),
    (backward_torch, backward_torch, _no_second_gradient, None),
):
    register_autograd(_operator, _backward, _setup)
    _functions[_operator] = _function_of(_operator, _plain, _backward, _setup)


def _below_autograd(*arguments) -> Tensors:
    """The gradients, where nothing can want gradients of them: autograd's layer of an operator is Python and dear."""
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*arguments)


_below_autograd._schema = backward._schema  # for the errors of `run`


def differentiable(operator, arguments: tuple) -> Callable:
    """The operator as the gradients that are being taken, or will be, know it."""
    if (
        operator is backward
        and not (torch.compiler.is_compiling() or func_is_active())
        and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments))
    ):
        return _below_autograd
    traced = torch.compiler.is_compiling() or operator in (backward, backward_torch)
    return operator if traced and not func_is_active() else _functions[operator]

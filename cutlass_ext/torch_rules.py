"""What PyTorch asks of an operator besides its results: the dtype under autocast, how it is vmapped, its flops.

Importing it tells PyTorch, which is all that the package does with it. What DTensor asks is in `adapters/dtensor.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import autograd, kvcache
from ._ops import library, named

FORWARD = [autograd.forward, autograd.forward_torch, autograd.with_grad, autograd.with_grad_torch]
BACKWARD = [autograd.backward, autograd.backward_torch]
WRITING_OUT = [autograd.forward_out, autograd.forward_out_torch]
CACHE = list(kvcache.OPERATORS)
READING_CACHE = [operator for operator in CACHE if not operator._schema.is_mutable]


# ------------------------------------------------------------------------------------------------ autocast
def _register_autocast(operator, device: str) -> None:
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")

    def call(*arguments):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            arguments = autograd.autocast(arguments, device)
            if operator not in WRITING_OUT or arguments[3].dtype == arguments[0].dtype:
                return operator(*arguments)
            q, k, v, out, *options = arguments
            result = torch.empty_like(out, dtype=q.dtype)
            lse = operator(q, k, v, result, *options)
            out.copy_(result)
            return lse

    library.impl(operator._schema.name.partition("::")[2], call, key.name)


for _operator in (*FORWARD, *WRITING_OUT, torch.ops.cutlass_ext.fmha_explain.default):
    _register_autocast(_operator, "cuda")
    _register_autocast(_operator, "cpu")


# ------------------------------------------------------------------------------------------------ vmap
# Tensors whose first dimension is the sequence, so that what is vmapped over only makes more of them.
_OF_SEQUENCES = {"q", "k", "v", "dout", "out", "lse", "delta", "dlse", "seqused_k", "leftpad_k", "start_positions",
                 "key_starts"}  # fmt: skip


def _read_by_kernels(name: str, x: Tensor) -> Tensor:
    """`x`, whose sequences have been merged: of one sequence a view, of any strides, 0 among them."""
    if name in ("q", "k", "v", "out"):
        return x
    return autograd.readable_dout(x) if name == "dout" else x.contiguous()


def _register_vmap(operator) -> None:
    names = [argument.name for argument in operator._schema.arguments]

    def rule(info, in_dims: tuple, *arguments) -> tuple:
        V, given = info.batch_size, [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
        shared = {"sink"} if operator in FORWARD else set()  # its gradient is a sum over sequences
        shared |= {names[i] for i in given if names[i] == "alibi_slopes" and arguments[i].dim() == 1}
        foldable = all(names[i] in _OF_SEQUENCES or (names[i] in shared and in_dims[i] is None) for i in given)
        arguments = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
        if V == 0:
            raise ValueError("vmap: over a dimension of size 0; expected 1 or more")
        if not foldable:  # packed sequences, pages, a sink of each: one after the other
            calls = [
                operator(*(x if d is None else x[i] for x, d in zip(arguments, in_dims, strict=True))) for i in range(V)
            ]
            return tuple(torch.stack(parts) for parts in zip(*calls, strict=True)), (0,) * len(calls[0])
        for i in given:
            if names[i] not in shared:
                x = arguments[i] if in_dims[i] is not None else arguments[i].expand(V, *arguments[i].shape)
                arguments[i] = _read_by_kernels(names[i], x.flatten(0, 1))
        results, B = operator(*arguments), arguments[0].shape[0] // V
        dims = tuple(0 if x.dim() > 1 else None for x in results)  # what nobody asked for is empty
        return tuple(x if d is None else x.unflatten(0, (V, B)) for x, d in zip(results, dims, strict=True)), dims

    torch.library.register_vmap(operator, rule, lib=library)


for _operator in (*FORWARD, *BACKWARD, *READING_CACHE):
    _register_vmap(_operator)


# ------------------------------------------------------------------------------------------------ flops
def _pairs(o: dict, keys: Tensor) -> int:
    """Query rows times keys, over all sequences and heads, and hidden ones too, as PyTorch counts its own attention.

    Packed sequences are counted by their lengths, for which the host waits; those of a tensor without data, and keys in
    pages, by the longest and by the room that there is.
    """
    q, H_q = o["q"], o["q"].shape[-2]
    ends_q, ends_k, table = (o.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    if table is not None:
        n_k = table.shape[1] * keys.shape[1]
        return H_q * n_k * (q.shape[:-2].numel() if ends_q is None else q.shape[0])
    if ends_q is None:
        return H_q * q.shape[0] * q.shape[1] * keys.shape[1]
    if ends_q.is_meta or isinstance(ends_q, torch._subclasses.FakeTensor):
        return H_q * (ends_q.shape[0] - 1) * o["max_seqlen_q"] * o["max_seqlen_k"]
    return H_q * int((ends_q.diff().long() * ends_k.diff()).sum())


def _register_flops(operators: list, count: Callable[[dict], int]) -> None:
    for operator in operators:

        def formula(*arguments, operator=operator, out_val=None, **kwargs) -> int:
            return count(named(operator, arguments) | kwargs)

        register_flop_formula(operator.overloadpacket, get_raw=True)(formula)


# A product of matrices is two flops a term: S and O forwards; S, dP, dQ, dK and dV backwards.
_register_flops([*FORWARD, *WRITING_OUT], lambda o: 2 * _pairs(o, o["k"]) * (o["k"].shape[-1] + o["v"].shape[-1]))
_register_flops(BACKWARD, lambda o: 2 * _pairs(o, o["k"]) * (3 * o["k"].shape[-1] + 2 * o["v"].shape[-1]))
_register_flops(CACHE, lambda o: 2 * _pairs(o, o["k_cache"]) * (o["k_cache"].shape[-1] + o["v_cache"].shape[-1]))

"""DTensor: how attention is cut up among devices, by heads and by sequences. Users call `register()`."""

import functools
from collections.abc import Callable

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .._ops import named
from ..torch_rules import BACKWARD, FORWARD

_ROWS = {"q", "k", "v", "dout", "out"}  # rows, heads, head dim, after the batch where there is one
_OF_ROWS = {"lse", "delta", "dlse"}  # heads, rows
_OF_SEQUENCES = {"seqused_k", "leftpad_k", "start_positions", "key_starts", "block_table"}
_OF_PAIRS = {"bias", "mask"}  # sequences, heads, rows, keys, of which each may be 1


def register() -> None:
    """Tells DTensor how `fmha` and its gradients may be sharded; once or more often. It imports `torch.distributed`.

        cutlass_ext.adapters.dtensor.register()
        out = cutlass_ext.fmha(q, k, v, causal=True)        # DTensors, Shard(2): heads, or Shard(0): sequences

    Heads (Megatron's tensor parallelism) are cut where every dimension of the mesh divides the KV heads; slopes and
    sinks with them. Sequences are cut with their lengths, start positions and pages' tables; packed ones are not.
    Whatever else comes is redistributed to one of these, or replicated: so are calls with dropout. All tensors of a
    call are DTensors then, slopes, sinks and lengths too. `flash_attn_*` follow; `flash_attn_with_kvcache` does not,
    nor do calls with `out`.

    Source: Megatron-LM (arXiv:1909.08053, section 3).
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    for operator in (*FORWARD, *BACKWARD):
        register_sharding(operator)(functools.partial(_shardings, operator))
        # What is remembered of a call has to depend on its options, by which the shapes of results go.
        propagator.op_to_schema_info[operator].static_argnum = 0


def _shardings(operator, *arguments) -> list[tuple[list, list]]:
    """The ways of one dimension of a mesh, each with the placements of the results and of the arguments."""
    o = named(operator, arguments)
    names = [argument.name for argument in operator._schema.arguments][: len(arguments)]
    shapes = {name: x.tensor_meta.shape for name, x in o.items() if hasattr(x, "tensor_meta")}
    mesh, packed = o["q"].mesh, o["cu_seqlens_q"] is not None
    ways: list[Callable[[str], Placement]] = [lambda name: Replicate()]
    if not o.get("dropout_p"):  # which is drawn by the number of a head and of a sequence
        if all(shapes["k"][-2] % mesh.size(dim) == 0 for dim in range(mesh.ndim)):
            ways.append(lambda name: _by_heads(name, shapes.get(name), packed))
        if not packed:
            ways.append(lambda name: _by_sequences(name, shapes.get(name), o["block_table"] is not None))

    def result(name: str, way: Callable[[str], Placement]) -> Placement:
        if name == "out" or (name == "lse" and o["return_lse"]):
            return way(name)
        of = name[1:]
        if of not in shapes:  # what nobody asked for is empty
            return Replicate()
        is_share = way is not ways[0] and way(of).is_replicate()  # of a gradient: all devices have one
        return Partial() if is_share else way(of)

    return [
        ([result(r.name, way) for r in operator._schema.returns], [way(n) if n in shapes else None for n in names])
        for way in ways
    ]


def _by_heads(name: str, shape: tuple[int, ...] | None, packed: bool) -> Placement:
    if name in _ROWS:
        return Shard(1 if packed else 2)
    if name in _OF_ROWS:
        return Shard(0 if packed else 1)
    if name in ("sink", "alibi_slopes"):
        return Shard(len(shape) - 1)
    return Shard(1) if name in _OF_PAIRS and shape[1] > 1 else Replicate()


def _by_sequences(name: str, shape: tuple[int, ...] | None, paged: bool) -> Placement:
    if paged and name in ("k", "v"):
        return Replicate()
    each = name in _ROWS | _OF_ROWS | _OF_SEQUENCES or (name == "alibi_slopes" and len(shape) == 2)
    return Shard(0) if each or (name in _OF_PAIRS and shape[0] > 1) else Replicate()

"""Groups of ranks, and whether all of a group make the same call: found out before any of them waits for data."""

import pickle
import zlib
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
# To one tensor; PyTorch 2.13 has given it another name.
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_on_host: WeakKeyDictionary = WeakKeyDictionary()  # of each group, gloo between the hosts of its ranks


def group_of(group: object) -> dist.ProcessGroup:
    """The argument `group`: None for all ranks, a group, or a DeviceMesh of one dimension."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: torch.distributed is not initialised; call torch.distributed.init_process_group()")
    if group is None:
        return dist.group.WORLD
    group = group.get_group() if hasattr(group, "get_group") else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: is of type {type(group).__name__}; expected a process group, a DeviceMesh or None")
    return group


def agreed(group: dist.ProcessGroup, prepare: Callable[[], tuple[Result, dict[str, object]]]) -> Result:
    """What `prepare` gives on this rank, once every rank has got as far, with the same values of the arguments.

    `prepare` raises what is wrong with a rank's own arguments; else it returns its result, and the arguments that have
    to be equal on all ranks, by name. Two numbers a rank go round on the host. The device does not wait, and nothing is
    sent of q, k and v before. Whatever is wrong raises on all ranks, with the number of the rank and the argument.
    """
    error, result, values = None, None, {}
    try:
        result, values = prepare()
    except (TypeError, ValueError, NotImplementedError) as refused:
        error = refused
    except Exception as unforeseen:  # the others must not wait for this rank, whatever it is
        error = RuntimeError(f"{type(unforeseen).__name__}: {unforeseen}")
    size, rank = group.size(), group.rank()
    texts = {name: str(value) for name, value in values.items()}
    mine = [int(error is not None), zlib.crc32(repr(texts).encode())]
    try:
        if _of_all_ranks(group, torch.tensor(mine)) == [[0, mine[1]]] * size:
            return result
        words = pickle.dumps((error, texts))
        sizes = [n for (n,) in _of_all_ranks(group, torch.tensor([len(words)]))]
        padded = torch.frombuffer(bytearray(words.ljust(max(sizes))), dtype=torch.uint8)
        found = [pickle.loads(bytes(x[:n])) for x, n in zip(_of_all_ranks(group, padded), sizes, strict=True)]
    except RuntimeError as failed:
        raise RuntimeError(
            f"rank {rank} of {size}: a rank is gone, or did not make this call: its arguments did not come ({failed})"
        ) from failed
    for of_rank, (its_error, _) in enumerate(found):
        if its_error is not None:
            raise type(its_error)(f"{its_error} (rank {of_rank} of {size})") from error
    for of_rank, (_, its_texts) in enumerate(found):
        for name, text in found[0][1].items():
            if its_texts[name] != text:
                raise ValueError(
                    f"{name}: is {text} on rank 0 and {its_texts[name]} on rank {of_rank}; "
                    f"it has to be the same on all {size} ranks"
                )
    raise AssertionError("checksums differ, and arguments do not")


def _of_all_ranks(group: dist.ProcessGroup, mine: Tensor) -> list[list[int]]:
    """A few numbers of each rank, by way of the hosts."""
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    _between_hosts(group).allgather([theirs], [mine]).wait()
    return [x.tolist() for x in theirs]


def _between_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """`group` itself where it takes CPU tensors, or gloo beside it, with its timeout.

    Not by `new_group`: that wants all ranks there are or, for the ranks of the group alone, names it by how many groups
    a rank is in. Where that differs among ranks they would wait for each other's names; here the name is the group's.
    """
    config = dist.get_backend_config(group)
    if "cpu:" in config:
        return group
    if group not in _on_host:
        store = dist.PrefixStore("cutlass_ext", group.get_group_store())
        timeout = group._get_backend(torch.device(config.partition(":")[0])).options._timeout
        _on_host[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
    return _on_host[group]

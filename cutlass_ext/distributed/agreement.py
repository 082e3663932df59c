"""Groups of ranks, and whether all of a group make the same call: found out before any of them waits for data."""

import contextlib
import functools
import pickle
import zlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import Function

Result = TypeVar("Result")
# To one tensor; PyTorch 2.13 has given it another name.
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
DIRECT_RANKS = 8  # of a host; nothing has been measured beyond
TAG = 0x636578  # no message of others in the group is taken for one of these
_on_host: WeakKeyDictionary = WeakKeyDictionary()  # of each group, gloo between the hosts of its ranks


def untraced(function: Function) -> Function:
    """`function`, into which torch.compile does not look: it cannot trace groups and their messages. Its own decorator
    for that would load all of it with this package, which takes a second."""

    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


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


class Agreement(Generic[Result]):
    """What `prepare` gives on this rank, and whether every rank has got as far, with the same values of the arguments.

    `prepare` raises what is wrong with a rank's own arguments; else it returns its result, and the arguments that have
    to be equal on all ranks, by name. Two numbers a rank then go round on the host, and the device does not wait. Until
    `wait` has returned nothing may be sent of q, k and v. Whatever is wrong raises there on all ranks, with the number
    of the rank and the argument.
    """

    def __init__(self, group: dist.ProcessGroup, prepare: Callable[[], tuple[Result, dict[str, object]]]):
        self.group, self.error, values = group, None, {}
        try:
            self._result, values = prepare()
        except (TypeError, ValueError, NotImplementedError) as refused:
            self.error = refused
        except Exception as unforeseen:  # the others must not wait for this rank, whatever it is
            self.error = RuntimeError(f"{type(unforeseen).__name__}: {unforeseen}")
        self.texts = {name: str(value) for name, value in values.items()}
        self.mine = [int(self.error is not None), zlib.crc32(repr(self.texts).encode())]
        self.numbers = _of_all_ranks(group, torch.tensor(self.mine, device="cpu"))

    @property
    def result(self) -> Result:
        """At once, unless this rank's arguments are wrong."""
        return self._result if self.error is None else self.wait()

    def wait(self) -> Result:
        size = self.group.size()
        if self.numbers() == [[0, self.mine[1]]] * size:
            return self._result
        words = pickle.dumps((self.error, self.texts))
        sizes = [n for (n,) in _of_all_ranks(self.group, torch.tensor([len(words)], device="cpu"))()]
        padded = torch.frombuffer(bytearray(words.ljust(max(sizes))), dtype=torch.uint8)
        of_all = zip(_of_all_ranks(self.group, padded)(), sizes, strict=True)
        found = [pickle.loads(bytes(x[:n])) for x, n in of_all]
        for of_rank, (its_error, _) in enumerate(found):
            if its_error is not None:
                raise type(its_error)(f"{its_error} (rank {of_rank} of {size})") from self.error
        for of_rank, (_, its_texts) in enumerate(found):
            for name, text in found[0][1].items():
                if its_texts[name] != text:
                    raise ValueError(
                        f"{name}: is {text} on rank 0 and {its_texts[name]} on rank {of_rank}; "
                        f"it has to be the same on all {size} ranks"
                    )
        raise AssertionError("checksums differ, and arguments do not")


def agreed(group: dist.ProcessGroup, prepare: Callable[[], tuple[Result, dict[str, object]]]) -> Result:
    """What `prepare` gives, once all ranks agree."""
    return Agreement(group, prepare).wait()


@contextlib.contextmanager
def _naming(group: dist.ProcessGroup, whom: str = "a rank") -> Iterator[None]:
    try:
        yield
    except RuntimeError as failed:
        raise RuntimeError(
            f"rank {group.rank()} of {group.size()}: {whom} is gone, or did not make this call: "
            f"its arguments did not come ({failed})"
        ) from failed


def _of_all_ranks(group: dist.ProcessGroup, mine: Tensor) -> Callable[[], list[list[int]]]:
    """A few numbers of each rank, by way of the hosts: what waits for them.

    Of few ranks each sends to each, and nothing waits for what another forwards: between two that takes 0.4 ms less
    than gloo's all_gather, which of many has as many messages, one behind the other, but is one call on the host.
    """
    size, own = group.size(), group.rank()
    theirs, works = [torch.empty_like(mine) for _ in range(size)], []
    with _naming(group):
        host = _between_hosts(group)
        if size > DIRECT_RANKS:
            works.append(("a rank", host.allgather([theirs], [mine])))
    if size <= DIRECT_RANKS:
        theirs[own] = mine
        for rank in (rank for rank in range(size) if rank != own):
            with _naming(group, f"rank {rank}"):
                works.append((f"rank {rank}", host.recv([theirs[rank]], rank, TAG)))
                works.append((f"rank {rank}", host.send([mine], rank, TAG)))

    def arrived() -> list[list[int]]:
        for whom, work in works:
            with _naming(group, whom):
                work.wait()
        return [x.tolist() for x in theirs]

    return arrived


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

"""Messages between ranks, beside what they compute meanwhile. Called by ring.py and all_gather.py."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

Operation = tuple[Callable, Tensor, int]  # dist.isend or dist.irecv, contiguous memory, a rank of the group


class Transfer:
    """Messages on their way, beside what is computed meanwhile.

    They start on a stream of their own, after all that was computed so far, and after the streams in `after`: that
    wrote what is sent, and has read what the memory that is written held before. What is computed next does not wait
    for them. Of two ranks both name their messages in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        operations: Sequence[Operation],
        failure: str,
        after: Sequence["torch.cuda.Stream"] = (),
    ):
        self.failure = failure
        self.operations = [  # kept, and their memory with them
            dist.P2POp(operation, buffer, group=group, group_peer=peer)
            for operation, buffer, peer in operations
            if buffer.numel() > 0
        ]
        self.works = []
        if self.operations:
            with _naming(failure), _beside(self.operations[0].tensor.device, after):
                self.works = dist.batch_isend_irecv(self.operations)

    def wait(self) -> None:
        """On a CPU until they are there; on a GPU what is computed from here on waits, and the host does not."""
        with _naming(self.failure):
            for work in self.works:
                work.wait()


@contextlib.contextmanager
def _naming(failure: str) -> Iterator[None]:
    """A dead rank or a timeout says who waited for whom."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{failure} ({error})") from error


@functools.lru_cache(maxsize=64)
def _stream_of(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(device: torch.device, after: Sequence["torch.cuda.Stream"]) -> Iterator[None]:
    """On a stream of its own; on a CPU transfers have threads of their own."""
    if device.type != "cuda":
        yield
        return
    stream = _stream_of(device)
    for other in (torch.cuda.current_stream(device), *after):
        stream.wait_stream(other)
    with torch.cuda.stream(stream):
        yield


_connected: WeakSet = WeakSet()  # groups whose ranks NCCL has connected


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL connects a group by its first operation, which all ranks have to take part in; of messages some may."""
    if device.type == "cuda" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)

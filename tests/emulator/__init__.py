"""A GPU for a machine that has none: to import this gives PyTorch, a CPU build of it, a CUDA device that is emulated,
and loads the build of the library that `build.py` made for it. What runs afterwards believes that it is on an H200,
with the few multiprocessors of CUTLASS_EXT_EMULATOR_SMS (4), and the bytes of L2 of CUTLASS_EXT_EMULATOR_L2, where that
is set. CUTLASS_EXT_EMULATOR_CAPABILITY=80, or 86, makes it a GPU of that compute capability, which runs what is
compiled for 8.0. Kernels run from their PTX, instruction by instruction: sizes are to be small. CUDA graphs are not
there: a test that wants one is skipped.

    python tests/emulator/run.py tests/sanitizer_sweep.py --shard 0/10
    PYTHONPATH=tests python -m pytest -p emulator -m gpu tests/python/test_shapes.py
"""

import contextlib
import ctypes
import importlib.util
import itertools
import os
import sys
import time
import types
import unittest
from pathlib import Path

BUILT = Path(os.environ.get("CUTLASS_EXT_EMULATOR") or Path(__file__).parents[2] / "build" / "emulator")
if not (BUILT / "_C.abi3.so").exists():
    sys.exit(f"{BUILT}/_C.abi3.so is missing. Type:\n    {sys.executable} tests/emulator/build.py")
if "torch" in sys.modules:
    sys.exit("tests/emulator is to be imported before torch, which asks once, at its import, whether there is a GPU")
library = ctypes.CDLL(str(BUILT / "libtorch_cuda.so"))
for function in (library.emulator_bytes_allocated, library.emulator_most_allocated):
    function.restype = ctypes.c_size_t
CAPABILITY = int(os.environ.get("CUTLASS_EXT_EMULATOR_CAPABILITY") or 90)
PTX = BUILT.parent / "ptx"
for folder in (PTX,) if CAPABILITY >= 90 else (PTX / "8.0", PTX):  # of two forms of a kernel the first counts
    library.emulator_read_ptx(str(folder).encode())

import torch  # noqa: E402

if torch.version.cuda:
    sys.exit("tests/emulator wants a CPU build of PyTorch, which has no CUDA of its own")

BYTES = 1 << 34  # of memory, that the GPU says it has
PROPERTIES = types.SimpleNamespace(
    name="an emulated H200" if CAPABILITY == 90 else f"an emulated GPU of {CAPABILITY / 10}",
    major=CAPABILITY // 10,
    minor=CAPABILITY % 10,
    multi_processor_count=int(os.environ.get("CUTLASS_EXT_EMULATOR_SMS") or 4),
    total_memory=BYTES,
    L2_cache_size=int(os.environ.get("CUTLASS_EXT_EMULATOR_L2") or 60 << 20),
)


# ------------------------------------------------------------------------------ streams and events
class AtOnce:
    """Of streams and events: nothing is ever under way."""

    def wait(self, *_) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def query(self) -> bool:
        return True


class Stream(AtOnce):
    numbers = itertools.count(1)

    def __init__(self, device=None, priority=0, *, handle=None):
        self.cuda_stream = next(self.numbers) if handle is None else handle
        self.device, self.priority = torch.device("cuda", 0), priority

    def record_event(self, event=None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class ExternalStream(Stream):
    def __init__(self, handle, device=None):
        super().__init__(handle=handle)


class Event(AtOnce):
    def __init__(self, *_, **__):
        self.seconds = 0.0

    def record(self, stream=None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.seconds - self.seconds)


default_stream = Stream(handle=0)
current_stream = default_stream


def set_stream(stream: Stream) -> None:
    global current_stream
    current_stream = stream
    library.emulator_set_stream(ctypes.c_uint64(stream.cuda_stream))


@contextlib.contextmanager
def on_stream(stream):
    before = current_stream
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)


# ------------------------------------------------------------------------------ torch.cuda
class NoGraph:
    def __init__(self, *_, **__):
        raise unittest.SkipTest("the emulated GPU has no CUDA graphs")


def returning(value):
    return lambda *_, **__: value


def patch_torch() -> None:
    cuda = torch.cuda
    nothing = ("_lazy_init", "init", "synchronize", "set_device", "empty_cache", "manual_seed", "manual_seed_all")
    nothing += ("_sleep", "set_sync_debug_mode", "reset_accumulated_memory_stats")
    values = dict.fromkeys(nothing) | {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "default_stream": default_stream,
        "memory_reserved": 0,
        "memory_snapshot": [],
        "mem_get_info": (BYTES, BYTES),
    }
    functions = {name: returning(value) for name, value in values.items()} | {
        "current_stream": lambda *_: current_stream,
        "set_stream": set_stream,
        "stream": on_stream,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "memory_allocated": lambda *_: library.emulator_bytes_allocated(),
        "max_memory_allocated": lambda *_: library.emulator_most_allocated(),
        "reset_peak_memory_stats": lambda *_: library.emulator_forget_most(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "graph": NoGraph,
        "CUDAGraph": NoGraph,
        "device": contextlib.nullcontext,
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    torch.version.cuda = "13.0"  # what cutlass_ext/switch.py asks
    # Backward passes run in the thread that asks for them. A thread of autograd's may still hold a tensor when Python
    # ends, and ends the process ("terminate called without an active exception") where it wants the GIL to let it go:
    # 13 of 18 processes did that ended behind a small backward pass.
    torch.autograd.set_multithreading_enabled(False)


patch_torch()
# Found here by cutlass_ext/_ops.py, whatever was built for a real GPU.
spec = importlib.util.spec_from_file_location("cutlass_ext._C", BUILT / "_C.abi3.so")
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
sys.path.insert(0, str(Path(__file__).parents[2]))
# Processes that this one starts import it before all else: see child/sitecustomize.py.
own = [str(Path(__file__).parent / "child"), str(Path(__file__).parents[1])]
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([*own, *(path for path in paths if path and path not in own)])

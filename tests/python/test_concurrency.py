"""Who may call at the same time, and from where: devices, host threads, streams, captured graphs, fresh processes.

What calls may meet in are the counters by which CTAs share out work and merge splits, and the workspace of splits.
"""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from oracle import assert_same_bits
from test_pages import build

import cutlass_ext

ROOT = Path(cutlass_ext.__file__).parents[1]  # so that a fresh process finds the same package
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


CALLS = "persistent", "splits", "decode", "append", "mixed"


def calls_of(gpu):
    """Calls that need counters, a workspace, or both: persistent CTAs, splits, decoding, an append, and decoding beside
    chunks, on Hopper on multiprocessors that these take once it is done."""
    long, decode = gpu.qkv(2, 700, 8, 64), gpu.qkv(3, 1, 8, 64, n_kv=3000, heads_kv=2)
    new, lens = gpu.qkv(3, 1, 8, 64, heads_kv=2)[1:], gpu.int32([2990, 7, 0])
    cache = [t.clone() for t in decode[1:]]
    mixed = build(gpu, [1, 700, 3, 0, 300, 1], [900, 800, 64, 70, 300, 1500], heads=(8, 2))

    def append():
        return cutlass_ext.flash_attn_with_kvcache(
            decode[0], *cache, *new, cache_seqlens=lens, causal=True, return_softmax_lse=True
        )

    return [
        lambda: cutlass_ext.fmha(*long, causal=True, num_splits=1, return_lse=True),
        lambda: cutlass_ext.fmha(*long, num_splits=3, return_lse=True),
        lambda: cutlass_ext.fmha(*decode, return_lse=True),
        append,
        lambda: cutlass_ext.fmha(**mixed.arguments, causal=True, start_pos="end", return_lse=True),
    ]


# ------------------------------------------------------------------------------------------------ fresh processes
def run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=110, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CAPTURE_FIRST = """
import sys, torch, cutlass_ext
dtype, n_q = getattr(torch, sys.argv[1]), int(sys.argv[2])
q, k, v = (torch.randn(2, n, 4, 64, device="cuda").to(dtype) for n in (n_q, 900, 900))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = cutlass_ext.fmha(q, k, v, causal=True, start_pos="end")
for _ in range(3):
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, cutlass_ext.fmha(q, k, v, causal=True, start_pos="end"))
"""


@pytest.mark.parametrize("n_q", [1, 70, 900])
def test_a_capture_is_the_first_call_of_a_process(gpu, n_q):
    """What the library looks up or allocates on its first call must not break the capture."""
    run(CAPTURE_FIRST, str(gpu.dtype)[6:], n_q)


OTHER_DEVICE = """
import sys, torch, cutlass_ext
if sys.argv[1] == "1":
    torch.cuda.set_device(1)  # otherwise device 0 is current, and nothing was done on it
q, k, v = (torch.randn(2, n, 4, 64, device="cuda:1").half() for n in (70, 300, 300))
torch.cuda.synchronize(1)
before = torch._C._cuda_hasPrimaryContext(0)  # torch's own doing
cutlass_ext.fmha(q, k, v, causal=True)
cutlass_ext.fmha(q[:, :1], k, v, num_splits=2)
cutlass_ext.flash_attn_with_kvcache(q[:, :1], k, v, k[:, :1].clone(), v[:, :1].clone(), cache_seqlens=7)
torch.cuda.synchronize(1)
assert torch._C._cuda_hasPrimaryContext(0) == before, "a context on device 0"
"""


@pytest.mark.gpu
@TWO_DEVICES
@pytest.mark.parametrize("current", [0, 1])
def test_a_process_of_one_device_opens_no_context_on_another(current):
    """pytorch #94864: putting device 0 back as the current one would, and takes 500 MB there."""
    run(OTHER_DEVICE, current)


# ------------------------------------------------------------------------------------------------ devices
@TWO_DEVICES
@pytest.mark.parametrize("current", [0, 1])
def test_two_devices(gpu, current):
    """The tensors' device counts, not the current one, which stays what it was."""
    tensors = gpu.qkv(2, 300, 4, 64), gpu.qkv(3, 1, 8, 64, n_kv=900, heads_kv=2)
    for q, k, v in tensors:
        want = cutlass_ext.fmha(q, k, v, causal=True, num_splits=2, return_lse=True)
        others = [t.to("cuda:1") for t in (q, k, v)]
        with torch.cuda.device(current):
            for _ in range(3):
                there = cutlass_ext.fmha(*others, causal=True, num_splits=2, return_lse=True)
                here = cutlass_ext.fmha(q, k, v, causal=True, num_splits=2, return_lse=True)
            assert torch.cuda.current_device() == current
        assert there[0].device == torch.device("cuda:1")
        assert_same_bits(here, want), assert_same_bits([t.to("cuda:0") for t in there], want)


# ------------------------------------------------------------------------------------------------ host threads
def test_two_host_threads(gpu):
    """Each with a stream and tensors of its own, at once: the results of one after the other."""
    cases = [calls_of(gpu) for _ in range(2)]
    want = [[call() for call in calls] for calls in cases]
    torch.cuda.synchronize()
    got, errors, start = [[], []], [], threading.Barrier(2)

    def work(i):
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                got[i] = [[call() for call in cases[i]] for _ in range(50)]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors, errors
    for i in range(2):
        for results in got[i]:
            for result, expected in zip(results, want[i], strict=True):
                assert_same_bits(result, expected)


# ------------------------------------------------------------------------------------------------ streams of others
class Runtime:
    """The CUDA runtime that torch has loaded, for what torch has no name for."""

    def __init__(self):
        self.library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")

    def __getattr__(self, name):
        def call(*arguments):
            error = getattr(self.library, name)(*arguments)
            assert error == 0, f"{name}: error {error}"

        return call


@pytest.fixture
def runtime(gpu):
    try:
        return Runtime()
    except OSError as error:
        pytest.skip(str(error))


PER_THREAD = 2  # cudaStreamPerThread


def test_the_default_stream_of_a_thread(gpu):
    calls = calls_of(gpu)
    want = [call() for call in calls]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        got = [[call() for call in calls] for _ in range(20)]
    torch.cuda.synchronize()
    for results in got:
        for result, expected in zip(results, want, strict=True):
            assert_same_bits(result, expected)


def test_streams_come_and_go(gpu, runtime):
    """Made and destroyed by somebody else: a handle comes back as another stream."""
    calls = calls_of(gpu)
    want = [call() for call in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        handle = ctypes.c_void_p()
        runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1)
        stream = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(stream):
            got = [call() for call in calls]
        stream.synchronize()
        for result, expected in zip(got, want, strict=True):
            assert_same_bits(result, expected)
        runtime.cudaStreamDestroy(handle)


# ------------------------------------------------------------------------------------------------ graphs
def captured(call, **options):
    graph = torch.cuda.CUDAGraph(**options)
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("which", range(len(CALLS)), ids=CALLS)
def test_a_call_captured_twice(gpu, which):
    """Two graphs of it, replayed one after the other on two streams, with eager calls between them."""
    call = calls_of(gpu)[which]
    want = [t.clone() for t in call()]
    torch.cuda.synchronize()
    graphs, streams = [captured(call) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, out), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                for t in out:
                    t.fill_(float("nan"))
                graph.replay()
                eager = call()
            stream.synchronize()
            assert_same_bits(out, want), assert_same_bits(eager, want)


@pytest.mark.parametrize("which", range(len(CALLS)), ids=CALLS)
def test_a_graph_instantiated_twice(gpu, runtime, which):
    """One after the other, on two streams: they have the workspace in common, and whatever else the call took."""
    call = calls_of(gpu)[which]
    want = [t.clone() for t in call()]
    torch.cuda.synchronize()
    graph, out = captured(call, keep_graph=True)
    handles = [ctypes.c_void_p() for _ in range(2)]
    template, no_flags = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_ulonglong(0)
    for handle in handles:
        runtime.cudaGraphInstantiate(ctypes.byref(handle), template, no_flags)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for handle, stream in zip(handles, streams, strict=True):
            with torch.cuda.stream(stream):
                for t in out:
                    t.fill_(float("nan"))
                runtime.cudaGraphLaunch(handle, ctypes.c_void_p(stream.cuda_stream))
            stream.synchronize()
            assert_same_bits(out, want)
    for handle in handles:
        runtime.cudaGraphExecDestroy(handle)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("d", [64, 192, 256])
def test_graphs_of_calls_without_sequences(gpu, batch, d):
    """Hundreds of captures and replays of calls that launch nothing, and of the smallest that launch something."""
    qkv = gpu.randn(batch, 33, 3, 2, d)
    for _ in range(100):
        graph, out = captured(lambda: cutlass_ext.flash_attn_qkvpacked_func(qkv, causal=True))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, cutlass_ext.flash_attn_qkvpacked_func(qkv, causal=True))

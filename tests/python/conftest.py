"""Where the tests run: the `target` fixture (device and backend), the gpu marker, its timeout and its one-line skip,
and the poison in freshly allocated memory. pytest reads it for every module of this folder."""

from __future__ import annotations

import dataclasses
import logging
import os

import hypothesis
import pytest
import torch

import cutlass_ext

# Where there are several GPUs, each process of pytest-xdist has another one first; before CUDA starts.
if (gpus := torch.cuda.device_count()) > 1 and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    first = int(worker.removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % gpus) for i in range(gpus))
GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
GPU_TIMEOUT_S, CPU_TIMEOUT_S = 120, 120
MOST_KEPT = 4 << 30  # bytes of GPU memory that a process keeps from test to test
SKIPPED = pytest.StashKey[int]()

hypothesis.settings.register_profile(
    "cutlass_ext",
    max_examples=400 if GPU else 200,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("cutlass_ext")


@dataclasses.dataclass(frozen=True)
class Target:
    """One way of running the library: `target.fmha(q, k, v, ...)` is `cutlass_ext.fmha` there, and gives (out, lse)."""

    device: str
    backend: str
    dtype: torch.dtype = torch.float32

    def __str__(self):
        name = f"{self.device}-{self.backend}"
        return name if self.dtype == torch.float32 else f"{name}-{str(self.dtype)[6:]}"

    @property
    def cuda(self):
        return self.device == "cuda"

    @property
    def family(self):
        """The backend that should run: what "auto" comes to, but for calls of few scores (see test_explain.py)."""
        if self.backend != "auto":
            return self.backend
        if not self.cuda:
            return "torch"
        if self.dtype == torch.float32:
            return "simt"
        return "sm90" if HOPPER else "sm80"

    @property
    def step(self):
        """Head dims are multiples of it."""
        return 4 if self.dtype == torch.float32 else 8

    def head_dim(self, d):
        """`d`, or the next head dim that the dtype has."""
        return -(-d // self.step) * self.step

    def randn(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def vector(self, *shape):
        """Slopes and sinks: float32 whatever the dtype."""
        return torch.randn(*shape, device=self.device)

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def qkv(self, batch, n_q, heads_q, d, *, n_kv=None, heads_kv=None, d_v=None):
        n_kv, heads_kv, d_v = n_q if n_kv is None else n_kv, heads_kv or heads_q, d_v or d
        shapes = (batch, n_q, heads_q, d), (batch, n_kv, heads_kv, d), (batch, n_kv, heads_kv, d_v)
        return [self.randn(*shape) for shape in shapes]

    def takes(self, *tensors):
        """Whether tensors that lie like these are for it: Hopper's copy engine wants multiples of 16 bytes."""
        if self.backend != "sm90":
            return True
        steps = [t.stride(i) * t.element_size() for t in tensors for i in range(t.dim() - 1) if t.shape[i] > 1]
        return not any(n % 16 for n in [*steps, *(t.data_ptr() for t in tensors)])

    def fmha(self, q, k, v, **kwargs):
        if self.cuda:
            poison_like_results(q, v)
        if self.backend == "sm90":
            kwargs.setdefault("num_splits", 1)
        return cutlass_ext.fmha(q, k, v, **{"backend": self.backend, "return_lse": True} | kwargs)

    def gradients(self, q, k, v, dout, dlse=None, *, sink=None, bias=None, **kwargs):
        """Of q, k, v, and of a sink and a bias where there are, by autograd through `cutlass_ext.fmha`."""
        leaves = [t.detach().requires_grad_() for t in (q, k, v, sink, bias) if t is not None]
        others = iter(leaves[3:])
        kwargs |= {name: next(others) for name, t in (("sink", sink), ("bias", bias)) if t is not None}
        results = self.fmha(*leaves[:3], **kwargs)
        if self.cuda:
            poison_like_gradients(*leaves)
        n = 1 if dlse is None else 2
        return torch.autograd.grad(results[:n], leaves, (dout, dlse)[:n])


NOT_HOPPER = pytest.mark.skipif(GPU and not HOPPER, reason="sm90 runs on compute capability 9.0 and nowhere else")


def marks_of(target):
    return [pytest.mark.gpu] * target.cuda + [NOT_HOPPER] * (target.backend == "sm90")


def targets(*all_fields):
    params = [Target(*fields) for fields in all_fields]
    return [pytest.param(t, id=str(t), marks=marks_of(t)) for t in params]


F16, BF16 = torch.float16, torch.bfloat16
FLOAT32 = ("cpu", "torch"), ("cuda", "auto"), ("cuda", "simt")
TENSOR_CORES = [("cuda", backend, dtype) for backend in ("auto", "sm80") for dtype in (F16, BF16)]
# "auto" gives Hopper's persistent kernels no call of 16 query rows or fewer, unless it is packed, and none of few
# scores: here, with the splits fixed, they take those too.
HOPPER_ALONE = [("cuda", "sm90", dtype) for dtype in (F16, BF16)]
TORCH_16_BIT = [(device, "torch", dtype) for device in ("cpu", "cuda") for dtype in (F16, BF16)]


@pytest.fixture(scope="session", params=targets(*FLOAT32, *TENSOR_CORES, *HOPPER_ALONE))
def target(request):
    """Every family of kernels in every dtype that it takes, and PyTorch's operators in float32."""
    return request.param


@pytest.fixture(scope="session", params=targets(*FLOAT32))
def target_fp32(request):
    """Every way of running float32."""
    return request.param


@pytest.fixture(scope="session", params=targets(("cuda", "simt"), *TENSOR_CORES, *HOPPER_ALONE))
def kernels(request):
    """What has tiles."""
    return request.param


@pytest.fixture(scope="session", params=targets(("cuda", "sm80", F16), ("cuda", "sm80", BF16)))
def mma_sync(request):
    """The kernels of `mma.sync`, in 16 bits."""
    return request.param


@pytest.fixture(scope="session", params=targets(*TORCH_16_BIT))
def target_16_bit(request):
    """PyTorch's operators in float16 and bfloat16; `target` has the kernels."""
    return request.param


@pytest.fixture(scope="session", params=targets(("cuda", "auto"), ("cuda", "auto", BF16)))
def gpu(request):
    """What only a GPU can show (streams, graphs, allocations), on either kind of kernel."""
    return request.param


@pytest.fixture(scope="session", params=targets(("cuda", "auto", F16), ("cuda", "auto", BF16)))
def hopper(request):
    """What "auto" comes to on Hopper, in 16 bits."""
    if not HOPPER:
        pytest.skip("of compute capability 9.0")
    return request.param


# ------------------------------------------------------------------------------------------------ fresh memory is NaN
def poison_like_results(q, v):
    """NaN where the allocator will put `out` and `lse`: what a kernel leaves unwritten cannot look right by chance."""
    rows = q.shape[:-1].numel()
    sizes = (rows * v.shape[-1], q.dtype), (rows, torch.float32), (1 << 18, torch.float32)
    held = [torch.full((n,), float("nan"), dtype=dtype, device=q.device) for n, dtype in sizes]
    del held


def poison_like_gradients(*inputs):
    """The same where the gradients of these will be, and what is known of each row before them."""
    sizes = [(t.numel(), t.dtype) for t in inputs] + [(2 * inputs[0].shape[:-1].numel(), torch.float32)]
    held = [torch.full((n,), float("nan"), dtype=dtype, device=inputs[0].device) for n, dtype in sizes]
    del held


def poison_cuda_cache():
    """NaN in every free block of the caching allocator; of a new one, in some of each size.

    Asked for from the largest to the smallest, each request gets a block of its own size. A block of up to 1 MB among
    the large ones cannot be had: requests of that size go elsewhere.
    """
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive" and segment["stream"] == 0
        if block["size"] > 1 << 20 or segment["segment_type"] == "small"
    ]
    sizes = sorted(free, reverse=True) if sum(free) > 1 << 25 else [1 << k for k in range(24, 8, -1)]
    held = [torch.full((size // 4,), float("nan"), device="cuda") for size in sizes]
    del held


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(request):
    """A result that nobody wrote shows as NaN; on the CPU torch.empty itself sees to that, in deterministic mode."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("gpu"):
        if torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()  # other processes of the tests share the GPU
        poison_cuda_cache()
        yield
    else:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------ the gpu marker
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if not config.pluginmanager.hasplugin("timeout"):
        raise pytest.UsageError("the tests need pytest-timeout: pip install pytest-timeout")
    logging.getLogger("torch.__trace").propagate = False  # thousands of empty lines under a failure of torch.compile
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # the reference is fp32 throughout


def pytest_collection_modifyitems(config, items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        own = item.get_closest_marker("timeout")
        if item.get_closest_marker("gpu"):
            # a kernel that hangs never returns to Python, where a signal would be seen: a thread ends the process
            limit = own.args[0] if own else GPU_TIMEOUT_S
            item.add_marker(pytest.mark.timeout(limit, method="thread"), append=False)
        elif not own:
            item.add_marker(pytest.mark.timeout(CPU_TIMEOUT_S))
    if on_gpu and not GPU:
        config.stash[SKIPPED] = len(on_gpu)
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_skipped"] = session.config.stash.get(SKIPPED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[SKIPPED] = getattr(node, "workeroutput", {}).get("gpu_skipped", 0)


def pytest_terminal_summary(terminalreporter, config):
    skipped = config.stash.get(SKIPPED, 0)
    if skipped:
        why = f"torch.cuda.is_available() is False (torch {torch.__version__})"
        terminalreporter.write_line(f"SKIPPED {skipped} GPU tests (counted as deselected): {why}", yellow=True)

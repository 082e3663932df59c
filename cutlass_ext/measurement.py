"""How a case of attention is measured: its random inputs, whether the results are right, how long they take, and in
how much memory. `bench.py` and the programs of python/ measure with it.

Our result is checked against a float64 computation before it is timed (the bound: twice the error of written-out
attention, and what rounding in float32 makes of gradients beside it). The figures are medians over rounds in which the
providers (`peers.py`) take turns, in an order that rotates. On a GPU a sample is a CUDA graph of up to 20 calls, queued
behind a sleeping kernel: host time is not in it. Rows over a cache are one call a sample, after reading more than L2
holds: there a cache comes from memory.
"""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

import cutlass_ext

from .peers import OURS, WRITTEN_OUT, Provider, hidden_keys, written_out

SAMPLE_MS = 1.0  # the least time of one sample, so that the few microseconds of an event do not count
MAX_REPEATS = 20  # calls of a sample
SLEEP_CYCLES = 10_000_000  # about 5 ms: what the host needs to queue MAX_REPEATS calls that are no graph
MORE_THAN_L2 = 512 << 20  # bytes
DROPPED = 0.1  # dropout_p of the cases that have dropout


# ---- what is measured ----


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    n: int
    head_dim: int
    causal: bool
    dtype: str
    series: str = "table"  # or "memory", "scaling": the rows that --plot draws against N
    backward: bool = False
    heads_kv: int = 0  # KV heads; 0: as many as query heads
    n_q: int = 0  # query rows, over a cache; 0: as many as keys
    window: int = 0  # keys that a row of causal attention sees at most; 0: all
    page: int = 0  # keys of a page; 0: no pages
    scores: str = ""  # "mask", "bias" (and its gradient) or "dropout"

    @property
    def flops(self) -> int:
        """Two matrix products over the (query, key) pairs that causal and window leave; five in the backward pass."""
        hidden = self.n - self.window if self.window else 0  # keys that a window hides from the last row
        pairs = (self.n * (self.n + 1) - hidden * (hidden + 1)) // 2 if self.causal else self.rows * self.n
        return (10 if self.backward else 4) * self.batch * self.heads * pairs * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """What keys and values take."""
        return 2 * self.batch * self.n * self.key_heads * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def dropout_p(self) -> float:
        return DROPPED if self.scores == "dropout" else 0.0

    def __str__(self) -> str:
        words = [" causal"] * self.causal + [f" window {self.window}"] * bool(self.window)
        words += [f" pages of {self.page}"] * bool(self.page) + [f" {self.scores}"] * bool(self.scores)
        words += [" backward"] * self.backward
        rows, heads = [f"{self.n_q} x "] * bool(self.n_q), [f"/{self.heads_kv}"] * bool(self.heads_kv)
        sizes = f"{self.batch}, {''.join(rows)}{self.n}, {self.heads}{''.join(heads)}, {self.head_dim}"
        return f"({sizes}){''.join(words)}"

    @property
    def rows(self) -> int:
        return self.n_q or self.n

    @property
    def key_heads(self) -> int:
        return self.heads_kv or self.heads

    def inputs(self, device: str) -> Inputs:
        of_rows, of_keys = (self.rows, self.heads), (self.n, self.key_heads)
        shapes = [(self.batch, *sizes, self.head_dim) for sizes in (of_rows, of_keys, of_keys, of_rows)]
        dtype = getattr(torch, self.dtype)
        x = Inputs(*(torch.randn(shape, device=device).to(dtype) for shape in shapes))
        if self.scores == "mask":
            x.mask = torch.rand(1, 1, self.rows, self.n, device=device) < 0.75
            x.mask[..., 0] = True  # no row without keys: of those libraries think differently
        elif self.scores == "bias":
            x.bias = torch.randn(self.batch, self.heads, self.rows, self.n, device=device).to(dtype)
        elif self.scores == "dropout":
            x.seed = torch.randint(2**62, (2,), device=device)
        if self.page:
            x.table, x.pages = x.in_pages(self.page)
            x.lengths = torch.full((self.batch,), self.n, dtype=torch.int32, device=device)
        return x


@dataclass
class Inputs:
    """Tensors of a case. `k` and `v` hold the keys one after the other also where `pages` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor  # read by the backward pass alone
    mask: Tensor | None = None  # [1, 1, rows, n]
    bias: Tensor | None = None  # [B, H, rows, n]
    seed: Tensor | None = None  # of dropout
    kept: Tensor | None = None  # [B, H, rows, n], what dropout keeps; for the float64 computation alone
    table: Tensor | None = None
    pages: tuple[Tensor, Tensor] | None = None
    lengths: Tensor | None = None

    def in_pages(self, page: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A table of pages in random order, and the pages of k and v."""
        batch, n = self.k.shape[:2]
        place = torch.randperm(batch * n // page, device=self.k.device)  # of each page in its turn
        pages = tuple(t.reshape(len(place), page, *t.shape[2:])[place.argsort()] for t in (self.k, self.v))
        return place.to(torch.int32).view(batch, n // page), pages

    def options(self, case: Case) -> dict:
        """Of `cutlass_ext.fmha`."""
        given = {"causal": case.causal, "mask": self.mask, "bias": self.bias}
        if case.window:
            given["window"] = (case.window - 1, 0)
        if case.dropout_p:
            given |= {"dropout_p": case.dropout_p, "dropout_seed": self.seed}
        return given

    @property
    def differentiated(self) -> list[Tensor]:
        return [t for t in (self.q, self.k, self.v, self.bias) if t is not None]

    def requiring_grad(self) -> Inputs:
        """The same values, in leaves of a new graph."""
        q, k, v, *bias = (t.detach().requires_grad_() for t in self.differentiated)
        return replace(self, q=q, k=k, v=v, bias=bias[0] if bias else None)


# ---- what is timed ----

Results = tuple[Tensor, ...]  # the output; or dq, dk, dv, and dbias where there is a bias


class Pass:
    """The forward pass of a provider for a case, or its backward pass after a forward pass that was made beforehand."""

    def __init__(self, make: Provider, case: Case, inputs: Inputs):
        self.backward, self.dout = case.backward, inputs.dout
        self.inputs = inputs.requiring_grad() if case.backward else inputs
        self.forward = make(case, self.inputs)
        self.out = self.forward() if case.backward else None

    def __call__(self) -> Results:
        if not self.backward:
            return (self.forward(),)
        return torch.autograd.grad(self.out, self.inputs.differentiated, self.dout, retain_graph=True)

    def step(self) -> Results:
        """All that a step of training takes: forward, and backward where that is what is timed."""
        out = self.forward()
        return torch.autograd.grad(out, self.inputs.differentiated, self.dout) if self.backward else (out,)


# ---- right? ----


@dataclass
class Errors:
    """Against float64, over a sample of (sequence, head) pairs: largest absolute difference, and Frobenius norm."""

    largest: float
    norm: float


def largest_and_norm(parts: Iterable[Tensor]) -> Errors:
    """Over some tensors, as one."""
    parts = list(parts)
    return Errors(max(t.abs().max().item() for t in parts), math.sqrt(sum(t.square().sum().item() for t in parts)))


class Oracle:
    """A pass in float64 for up to three (sequence, KV head) pairs of a case, with the query heads that share them, and
    written-out attention's errors."""

    def __init__(self, case: Case, inputs: Inputs):
        self.key_heads, self.groups = case.key_heads, case.heads // case.key_heads
        last = (case.batch - 1, case.key_heads - 1)
        self.pairs = sorted({(0, 0), (case.batch // 2, case.key_heads // 3), last})
        case = replace(case, page=0)
        self.expected, references = [], []  # of each pair its results: the output; or dq, dk, dv, dbias
        for b, h in self.pairs:
            one, exact = (self._inputs(case, inputs, b, h, double) for double in (False, True))
            self.expected.append(Pass(written_out, case, exact)())
            references.append(Pass(written_out, case, one)())
        self.expected = list(zip(*self.expected, strict=True))
        self.reference = self._errors(zip(*references, strict=True))
        eps = torch.finfo(inputs.q.dtype).eps
        self.eps = [eps * max(e.abs().max().item() for e in expected) for expected in self.expected]
        # P of a backward pass is exp(score - lse), and lse one float32: its rounding is in all of a row's P.
        self.norms = [math.sqrt(sum(e.square().sum().item() for e in expected)) for expected in self.expected]
        self.of_lse = [torch.finfo(torch.float32).eps * norm if case.backward else 0.0 for norm in self.norms]
        self.of_ds = [Errors(0.0, 0.0) for _ in self.expected]
        if case.backward:
            fields = [self._rounding_of_ds(case, self._inputs(case, inputs, b, h, True)) for b, h in self.pairs]
            self.of_ds = [largest_and_norm(parts) for parts in zip(*fields, strict=True)]

    def _inputs(self, case: Case, x: Inputs, b: int, h: int, double: bool) -> Inputs:
        """Those of a sequence and a KV head."""
        q, k, v, dout, bias = (
            None if t is None else self._part(t, i == 4, b, h).to(torch.float64 if double else t.dtype)
            for i, t in enumerate((x.q, x.k, x.v, x.dout, x.bias))
        )
        kept = None
        if case.dropout_p:
            sizes = 1, self.groups, case.rows, case.n
            where = {"head_start": h * self.groups, "sequence_start": b}
            kept = cutlass_ext.dropout_mask(*sizes, case.dropout_p, x.seed, **where)
        return Inputs(q, k, v, dout, mask=x.mask, bias=bias, kept=kept)

    def _part(self, t: Tensor, of_scores: bool, b: int, h: int) -> Tensor:
        """Of a sequence and a KV head what a tensor of query heads or of KV heads has."""
        heads = 1 if of_scores else 2
        n = t.shape[heads] // self.key_heads
        return t[b : b + 1].narrow(heads, h * n, n)

    @torch.no_grad()
    def _rounding_of_ds(self, case: Case, x: Inputs) -> list[Tensor]:
        """The standard deviation that dS = P (dP - delta) brings to dq, dk, dv and dbias of a sequence and a KV head.

        Where a row sees few keys, or one takes nearly all, dP and delta are nearly one number, from two sums of d
        products; written-out attention subtracts the one sum from itself, and its rounding is gone. In 400 draws of
        (1, 33, 2, 64) causal, emulated in float32, 5% were beyond the bounds of docs/semantics.md without this, 0.2%
        with it; it goes with P^2, so that of many keys little is left: at N 256 a fifth of the reference's error, in
        full 2%.
        """
        q, dout = (t[0].transpose(0, 1) for t in (x.q, x.dout))  # [G, rows, d]
        k, v = (t[0, :, 0] for t in (x.k, x.v))
        scores = q @ k.T / math.sqrt(case.head_dim)
        if x.bias is not None:
            scores = scores + x.bias[0]
        hidden = hidden_keys(case, q.device) if x.mask is None else ~x.mask[0]
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        # A sum of d products, one after the other: partial sums grow as sqrt(c), each is rounded by up to half an ulp,
        # ulps are between eps and eps / 2 of a number: sqrt(0.54 / 12 / 2) = 0.15 eps |dout| |v|.
        a_sum = 0.15 * torch.finfo(torch.float32).eps * dout.norm(dim=-1, keepdim=True) * v.norm(dim=-1)
        ds = torch.softmax(scores, -1).square() * a_sum / (1 - case.dropout_p)
        variance, of_scale = ds.square(), 1 / math.sqrt(case.head_dim)
        dq = (variance @ k.square()).sqrt() * of_scale
        dk = (variance.mT @ q.square()).sum(0).sqrt() * of_scale
        return [dq, dk, torch.zeros_like(v), *[ds] * (x.bias is not None)]

    def _errors(self, results: Iterable[Iterable[Tensor]]) -> list[Errors]:
        return [
            largest_and_norm([part.double() - e for part, e in zip(parts, expected, strict=True)])
            for parts, expected in zip(results, self.expected, strict=True)
        ]

    def errors(self, results: Results) -> list[Errors]:
        return self._errors([[self._part(t, i == 3, b, h) for b, h in self.pairs] for i, t in enumerate(results)])

    def accepts(self, errors: list[Errors]) -> bool:
        return all(  # False for NaN
            e.largest <= 2 * reference.largest + 2 * eps + 3 * of_ds.largest
            and e.norm <= 1.5 * reference.norm + of_lse + of_ds.norm
            for e, reference, eps, of_lse, of_ds in zip(
                errors, self.reference, self.eps, self.of_lse, self.of_ds, strict=True
            )
        )

    def is_of_another_case(self, errors: list[Errors]) -> bool:
        """Whether so much is no rounding, of 16 bits either: a mask or a window means something else there."""
        return not all(e.norm <= 0.1 * norm for e, norm in zip(errors, self.norms, strict=True))  # True for NaN


# ---- how fast, in how much memory ----


def sample_ms(
    call: Callable[[], object], repeats: int, device: str, begin_together: Callable[[], object] = lambda: None
) -> float:
    """Milliseconds a call; on a GPU the calls wait behind a sleeping kernel, so that host work is not in the figure,
    and behind what `begin_together` queues there: of several GPUs, each of which sleeps by its own clock."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin_together()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


class Timed:
    """A call as it is timed: on a GPU some calls in one CUDA graph, or one after the other where a graph cannot hold
    them or is not to (`captured`); one at a time, and with nothing in L2, where `cold`."""

    def __init__(self, call: Callable[[], object], device: str, cold: bool = False, captured: bool = True):
        self.call, self.device, self.repeats, self.graph = call, device, 1, None
        self.flushed = torch.empty(MORE_THAN_L2 // 4, device=device) if cold and device == "cuda" else None
        if device == "cpu":
            return
        ms = min(sample_ms(call, 1, device) for _ in range(3))
        if not cold:
            self.repeats = max(1, min(MAX_REPEATS, math.ceil(SAMPLE_MS / ms)))
        if not captured:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            # On this stream: gradients are computed on that of their forward pass.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                for _ in range(self.repeats):
                    call()
            graph.replay()
            torch.cuda.synchronize()
            self.graph = graph  # beside `call`, which holds the tensors that the graph reads
        except Exception:  # what libraries do that cannot be captured fails in many ways
            torch.cuda.synchronize()

    def sample_ms(self) -> float:
        """Milliseconds a call."""
        if self.flushed is not None:
            self.flushed.sum()  # reads it: the lines that it leaves in L2 are clean
        if self.graph:
            return sample_ms(self.graph.replay, 1, self.device) / self.repeats
        return sample_ms(self.call, self.repeats, self.device)


def peak_extra_bytes(call: Callable[[], object], device: str) -> int:
    """The most memory that one call holds at a time beyond its inputs, the results counted.

    On a GPU the largest of three: what autograd's threads still hold of the call before, and free during this one,
    would be taken from it.
    """
    if device == "cuda":
        peaks = []
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        return max(peaks)
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler announces each start and stop on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    allocations = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(allocations, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class Wrong(Exception):
    """Our result misses the float64 computation by more than written-out attention allows."""


Refusals = dict[str, str]  # of providers, what they said of the first case that they did not take


def first_line(error: Exception) -> str:
    """Of its text, without the folders that a library was built in."""
    return re.sub(r"/\S*/", "", (str(error).strip() or repr(error)).splitlines()[0])


@functools.cache
def stream() -> torch.cuda.Stream:
    """Where all is computed: the default one makes no graphs, and memory is kept for each stream apart."""
    return torch.cuda.Stream()


def measure(
    case: Case,
    device: str,
    rounds: int,
    tick: Callable[[str], None],
    providers: dict[str, Provider],
    refusals: Refusals | None = None,
) -> list[dict]:
    """One row for each provider that takes the case."""
    with torch.cuda.stream(stream()) if device == "cuda" else nullcontext():
        return measure_here(case, device, rounds, tick, providers, {} if refusals is None else refusals)


def measure_here(case, device, rounds, tick, providers, refusals) -> list[dict]:
    inputs = case.inputs(device)
    oracle = Oracle(case, inputs)
    calls, rows = {}, {}
    for name, make in providers.items():
        tick(f"{case} {name}")
        try:
            call = Pass(make, case, inputs)
            results = call()
            # What others drop is not what we drop.
            errors = oracle.errors(results) if name == OURS or not case.dropout_p else None
            del results
            peak = peak_extra_bytes(call.step, device)
        except Exception as error:  # out of memory, or not taken; every library has exceptions of its own
            if name == OURS:
                raise
            refusals.setdefault(name, f"{case}: {first_line(error)}")
            continue
        if name == OURS and not oracle.accepts(errors):
            raise Wrong(f"{case}: {errors} against float64, where written-out attention has {oracle.reference}")
        if errors and oracle.is_of_another_case(errors):
            refusals.setdefault(name, f"{case}: computes something else, {errors} from float64")
            continue
        # Captured, PyTorch's gradients with dropout read the seed on the device, where a forward pass that was not
        # captured has not put it: an illegal address, and the end of the run.
        captured = name == OURS or not (case.backward and case.dropout_p)
        calls[name] = Timed(call, device, cold=bool(case.n_q), captured=captured)
        largest = max(e.largest for e in errors) if errors else None
        rows[name] = {**asdict(case), "provider": name, "max_error": largest, "peak_bytes": peak}

    samples = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        tick(f"{case} round {i + 1} of {rounds}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            samples[name].append(calls[name].sample_ms())
    for name, row in rows.items():
        q25, ms, q75 = statistics.quantiles(samples[name], n=4)
        row |= {"ms": ms, "ms_q25": q25, "ms_q75": q75, "tflops": case.flops / ms / 1e9}
        row |= {"graph": calls[name].graph is not None}
    for row in rows.values():
        row["speedup"] = rows[WRITTEN_OUT]["ms"] / row["ms"] if WRITTEN_OUT in rows else None
    return list(rows.values())

"""`python -m cutlass_ext.bench`: this library, attention written out in PyTorch, every SDPA backend, and every other
attention library that is installed (`peers.py`), in turn.

For people who want to know what the library does on their machine; `make demo` calls it, python/report.py makes pages
of its JSON, and python/figures.py measures with it. Each case has fresh random data; our result is checked against a
float64 computation before it is timed (the bound: twice the error of written-out attention, and what rounding in
float32 makes of gradients beside it), and a miss ends the run.
With `--backward` each case comes a second time, for its gradients; `--preset` takes the shapes of a model.

The figures are medians over rounds in which the providers take turns, in an order that rotates. On a GPU a sample is
a CUDA graph of up to 20 calls, queued behind a sleeping kernel: host time is not in it. Rows over a cache are one call
a sample, after reading more than L2 holds: there a cache comes from memory.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import cutlass_ext

from .peers import NAMES, OURS, WRITTEN_OUT, Provider, hidden_keys, installed, written_out

SAMPLE_MS = 1.0  # the least time of one sample, so that the few microseconds of an event do not count
MAX_REPEATS = 20  # calls of a sample
SLEEP_CYCLES = 10_000_000  # about 5 ms: what the host needs to queue MAX_REPEATS calls that are no graph
MORE_THAN_L2 = 512 << 20  # bytes
DROPPED = 0.1


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
    heads_kv: int = 0  # key heads; 0: as many as query heads
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


LLAMA3 = {"heads": 32, "heads_kv": 8, "head_dim": 128}
BASE = {"heads": 12, "head_dim": 64}  # GPT-2, BERT and ViT of the common size
# The attention of models: sequences and keys, and what each of them has besides.
PRESETS = {
    "llama3-8b": ([(1, 512), (1, 2048), (1, 8192)], {**LLAMA3, "causal": True}),
    "gpt2": ([(8, 256), (8, 1024)], {**BASE, "causal": True}),
    "bert": ([(32, 128), (32, 512)], {**BASE, "causal": False}),
    "vit": ([(64, 197), (32, 577)], {**BASE, "causal": False}),
    "decode": ([(1, 1024), (1, 8192), (16, 8192), (64, 4096)], {**LLAMA3, "causal": False, "n_q": 1}),
}
MOST_KEYS_ON_CPU = 1024


def preset_suite(name: str, device: str, dtype: str) -> list[Case]:
    """On a CPU one sequence, of not too many keys."""
    sizes, model = PRESETS[name]
    if device == "cpu":
        sizes = dict.fromkeys((1, min(n, MOST_KEYS_ON_CPU)) for _, n in sizes)
    return [Case(batch=batch, n=n, dtype=dtype, **model) for batch, n in sizes]


def suite(device: str, dtype: str, backward: bool = False, preset: str | None = None) -> list[Case]:
    """The default rows, or a model's; with `backward`, each one's gradients after it."""
    cases = preset_suite(preset, device, dtype) if preset else forward_suite(device, dtype)
    return [c for case in cases for c in (case, replace(case, backward=True))] if backward else cases


def forward_suite(device: str, dtype: str) -> list[Case]:
    """On a CPU, few and small ones."""
    if device == "cpu":
        table = [Case(2, 8, n, 64, causal, dtype) for n in (59, 256) for causal in (False, True)]
        return table + [Case(1, 1, n, 64, False, dtype, "memory") for n in (256, 512, 1024, 2048)]
    table = [Case(b, 16, n, 64, c, dtype) for b, n in ((4, 512), (8, 59), (1, 2048)) for c in (False, True)]
    table += [Case(b, h, n, 64, False, dtype) for b, h, n in ((1, 1, 256), (1, 1, 1024), (2, 4, 256), (2, 4, 1024))]
    table += [Case(2, 16, 8192, 64, c, dtype) for c in (False, True)]
    table += [Case(2, 16, 4096, 128, c, dtype) for c in (False, True)]
    lengths = (512, 1024, 2048, 4096, 8192)
    table += [Case(1, 1, n, 64, False, dtype, "memory") for n in lengths]
    return table + [Case(1, 16, n, 64, True, dtype, "scaling") for n in lengths]


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
    """A pass in float64 for up to three (sequence, key head) pairs of a case, with the query heads that share them, and
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
        norms = [math.sqrt(sum(e.square().sum().item() for e in expected)) for expected in self.expected]
        self.of_lse = [torch.finfo(torch.float32).eps * norm if len(norms) > 1 else 0.0 for norm in norms]
        self.of_ds = [Errors(0.0, 0.0) for _ in self.expected]
        if case.backward:
            fields = [self._rounding_of_ds(case, self._inputs(case, inputs, b, h, True)) for b, h in self.pairs]
            self.of_ds = [largest_and_norm(parts) for parts in zip(*fields, strict=True)]

    def _inputs(self, case: Case, x: Inputs, b: int, h: int, double: bool) -> Inputs:
        """Those of a sequence and a key head."""
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
        """Of a sequence and a key head what a tensor of query heads or of key heads has."""
        heads = 1 if of_scores else 2
        n = t.shape[heads] // self.key_heads
        return t[b : b + 1].narrow(heads, h * n, n)

    @torch.no_grad()
    def _rounding_of_ds(self, case: Case, x: Inputs) -> list[Tensor]:
        """The standard deviation that dS = P (dP - delta) brings to dq, dk, dv and dbias of a sequence and a key head.

        Where a row sees few keys, or one takes nearly all, dP and delta are nearly one number, from two sums of d
        products; written-out attention subtracts the one sum from itself, and its rounding is gone. In 400 draws of
        (1, 33, 2, 64) causal, emulated in float32, 5% were beyond section 3's bounds without this, 0.2% with it; it
        goes with P^2, so that of many keys little is left: at N 256 a fifth of the reference's error, in full 2%.
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


# ---- how fast, in how much memory ----


def sample_ms(call: Callable[[], object], repeats: int, device: str) -> float:
    """Milliseconds a call; on a GPU the calls wait behind a sleeping kernel, so that host work is not in the figure."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


class Timed:
    """A call as it is timed: on a GPU some calls in one CUDA graph, or one after the other where a graph cannot hold
    them; one at a time, and with nothing in L2, where `cold`."""

    def __init__(self, call: Callable[[], object], device: str, cold: bool = False):
        self.call, self.device, self.repeats, self.graph = call, device, 1, None
        self.flushed = torch.empty(MORE_THAN_L2 // 4, device=device) if cold and device == "cuda" else None
        if device == "cpu":
            return
        ms = min(sample_ms(call, 1, device) for _ in range(3))
        if not cold:
            self.repeats = max(1, min(MAX_REPEATS, math.ceil(SAMPLE_MS / ms)))
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
    """The most memory that one call holds at a time beyond its inputs, the results counted."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
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
            peak = peak_extra_bytes(call.step, device)
        except Exception as error:  # out of memory, or not taken; every library has exceptions of its own
            if name == OURS:
                raise
            refusals.setdefault(name, f"{case}: {str(error).strip().splitlines()[0] if str(error) else repr(error)}")
            continue
        # What others drop is not what we drop.
        errors = oracle.errors(results) if name == OURS or not case.dropout_p else None
        del results
        if name == OURS and not oracle.accepts(errors):
            raise Wrong(f"{case}: {errors} against float64, where written-out attention has {oracle.reference}")
        calls[name] = Timed(call, device, cold=bool(case.n_q))
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


# ---- who, where, and the answers ----


def explanation(case: Case, device: str) -> cutlass_ext.Explanation:
    """What this library runs for the case."""
    x = case.inputs(device)
    if not case.backward:
        return cutlass_ext.explain(x.q, x.k, x.v, **x.options(case))
    out, lse = cutlass_ext.fmha(x.q, x.k, x.v, return_lse=True, **x.options(case))
    return cutlass_ext.explain(cutlass_ext.fmha_backward, x.dout, x.q, x.k, x.v, out, lse, **x.options(case))


def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine(device: str) -> dict:
    """What the figures hold for: device, driver, torch, this library's commit."""
    commit = output_of("git", "rev-parse", "--short=12", "HEAD")
    if commit and output_of("git", "status", "--porcelain", "--", "../csrc", "."):
        commit += " and uncommitted changes"
    facts = {"library": cutlass_ext.__version__, "commit": commit, "torch": torch.__version__}
    facts |= {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "gpu": None, "driver": None}
    if device == "cuda":
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver}
    else:
        facts["cpu"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return facts


def print_table(console, rows: list[dict]) -> None:
    """The case, then a line for each provider; the fastest in bold."""
    from rich.table import Table

    title = f"Attention {passes(rows)}, {rows[0]['dtype']}; speedup over attention written out in PyTorch"
    note = "Extra MB of a backward pass: the peak of forward and backward. Its max error: of dq, dk and dv."
    caption = note if any(map(is_backward, rows)) else None
    table = Table("(B, N, H, d)", "provider", title=title, title_justify="left", caption=caption)
    for heading in ("ms", "TFLOP/s", "speedup", "extra MB", "max error"):
        table.add_column(heading, justify="right")
    for case, group in grouped(rows):
        best = min(row["ms"] for row in group)
        for i, row in enumerate(group):
            speedup = f"{row['speedup']:.2f}" if row["speedup"] else "-"
            figures = f"{row['ms']:.4f}", f"{row['tflops']:.3g}", speedup
            table.add_row(
                str(case) if i == 0 else "",
                row["provider"],
                *figures,
                f"{row['peak_bytes'] / 1e6:.2f}",
                f"{row['max_error']:.1e}" if row["max_error"] is not None else "-",
                style="bold" if row["ms"] == best else None,
                end_section=i == len(group) - 1,
            )
    console.print(table)


def is_backward(row: dict) -> bool:
    return row.get("backward", False)  # files from before there was a backward pass do not say


def passes(rows: list[dict]) -> str:
    return "forward and backward" if any(map(is_backward, rows)) else "forward"


def grouped(rows: list[dict]) -> Iterator[tuple[Case, list[dict]]]:
    """The rows of each case, in the order of the suite."""
    groups: dict[Case, list[dict]] = {}
    for row in rows:
        groups.setdefault(Case(**{f: row[f] for f in Case.__dataclass_fields__ if f in row}), []).append(row)
    yield from groups.items()


def plot(rows: list[dict], facts: dict, folder: Path) -> list[Path]:
    """time.png, tflops.png and memory.png against N, from the rows of the series that a run holds; the same of backward
    passes, their names with backward_ in front."""
    folder.mkdir(parents=True, exist_ok=True)
    forward, backward = ([row for row in rows if is_backward(row) == b] for b in (False, True))
    return plot_pass(forward, "", facts, folder) + plot_pass(backward, "backward_", facts, folder)


def plot_pass(rows: list[dict], prefix: str, facts: dict, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scaling = [row for row in rows if row["series"] == "scaling"] or [row for row in rows if row["series"] == "memory"]
    memory = [row for row in rows if row["series"] == "memory"]
    figures = (
        ("time", scaling, lambda row: row["ms"], "ms", "log"),
        ("tflops", scaling, lambda row: row["tflops"], "TFLOP/s", "linear"),
        ("memory", memory, lambda row: row["peak_bytes"] / 1e6, "extra memory, MB", "log"),
    )
    paths = []
    for name, points, value, label, scale in figures:
        if not points:
            continue
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for provider in NAMES:
            line = [(row["n"], value(row)) for row in points if row["provider"] == provider]
            if line:
                width = 2.5 if provider == OURS else 1.2
                axes.plot(*zip(*line, strict=True), marker="o", markersize=4, linewidth=width, label=provider)
        first = points[0]
        heads = f"{first['heads']} head{'s' if first['heads'] > 1 else ''}"
        axes.set_title(
            f"{heads}, d {first['head_dim']}, {first['dtype']}{', causal' if first['causal'] else ''}"
            f"{', backward' if prefix else ''}: {facts['gpu'] or 'CPU'}",
            fontsize=10,
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale(scale)
        ticks = sorted({row["n"] for row in points})
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set(xlabel="N (query and key rows)", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        paths.append(folder / f"{prefix}{name}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


@contextmanager
def progress_bar(console, total: int):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutlass_ext.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32; of a preset on a GPU bfloat16"
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), help="the attention of a model, not the suite")
    parser.add_argument("--backward", action="store_true", help="the gradients of each case too")
    parser.add_argument("--rounds", type=int, help="samples of each provider (default: 30; 5 on a CPU)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and what they hold for")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="write time.png, tflops.png, memory.png of the suite; backward_time.png and so on",
    )
    parser.add_argument("--commit", help="what to record as commit where there is no git repository")
    options = parser.parse_args(arguments)
    try:
        from rich.console import Console

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install rich matplotlib")

    console = Console(width=None if sys.stdout.isatty() else 110)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rounds = max(options.rounds or (30 if device == "cuda" else 5), 2)
    warnings.filterwarnings("ignore")  # SDPA warns once for each reason why a backend does not take a case
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    facts = machine(device)
    facts["commit"] = options.commit or facts["commit"]
    providers, versions, absent = installed()
    facts |= versions
    if device == "cpu":
        console.print("No GPU: small sizes, on the CPU path (PyTorch's operators). No CUDA kernel is timed here.")
    dtype = options.dtype or ("bfloat16" if options.preset and device == "cuda" else "float32")
    if absent:
        console.print("Not compared: " + "; ".join(f"{name} ({how})" for name, how in absent.items()), highlight=False)
    cases, rows, refusals = suite(device, dtype, options.backward, options.preset), [], {}
    try:
        for case in cases[: 1 + options.backward]:
            console.print(f"{case}: {explanation(case, device)}", highlight=False)
        with progress_bar(console, len(cases) * (rounds + len(providers))) as tick:
            for case in cases:
                rows += measure(case, device, rounds, tick, providers, refusals)
    except (Wrong, NotImplementedError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}")
        return 1
    print_table(console, rows)
    for name in set(versions) & set(refusals):
        console.print(f"{name} did not take {refusals[name]}", highlight=False, markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items() if value), highlight=False)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rounds": rounds, "rows": rows}, indent=1) + "\n")
        console.print(f"wrote {options.json}")
    if options.plot and (paths := plot(rows, facts, options.plot)):
        console.print(f"wrote {', '.join(map(str, paths))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m cutlass_ext.bench`: this library, attention written out in PyTorch, and every SDPA backend, in turn.

For people who want to know what the library does on their machine; `make demo` calls it, and its JSON is what
python/report.py turns into bench/results. Each case has fresh random data; our result is checked against a float64
computation before it is timed (the bound: twice the error of written-out attention), and a miss ends the run. With
`--backward` each case comes a second time, for its gradients; `--preset` takes the shapes of a model for the suite's.

The figures are medians over rounds in which the providers take turns, in an order that rotates. On a GPU a sample is
up to 20 calls back to back, timed by events and queued behind a sleeping kernel: host time is not in it.
"""

from __future__ import annotations

import argparse
import datetime
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutlass_ext

OURS, WRITTEN_OUT = "cutlass_ext", "written out"
SAMPLE_MS = 1.0  # the least time of one sample, so that the few microseconds of an event do not count
MAX_REPEATS = 20  # calls that the host queues in less time than the kernel before them sleeps
SLEEP_CYCLES = 10_000_000  # about 5 ms


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
    n_q: int = 0  # query rows; 0: as many as keys

    @property
    def flops(self) -> int:
        """Two matrix products over the visible (query, key) pairs; five in the backward pass."""
        pairs = self.n * (self.n + 1) // 2 if self.causal else self.rows * self.n
        return (10 if self.backward else 4) * self.batch * self.heads * pairs * self.head_dim

    def __str__(self) -> str:
        words = [" causal"] * self.causal + [" backward"] * self.backward
        rows, heads = [f"{self.n_q} x "] * bool(self.n_q), [f"/{self.heads_kv}"] * bool(self.heads_kv)
        sizes = f"{self.batch}, {''.join(rows)}{self.n}, {self.heads}{''.join(heads)}, {self.head_dim}"
        return f"({sizes}){''.join(words)}"

    @property
    def rows(self) -> int:
        return self.n_q or self.n

    @property
    def key_heads(self) -> int:
        return self.heads_kv or self.heads

    def inputs(self, device: str) -> list[Tensor]:
        """q, k and v; and dout, which only the backward pass reads."""
        of_rows, of_keys = (self.rows, self.heads), (self.n, self.key_heads)
        shapes = [(self.batch, *sizes, self.head_dim) for sizes in (of_rows, of_keys, of_keys, of_rows)]
        return [torch.randn(shape, device=device).to(getattr(torch, self.dtype)) for shape in shapes]


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


# ---- the providers: (case, q, k, v) -> a call that returns [B, N, H, d] ----


def written_out(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """PyTorch multi-head attention, scores and all, key heads repeated where query heads share them; the causal mask is
    made beforehand and not counted."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    hidden = torch.ones(case.rows, case.n, dtype=torch.bool, device=q.device).triu(1) if case.causal else None

    def call() -> Tensor:
        keys, values = (k, v) if groups == 1 else (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = q @ keys.transpose(-2, -1) / math.sqrt(case.head_dim)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return (torch.softmax(scores, -1) @ values).transpose(1, 2)

    return call


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return lambda: cutlass_ext.fmha(q, k, v, causal=case.causal)


def sdpa(backend: SDPBackend) -> Callable[..., Callable[[], Tensor]]:
    def make(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))

        def call() -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.heads_kv > 0)
                return out.transpose(1, 2)

        return call

    return make


PROVIDERS = {
    OURS: ours,
    WRITTEN_OUT: written_out,
    "SDPA math": sdpa(SDPBackend.MATH),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
}


# ---- what is timed ----

Results = tuple[Tensor, ...]  # the output; or dq, dk, dv


class Pass:
    """The forward pass of a provider for a case, or its backward pass after a forward pass that was made beforehand."""

    def __init__(self, make: Callable[..., Callable[[], Tensor]], case: Case, inputs: list[Tensor]):
        self.backward, self.dout = case.backward, inputs[3]
        self.inputs = [t.detach().requires_grad_(case.backward) for t in inputs[:3]]
        self.forward = make(case, *self.inputs)
        self.out = self.forward() if case.backward else None

    def __call__(self) -> Results:
        if not self.backward:
            return (self.forward(),)
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def step(self) -> Results:
        """All that a step of training takes: forward, and backward where that is what is timed."""
        out = self.forward()
        return torch.autograd.grad(out, self.inputs, self.dout) if self.backward else (out,)


# ---- right? ----


@dataclass
class Errors:
    """Against float64, over a sample of (sequence, head) pairs: largest absolute difference, and Frobenius norm."""

    largest: float
    norm: float


class Oracle:
    """A pass in float64 for up to three (sequence, key head) pairs of a case, with the query heads that share them, and
    written-out attention's errors."""

    def __init__(self, case: Case, inputs: list[Tensor]):
        self.key_heads = case.key_heads
        last = (case.batch - 1, case.key_heads - 1)
        self.pairs = sorted({(0, 0), (case.batch // 2, case.key_heads // 3), last})
        ones = [[self._part(t, b, h) for t in inputs] for b, h in self.pairs]
        # Of each result in turn (the output; or dq, dk, dv) a list over the pairs.
        self.expected = list(zip(*(Pass(written_out, case, [t.double() for t in one])() for one in ones), strict=True))
        self.reference = self._errors(zip(*(Pass(written_out, case, one)() for one in ones), strict=True))
        eps = torch.finfo(inputs[0].dtype).eps
        self.eps = [eps * max(e.abs().max().item() for e in expected) for expected in self.expected]
        # P of a backward pass is exp(score - lse), and lse one float32: its rounding is in all of a row's P.
        norms = [math.sqrt(sum(e.square().sum().item() for e in expected)) for expected in self.expected]
        self.of_lse = [torch.finfo(torch.float32).eps * norm if len(norms) > 1 else 0.0 for norm in norms]

    def _part(self, t: Tensor, b: int, h: int) -> Tensor:
        """Of a sequence and a key head what a tensor of query heads or of key heads has."""
        n = t.shape[2] // self.key_heads
        return t[b : b + 1, :, h * n : (h + 1) * n]

    def _errors(self, results: Iterable[Iterable[Tensor]]) -> list[Errors]:
        found = []
        for parts, expected in zip(results, self.expected, strict=True):
            differences = [part.double() - e for part, e in zip(parts, expected, strict=True)]
            largest = max(d.abs().max().item() for d in differences)
            found.append(Errors(largest, math.sqrt(sum(d.square().sum().item() for d in differences))))
        return found

    def errors(self, results: Results) -> list[Errors]:
        return self._errors([[self._part(t, b, h) for b, h in self.pairs] for t in results])

    def accepts(self, errors: list[Errors]) -> bool:
        return all(
            e.largest <= 2 * reference.largest + 2 * eps and e.norm <= 1.5 * reference.norm + of_lse  # False for NaN
            for e, reference, eps, of_lse in zip(errors, self.reference, self.eps, self.of_lse, strict=True)
        )


# ---- how fast, in how much memory ----


def repeats_of(call: Callable[[], object], device: str) -> int:
    """How many calls make a sample of SAMPLE_MS on a GPU; 1 on a CPU."""
    if device == "cpu":
        return 1
    ms = min(sample_ms(call, 1, device) for _ in range(3))
    return max(1, min(MAX_REPEATS, math.ceil(SAMPLE_MS / ms)))


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


def measure(case: Case, device: str, rounds: int, tick: Callable[[str], None]) -> list[dict]:
    """One row for each provider that takes the case."""
    inputs = case.inputs(device)
    oracle = Oracle(case, inputs)
    calls, rows = {}, {}
    for name, make in PROVIDERS.items():
        tick(f"{case} {name}")
        try:
            call = Pass(make, case, inputs)
            results = call()
            peak = peak_extra_bytes(call.step, device)
        except RuntimeError:  # out of memory, or a backend that does not take the case
            if name == OURS:
                raise
            continue
        errors = oracle.errors(results)
        del results
        if name == OURS and not oracle.accepts(errors):
            raise Wrong(f"{case}: {errors} against float64, where written-out attention has {oracle.reference}")
        calls[name] = call, repeats_of(call, device)
        rows[name] = {**asdict(case), "provider": name, "max_error": max(e.largest for e in errors), "peak_bytes": peak}

    samples = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        tick(f"{case} round {i + 1} of {rounds}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            samples[name].append(sample_ms(*calls[name], device))
    for name, row in rows.items():
        q25, ms, q75 = statistics.quantiles(samples[name], n=4)
        row |= {"ms": ms, "ms_q25": q25, "ms_q75": q75, "tflops": case.flops / ms / 1e9}
    for row in rows.values():
        row["speedup"] = rows[WRITTEN_OUT]["ms"] / row["ms"] if WRITTEN_OUT in rows else None
    return list(rows.values())


# ---- who, where, and the answers ----


def explanation(case: Case, device: str) -> cutlass_ext.Explanation:
    """What this library runs for the case."""
    q, k, v, dout = case.inputs(device)
    if not case.backward:
        return cutlass_ext.explain(q, k, v, causal=case.causal)
    out, lse = cutlass_ext.fmha(q, k, v, causal=case.causal, return_lse=True)
    return cutlass_ext.explain(cutlass_ext.fmha_backward, dout, q, k, v, out, lse, causal=case.causal)


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
                f"{row['max_error']:.1e}",
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
        for provider in PROVIDERS:
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
    if device == "cpu":
        console.print("No GPU: small sizes, on the CPU path (PyTorch's operators). No CUDA kernel is timed here.")
    dtype = options.dtype or ("bfloat16" if options.preset and device == "cuda" else "float32")
    cases, rows = suite(device, dtype, options.backward, options.preset), []
    try:
        for case in cases[: 1 + options.backward]:
            console.print(f"{case}: {explanation(case, device)}", highlight=False)
        with progress_bar(console, len(cases) * (rounds + len(PROVIDERS))) as tick:
            for case in cases:
                rows += measure(case, device, rounds, tick)
    except (Wrong, NotImplementedError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}")
        return 1
    print_table(console, rows)
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

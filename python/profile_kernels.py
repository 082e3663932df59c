"""What Nsight Compute says of the kernels of some calls: time, occupancy, bank conflicts, and how much of each limit of
the GPU is reached; and a picture of them under its roofs.

    python python/profile_kernels.py                        # every call of CALLS; or: forward backward
    python python/profile_kernels.py build/profile/*.csv    # what an earlier run saved, on any machine

Each call is made three times in a process of its own, and the kernels of the last are profiled (`ncu --set full`, the
clocks left as they are). Its counters are kept in build/profile/CALL.csv, the picture in build/profile/roofline.png.
Any `ncu --import REPORT --page raw --csv` will do for the table; the picture wants a file that has the name of a call.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from report import table

from cutlass_ext.bench import LLAMA3
from cutlass_ext.measurement import Case, Pass
from cutlass_ext.peers import ours

FOLDER = Path("build", "profile")
WIDE = {**LLAMA3, "dtype": "bfloat16"}
CALLS = {
    "forward": Case(2, 16, 8192, 128, False, "bfloat16"),
    "causal": Case(2, 16, 8192, 128, True, "bfloat16"),
    "backward": Case(2, 16, 8192, 128, False, "bfloat16", backward=True),
    "short": Case(32, n=197, causal=True, **WIDE),
    "decode": Case(16, n=8192, causal=False, n_q=1, **WIDE),
    "pages": Case(16, n=8192, causal=False, n_q=1, page=16, **WIDE),
    "float32": Case(2, 16, 4096, 64, False, "float32"),
}
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
FFMA = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.pct_of_peak_sustained_elapsed"
ASKED = [pattern.format(op) for pattern in (CONFLICTS, PASSES) for op in ("ld", "st")] + [FFMA]
# Of a pipe ncu counts the instructions, the cycles in which it is active, or both; the larger one limits.
PIPE = r"sm__(inst_executed_)?pipe_{}(_op_[hg]mma)?(_cycles_active)?\.avg\.pct_of_peak_sustained_(elapsed|active)"
# Flops a clock of a multiprocessor, by compute capability: matrix products of 16 bits, and FFMA.
PEAK = {"8.0": (2048, 128), "8.6": (512, 256), "8.9": (512, 256), "9.0": (4096, 256)}
FACTORS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3}
FACTORS |= {prefix + unit: 10**power for unit in ("byte", "hz") for prefix, power in zip("kmg", (3, 6, 9), strict=True)}


@dataclass
class Kernel:
    """A launch: its name, and its counters in seconds, bytes, hertz, per cent or as counted."""

    name: str
    capability: str
    counters: dict[str, float]

    def __call__(self, *patterns: str) -> float | None:
        """The first of the counters that is there; of several that a pattern names, the largest."""
        for pattern in patterns:
            if found := [value for name, value in self.counters.items() if re.fullmatch(pattern, name)]:
                return max(found)
        return None

    @property
    def seconds(self) -> float | None:
        return self(r"gpu__time_duration\.(sum|avg)")

    @property
    def bytes(self) -> float | None:
        """What it read of and wrote to the GPU's memory."""
        rate = self(r"dram__bytes\.sum\.per_second")
        return rate * self.seconds if rate is not None and self.seconds else self(r"dram__bytes\.sum")


# ---- reading ----


def number(text: str, unit: str) -> float | None:
    """In base units; None of what is no number."""
    what, _, each = unit.lower().partition("/")
    try:
        return float(text.replace(",", "")) * FACTORS.get(what, 1) / FACTORS.get(each, 1)
    except ValueError:
        return None


def short_name(name: str) -> str:
    """A kernel without its parameters, the casts of its template arguments, and the namespaces that all share."""
    name = re.sub(r"\([\w:]+\)(?=-?\d)", "", name.removeprefix("void "))
    return re.sub(r"\b(cutlass_ext|cutlass|cute)::", "", re.sub(r"\([^()]*\)$", "", name))


def kernels(lines: list[str]) -> list[Kernel]:
    """Of `ncu --page raw --csv`: a line of names, one of units, then one for each launch; other lines are talk."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 2 or "Kernel Name" not in rows[0]:
        raise ValueError("not what `ncu --page raw --csv` writes: no line of names with a Kernel Name in it")
    names, units = rows[:2]
    found = []
    for row in rows[2:]:
        texts = dict(zip(names, row, strict=True))
        values = {name: number(text, unit) for name, unit, text in zip(names, units, row, strict=True)}
        counters = {name: value for name, value in values.items() if value is not None}
        found.append(Kernel(short_name(texts["Kernel Name"]), texts.get("CC", ""), counters))
    return found


# ---- running ----


def run(name: str) -> None:
    """What is profiled: the third call."""
    case = CALLS[name]
    call = Pass(ours, case, case.inputs("cuda"))
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(ncu: str, name: str) -> list[str]:
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--set", "full"]
    command += ["--metrics", ",".join(ASKED), "--print-units", "base", "--page", "raw", "--csv"]
    command += ["--kernel-name-base", "demangled", "-k", "regex:cutlass_ext", sys.executable, __file__, "--run", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or "Kernel Name" not in done.stdout:
        sys.exit(f"{name}: ncu could not profile it:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.splitlines()


# ---- telling ----

HEADINGS = ["call", "kernel", "us", "registers", "occupancy, %", "tensor cores, %", "FFMA, %", "exp2 (XU), %",
            "L1 and shared memory, %", "L2, %", "DRAM, %", "conflicts of shared loads, %", "of stores, %"]  # fmt: skip


def share(kernel: Kernel, op: str) -> float | None:
    """Per cent of the passes over shared memory that bank conflicts cost."""
    conflicts, passes = kernel(re.escape(CONFLICTS.format(op))), kernel(re.escape(PASSES.format(op)))
    return None if conflicts is None or passes is None else 100 * conflicts / max(passes, 1)


def cells(call: str, kernel: Kernel) -> list[str]:
    def text(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    pipes = [PIPE.format("tensor"), PIPE.format("xu")]
    return [
        call,
        kernel.name,
        text(kernel.seconds and kernel.seconds * 1e6),
        text(kernel("launch__registers_per_thread"), 0),
        text(kernel(r"sm__warps_active\.avg\.pct_of_peak_sustained_active")),
        text(kernel(pipes[0])),
        text(kernel(re.escape(FFMA), PIPE.format("fma"))),
        text(kernel(pipes[1])),
        text(kernel(r"l1tex__throughput\.avg\.pct_of_peak_sustained_(elapsed|active)")),
        text(kernel(r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed")),
        text(kernel(r"(gpu__)?dram_?_?throughput\.avg\.pct_of_peak_sustained_elapsed")),
        text(share(kernel, "ld")),
        text(share(kernel, "st")),
    ]


@dataclass
class Point:
    """A call's longest kernel under the roofs, with all flops of the call."""

    call: str
    intensity: float  # flops a byte of the GPU's memory
    rate: float  # flops a second
    compute_roof: float
    memory_roof: float  # bytes a second


def point(call: str, launches: list[Kernel]) -> Point | None:
    """None where a counter is missing."""
    case = CALLS.get(call)
    longest = max(launches, key=lambda kernel: kernel.seconds or 0, default=None)
    if case is None or longest is None or longest.capability not in PEAK or not longest.seconds or not longest.bytes:
        return None
    count = longest(r"device__attribute_multiprocessor_count", r"launch__sm_count")
    clock = longest(r"(sm|smsp|gpc)__cycles_elapsed\.(avg|max)\.per_second")
    width = longest(r"dram__bytes\.sum\.peak_sustained")
    memory_clock = longest(r"dram__cycles_elapsed\.avg\.per_second")
    if None in (count, clock, width, memory_clock):
        return None
    flops_a_clock = PEAK[longest.capability][case.dtype == "float32"]
    rate, roof = case.flops / longest.seconds, flops_a_clock * count * clock
    return Point(call, case.flops / longest.bytes, rate, roof, width * memory_clock)


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    lowest = min(point.intensity for point in points) / 4
    highest = 4 * max(max(point.intensity, point.compute_roof / point.memory_roof) for point in points)
    memory_roof = max(point.memory_roof for point in points)
    for roof in sorted({round(point.compute_roof, -12) for point in points}):
        xs = lowest, roof / memory_roof, highest
        axes.plot(xs, [min(x * memory_roof, roof) / 1e12 for x in xs], color="gray", linewidth=1)
        axes.annotate(f"{roof / 1e12:.0f} TFLOP/s", (highest, roof / 1e12), ha="right", va="bottom", fontsize=8)
    for point in points:
        reached = point.rate / min(point.compute_roof, point.intensity * memory_roof)
        axes.plot(point.intensity, point.rate / 1e12, "o")
        where = point.intensity, point.rate / 1e12
        text = f"{point.call}, {100 * reached:.0f}%"
        axes.annotate(text, where, xytext=(5, -10), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="flops a byte of DRAM", ylabel="TFLOP/s")
    axes.set_title(f"Roofs at the clocks of the run; memory {memory_roof / 1e12:.2f} TB/s", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def tell(profiles: dict[str, list[Kernel]], folder: Path, say: Callable[[str], None] = print) -> None:
    """The table, and the picture of the calls whose counters suffice."""
    say(table(HEADINGS, [cells(call, kernel) for call, launches in profiles.items() for kernel in launches]))
    found = {call: point(call, launches) for call, launches in profiles.items()}
    if points := [point for point in found.values() if point]:
        draw(points, folder / "roofline.png")
        say(f"wrote {folder / 'roofline.png'}: of each call its longest kernel, with all the call's flops")
    if missing := [call for call, point in found.items() if point is None]:
        say(f"not in a picture: {', '.join(missing)}: no call of this script, or a counter is missing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="*", default=list(CALLS), help=f"calls ({', '.join(CALLS)}) or saved CSV files")
    parser.add_argument("--run", choices=CALLS, help=argparse.SUPPRESS)  # what ncu starts
    options = parser.parse_args()
    if options.run:
        return run(options.run)
    FOLDER.mkdir(parents=True, exist_ok=True)
    profiles = {}
    for what in options.what:
        if what not in CALLS:
            try:
                profiles[Path(what).stem] = kernels(Path(what).read_text().splitlines())
            except (OSError, ValueError) as error:
                parser.error(f"{what}: {error}; expected one of {', '.join(CALLS)}, or a file that ncu wrote")
            continue
        ncu = shutil.which("ncu")
        if ncu is None or not torch.cuda.is_available():
            parser.error(f"{what}: wants a GPU and Nsight Compute's ncu on PATH; saved CSV files go without")
        lines = profile(ncu, what)
        (FOLDER / f"{what}.csv").write_text("\n".join(lines) + "\n")
        profiles[what] = kernels(lines)
    tell(profiles, FOLDER)


if __name__ == "__main__":
    main()

"""`python -m cutlass_ext.bench`: this library, attention written out in PyTorch, every SDPA backend, and every other
attention library that is installed (`peers.py`), in turn, each measured as `measurement.py` says.

For people who want to know what the library does on their machine; `make demo` calls it, python/report.py makes pages
of its JSON. A result of ours that misses float64 ends the run. With `--backward` each case comes a second time, for its
gradients; `--preset` takes the shapes of a model, `--random` shapes that nobody named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import cutlass_ext

from .measurement import Case, Wrong, measure
from .peers import NAMES, OURS, installed

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
MOST_SCORES = 1e8
# What random cases are drawn from.
BATCHES, HEADS_KV, GROUPS = (1, 1, 1, 2, 3, 4, 8, 16, 32, 64), (1, 1, 2, 4, 8, 12, 32), (1, 1, 1, 2, 4, 5, 8, 16)
HEAD_DIMS, FEW_ROWS, PAGES = (64, 64, 72, 96, 128, 128, 128, 192, 256), (1, 1, 2, 4, 5, 8, 16, 33, 64), (0, 16, 64, 256)


def preset_suite(name: str, device: str, dtype: str) -> list[Case]:
    """On a CPU one sequence, of not too many keys."""
    sizes, model = PRESETS[name]
    if device == "cpu":
        sizes = dict.fromkeys((1, min(n, MOST_KEYS_ON_CPU)) for _, n in sizes)
    return [Case(batch=batch, n=n, dtype=dtype, **model) for batch, n in sizes]


def random_suite(count: int, seed: int, device: str, dtype: str, backward: bool) -> list[Case]:
    """So many, of lengths that divide nothing: half of them rows that see as many keys, causal or not, half few rows
    over a cache, in pages or not. None takes more than some milliseconds; on a CPU all are small."""
    draw, cases = random.Random(seed), []
    least_keys = 64 if backward else 1  # of fewer gradients the ratio of two rounding errors is luck
    most_keys, most_flops, most_elements = (32_768, 5e11, 2e8) if device == "cuda" else (200, 1e8, 1e5)
    while len(cases) < count:
        few, heads_kv = draw.random() < 0.5, draw.choice(HEADS_KV)
        n = round(math.exp(draw.uniform(math.log(least_keys), math.log(most_keys))))
        page = draw.choice(PAGES) if few else 0
        if page and backward:
            continue  # pages have no gradients
        case = Case(
            batch=draw.choice(BATCHES),
            heads=heads_kv * draw.choice(GROUPS),
            n=-(-n // page) * page if page else n,  # whole pages
            head_dim=draw.choice(HEAD_DIMS),
            causal=not few and draw.random() < 0.6,
            dtype=dtype,
            heads_kv=heads_kv,
            n_q=draw.choice(FEW_ROWS) if few else 0,
            page=page,
        )
        elements = case.batch * case.head_dim * max(case.n * heads_kv, case.rows * case.heads)
        of_oracle = case.heads // heads_kv * case.rows * case.n  # scores in float64 that it has at a time
        if case.flops <= most_flops and elements <= most_elements and of_oracle <= MOST_SCORES:
            cases.append(case)
    return cases


def suite(
    device: str, dtype: str, backward: bool = False, preset: str | None = None, count: int = 0, seed: int = 0
) -> list[Case]:
    """The default rows, a model's, or `count` at random; with `backward`, each one's gradients after it."""
    if count:
        cases = random_suite(count, seed, device, dtype, backward)
    else:
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
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def driver_version() -> str | None:
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def commit_of_sources(package: Path) -> str | None:
    """Of the source tree that a package lies in. None where there is none: the git repository around an installed
    package, as that of the project whose environment it is in, says nothing of it."""
    git = "git", "-C", str(package)
    top = output_of(*git, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.resolve().parent or not Path(top, "csrc").is_dir():
        return None
    commit = output_of(*git, "rev-parse", "--short=12", "HEAD")
    if commit and output_of(*git, "status", "--porcelain", "--", "../csrc", "."):
        commit += " and uncommitted changes"
    return commit


def machine(device: str) -> dict:
    """What the figures hold for: device, driver, torch, this library's commit."""
    commit = commit_of_sources(Path(__file__).parent)
    facts = {"library": cutlass_ext.__version__, "commit": commit, "torch": torch.__version__}
    facts |= {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "gpu": None, "driver": None}
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver_version()}
    else:
        facts["cpu"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return facts


def print_table(console, rows: list[dict]) -> None:
    """The case, then a line for each provider; the fastest in bold."""
    from rich.table import Table

    title = f"Attention {passes(rows)}, {rows[0]['dtype']}; speedup over attention written out in PyTorch"
    note = "Extra MB of a backward pass: the peak of forward and backward. Its max error: of dq, dk and dv."
    caption = note if any(row["backward"] for row in rows) else None
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


def print_ratios(console, rows: list[dict]) -> None:
    """Each case's fastest other provider beside this library, where that is slowest first; and their mean."""
    from rich.table import Table

    title = f"Attention {passes(rows)}, {rows[0]['dtype']}; the time of the fastest other over ours"
    table = Table("(B, N, H, d)", "fastest other", title=title, title_justify="left")
    for heading in ("its ms", "our ms", "ratio"):
        table.add_column(heading, justify="right")
    ratios = []
    for case, group in grouped(rows):
        mine = next(row["ms"] for row in group if row["provider"] == OURS)
        if others := [row for row in group if row["provider"] != OURS]:
            best = min(others, key=lambda row: row["ms"])
            ratios.append((best["ms"] / mine, str(case), best["provider"], f"{best['ms']:.4f}", f"{mine:.4f}"))
    for ratio, *words in sorted(ratios):
        table.add_row(*words, f"{ratio:.3f}", style="bold" if ratio < 1 else None)
    console.print(table)
    if ratios:
        mean, slower = statistics.geometric_mean(ratio for ratio, *_ in ratios), sum(ratio < 1 for ratio, *_ in ratios)
        console.print(f"geometric mean {mean:.3f} of {len(ratios)}; {slower} below 1", highlight=False)


def passes(rows: list[dict]) -> str:
    return "forward and backward" if any(row["backward"] for row in rows) else "forward"


def grouped(rows: list[dict]) -> Iterator[tuple[Case, list[dict]]]:
    """The rows of each case, in the order of the suite."""
    groups: dict[Case, list[dict]] = {}
    for row in rows:
        groups.setdefault(Case(**{f: row[f] for f in Case.__dataclass_fields__}), []).append(row)
    yield from groups.items()


def plot(rows: list[dict], facts: dict, folder: Path) -> list[Path]:
    """time.png, tflops.png and memory.png against N, from the rows of the series that a run holds; where it has none,
    cases.png, a group of bars for each case. The same of backward passes, their names with backward_ in front."""
    folder.mkdir(parents=True, exist_ok=True)
    forward, backward = ([row for row in rows if row["backward"] == b] for b in (False, True))
    draw = plot_pass if any(row["series"] != "table" for row in rows) else plot_cases
    return draw(forward, "", facts, folder) + draw(backward, "backward_", facts, folder)


def plot_cases(rows: list[dict], prefix: str, facts: dict, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not rows:
        return []
    cases = dict(grouped(rows))
    providers = [name for name in NAMES if any(row["provider"] == name for row in rows)]
    width = 0.8 / len(providers)
    figure, axes = plt.subplots(figsize=(2 + 2 * len(cases), 4), layout="constrained")
    for i, provider in enumerate(providers):
        bars = [
            (c, row["ms"]) for c, group in enumerate(cases.values()) for row in group if row["provider"] == provider
        ]
        axes.bar([c - 0.4 + (i + 0.5) * width for c, _ in bars], [ms for _, ms in bars], width, label=provider)
    axes.set_title(f"(B, N, H, d) {rows[0]['dtype']}: {facts['gpu'] or 'CPU'}", fontsize=10)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), list(map(str, cases)), fontsize=8)
    axes.set(ylabel="ms")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    path = folder / f"{prefix}cases.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


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
        first = points[0]
        heads = f"{first['heads']} head{'s' if first['heads'] > 1 else ''}"
        title = (
            f"{heads}, d {first['head_dim']}, {first['dtype']}{', causal' if first['causal'] else ''}"
            f"{', backward' if prefix else ''}: {facts['gpu'] or 'CPU'}"
        )
        draw_against_n(axes, points, value, title, label, scale)
        paths.append(folder / f"{prefix}{name}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


def draw_against_n(axes, rows: list[dict], value: Callable[[dict], float], title: str, label: str, scale: str) -> None:
    """A line of each provider's values, ours wider than the others'."""
    for provider in NAMES:
        line = sorted((row["n"], value(row)) for row in rows if row["provider"] == provider)
        if line:
            width = 2.5 if provider == OURS else 1.2
            axes.plot(*zip(*line, strict=True), marker="o", markersize=4, linewidth=width, label=provider)
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale(scale)
    ticks = sorted({row["n"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set(xlabel="N (query and key rows)", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


@contextmanager
def progress_bar(console, total: int):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


# ---- what the programs of python/ are asked for, too ----


def device_here(name: str) -> str:
    """Of argparse: a device that there is."""
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("is cuda, and PyTorch sees no GPU; expected cpu, or leave it out")
    return name


def at_least(least: int) -> Callable[[str], int]:
    """Of argparse: an integer that is `least` or more."""

    def integer(text: str) -> int:
        if (n := int(text)) < least:
            raise argparse.ArgumentTypeError(f"is {n}; expected {least} or more")
        return n

    return integer


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cutlass_ext.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", type=device_here, choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="default: float32; of a preset on a GPU, and at random, bfloat16",
    )
    cases_of = parser.add_mutually_exclusive_group()
    cases_of.add_argument("--preset", choices=tuple(PRESETS), help="the attention of a model, not the suite")
    cases_of.add_argument(
        "--random", type=at_least(1), metavar="N", help="N cases at random: where others are faster, and by how much"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")
    parser.add_argument("--backward", action="store_true", help="the gradients of each case too")
    parser.add_argument(  # of fewer samples than two there are no quartiles
        "--rounds", type=at_least(2), help="samples of each provider, at least 2 (default: 30; 5 on a CPU)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and what they hold for")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="write time.png, tflops.png, memory.png of the suite, cases.png of a preset; backward_time.png and so on",
    )
    parser.add_argument("--commit", help="what to record as commit, not what git says of this library's source tree")
    options = parser.parse_args(arguments)
    try:
        import rich  # noqa: F401

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install rich matplotlib")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 110)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rounds = options.rounds or (30 if device == "cuda" else 5)
    warnings.filterwarnings("ignore")  # SDPA warns once for each reason why a backend does not take a case
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    facts = machine(device)
    facts["commit"] = options.commit or facts["commit"]
    providers, versions, absent = installed()
    facts |= versions
    if device == "cpu":
        console.print("No GPU: small sizes, on the CPU path (PyTorch's operators). No CUDA kernel is timed here.")
    in_bfloat16 = options.random or (options.preset and device == "cuda")
    dtype = options.dtype or ("bfloat16" if in_bfloat16 else "float32")
    if options.random and providers.pop("FlexAttention", None):
        absent["FlexAttention"] = "it would be compiled for each case"
    if absent:
        console.print("Not compared: " + "; ".join(f"{name} ({how})" for name, how in absent.items()), highlight=False)
    cases = suite(device, dtype, options.backward, options.preset, options.random or 0, options.seed)
    rows, refusals = [], {}
    try:
        for case in cases[: 1 + options.backward]:
            console.print(f"{case}: {explanation(case, device)}", highlight=False)
        with progress_bar(console, len(cases) * (rounds + len(providers))) as tick:
            for case in cases:
                rows += measure(case, device, rounds, tick, providers, refusals)
    except (Wrong, NotImplementedError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}")
        return 1
    (print_ratios if options.random else print_table)(console, rows)
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

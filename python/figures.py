"""Every figure that README, docs/performance.md and bench/results/figures.md show: one run, of one commit, on one GPU.

    make figures                        measures, some minutes, and writes everything
    python python/figures.py --render   writes it again from bench/results/figures.json, on any machine

A case is measured as `python -m cutlass_ext.bench` measures it: checked against float64, then as CUDA graphs, beside
PyTorch's attention and whatever else is installed (cutlass_ext/peers.py). One that is wrong or that we refuse is named,
and has no figures. The JSON is written after each suite: a run cut short keeps those that it finished.
tests/python/test_figures.py fails where a page shows what the JSON does not say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from report import LOG, provenance, table

from cutlass_ext import bench
from cutlass_ext.bench import LLAMA3, grouped
from cutlass_ext.measurement import Case, Refusals, Timed, first_line, measure, stream
from cutlass_ext.peers import NAMES, OURS, WRITTEN_OUT, installed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from source_tree import csrc_hash  # noqa: E402

RESULTS = Path("bench", "results")
DATA, PAGE = RESULTS / "figures.json", RESULTS / "figures.md"
SHOWN = Path("README.md"), Path("docs", "performance.md")  # where a block between the marks is ours
MARKED = re.compile(r"(<!-- figures -->\n).*(<!-- /figures -->)", re.DOTALL)
ROUNDS = 9
SLOW = {WRITTEN_OUT, "SDPA math"}
COMPILED = {"FlexAttention"}  # for each shape, in seconds: where little else has the feature


@dataclass(frozen=True)
class Suite:
    title: str
    cases: list[Case]
    left_out: frozenset[str] = frozenset(SLOW | COMPILED)
    note: str = ""

    @property
    def over_a_cache(self) -> bool:
        return self.cases[0].n_q > 0


LENGTHS = (512, 2048, 8192, 16384)
TOKENS = 16384


def square(d: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    """As many tokens and as wide a model for every length and head_dim."""
    for n, causal in itertools.product(lengths, (False, True)):
        yield Case(TOKENS // n, 2048 // d, n, d, causal, "bfloat16")


def backward(cases: list[Case]) -> list[Case]:
    return [replace(case, backward=True) for case in cases]


def suites() -> dict[str, Suite]:
    """What is measured, in the order of the page; at its end what is compiled for each shape."""
    wide = {**LLAMA3, "dtype": "bfloat16"}
    grouped_heads = Case(2, n=4096, causal=True, **wide)
    cache = [(1, 8192), (1, 65536), (16, 8192), (64, 4096), (128, 2048)]
    rows = [Case(batch, n=n, causal=False, n_q=1, **wide) for batch, n in cache]
    paged = [replace(case, page=page) for page in (16, 64) for case in (rows[0], rows[2], rows[3])]
    short = [Case(batch, n=n, causal=True, **wide) for batch, n in ((1, 64), (1, 256), (1, 1024), (8, 128), (32, 197))]
    brief = [Case(64, 12, 512, 64, c, "bfloat16") for c in (False, True)]
    brief += [Case(128, 12, 197, 64, False, "bfloat16"), Case(128, 16, 197, 80, False, "bfloat16")]
    brief += [Case(256, 16, n, d, False, "bfloat16") for n, d in ((128, 64), (64, 64), (128, 128))]
    windows = [Case(1, 16, 16384, d, True, "bfloat16", window=w) for d in (64, 128) for w in (1024, 4096)]
    single = [Case(4, 16, 512, 64, c, "float32") for c in (False, True)]
    single += [Case(8, 16, 59, 64, True, "float32"), Case(2, 16, 8192, 64, False, "float32")]
    single += [Case(2, 16, 4096, 128, c, "float32") for c in (False, True)]
    single += [Case(1, 16, n, 64, True, "float32", "scaling") for n in (512, 1024, 2048, 4096, 8192)]
    changed = [
        Case(batch, 16, n, d, False, "bfloat16", scores=scores)
        for scores in ("mask", "bias", "dropout")
        for batch, n, d in ((4, 2048, 64), (2, 4096, 128))
    ]
    float32 = frozenset({"SDPA math"} | COMPILED)
    no_pages = "PyTorch has no pages: it reads the same keys one after the other."
    step = "Not counted: the forward pass before it, and what it makes."
    return {
        "forward": Suite(
            "forward, bfloat16, N 512 to 16,384", [*(c for d in (64, 128, 256) for c in square(d)), grouped_heads]
        ),
        "short": Suite("short prefill, N 64 to 1,024", short),
        "decode": Suite("decode, one row over a cache", rows),
        "pages": Suite("decode over pages", paged, note=no_pages),
        "backward": Suite(
            "backward, bfloat16, N 512 to 16,384",
            backward([*square(64), *square(128), *square(256, (512, 2048, 8192)), grouped_heads]),
            note=step,
        ),
        "short_backward": Suite("gradients of short sequences, bfloat16, N 64 to 512", backward(brief), note=step),
        "float32": Suite("forward, float32", single, float32),
        "float32_backward": Suite("backward, float32", backward([*single[:2], *single[-3:-1]]), float32, step),
        "windows": Suite("windows, N 16,384", windows, frozenset(SLOW)),
        "scores": Suite("masks, biases, dropout, bfloat16", changed, frozenset(SLOW)),
        "scores_backward": Suite(
            "gradients with masks, biases, a bias' own too, and dropout",
            backward(changed),
            frozenset(SLOW),
            "Not counted: the forward pass.",
        ),
    }


# ---- measuring ----


def measured(
    chosen: dict[str, Suite],
    device: str,
    rounds: int,
    commit: str | None,
    tick: Callable[[str], None],
    keep: Callable[[dict], None] = lambda data: None,
) -> dict:
    """The JSON: what the figures hold for, and the rows of each suite. `keep` is called with it after each of them."""
    start = time.monotonic()
    facts = bench.machine(device)
    facts["commit"] = commit or facts["commit"]
    facts |= {"cuDNN": torch.backends.cudnn.version(), "csrc": csrc_hash()}
    providers, versions, absent = installed()
    data = {"machine": facts | versions, "rounds": rounds, "nothing_ms": nothing_ms(device, rounds)}
    data |= {"seconds": 0, "not_installed": sorted(absent), "refused": {}, "failed": {}, "suites": {}}
    refusals: Refusals = {}
    for name, suite in chosen.items():
        taking_part = {key: make for key, make in providers.items() if key not in suite.left_out}
        rows = []
        for case in suite.cases:
            try:
                rows += measure(case, device, rounds, tick, taking_part, refusals)
            except Exception as error:  # ours is wrong, refuses, or breaks: the other cases are measured all the same
                data["failed"][f"{suite.title}: {case}"] = f"{type(error).__name__}: {first_line(error)}"
        data["suites"][name] = rows
        data["refused"] = {provider: text for provider, text in refusals.items() if provider in versions}
        data["seconds"] = round(time.monotonic() - start)
        keep(data)
    return data


def nothing_ms(device: str, rounds: int) -> float:
    """What a kernel takes that does next to nothing, timed as rows over a cache are."""
    with torch.cuda.stream(stream()) if device == "cuda" else nullcontext():
        nothing = torch.zeros(1, device=device)
        empty = Timed(lambda: nothing.add_(1), device, cold=True)
        return statistics.median(empty.sample_ms() for _ in range(rounds))


def write(data: dict, root: Path) -> None:
    """The JSON, whole or not at all."""
    unfinished = root / DATA.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(unfinished, root / DATA)


# ---- pages ----


def commit_of(data: dict) -> str:
    return data["machine"]["commit"] or "not recorded"


def over_ours(group: list[dict], others: Container[str]) -> float | None:
    """The time of the fastest of these providers over ours."""
    ours, *_ = (row["ms"] for row in group if row["provider"] == OURS)
    times = [row["ms"] for row in group if row["provider"] in others]
    return min(times) / ours if times else None


def in_order(rows: list[dict]) -> list[str]:
    there = {row["provider"] for row in rows}
    return [name for name in NAMES if name in there]


def where_from(facts: dict) -> str:
    """What a reader wants to know of it, in lines that are short enough; the rest is in the JSON."""
    told = {name: value for name, value in facts.items() if name not in ("library", "csrc")}
    return textwrap.fill(f"{provenance(told)}.", 115, break_on_hyphens=False)


def summary(data: dict) -> str:
    """A line for each suite: the means of its rows, against the fastest other and against each of them."""
    every = [row for rows in data["suites"].values() for row in rows]
    others = [provider for provider in in_order(every) if provider != OURS]
    lines = []
    for name, suite in suites().items():
        groups = [group for _, group in grouped(data["suites"].get(name, []))]
        if ratios := [ratio for group in groups if (ratio := over_ours(group, others))]:
            cells = [f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            for provider in others:
                of_one = [ratio for group in groups if (ratio := over_ours(group, [provider]))]
                cells.append(f"{statistics.geometric_mean(of_one):.2f}" if of_one else "-")
            lines.append([suite.title, *cells])
    gpu = data["machine"]["gpu"] or "CPU"
    return table([f"time over ours, on one {gpu}", "fastest other (by row)", *others], lines)


def section(suite: Suite, rows: list[dict]) -> list[str]:
    """Every row of a suite: ms, and TFLOP/s or GB/s, of each provider."""
    providers, lines = in_order(rows), []
    unit = "GB/s of keys and values" if suite.over_a_cache else "TFLOP/s"
    for case, group in grouped(rows):
        by_name = {row["provider"]: row for row in group}
        cells = []
        for provider in providers:
            row = by_name.get(provider)
            rate = row and (case.cache_bytes / row["ms"] / 1e6 if suite.over_a_cache else row["tflops"])
            cells.append(f"{row['ms']:.4f}{'' if row['graph'] else '*'} ({rate:.3g})" if row else "-")
        ratio = over_ours(group, set(providers) - {OURS})
        lines.append([str(case), *cells, f"{ratio:.3f}" if ratio else "-"])
    text = [f"## {suite.title[0].upper()}{suite.title[1:]}", "", f"ms ({unit}). {suite.note}".strip(), ""]
    return [*text, table(["(B, N, H, d)", *providers, "best other / ours"], lines)]


def memory(rows: list[dict]) -> list[str]:
    providers = in_order(rows)
    lines = []
    for case, group in grouped(rows):
        by_name = {row["provider"]: row["peak_bytes"] for row in group}
        lines.append([str(case), *(f"{by_name[p] / 1e6:.2f}" if p in by_name else "-" for p in providers)])
    text = ["## Memory, float32", "", "MB beyond the inputs at the peak of one call, the output counted.", ""]
    return [*text, table(["(B, N, H, d)", *providers], lines)]


def page(data: dict, plots: list[Path]) -> str:
    facts = data["machine"]
    missing = [f"Not installed: {', '.join(data['not_installed'])}."] if data["not_installed"] else []
    missing += [textwrap.fill(f"{name} refused {text}.", 115) for name, text in data["refused"].items()]
    missing += [textwrap.fill(f"**Not measured**: {case}: {text}.", 115) for case, text in data["failed"].items()]
    parts = [
        f"# Figures: {facts['gpu'] or 'CPU'}",
        "",
        where_from(facts),
        "",
        f"One run of `make figures` ({data['seconds']} seconds), written by `python/figures.py` from",
        f"[{DATA.name}]({DATA.name}). Medians of {data['rounds']} rounds in which the providers take turns,",
        "ours checked against float64 first. A sample is a CUDA graph (*: not) of up to 20 calls, of which a figure is",
        "the mean; over a cache it is of one, and more than L2 holds is read before it. There a kernel that does next",
        f"to nothing takes {data['nothing_ms'] * 1e3:.1f} us.",
        *missing,
        "",
        summary(data),
    ]
    for name, suite in suites().items():
        if rows := data["suites"].get(name):
            parts += section(suite, rows)
    if rows := data["suites"].get("float32"):
        parts += memory(rows)
    parts += [f"![{PLOTS[path.stem]}]({path.name})" for path in plots]
    return "\n".join(parts) + "\n"


def block(data: dict, plots: list[Path], shown: Path) -> str:
    """What README and docs/performance.md show between their marks."""
    up = Path(*[".."] * (len(shown.parts) - 1))
    of_readme = [path for path in plots if path.stem.endswith("forward")]
    pictures = of_readme if shown == SHOWN[0] else plots
    heading = [] if shown == SHOWN[0] else ["## The figures", ""]
    return "\n".join(
        [
            *heading,
            summary(data),
            "Each number is the time of another library divided by this one's: above 1 this one is faster.",
            f"It is the geometric mean over the rows of one run ([all of them]({up / PAGE})) that the other",
            "computes; the first column takes each row's fastest other.",
            where_from(data["machine"]),
            "",
            *(f"![{PLOTS[path.stem]}]({up / RESULTS / path.name})" for path in pictures),
            "",
        ]
    )


# ---- pictures ----

Value = Callable[[dict], float]


def picture(
    path: Path, data: dict, panels: list[tuple[str, list[dict]]], value: Value, label: str, scale: str = "linear"
) -> Path:
    """Lines of every provider against N, a panel beside the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    facts = data["machine"]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4), layout="constrained", squeeze=False)
    for axes, (title, rows) in zip(all_axes[0], panels, strict=True):
        bench.draw_against_n(axes, rows, value, title, label, scale)
    figure.suptitle(f"{facts['gpu'] or 'CPU'}, commit {commit_of(data)}", fontsize=10)
    figure.savefig(path, dpi=130, metadata={"Comment": f"commit {commit_of(data)}"})
    plt.close(figure)
    return path


def draw(data: dict, folder: Path) -> list[Path]:
    paths = []

    def tflops(row: dict) -> float:
        return row["tflops"]

    for name in ("forward", "backward"):
        of_128 = [
            row
            for row in data["suites"].get(name, [])
            if row["head_dim"] == 128 and row["batch"] * row["n"] == TOKENS and not row["heads_kv"]
        ]
        kinds = [[row for row in of_128 if row["causal"] == causal] for causal in (False, True)]
        if all(kinds):
            titles = (f"{name}, bfloat16, d 128{causal}" for causal in ("", ", causal"))
            panels = list(zip(titles, kinds, strict=True))
            paths.append(picture(folder / f"figures_{name}.png", data, panels, tflops, "TFLOP/s"))
    if scaling := [row for row in data["suites"].get("float32", []) if row["series"] == "scaling"]:
        panel = [("forward, float32, 16 heads, d 64, causal", scaling)]
        paths.append(picture(folder / "figures_float32.png", data, panel, tflops, "TFLOP/s"))
        extra = picture(
            folder / "figures_memory.png", data, panel, lambda row: row["peak_bytes"] / 1e6, "extra memory, MB", "log"
        )
        paths.append(extra)
    return paths


# ---- writing, and whether what is written is still it ----


def texts(data: dict, plots: list[Path], root: Path) -> dict[Path, str]:
    """Every text that shows figures, as it should be."""
    found = {PAGE: page(data, plots)}
    for shown in SHOWN:
        inside = block(data, plots, shown)
        text, count = MARKED.subn(lambda marks, inside=inside: marks[1] + inside + marks[2], (root / shown).read_text())
        if count != 1:
            raise ValueError(f"{shown}: has {count} blocks between <!-- figures --> and <!-- /figures -->; expected 1")
        found[shown] = text
    return found


def render(root: Path) -> list[Path]:
    """Writes page, pictures and blocks from the JSON; pictures of other runs go."""
    data = json.loads((root / DATA).read_text())
    plots = draw(data, root / RESULTS)
    for path in {*(root / RESULTS).glob("figures_*.png")} - {*plots}:
        path.unlink()
    written = texts(data, plots, root)
    for path, text in written.items():
        (root / path).write_text(text)
    return [*written, *(RESULTS / path.name for path in plots)]


def stale(root: Path) -> list[str]:
    """What is not what the JSON says, or names another commit; and which other page does not say that it is a log."""
    logs = [path for path in sorted((root / RESULTS).glob("*.md")) if path.name != PAGE.name]
    wrong = [f"{path.name}: does not say that it is a log" for path in logs if LOG not in path.read_text()]
    if not (root / DATA).exists():
        return wrong + [f"{PAGE}: is there without {DATA.name}"] * (root / PAGE).exists()
    data = json.loads((root / DATA).read_text())
    wrong += [f"{DATA.name}: {case}: {text}" for case, text in data["failed"].items()]
    plots = sorted((root / RESULTS).glob("figures_*.png"), key=lambda path: [*PLOTS].index(path.stem))
    for path, text in texts(data, plots, root).items():
        if not (root / path).exists() or (root / path).read_text() != text:
            wrong.append(f"{path}: is not what {DATA.name} says (python python/figures.py --render)")
    wrong += [
        f"{path.name}: is of another commit" for path in plots if commit_of(data).encode() not in path.read_bytes()
    ]
    commit = commit_of(data).split()[0]
    for path in (SHOWN[0], PAGE):
        for other in re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", (root / path).read_text()):
            if not (commit.startswith(other) or other.startswith(commit)):
                wrong.append(f"{path}: names the commit {other}; the figures are of {commit}")
    return wrong


PLOTS = {  # and what each shows, in their order
    "figures_forward": "TFLOP/s of forward passes against N, every provider",
    "figures_backward": "TFLOP/s of backward passes against N, every provider",
    "figures_float32": "TFLOP/s of float32 against N, every provider",
    "figures_memory": "memory beside inputs and results against N, every provider",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="measure nothing, write the pages from the JSON")
    parser.add_argument("--commit", help="what to record as commit, not what git says of this library's source tree")
    options = parser.parse_args()
    failed = False
    if not options.render:
        if not torch.cuda.is_available():
            parser.error("these are figures of a GPU, and there is none; --render writes the pages of the last run")
        from rich.console import Console

        warnings.filterwarnings("ignore")  # SDPA warns once for each reason why a backend does not take a case
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        chosen, (providers, *_) = suites(), installed()
        steps = sum(len(suite.cases) * (len(providers.keys() - suite.left_out) + ROUNDS) for suite in chosen.values())
        console = Console(width=None if sys.stdout.isatty() else 110)
        with bench.progress_bar(console, steps) as tick:

            def keep(data: dict) -> None:
                write(data, ROOT)
                name, rows = list(data["suites"].items())[-1]
                print(f"{data['seconds']:4} s, {len(rows):3} rows: {chosen[name].title}", flush=True)

            data = measured(chosen, "cuda", ROUNDS, options.commit, tick, keep)
        for case, text in data["failed"].items():
            print(f"NOT MEASURED: {case}: {text}")
        failed = bool(data["failed"])
    try:
        print("wrote " + ", ".join(map(str, render(ROOT))))
    except ModuleNotFoundError as error:  # the JSON is there
        print(f"no pages: {error.name} is missing; where it is not, --render makes them of {DATA}")
        failed = failed or options.render
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

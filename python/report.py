"""Turns measured JSON into pages: what `python -m cutlass_ext.bench --json` and `fmha_bench --benchmark_out` wrote.

    python python/report.py bench/results/NAME.json           the page and its plots
    python python/report.py --sweep bench/results/sweep.json  the table of tile shapes

The pages lie beside the JSON under its name. No figure in them comes from anywhere else. What README shows is made by
python/figures.py.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

from cutlass_ext.bench import OURS, grouped, passes, plot

# What a page of bench/results has at its top, so that nobody takes its figures for today's.
LOG = "> A log of work, at the commits that it names, not today's: for those there is `make figures`."


def table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *lines]) + "\n"


def provenance(facts: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def ratios(group: list[dict]) -> tuple[str, str]:
    """How many times as fast ours is as written-out attention and as the best of the others."""
    ours = next(row for row in group if row["provider"] == OURS)
    best = min((row["ms"] for row in group if row["provider"] != OURS), default=None)
    speedup = f"{ours['speedup']:.2f}" if ours["speedup"] else "-"
    return speedup, f"{best / ours['ms']:.2f}" if best else "-"


def page(measured: dict, name: str, plots: list[Path]) -> str:
    """Every row: ms (TFLOP/s) of each provider, then memory and errors."""
    cases = list(grouped(measured["rows"]))
    providers = list(dict.fromkeys(row["provider"] for row in measured["rows"]))
    times, memory, errors = [], [], []
    for case, group in cases:
        by_name = {row["provider"]: row for row in group}
        in_order = [by_name.get(provider) for provider in providers]
        speedup, against_best = ratios(group)
        times.append([str(case), *(f"{r['ms']:.4f} ({r['tflops']:.3g})" if r else "-" for r in in_order)])
        times[-1] += [speedup, against_best]
        memory.append([str(case), *(f"{r['peak_bytes'] / 1e6:.2f}" if r else "-" for r in in_order)])
        errors.append(
            [str(case), *(f"{r['max_error']:.1e}" if r and r["max_error"] is not None else "-" for r in in_order)]
        )
    heading = f"# Attention {passes(measured['rows'])}, {cases[0][0].dtype}: {measured['machine']['gpu'] or 'CPU'}"
    of_both = "; of a backward pass, of forward and backward" if "backward" in heading else ""
    return "\n".join(
        [
            heading,
            "",
            LOG,
            "",
            f"{provenance(measured['machine'])}.",
            f"Medians of {measured['rounds']} rounds in which the providers take turns, measured by",
            f"`python -m cutlass_ext.bench`, written by `python/report.py` from [{name}.json]({name}.json).",
            "",
            "## ms (TFLOP/s)",
            "",
            "The last two columns: how many times as fast ours is as attention written out, and as the best other.",
            "",
            table(["(B, N, H, d)", *providers, "written out / ours", "best other / ours"], times),
            f"## Extra memory at the peak of one call, MB, the output counted{of_both}",
            "",
            table(["(B, N, H, d)", *providers], memory),
            "## Largest error against float64",
            "",
            table(["(B, N, H, d)", *providers], errors),
            *(f"![{path.stem.split('_')[-1]} against N]({path.name})" for path in plots),
            "",
        ]
    )


def write_measured(json_path: Path) -> None:
    measured = json.loads(json_path.read_text())
    folder, name = json_path.parent, json_path.stem
    plots = []
    for path in plot(measured["rows"], measured["machine"], folder):
        plots.append(path.rename(folder / f"{name}_{path.name}"))
    json_path.with_suffix(".md").write_text(page(measured, name, plots))
    print(f"wrote {json_path.with_suffix('.md')} and {len(plots)} plots")


def rate(row: dict) -> float:
    return row.get("TFLOP/s", 0.0)


SWEEPS = {"tile": ("CUDA-core", "sweep"), "tile_sm90": ("Hopper", "sweep-sm90")}  # kernels, make's target


def write_sweep(json_path: Path) -> None:
    """One table for each head_dim: tile shapes by TFLOP/s of full attention, causal beside it. Shapes that the library
    has, where the sweep knows them, are starred."""
    measured = json.loads(json_path.read_text())
    tiles: dict[int, dict[tuple, dict]] = defaultdict(lambda: defaultdict(dict))
    name = re.compile(r"(tile\w*)/b\d+/n\d+/h\d+/d(\d+)/(full|causal)/(Br\d+/Bc\d+(?:/[a-zA-Z]+\d+)+)")
    sweeps = set()
    for row in measured["benchmarks"]:
        if found := name.match(row["name"]):
            sweep, d, kind, shape = found.groups()
            tiles[int(d)][tuple(re.findall(r"([A-Za-z]+)(\d+)", shape))][kind] = row
            sweeps.add(sweep)
    context, (sweep,) = measured["context"], sweeps
    kernels, target = SWEEPS[sweep]
    parts = [
        f"# Tile shapes of the {kernels} FMHA: {context['gpu']}",
        "",
        LOG,
        "",
        f"Driver {context.get('driver', 'not recorded')}, commit {context.get('commit', 'not recorded')}, "
        f"{context['date'][:10]}; TFLOP/s, sorted by full attention;",
        f"from `make {target}`, then `fmha_bench --benchmark_filter=tile`.",
    ]
    for d, shapes in sorted(tiles.items()):
        lines = []
        for shape, kinds in sorted(shapes.items(), key=lambda item: -rate(item[1].get("full", {}))):
            full, causal = kinds.get("full", {}), kinds.get("causal", {})
            cells = [number for _, number in shape]
            cells[0] += " *" if full.get("label") == "shipped" else ""
            if full.get("error_occurred"):
                lines.append([*cells, "-", "-", "-", full["error_message"], "-"])
                continue
            use = [f"{full.get(key, 0):.0f}" for key in ("registers", "spilled", "CTAs")]
            lines.append([*cells, *use, f"{rate(full):.1f}", f"{rate(causal):.1f}"])
        names = [{"Br": "B_r", "Bc": "B_c"}.get(name, name) for name, _ in next(iter(shapes))]
        headings = [*names, "registers", "local bytes", "CTAs an SM", "full", "causal"]
        parts += ["", f"## d {d}", "", table(headings, lines)]
    json_path.with_suffix(".md").write_text("\n".join(parts))
    print(f"wrote {json_path.with_suffix('.md')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="the JSON is of fmha_bench with every tile shape")
    options = parser.parse_args()
    if not options.json.is_file():
        wrote = "fmha_bench --benchmark_out" if options.sweep else "python -m cutlass_ext.bench --json"
        parser.error(f"json: is {options.json}, where no file is; expected one that {wrote} wrote")
    write_sweep(options.json) if options.sweep else write_measured(options.json)

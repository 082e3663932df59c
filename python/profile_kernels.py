"""Occupancy, share of the FFMA limit and bank conflicts of the fp32 kernels, from Nsight Compute's counters.

    make bench && python python/profile_kernels.py build/cmake/bench/fmha_bench bench/results/ncu.md

One launch of each row, the clocks left as they are. The figures are for bench/results; needs a GPU and `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from pathlib import Path

SHAPES = ("b10/n1024/h64/d32", "b2/n8192/h16/d64", "b2/n4096/h16/d128", "b1/n4096/h16/d256")
ROWS = [f"{shape}/{kind}" for shape in SHAPES for kind in ("full", "causal")]
FFMA = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.pct_of_peak_sustained_elapsed"
METRICS = {
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, %",
    "sm__inst_executed.avg.per_cycle_elapsed": "instructions a clock (of 4)",
    FFMA: "FFMA limit reached, %",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "bank conflicts, loads",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "passes, loads",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "bank conflicts, stores",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "passes, stores",
    "gpu__time_duration.sum": "duration",
}


def counters(lines: list[str]) -> dict[str, str]:
    """The metrics of one launch, from `ncu --csv --page raw`: a line of names, one of units, one of values."""
    names, units, values = csv.reader(line for line in lines if line.startswith('"'))
    found = {name: f"{value} {unit}" if name.startswith("gpu__") else value
             for name, unit, value in zip(names, units, values, strict=True)}  # fmt: skip
    return {METRICS[name]: found.get(name, "-") for name in METRICS}


def profile(bench: Path, row: str) -> dict[str, str]:
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "-k", "regex:fmha_kernel", "-c", "1"]
    command += [
        "--metrics",
        ",".join(METRICS),
        str(bench),
        f"--benchmark_filter=fmha/{row}",
        "--benchmark_min_time=0.001",
    ]
    return counters(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--commit", default="not recorded")
    options = parser.parse_args()
    rows = {row: profile(options.bench, row) for row in ROWS}
    gpu = subprocess.check_output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], text=True)
    lines = [f"# Counters of the fp32 kernels: {gpu.strip()}, commit {options.commit}", ""]
    lines += ["Written by `python/profile_kernels.py`.", "", "| row | " + " | ".join(METRICS.values()) + " |"]
    lines += ["|---" * (len(METRICS) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(values.values()) + " |" for row, values in rows.items()]
    options.page.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""The programs in python/ that have no test module of their own, as users start them; and that none is left out."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import cutlass_ext
from cutlass_ext import bench

PROGRAMS = Path(__file__).parents[2] / "python"
# The others, and the module that runs each.
ELSEWHERE = {
    "algorithms": "test_cpu_path", "figures": "test_figures", "generate": "test_serve", "serve": "test_serve",
    "profile_kernels": "test_profile_kernels", "train": "test_train",
}  # fmt: skip
COMPARED = {"quickstart": 6, "mha_layer": 2}  # programs that print how far they are from PyTorch, and how often


def test_every_program_runs_somewhere():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*ELSEWHERE, *COMPARED, "report"}
    for program, module in ELSEWHERE.items():
        text = (Path(__file__).parent / f"{module}.py").read_text()
        assert re.search(rf"import {program}\b|{program}\.py", text), f"{module} does not run {program}"


@pytest.mark.parametrize("program", COMPARED)
def test_compared_with_pytorch(program, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.random.fork_rng():
        runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    differences = [float(x) for x in re.findall(r"max difference.* (\S+)$", capsys.readouterr().out, re.MULTILINE)]
    assert len(differences) == COMPARED[program] and max(differences) < 1e-4


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        runpy.run_path(str(PROGRAMS / "report.py"), run_name="__main__")

    return run


def test_report_of_a_bench(report, tmp_path, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    cases = [bench.Case(1, 1, n, 16, False, "float32", "memory") for n in (16, 32)]
    monkeypatch.setattr(bench, "forward_suite", lambda device, dtype: cases)
    precision = torch.get_float32_matmul_precision()
    try:
        arguments = ["--device", "cpu", "--rounds", "2", "--json", str(tmp_path / "small.json")]
        assert bench.main(arguments) == 0
    finally:
        torch.set_float32_matmul_precision(precision)
    report(tmp_path / "small.json")
    page = (tmp_path / "small.md").read_text()
    for case in cases:
        assert str(case) in page
    assert f"library {cutlass_ext.__version__}" in page
    assert list(tmp_path.glob("*memory.png"))


@pytest.mark.parametrize("options,wrote", [([], "cutlass_ext.bench --json"), (["--sweep"], "--benchmark_out")])
def test_report_of_nothing(report, tmp_path, capsys, options, wrote):
    with pytest.raises(SystemExit):
        report(*options, tmp_path / "small.json")
    said = capsys.readouterr().err
    assert f"json: is {tmp_path / 'small.json'}, where no file is; expected one that" in said and wrote in said


def test_report_of_a_sweep(report, tmp_path):
    """Of the JSON that Google Benchmark wrote."""
    kept = PROGRAMS.parent / "bench" / "results" / "sweep.json"
    copy = shutil.copy(kept, tmp_path)
    report("--sweep", copy)
    assert Path(copy).with_suffix(".md").read_text() == kept.with_suffix(".md").read_text()

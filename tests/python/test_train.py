"""The programs that take gradients, as users run them: python/train.py, `python -m cutlass_ext.bench --backward`."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import targets

import cutlass_ext
from cutlass_ext import bench, peers

sys.path.append(str(Path(__file__).parents[2] / "python"))
import train

TINY = "--steps 3 --batch 2 --context 32 --layers 2 --heads 4 --kv-heads 2 --width 32"
# Rounding of a loss of about 5, after two updates: AdamW's are of the size of the rate, whatever that of the gradient.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_train(device, options, path, monkeypatch, capsys):
    """The printed differences and losses of a run."""
    arguments = ["train.py", "--device", device, "--plot", str(path), *options.split()]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"(?:cutlass_ext|SDPA)\W+(\d+\.\d+)", out)]
    return float(re.search(r"largest difference .*: (\S+)", out)[1]), losses, out


@pytest.mark.parametrize("target", targets(("cpu", "torch"), ("cuda", "auto")))
@pytest.mark.parametrize("options", ["--dtype float32", "--dtype bfloat16 --checkpoint"])
def test_curves_agree(target, options, tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "curves.png"
    difference, losses, out = run_train(target.device, f"{TINY} {options}", path, monkeypatch, capsys)
    assert difference <= TOLERANCE[options.split()[1]]
    assert len(losses) == 2 and all(4 < loss < 7 for loss in losses)  # of 256 characters: ln 256 is 5.5
    assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in out


def test_curves_that_differ_show(monkeypatch, tmp_path, capsys):
    """A model that sees the future is another one: the difference printed is of what was computed."""
    monkeypatch.setitem(train.ATTENTION, "cutlass_ext", partial(cutlass_ext.fmha, causal=False))
    difference, *_ = run_train("cpu", TINY, tmp_path / "curves.png", monkeypatch, capsys)
    assert difference > 10 * TOLERANCE["float32"]


def test_the_text_is_bounded(monkeypatch):
    text = train.library_text()
    monkeypatch.setattr(train, "TEXT_BYTES", 1000)
    assert train.library_text().tolist() == text[:1000].tolist()
    assert 1000 < len(text) <= 4 << 20


@pytest.mark.parametrize(
    "options,says",
    [
        ("--heads 3", "--heads"),
        ("--heads 4 --kv-heads 3", "--heads"),
        ("--steps 0", "--steps: is 0; expected 2 or more"),
        ("--layers 0", "--layers: is 0; expected 1 or more"),
        ("--device cuda", "--device: is cuda, and PyTorch sees no GPU"),
        ("--parallel dp=2", "2 processes, and torchrun started none; expected torchrun --nproc-per-node 2"),
        ("--parallel cp=2,tp=2", "expected torchrun --nproc-per-node 4"),
    ],
)
def test_options_that_do_not_fit(options, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", *options.split()])
    with pytest.raises(SystemExit):
        train.parse_arguments()
    assert says in capsys.readouterr().err


def test_processes_that_torchrun_started(monkeypatch, capsys):
    """As many as --parallel is of, or it says how many."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--parallel", "dp=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.parse_arguments().parallel == {"dp": 2, "cp": 1, "tp": 1}
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        train.parse_arguments()
    assert "torchrun started 4; expected torchrun --nproc-per-node 2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ bench --backward
def without_flex_attention():
    providers, *others = peers.installed()
    return {name: make for name, make in providers.items() if name != "FlexAttention"}, *others


@pytest.fixture
def small_suite(monkeypatch):
    def suite(device, dtype):
        table = [bench.Case(1, 2, 33, 64, causal, dtype) for causal in (False, True)]
        return table + [bench.Case(1, 1, n, 64, False, dtype, "memory") for n in (16, 32)]

    monkeypatch.setattr(bench, "forward_suite", suite)
    # FlexAttention is compiled for each case: beside other processes that took 86 s and more, of 120 for a test.
    monkeypatch.setattr(bench, "installed", without_flex_attention)


@pytest.mark.parametrize("target", targets(("cpu", "torch"), ("cuda", "auto")))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bench_backward(target, dtype, small_suite, tmp_path, capsys):
    path, options = tmp_path / "bench.json", ["--device", target.device, "--dtype", dtype, "--rounds", "2"]
    assert bench.main([*options, "--backward", "--json", str(path), "--plot", str(tmp_path)]) == 0
    assert "(1, 33, 2, 64) causal backward" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    for (forward, of_forward), (backward, of_backward) in zip(*[iter(bench.grouped(rows))] * 2, strict=True):
        assert not forward.backward and backward.backward and backward.flops == 2.5 * forward.flops
        out_bytes = forward.batch * forward.n * forward.heads * forward.head_dim * (4 if dtype == "float32" else 2)
        assert of_forward[0]["provider"] == of_backward[0]["provider"] == bench.OURS
        assert of_backward[0]["peak_bytes"] >= max(4 * out_bytes, of_forward[0]["peak_bytes"])  # out, dq, dk, dv
    assert {p.name for p in tmp_path.glob("*memory.png")} == {"memory.png", "backward_memory.png"}


def test_bench_without_backward(small_suite, tmp_path):
    path = tmp_path / "bench.json"
    assert bench.main(["--device", "cpu", "--rounds", "2", "--json", str(path), "--plot", str(tmp_path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows and not any(row["backward"] for row in rows)
    assert {p.name for p in tmp_path.glob("*.png")} == {"time.png", "tflops.png", "memory.png"}


def test_bench_checks_gradients(small_suite, monkeypatch, capsys):
    """The right output, and gradients a tenth too large: nothing is timed."""

    def wrong(case, x):
        def call():
            out = cutlass_ext.fmha(x.q, x.k, x.v, causal=case.causal)
            return 1.1 * out - 0.1 * out.detach() if case.backward else out

        return call

    monkeypatch.setitem(peers.PYTORCH, peers.OURS, wrong)
    assert bench.main(["--device", "cpu", "--rounds", "2", "--backward"]) == 1
    assert "Wrong: (1, 33, 2, 64) backward" in capsys.readouterr().out

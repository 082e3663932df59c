"""`python -m cutlass_ext.bench`: every preset is checked against float64, timed and printed, beside every library that
is installed; and the cases that python/figures.py has besides."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import cutlass_ext
from cutlass_ext import bench, measurement, peers


@pytest.mark.parametrize("preset", bench.PRESETS)
def test_presets_run(preset, tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "MOST_KEYS_ON_CPU", 64)
    monkeypatch.setattr(measurement, "peak_extra_bytes", lambda call, device: 0)  # a profile of some seconds
    path = tmp_path / "measured.json"
    arguments = ["--preset", preset, "--device", "cpu", "--rounds", "2", "--backward", "--json", str(path)]
    precision = torch.get_float32_matmul_precision()
    try:
        assert bench.main([*arguments, "--plot", str(tmp_path)]) == 0
    finally:
        torch.set_float32_matmul_precision(precision)
    rows = json.loads(path.read_text())["rows"]
    assert {"cutlass_ext", "written out", "SDPA math"} <= {row["provider"] for row in rows}
    assert {row["backward"] for row in rows} == {False, True}
    assert str(next(bench.grouped(rows))[0]) in capsys.readouterr().out
    assert {found.name for found in tmp_path.glob("*.png")} == {"cases.png", "backward_cases.png"}


def test_cases_of_presets():
    cases = bench.suite("cuda", "bfloat16", preset="decode")
    assert [str(case) for case in cases][:2] == ["(1, 1 x 1024, 32/8, 128)", "(1, 1 x 8192, 32/8, 128)"]
    assert cases[0].flops == 4 * 32 * 1024 * 128
    causal = bench.suite("cuda", "bfloat16", backward=True, preset="llama3-8b")[1]
    assert str(causal) == "(1, 512, 32/8, 128) causal backward"
    assert causal.flops == 10 * 32 * (512 * 513 // 2) * 128
    x = causal.inputs("cpu")
    shapes = [tuple(t.shape) for t in (x.q, x.k, x.v, x.dout)]
    assert shapes == [(1, 512, 32, 128), (1, 512, 8, 128), (1, 512, 8, 128), (1, 512, 32, 128)]


def test_flops_of_a_window():
    case = measurement.Case(1, 1, 20, 8, True, "float32", window=6)
    seen = (~peers.hidden_keys(case, torch.device("cpu"))).sum(1)
    assert seen.tolist() == [min(i + 1, 6) for i in range(20)]
    assert case.flops == 4 * 8 * int(seen.sum())


CASES = {
    "window": measurement.Case(2, 4, 48, 16, True, "float32", window=20),
    "pages": measurement.Case(3, 4, 48, 16, False, "float32", heads_kv=2, n_q=1, page=16),
    "mask": measurement.Case(2, 4, 40, 16, False, "float32", scores="mask"),
    "bias": measurement.Case(2, 4, 40, 16, False, "float32", scores="bias"),
    "dropout": measurement.Case(2, 4, 40, 16, False, "float32", heads_kv=2, scores="dropout"),
}


def rows_of(case, providers=peers.PYTORCH, refusals=None):
    return measurement.measure(case, "cpu", 2, lambda text: None, providers, refusals)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_case_is_checked_and_timed(name, backward, monkeypatch):
    monkeypatch.setattr(measurement, "peak_extra_bytes", lambda call, device: 0)
    if backward and CASES[name].page:
        pytest.skip("a cache has no gradients")
    case = replace(CASES[name], backward=backward)
    rows = {row["provider"]: row for row in rows_of(case)}
    assert {peers.OURS, peers.WRITTEN_OUT} <= set(rows)
    assert (rows[peers.OURS]["max_error"] or 1) < 1e-5
    assert str(case).endswith({"pages": "pages of 16"}.get(name, name if name != "window" else "window 20")) or backward
    for provider, row in rows.items():
        assert row["ms"] > 0
        assert name == "dropout" or row["max_error"] < 1e-4, provider


def test_a_result_that_is_wrong_is_not_timed():
    for name, case in CASES.items():
        wrong = lambda case, x: lambda: peers.ours(case, x)() * 1.01  # noqa: E731
        with pytest.raises(measurement.Wrong, match=name):
            rows_of(case, {peers.OURS: wrong})


def test_a_peer_that_computes_something_else_has_no_figures(monkeypatch):
    monkeypatch.setattr(measurement, "peak_extra_bytes", lambda call, device: 0)
    later = lambda case, x: peers.ours(replace(case, window=case.window - 4), x)  # noqa: E731
    for backward in (False, True):
        case, refusals = replace(CASES["window"], backward=backward), {}
        rows = rows_of(case, {peers.OURS: peers.ours, "flash-attn 3": later}, refusals)
        assert [row["provider"] for row in rows] == [peers.OURS]
        assert refusals["flash-attn 3"].startswith(f"{case}: computes something else")


@pytest.fixture
def fake_flash_attn(monkeypatch):
    """A package `flash_attn` that computes as ours does, but for grouped heads, which it refuses."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")

    def flash_attn_func(q, k, v, dropout_p=0.0, causal=False, window_size=(-1, -1)):
        if k.shape[2] != q.shape[2]:
            raise ValueError("as many heads, please\nand more of that")
        return cutlass_ext.flash_attn_func(q, k, v, dropout_p, causal=causal, window_size=window_size), None

    package.flash_attn_func = flash_attn_func
    package.flash_attn_with_kvcache = cutlass_ext.flash_attn_with_kvcache
    package.flash_attn_interface = interface
    package.__version__ = "2.99"
    for module in (package, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_peers_are_found_by_import(fake_flash_attn, monkeypatch):
    broken = ModuleType("xformers")
    monkeypatch.setitem(sys.modules, "xformers", broken)  # without `ops`
    providers, versions, absent = peers.installed()
    assert versions["flash-attn 2"] == "2.99" and list(providers)[: len(peers.PYTORCH)] == list(peers.PYTORCH)
    assert set(providers) | set(absent) == set(peers.NAMES) and not set(providers) & set(absent)
    assert "pip install" in absent["xFormers"]
    refusals = {}
    for name in ("window", "pages"):
        by_name = {row["provider"]: row for row in rows_of(CASES[name], providers, refusals)}
        assert by_name["flash-attn 2"]["max_error"] < 1e-5
    assert "flash-attn 2" not in refusals
    grouped = replace(CASES["window"], heads_kv=2)
    for _ in range(2):
        assert "flash-attn 2" not in {row["provider"] for row in rows_of(grouped, providers, refusals)}
    assert refusals["flash-attn 2"] == f"{grouped}: as many heads, please"
    mask = {row["provider"] for row in rows_of(CASES["mask"], providers, {})}
    assert "flash-attn 2" not in mask


def test_the_command_names_who_is_not_there(fake_flash_attn, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(bench, "MOST_KEYS_ON_CPU", 32)
    monkeypatch.setattr(measurement, "peak_extra_bytes", lambda call, device: 0)
    assert bench.main(["--preset", "decode", "--device", "cpu", "--rounds", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("Not compared: ") == 1 and said.count("pip install flashinfer-python") == 1
    assert "flash-attn 2 did not take (1, 1 x 32, 32/8, 128): as many heads, please" in said
    assert "flash-attn 2 2.99" in said


@pytest.mark.parametrize(
    "options,says",
    [
        ("--rounds 0", "argument --rounds: is 0; expected 2 or more"),
        ("--rounds 1", "argument --rounds: is 1; expected 2 or more"),
        ("--rounds few", "argument --rounds: invalid integer value: 'few'"),
        ("--device cuda", "argument --device: is cuda, and PyTorch sees no GPU; expected cpu"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_the_command_does_as_it_is_told_or_says_why_not(options, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(options.split())
    assert says in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_source_tree(tmp_path):
    """Not that of a repository that the package happens to be installed in."""
    package, csrc = tmp_path / "cutlass_ext", tmp_path / "csrc"
    package.mkdir()
    (package / "bench.py").touch()

    def git(*arguments):
        identity = "-c", "user.name=someone", "-c", "user.email=someone@example.com"
        command = "git", "-C", str(tmp_path), *identity, *arguments
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert bench.commit_of_sources(package) is None
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    assert bench.commit_of_sources(package) is None
    csrc.mkdir()
    commit = bench.commit_of_sources(package)
    assert commit == git("rev-parse", "--short=12", "HEAD")
    (csrc / "new.cu").touch()
    assert bench.commit_of_sources(package) == f"{commit} and uncommitted changes"
    installed = tmp_path / "site-packages" / "cutlass_ext"
    installed.mkdir(parents=True)
    assert bench.commit_of_sources(installed) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_sample_is_a_graph(name, backward):
    """In bfloat16: ours, and PyTorch's where it takes the case and a graph can hold its kernels."""
    if backward and CASES[name].page:
        pytest.skip("a cache has no gradients")
    case = replace(CASES[name], n=256, head_dim=64, dtype="bfloat16", backward=backward)
    rows = {row["provider"]: row for row in measurement.measure(case, "cuda", 3, lambda text: None, peers.PYTORCH)}
    assert {peers.OURS, peers.WRITTEN_OUT} <= set(rows)
    for provider, row in rows.items():
        assert 0 < row["ms_q25"] <= row["ms"] <= row["ms_q75"] < 100
        assert row["graph"] == (provider == peers.OURS or not (backward and case.dropout_p))


def in_one_chain(rows, columns):
    """`rows @ columns.mT`, the products of a sum added one after the other, as CUDA cores do."""
    total = rows.new_zeros(*rows.shape[:-1], columns.shape[-2])
    for c in range(rows.shape[-1]):
        total = (total.double() + rows[..., c : c + 1].double() * columns[..., None, :, c].double()).to(rows.dtype)
    return total


def gradients_in_chains(x):
    """dq, dk and dv of causal attention by FlashAttention's formula, in float32."""
    q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    P = torch.softmax((in_one_chain(q, k) * scale).masked_fill(hidden, -torch.inf), -1)
    dS = P * (in_one_chain(dout, v) - (dout * (P @ v)).sum(-1, keepdim=True))
    return [t.transpose(1, 2) for t in (dS @ k * scale, dS.mT @ q * scale, P.mT @ dout)]


def test_rounding_of_few_keys():
    """Where rows see few keys, what dP - delta rounds is no fault; little of it is allowed where they see many, and
    nothing that is one."""
    torch.manual_seed(0)
    case = measurement.Case(1, 2, 33, 64, True, "float32", backward=True)
    for _ in range(20):
        x = case.inputs("cpu")
        oracle, results = measurement.Oracle(case, x), gradients_in_chains(x)
        assert oracle.accepts(oracle.errors(results))
        assert 0.2 < oracle.of_ds[1].norm / oracle.reference[1].norm < 1
        for i in range(3):
            wrong = [t * (1 + 4e-6 * (i == j)) for j, t in enumerate(results)]
            assert not oracle.accepts(oracle.errors(wrong))
    long = measurement.Case(1, 2, 512, 64, False, "float32", backward=True)
    oracle = measurement.Oracle(long, long.inputs("cpu"))
    assert oracle.of_ds[1].norm < 0.02 * oracle.reference[1].norm


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_cases(device):
    """The same of a seed, in whole pages, none too large; gradients of what has some."""
    cases = bench.suite(device, "bfloat16", count=300, seed=5)
    assert (
        cases
        == bench.suite(device, "bfloat16", count=300, seed=5)
        != bench.suite(device, "bfloat16", count=300, seed=6)
    )
    assert len(cases) == 300 and all(case.n % case.page == 0 for case in cases if case.page)
    assert {case.n_q > 0 for case in cases} == {case.causal for case in cases} == {case.page > 0 for case in cases}
    assert not any(case.causal and case.n_q for case in cases), "flops count causal rows as many as keys"
    assert all(case.flops <= 5e11 and case.heads // case.heads_kv * case.rows * case.n <= 1e8 for case in cases)
    of_gradients = bench.suite(device, "bfloat16", backward=True, count=50, seed=5)
    assert len(of_gradients) == 100 and not any(case.page for case in of_gradients)


def test_bench_of_random_cases(capsys):
    """The slowest of ours beside another first, and their mean."""
    assert bench.main(["--device", "cpu", "--random", "4", "--seed", "3", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    ratios = [float(line.split("│")[-2]) for line in out.splitlines() if line.count("│") == 6]
    assert len(ratios) == 4 and ratios == sorted(ratios)
    assert re.search(r"geometric mean [\d.]+ of 4; \d below 1", out)


def test_a_preset_is_not_at_random(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--random", "3", "--preset", "bert"])
    assert "not allowed with" in capsys.readouterr().err

"""`python -m cutlass_ext.bench`: every preset is checked against float64, timed and printed."""

import json

import pytest
import torch

from cutlass_ext import bench


@pytest.mark.parametrize("preset", bench.PRESETS)
def test_presets_run(preset, tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "MOST_KEYS_ON_CPU", 64)
    monkeypatch.setattr(bench, "peak_extra_bytes", lambda call, device: 0)  # a profile of some seconds
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


def test_cases_of_presets():
    cases = bench.suite("cuda", "bfloat16", preset="decode")
    assert [str(case) for case in cases][:2] == ["(1, 1 x 1024, 32/8, 128)", "(1, 1 x 8192, 32/8, 128)"]
    assert cases[0].flops == 4 * 32 * 1024 * 128
    causal = bench.suite("cuda", "bfloat16", backward=True, preset="llama3-8b")[1]
    assert str(causal) == "(1, 512, 32/8, 128) causal backward"
    assert causal.flops == 10 * 32 * (512 * 513 // 2) * 128
    shapes = [tuple(t.shape) for t in causal.inputs("cpu")]
    assert shapes == [(1, 512, 32, 128), (1, 512, 8, 128), (1, 512, 8, 128), (1, 512, 32, 128)]

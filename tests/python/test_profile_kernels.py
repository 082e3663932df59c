"""`python/profile_kernels.py` from a saved CSV. tests/python/data/backward.csv is as ncu writes it: the figures of a
real run of a backward kernel where there were any, made up elsewhere."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "python"))
import profile_kernels  # noqa: E402

SAVED = Path(__file__).parent / "data" / "backward.csv"


@pytest.fixture
def launches():
    return profile_kernels.kernels(SAVED.read_text().splitlines())


def test_names_and_units(launches):
    main, statistics = launches
    assert main.name == "sm90::backward_kernel<sm90::BackwardTraits<1, 64, 128, 128, 128, bfloat16_t, 3, 0, 1>>"
    assert statistics.name == "row_statistics_kernel<bfloat16_t, 128>"
    assert main.seconds == pytest.approx(4.12e-3) and main.bytes == pytest.approx(453.22e9 * 4.12e-3)
    assert main("smsp__cycles_elapsed.*") == pytest.approx(1.69e9)
    assert main("dram__bytes.sum.peak_sustained") == 1536 and main("nothing", "at all") is None


def test_a_row_of_the_table(launches):
    cells = profile_kernels.cells("backward", launches[0])
    by_heading = dict(zip(profile_kernels.HEADINGS, cells, strict=True))
    assert by_heading["us"] == "4,120.0" and by_heading["registers"] == "168" and by_heading["occupancy, %"] == "15.5"
    assert by_heading["tensor cores, %"] == "73.2" and by_heading["exp2 (XU), %"] == "14.6"  # the larger of two
    assert by_heading["L2, %"] == "60.9" and by_heading["DRAM, %"] == "9.4" and by_heading["FFMA, %"] == "-"
    assert by_heading["conflicts of shared loads, %"] == "2.5" and by_heading["of stores, %"] == "-"
    assert profile_kernels.cells("backward", launches[1])[-1] == "0.0"


def test_a_point_under_the_roofs(launches):
    point = profile_kernels.point("backward", launches)
    flops = 10 * 2 * 16 * 8192**2 * 128
    assert point.rate == pytest.approx(flops / 4.12e-3) and point.intensity == pytest.approx(flops / 453.22e9 / 4.12e-3)
    assert point.compute_roof == pytest.approx(4096 * 132 * 1.69e9)
    assert point.memory_roof == pytest.approx(1536 * 3.2e9)
    assert profile_kernels.point("somebody else's", launches) is None
    del launches[0].counters["dram__bytes.sum.per_second"]
    assert profile_kernels.point("backward", launches) is None


def test_table_and_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(profile_kernels, "FOLDER", tmp_path)
    other = tmp_path / "unknown.csv"
    other.write_text(SAVED.read_text())
    monkeypatch.setattr(sys, "argv", ["profile_kernels.py", str(SAVED), str(other)])
    profile_kernels.main()
    said = capsys.readouterr().out
    assert said.count("sm90::backward_kernel<") == 2 and "not in a picture: unknown" in said
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


@pytest.mark.parametrize("arguments,said", [
    (["forward"], "wants a GPU and Nsight Compute's ncu"),
    (["forwards"], "expected one of forward, causal"),
    ([str(ROOT / "README.md")], "not what `ncu --page raw --csv` writes"),
])  # fmt: skip
def test_errors_say_what_would_do(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile_kernels, "FOLDER", tmp_path)
    monkeypatch.setattr(profile_kernels.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["profile_kernels.py", *arguments])
    with pytest.raises(SystemExit):
        profile_kernels.main()
    assert said in capsys.readouterr().err

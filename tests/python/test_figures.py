"""`make figures`: pages, tables and pictures are those of the JSON and of its commit; it measures, here on a CPU."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cutlass_ext import measurement
from cutlass_ext.peers import NAMES, OURS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "python"))
import figures  # noqa: E402


def test_pages_show_what_the_last_run_said():
    assert figures.stale(ROOT) == []


def made_up():
    """A run that nobody made: times by a rule, of a commit that nobody has."""
    rows = {}
    for name, suite in figures.suites().items():
        rows[name] = [
            asdict(case)
            | {
                "provider": provider,
                "ms": 1.0 + i,
                "tflops": case.flops / (1 + i) / 1e9,
                "graph": provider != "xFormers",
            }
            | {"max_error": 0.0, "peak_bytes": 1000 + i, "speedup": None}
            for case in suite.cases
            for i, provider in enumerate(NAMES)
            if provider not in suite.left_out and not (provider == "FlashInfer" and case.backward)
        ]
    machine = {"library": "0", "commit": "abc123def456", "torch": "9.9", "date": "2099-01-01", "gpu": "GPU of nobody"}
    machine |= {"driver": "1", "csrc": "00", "flash-attn 2": "2.99", "xFormers": "0", "FlashInfer": "0"}
    refused = {"xFormers": "(1, 64, 32/8, 128) causal: not today"}
    return {"machine": machine, "rounds": 12, "nothing_ms": 0.0046, "seconds": 400, "suites": rows,
            "not_installed": ["flash-attn 3"], "refused": refused}  # fmt: skip


@pytest.fixture
def rendered(tmp_path):
    pytest.importorskip("matplotlib")
    for path in figures.SHOWN:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / figures.RESULTS).mkdir(parents=True)
    (tmp_path / figures.DATA).write_text(json.dumps(made_up()))
    written = figures.render(tmp_path)
    assert {path.stem for path in written if path.suffix == ".png"} == set(figures.PLOTS)
    return tmp_path


def test_everything_is_rendered_from_the_json(rendered):
    assert figures.stale(rendered) == []
    readme, docs, page = ((rendered / path).read_text() for path in (*figures.SHOWN, figures.PAGE))
    for text in (readme, docs, page):
        assert "GPU of nobody" in text and "commit abc123def456" in text
        for suite in figures.suites().values():
            assert f"| {suite.title} |" in text
    assert "| forward, bfloat16, N 512 to 16,384 | SDPA efficient, SDPA flash," in readme
    assert "4.00 (4.00 to 4.00)" in readme and "1a4fa30" not in readme
    assert readme.startswith((ROOT / "README.md").read_text().split("<!-- figures -->")[0])
    assert "xFormers refused (1, 64, 32/8, 128) causal: not today." in page and "9.0000* (" in page
    assert "Not installed: flash-attn 3." in page and "to nothing takes 4.6 us." in page
    for line in (readme + docs + page).splitlines():
        assert len(line) <= 120 or line.startswith("|"), line


def test_what_was_changed_by_hand_is_found(rendered):
    (rendered / figures.PAGE).write_text((rendered / figures.PAGE).read_text().replace("4.00", "5.00"))
    assert [text.split(":")[0] for text in figures.stale(rendered)] == [str(figures.PAGE)]
    figures.render(rendered)
    readme = rendered / figures.SHOWN[0]
    readme.write_text(readme.read_text() + "\nAt 0123abc it was slower.\n")
    assert figures.stale(rendered) == ["README.md: names the commit 0123abc; the figures are of abc123def456"]
    data = made_up()
    data["machine"]["commit"] = "0123abcd0123"
    (rendered / figures.DATA).write_text(json.dumps(data))
    found = " ".join(figures.stale(rendered))
    assert "README.md: is not" in found and "performance.md: is not" in found and "figures.md: is not" in found
    assert "figures_memory.png: is of another commit" in found
    (rendered / figures.RESULTS / "of_yore.md").write_text("# 3 ms\n")
    assert "of_yore.md: does not say that it is a log" in figures.stale(rendered)


def test_a_page_without_its_json_and_marks_that_are_lost(rendered):
    (rendered / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match=r"README\.md: has 0 blocks"):
        figures.render(rendered)
    (rendered / figures.DATA).unlink()
    assert figures.stale(rendered) == [f"{figures.PAGE}: is there without figures.json"]


def test_suites_are_of_cases_that_can_be():
    every = [case for suite in figures.suites().values() for case in suite.cases]
    assert len(set(every)) == len(every) < 110
    for case in every:
        assert not case.page or case.n % case.page == 0
        assert not case.window or (case.causal and not case.n_q)
        assert not case.scores or not case.causal
    assert {case.scores for case in every} == {"", "mask", "bias", "dropout"}


def test_it_measures(monkeypatch):
    """The smallest case of each suite, smaller, on a CPU."""
    monkeypatch.setattr(measurement, "peak_extra_bytes", lambda call, device: 0)
    small = {}
    for name, suite in figures.suites().items():
        case = min(suite.cases, key=lambda case: case.flops)
        sizes = {"batch": 2, "heads": 4, "n": 32, "head_dim": 16, "window": case.window and 8, "dtype": "float32"}
        small[name] = replace(suite, cases=[replace(case, heads_kv=case.heads_kv and 2, **sizes)])
    ticks = []
    data = figures.measured(small, "cpu", 2, "abc123def456", ticks.append)
    assert json.loads(json.dumps(data)) == data and len(data["machine"]["csrc"]) == 64
    assert data["machine"]["commit"] == "abc123def456"
    for name, rows in data["suites"].items():
        assert OURS in {row["provider"] for row in rows}, name
        assert len({row["provider"] for row in rows}) > 1 or name == "windows"  # of which PyTorch has none on a CPU
    assert "# Figures: CPU" in figures.page(data, [])

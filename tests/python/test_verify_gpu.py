"""What tests/verify_gpu.py sets aside of racecheck's reports, and what it does not."""

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def verify_gpu():
    sys.path.insert(0, str(TESTS))  # for what it imports itself
    spec = importlib.util.spec_from_file_location("verify_gpu", TESTS / "verify_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(TESTS))
    return module


def hazard(kind, first, second, family="sm90"):
    """A report as racecheck prints it: the earlier access first."""
    accesses = {"RAW": ("Write", "Read"), "WAR": ("Read", "Write"), "WAW": ("Write", "Write")}[kind]
    kernel = f"void cutlass_ext::{family}::fmha_kernel<cutlass_ext::{family}::Traits<(int)128>>(cutlass_ext::Params)"
    lines = [
        f"Error: Potential {kind} hazard detected at __shared__ 0x2445c in block (4,0,0) :",
        *(
            f"    {a} Thread ({thread},0,0) at {kernel}+0x7c0"
            for a, thread in zip(accesses, (first, second), strict=True)
        ),
        "    Current Value : 2",
        "",
    ]
    return "".join(f"========= {line}\n" for line in lines)


def test_jobs_that_another_lane_than_the_arriving_one_wrote_or_read(verify_gpu):
    reports = hazard("RAW", 1, 256), hazard("RAW", 2, 480), hazard("WAR", 287, 0), hazard("WAR", 63, 1)
    assert verify_gpu.expected_hazards("".join(reports)) == 4


@pytest.mark.parametrize(
    "report",
    [
        hazard("RAW", 0, 256),  # what lane 0 wrote: nobody waited
        hazard("WAR", 256, 0),
        hazard("RAW", 1, 2),  # within the scheduling warp
        hazard("RAW", 129, 256),  # between others
        hazard("WAR", 287, 129),
        hazard("WAW", 1, 33),
        hazard("RAW", 1, 256, family="sm80"),
        hazard("RAW", 1, 256, family="decode"),
        "",
    ],
)
def test_nothing_else(verify_gpu, report):
    assert verify_gpu.expected_hazards(report) == 0

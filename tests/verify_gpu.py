"""Runs on a GPU what CI cannot: compute-sanitizer over sanitizer_sweep.py, the soak, the GPU tests; writes
gpu_verified.json.

`make verify-gpu` calls it, with the seconds of the soak. The file ties the result to the hash of csrc/, which
tests/source_tree.py compares in CI; it is written only where everything passed.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from source_tree import ROOT, VERIFIED, csrc_hash

TOOLS = ("memcheck", "racecheck", "initcheck")
SOAK_PROCESSES = 8
NO_TESTS = 5  # pytest's exit code for a module without GPU tests


class Failed(Exception):
    """Something did not pass; what else is to be seen is looked at all the same."""


def sanitizer() -> str:
    """compute-sanitizer, from PATH, the toolkit or NVIDIA's wheel."""
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", "/usr/local/cuda/compute-sanitizer"]
    places += [str(p) for entry in sys.path for p in Path(entry).glob("nvidia/*/bin")]
    if found := shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places)):
        return found
    wheel = "nvidia-cuda-sanitizer-api==13.0.85"
    sys.exit(f"compute-sanitizer is missing. Type:\n    {sys.executable} -m pip install {wheel}")


def run_tests() -> dict[str, int]:
    """Every module in a process of its own, all at once: they wait for the host more than for the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        modules = sorted((ROOT / "tests" / "python").glob("test_*.py"))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
        running = {
            module: subprocess.Popen(
                [*command, f"--junitxml={folder}/{module.stem}.xml", module], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for module in modules
        }  # fmt: skip
        outputs = {module: process.communicate()[0] for module, process in running.items()}
        failed = [module for module, process in running.items() if process.returncode not in (0, NO_TESTS)]
        if failed:
            raise Failed("\n".join(outputs[module] for module in failed) + "\nthe tests failed")
        suites = [xml.parse(report).getroot().find("testsuite") for report in Path(folder).glob("*.xml")]
    total, skipped = (sum(int(suite.get(what)) for suite in suites) for what in ("tests", "skipped"))
    print(f"{total - skipped} tests passed", flush=True)
    return {"passed": total - skipped, "skipped": skipped}


def run_sanitizer(tool: str) -> dict[str, int]:
    """Checks our kernels alone; every tensor has an allocation of its own, so that a step over its end shows."""
    command = [sanitizer(), "--tool", tool, "--kernel-name", "kns=cutlass_ext", "--show-backtrace", "no"]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += [sys.executable, str(ROOT / "tests" / "sanitizer_sweep.py"), tool]
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    calls = re.search(r"(\d+) calls agree", done.stdout)
    reported = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    if done.returncode or not calls or not reported or int(reported[1]):
        raise Failed(f"{done.stdout[-8000:]}\n{tool} failed")
    print(f"{tool}: clean over {calls[1]} calls", flush=True)
    return {"calls": int(calls[1]), "errors": 0}


def run_soak(seconds: str) -> dict[str, int]:
    """Random calls, for so long; the seeds of failures are in what it prints."""
    command = [sys.executable, str(ROOT / "tests" / "soak.py"), "--seconds", seconds]
    command += ["--processes", str(SOAK_PROCESSES), "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    summary = re.search(r"(?m)^soak: ([\d,]+) calls in (\d+) s, (\d+) processes, (\d+) failures$", done.stdout)
    if done.returncode or not summary:
        raise Failed(f"{done.stdout[-20000:]}\nthe soak failed")
    print(summary[0], flush=True)
    calls, took, processes, failures = (int(text.replace(",", "")) for text in summary.groups())
    return {"calls": calls, "seconds": took, "processes": processes, "failures": failures}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this wants a GPU and a CUDA build of PyTorch")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with ThreadPoolExecutor() as pool:
        sanitizers = {tool: pool.submit(run_sanitizer, tool) for tool in TOOLS}
        # the soak beside them, for nothing of theirs has a limit of time that a busy GPU could exceed; tests have
        soak = pool.submit(run_soak, sys.argv[1] if len(sys.argv) > 1 else "120")
        wait([*sanitizers.values(), soak])
        tests = pool.submit(run_tests)
    if failures := [error for done in (*sanitizers.values(), soak, tests) if (error := done.exception())]:
        sys.exit("\n".join(map(str, failures)) + "\ntests/gpu_verified.json is not written")
    facts = {
        "csrc": csrc_hash(),
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.check_output(query, text=True).strip(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "sanitizer": {tool: done.result() for tool, done in sanitizers.items()},
        "soak": soak.result(),
        "tests": tests.result(),
    }
    VERIFIED.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {VERIFIED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

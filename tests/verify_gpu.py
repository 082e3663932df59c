"""Runs on a GPU what CI cannot: compute-sanitizer over sanitizer_sweep.py, the soak, the GPU tests; writes
gpu_verified.json.

`make verify-gpu` calls it, with the seconds of the soak. The file ties what passed, of tests each module, to the hash
of csrc/; tests/source_tree.py compares it in CI, and says what is missing. What is there is not run again on the same
sources, GPU, driver and torch, unless `--part` names it: a tool, the soak, or a test module.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from source_tree import MODULES, ROOT, TOOLS, VERIFIED, csrc_hash, gpu_line, missing_parts

SHARDS = 12  # processes of a tool, over all GPUs: one alone did not end its calls in 520 s
SOAK_PROCESSES = 8
TEST_PROCESSES = 14  # a GPU: all tests on 16 cores take 290 s, which these are busy for
PARTS = (*TOOLS, "soak", "tests", *MODULES)  # "tests": the modules that are missing
PRINTED = ROOT / "build"  # where all that a part printed lies if it failed
MOST_SHOWN = 6000  # characters of the beginning of what failed, and of its end


class Failed(Exception):
    """Something did not pass; what else is to be seen is looked at all the same."""


def failed(part: str, output: str, shown: str) -> Failed:
    """With as much of what is to be `shown` as one can read; the whole output lies in build/."""
    kept = PRINTED / f"verify_{part.replace(' ', '_')}.txt"
    kept.write_text(output)
    if len(shown) > 2 * MOST_SHOWN:
        shown = f"{shown[:MOST_SHOWN]}\n[...]\n{shown[-MOST_SHOWN:]}"
    return Failed(f"{shown}\n{part} failed; all that was printed is in {kept.relative_to(ROOT)}")


def result_of(module: dict[str, int] | Failed) -> dict[str, int]:
    """What passed of a module, or its failure."""
    if isinstance(module, Failed):
        raise module
    return module


def sanitizer() -> str:
    """compute-sanitizer, from PATH, the toolkit or NVIDIA's wheel."""
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", "/usr/local/cuda/compute-sanitizer"]
    places += [str(p) for entry in sys.path for p in Path(entry).glob("nvidia/*/bin")]
    if found := shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places)):
        return found
    wheel = "nvidia-cuda-sanitizer-api==13.0.85"
    sys.exit(f"compute-sanitizer is missing. Type:\n    {sys.executable} -m pip install {wheel}")


# Retains the first GPU's primary context; the status is that of the driver.
PROBE = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


@contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """The environment of processes whose kernels run beside each other, by NVIDIA's Multi-Process Service.

    Without it their contexts take turns on the GPU: 1,168 tests kept an H200 busy for 26 s, with it for 9. So they do
    where it cannot be started. It is for the tests alone: a fault of one of its processes ends them all.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 60}
        control = shutil.which("nvidia-cuda-mps-control")
        if not control or subprocess.run([control, "-d"], **quiet).returncode:
            yield dict(os.environ)
            return
        try:
            serves = subprocess.run([sys.executable, "-c", PROBE], **quiet).returncode == 0
            yield environment if serves else dict(os.environ)
        finally:
            subprocess.run([control], input=b"quit\n", **quiet)


def run_tests(modules: list[str]) -> dict[str, dict[str, int] | Failed]:
    """The GPU tests of some modules, in several processes at once."""
    with tempfile.TemporaryDirectory() as folder, shared_gpu() as environment:
        report = Path(folder) / "report.xml"
        processes = TEST_PROCESSES * torch.cuda.device_count()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(processes), "--dist", "worksteal"]
        command += ["--durations=15", f"--junitxml={report}", *(str(MODULES[name]) for name in modules)]
        # Each process would start a thread for each core.
        environment |= {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        end = re.search(r"(?ms)^=+ slowest .*", done.stdout)  # the slowest tests, then a line for each that failed
        cases = list(xml.parse(report).getroot().iter("testcase")) if report.exists() else []
    print(end[0] if end else "", flush=True)
    results = {}
    for name in modules:
        # Of a module that cannot be imported the one case has no class, and the module's name.
        its = [case for case in cases if name in f"{case.get('classname')}.{case.get('name')}".split(".")]
        skipped = sum(case.find("skipped") is not None for case in its)
        wrong = any(case.find(what) is not None for case in its for what in ("failure", "error"))
        results[name] = {"passed": len(its) - skipped, "skipped": skipped}
        if wrong:
            results[name] = failed(name, done.stdout, end[0] if end else done.stdout)
    if done.returncode and not any(isinstance(result, Failed) for result in results.values()):
        results = {name: failed(name, done.stdout, done.stdout) for name in modules}  # pytest itself
    return results


def sweep(tool: str, shard: int) -> tuple[int | None, str]:
    """One shard of the sweep: its calls, None where it is not clean, and what it printed. Checks our kernels alone;
    every tensor has an allocation of its own, so that a step over its end shows."""
    command = [sanitizer(), "--tool", tool, "--kernel-name", "kns=cutlass_ext", "--show-backtrace", "no"]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += [sys.executable, str(ROOT / "tests" / "sanitizer_sweep.py"), tool, "--shard", f"{shard}/{SHARDS}"]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpu = gpus.split(",")[shard % torch.cuda.device_count()]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)  # also where the package is not installed
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )  # fmt: skip
    calls = re.search(r"(\d+) calls agree", done.stdout)
    reported = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    clean = done.returncode == 0 and calls and reported and int(reported[1]) == 0
    return int(calls[1]) if clean else None, f"shard {shard} of {tool}:\n{done.stdout}"


def run_sanitizer(tool: str) -> dict[str, int]:
    """All shards of the sweep, each of which has to be clean."""
    with ThreadPoolExecutor(SHARDS) as pool:
        shards = list(pool.map(partial(sweep, tool), range(SHARDS)))
    if wrong := [output for calls, output in shards if calls is None]:
        raise failed(tool, "\n".join(wrong), wrong[0])
    calls = sum(calls for calls, _ in shards)
    print(f"{tool}: clean over {calls} calls", flush=True)
    return {"calls": calls, "errors": 0}


def run_soak(seconds: str) -> dict[str, int]:
    """Random calls, for so long; the seeds of failures are in what it prints."""
    command = [sys.executable, str(ROOT / "tests" / "soak.py"), "--seconds", seconds]
    command += ["--processes", str(SOAK_PROCESSES), "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    summary = re.search(r"(?m)^soak: ([\d,]+) calls in (\d+) s, (\d+) processes, (\d+) failures$", done.stdout)
    if done.returncode or not summary:
        raise failed("soak", done.stdout, done.stdout)
    print(summary[0], flush=True)
    calls, took, processes, failures = (int(text.replace(",", "")) for text in summary.groups())
    return {"calls": calls, "seconds": took, "processes": processes, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", default="120", help="of the soak")
    parser.add_argument("--part", choices=PARTS, nargs="+", metavar="PART", help=f"some alone: {', '.join(PARTS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this wants a GPU and a CUDA build of PyTorch")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    where = {
        "csrc": csrc_hash(),
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.check_output(query, text=True).strip(),
        "torch": torch.__version__,
    }
    passed = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    if {name: passed.get(name) for name in where} != where:
        passed = where
    run = {tool: partial(run_sanitizer, tool) for tool in TOOLS}
    PRINTED.mkdir(exist_ok=True)
    failures = []
    modules = passed.setdefault("tests", {})

    def keep(into: dict, part: str, result: Callable[[], dict]) -> None:
        into.pop(part, None)
        try:
            into[part] = result()
        except Failed as error:
            failures.append(part)
            print(error, flush=True)
        passed["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        VERIFIED.write_text(json.dumps(passed, indent=1) + "\n")

    missing = missing_parts(passed)
    wanted = options.part or missing
    if "tests" in wanted:
        wanted += [name for name in missing if name in MODULES]
    with ThreadPoolExecutor() as pool:  # but for the tests, which have limits of time that a busy GPU could exceed
        running = {pool.submit(run[part]): part for part in run if part in wanted}
        for done in as_completed(running):
            keep(passed, running[done], done.result)
    if "soak" in wanted:  # on cores of its own: beside the tools it had ten calls in 54 s, by itself 3,282 in 42
        keep(passed, "soak", partial(run_soak, options.seconds))
    if wanted_modules := [name for name in MODULES if name in wanted]:
        for name, result in run_tests(wanted_modules).items():
            keep(modules, name, partial(result_of, result))
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")
    print(gpu_line(), flush=True)


if __name__ == "__main__":
    main()

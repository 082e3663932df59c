"""Every kernel on a machine without a GPU: the sweep for compute-sanitizer, run by tests/emulator. And what a GPU does
not show: calls of which a launch fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "emulator" / "_C.abi3.so"

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="the emulator wants a CPU build of PyTorch"),
    pytest.mark.skipif(not BUILT.exists(), reason="`make emulator` has not built it"),
]


@pytest.mark.timeout(1800)
def test_every_call_of_the_sweep_agrees_with_the_cpu():
    shards = os.cpu_count()
    emulated = sys.executable, "tests/emulator/run.py", "tests/sanitizer_sweep.py"
    quiet = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    running = [
        subprocess.Popen(
            [*emulated, "--shard", f"{i}/{shards}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **quiet
        )
        for i in range(shards)
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    assert sum(int(re.search(r"(\d+) calls agree", output)[1]) for output in outputs) > 600


@pytest.mark.timeout(600)
def test_random_calls():
    """A minute of the soak, from one seed on, on two multiprocessors and a megabyte of L2: persistent CTAs have many
    tiles then, and choices that ask what L2 holds fall either way."""
    options = "--device", "cuda", "--seconds", 60, "--first", 742764797, "--processes", os.cpu_count()
    small = {"CUTLASS_EXT_EMULATOR_SMS": "2", "CUTLASS_EXT_EMULATOR_L2": str(1 << 20)}
    done = emulated("tests/soak.py", *options, OMP_NUM_THREADS="1", **small)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"soak: (\d+) calls", done.stdout)[1]) > 20


def emulated(*arguments, **environment):
    command = [sys.executable, "tests/emulator/run.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_a_launch_that_fails_has_no_part_in_the_next_call():
    # An order of the warps in which counters that are not zero show: one in three does.
    done = emulated("tests/emulator/failed_launch.py", CUTLASS_EXT_EMULATOR_SEED="2")
    assert done.returncode == 0, done.stderr[-4000:]


def test_gradients_of_more_keys_than_their_caller_says():
    # Two heads for each multiprocessor: those behind the first are found by where that ends.
    done = emulated("tests/emulator/more_keys_than_said.py", CUTLASS_EXT_EMULATOR_SMS="4")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("capability", (80, 86))
def test_older_gpus(capability):
    done = emulated("tests/emulator/older_gpus.py", CUTLASS_EXT_EMULATOR_CAPABILITY=str(capability))
    assert done.returncode == 0, done.stderr[-4000:]
    # A block has 163 KB of shared memory, or 99.
    of_one = {64, 128, 192, 256} if capability == 80 else {64}
    assert {int(d) for d in re.findall(r"sm80 (\d+): all_gradients", done.stdout)} == of_one


def test_processes_end_behind_a_backward_pass(tmp_path):
    """None of autograd's threads wants the GIL then, whose absence would end the process with an error."""
    script = tmp_path / "backward.py"
    script.write_text("import torch\n(torch.ones(8, device='cuda', requires_grad=True) * 2).sum().backward()\n")
    for _ in range(4):
        done = emulated(script)
        assert (done.returncode, done.stderr) == (0, "")

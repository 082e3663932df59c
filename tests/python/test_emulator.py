"""Every kernel on a machine without a GPU: the sweep for compute-sanitizer, run by tests/emulator."""

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

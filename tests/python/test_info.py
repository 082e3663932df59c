"""`python -m cutlass_ext.info`: it runs anywhere, and says of common shapes what `explain` says."""

import subprocess
import sys

import torch

import cutlass_ext
from cutlass_ext import info


def test_prints_everything():
    done = subprocess.run([sys.executable, "-m", "cutlass_ext.info"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    headings = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert headings == ["versions:", "devices:", "kernels:", "choices:"]
    for text in (cutlass_ext.__version__, torch.__version__, "llama3-8b decoding", "its gradients", "cpu"):
        assert text in done.stdout
    assert not done.stderr


def test_every_common_shape_has_a_kernel_here():
    """On a machine without a GPU it is PyTorch's operators."""
    lines = list(info.choices())
    assert len(lines) == 2 * len(info.SHAPES) + 1
    for line in lines:
        assert ": none" not in line and line.endswith(": torch") == (info.device() == "cpu"), line


def test_what_is_not_there_says_why():
    lines = dict(line.split(": ", 1) for line in info.kernels())
    assert lines["torch"] == "bfloat16, float16, float32"
    if info.device() == "cpu":
        assert {text for name, text in lines.items() if name != "torch"} == {"needs a CUDA GPU"}
    else:
        assert lines["simt"].startswith("float32")

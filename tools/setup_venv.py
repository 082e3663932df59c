"""Makes .venv for the Makefile: PyTorch, the CUDA compiler where the machine has none, CUTLASS headers, test tools.

    python3 tools/setup_venv.py .venv

Where there is a GPU and this machine's Python already has a CUDA build of PyTorch, .venv uses that one. Otherwise it
installs the pinned torch: the CUDA build where there is a GPU, the CPU build where there is none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import toolchain

CMAKE_MINIMUM = (3, 22)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MACHINE_TORCH = """
import site, sys, torch
if torch.version.cuda and torch.cuda.is_available() and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):
    print(*[p for p in sys.path if p.endswith("-packages")], sep="\\n")
"""


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return bool(smi) and "GPU " in subprocess.run([smi, "-L"], capture_output=True, text=True).stdout


def cmake_version() -> tuple[int, ...]:
    text = (
        subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout if shutil.which("cmake") else ""
    )
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def machine_torch() -> list[str]:
    """The package folders of this interpreter, if they hold a CUDA build of PyTorch that sees the GPU."""
    probe = subprocess.run([sys.executable, "-c", MACHINE_TORCH], capture_output=True, text=True)
    return probe.stdout.split() if probe.returncode == 0 else []


def create(venv: Path) -> Path:
    """A virtual environment with pip; the path of its Python."""
    python = venv / "bin" / "python"
    if subprocess.run([sys.executable, "-m", "venv", "--clear", venv], capture_output=True).returncode:
        # Debian splits ensurepip off; a pip outside can still fill the environment.
        commands = (
            [sys.executable, "-m", "venv", "--clear", "--without-pip", venv],
            [sys.executable, "-m", "pip", "--python", python, "install", "-q", "pip"],
        )
        for command in commands:
            if subprocess.run(command).returncode:
                sys.exit("\nThis Python cannot make virtual environments: sudo apt-get install python3-venv\n")
    return python


def main(venv: Path) -> None:
    gpu = has_gpu()
    python = create(venv)

    def pip(*arguments: str, may_fail: bool = False) -> bool:
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, stderr=subprocess.DEVNULL if may_fail else None).returncode == 0
        if not (done or may_fail):
            sys.exit(f"\npip failed: {' '.join(map(str, command))}\n")
        return done

    folders = machine_torch() if gpu else []
    if folders:
        print(f".venv uses the machine's PyTorch of {folders[0]}", flush=True)
        where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.check_output(where, text=True).strip())
        (site / "machine_torch.pth").write_text("\n".join(folders) + "\n")
    elif gpu:
        print(f"installing {toolchain.TORCH} (a CUDA build: this takes a while)", flush=True)
        pip(toolchain.TORCH)
    else:
        print(f"no GPU here: installing the CPU build of {toolchain.TORCH}", flush=True)
        cpu = f"{toolchain.TORCH}+cpu"
        # the configured index may offer the CPU build; PyTorch's own does; PyPI has only the CUDA build
        pip(cpu, may_fail=True) or pip("--extra-index-url", CPU_INDEX, cpu, may_fail=True) or pip(toolchain.TORCH)

    print("installing the build and test tools", flush=True)
    pip("-r", str(toolchain.ROOT / "requirements.txt"))
    pip("--no-deps", toolchain.CUTLASS_WHEEL)  # only its headers are used
    if not toolchain.cuda_home():
        print("no nvcc here: installing NVIDIA's compiler wheels", flush=True)
        pip(*toolchain.CUDA_WHEELS)
    if cmake_version() < CMAKE_MINIMUM:
        pip("cmake==3.31.10")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

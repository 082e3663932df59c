"""What both builds need to know: the CUDA compiler, the CUTLASS headers, the source list and each family's targets.

setup.py imports this file; CMakeLists.txt runs `python tools/toolchain.py` and reads the NAME=value lines it prints.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Families for every GPU from compute capability 8.0 on.
PORTABLE = ("torch", "host", "steps", "simt", "sm80", "gradients", "decode")
DEFAULT_ARCHS = "80;90"
MIN_CUDA = (12, 8)
TORCH = "torch==2.13.0"  # what is built against where no other one is installed
CUDA_WHEELS = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")]
CUTLASS_WHEEL = "nvidia-cutlass==4.2.0.0"


class MissingTool(Exception):
    """A tool that the build cannot do without; the text says which, and what to type."""


def find(home: Path, *paths: str) -> Path | None:
    """The first of `paths` that exists in a toolkit, whether it keeps them at its root or under targets/."""
    places = [home, *home.glob("targets/x86_64-linux")]
    return next((place / path for path in paths for place in places if (place / path).exists()), None)


def nvcc_version(home: Path) -> tuple[int, int] | None:
    """(major, minor) of the toolkit at `home`, None where `home` holds no working compiler and headers."""
    nvcc = home / "bin" / "nvcc"
    if not (nvcc.is_file() and find(home, "include/cuda_runtime.h")):
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def site_packages() -> list[Path]:
    """Where installed packages lie: sys.path, and the environment around pip's isolated build."""
    outer = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    return [Path(p) for p in dict.fromkeys([*sys.path, *outer]) if p]


def cuda_home() -> Path | None:
    """The machine's toolkit (CUDA_HOME, PATH, /usr/local/cuda), else the one that NVIDIA's wheels make, else None."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), on_path and Path(on_path).resolve().parent.parent, "/usr/local/cuda"]
    candidates += [p / "nvidia" / "cu13" for p in site_packages()]
    for home in map(Path, filter(None, candidates)):
        if (nvcc_version(home) or (0, 0)) >= MIN_CUDA:
            return home
    return None


def require_cuda_home() -> Path:
    if home := cuda_home():
        return home
    wheels = " ".join(f"'{w}'" for w in CUDA_WHEELS)
    raise MissingTool(
        f"The CUDA compiler (nvcc {MIN_CUDA[0]}.{MIN_CUDA[1]} or newer) is missing: it is not in CUDA_HOME, on PATH, "
        f"in /usr/local/cuda, or among the installed wheels. Type:\n    {sys.executable} -m pip install {wheels}"
    )


def cuda_includes(home: Path) -> list[Path]:
    """Include folders for host compilers; since CUDA 13 the libcu++ headers that CuTe wants lie apart, in cccl."""
    include = find(home, "include/cuda_runtime.h").parent
    return [p for p in (include, include / "cccl") if p.is_dir()]


def static_cudart(home: Path) -> Path:
    found = find(home, "lib/libcudart_static.a", "lib64/libcudart_static.a")
    if found is None:
        raise MissingTool(f"libcudart_static.a is missing under {home}: install the toolkit's development files.")
    return found


def cutlass_include() -> Path:
    """The CUTLASS and CuTe headers that the nvidia-cutlass wheel carries."""
    spec = importlib.util.find_spec("cutlass_library")
    roots = [Path(spec.origin).parent] if spec and spec.origin else [p / "cutlass_library" for p in site_packages()]
    for root in roots:
        if (root / "source/include/cute/tensor.hpp").is_file():
            return root / "source/include"
    raise MissingTool(
        f"The CUTLASS headers are missing. Type:\n    {sys.executable} -m pip install --no-deps {CUTLASS_WHEEL}"
    )


def sources() -> list[tuple[str, str]]:
    """(family, path) of each entry of csrc/sources.txt."""
    lines = (line.split("#")[0].split() for line in (ROOT / "csrc/sources.txt").read_text().splitlines())
    return [(family, path) for family, path in filter(None, lines)]


def archs() -> list[int]:
    """The compute capabilities (80 for 8.0) that CUTLASS_EXT_ARCHS asks machine code for."""
    text = os.environ.get("CUTLASS_EXT_ARCHS") or DEFAULT_ARCHS
    numbers = re.findall(r"[^;, ]+", text)
    if not numbers or not all(n.isdigit() and int(n) >= 80 for n in numbers):
        raise MissingTool(
            f'CUTLASS_EXT_ARCHS={text!r}: expected compute capabilities from 80 on, as in "{DEFAULT_ARCHS}".'
        )
    return sorted({int(n) for n in numbers})


def gencode(family: str) -> list[str]:
    """nvcc's flags for a family's targets. One front-end pass serves all that are portable; PTX what comes after.

    Hopper's tensor-core instructions exist as sm_90a alone. Steps have another pass for compute capability 9.0 and
    newer, where they know when the launch before them has ended; gradients, where those are asked for, add vectors
    there.
    """
    trap = ["-DCUTLASS_EXT_TRAP_ON_HANG"] if os.environ.get("CUTLASS_EXT_TRAP_ON_HANG") == "1" else []
    if family == "sm90":
        return [*trap, "-gencode=arch=compute_90a,code=sm_90a"]
    if family not in PORTABLE:
        raise MissingTool(f"csrc/sources.txt: unknown family {family!r}; known are {', '.join((*PORTABLE, 'sm90'))}")
    has_two = family == "steps" or (family == "gradients" and archs()[-1] >= 90)
    code = {80: [], 90: []} if has_two else {80: []}
    for n in archs():
        code[max(virtual for virtual in code if virtual <= n)].append(f"sm_{n}")
    return trap + [f"-gencode=arch=compute_{n},code=[{','.join([*sm, f'compute_{n}'])}]" for n, sm in code.items()]


def main() -> None:
    home = require_cuda_home()
    values = {
        "CUDA_HOME": home,
        "CUDA_INCLUDES": ";".join(map(str, cuda_includes(home))),
        "CUDART_STATIC": static_cudart(home),
        "CUTLASS_INCLUDE": cutlass_include(),
    }
    families = [family for family in dict.fromkeys(family for family, _ in sources()) if family != "torch"]
    values["FAMILIES"] = ";".join(families)
    for family in families:
        values[f"SOURCES_{family}"] = ";".join(path for f, path in sources() if f == family)
        values[f"GENCODE_{family}"] = ";".join(gencode(family))
    for name, value in values.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    try:
        main()
    except MissingTool as error:
        sys.exit(f"\n{error}\n")

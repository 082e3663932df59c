"""Builds build/emulator: the emulated GPU, and the library of `make build` linked with it in place of CUDA's runtime.

python tests/emulator/build.py
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build" / "emulator"
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402


def rules(home: Path, torch: Path) -> str:
    """How sources are compiled and linked. The emulator's library takes the name of torch's own CUDA library, where
    csrc/torch/tensor.hpp looks for the current stream."""
    headers = [*toolchain.cuda_includes(home), sysconfig.get_path("include")]
    headers += [torch / "include", torch / "include/torch/csrc/api/include"]
    compiler = "c++ -O3 -march=native -ffp-contract=off -std=c++17 -fPIC -Wall"
    link = f"c++ -shared -o $out $in -L{torch}/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,{torch}/lib"
    return f"""
rule compile
  command = {compiler} -MMD -MF $out.d {" ".join(f"-isystem {path}" for path in headers)} -c $in -o $out
  depfile = $out.d
rule emulator
  command = {link} -Wl,-soname,libtorch_cuda.so -Wl,--no-undefined -lpthread
rule extension
  command = {link} -L{OUT} -l:libtorch_cuda.so -Wl,-rpath,{OUT}
"""


def ninja_file() -> str:
    torch = Path(importlib.util.find_spec("torch").origin).parent
    lines = [rules(toolchain.require_cuda_home(), torch)]
    own = {OUT / source.with_suffix(".o").name: source for source in sorted(HERE.glob("*.cpp"))}
    lines += [f"build {built}: compile {source}\n" for built, source in own.items()]
    objects = [ROOT / "build/objects" / Path(path).with_suffix(".o") for _, path in toolchain.sources()]
    if missing := [path for path in objects if not path.exists()]:
        sys.exit(f"{missing[0]} is missing. Type:\n    make build")
    emulator, extension = OUT / "libtorch_cuda.so", OUT / "_C.abi3.so"
    lines.append(f"build {emulator}: emulator {' '.join(map(str, own))}\n")
    lines.append(f"build {extension}: extension {' '.join(map(str, objects))} | {emulator}\n")
    return "".join(lines)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "build.ninja").write_text(ninja_file())
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    sys.exit(subprocess.run([Path(sys.executable).parent / "ninja", "-C", OUT, *jobs]).returncode)

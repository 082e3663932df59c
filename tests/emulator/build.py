"""Builds build/emulator: the kernels with their PTX alone, and the emulator that runs them on a CPU.

    python tests/emulator/build.py 'sm90_d64|sm80_d64'

The argument is a regular expression: which of csrc/kernels/ take part, beside csrc/host, csrc/torch and the small
launches that these name. What is left out is not in the table of kernels, so that the plan never chooses it. ptxas does
not run; a source takes about a minute of one core all the same. MAX_JOBS (1) compilers run at a time.
"""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build" / "emulator"
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

ALWAYS = "torch", "host"  # families that every subset needs


def rules(home: Path, torch: Path) -> str:
    """How sources are compiled and linked. The runtime's library takes the name of torch's own CUDA library, where
    csrc/torch/tensor.hpp looks for the current stream."""
    system = [toolchain.cutlass_include(), *toolchain.cuda_includes(home)]
    system += [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    common = f"-O2 -std=c++17 -I{ROOT}/csrc " + " ".join(f"-isystem {path}" for path in system)
    stable = "-DTORCH_TARGET_VERSION=0x020a000000000000 -DPy_LIMITED_API=0x030A0000"
    link = f"c++ -shared -o $out $in -L{torch}/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,{torch}/lib"
    commands = {
        "own": f"c++ -MMD -MF $out.d -fPIC -Wall {common} -O3 -march=native -c $in -o $out",
        "cxx": f"c++ -MMD -MF $out.d -fPIC -Wall -fvisibility=hidden {common} {stable} -c $in -o $out",
        "nvcc": f"{home}/bin/nvcc -MD -MF $out.d -Xcompiler=-fPIC -Xcompiler=-fvisibility=hidden --no-compress "
        f"--expt-relaxed-constexpr {common} $targets -c $in -o $out",
        "runtime": f"{link} -Wl,-soname,libtorch_cuda.so -Wl,--no-undefined -lpthread -ldl",
        "extension": f"{link} -L{OUT} -l:libtorch_cuda.so -Wl,-rpath,{OUT}",
    }
    compiles = "\n  depfile = $out.d"  # kept as files, so that two builds at a time do no harm
    return "".join(
        f"rule {name}\n  command = {command}{compiles if '.d ' in command else ''}\n"
        for name, command in commands.items()
    )


def ninja_file(chosen: str) -> str:
    torch = Path(importlib.util.find_spec("torch").origin).parent
    lines = [rules(toolchain.require_cuda_home(), torch)]

    def compiled(rule: str, source: str, targets: str = "") -> str:
        built = OUT / "objects" / Path(source).with_suffix(".o")
        lines.append(f"build {built}: {rule} {ROOT / source}\n  targets = {targets}\n")
        return str(built)

    own = [compiled("own", f"tests/emulator/{path.name}") for path in sorted(HERE.glob("*.cpp"))]
    objects = []
    for family, path in toolchain.sources():
        if family not in ALWAYS and not re.search(chosen, path):
            continue
        # what would be machine code stays PTX
        targets = [re.sub(r"(arch=(\w+)),code=.*", r"\1,code=\2", flag) for flag in toolchain.gencode(family)]
        objects.append(compiled("nvcc" if path.endswith(".cu") else "cxx", path, " ".join(targets)))
    runtime, extension = OUT / "libtorch_cuda.so", OUT / "_C.abi3.so"
    lines.append(f"build {runtime}: runtime {' '.join(own)}\n")
    lines.append(f"build {extension}: extension {' '.join(objects)} | {runtime}\n")
    return "".join(lines)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "build.ninja").write_text(ninja_file(sys.argv[1] if len(sys.argv) > 1 else ""))
    ninja = Path(sys.executable).parent / "ninja"
    sys.exit(subprocess.run([ninja, "-C", OUT, "-j", os.environ.get("MAX_JOBS", "1"), *sys.argv[2:]]).returncode)

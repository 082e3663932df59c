"""What CI can say of the binary without a GPU: spills, WGMMA, the order of machine code, the stable ABI.

`make test` runs it after the tests. What ptxas said lies in build/ptxas, where setup.py leaves it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import toolchain

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
USE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


# Bytes a thread that a kernel may store in local memory, by how the names of sources begin: the first that fits.
# sm80's 128 x 48 at head_dim 128, for compute capability 8.0, stores 8, its dQ at head_dim 128 8 to 12. Its dK and dV
# store 20 beside pairs at 64 and 256, and 44 at 256, none in a loop over plain tiles. All gradients at 128 store 160
# to 168, of which that loop stores two words and loads twelve: with one warp for 32 keys they store 16 and take 4%
# longer. sm90 stores 32 beside a mask and dropout at head_dim 64, a word of them in the loop over key tiles. Its
# gradients at head_dim 128 store 36 beside a bias, and 28 beside a mask or both, in warps that copy and before the
# loop; of these a warp loads 8 a turn.
SPILL_LIMITS = {"sm80_backward_d128": 168, "sm80_backward_d256": 44, "sm80_backward": 20, "sm90": 36, "": 16}
SERIALISED = re.compile(r"\(C75\d\d\) Potential Performance Loss: wgmma.*")


def serialised_wgmma() -> list[str]:
    """ptxas's warnings that it waits after every WGMMA of a kernel."""
    logs = sorted((ROOT / "build" / "ptxas").glob("*.txt"))
    return [f"{log.stem}: {line[:200]}" for log in logs for line in SERIALISED.findall(log.read_text())]


def hopper_kernels() -> list[tuple[str, str]] | None:
    """(name, machine code) of each kernel of sm90; None where there is no cuobjdump to tell."""
    places = [toolchain.require_cuda_home(), *(p / "nvidia" / "cu13" for p in toolchain.site_packages())]
    disassembler = shutil.which("cuobjdump", path=os.pathsep.join(str(place / "bin") for place in places))
    if disassembler is None:
        return None
    kernels = []
    for family, source in toolchain.sources():
        if family != "sm90":
            continue
        sass = subprocess.check_output(
            [disassembler, "-sass", ROOT / "build/objects" / Path(source).with_suffix(".o")], text=True,
            env={**os.environ, "PATH": os.pathsep.join([str(Path(disassembler).parent), os.environ["PATH"]])},
        )  # fmt: skip
        # Of namespace sm90: the decode kernels use mma.sync.
        kernels += [(f.split()[0], f) for f in sass.split("Function : ")[1:] if "4sm90" in f.split()[0]]
    return kernels


def late_producers(kernels: list[tuple[str, str]]) -> list[str]:
    """Persistent forward kernels whose producer lies behind the consumers: a first tile then comes 2.5 us later."""
    return [
        f"{name}: copies behind WGMMA" for name, sass in kernels
        if "fmha_kernel" in name and not 0 <= sass.find("UTMALDG") < sass.find("HGMMA")
    ]  # fmt: skip


def spills() -> tuple[int, list[str]]:
    """The number of compiled kernels (each target counts), and a line for each that spills beyond its limit."""
    count, spilling = 0, []
    for _, source in toolchain.sources():
        if not source.endswith(".cu"):
            continue
        log = ROOT / "build" / "ptxas" / (source.replace("/", "__") + ".txt")
        if not log.exists():
            sys.exit(f"{log.relative_to(ROOT)} is missing: make clean build")
        kernel, limit = None, next(n for begin, n in SPILL_LIMITS.items() if Path(source).name.startswith(begin))
        for line in log.read_text().splitlines():
            if entry := ENTRY.search(line):
                kernel, count = entry, count + 1
            elif (use := USE.search(line)) and kernel:
                if int(use[2]) > limit:
                    spilling.append(f"{source} {kernel[1]} {kernel[2]}: {use[2]} bytes stored, {use[3]} loaded")
                kernel = None
    return count, spilling


def beyond_the_stable_abi() -> list[str]:
    """What ties the shared object to one version of torch or CUDA: libraries it wants, symbols it lacks."""
    binary = ROOT / "cutlass_ext" / "_C.abi3.so"
    needed = subprocess.check_output(["readelf", "-d", binary], text=True)
    undefined = subprocess.check_output(["nm", "-D", "--undefined-only", binary], text=True)
    libraries = re.findall(r"NEEDED.*\[(lib(?:cuda|cudart|torch_cuda|torch_python|c10_cuda)\b.*?)\]", needed)
    return libraries + re.findall(r" U (_ZN?K?(?:2at|3c10|5torch)\S*)", undefined)


if __name__ == "__main__":
    count, spilling = spills()
    print(f"ptxas: {count} kernels, {len(spilling)} that spill beyond their limit")
    serialised, hopper = serialised_wgmma(), hopper_kernels()
    if hopper is None:
        print("WGMMA: no cuobjdump on this machine, so the Hopper kernels' machine code is not looked at")
    without = [name for name, sass in hopper or [] if "HGMMA" not in sass]
    late = late_producers(hopper or [])
    if hopper is not None:
        print(
            f"WGMMA: {len(serialised)} warnings, {len(without)} Hopper kernels without it, {len(late)} late producers"
        )
    beyond = beyond_the_stable_abi()
    print(f"_C.abi3.so: {len(beyond)} libraries or symbols beyond torch's stable ABI")
    if failures := spilling + serialised + without + late + beyond:
        sys.exit("\n".join(failures))

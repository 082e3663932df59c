"""Makes dist/*.whl of the package and the shared object that is built already, and checks what its name promises.

    python tools/make_wheel.py

Called by `make wheel`. One wheel serves every CPython from 3.10 (abi3audit looks at the symbols of Python's) and every
Linux from the glibc in its name (auditwheel looks at those of the C library, and finds the lowest that holds). It is
that of the machine that compiled: for manylinux_2_28 build on an image of it. PyTorch's libraries stay outside.
"""

import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from toolchain import ROOT

BINARY = ROOT / "cutlass_ext" / "_C.abi3.so"
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheel"
MOST_MEGABYTES = 15
PACK = "bdist_wheel", "--py-limited-api=cp310", f"--bdist-dir={WORK / 'files'}", f"--dist-dir={WORK}"
OF_TORCH = "libtorch*.so*", "libc10*.so*"


class Built(build_ext):
    """The shared object that is there, in place of compiling it."""

    def build_extension(self, extension: setuptools.Extension) -> None:
        self.copy_file(str(BINARY), self.get_ext_fullpath(extension.name))


def packed() -> Path:
    """A wheel with the platform tag `linux`, which promises nothing of the C library."""
    shutil.rmtree(WORK, ignore_errors=True)  # what an earlier run left would be packed too
    os.chdir(ROOT)
    WORK.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setuptools, at every way of calling it but pip's
        setuptools.setup(
            script_args=["--quiet", "build", f"--build-base={WORK}", *PACK],
            ext_modules=[setuptools.Extension("cutlass_ext._C", [], py_limited_api=True)],
            cmdclass={"build_ext": Built},
        )
    (wheel,) = WORK.glob("*.whl")
    return wheel


def tagged(wheel: Path) -> Path:
    """The same with the lowest manylinux tag that holds."""
    shutil.rmtree(DIST, ignore_errors=True)
    outside = [word for name in OF_TORCH for word in ("--exclude", name)]
    run("auditwheel", "repair", *outside, "--wheel-dir", DIST, wheel)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def run(*command: str | Path) -> None:
    done = subprocess.run(
        ["python", "-m", *map(str, command)], executable=sys.executable, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"\n{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


def main() -> None:
    if not BINARY.exists():
        sys.exit(f"\n{BINARY.relative_to(ROOT)} is missing: make build\n")
    wheel = tagged(packed())
    run("abi3audit", "--strict", "--summary", wheel)
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if ".so" in Path(name).name]
    if inside != [f"cutlass_ext/{BINARY.name}"]:
        sys.exit(f"\n{wheel.name} holds {inside}; expected {BINARY.name} alone\n")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"\n{wheel.name} has {megabytes:.1f} MB; expected at most {MOST_MEGABYTES}\n")
    print(f"dist/{wheel.name}: {megabytes:.2f} MB, {len(names)} files; auditwheel and abi3audit agree with its name")


if __name__ == "__main__":
    main()

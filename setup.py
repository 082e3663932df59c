"""Compiles csrc/ into cutlass_ext/_C.abi3.so: one shared object for every torch >= 2.10 and every CPython >= 3.10.

Called by pip (`pip install .`) and by the Makefile. Environment: CUTLASS_EXT_ARCHS (targets, default "80;90"),
MAX_JOBS (compilers at a time), CUDA_HOME (where nvcc is, if not on PATH), CUTLASS_EXT_KEEP_PTX=1 (build/ptx keeps the
kernels' PTX, which tests/emulator runs; `make` sets it).
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"\nsetuptools {setuptools.__version__} is too old. Type:\n    pip install 'setuptools>=77'\n")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

TORCH_TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10
PTX = ROOT / "build" / "ptx"
KEEPS_PTX = os.environ.get("CUTLASS_EXT_KEEP_PTX") == "1"
PTXAS_LOGS = ROOT / "build" / "ptxas"  # what ptxas said of each source; tests/check_build.py reads it

# pip's isolated build hides the environment's packages. The binary is the same whichever torch it is compiled against,
# so the torch (and CUDA wheels) already installed are used before gigabytes are downloaded again.
for path in map(str, toolchain.site_packages()):
    if path not in sys.path:
        sys.path.append(path)


def missing_requirements() -> list[str]:
    """What pip has to fetch into an isolated build because this machine has none."""
    torch = [] if importlib.util.find_spec("torch") else [toolchain.TORCH]
    return torch + ([] if toolchain.cuda_home() else toolchain.CUDA_WHEELS)


@contextmanager
def progress(total: int, done: int):
    """Turns ninja's `[1/9] nvcc ...` lines into `[1/9] csrc/kernels/x.cu`, and files what ptxas says under build/ptxas.

    torch runs ninja on file descriptor 1, so that is where its output is caught.
    """
    sys.stdout.flush()
    read_end, write_end = os.pipe()
    screen = os.dup(1)
    os.dup2(write_end, 1)
    os.close(write_end)
    start = time.monotonic()

    def pump():
        count, log = done, None
        with open(read_end, errors="replace") as lines, open(screen, "w") as out:
            for line in lines:
                if edge := re.match(r"\[\d+/\d+\] .* -c (\S+)", line):
                    count += 1
                    source = os.path.relpath(edge[1], ROOT)
                    log = PTXAS_LOGS / (source.replace("/", "__") + ".txt")
                    log.unlink(missing_ok=True)
                    print(f"[{count}/{total}] {source} ({time.monotonic() - start:.0f} s)", file=out, flush=True)
                elif re.match(r"ptxas info|\s+\d+ bytes stack|\s+Function properties|ptxas \. ", line):
                    if log:
                        with log.open("a") as f:
                            f.write(line)
                elif not line.startswith("ninja: no work"):
                    print(line, end="", file=out, flush=True)

    PTXAS_LOGS.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(screen, 1)
        thread.join()


def discard_all_but_ptx():
    """Of what nvcc kept, some 20 MB a source. Of a source that has it twice what is for 8.0 lies in a folder."""
    for path in PTX.glob("*"):
        if path.is_file() and path.suffix != ".ptx":
            path.unlink()
    of_older = PTX / "8.0"
    of_older.mkdir(exist_ok=True)
    for path in PTX.glob("*.compute_*.ptx"):
        source, compiled_for = path.stem.split(".")
        path.replace((of_older if compiled_for == "compute_80" else PTX) / f"{source}.ptx")


def require_build_tools(cpp_extension):
    if not cpp_extension.is_ninja_available():
        raise toolchain.MissingTool(f"ninja is missing. Type:\n    {sys.executable} -m pip install ninja")
    if not shutil.which(cpp_extension.get_cxx_compiler()):
        raise toolchain.MissingTool("A C++ compiler is missing. Debian, Ubuntu:\n    sudo apt-get install g++")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise toolchain.MissingTool(
            "Python's headers are missing. Debian, Ubuntu:\n    sudo apt-get install python3-dev"
        )


def build_command():
    """The extension, and torch's BuildExtension told where nvcc is and which targets each family gets."""
    import torch
    from torch.utils import cpp_extension

    home = toolchain.require_cuda_home()
    version = "{}.{}".format(*toolchain.nvcc_version(home))
    # Only the headers of torch's stable ABI are used, so its own CUDA version (or none) does not matter to nvcc's.
    torch.version.cuda = version
    cpp_extension.CUDA_HOME = str(home)
    cpp_extension.COMMON_NVCC_FLAGS.clear()  # they take away the half-precision operators that CuTe uses
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja's wheel
    require_build_tools(cpp_extension)

    class Build(cpp_extension.BuildExtension):
        def build_extension(self, ext):
            """Compiles the sources in groups of equal targets, then links once."""
            groups = {}
            for family, path in toolchain.sources():
                groups.setdefault(tuple(toolchain.gencode(family)), []).append(path)
            total = len(toolchain.sources())
            print(f"{total} files, {home}/bin/nvcc ({version}), headers of torch {torch.__version__}", flush=True)
            objects = []
            for targets, paths in groups.items():
                flags = dict(ext.extra_compile_args, nvcc=[*ext.extra_compile_args["nvcc"], *targets])
                with progress(total, done=len(objects)):
                    try:
                        objects += self.compiler.compile(
                            paths, str(ROOT / "build" / "objects"), include_dirs=ext.include_dirs, extra_postargs=flags
                        )
                        discard_all_but_ptx()
                    except RuntimeError:  # ninja has shown the compiler's message; torch's traceback adds nothing
                        sys.exit("\ncompiling csrc/ failed: the compiler's message stands above\n")
            target = self.get_ext_fullpath(ext.name)
            self.compiler.link_shared_object(
                objects,
                target,
                libraries=ext.libraries,
                library_dirs=ext.library_dirs,
                extra_postargs=ext.extra_link_args,
                target_lang="c++",
            )

    cudart = toolchain.static_cudart(home)
    common = ["-O3", "-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    headers = [toolchain.cutlass_include(), *toolchain.cuda_includes(home)]
    system = [part for path in headers for part in ("-isystem", str(path))]
    # Packed for size, machine code weighs a third.
    nvcc = ["-Xcompiler=-fvisibility=hidden", "--expt-relaxed-constexpr", "-Xptxas=-v", "--compress-mode=size"]
    if KEEPS_PTX:
        PTX.mkdir(parents=True, exist_ok=True)
        nvcc += ["--keep", f"--keep-dir={PTX}"]
    extension = cpp_extension.CppExtension(
        "cutlass_ext._C",
        [path for _, path in toolchain.sources()],
        py_limited_api=True,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={
            "cxx": [*common, *system, "-fvisibility=hidden", "-Wall", "-g0"],  # against the -g of many Pythons
            "nvcc": [*common, *system, *nvcc],
        },
        # The runtime's symbols stay inside: torch brings a libcudart of its own into the process.
        extra_link_args=[str(cudart), "-Wl,--exclude-libs,libcudart_static.a", "-ldl", "-lrt", "-lpthread"],
    )
    return extension, Build


# egg_info and dist_info ask only for names and versions; whatever compiles has torch by then.
compiles = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"} & set(sys.argv)
arguments = {}
if compiles:
    try:
        if not importlib.util.find_spec("torch"):
            raise toolchain.MissingTool(
                f"torch is missing. Type:\n    {sys.executable} -m pip install {toolchain.TORCH}"
            )
        extension, build_ext = build_command()
        arguments = {"ext_modules": [extension], "cmdclass": {"build_ext": build_ext}}
    except toolchain.MissingTool as error:
        sys.exit(f"\n{error}\n")

setuptools.setup(
    setup_requires=missing_requirements(),  # read by pip through setuptools.build_meta: dynamic build requirements
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    **arguments,
)

"""Makes build/hub/, the package as a repository of Hugging Face's `kernels` hub, of the shared object that is built.

    python tools/make_hub.py            then, for one:  kernels.get_local_kernel(Path("build/hub"))

Called by `make hub`. A repository has a folder build/VARIANT/ for each backend. The shared object is one, by PyTorch's
stable ABI and Python's, so the variants differ in their names alone: the oldest PyTorch, and the oldest CUDA of each
major version, since the loader takes those up to what PyTorch was built for. CUDA's runtime is inside it.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from toolchain import ROOT

PACKAGE = ROOT / "cutlass_ext"
BINARY = PACKAGE / "_C.abi3.so"
HUB = ROOT / "build" / "hub"
VERSION = 1  # of the repository's interface, a whole number there
BACKENDS = {"cu126": "cuda", "cu130": "cuda", "cpu": "cpu"}
ARCHS = ["8.0+PTX", "9.0", "9.0a"]
VARIANT = "torch-stable-abi210-{}-x86_64-linux"

# The operators' names are in the shared object, so a process has one build of it, under the package's own name.
INIT = '''"""cutlass_ext for the `kernels` hub: exact attention. Made by tools/make_hub.py."""

import filecmp
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent / "cutlass_ext"


def _package():
    """The package of this folder, or the one that is there already where its build is the same."""
    loaded = sys.modules.get("cutlass_ext")
    if loaded is None:
        spec = importlib.util.spec_from_file_location("cutlass_ext", _HERE / "__init__.py")
        loaded = sys.modules["cutlass_ext"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules["cutlass_ext"]
            raise
    theirs = Path(loaded.__file__).resolve().parent
    if theirs != _HERE and not filecmp.cmp(theirs / "_C.abi3.so", _HERE / "_C.abi3.so", shallow=False):
        raise ImportError(
            f"cutlass_ext is loaded already, another build, from {theirs}; this one is in {_HERE}. "
            "Their operators have the same names: use one of the two in a process."
        )
    return loaded


_loaded = _package()
__version__ = _loaded.__version__
__all__ = list(_loaded.__all__)
globals().update({name: getattr(_loaded, name) for name in __all__})
'''


def metadata(backend: str, digest: str) -> dict:
    """What the loader reads of a variant; the id is the module's name in `sys.modules`."""
    kind = BACKENDS[backend]
    return {
        "id": f"_cutlass_ext_{backend}_{digest[:12]}",
        "name": "cutlass-ext",
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": kind} | ({"archs": ARCHS} if kind == "cuda" else {}),
    }


def make(hub: Path) -> list[Path]:
    """The folders of the variants."""
    shutil.rmtree(hub, ignore_errors=True)
    digest = hashlib.sha256(BINARY.read_bytes())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    folders = []
    for backend in BACKENDS:
        folder = hub / "build" / VARIANT.format(backend)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=ignored)
        if folders:
            (folder / PACKAGE.name / BINARY.name).hardlink_to(folders[0] / PACKAGE.name / BINARY.name)
        else:
            shutil.copy2(BINARY, folder / PACKAGE.name)
        (folder / "__init__.py").write_text(INIT)
        (folder / "metadata.json").write_text(json.dumps(metadata(backend, digest.hexdigest()), indent=2) + "\n")
        folders.append(folder)
    shutil.copy(ROOT / "LICENSE", hub)
    return folders


def main() -> None:
    if not BINARY.exists():
        sys.exit(f"\n{BINARY.relative_to(ROOT)} is missing: make build\n")
    least = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    if f"abi{least[1]}{least[2]}-" not in VARIANT:
        sys.exit(f"\ntools/make_hub.py names the variants {VARIANT}; pyproject.toml has torch>={least[1]}.{least[2]}\n")
    for folder in make(HUB):
        print(folder.relative_to(ROOT))


if __name__ == "__main__":
    main()

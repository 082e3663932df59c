"""`make hub`: the folder is what the loader of `kernels` takes, and what it loads computes; by hand where that is not
installed (`pip install -e .[test]` has it)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cutlass_ext

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_hub  # noqa: E402

BY_KERNELS = """
from pathlib import Path
from kernels import get_local_kernel
from kernels.importer import get_loaded_kernels
hub = get_local_kernel(Path(HUB))
(loaded,) = get_loaded_kernels()
assert loaded.metadata.name.python_name == "cutlass_ext" and loaded.metadata.version == 1
assert hub.__name__ == loaded.metadata.id
"""
BY_HAND = """
import importlib.util, sys
from pathlib import Path
(folder,) = Path(HUB).glob("build/*-cpu-*")
spec = importlib.util.spec_from_file_location("_any_name", folder / "__init__.py")
hub = sys.modules["_any_name"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)
"""
WORKS = """
import inspect, torch
assert {"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"} <= set(hub.__all__)
wanted = {"dropout_p", "window_size", "softcap", "deterministic", "s_aux"}
assert wanted <= set(inspect.signature(hub.flash_attn_func).parameters)
assert inspect.getfile(hub.fmha).startswith(HUB), inspect.getfile(hub.fmha)
q, k, v = (torch.randn(2, 30, 4, 16, requires_grad=True) for _ in range(3))
out = hub.flash_attn_func(q, k, v, causal=True)
theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
out.sum().backward()
cache = torch.randn(2, 2, 32, 4, 16)
hub.flash_attn_with_kvcache(q[:, :1].detach(), *cache, cache_seqlens=torch.tensor([5, 32], dtype=torch.int32))
print("works", hub.__version__)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_hub.make(folder)
    return folder


def test_layout(hub):
    folders = sorted(path.name for path in (hub / "build").iterdir())
    assert folders == [f"torch-stable-abi210-{name}-x86_64-linux" for name in ("cpu", "cu126", "cu130")]
    ids = set()
    for folder in (hub / "build").iterdir():
        facts = json.loads((folder / "metadata.json").read_text())
        ids.add(facts["id"])
        assert facts["id"].isidentifier() and facts["backend"]["type"] in ("cpu", "cuda")
        inside = folder / "cutlass_ext"
        modules = {path.relative_to(inside) for path in inside.rglob("*.py")}
        assert modules == {path.relative_to(make_hub.PACKAGE) for path in make_hub.PACKAGE.rglob("*.py")}
        assert (inside / "_C.abi3.so").stat().st_size == make_hub.BINARY.stat().st_size
        assert len(list(folder.rglob("*.so"))) == 1 and not list(folder.rglob("__pycache__"))
    assert len(ids) == 3 and (hub / "LICENSE").exists()


@pytest.mark.parametrize("how", [BY_KERNELS, BY_HAND], ids=["kernels", "by hand"])
def test_it_loads_and_computes(hub, how, tmp_path):
    """In a process of its own, away from the sources."""
    if how == BY_KERNELS:
        pytest.importorskip("kernels")
    code = f"import sys\nsys.path = {[path for path in sys.path if path and Path(path) != ROOT]}\nHUB = {str(hub)!r}\n"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code + how + WORKS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"works {cutlass_ext.__version__}"


def load(folder):
    spec = importlib.util.spec_from_file_location("_in_this_process", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_process_has_one_build(hub, tmp_path):
    """The same build twice is one; another one is refused."""
    (folder,) = (hub / "build").glob("*-cu130-*")
    assert load(folder).fmha is cutlass_ext.fmha
    (tmp_path / "cutlass_ext").mkdir()
    (tmp_path / "__init__.py").write_text((folder / "__init__.py").read_text())
    (tmp_path / "cutlass_ext" / "_C.abi3.so").write_bytes(b"another")
    with pytest.raises(ImportError, match="is loaded already, another build"):
        load(tmp_path)


@pytest.mark.parametrize(
    "cuda,of_torch,chosen", [("12.6", "2.10", "cu126"), ("12.9", "2.13", "cu126"), ("13.1", "2.13", "cu130")]
)
def test_kernels_chooses_the_variant(hub, cuda, of_torch, chosen):
    """By the CUDA version that PyTorch was built for."""
    variants, backends = pytest.importorskip("kernels.variants"), pytest.importorskip("kernels.backends")
    there = variants.get_variants_local(hub / "build")
    assert len(there) == 3
    system = backends.CUDA(version=variants.parse(cuda)), "x86_64", "linux", variants.parse(of_torch), True, None
    accepted, _ = variants._resolve_variant_for_system(there, *system)
    assert [variant.variant_str for variant in accepted] == [f"torch-stable-abi210-{chosen}-x86_64-linux"]

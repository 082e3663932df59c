"""Installs dist/*.whl into an empty environment that sees PyTorch, away from the sources, and calls it.

`make wheel` runs it. PyTorch is that of the Python that runs this, whose folders a .pth file names: nothing is
downloaded.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from source_tree import ROOT

SMOKE = """
import sys, torch, cutlass_ext
assert cutlass_ext.__file__.startswith(sys.prefix), cutlass_ext.__file__
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(2, 100, 4, 64, device=device, requires_grad=True) for _ in range(3))
out = cutlass_ext.fmha(q, k, v, causal=True)
theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
out.sum().backward()
torch.compile(cutlass_ext.fmha, backend="eager", fullgraph=True)(q, k, v)
import cutlass_ext.adapters.flash_attn, cutlass_ext.info
print(f"cutlass_ext {cutlass_ext.__version__} on torch {torch.__version__}: {cutlass_ext.explain(q, k, v).backend}")
"""


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ holds {len(wheels)} wheels; expected one: make wheel")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        python = Path(folder) / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.check_output([python, "-c", where], text=True).strip())
        install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", *wheels]
        subprocess.run([*install, "--disable-pip-version-check"], check=True)
        packages = [path for path in sys.path if path.endswith("-packages")]
        # They come after what was installed, so that a cutlass_ext among them is not taken for it.
        (site / "torch.pth").write_text("\n".join(packages) + "\n")
        done = subprocess.run([python, "-I", "-c", SMOKE], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{wheels[0].name} does not work in an empty environment:\n{done.stdout}{done.stderr}")
    print(f"{wheels[0].name}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()

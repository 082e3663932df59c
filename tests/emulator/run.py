"""Runs a script, or with -m a module (pytest), on the emulated GPU: see __init__.py.

python tests/emulator/run.py tests/sanitizer_sweep.py --shard 0/10
python tests/emulator/run.py -m pytest -m gpu tests/python/test_shapes.py
"""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # `emulator` is a package of this folder's parent
import emulator  # noqa: E402, F401

if len(sys.argv) < 2:
    sys.exit(__doc__)
if sys.argv[1] == "-m":
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

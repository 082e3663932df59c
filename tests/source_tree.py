"""The hash of csrc/ that ties a GPU run to the sources it ran on; verify_gpu.py writes it to gpu_verified.json.

`make test` runs this file first of all, so that the log opens with whether that record still holds.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERIFIED = ROOT / "tests" / "gpu_verified.json"


def csrc_hash() -> str:
    """SHA-256 over the paths and contents of every file of csrc/."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def gpu_line() -> str:
    """Whether the GPU tests passed on these very sources."""
    if not VERIFIED.exists():
        return "GPU: NOT VERIFIED: there is no tests/gpu_verified.json (make verify-gpu on a machine with a GPU)"
    facts = json.loads(VERIFIED.read_text())
    where = f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, {facts['date']}"
    if facts["csrc"] == csrc_hash():
        return f"GPU: csrc/ is what passed {facts['tests']['passed']} tests and compute-sanitizer on {where}"
    return f"GPU: STALE: csrc/ has changed since it passed on {where} (make verify-gpu on a machine with a GPU)"


if __name__ == "__main__":
    print(gpu_line(), flush=True)

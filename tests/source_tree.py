"""The hash of csrc/ that ties a GPU run to the sources it ran on; used by verify_gpu.py and check_build.py."""

import hashlib
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

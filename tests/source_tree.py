"""The hash of csrc/ that ties a GPU run to the sources it ran on; verify_gpu.py writes it to gpu_verified.json.

`make test` runs this file first of all, so that the log opens with whether that record still holds, and is whole.
"""

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERIFIED = ROOT / "tests" / "gpu_verified.json"
TOOLS = ("memcheck", "racecheck", "initcheck")  # of compute-sanitizer
CPP = {".hpp", ".cpp", ".cu"}
# Of C++ strings, characters and other code, each as it is; or white space and comments.
TOKEN = re.compile(
    r"""(R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\w+(?:'\w+)*|[^\s\w/"']+|[/"'](?![/*]))"""
    r"""|(?://[^\n]*|/\*(?:.|\n)*?\*/|\s)+"""
)
MODULES = {module.stem: module for module in sorted((ROOT / "tests" / "python").glob("test_*.py"))}


def code_of(source: str) -> str:
    """C++ without comments and empty lines, and with one space for several."""
    return "".join(match[1] or ("\n" if "\n" in match[0] else " ") for match in TOKEN.finditer(source))


def csrc_hash() -> str:
    """SHA-256 over the paths of all files of csrc/ and what is in them, of C++ the code alone."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            text = path.read_text()
            content = (code_of(text) if path.suffix in CPP else text).encode()
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def missing_parts(facts: dict) -> list[str]:
    """What the record does not have of tools, soak and test modules."""
    passed = {*facts, *facts.get("tests", {})}
    return [part for part in (*TOOLS, "soak", *MODULES) if part not in passed]


def gpu_line() -> str:
    """Whether the GPU tests passed on these very sources, and what has not been run on them."""
    ask = "(make verify-gpu on a machine with a GPU)"
    if not VERIFIED.exists():
        return f"GPU: NOT VERIFIED: there is no tests/gpu_verified.json {ask}"
    facts = json.loads(VERIFIED.read_text())
    where = f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, {facts['date']}"
    if facts["csrc"] != csrc_hash():
        return f"GPU: STALE: csrc/ has changed since it passed on {where} {ask}"
    tests = f"{sum(module['passed'] for module in facts['tests'].values())} tests"
    if missing := missing_parts(facts):
        return f"GPU: IN PART: csrc/ is what passed {tests} on {where}; missing: {', '.join(missing)} {ask}"
    return f"GPU: csrc/ is what passed {tests} and compute-sanitizer on {where}"


if __name__ == "__main__":
    print(gpu_line(), flush=True)

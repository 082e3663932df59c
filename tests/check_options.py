"""Counts the places that an option of csrc/options.def touches: where it is declared, checked, used and tested.

`make lint` runs it. A place is a file of csrc/ or cutlass_ext/ whose code names the option, as a word; prose does not
count. Files that are parts of one thing are one place: the field of a parameter and what fills it; the signatures that
users call; the oracle and the tests. What calls the library as users do is none, nor what is right without a new
option's name (CALLERS). CONTRIBUTING ("A new option") walks through the places. An option may have MOST of them; the
worst come first.
"""

import io
import re
import sys
import tokenize

from source_tree import ROOT

MOST = 8
SUFFIXES = ".cpp", ".cu", ".hpp", ".def", ".py"
TOGETHER = dict.fromkeys(("params.hpp", "arguments.hpp", "arguments.cpp"), "params")
SIGNATURES = "interface.py", "backward.py", "flash_attn.py", "kvcache.py", "sdpa.py", "dropout.py"
TOGETHER |= dict.fromkeys(SIGNATURES, "signatures")
TOGETHER |= dict.fromkeys(("host/plan.hpp", "host/plan.cpp", "host/kernel_selection.hpp"), "host/plan")
TOGETHER |= dict.fromkeys(("torch_backend.py", "torch_padded.py"), "torch_backend.py")
TOGETHER |= dict.fromkeys(("merge_splits.hpp", "kernels/merge.cu"), "merge of splits")
CALLERS = {"bench.py", "info.py", "measurement.py", "nn.py", "peers.py", "support.py", "switch.py", "torch_rules.py"}
FOLDERS = {"adapters", "distributed"}  # of callers
# What was there before this rule, and acts in more places than a new option may: it may not spread.
OLDER = {
    "start_pos": 16, "num_splits": 13, "window_left": 12, "window_right": 12, "sink": 9, "block_table": 9,
    "softmax_scale": 9, "seqused_k": 9,
}  # fmt: skip
# Words that mean something else in the kernels: what hides the scores of a tile there is called so since the first one.
HOMONYMS = {"mask": re.compile(r"fmha/.*|host/.*|kernels/.*|torch/operators.cpp")}
DECLARED = re.compile(r"^\s*\w+_OPTION\([^,]*,[^,]*,\s*(\w+)\s*,", re.MULTILINE)  # the third argument is the name
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def options(text: str) -> list[str]:
    """The names in options.def, once each, in its order."""
    return list(dict.fromkeys(DECLARED.findall(text)))


def words_of(path) -> set[str]:
    """The words of a file's code: without comments and, in Python, without docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", CPP_COMMENT.sub(" ", text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = (token.string for token in tokens if token.type != tokenize.COMMENT and not token.string.startswith('"""'))
    return {word for string in code for word in re.findall(r"\w+", string)}


def places() -> dict[str, set[str]]:
    """Each place, by its name, with the words of its code."""
    found: dict[str, set[str]] = {}
    for folder in ("csrc", "cutlass_ext", "tests/python"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.name not in CALLERS and path.parent.name not in FOLDERS:
                of_path = path.relative_to(ROOT / folder).as_posix()
                name = "tests" if folder == "tests/python" else TOGETHER.get(path.name, TOGETHER.get(of_path, of_path))
                found.setdefault(name, set()).update(words_of(path))
    return found


def main() -> None:
    all_places = places()
    counted = []
    for name in options((ROOT / "csrc" / "options.def").read_text()):
        other = HOMONYMS.get(name)
        found = [place for place, words in all_places.items() if name in words and not (other and other.match(place))]
        counted.append((len(found), OLDER.get(name, MOST), name, found))
    if not counted:
        sys.exit("csrc/options.def declares no option that this script can read")
    print(f"places of an option; a new one has {MOST} at most:")
    for n, most, name, found in sorted(counted, reverse=True):
        print(f"{n:3} of {most:2} {name:18} {' '.join(found)}")
    if too_many := [name for n, most, name, _ in counted if n > most]:
        sys.exit(f"too many places: {', '.join(too_many)}. What does not check, use or test an option can pass it on")


if __name__ == "__main__":
    main()

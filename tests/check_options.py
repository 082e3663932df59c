"""Counts the places that an option of csrc/options.def touches: where it is declared, checked, used and tested.

`make test` runs it. A place is a file of csrc/ or cutlass_ext/ that names the option as a word, comments included; the
oracle, where it names it; and the tests, one place in all. cutlass_ext/bench.py, a program that calls the library, is
none. An option may have MOST of them; the worst come first.
"""

import re
import sys

from source_tree import ROOT

MOST = 8
SUFFIXES = ".cpp", ".cu", ".hpp", ".def", ".py"
DECLARED = re.compile(r"^\s*\w+_OPTION\([^,]*,[^,]*,\s*(\w+)\s*,", re.MULTILINE)  # the third argument is the name


def options(text: str) -> list[str]:
    """The names in options.def, once each, in its order."""
    return list(dict.fromkeys(DECLARED.findall(text)))


def places(name: str) -> list[str]:
    """The files that name an option, without folders."""
    word = re.compile(rf"\b{name}\b")
    names_it = lambda path: word.search(path.read_text(errors="replace"))  # noqa: E731
    sources = [path for folder in ("csrc", "cutlass_ext") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in sorted(sources) if path.suffix in SUFFIXES and path.name != "bench.py"]
    found = [path.name for path in sources if names_it(path)]
    tests = sorted((ROOT / "tests" / "python").glob("*.py"))
    found += [path.name for path in tests if path.name == "oracle.py" and names_it(path)]
    return found + (["tests"] if any(names_it(path) for path in tests if path.name != "oracle.py") else [])


def main() -> None:
    declared = ROOT / "csrc" / "options.def"
    counted = sorted(((name, places(name)) for name in options(declared.read_text())), key=lambda pair: -len(pair[1]))
    if not counted:
        sys.exit(f"{declared.relative_to(ROOT)} declares no option that this script can read")
    print(f"places of an option, of at most {MOST}:")
    for name, found in counted:
        print(f"{len(found):3} {name:18} {' '.join(found)}")
    if too_many := [name for name, found in counted if len(found) > MOST]:
        sys.exit(f"more than {MOST} places: {', '.join(too_many)}. What does not check, use or test it can pass it on")


if __name__ == "__main__":
    main()

"""The hash that ties the GPU's record to csrc/: of code, not of comments."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from source_tree import ROOT, TOKEN, code_of

CODE = """#define TWICE(x) \\
  ((x) + (x))
int const n = 65'536 / 2;  // half
char const* const s = "no // comment", quote = '"';  /* one */ int m;
asm("/* nor this */");
"""


COMMENTS = (
    ("  // half", ""),
    ("// half", "// don't"),
    ("/* one */ ", ""),
    ("int m", "  int m"),
    ("int c", "// new\n\nint c"),
)
CHANGES = [
    ("65'536", "65'537"), ("no // comment", "no // comments"), ("nor this", "nor that"), ("'\"'", "'/'"), ("\\\n", ""),
    (";\n", "; "),
]  # fmt: skip


@pytest.mark.parametrize("change", COMMENTS, ids=repr)
def test_comments_and_empty_lines_change_nothing(change):
    assert change[0] in CODE and code_of(CODE.replace(*change)) == code_of(CODE)


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_code_and_strings_count(change):
    assert change[0] in CODE and code_of(CODE.replace(*change)) != code_of(CODE)


def test_every_character_is_seen():
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        text = path.read_text()
        assert "".join(match[0] for match in TOKEN.finditer(text)) == text, path

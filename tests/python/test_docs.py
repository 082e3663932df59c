"""README and docs: every Python snippet runs, every link and command leads somewhere, and lines stay short."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

import cutlass_ext

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(page, language):
    return [text for tag, text in BLOCK.findall(page.read_text()) if tag == language]


def test_all_pages_are_there():
    assert {page.stem for page in PAGES} == {
        "README", "float32", "guide", "how_it_works", "install", "migration", "performance", "semantics",
        "several_gpus",
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_snippets_run(page, monkeypatch):
    """One after the other, as they stand; of transformers where it is installed, under torchrun as one rank."""
    torch.manual_seed(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    namespace = {"__name__": page.stem}
    try:
        for snippet in blocks(page, "python"):
            if "transformers" in snippet and importlib.util.find_spec("transformers") is None:
                continue
            tree = ast.parse(snippet, filename=str(page))
            exec(compile(tree, str(page), "exec"), namespace)
    finally:
        for device in ("cpu", "cuda"):
            cutlass_ext.deactivate(device)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page):
    """And to headings in them."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = target.partition("#")
        if "://" not in target:
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not heading or file.suffix != ".md" or heading in headings(file), target


def headings(page):
    """As links name them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_lines_of_the_algorithm_are_where_the_page_says():
    """What a row of docs/how_it_works.md shows in its last column stands in the line of its link."""
    page = ROOT / "docs" / "how_it_works.md"
    rows = re.findall(r"^\|.*\| \[(\S+):(\d+)\]\((\S+)#L(\d+)\) \| `(.*)` \|$", page.read_text(), re.MULTILINE)
    assert len(rows) > 20
    for name, shown, path, line, code in rows:
        lines = (page.parent / path).read_text().splitlines()
        found = [i for i, text in enumerate(lines, 1) if code in text]
        assert path.endswith(name) and shown == line and int(line) in found, f"{name}:{line} is at {found}: {code}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_in_code_are_there(page):
    """What stands in backticks and looks like a file of ours."""
    for path in re.findall(r"`((?:csrc|python|tests|tools|bench|docs|cutlass_ext)/[\w./]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_errors_are_quoted_as_they_are_raised():
    """The texts in the tables of errors, as far as no value stands in them, are those of the sources."""
    sources = [*ROOT.glob("setup.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("cutlass_ext/**/*.py")]
    sources += [*ROOT.glob("csrc/torch/*.cpp"), *ROOT.glob("csrc/host/*.hpp")]
    code = "\n".join(path.read_text() for path in sources).replace('\\"', '"')
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that go on in the next line
    page = (ROOT / "docs" / "install.md").read_text()
    tables = re.findall(r"^\| it says \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    quoted = [text for table in tables for text in re.findall(r"^\|[^`|]*`([^`]+)`", table, re.MULTILINE)]
    assert len(quoted) == 22
    assert not [text for text in quoted if text not in code]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_name_what_there_is(page):
    for line in "".join(blocks(page, "")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["make"]:
            assert words[1] in TARGETS, line
        if words[:1] == ["python"] and words[1] != "your_program.py":
            there = importlib.util.find_spec(words[2]) if words[1] == "-m" else (ROOT / words[1]).exists()
            assert there, line


def test_targets_of_make_have_a_text():
    """Which `make help` prints; but for the first line of the log, which nobody asks for."""
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"^([a-z0-9-]+):.* ## \S", text, re.MULTILINE)) == {*phony.split()} - {"record"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_lines_are_short(page):
    """Rows of tables aside, which cannot be broken."""
    long = [line for line in page.read_text().splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long

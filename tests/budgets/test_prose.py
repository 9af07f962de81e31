"""Rules for comments and documents, read from the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKS = {".py": "#", ".pyi": "#", ".cmake": "#", ".txt": "#", ".sh": "#"}
MARKS |= dict.fromkeys((".h", ".c", ".cpp", ".cu", ".cuh", ".rs", ".in"), "//")
FOLDERS = (
    "src",
    "python",
    "tests",
    "tools",
    "research",
    "benchmarks",
    "examples",
    "_build",
    "cmake",
)
NOTES = list(ROOT.glob("*.md"))
NOTES += [p for f in (*FOLDERS, "docs") for p in (ROOT / f).rglob("*.md")]
LONGEST_LINE = 120


def comments(text: str, mark: str) -> Iterator[str]:
    """The first line of each comment and, in Python, of each docstring."""
    own_line = re.compile(rf"\s*{mark}[/!<]* *(?P<words>.*)")
    beside_code = re.compile(rf"\S\s+{mark} *(?P<words>[A-Z].*)")
    docstring = re.compile(r'"""(?P<words>.+)')
    inside = False
    for line in text.splitlines():
        found = own_line.match(line)
        if found and not inside:
            yield found["words"]
        inside = bool(found)
        for pattern in (beside_code, *([docstring] if mark == "#" else [])):
            if not found and (other := pattern.search(line)):
                yield other["words"]


def is_dangling(words: str) -> bool:
    """Whether a comment opens with a clause instead of a sentence or a name."""
    return re.match(r"(?:What|Of)\b", words) is not None


@pytest.mark.parametrize("folder", [f for f in FOLDERS if (ROOT / f).exists()])
def test_comments_open_with_their_subject(folder: str) -> None:
    files = [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in MARKS]
    assert files
    guilty = [
        f"{path.relative_to(ROOT)}: {words}"
        for path in files
        if "build" not in path.relative_to(ROOT).parts
        for words in comments(path.read_text(encoding="utf-8"), MARKS[path.suffix])
        if is_dangling(words)
    ]
    assert not guilty, "\n".join(guilty)


def too_long(text: str) -> list[str]:
    """Lines beyond the limit, but for rows of tables and words that cannot be broken."""
    return [
        line
        for line in text.splitlines()
        if len(line) > LONGEST_LINE
        and not line.lstrip().startswith("|")
        and max(map(len, line.split())) < LONGEST_LINE - 20
    ]


@pytest.mark.parametrize("note", NOTES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_of_documents_are_short(note: Path) -> None:
    text = note.read_text(encoding="utf-8")
    assert not too_long(text)
    rows = [line.rstrip() for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows), "a row of a table is broken"


def test_the_rules_see_what_they_forbid() -> None:
    seen = list(comments("int x;  @ Of none\n@ What\n@ Of\n", "@"))
    assert seen == ["Of none", "What"] and all(map(is_dangling, seen))
    quotes = '"' * 3
    seen = list(comments(f"def f():\n    {quotes}What it is.\n\n    Of more.{quotes}\n", "#"))
    assert seen == ["What it is."] and is_dangling(seen[0])
    assert not is_dangling("Offsets of rows") and not is_dangling("Whatever is left")
    assert too_long("word " * 30) and not too_long("| cell " * 30) and not too_long("x" * 200)

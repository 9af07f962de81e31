"""The directive `header`: a public header's comments as text, its declarations as code.

    ```{header} forward.h
    ```

A header is read as this project writes them: a comment stands above the declaration that it is
about, a blank line ends a group, and what lies in a struct stays with it. A line at the top level
that is none of those stops the build, so that nothing of a header is left out.
"""

from __future__ import annotations

import re
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

HEADERS = Path(__file__).resolve().parents[1] / "src" / "include" / "dlattn"

# Lines that declare nothing.
_FRAME = re.compile(
    r'#pragma once|#include .*|namespace dlattn \{|\}  // namespace dlattn|extern "C" \{'
    r'|\}  // extern "C"|#ifndef DLATTN_PARAMETERS_ONLY.*|#endif|struct \w+;.*'
)
_NAME = re.compile(
    r"^(?:#define (?P<macro>\w+)"
    r"|(?:template <[^>]*>\n)?(?:struct|class|enum class)(?: DLATTN_API)? (?P<type>\w+)"
    r"|using (?P<alias>\w+) ="
    r"|constexpr [\w:]+ (?P<constant>\w+)"
    r"|(?:DLATTN_API|inline) [^(;]*?(?P<function>\w+)\()",
    re.MULTILINE,
)
_TYPEDEF = re.compile(r"^\} (\w+);", re.MULTILINE)
_ENUMERATOR = re.compile(r"\b(DLATTN_\w+) = ")


class Item(NamedTuple):
    """Declarations that share a comment; without any, a comment that stands alone."""

    comment: list[str]
    code: list[str]

    @property
    def names(self) -> list[str]:
        """The names that it declares."""
        code = "\n".join(self.code)
        if code.startswith("enum {"):
            return _ENUMERATOR.findall(code)
        if code.startswith("typedef struct"):
            return _TYPEDEF.findall(code)
        return [name for match in _NAME.finditer(code) for name in match.groups() if name]


def _is_open(item: Item) -> bool:
    """Whether the last declaration of an item goes on in the next line."""
    code = [line.partition("//")[0].rstrip() for line in item.code]
    if not code or code[-1].startswith("#define "):
        return False
    depth = sum(line.count("{") - line.count("}") for line in code)
    return depth > 0 or not code[-1].endswith((";", "}"))


def parse(text: str) -> list[Item]:
    """The comments and declarations of a header, in its order."""
    items, linkage = [Item([], [])], False
    for number, line in enumerate(text.splitlines(), 1):
        item = items[-1]
        if _is_open(item):
            item.code.append(line)
        elif linkage or line == "#ifdef __cplusplus":  # around extern "C"
            linkage = line != "#endif"
        elif not line or _FRAME.fullmatch(line):
            items.append(Item([], []))
        elif line.startswith("//"):
            if item.code:
                items.append(Item([], []))
            items[-1].comment.append(line[2:].removeprefix(" "))
        elif line[0].isalpha() or line.startswith("#define "):
            item.code.append(line)
        else:
            raise ValueError(f"line {number} is neither a comment nor a declaration: {line!r}")
    return [item for item in items if item.comment or item.code]


def _inline(text: str) -> list[nodes.Node]:
    parts = text.split("`")
    return [nodes.literal("", x) if i % 2 else nodes.Text(x) for i, x in enumerate(parts) if x]


def _kind(line: str) -> str:
    return "block" if line.startswith("  ") else "text" if line else "end of a paragraph"


def _prose(comment: list[str]) -> list[nodes.Node]:
    """A comment as paragraphs. Its indented lines are tables and formulas, and stay as they are."""
    found: list[nodes.Node] = []
    for kind, lines in groupby(comment, key=_kind):
        text = list(lines)
        if kind == "block":
            block = textwrap.dedent("\n".join(text))
            found.append(nodes.literal_block(block, block, language="text"))
        elif kind == "text":
            found.append(nodes.paragraph("", "", *_inline(" ".join(text))))
    return found


class Header(SphinxDirective):
    """The sections of the headers that are named."""

    has_content = False
    required_arguments = 1
    optional_arguments = 100

    def run(self) -> list[nodes.Node]:
        return [self._header(name) for name in self.arguments]

    def _header(self, name: str) -> nodes.section:
        path = HEADERS / name
        self.env.note_dependency(str(path))
        section = self._section([f"dlattn/{name}"], path.stem)
        for item in parse(path.read_text(encoding="utf-8")):
            names = list(dict.fromkeys(item.names))
            inner = self._section(names, path.stem) if names else section
            inner += _prose(item.comment)
            if item.code:
                code = "\n".join(line.replace("DLATTN_API ", "") for line in item.code)
                language = "c" if name == "c.h" else "cpp"
                inner += nodes.literal_block(code, code, language=language)
            if names:
                section += inner
        return section

    def _section(self, names: list[str], header: str) -> nodes.section:
        shown = names if len(names) < 4 else [names[0], "…", names[-1]]
        title = nodes.title()
        for i, name in enumerate(shown):
            title += [nodes.Text(" " if "…" in shown else ", ")] if i else []
            title += nodes.Text(name) if name == "…" else nodes.literal("", name)
        taken = self.state.document.ids
        ids = [name if name not in taken else f"{header}-{name}" for name in names]
        section = nodes.section("", title, ids=ids, names=[])
        taken.update(dict.fromkeys(ids, section))
        return section


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("header", Header)
    return {"parallel_read_safe": True}

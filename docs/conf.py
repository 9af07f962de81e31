"""The documentation's site: sphinx-build -W -c docs . build/site

The Markdown files are those that GitHub shows, where they stand: the source folder is the
repository's root, so that their links are good in both places. Docstrings are plain text, and
become reStructuredText here.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import dlattn

sys.path.insert(0, str(Path(__file__).parent))  # for header_reference

project = "dlattn"
author = "the dlattn developers"
copyright = author
version = release = dlattn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "header_reference",
]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "benchmarks/*.md",
    "docs/**",
    "research/*.md",
    "src/**/*.md",
    "tests/simt/*.md",
]
exclude_patterns = ["build", "dist", ".venv", "**/.*"]
# The pages of frameworks need them: what is documented is what was imported.
_FRAMEWORKS = {
    "torch": ["torch"],
    "flash_attn_interface": ["torch"],
    "transformers": ["torch", "transformers"],
    "diffusers": ["torch", "diffusers"],
    "jax": ["jax"],
}
exclude_patterns += [
    f"docs/api/{name}.md"
    for name, needed in _FRAMEWORKS.items()
    if not all(map(importlib.util.find_spec, needed))
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub has them
nitpicky = True
autodoc_typehints = "none"  # docstrings tell dtypes and shapes, which types do not
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"dlattn {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "text"  # of blocks that name none: commands
smartquotes = False  # values are quoted to be copied

_HEADS = "Args|Attributes|Raises|References|Returns|Source"
_ENTRY = re.compile(r"(\[\d+\]|\*{0,2}\w[\w., ]*:)(?: |$)")


def _inline(text: str) -> str:
    """Backticks mean code, and nothing else means anything."""
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [re.sub(r"([\\*|_`\[\]<>])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"\\ ``{part}``\\ " for part in parts[1::2]]
    return "".join(parts)


def _entries(lines: list[str]) -> list[str]:
    """An indented block of names and what they mean, as a list."""
    found: list[str] = []
    for line in lines:
        if match := _ENTRY.match(line):
            found += [f"- **{_inline(match[1].rstrip(':'))}** {_inline(line[match.end() :])}"]
        elif line.strip():
            found += [f"  {_inline(line.strip())}"]
    return ["", *found, ""]


def to_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText."""
    found: list[str] = []
    head, i = "", 0
    while i < len(lines):
        if not lines[i].startswith("    "):
            match = re.fullmatch(rf"({_HEADS}):", lines[i])
            head = match[1] if match else ""
            found += ["", f"**{head}**", ""] if head else [_inline(lines[i])]
            i += 1
            continue
        end = i
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        block = textwrap.dedent("\n".join(lines[i:end])).strip("\n").split("\n")
        if head not in ("Returns", "Source") and _ENTRY.match(block[0]):
            found += _entries(block)
        elif head:
            found += ["", *map(_inline, block), ""]
        else:
            found += ["", ".. code-block:: python", "", *(f"   {line}" for line in block), ""]
        i = end
    return found


def _convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def _redirect(app: Any, error: Exception | None) -> None:
    """The site's own address leads to its first page."""
    if error is None and app.builder.name == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _convert)
    app.connect("build-finished", _redirect)

"""Where the seeds stand in the kernels' source: comments `// seed: <name>` before a statement."""

from __future__ import annotations

import re


def marked(source: str, name: str, statements: int = 1) -> list[tuple[int, int]]:
    """Begin and end of the statements behind each marker of this name.

    A statement ends at its semicolon; the head of an if or a loop, at its brace.
    """
    spans = []
    for marker in re.finditer(rf"//[ ]seed:[ ]{re.escape(name)}\n", source):
        begin = end = marker.end()
        for _ in range(statements):
            end = _end(source, end)
        begin += len(source[begin:end]) - len(source[begin:end].lstrip())
        spans.append((begin, end))
    return spans


def names(source: str) -> list[str]:
    """The markers that stand in a source."""
    return re.findall(r"// seed: (\S+)\n", source)


def _end(source: str, at: int) -> int:
    """The end of the statement that begins at `at`."""
    pairs = {"(": ")", "[": "]"}
    closing: list[str] = []  # of what is open
    # A brace within parentheses belongs to them: a lambda's body, or an initialiser.
    token = re.compile(r"//[^\n]*|[()\[\]{};]")
    for match in token.finditer(source, at):
        found = match[0]
        initialiser = found == "{" and source[at : match.start()].rstrip().endswith("=")
        if found in pairs or (found == "{" and (closing or initialiser)):
            closing.append(pairs.get(found, "}"))
        elif closing and found == closing[-1]:
            closing.pop()
        elif not closing and found in ";{":
            return match.end()
    raise ValueError(f"no end of the statement: {source[at : at + 60]!r}")

"""Plain-text output: aligned tables, durations, progress on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from dlattn.console.stdout import discard


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
    """Align columns with spaces; `right` lists the columns that are right-aligned."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    texts = ("  ".join(cell(i, text) for i, text in enumerate(line)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(headers), ["---"] * len(headers), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def duration(seconds: float) -> str:
    """Three significant digits in the unit that fits; a dash where nothing was measured."""
    if math.isnan(seconds):
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def rate(tflops: float) -> str:
    """Operations per second in the unit that fits."""
    if tflops >= 1.0:
        return f"{_three_digits(tflops)} TFLOP/s"
    return f"{_three_digits(1e3 * tflops)} GFLOP/s"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def shape(sizes: Sequence[int]) -> str:
    """A shape as people write it: (1,8,512,64)."""
    return "(" + ",".join(str(size) for size in sizes) + ")"


class Progress:
    """Counts steps on stderr: a line that is rewritten on a terminal, else one now and then."""

    _SECONDS_BETWEEN_LINES = 2.0

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """Announce nothing yet; `total` is the number of steps to come."""
        self._total = total
        self._done = 0
        self._stream: TextIO | None = stream or sys.stderr  # None: the shell's 2>&-
        self._rewrite = self._stream is not None and self._stream.isatty()
        self._last_line = -math.inf

    def step(self, what: str) -> None:
        """Say which step begins."""
        self._done += 1
        line = f"[{self._done:>{len(str(self._total))}}/{self._total}] {what}"
        now = time.monotonic()
        if self._rewrite:
            self._write(f"\r\x1b[K{line}")
        elif now - self._last_line >= self._SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._write(f"{line}\n")

    def close(self) -> None:
        """Clear the line."""
        if self._rewrite:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # progress that nobody can read is no reason to stop
            discard(self._stream)

"""Runs in parts: which steps of a set a run takes, and how long it may go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dlattn.console.errors import CommandError

_CLOSING_SECONDS = 10.0  # for host times, a last look at the machine and a plot
_MARGIN = 1.25  # by which a step may take longer than those before it
_RECENT = 4  # steps that tell how long the next takes: the first may compile a peer's kernels

Step = TypeVar("Step")


@dataclass(frozen=True)
class Part:
    """The steps of a set that a run takes: every `count`-th, from the `number`-th on."""

    number: int
    count: int

    def of(self, steps: Sequence[Step]) -> list[Step]:
        """Its steps. Neighbours take about as long, so that all parts do."""
        return list(steps[self.number - 1 :: self.count])


ALL = Part(1, 1)


def parse_part(text: str) -> Part:
    """The part that `2/3` stands for, the second of three."""
    number, slash, count = text.partition("/")
    if slash and all(x.isdecimal() and len(x) < 6 for x in (number, count)):
        part = Part(int(number), int(count))
        if 1 <= part.number <= part.count:
            return part
    raise CommandError(f"--part is {text!r}; accepted: K/N with K from 1 to N, such as 2/3")


class Deadline:
    """Tells whether a step as long as the last few would end before a time limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """From now on; None: there is no limit."""
        self._clock = clock
        self._started = clock()
        self._seconds = seconds
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def took(self, seconds: float) -> None:
        """Note how long a step took."""
        self._recent.append(seconds)

    def now(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._started

    def allows(self) -> bool:
        """Whether there is time for one more."""
        if self._seconds is None:
            return True
        longest = max(self._recent, default=0.0)
        return self.now() + _MARGIN * longest + _CLOSING_SECONDS <= self._seconds


def seconds_of(text: str) -> float:
    """A time limit in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise CommandError(f"--time-limit is {text!r}; accepted: seconds above 0")
    return seconds


def left_line(names: Sequence[str], left: Collection[str]) -> str:
    """The sentence on what a time limit left out; empty if nothing is left."""
    if not left:
        return ""
    told = ", ".join(list(left)[:6]) + (", ..." if len(left) > 6 else "")
    return (
        f"The time limit left out {len(left)} of {len(names)} steps: {told}. The same command with "
        "--continue and this JSON measures them."
    )

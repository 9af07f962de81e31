"""Counts the calls of torch's attention that dlattn served, and why it left the rest to torch."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field

from dlattn import _core


@dataclass
class Stats:
    """The calls of torch's attention since dlattn was activated first, or `stats(reset=True)`.

    Attributes:
        served: Calls that dlattn computed, by the name of torch's operator.
        refused: Calls that went to the kernel that was there before, by the reason. Reasons that
            differ in their numbers alone are one, in the words of the first.
    """

    served: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


_counting = threading.Lock()
_served: Counter[str] = Counter()
_refused: Counter[str] = Counter()  # by what is left of a reason without its numbers
_first: dict[str, str] = {}  # the reasons of _refused in full

_NUMBERS = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)(?!\w)")
_SHAPES = re.compile(r"\((?:…,? ?)+\)")


def stats(reset: bool = False) -> Stats:
    """Return how many calls dlattn served, and why it left others to torch.

    Args:
        reset: Begin to count anew.
    """
    with _counting:
        # Native kernels count for themselves what they serve.
        served = _served + Counter(_core.torch_sdpa_served(reset))
        found = Stats(dict(served), {_first[kind]: count for kind, count in _refused.items()})
        if reset:
            for counted in (_served, _refused, _first):
                counted.clear()
    return found


def count_served(operator: str) -> None:
    with _counting:
        _served[operator] += 1


def count_refused(operator: str, reason: str) -> None:
    reason = f"{operator}: {reason}"
    kind = _SHAPES.sub("(…)", _NUMBERS.sub("…", reason))
    with _counting:
        _refused[kind] += 1
        _first.setdefault(kind, reason)

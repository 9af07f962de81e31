"""The steps of a ring as one program that all processes run, as JAX's are.

In a step every process receives the same rows of a shard, of the process that is `shift` before it,
and calls attention in one of a few ways. Which one it is, its own number tells.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from dlattn.integrations.ring.schedule import Mask, Pair, pairs
from dlattn.integrations.ring.shards import Range


class Part(NamedTuple):
    """A call of attention.

    Attributes:
        q, k: Its rows of queries, and of the keys that have arrived.
        left, right: Its window, None for no limit.
        side: Of queries that stand behind all of its keys 1, before them -1, else 0. It is 0 where
            distances do not matter.
    """

    q: Range
    k: Range
    left: int | None
    right: int | None
    side: int


class Step(NamedTuple):
    """The work of all processes with the keys of those `shift` before them.

    Attributes:
        rows: The rows of a shard that travel.
        receivers: The processes that need them.
        kinds: The calls of a process, for each kind of process.
        kind_of: The kind of each process.
        offsets: For each process and each of its calls, the first query's position less that of
            the first key.
    """

    shift: int
    rows: Range
    receivers: tuple[int, ...]
    kinds: tuple[tuple[Part, ...], ...]
    kind_of: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    @property
    def sums(self) -> bool:
        """Whether a key's gradient may be the sum of those of several calls."""
        each = (sorted(part.k for part in parts) for parts in self.kinds)
        return any(x[1] > y[0] for keys in each for x, y in pairwise(keys))


@lru_cache(maxsize=256)
def steps(length: int, n: int, order: str, mask: Mask) -> tuple[Step, ...]:
    """Those that any process needs, the one with its own keys first, if need be."""
    found = []
    for shift in range(n):
        work = [pairs(length, n, rank, (rank - shift) % n, order, mask) for rank in range(n)]
        if any(work):
            found.append(_step(shift, work, mask.distances))
    return tuple(found)


def _step(shift: int, work: list[tuple[Pair, ...]], distances: bool) -> Step:
    begin = min(pair.k[0] for own in work for pair in own)
    end = max(pair.k[1] for own in work for pair in own)
    of_rank = [tuple(_part(pair, begin, distances) for pair in own) for own in work]
    kinds = tuple(dict.fromkeys(of_rank))
    most = max(map(len, kinds))
    return Step(
        shift,
        (begin, end),
        tuple(rank for rank, own in enumerate(work) if own),
        kinds,
        tuple(map(kinds.index, of_rank)),
        tuple((*(pair.offset for pair in own), *(0,) * (most - len(own))) for own in work),
    )


def _part(pair: Pair, first_key: int, distances: bool) -> Part:
    k = pair.k[0] - first_key, pair.k[1] - first_key
    side = 0
    if distances and not pair.is_square:
        side = 1 if pair.offset > 0 else -1
    return Part(pair.q, k, pair.left, pair.right, side)

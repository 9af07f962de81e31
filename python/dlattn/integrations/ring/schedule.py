"""Which keys meet which queries in which step of a ring, and how a call of attention says so.

A pure function of lengths, processes and masks: every process computes its own steps and those of
the others, and so knows what it has to send.

Queries at positions a + i and keys at b + j have the band lo <= j - i <= hi of scores that are
computed. dlattn's calls have windows that are not negative, around a shift that is the number of
keys less that of queries. After rows and keys that take no part are cut off at both ends, that
shift lies within the band, so that each band is expressed exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from dlattn._errors import UnsupportedError
from dlattn._numbers import integer
from dlattn.frameworks.base import shown
from dlattn.integrations.ring.shards import Place, Range, count, joined, places, positions

_FAR = 1 << 60  # beyond any position


class Mask(NamedTuple):
    """Position p sees keys p - left .. p + right; None: no limit. `distances` matter to ALiBi."""

    left: int | None = None
    right: int | None = None
    distances: bool = False


def mask_of(causal: Any, window: Any, distances: bool) -> Mask:
    """The mask that these arguments of ring_attention mean."""
    if not isinstance(causal, (int, str)) or causal not in (
        False,
        True,
        "bottom_right",
        "top_left",
    ):
        raise UnsupportedError(
            f"causal is {causal!r}; accepted: False, True, 'bottom_right', 'top_left'"
        )
    given = (None, None) if window is None else window
    pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else ()
    sides = [None if x is None else -1 if (n := integer(x)) is None else n for x in pair]
    if not sides or any(n is not None and n < 0 for n in sides):
        raise UnsupportedError(
            f"window is {shown(window)}; accepted: None or (left, right), each None or an int from "
            "0 on"
        )
    return Mask(sides[0], 0 if causal else sides[1], distances)


class Pair(NamedTuple):
    """Query rows and key rows, counted in the shards they are of, whose scores are computed.

    Attributes:
        left, right: The window of a call with these rows alone, None for no limit.
        offset: The first query's position less that of the first key.
    """

    q: Range
    k: Range
    left: int | None
    right: int | None
    offset: int

    @property
    def is_square(self) -> bool:
        """Whether queries and keys have the same positions."""
        return self.offset == 0 and self.q[1] - self.q[0] == self.k[1] - self.k[0]


@dataclass(frozen=True)
class Call:
    """Pairs of different sequences with one window, that one call computes.

    Keys are rows of what a step's process has received. The pairs' rows increase.
    """

    pairs: tuple[Pair, ...]

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.pairs[0].left, self.pairs[0].right


@dataclass(frozen=True)
class Step:
    """The work of a process with the keys of process `source`.

    Attributes:
        rows: The rows of the source's shard that travel.
        calls: Those of attention, in their order.
    """

    source: int
    rows: tuple[Range, ...]
    calls: tuple[Call, ...]

    @property
    def num_rows(self) -> int:
        return count(self.rows)

    @property
    def sums(self) -> bool:
        """Whether a key's gradient is the sum of those of several calls."""
        keys = sorted(p.k for call in self.calls for p in call.pairs)
        return any(x[1] > y[0] for x, y in pairwise(keys))


def band_pair(q_at: int, q: Range, k_at: int, k: Range, mask: Mask) -> Pair | None:
    """Queries of rows q from position q_at on and keys of rows k from k_at on; None: no score."""
    m, keys = q[1] - q[0], k[1] - k[0]
    offset = q_at - k_at
    lo = offset - (_FAR if mask.left is None else mask.left)
    hi = offset + (_FAR if mask.right is None else mask.right)
    first_row, last_row = max(0, -hi), min(m, keys - lo)
    first_key, last_key = max(0, first_row + lo), min(keys, last_row + hi)
    if first_row >= last_row or first_key >= last_key:
        return None
    m, keys, moved = last_row - first_row, last_key - first_key, first_row - first_key
    lo, hi, shift = lo + moved, hi + moved, keys - m
    return Pair(
        (q[0] + first_row, q[0] + last_row),
        (k[0] + first_key, k[0] + last_key),
        None if lo + m - 1 <= 0 else shift - lo,
        None if hi >= keys - 1 else hi - shift,
        offset + moved,
    )


def _shard(length: int, n: int, rank: int, place: Place) -> list[tuple[int, Range]]:
    """Each part of a shard: its first position, and its rows in the shard."""
    parts, row = [], 0
    for begin, end in positions(length, n, rank, place):
        parts.append((begin, (row, row + end - begin)))
        row += end - begin
    return parts


@lru_cache(maxsize=4096)
def pairs(
    length: int, n: int, rank: int, source: int, place: Place, mask: Mask
) -> tuple[Pair, ...]:
    """The queries of `rank` with the keys of `source`, of one sequence."""
    queries, keys = _shard(length, n, rank, place), _shard(length, n, source, place)
    if not queries or not keys:
        return ()
    all_before = mask.right in (None, 0) and (mask.left is None or mask.left >= length)
    if rank == source and all_before and not mask.distances:
        # Parts are in order: a causal mask of positions is one of rows.
        whole = queries[0][1][0], queries[-1][1][1]
        return (Pair(whole, whole, None, mask.right, 0),)
    found: list[Pair] = []
    for k_at, k in keys:
        each = (band_pair(q_at, q, k_at, k, mask) for q_at, q in queries)
        of_key = [pair for pair in each if pair is not None]
        found += of_key if mask.distances else _joined_full(of_key, by_query=True)
    return tuple(found if mask.distances else _joined_full(found, by_query=False))


def _joined_full(given: Sequence[Pair], *, by_query: bool) -> list[Pair]:
    """The same with one pair for two without windows that share a side and adjoin on the other."""
    result: list[Pair] = []
    for pair in given:
        last = result[-1] if result else None
        if last is not None and (last.left, last.right, pair.left, pair.right) == (None,) * 4:
            if by_query and last.k == pair.k and last.q[1] == pair.q[0]:
                result[-1] = last._replace(q=(last.q[0], pair.q[1]))
                continue
            if not by_query and last.q == pair.q and last.k[1] == pair.k[0]:
                result[-1] = last._replace(k=(last.k[0], pair.k[1]))
                continue
        result.append(pair)
    return result


@lru_cache(maxsize=256)
def steps(lengths: tuple[int, ...], n: int, rank: int, order: str, mask: Mask) -> tuple[Step, ...]:
    """The n steps of a process, its own keys first; step s has those of (rank - s) mod n.

    `lengths` are those of sequences that lie one after the other.
    """
    return tuple(_step(lengths, n, rank, (rank - s) % n, order, mask) for s in range(n))


def _step(lengths: tuple[int, ...], n: int, rank: int, source: int, order: str, mask: Mask) -> Step:
    found: list[tuple[int, Pair]] = []
    q_row = k_row = 0
    for b, place in enumerate(places(lengths, n, order)):
        for pair in pairs(lengths[b], n, rank, source, place, mask):
            found.append((b, _moved(pair, q_row, k_row)))
        q_row += count(positions(lengths[b], n, rank, place))
        k_row += count(positions(lengths[b], n, source, place))
    travelling = joined(_union(pair.k for _, pair in found))
    placed = [(b, _moved(pair, 0, _place(travelling, pair.k[0]))) for b, pair in found]
    return Step(source, travelling, tuple(_calls(placed, mask.distances)))


def _moved(pair: Pair, q_by: int, k_by: int) -> Pair:
    q, k = pair.q, pair.k
    return pair._replace(q=(q[0] + q_by, q[1] + q_by), k=(k[0] + k_by, k[1] + k_by))


def _union(ranges: Iterable[Range]) -> Iterator[Range]:
    """The rows of any ranges, each once and in their order."""
    end = 0
    for a, b in sorted(ranges):
        if b > end:
            yield max(a, end), b
            end = b


def _place(ranges: Sequence[Range], row: int) -> int:
    """How far a row moves where the rows of `ranges` are put one behind the other."""
    before = 0
    for begin, end in ranges:
        if begin <= row < end:
            return before - begin
        before += end - begin
    raise AssertionError(f"row {row} is in none of {ranges}")


def _calls(found: Iterable[tuple[int, Pair]], distances: bool) -> Iterator[Call]:
    """One call for pairs of different sequences with the same window.

    Where distances matter its pairs are all squares, or all have their keys on the same side.
    """
    groups: dict[tuple[object, ...], list[Pair]] = {}
    seen: dict[tuple[object, ...], int] = {}
    for b, pair in found:
        kind: tuple[object, ...] = (pair.left, pair.right)
        if distances:
            kind = (*kind, pair.is_square, pair.offset < 0)
        turn = seen.get((b, kind), 0)
        seen[b, kind] = turn + 1
        groups.setdefault((*kind, turn), []).append(pair)
    return (Call(tuple(group)) for group in groups.values())

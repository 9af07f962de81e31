"""Which positions of a sequence a process holds. Plain integers: nothing here knows torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from dlattn._errors import UnsupportedError

Range = tuple[int, int]  # items begin .. end - 1

Place = str | int  # where a sequence is: the order in which it is cut, or the process that has it

ORDERS = ("zigzag", "contiguous")
ORDERS_OF_MANY = (*ORDERS, "whole")  # of sequences that lie one after the other

_BALANCE = 16  # whole sequences make processes differ by a 16th of their share at most


def check_order(order: object, accepted: Sequence[str] = ORDERS) -> None:
    if not isinstance(order, str) or order not in accepted:
        words = ", ".join(map(repr, accepted))
        raise UnsupportedError(f"order is {order!r}; accepted: {words}")


@lru_cache(maxsize=256)
def places(lengths: tuple[int, ...], n: int, order: str) -> tuple[Place, ...]:
    """Where each of several sequences is.

    "whole" gives as many sequences as it can to one process each, longer ones the last, and cuts
    the others as "zigzag" does. Rows of processes, and scores, then differ by a 16th at most.
    """
    if order != "whole":
        return (order,) * len(lengths)
    longest_first = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    while longest_first:
        owners = _balanced(lengths, n, longest_first)
        if owners is not None:
            return tuple(owners.get(b, "zigzag") for b in range(len(lengths)))
        longest_first = longest_first[max(1, len(longest_first) // 8) :]
    return ("zigzag",) * len(lengths)


def _balanced(lengths: Sequence[int], n: int, chosen: Sequence[int]) -> dict[int, int] | None:
    """The process of each sequence that was chosen; None if processes would differ by too much.

    Each goes where the most loaded of rows and scores stays least, by integers, so that all
    processes find the same.
    """
    rows, scores = sum(lengths), sum(x * x for x in lengths)
    loads = [(0, 0)] * n
    owners = {}
    for b in chosen:
        more = lengths[b] * scores, lengths[b] ** 2 * rows  # shares of rows * scores
        after = [(x + more[0], y + more[1]) for x, y in loads]
        owners[b] = min(range(n), key=lambda rank: max(after[rank]))
        loads[owners[b]] = after[owners[b]]
    apart = max(max(x) - min(x) for x in zip(*loads, strict=True))
    return owners if apart * n * _BALANCE <= rows * scores else None


def positions(length: int, n: int, rank: int, place: Place) -> tuple[Range, ...]:
    """The positions of a sequence that are process `rank`'s of `n`, in the order of its shard.

    "contiguous": part `rank` of n. "zigzag": parts `rank` and 2n - 1 - rank of 2n, so that under a
    causal mask each process has as much work as the others. Part c of m is length * c // m to
    length * (c + 1) // m: any length has parts, of sizes that differ by one.
    """
    if isinstance(place, int):
        return joined([(0, length)]) if place == rank else ()
    parts, own = (n, (rank,)) if place == "contiguous" else (2 * n, (rank, 2 * n - 1 - rank))
    return joined((length * c // parts, length * (c + 1) // parts) for c in own)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same without empty ranges, and with those made one that follow each other."""
    result: list[Range] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return tuple(result)


def count(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def rows(lengths: Sequence[int], n: int, rank: int, order: str) -> tuple[Range, ...]:
    """The same of several sequences that lie one after the other: rows of all of them."""
    found: list[Range] = []
    start = 0
    for length, place in zip(lengths, places(tuple(lengths), n, order), strict=True):
        found += [(start + a, start + b) for a, b in positions(length, n, rank, place)]
        start += length
    return joined(found)

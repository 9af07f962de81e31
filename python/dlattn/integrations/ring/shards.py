"""Which positions of a sequence a process holds. Plain integers: nothing here knows torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlattn._errors import UnsupportedError

Range = tuple[int, int]  # items begin .. end - 1

ORDERS = ("zigzag", "contiguous")


def check_order(order: object) -> None:
    if not isinstance(order, str) or order not in ORDERS:
        raise UnsupportedError(f"order is {order!r}; accepted: 'zigzag', 'contiguous'")


def positions(length: int, n: int, rank: int, order: str) -> tuple[Range, ...]:
    """The positions of a sequence that are process `rank`'s of `n`, in the order of its shard.

    "contiguous": part `rank` of n. "zigzag": parts `rank` and 2n - 1 - rank of 2n, so that under a
    causal mask each process has as much work as the others. Part c of m is length * c // m to
    length * (c + 1) // m: any length has parts, of sizes that differ by one.
    """
    parts, own = (n, (rank,)) if order == "contiguous" else (2 * n, (rank, 2 * n - 1 - rank))
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
    for length in lengths:
        found += [(start + a, start + b) for a, b in positions(length, n, rank, order)]
        start += length
    return joined(found)

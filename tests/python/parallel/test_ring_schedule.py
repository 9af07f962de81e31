"""The schedule of a ring: every score once, no key that nobody reads, equal work. No process."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import numpy as np
import pytest

from dlattn._errors import UnsupportedError
from dlattn.integrations.ring import shards
from dlattn.integrations.ring.schedule import (
    Call,
    Mask,
    Pair,
    Step,
    band_pair,
    mask_of,
    steps,
)


def work_of(pair: Pair) -> int:
    """How many scores the mask leaves."""
    m, keys = pair.q[1] - pair.q[0], pair.k[1] - pair.k[0]
    left = keys + m if pair.left is None else pair.left
    right = keys + m if pair.right is None else pair.right
    at = np.arange(m) + keys - m  # where the queries stand among the keys
    return int(np.maximum(np.minimum(keys, at + right + 1) - np.maximum(0, at - left), 0).sum())


def scores_of(
    call: Call, step: Step, q_position: list[tuple[int, int]], k_position: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(sequence, query, key) of what a call computes, by the meaning of its window."""
    travelled = [k_position[i] for a, b in step.rows for i in range(a, b)]
    found = []
    left, right = call.window
    for pair in call.pairs:
        assert (pair.left, pair.right) == (left, right)
        shift = (pair.k[1] - pair.k[0]) - (pair.q[1] - pair.q[0])
        for i in range(pair.q[1] - pair.q[0]):
            for j in range(pair.k[1] - pair.k[0]):
                low = left is None or j >= i + shift - left
                if low and (right is None or j <= i + shift + right):
                    (b, p), (c, x) = q_position[pair.q[0] + i], travelled[pair.k[0] + j]
                    assert b == c
                    found.append((b, p, x))
    return found


def positions_of(lengths: tuple[int, ...], n: int, rank: int, order: str) -> list[tuple[int, int]]:
    return [
        (b, p)
        for b, place in enumerate(shards.places(lengths, n, order))
        for begin, end in shards.positions(lengths[b], n, rank, place)
        for p in range(begin, end)
    ]


def test_every_score_is_computed_once() -> None:
    draw = random.Random(5)
    for _ in range(150):
        order = draw.choice(shards.ORDERS_OF_MANY)
        lengths = tuple(draw.randrange(18) for _ in range(draw.choice([1, 1, 3])))
        if order == "whole":  # as many of a length as processes are whole, the others are cut
            lengths += (draw.randrange(1, 7),) * draw.choice([4, 8])
        n = draw.choice([1, 2, 3, 4])
        sides = [draw.choice([None, None, 0, 1, 3, 8, 40]) for _ in range(2)]
        mask = Mask(*sides, distances=draw.random() < 0.3)
        left, right = (100 if side is None else side for side in sides)
        want = {
            (b, p, x)
            for b, length in enumerate(lengths)
            for p in range(length)
            for x in range(max(0, p - left), min(length, p + right + 1))
        }
        found: list[tuple[int, int, int]] = []
        for rank in range(n):
            queries = positions_of(lengths, n, rank, order)
            for step in steps(lengths, n, rank, order, mask):
                keys = positions_of(lengths, n, step.source, order)
                for call in step.calls:
                    found += scores_of(call, step, queries, keys)
                    assert all(p.k[1] <= step.num_rows for p in call.pairs)
                    for a, b in pairwise(call.pairs):  # rows increase, and none is in two pairs
                        assert a.q[1] <= b.q[0] and a.k[1] <= b.k[0]
                read = {i for call in step.calls for p in call.pairs for i in range(*p.k)}
                assert len(read) == step.num_rows  # no key travels for nothing
        assert len(found) == len(set(found)) and set(found) == want, (lengths, n, order, mask)


def test_pairs_for_distances_have_one_side() -> None:
    draw = random.Random(6)
    for _ in range(100):
        length, n = draw.randrange(1, 60), draw.choice([2, 3, 4])
        mask = Mask(draw.choice([None, 5]), draw.choice([None, 0, 7]), True)
        for rank in range(n):
            for step in steps((length,), n, rank, "zigzag", mask):
                for pair in (p for call in step.calls for p in call.pairs):
                    below = pair.offset >= pair.k[1] - pair.k[0]
                    above = pair.offset + pair.q[1] - pair.q[0] <= 0
                    assert pair.is_square or below or above


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(4096,), (512, 96, 2048, 1440)])
def test_zigzag_balances_causal_work(n: int, lengths: tuple[int, ...]) -> None:
    work = np.array(
        [
            [
                sum(work_of(pair) for call in step.calls for pair in call.pairs)
                for step in steps(lengths, n, rank, "zigzag", Mask(None, 0))
            ]
            for rank in range(n)
        ]
    )
    assert work.max(axis=0).sum() <= 1.02 * work.sum() / n  # each step waits for the slowest
    calls = steps(lengths, n, 0, "zigzag", Mask(None, 0))
    assert [len(step.calls) for step in calls] == [1] * n


def test_causal_zigzag_sends_half_of_the_keys_to_ranks_before() -> None:
    sent = [step.num_rows for step in steps((64,), 4, 2, "zigzag", Mask(None, 0))]
    assert sent == [16, 8, 8, 16]  # from ranks 2, 1, 0 and 3


def test_window_leaves_steps_out() -> None:
    for rank in range(8):
        found = steps((800,), 8, rank, "contiguous", Mask(100, 0))
        assert [step.source for step in found if step.calls] == [rank, *([rank - 1] * (rank > 0))]
        assert sum(step.num_rows for step in found[1:]) == (100 if rank else 0)


def test_gradients_are_summed_where_two_calls_share_a_key() -> None:
    assert not any(step.sums for step in steps((64,), 4, 1, "zigzag", Mask(None, 0)))
    assert any(step.sums for step in steps((64,), 4, 1, "zigzag", Mask(20, 20)))


def test_bands_beyond_the_rows() -> None:
    assert band_pair(0, (0, 4), 4, (0, 4), Mask(None, 0)) is None
    assert band_pair(8, (0, 4), 0, (0, 4), Mask(4, None)) is None
    pair = band_pair(8, (0, 4), 0, (0, 4), Mask(6, None))
    assert pair is not None and (pair.q, pair.k) == ((0, 2), (2, 4))
    assert (pair.left, pair.right) == (0, None)


def test_orders() -> None:
    with pytest.raises(UnsupportedError, match="order is 'striped'; accepted: 'zigzag', 'conti"):
        shards.check_order("striped")
    with pytest.raises(UnsupportedError, match="order is 'whole'; accepted: 'zigzag', 'contig"):
        shards.check_order("whole")
    with pytest.raises(UnsupportedError, match=r"order is 3; .*'contiguous', 'whole'"):
        shards.check_order(3, shards.ORDERS_OF_MANY)
    assert shards.positions(16, 2, 1, "zigzag") == ((4, 12),)
    assert shards.positions(16, 2, 0, "zigzag") == ((0, 4), (12, 16))
    assert shards.rows((4, 8), 2, 1, "contiguous") == ((2, 4), (8, 12))


def test_whole_sequences_are_sent_nowhere() -> None:
    lengths = (8192,) * 16
    assert [shards.places(lengths, 4, "whole").count(rank) for rank in range(4)] == [4] * 4
    for rank in range(4):
        first, *others = steps(lengths, 4, rank, "whole", Mask(None, 0))
        assert len(first.calls) == 1 and not any(step.calls or step.rows for step in others)
    assert set(shards.places((8192, 40960, 16384, 65536), 4, "whole")) == {"zigzag"}
    assert shards.places((500, 1, 1, 1, 1, 0), 2, "whole") == ("zigzag", 0, 1, 0, 1, 0)
    assert shards.places((0, 0), 2, "whole") == (0, 0)
    assert shards.places((5, 7), 2, "contiguous") == ("contiguous",) * 2


def test_whole_sequences_keep_the_balance() -> None:
    draw = random.Random(7)
    whole = 0
    for _ in range(40):
        n = draw.choice([2, 3, 4, 8])
        lengths = tuple(int(draw.lognormvariate(6, 1)) for _ in range(draw.choice([5, 20, 200])))
        places = shards.places(lengths, n, "whole")
        whole += sum(type(place) is int for place in places)
        shares = [shards.count(shards.rows(lengths, n, rank, "whole")) for rank in range(n)]
        assert sum(shares) == sum(lengths)
        assert max(shares) - min(shares) <= sum(lengths) / n / 16 + 2 * len(lengths)
        scores = [0] * n
        for place, length in zip(places, lengths, strict=True):
            if isinstance(place, int):
                scores[place] += length * length
        assert max(scores) - min(scores) <= sum(x * x for x in lengths) / n / 16
    assert whole > 1000
    many = tuple(draw.randrange(100, 8000) for _ in range(64))
    assert "zigzag" not in shards.places(many, 4, "whole")


def test_masks() -> None:
    assert mask_of(True, (3, None), False) == mask_of("top_left", [3, 5], False) == Mask(3, 0)
    assert mask_of(False, None, True) == Mask(None, None, True)
    for causal in ("left", [True], None):
        with pytest.raises(UnsupportedError, match=f"causal is {re.escape(repr(causal))}; acc"):
            mask_of(causal, None, False)
    assert mask_of(False, (np.int64(3), None), False) == mask_of(False, (3, None), False)
    for window in (5, "ab", (1,), (1, -1), (True, 0)):
        with pytest.raises(UnsupportedError, match=f"window is {re.escape(repr(window))}; acc"):
            mask_of(False, window, False)

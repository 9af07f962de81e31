"""The simulation of turns: what it must find whatever its times are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import turns

CAUSAL = turns.Problem(seqlen=1024, heads=64, head_dim=128, causal=True)
FULL = turns.Problem(seqlen=1024, heads=64, head_dim=128, causal=False)


@pytest.mark.parametrize("problem", [CAUSAL, FULL])
def test_turns_that_take_no_time_wait_for_the_order_alone(problem: turns.Problem) -> None:
    assert turns.microseconds(problem, 0.0) >= turns.microseconds(problem)
    assert turns.microseconds(FULL, 0.0) == turns.microseconds(FULL)


def test_the_last_keys_first_is_the_order_for_causality() -> None:
    assert turns.ratio(CAUSAL, 2.5) > 0.8 > turns.ratio(CAUSAL, 2.5, last_first=False)


def test_every_block_has_one_ticket() -> None:
    drawn = turns.tickets(FULL, together=6, last_first=True)
    assert len(set(drawn)) == len(drawn) == 64 * 8

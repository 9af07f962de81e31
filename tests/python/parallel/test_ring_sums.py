"""Sums over the steps of a ring: states of any rows, and gradients, in few passes over memory."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn.integrations.ring import passes, sums  # noqa: E402
from dlattn.integrations.ring.calls import Problem  # noqa: E402
from dlattn.integrations.ring.schedule import Mask  # noqa: E402

ROWS = 12


def problem(packed: bool, layout: Any) -> Problem:
    group: Any = SimpleNamespace(n=1, rank=0)
    return Problem(group, (ROWS,), packed, "zigzag", Mask(None, None), None, 0.0, layout, False)


def state(at: Problem, rows: int, fill: float | None = None) -> tuple[Any, Any]:
    heads, batch = 3, [] if at.packed else [2]
    between = [rows, heads] if at.layout == "bshd" else [heads, rows]
    out = torch.randn(*batch, *between, 8) + 0.25
    lse = torch.randn(*batch, heads, rows) * 3
    if fill is not None:  # rows that saw no key
        out, lse = torch.zeros_like(out), torch.full_like(lse, fill)
    return out, lse


def wanted(at: Problem, parts: list[Any]) -> tuple[Any, Any]:
    out, lse = (x.double() for x in state(at, ROWS))
    weight = torch.zeros_like(lse)
    total = torch.zeros_like(out)
    for (a, b), part, own in parts:
        seen = own.double().exp()
        weight[..., a:b] += seen
        at.rows(total, (a, b)).add_(part.double() * at.by_row(seen))
    out = torch.where(at.by_row(weight) > 0, total / at.by_row(weight), 0.0)
    return out, weight.log()


@pytest.mark.parametrize(("packed", "layout"), [(False, "bshd"), (True, "bhsd"), (True, "bshd")])
@pytest.mark.parametrize("count", [0, 1, 5, 80])
def test_states_of_any_rows(packed: bool, layout: str, count: int) -> None:
    torch.manual_seed(3)
    draw = random.Random(count)
    at = problem(packed, layout)
    q = torch.empty_like(state(at, ROWS)[0])
    states, parts = sums.States(at, q, 8), []
    for i in range(count):
        a, b = sorted(draw.sample(range(ROWS + 1), 2))
        rows = draw.choice([(a, b), (0, ROWS), (4, 5)])
        part = (rows, *state(at, rows[1] - rows[0], -torch.inf if i % 3 == 2 else None))
        states.add(rows, *(x.clone() for x in part[1:]))
        parts.append(part)
    out, lse = states.result()
    want_out, want_lse = wanted(at, parts)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("steps", "merges"), [(1, 0), (4, 1), (7, 2)])
def test_states_are_merged_together(
    steps: int, merges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of every step would read and write the whole each time."""
    counted = []
    merge = dlattn.merge_states
    monkeypatch.setattr(dlattn, "merge_states", lambda *x, **y: counted.append(1) or merge(*x, **y))
    at = problem(False, "bshd")
    first = state(at, ROWS)
    states = sums.States(at, first[0], 8)
    for _ in range(steps):
        states.add((0, ROWS), *state(at, ROWS))
    states.result()
    assert len(counted) == merges


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_some_rows(first: bool, dtype: Any) -> None:
    """Against sums of float32 that are rounded once, in any order of rows."""
    torch.manual_seed(4)
    draw = random.Random(4)
    for count in (0, 1, 2, 3, 6, 6, 6, 6):
        at = problem(False, draw.choice(["bshd", "bhsd"]))
        like = torch.empty_like(state(at, ROWS)[0], dtype=dtype)
        gradient = sums.Gradient(at, like, torch.float32)
        want = torch.zeros_like(like, dtype=torch.float32)
        for i in range(count):
            cuts = sorted(draw.sample(range(ROWS + 1), 4))
            ranges = [(cuts[0], cuts[1]), (cuts[2], cuts[3])][: draw.choice([1, 2])]
            ranges = draw.choice([ranges, ranges, [(0, ROWS)]]) if i or not first else [(0, ROWS)]
            parts = [torch.randn_like(at.rows(like, rows)) + 0.25 for rows in ranges]
            for rows, part in zip(ranges, parts, strict=True):
                at.rows(want, rows).add_(part)
            gradient.add(ranges, torch.cat(parts, at.row_dim))
        assert torch.equal(gradient.result(torch.float32), want)
        assert torch.equal(gradient.result(dtype), want.to(dtype))


def test_rows_of_one_gradient_are_not_summed() -> None:
    at = problem(False, "bshd")
    like = torch.empty(2, ROWS, 3, 8, dtype=torch.bfloat16)
    whole, some = (torch.randn_like(like) for _ in range(2))
    gradient = sums.Gradient(at, like, torch.float32)
    gradient.add([(0, ROWS)], whole)
    assert gradient.result(torch.bfloat16) is whole  # nothing is copied
    want = whole.clone()
    want[:, 3:7] += some[:, 3:7]
    gradient.add([(3, 7)], some[:, 3:7])
    assert gradient._sum is not None and gradient._sum.shape[1] == 4
    assert gradient.result(torch.bfloat16) is whole and torch.equal(whole, want)


def test_a_sink_of_infinity_takes_all() -> None:
    at = problem(False, "bshd")
    out, lse = state(at, ROWS)
    states = sums.States(at, out, 8)
    states.add((0, ROWS), out.clone(), lse.clone())
    passes._add_sinks(at, states, out, torch.tensor([torch.inf, -torch.inf, 0.5]))
    found, total = states.result()
    assert not found[:, :, 0].any() and float(total[:, 0].min()) > 1e38
    torch.testing.assert_close(found[:, :, 1], out[:, :, 1])
    share = (lse[:, 2] - torch.logaddexp(lse[:, 2], torch.tensor(0.5))).exp()
    torch.testing.assert_close(found[:, :, 2], out[:, :, 2] * share[..., None])

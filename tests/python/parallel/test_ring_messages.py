"""The messages of a ring: what they travel beside, and that those of all processes meet."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not available", allow_module_level=True)

from dlattn.integrations.ring import calls, passes, shards  # noqa: E402
from dlattn.integrations.ring.calls import Problem  # noqa: E402
from dlattn.integrations.ring.schedule import Mask  # noqa: E402


class End(NamedTuple):
    """One end of a message: the other process, and what travels."""

    rank: int
    shape: tuple[int, ...]
    dtype: Any


class Batch(NamedTuple):
    """Messages that a process starts together, each kind in its order."""

    sends: list[End]
    receives: list[End]


class Recorder:
    """A process of n that receives zeros.

    Attributes:
        batches: What it started together, as NCCL has it: without tensors that have no elements.
        events: For each batch the number of sends, w where it waits for it, c for a call.
    """

    def __init__(self, n: int, rank: int) -> None:
        self.n, self.rank = n, rank
        self.batches: list[Batch] = []
        self.events = ""

    def start(self, sends: Any, receives: Any) -> Any:
        for _, x in receives:
            x.zero_()
        ends = [
            [End(rank, tuple(x.shape), x.dtype) for rank, x in given if x.numel()]
            for given in (sends, receives)
        ]
        if any(ends):
            self.batches.append(Batch(*ends))
            self.events += str(len(ends[0]))
        return _Sent(self, any(ends))


class _Sent:
    def __init__(self, group: Recorder, waiting: bool) -> None:
        self.group, self.waiting = group, waiting

    def wait(self) -> None:
        self.group.events += "w" * self.waiting
        self.waiting = False


def counted(function: Any, group: Recorder) -> Any:
    def call(*x: Any) -> Any:
        group.events += "c"
        return function(*x)

    return call


def passes_of(
    group: Any, lengths: tuple[int, ...], packed: bool, order: str, mask: Mask
) -> list[Any]:
    """Run both passes of a process; the tensors between them."""
    problem = Problem(group, lengths, packed, order, mask, None, 0.0, "bshd", False)
    rows = shards.count(shards.rows(lengths, group.n, group.rank, order))
    shape = (rows, 2, 8) if packed else (1, rows, 2, 8)
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    out, lse = passes.forward(problem, q, k, v, None, None)
    between = group.events
    group.events = ""
    passes.backward(problem, dout, q, k, v, out, lse, None)
    return [between, group.events]


def test_messages_travel_beside_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Recorder(4, 1)
    monkeypatch.setattr(calls, "forward", counted(calls.forward, group))
    monkeypatch.setattr(calls, "backward", counted(calls.backward, group))
    forward, backward = passes_of(group, (64,), False, "zigzag", Mask(None, 0))
    assert forward == "2cw2cw2cwc"
    # Gradients of the step before go with the keys of the next one, the last ones alone.
    assert backward == "2cw2cw4cw2cw2w"


@pytest.mark.parametrize(
    ("n", "lengths", "order"), [(1, (9,), "zigzag"), (4, (5,) * 8, "whole"), (4, (0,), "zigzag")]
)
def test_nothing_is_sent(n: int, lengths: tuple[int, ...], order: str) -> None:
    assert passes_of(Recorder(n, 0), lengths, True, order, Mask(None, 0)) == ["", ""]


def never_met(processes: list[list[Batch]]) -> list[int]:
    """For each process the batches that do not end, as a batch begins when those before it ended.

    Ends of messages between two processes meet in the order in which each has them.
    """
    n = len(processes)
    at = [0] * n  # the batch that each process waits for
    while True:
        begun = [batches[: at[r] + 1] for r, batches in enumerate(processes)]
        sent = Counter((r, e.rank) for r in range(n) for b in begun[r] for e in b.sends)
        awaited = Counter((e.rank, r) for r in range(n) for b in begun[r] for e in b.receives)
        met = {pair: min(sent[pair], awaited[pair]) for pair in {*sent, *awaited}}
        moved = False
        for r, batches in enumerate(processes):
            if at[r] < len(batches):
                sends = Counter((r, e.rank) for b in begun[r] for e in b.sends)
                receives = Counter((e.rank, r) for b in begun[r] for e in b.receives)
                if all(met[pair] == count for pair, count in (sends | receives).items()):
                    at[r] += 1
                    moved = True
        if not moved:
            return [len(batches) - x for batches, x in zip(processes, at, strict=True)]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("lengths", "packed", "order", "mask"),
    [
        ((61,), False, "zigzag", Mask(None, 0)),
        ((40,), False, "zigzag", Mask()),
        ((43,), False, "contiguous", Mask(None, 0)),
        ((43,), False, "contiguous", Mask(12, 0)),
        ((3,), False, "zigzag", Mask(None, 0)),
        ((33, 7, 2, 0, 30), True, "zigzag", Mask(9, 20)),
        ((33, *(7,) * 8, 0, 30), True, "whole", Mask(None, 0)),
    ],
)
def test_messages_of_all_processes_meet(
    n: int, lengths: tuple[int, ...], packed: bool, order: str, mask: Mask
) -> None:
    """As NCCL has them: one batch after the other, whose messages have the order of their start."""
    groups = [Recorder(n, rank) for rank in range(n)]
    for group in groups:
        passes_of(group, lengths, packed, order, mask)
    assert never_met([group.batches for group in groups]) == [0] * n
    for a in groups:
        for b in groups:
            sent = [e[1:] for batch in a.batches for e in batch.sends if e.rank == b.rank]
            received = [e[1:] for batch in b.batches for e in batch.receives if e.rank == a.rank]
            assert sent == received


def test_batches_that_do_not_meet_are_found() -> None:
    x = ((1,), torch.float32)
    give, take = (
        (lambda rank: Batch([End(rank, *x)], [])),
        (lambda rank: Batch([], [End(rank, *x)])),
    )
    assert never_met([[give(1), take(1)], [take(0), give(0)]]) == [0, 0]
    assert never_met([[give(1), take(1)], [give(0), take(0)]]) == [2, 2]

"""The order of a ring's messages and calls: each message has a step's calls to travel beside."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not available", allow_module_level=True)

from dlattn.integrations.ring import calls, passes  # noqa: E402
from dlattn.integrations.ring.calls import Problem  # noqa: E402
from dlattn.integrations.ring.schedule import Mask  # noqa: E402


class Recorder:
    """One of four processes: how many tensors it sends together, and w where it waits for them."""

    n, rank = 4, 1

    def __init__(self) -> None:
        self.events = ""

    def start(self, sends: Any, receives: Any) -> Any:
        for _, x in receives:
            x.zero_()
        assert len(sends) == len(receives)
        if sends:
            self.events += str(len(sends))
        return _Sent(self, bool(sends))


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


def test_messages_beside_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Recorder()
    mask = Mask(None, 0)
    problem = Problem(group, (64,), False, "zigzag", mask, None, 0.0, "bshd", False)
    q, k, v, dout = (torch.randn(1, 16, 2, 8) for _ in range(4))
    monkeypatch.setattr(calls, "forward", counted(calls.forward, group))
    monkeypatch.setattr(calls, "backward", counted(calls.backward, group))
    out, lse = passes.forward(problem, q, k, v, None, None)
    # Keys of two steps are under way, as on a GPU the second message may start a step late.
    assert group.events == "4cw2ccwc"
    group.events = ""
    passes.backward(problem, dout, q, k, v, out, lse, None)
    # Gradients and the keys of the step after the next go together, as one message.
    assert group.events == "2cw2cw4cw2cw2w"

"""Streams on which a ring's calls of attention run in turns.

The last blocks of a call leave much of a GPU idle: 2,048 blocks on 132 SMs are 15.5 rounds. Blocks
of the next call take these SMs where it need not wait for the end of the one before, so calls that
follow each other are enqueued on two streams. All else stays on the caller's stream:

- a call begins after what that stream had been given when the call was enqueued;
- that stream waits for a call before its results are used; what the call reads is kept until then;
- at the end each stream waits for the others, so that memory which the allocator keeps for one of
  them is given out again after its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

_T = TypeVar("_T")


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(2))


class Running(Generic[_T]):
    """A call that was enqueued. It keeps what the call reads."""

    def __init__(
        self, result: _T, reads: Any = None, wait: Callable[[], None] | None = None
    ) -> None:
        self._result = result
        self._reads = reads
        self._wait = wait

    def result(self) -> _T:
        """Return what the call did; the caller's stream waits for it."""
        if self._wait is not None:
            self._wait()
        return self._result


class Lanes:
    """A context in which `run` enqueues calls; when it is left, the caller's stream waits for all.

    Without `several`, or on a CPU, they are on the current stream.
    """

    def __init__(self, tensor: torch.Tensor, several: bool) -> None:
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        self._next = 0
        if tensor.is_cuda and several:
            self._home = torch.cuda.current_stream(tensor.device)
            self._streams = _streams(tensor.device)

    def run(self, function: Callable[[], _T], reads: Any) -> Running[_T]:
        if not self._streams:
            return Running(function())
        stream = self._streams[self._next]
        self._next = (self._next + 1) % len(self._streams)
        stream.wait_stream(self._home)
        with torch.cuda.stream(stream):
            result = function()
        event = stream.record_event()
        return Running(result, reads, lambda: self._home.wait_event(event))

    def kept(self, *tensors: torch.Tensor) -> None:
        """Say that these outlive the context: they may lie in memory of the calls' streams."""
        if self._streams:
            for x in tensors:
                x.record_stream(self._home)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            self._home.wait_stream(stream)
        if self._streams and not torch.cuda.is_current_stream_capturing():
            for stream in self._streams:  # in a capture they would be left behind
                stream.wait_stream(self._home)

"""The messages of processes: rows of keys, gradients, and once a call its description.

Messages between two processes are matched by their order, which is the same on both sides. NCCL's
groups run on a stream of their own, which waits by events for what the current stream had been
given when a message was started, and for which the current stream waits in `Messages.wait`: what is
enqueued in between overlaps with the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import type_text

# Clocks for which a GPU does nothing, some 10 microseconds, so that messages come before what is
# enqueued behind their start. Both wait for the same kernels to end. A kernel of attention that
# begins first takes all SMs, so that messages would wait until its last blocks run.
_HEAD_START = 16384


class Group:
    """A process group, as this process sees it."""

    def __init__(self, group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "group: torch.distributed is not initialised; accepted: a process group, or None "
                "for all processes, after torch.distributed.init_process_group()"
            )
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise TypeError(
                f"group is of type {type_text(type(group))}; accepted: a "
                "torch.distributed.ProcessGroup that this process belongs to, or None for all "
                "processes"
            )
        self.group: Any = found
        self.n = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)

    def check_device(self, name: str, x: Any) -> None:
        """Raise UnsupportedError for a tensor on a device that the group has no backend for."""
        kinds = sorted(kind.type for kind in self.group._device_types)
        if isinstance(x, torch.Tensor) and x.device.type not in kinds:
            raise UnsupportedError(
                f"{name} is on {x.device}; accepted: a device that the group has a backend for, "
                f"{' or '.join(kinds)}"
            )

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> Messages:
        """Start to exchange contiguous tensors, each with the rank that it goes to or comes from.

        Both sides leave out tensors without elements.
        """
        operations = [
            dist.P2POp(kind, x, dist.get_global_rank(self.group, rank), self.group)
            for kind, ends in ((dist.isend, sends), (dist.irecv, receives))
            for rank, x in ends
            if x.numel()
        ]
        messages = Messages(operations)
        if operations and operations[0].tensor.is_cuda:
            with torch.cuda.device(operations[0].tensor.device):
                torch.cuda._sleep(_HEAD_START)
        return messages

    def meet(self, device: torch.device) -> None:
        """Let all processes take part in a message between devices of this kind.

        NCCL wants that of a group's first messages, and those of a step may leave processes out.
        """
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def all_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers of every process. The host waits, for a GPU only without a CPU backend."""
        kinds = {kind.type for kind in self.group._device_types}
        own = torch.tensor(numbers, device="cpu" if "cpu" in kinds else device)
        found = [torch.empty_like(own) for _ in range(self.n)]
        dist.all_gather(found, own, group=self.group)
        return [x.tolist() for x in found]


class Messages:
    """Messages on their way. They keep their tensors."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._operations = operations
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Order all that follows behind them: the host waits for a CPU's, a stream for a GPU's."""
        works, self._works = self._works, []
        for work in works:  # none of them twice: one that has failed may not end again
            work.wait()
        self._operations = []

"""That the processes of a group call `ring_attention` for the same: compared before messages are.

A process that refuses its arguments still takes part, so that the others raise with it.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch

from dlattn._errors import UnsupportedError
from dlattn.integrations.ring.arguments import DTYPES
from dlattn.integrations.ring.communication import Group

# The first numbers that every process gives, in their order. Rows may differ.
_NAMES = (
    "rows",
    "batch",
    "num_heads",
    "num_heads_kv",
    "head_dim",
    "head_dim of v",
    "dtype",
    "requires_grad of an input",
)
_SETTINGS = 10  # digests that follow them, of the settings


def description(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: str,
    settings: dict[str, Any],
) -> list[int]:
    row, head = (-3, -2) if layout == "bshd" else (-2, -3)
    trained = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    return [
        q.shape[row],
        q.shape[0] if q.dim() == 4 else 1,
        q.shape[head],
        k.shape[head],
        q.shape[-1],
        v.shape[-1],
        DTYPES.index(q.dtype),
        int(trained and torch.is_grad_enabled()),
        *(zlib.crc32(repr(value).encode()) for value in settings.values()),
    ]


_MET: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose processes have compared a call


def agreed(
    group: Group,
    said: list[int],
    settings: dict[str, Any],
    refused: Exception | None,
    q: Any,
    check: bool,
) -> list[int | None]:
    """The rows of every process, None where they are not known; raises if the calls differ.

    The first call of a group compares in any case, and lets its devices meet.
    """
    if group.n == 1 or (not check and group.group in _MET):
        if refused is not None:
            raise refused
        return [said[0] if rank == group.rank else None for rank in range(group.n)]
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    given = said if refused is None else [0] * (len(_NAMES) + _SETTINGS)
    found = group.all_numbers([int(refused is None), *given], device)
    if refused is not None:
        raise refused
    for rank, (accepted, *theirs) in enumerate(found):
        if not accepted:
            raise UnsupportedError(
                f"process {rank} of the group refused its arguments, with an error of its own; "
                "accepted: arguments that every process accepts"
            )
        names = (*_NAMES, *settings)
        for name, ours, other in list(zip(names, said, theirs, strict=True))[1:]:
            if ours != other:
                here, there = _shown(name, ours), _shown(name, other)
                if name in settings:
                    here, there = _shortened(settings[name]), "another"
                raise UnsupportedError(
                    f"{name} is {here} on this process, {group.rank}, and {there} on process "
                    f"{rank}; accepted: the same on all processes"
                )
    if group.group not in _MET:
        group.meet(device)
        _MET.add(group.group)
    return [numbers[1] for numbers in found]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _shown(name: str, number: int) -> str:
    return str(DTYPES[number]) if name == "dtype" else str(number)

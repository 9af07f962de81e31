"""Decoding: a few queries of each sequence over caches of keys, which memory's bandwidth bounds.

Each case is timed with its keys and values cold and warm. Cold calls read copies in turn that are
`cases.ROTATED` times the L2 cache in all, as the layers of a model do; warm ones read one copy. The
cases and where their lengths come from are in `cases` and `lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlattn.bench import tensors
from dlattn.bench.decode import contestants
from dlattn.bench.decode.caches import Caches, draw
from dlattn.bench.decode.cases import (
    COLD,
    LEAST_CALLS,
    ROTATED,
    SCALES,
    WARM,
    DecodeCase,
    buffers,
    host_cases,
    turn_groups,
)
from dlattn.bench.decode.contestants import PEERS, Peer, ours
from dlattn.bench.features import Context
from dlattn.bench.peers import Contestant, Problem
from dlattn.bench.session import Entrant
from dlattn.console.errors import CommandError

Group = Callable[[], list[Entrant]]

_CPU_CACHE_BYTES = 1 << 16  # a CPU's set is small and says nothing of its caches
_MEMORY_SHARE = 0.8  # of a GPU's memory, that a case may take


@dataclass(frozen=True)
class Study:
    """The set on one device: who takes part, what is timed, and what is left out and why."""

    context: Context
    peers: tuple[Peer, ...]
    left_out: dict[str, str] = field(default_factory=dict)

    def groups(self) -> dict[str, list[Group]]:
        """Every group of entrants that take turns, by the name that `--only` takes."""
        found: dict[str, list[Group]] = {}
        for together in turn_groups(SCALES[self.context.device]):
            members = found.setdefault(together[0].group, [])
            chosen = tuple(case for case in together if self._wants(case))
            if chosen:
                members.append(partial(self._entrants, chosen))
        return found

    def host_entrants(self) -> dict[str, Entrant]:
        """Whose eager calls' host time is to be measured, by the name to tell it by."""
        found = {}
        for case in host_cases(SCALES[self.context.device]):
            inputs = draw(case, self.context.dtype, self.context.device, 1)
            problem = self._problem(Caches(inputs, 1), WARM)
            for contestant in self._contestants(case):
                name = contestant.name
                if case.page_size or case.on_device:
                    name = f"{name}, {case.what}"
                found[name] = Entrant(contestant, problem)
        return found

    def about(self) -> dict[str, Any]:
        """The facts by which the figures have to be read."""
        return {
            "l2_bytes": l2_bytes(self.context.device),
            "rotated": ROTATED,
            "left_out": self.left_out,
        }

    def _wants(self, case: DecodeCase) -> bool:
        context = self.context
        if not context.wants(case.head_dim) or True not in context.masks:
            return False
        needed, there = self._memory(case), _memory_bytes(context.device)
        if needed > _MEMORY_SHARE * there:
            self.left_out[f"{case.label}, {case.what}"] = (
                f"needs {needed / 1e9:.1f} GB; the device has {there / 1e9:.1f}"
            )
            return False
        return True

    def _memory(self, case: DecodeCase) -> int:
        """Bytes of all copies, and of those without pages if a peer reads them."""
        size = case.cache_bytes(self.context.dtype)
        packs = any(peer.packs for peer in self._peers(case))
        return size * buffers(size, l2_bytes(self.context.device)) * (2 if packs else 1)

    def _peers(self, case: DecodeCase) -> list[Peer]:
        """Those that take a case. None of these functions has V in the memory of K."""
        return [peer for peer in self.peers if peer.takes(case) and not case.latent]

    def _contestants(self, case: DecodeCase) -> list[Contestant]:
        theirs = [peer.contestant() for peer in self._peers(case)]
        return [*(ours(own) for own in self.context.ours), *theirs]

    def _entrants(self, together: tuple[DecodeCase, ...]) -> list[Entrant]:
        """Everybody with each case, cold and warm; ours is measured by ours in the first case."""
        device, dtype = self.context.device, self.context.dtype
        entrants: list[Entrant] = []
        first: dict[tuple[str, str], Entrant] = {}
        for case in together:
            size = case.cache_bytes(dtype)
            inputs = draw(case, dtype, device, buffers(size, l2_bytes(device)))
            for temperature, count in ((COLD, len(inputs.pairs)), (WARM, 1)):
                problem = self._problem(Caches(inputs, count), temperature)
                facts = {"bytes": float(size), "buffers": float(count)}
                for contestant in self._contestants(case):
                    key = (contestant.name, temperature)
                    against = first.get(key) if contestant.ours else None
                    entrant = Entrant(contestant, problem, against, case.operations, facts)
                    first.setdefault(key, entrant)
                    entrants.append(entrant)
        return entrants

    def _problem(self, caches: Caches, temperature: str) -> Problem:
        case = caches.inputs.case.as_case(self.context.dtype, temperature)
        return Problem(case, caches.inputs.q, *caches.pairs[0], caches=caches)


def study(context: Context) -> Study:
    """The set with the peers that are installed, or those of them that are asked for."""
    names = contestants.names(context.device)
    for name in context.peers or ():
        if name not in names:
            raise CommandError(f"--peers {name}; accepted here: {', '.join(names)}")
    chosen, left_out = [], {}
    for peer in PEERS[context.device]:
        if context.peers is not None and peer.name not in context.peers:
            continue
        missing = peer.missing()
        if missing:
            left_out[peer.name] = missing
        else:
            chosen.append(peer)
    return Study(context, tuple(chosen), left_out)


def l2_bytes(device: str) -> int:
    """The bytes of the device's L2 cache."""
    if device == "cpu":
        return _CPU_CACHE_BYTES
    return int(tensors.torch_module().cuda.get_device_properties(0).L2_cache_size)


def _memory_bytes(device: str) -> float:
    if device == "cpu":
        return float("inf")
    return float(tensors.torch_module().cuda.get_device_properties(0).total_memory)


def protocol(device: str) -> Mapping[str, Any]:
    """How the times are taken, where that is not how the other sets do it."""
    if device == "cpu":
        method = "wall time of each call, median; cold calls read copies of K and V in turn"
    else:
        method = (
            f"CUDA graph of at least {LEAST_CALLS} calls, events around each replay, median; cold "
            f"calls read copies of K and V in turn, at least {ROTATED} times the L2 cache in all, "
            "warm calls one copy"
        )
    host = SCALES[device].host
    return {
        "method": method,
        "inputs": "normal plus 0.25; K and V (batch, keys, num_heads_kv, head_dim) or in pages",
        "host_shape": [host[0], host[1], host[3], host[4]],
    }

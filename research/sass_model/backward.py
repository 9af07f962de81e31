"""The long loops of the gradients' kernels on Ada, beside those of FlashAttention-2.

Clocks of a multiprocessor full of blocks alone: copies take L2's latency, but what all
multiprocessors together ask of L2, additions to dQ among it, is told as bytes and not as time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sass_model.devices import DEVICES
from sass_model.kernels import cubins
from sass_model.report import table
from sass_model.sass import Flow, Instruction, copied_bytes, count, operations, parse
from sass_model.simulate import Event, simulate

PAIRS = 64 * 64  # of a query and a key, that clocks are told of
GPUS = ("L4", "RTX 4090")  # an L40S is as an L4 in clocks
Path_ = list[Instruction]


@dataclass(frozen=True)
class Tile:
    """A kernel's block: keys, queries of a step, warps, and blocks of an SM of Ada."""

    keys: int
    queries: int
    warps: int
    blocks: int
    # Steps between two that add to dQ, which then add that of all of them.
    dq_steps: int = 1
    sharers: int = 1  # neighbouring warps that have the same keys


# cuda/backward/wmma/traits.h, tests hold that; and flash_bwd_launch_template.h, for 99 KB.
OURS = {64: Tile(128, 32, 4, 2, 2), 128: Tile(128, 32, 8, 1, 2), 256: Tile(64, 32, 8, 1, 1, 2)}
FLASH_ATTENTION_2 = {64: Tile(128, 64, 8, 1), 128: Tile(64, 64, 8, 1), 256: Tile(32, 64, 8, 1)}
_OURS = re.compile(r"_ZN6dlattn13backward_wmma11keys_kernelI6__halfLi(\d+)E\w*")
_FLASH_ATTENTION_2 = re.compile(
    r"_ZN5flash\w+seqk_parallel_kernelI\w+?traitsILi(\d+)E\w+?EELb0ELb0ELb0\w*"
)


# Arrivals at mbarriers and waits for them, by opcode and byte from the first of them; a wait reads
# the upper half. Those of cuda/backward/wmma/warp_keys.cuh, where a stage's byte is in a register,
# and of shared_keys.cuh.
_OWN_KEYS = {
    ("ARRIVES", 0): "fill",
    ("LDS", 4): "wait full",
    ("ATOMS", 8): "release",
    ("LDS", 12): "wait empty",
    ("ATOMS", 32): "write dS",
    ("LDS", 36): "wait for dS",
    ("ATOMS", 40): "read dS",
    ("LDS", 44): "wait for readers",
}
_SHARED_KEYS = {
    ("ARRIVES", 0): "fill",
    ("LDS", 4): "wait full",
    ("ATOMS", 8): "read dO",
    ("LDS", 12): "wait for readers of dO",
    ("ATOMS", 16): "write dS",
    ("LDS", 20): "wait for dS",
    ("ATOMS", 24): "read dS",
    ("LDS", 28): "wait for readers",
}
# Those of the steps that a loop is made of. Of two the first makes dQ. Copies are of the next step,
# and go where those of the step before were.
_Events = dict[str, Event]
_OF_TWO_STEPS: tuple[_Events, ...] = (
    {
        "wait full": Event("full 0", waits=True, passes_before=1),
        "wait for dS": Event("dS written", waits=True, passes_before=1),
        "read dS": Event("dS read"),
        "wait empty": Event("empty 1", waits=True, passes_before=1),
        "fill": Event("full 1", copies=True),
        "wait for readers": Event("dS read", waits=True),
        "release": Event("empty 0"),
    },
    {
        "wait full": Event("full 1", waits=True),
        "wait empty": Event("empty 0", waits=True),
        "fill": Event("full 0", copies=True),
        "write dS": Event("dS written"),
        "release": Event("empty 1"),
    },
)
_OF_ONE_STEP: tuple[_Events, ...] = (
    {
        "wait full": Event("full", waits=True, passes_before=1),
        "wait for readers": Event("dS read", waits=True, passes_before=1),
        "write dS": Event("dS written"),
        "read dO": Event("dO read"),
        "wait for readers of dO": Event("dO read", waits=True),
        "fill": Event("full", copies=True),
        "wait for dS": Event("dS written", waits=True),
        "read dS": Event("dS read"),
    },
)


def _byte(i: Instruction) -> int | None:
    found = re.search(r"(?:\[|\+)0x([0-9a-f]+)\]$", i.operands)
    return int(found[1], 16) if found and not i.never_runs else None


def _events_of(code: Sequence[Instruction], sharers: int) -> dict[int, str]:
    """Arrivals and waits by address, none where there are no mbarriers."""
    known = _OWN_KEYS if sharers == 1 else _SHARED_KEYS
    at = [(i, byte) for i in code if (byte := _byte(i)) is not None]
    first = min((byte for i, byte in at if i.name == "ARRIVES"), default=0)
    kinds = {i.address: known.get((i.name, byte - first)) for i, byte in at}
    return {address: kind for address, kind in kinds.items() if kind} if first else {}


def _stored(block: Sequence[Instruction]) -> int:
    return sum(i.bytes_per_lane for i in block if i.name == "STS")


def steps_of(listing: str, head_dim: int, tile: Tile) -> tuple[Path_, dict[int, Event]]:
    """The code of `tile.dq_steps` steps, of which the first adds to dQ, and what instructions are
    at mbarriers, by their places in it. Raises ValueError if its products are not theirs."""
    instructions = parse(listing)
    at_mbarriers = _events_of(instructions, tile.sharers)
    flow = Flow(instructions)
    loop = flow.main_loop()
    code: Path_ = []
    events: dict[int, Event] = {}
    for step in range(tile.dq_steps):
        expected_events = (_OF_ONE_STEP if tile.dq_steps == 1 else _OF_TWO_STEPS)[step]
        adds = 1 if step == 0 else -1

        def score(
            block: list[Instruction], own: _Events = expected_events, adds: int = adds
        ) -> tuple[int, ...]:
            """All copies and stores, additions to dQ or none, the step's own business at mbarriers
            and no other, and the least of everything else."""
            kinds = [at_mbarriers[i.address] for i in block if i.address in at_mbarriers]
            right = sum(1 if kind in own else -1 for kind in kinds)
            reds = adds * count(block, "RED")
            return (copied_bytes(block), _stored(block), reds, right, -len(block))

        blocks = flow.path([loop.header], loop.latches, set(loop.blocks), score)
        path = flow.instructions(blocks)
        if step > 0:  # a barrier under a condition is that of steps which add to dQ
            path = [i for i in path if i.name != "BAR" or not i.predicate]
        for place, i in enumerate(path, len(code)):
            if event := expected_events.get(at_mbarriers.get(i.address, "")):
                events[place] = event
        code += path
    expected = tile.dq_steps * 10 * head_dim * tile.keys * tile.queries // tile.warps
    if operations(code) != expected:
        raise ValueError(f"{operations(code)} operations, the tile at {head_dim} takes {expected}")
    return code, events


def _loops(
    binaries: Sequence[Path], symbols: re.Pattern[str], tiles: dict[int, Tile]
) -> Iterator[tuple[int, Tile, Path_, dict[int, Event]]]:
    done = set()
    for binary in binaries:
        for symbol, listing in cubins.listings(binary):
            found = symbols.fullmatch(symbol)
            if found and (head_dim := int(found[1])) not in done:
                done.add(head_dim)
                yield head_dim, tiles[head_dim], *steps_of(listing, head_dim, tiles[head_dim])


def l2_bytes(head_dim: int, tile: Tile) -> float:
    """The bytes that 64 x 64 pairs read of Q and dO and add to dQ."""
    return PAIRS / tile.keys * head_dim * (2 + 2 + 4)


def document(ours: Sequence[Path], peers: Sequence[Path], about: dict[str, Any]) -> dict[str, Any]:
    """The loops of both, from cubins."""
    found = []
    for name, binaries, symbols, tiles in (
        ("wmma", ours, _OURS, OURS),
        ("FlashAttention-2", peers, _FLASH_ATTENTION_2, FLASH_ATTENTION_2),
    ):
        for head_dim, tile, code, events in _loops(binaries, symbols, tiles):
            pairs = tile.keys * tile.queries * tile.dq_steps * tile.blocks
            entry: dict[str, Any] = {
                "kernel": name,
                "head_dim": head_dim,
                "tile": asdict(tile),
                "instructions": round(len(code) / tile.dq_steps),
                "ldmatrix_per_product": round(count(code, "LDSM") / count(code, "HMMA"), 2),
                "l2_bytes": round(l2_bytes(head_dim, tile)),
                "clocks": {},
            }
            for gpu in GPUS:
                runs = [
                    simulate(
                        code,
                        DEVICES[gpu],
                        tile.blocks,
                        tile.warps,
                        meeting=tile.sharers if events else tile.warps,
                        take_turns=turns,
                        mbarriers=False,
                        events=events,
                    )
                    for turns in (False, True)
                ]
                entry["clocks"][gpu] = [
                    {
                        "pairs": round(run.clocks_per_pass * PAIRS / pairs),
                        "tensor": round(run.busy["tensor"], 3),
                    }
                    for run in runs
                ]
            found.append(entry)
    return {**about, "method": __doc__, "loops": sorted(found, key=lambda x: x["head_dim"])}


def loops_table(made: dict[str, Any]) -> str:
    """Clocks of 64 x 64 pairs and the tensor cores' share, FlashAttention-2's by ours."""
    by_name = {(x["kernel"], x["head_dim"]): x for x in made["loops"]}
    rows = []
    for (kernel, head_dim), loop in by_name.items():
        tile = loop["tile"]
        row = [
            f"{head_dim} {kernel}",
            f"{tile['keys']} x {tile['queries']}",
            f"{tile['warps']} x {tile['blocks']}",
            f"{loop['l2_bytes'] // 1024} KB",
        ]
        for gpu in GPUS:
            first, turns = loop["clocks"][gpu]
            row.append(f"{first['pairs']} ({turns['pairs']})")
            row.append(f"{100 * first['tensor']:.0f}% ({100 * turns['tensor']:.0f}%)")
            peer = by_name["FlashAttention-2", head_dim]["clocks"][gpu]
            ratios = [p["pairs"] / x["pairs"] for p, x in zip(peer, (first, turns), strict=True)]
            row.append("" if kernel != "wmma" else f"{ratios[0]:.2f} ({ratios[1]:.2f})")
        rows.append(row)
    headers = ["kernel", "keys x queries", "warps x blocks of an SM", "L2"]
    for gpu in GPUS:
        headers += [f"{gpu}: clocks", "tensor", "ratio"]
    return table(headers, rows)

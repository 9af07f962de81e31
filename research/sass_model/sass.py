"""Reads SASS: instructions with their control words, the loops, and the path that a warp takes.

The control word of an instruction (bits 105 to 125 of its 128) is the compiler's schedule: how many
clocks until the warp may issue its next instruction, which of its six scoreboards the instruction
waits for, and which ones it releases when its operands are read or its result is written. It is not
documented by NVIDIA; Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking" (arXiv:1804.06826), section 2.1, gives the layout, which has not changed since.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

_FIRST = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?PT?\d?)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
    r"\s*/\* 0x([0-9a-f]{16}) \*/"
)
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
_NONE = 7  # the scoreboard number that stands for none

WARP_LANES = 32
_PRODUCTS = frozenset({"HMMA", "IMMA", "QMMA"})  # of 16 bits, of integers, of 8-bit floats
_SHAPE = re.compile(r"\.168(8|16|32)\b")  # m16n8 by that many columns


@dataclass(frozen=True)
class Instruction:
    """One instruction and its control word."""

    address: int
    predicate: str  # "@P0", "@!PT", ... or ""
    opcode: str  # with its modifiers: "HMMA.16816.F32"
    operands: str
    stall: int  # clocks until the warp may issue its next instruction
    write_scoreboard: int | None  # released when the result is written
    read_scoreboard: int | None  # released when the operands are read
    waits: tuple[int, ...]  # scoreboards that must be free

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def never_runs(self) -> bool:
        """Whether the predicate is constant false: it takes an issue slot only."""
        return self.predicate == "@!PT"

    @property
    def target(self) -> int | None:
        """The address that a branch goes to. ptxas also jumps by calls that never return."""
        jumps = self.name == "BRA" or self.opcode == "CALL.REL.NOINC"
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands) if jumps else None
        return int(found[1], 16) if found else None

    @property
    def ends_block(self) -> bool:
        """Whether control may go elsewhere than to the next instruction."""
        return self.target is not None or self.name in ("EXIT", "RET")

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        return not self.ends_block or bool(self.predicate) or "," in self.operands

    @cached_property
    def operations(self) -> int:
        """The operations of a matrix product, a multiplication and an addition counted as two; else
        0."""
        shape = _SHAPE.search(self.opcode) if self.name in _PRODUCTS else None
        return 2 * 16 * 8 * int(shape[1]) if shape else 0

    @property
    def float16_sums(self) -> bool:
        """Whether the accumulators of a matrix product are in float16."""
        return self.opcode.split(".")[2:3] == ["F16"]

    @property
    def results(self) -> tuple[int, ...]:
        """The registers that a matrix product writes."""
        return self.registers[: self._result_width] if self.operations else ()

    @property
    def _result_width(self) -> int:
        return 2 if self.float16_sums else 4

    @cached_property
    def registers(self) -> tuple[int, ...]:
        """The registers that it reads or writes; wide operands of matrix products in full."""
        found = [int(number) for number in _REGISTER.findall(self.operands)]
        if not self.operations:
            return tuple(found)
        # D, A, B, C of m16n8k16 in 16 bits, of m16n8k32 in 8.
        widths = (self._result_width, 4, 2, self._result_width)
        return tuple(
            first + i for first, width in zip(found, widths, strict=False) for i in range(width)
        )

    @property
    def bytes_per_lane(self) -> int:
        """The bytes that a lane moves in an access to shared or global memory."""
        if self.name == "LDSM":
            matrices = re.search(r"\.([124])$", self.opcode)
            return 4 * int(matrices[1]) if matrices else 4
        width = re.search(r"\.(128|64|U8|U16|S8|S16)\b", self.opcode)
        return {"128": 16, "64": 8, "U16": 2, "S16": 2}.get(width[1], 1) if width else 4


def parse(listing: str) -> list[Instruction]:
    """The instructions of one kernel, from the text of `cuobjdump -sass`."""
    instructions = []
    lines = listing.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        first = _FIRST.match(line)
        if not first:
            continue
        second = _SECOND.match(after)
        if not second:
            raise ValueError(f"no second half of the encoding after: {line.strip()}")
        control = int(second[1], 16) >> 41
        write, read, mask = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
        instructions.append(
            Instruction(
                address=int(first[1], 16),
                predicate=first[2] or "",
                opcode=first[3],
                operands=first[4],
                stall=max(1, control & 15),
                write_scoreboard=None if write == _NONE else write,
                read_scoreboard=None if read == _NONE else read,
                waits=tuple(i for i in range(6) if mask >> i & 1),
            )
        )
    return instructions


@dataclass
class Block:
    """A basic block."""

    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header, the blocks that close it, and all of its blocks."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


def count(instructions: Iterable[Instruction], name: str) -> int:
    """How many instructions of a name."""
    return sum(i.name == name for i in instructions)


def operations(instructions: Iterable[Instruction]) -> int:
    """Those of the matrix products."""
    return sum(i.operations for i in instructions)


def copied_bytes(instructions: Iterable[Instruction]) -> int:
    """Bytes that a warp copies from global to shared memory."""
    return sum(i.bytes_per_lane * WARP_LANES for i in instructions if i.name == "LDGSTS")


def handovers(instructions: list[Instruction]) -> dict[int, str]:
    """The use of mbarriers by each instruction, by address (stages.cuh of wmma).

    "fill": the warp's copies count as landed when they have, or it has stored what it brings itself
    and says so; "release": it has read a stage;
    "full", "empty": it waits until all warps have filled, released one. A stage has two of 8
    bytes, "full" first, at a multiple of 16.
    """
    asked_again = {i.target for i in instructions}
    found = {}
    for i in instructions:
        offset = re.search(r"\+(?:URZ\+)?0x([0-9a-f]+)\]", i.operands)
        kind = ("full", "empty")[int(offset[1], 16) // 8 % 2] if offset else "full"
        if i.opcode.startswith("ARRIVES.LDGSTSBAR"):
            found[i.address] = "fill"
        elif i.opcode.startswith(("ATOMS.ARRIVE", "SYNCS.ARRIVE")):
            found[i.address] = "fill" if offset and kind == "full" else "release"
        elif i.opcode.startswith("SYNCS.PHASECHK") and i.address not in asked_again:
            found[i.address] = kind  # it sleeps; what asks again is seldom needed
        elif i.name == "LDS" and not i.never_runs and i.address in asked_again:
            found[i.address] = kind
    return found


Score = Callable[[list[Instruction]], tuple[int, ...]]


def long_path(block: list[Instruction]) -> tuple[int, ...]:
    """All products and copies, and the most of everything else: an upper estimate."""
    return (operations(block), copied_bytes(block), len(block))


def short_path(block: list[Instruction]) -> tuple[int, ...]:
    """All products and copies, and the least of everything else."""
    return (operations(block), copied_bytes(block), -len(block))


def whole_path(block: list[Instruction]) -> tuple[int, ...]:
    """All products, copies and what hands these over, and the least of everything else."""
    return (operations(block), copied_bytes(block), len(handovers(block)), -len(block))


def common_path(block: list[Instruction]) -> tuple[int, ...]:
    """All copies and what hands them over, and the least of everything else: without products that
    are made again."""
    return (copied_bytes(block), len(handovers(block)), -len(block))


def stored_bytes(instructions: Iterable[Instruction]) -> int:
    """Bytes that a lane stores to global memory."""
    return sum(i.bytes_per_lane for i in instructions if i.name == "STG")


def stores_path(block: list[Instruction]) -> tuple[int, ...]:
    """All stores, in as few instructions as possible."""
    return (stored_bytes(block), -count(block, "STG"), -len(block))


class Flow:
    """The control flow of a kernel."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.blocks = _basic_blocks(instructions)
        self._order: list[int] = []  # reverse postorder
        self.back_edges: set[tuple[int, int]] = set()
        self._walk()
        self.loops = self._natural_loops()

    def _walk(self) -> None:
        state: dict[int, int] = {0: 1}  # 1: on the way, 2: done
        stack = [(0, iter(self.blocks[0].successors))]
        while stack:
            block, successors = stack[-1]
            for successor in successors:
                if state.get(successor) == 1:
                    self.back_edges.add((block, successor))
                elif successor not in state:
                    state[successor] = 1
                    stack.append((successor, iter(self.blocks[successor].successors)))
                    break
            else:
                state[block] = 2
                self._order.append(block)
                stack.pop()
        self._order.reverse()

    def _natural_loops(self) -> list[Loop]:
        predecessors: dict[int, list[int]] = {}
        for block in self._order:
            for successor in self.blocks[block].successors:
                predecessors.setdefault(successor, []).append(block)
        latches: dict[int, set[int]] = {}
        for latch, header in self.back_edges:
            latches.setdefault(header, set()).add(latch)
        loops = []
        for header, closing in sorted(latches.items()):
            members, todo = {header}, list(closing)
            while todo:
                block = todo.pop()
                if block not in members:
                    members.add(block)
                    todo += predecessors.get(block, [])
            loops.append(Loop(header, frozenset(closing), frozenset(members)))
        return loops

    def instructions(self, blocks: Iterable[int]) -> list[Instruction]:
        """The instructions of blocks, in the order given."""
        return [i for block in blocks for i in self.blocks[block].instructions]

    def main_loop(self) -> Loop:
        """The long loop: of the loops with products and no such loop inside, the one with most."""
        with_products = [loop for loop in self.loops if operations(self.instructions(loop.blocks))]
        innermost = [
            loop
            for loop in with_products
            if not any(other.blocks < loop.blocks for other in with_products)
        ]
        if not innermost:
            raise ValueError("no loop has a tensor core instruction in it")
        return max(innermost, key=lambda x: operations(self.instructions(x.blocks)))

    def enclosing(self, loop: Loop) -> Loop | None:
        """The smallest loop around another one."""
        around = [other for other in self.loops if loop.blocks < other.blocks]
        return min(around, key=lambda other: len(other.blocks), default=None)

    def path(
        self, starts: Iterable[int], ends: Iterable[int], within: set[int], score: Score
    ) -> list[int]:
        """The blocks of the best path from a start to an end, no block twice; empty if none."""
        best: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        starting = set(starts)
        for block in self._order:
            if block not in within:
                continue
            own = score(self.blocks[block].instructions)
            ways = [
                best[before]
                for before in best
                if block in self.blocks[before].successors
                and (before, block) not in self.back_edges
            ]
            if block in starting:
                best[block] = (own, [block])
            if ways:
                value, way = max(ways, key=lambda w: w[0])
                total = tuple(a + b for a, b in zip(value, own, strict=True))
                if block not in best or total > best[block][0]:
                    best[block] = (total, [*way, block])
        found = [best[end] for end in ends if end in best]
        return max(found, key=lambda w: w[0])[1] if found else []


def _basic_blocks(instructions: list[Instruction]) -> list[Block]:
    starts = {instructions[0].address}
    for i, after in pairwise(instructions):
        if i.ends_block:
            starts.add(after.address)
            if i.target is not None:
                starts.add(i.target)
    blocks: list[Block] = []
    number: dict[int, int] = {}
    for i in instructions:
        if i.address in starts:
            number[i.address] = len(blocks)
            blocks.append(Block([]))
        blocks[-1].instructions.append(i)
    for index, block in enumerate(blocks):
        last = block.instructions[-1]
        if last.falls_through and index + 1 < len(blocks):
            block.successors.append(index + 1)
        if last.target is not None and last.target in number:
            block.successors.append(number[last.target])
    return blocks


@dataclass(frozen=True)
class Paths:
    """The instructions that a warp of a kernel executes, in pieces.

    The long loop takes its common path: every copy, and otherwise as few instructions as possible,
    which leaves out the code for rows that outgrow their references, products among it. An
    edge tile takes the longest path there is: mask, maxima and rescaling.
    """

    prologue: list[Instruction]
    edge: list[Instruction]
    main: list[Instruction]
    epilogue: list[Instruction]
    epilogue_loop: list[Instruction]  # of the stores; the epilogue has one pass of it

    def counts(self) -> dict[str, int]:
        """Instructions of the long loop, by name."""
        return dict(Counter(i.name for i in self.main).most_common())


def find_paths(instructions: list[Instruction], of_loop: Score = common_path) -> Paths:
    """The pieces of a wmma kernel. Raises ValueError where there is no long loop.

    Args:
        instructions: The kernel's.
        of_loop: Which of the long loop's paths is taken: the one with the highest score.
    """
    flow = Flow(instructions)
    main = flow.main_loop()
    outer = flow.enclosing(main)
    everything = set(range(len(flow.blocks)))
    main_path = flow.path([main.header], main.latches, set(main.blocks), of_loop)
    around = outer or main  # where there is one loop alone, edge tiles go through it too
    edge_blocks = around.blocks - main.blocks if outer else main.blocks
    edge_path = flow.path([around.header], around.latches, set(edge_blocks), long_path)
    before = everything - around.blocks
    entries = [b for b in before if around.header in flow.blocks[b].successors]
    prologue = flow.path([0], entries, before, short_path)
    exits = {s for b in around.blocks for s in flow.blocks[b].successors} - around.blocks
    ends = [b for b in before if flow.blocks[b].instructions[-1].name == "EXIT"]
    epilogue = flow.path(exits, ends, before, stores_path)
    store_loops = [x for x in flow.loops if x.blocks <= before and x.blocks & set(epilogue)]
    store_blocks = [b for b in epilogue if any(b in x.blocks for x in store_loops)]
    return Paths(
        *(flow.instructions(p) for p in (prologue, edge_path, main_path, epilogue, store_blocks))
    )

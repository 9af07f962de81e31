"""A multiprocessor's warps, run through a piece of code clock by clock.

Each of the four schedulers issues at most one instruction a clock, from a warp whose stall count
has run out, whose scoreboards are free and whose pipe takes another one; a warp that can go on goes
on, else the oldest ready one does (or they take turns, to see what that choice amounts to). So
whether one warp's softmax hides behind another's products is not assumed but comes out. The warps
of a block meet at its barriers, or hand over tiles by mbarriers; shared memory's port
is common to the four schedulers.

Matrix products have no scoreboard; the code counts on the shortest latency of its architecture.
Registers that they write are therefore tracked here, as the hardware of the slower GPUs must.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sass_model.devices import BARRIER_LATENCY, FENCE_STALL, SUB_PARTITIONS, Device, use_of
from sass_model.sass import Instruction, handovers

PIPES = ("tensor", "mufu", "fma", "alu", "uniform", "memory")
_NEVER = float("inf")


@dataclass(frozen=True)
class Event:
    """An arrival of a warp at one of several mbarriers of its block, or a wait for all warps'."""

    name: str
    waits: bool = False
    passes_before: int = 0  # of a wait: how many passes ago warps arrived
    copies: bool = False  # of an arrival: it counts once the warp's copies have landed


@dataclass(frozen=True)
class Step:
    """An instruction with its needs looked up."""

    pipe: int  # index into PIPES, or -1
    clocks: float
    latency: float
    stall: int
    write_scoreboard: int | None
    read_scoreboard: int | None
    waits: tuple[int, ...]
    reads: tuple[int, ...]  # registers that a product may be about to write
    writes: tuple[int, ...]  # of a product
    kind: str  # "", "BAR", "DEPBAR", "LDGDEPBAR", "LDGSTS", or one of handovers()
    outstanding: int = 0  # copies that a DEPBAR lets be
    event: Event | None = None


def prepare(
    code: list[Instruction],
    device: Device,
    mbarriers: bool = True,
    events: Mapping[int, Event] | None = None,
) -> list[Step]:
    """Looks up what each instruction needs on a device.

    `mbarriers`: whether the code has those of handovers(). `events`: what instructions are at
    others, by their place in the code.
    """
    tracked = {r for i in code for r in i.results}
    on_mbarriers = handovers(code) if mbarriers else {}
    steps = []
    for place, i in enumerate(code):
        use = use_of(i, device)
        special = i.name in ("BAR", "DEPBAR", "LDGDEPBAR", "LDGSTS") and not i.never_runs
        outstanding = int(i.operands.rsplit(",", 1)[-1], 16) if i.name == "DEPBAR" else 0
        steps.append(
            Step(
                pipe=PIPES.index(use.pipe) if use.pipe else -1,
                clocks=use.clocks,
                latency=use.latency,
                stall=max(i.stall, round(FENCE_STALL)) if i.name == "MEMBAR" else i.stall,
                write_scoreboard=i.write_scoreboard,
                read_scoreboard=i.read_scoreboard,
                waits=i.waits,
                reads=tuple(tracked.intersection(i.registers)),
                writes=i.results,
                kind=on_mbarriers.get(i.address, i.name if special else ""),
                outstanding=outstanding,
                event=events.get(place) if events else None,
            )
        )
    return steps


@dataclass(eq=False)
class _Warp:
    block: int
    group: int  # of the block's warps that meet at a barrier
    next_step: int = 0
    ready: float = 0.0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)
    registers: dict[int, float] = field(default_factory=dict)
    copies: float = 0.0  # when those since the last commit have landed
    groups: list[float] = field(default_factory=list)  # when committed copies have landed
    arrived: bool = False  # at a barrier, and waiting
    issued: int = 0
    # When, pass by pass, its copies of the next tile had landed, and it had released this one.
    fills: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)
    arrivals: dict[str, list[float]] = field(default_factory=dict)  # the same at others


@dataclass(frozen=True)
class Run:
    """The result of a simulation."""

    clocks_per_pass: float  # of one block; `blocks` of them run side by side
    busy: dict[str, float]  # share of the clocks that a pipe, or "issue", is in use


class _Multiprocessor:
    def __init__(
        self,
        steps: list[Step],
        device: Device,
        blocks: int,
        warps: int,
        meeting: int,
        take_turns: bool = False,
    ) -> None:
        self.steps = steps
        self.meeting = meeting
        self.take_turns = take_turns
        self.device = device
        self.warps = [_Warp(b, w // meeting) for b in range(blocks) for w in range(warps)]
        self.block_of = [self.warps[b * warps : (b + 1) * warps] for b in range(blocks)]
        self.of_scheduler: list[list[_Warp]] = [[] for _ in range(SUB_PARTITIONS)]
        for index, warp in enumerate(self.warps):
            self.of_scheduler[index % SUB_PARTITIONS].append(warp)
        self.free = [[0.0] * len(PIPES) for _ in range(SUB_PARTITIONS)]
        self.memory_free = 0.0
        self.l2_free = 0.0
        self.last: list[_Warp | None] = [None] * SUB_PARTITIONS  # that a scheduler issued from
        self.wake = [0.0] * SUB_PARTITIONS  # when each scheduler looks again
        self.barrier: dict[tuple[int, int], list[_Warp]] = {}

    def earliest(self, scheduler: int, warp: _Warp) -> float:
        """When a warp may issue its next instruction."""
        if warp.arrived:
            return _NEVER
        step = self.steps[warp.next_step]
        t = warp.ready
        for scoreboard in step.waits:
            t = max(t, warp.scoreboards[scoreboard])
        for register in step.reads:
            t = max(t, warp.registers.get(register, 0.0))
        if step.kind == "DEPBAR" and len(warp.groups) > step.outstanding:
            t = max(t, *warp.groups[: len(warp.groups) - step.outstanding])
        if step.kind in ("full", "empty"):
            t = max(t, self._handed_over(step.kind, warp))
        if step.event and step.event.waits:
            t = max(t, self._arrived(step.event, warp))
        if step.pipe >= 0:
            memory = PIPES[step.pipe] == "memory"
            t = max(t, self.memory_free if memory else self.free[scheduler][step.pipe])
        return t

    def _handed_over(self, kind: str, warp: _Warp) -> float:
        """When the tile of a warp's pass is full, or the stage of the one before empty."""
        before = warp.issued // len(self.steps) - 1
        if before < 0:
            return 0.0
        done = [w.fills if kind == "full" else w.releases for w in self.block_of[warp.block]]
        return max(times[before] if before < len(times) else _NEVER for times in done)

    def _arrived(self, event: Event, warp: _Warp) -> float:
        """When all warps of the block have arrived in the pass that a wait is for."""
        made = warp.issued // len(self.steps) - event.passes_before
        if made < 0:
            return 0.0
        done = [w.arrivals.get(event.name, []) for w in self.block_of[warp.block]]
        return max(times[made] if made < len(times) else _NEVER for times in done)

    def issue(self, scheduler: int, warp: _Warp, t: float) -> None:
        """Issues a warp's next instruction at a time."""
        step = self.steps[warp.next_step]
        warp.ready = t + step.stall
        done = t + step.latency
        if step.pipe >= 0:
            if PIPES[step.pipe] == "memory":
                self.memory_free = t + step.clocks
            else:
                self.free[scheduler][step.pipe] = t + step.clocks
        if step.kind == "LDGSTS":
            size = step.clocks * 128
            self.l2_free = max(self.l2_free, t) + size / self.device.l2_bytes_per_clock
            warp.copies = max(warp.copies, self.l2_free + step.latency)
            done = t + 20.0  # its operands are read long before the data arrive
        elif step.kind == "LDGDEPBAR":
            warp.groups.append(warp.copies)
        elif step.kind == "DEPBAR":
            del warp.groups[: max(0, len(warp.groups) - step.outstanding)]
        elif step.kind == "BAR":
            self._arrive(warp, t)
        elif step.kind in ("fill", "release"):
            if step.kind == "fill":
                warp.fills.append(max(warp.copies, done))
            else:
                warp.releases.append(done)
            self.wake = [min(at, done) for at in self.wake]
        if step.event and not step.event.waits:
            at = max(warp.copies, done) if step.event.copies else done
            warp.arrivals.setdefault(step.event.name, []).append(at)
            self.wake = [min(other, at) for other in self.wake]
        if step.write_scoreboard is not None and step.kind != "LDGDEPBAR":
            at = warp.scoreboards[step.write_scoreboard]
            warp.scoreboards[step.write_scoreboard] = max(at, done)
        if step.read_scoreboard is not None:
            at = warp.scoreboards[step.read_scoreboard]
            warp.scoreboards[step.read_scoreboard] = max(at, min(done, t + 20.0))
        for register in step.writes:
            warp.registers[register] = done
        warp.issued += 1
        warp.next_step = warp.issued % len(self.steps)

    def _arrive(self, warp: _Warp, t: float) -> None:
        waiting = self.barrier.setdefault((warp.block, warp.group), [])
        waiting.append(warp)
        warp.arrived = True
        if len(waiting) == self.meeting:
            for other in waiting:
                other.arrived = False
                other.ready = max(other.ready, t + BARRIER_LATENCY)
            waiting.clear()
            self.wake = [min(at, t + BARRIER_LATENCY) for at in self.wake]

    def _choose(self, scheduler: int, ready: list[_Warp]) -> _Warp:
        last = self.last[scheduler]
        if last is None:
            return ready[0]
        if self.take_turns:
            own = self.of_scheduler[scheduler]
            after = own.index(last) + 1
            return min(ready, key=lambda w: (own.index(w) - after) % len(own))
        return last if last in ready else ready[0]

    def run(self, passes: int) -> float:
        """Until every warp has made its passes, or one that starves the others four times as many.

        Returns the time then.
        """
        enough = passes * len(self.steps)
        behind = {id(w) for w in self.warps if w.issued < enough}
        t = 0.0
        while behind:
            t = min(self.wake)
            if t == _NEVER:
                raise ValueError("all warps wait, at a barrier or for tiles, and none can go on")
            scheduler = self.wake.index(t)
            times = [(self.earliest(scheduler, w), w) for w in self.of_scheduler[scheduler]]
            ready = [w for at, w in times if at <= t]
            if not ready:  # asleep until a barrier opens, if all of its warps are at one
                self.wake[scheduler] = min(at for at, _ in times)
                continue
            chosen = self._choose(scheduler, ready)
            self.last[scheduler] = chosen
            self.wake[scheduler] = t + 1.0
            self.issue(scheduler, chosen, t)
            if chosen.issued >= enough:
                behind.discard(id(chosen))
            if chosen.issued >= 4 * enough:
                break
        return t


def simulate(
    code: list[Instruction],
    device: Device,
    blocks: int,
    warps: int,
    *,
    meeting: int | None = None,
    take_turns: bool = False,
    mbarriers: bool = True,
    events: Mapping[int, Event] | None = None,
    warm_up: int = 3,
    passes: int = 12,
) -> Run:
    """`blocks` blocks of `warps` warps run `code` over and over on one multiprocessor.

    `meeting` warps meet at a barrier, all of a block by default. The blocks start evenly apart, as
    ones that began at different times do. Counted is the time in which all warps run and make
    `passes` passes, after `warm_up` passes.
    """
    steps = prepare(code, device, mbarriers, events)
    sm = _Multiprocessor(steps, device, blocks, warps, meeting or warps, take_turns)
    products = sum(s.clocks for s in steps if s.pipe == 0)
    alone = max(products, float(sum(s.stall for s in steps)))
    for warp in sm.warps:
        warp.ready = alone * warp.block / blocks
    begin = sm.run(warm_up)
    before = sum(w.issued for w in sm.warps)
    end = sm.run(min(w.issued for w in sm.warps) // len(steps) + passes)
    made = (sum(w.issued for w in sm.warps) - before) / len(steps) / len(sm.warps)
    per_pass = (end - begin) / made
    per_scheduler = blocks * warps / SUB_PARTITIONS
    busy = {
        name: sum(s.clocks for s in steps if s.pipe == p) * per_scheduler / per_pass
        for p, name in enumerate(PIPES)
    }
    busy["memory"] *= SUB_PARTITIONS
    busy["issue"] = len(steps) * per_scheduler / per_pass
    return Run(per_pass, busy)


def once(code: list[Instruction], device: Device, warps: int) -> float:
    """Clocks from a block's first instruction to its last, copies landed, on an idle SM."""
    if not code:
        return 0.0
    sm = _Multiprocessor(prepare(code, device), device, 1, warps, warps)
    end = sm.run(1)
    return max(end, *(max([w.copies, *w.groups]) for w in sm.warps))

"""From tiles to the time of a problem: blocks, waves, causality, memory.

A block waits for its first tiles, works through its edge and long-loop tiles at the pace that the
simulation gives for as many blocks as compute on its multiprocessor at the moment, and writes its
rows. Blocks go to the first multiprocessor with room, in the kernel's own order. So the tail of the
last wave, idle multiprocessors and causal imbalance come out of the same walk.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sass_model.devices import LAUNCH_SECONDS, WRITE_LATENCY, Device, peak_of
from sass_model.kernels import Kernel, Shape
from sass_model.sass import WARP_LANES, Instruction, operations, stored_bytes
from sass_model.simulate import Run, once, simulate

_HEADS_TOGETHER = 8  # of tile/scheduler.cuh
_SHARE_OF_BANDWIDTH = 0.8  # that the kernel that quantises is taken to reach: an assumption
_FULL = 0.9  # a resource that is busy this share of the time is called the bound


@dataclass(frozen=True)
class Problem:
    """Self-attention: as many keys as queries, as many KV heads as heads, out of 16 bits.

    Where it `quantises`, q is of 16 bits, and k and v, of `input_bytes`, are made of such before.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool = False
    input_bytes: int = 2  # of an element of q, k and v
    quantises: bool = False

    @property
    def flops(self) -> float:
        """By the usual count, half when causal."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, seqlen, head_dim)."""
        return self.batch, self.heads, self.seqlen, self.head_dim


@dataclass(frozen=True)
class Pace:
    """Clocks of the pieces of a kernel on a device."""

    main: tuple[Run, ...]  # of a tile, with 1, 2, ... blocks computing on the SM
    edge: tuple[Run, ...]
    start: float  # from a block's begin to its first tile
    end: float  # from its last tile to its end

    @property
    def resident(self) -> int:
        """Blocks that fit an SM."""
        return len(self.main)


def repeated(run: Run, times: float) -> Run:
    """A pass that is made up of several of these."""
    return replace(run, clocks_per_pass=run.clocks_per_pass * times)


def pace(kernel: Kernel, device: Device) -> Pace:
    """Simulates the pieces of a kernel."""
    paths, shape = kernel.paths, kernel.shape
    residents = range(1, kernel.blocks_per_sm(device) + 1)
    meeting = shape.num_warps // shape.key_groups

    def run(code: list[Instruction], blocks: int) -> Run:
        return simulate(code, device, blocks, shape.num_warps, meeting=meeting)

    cold = replace(device, memory_latency=device.dram_latency)
    stored = stored_bytes(paths.epilogue_loop)
    # An edge tile may be worked on a part at a time, in a loop of its own.
    parts = shape.operations_per_warp / operations(paths.edge)
    rows_bytes = shape.block_m * shape.head_dim * 2 / shape.num_warps
    more_passes = max(0.0, rows_bytes / (stored * WARP_LANES) - 1) if stored else 0.0
    return Pace(
        main=tuple(run(paths.main, blocks) for blocks in residents),
        edge=tuple(repeated(run(paths.edge, blocks), parts) for blocks in residents),
        start=once(paths.prologue, cold, shape.num_warps),
        end=once(paths.epilogue, device, shape.num_warps)
        + more_passes * once(paths.epilogue_loop, device, shape.num_warps)
        + WRITE_LATENCY,
    )


def tiles_outside(kernel: Kernel) -> int:
    """The loops of each group of warps: a kernel whose long loop computes the scores of a tile
    beside P V of the one before has the first scores in its prologue and the last P V in its
    epilogue."""
    return 1 if operations(kernel.paths.prologue) else 0


def blocks_of(problem: Problem, shape: Shape, outside: int = 0) -> Iterator[tuple[int, int]]:
    """(edge tiles, long-loop tiles) of each block, in the order in which they start, `outside` of
    them left out."""
    rows, keys, n = shape.block_m, shape.block_n, problem.seqlen
    m_blocks = -(-n // rows)
    tiles = []
    for m_block in range(m_blocks):
        first, last = m_block * rows, min((m_block + 1) * rows, n) - 1
        seen_by_any = min(n, last + 1) if problem.causal else n
        seen_by_all = min(n, first + 1) if problem.causal else n
        end = -(-seen_by_any // keys)
        full_end = max(0, min(seen_by_all // keys, end - 1))
        # Groups of warps take tiles in turn: the first group has the most, edge tiles included.
        edge = -(-(end - full_end) // shape.key_groups)
        # A warp has those edge tiles of the block that its own rows make such. It sees all or
        # nothing of the others, which count as full ones.
        if shape.key_groups == 1:
            edge = min(edge, -(-shape.rows_per_warp // keys))
        tiles.append((edge - outside, -(-end // shape.key_groups) - edge))
    all_heads = problem.batch * problem.heads
    if not problem.causal:
        for _ in range(all_heads):
            yield from tiles
        return
    for first_head in range(0, all_heads, _HEADS_TOGETHER):
        together = min(_HEADS_TOGETHER, all_heads - first_head)
        for block in reversed(tiles):
            yield from [block] * together


class _Walk:
    """The blocks of a problem on the multiprocessors of a device, in clocks."""

    def __init__(self, pace_: Pace, device: Device, blocks: Iterator[tuple[int, int]]) -> None:
        self.pace = pace_
        self.edge_weight = [
            edge.clocks_per_pass / main.clocks_per_pass
            for edge, main in zip(pace_.edge, pace_.main, strict=True)
        ]
        self.queue = deque(blocks)
        # The blocks of each SM: those waiting for memory as (until, work), those computing as work
        # left.
        self.starting: list[list[tuple[float, float]]] = [[] for _ in range(device.num_sms)]
        self.computing: list[list[float]] = [[] for _ in range(device.num_sms)]
        self.ending: list[list[float]] = [[] for _ in range(device.num_sms)]
        self.now = [0.0] * device.num_sms

    def _begin(self, sm: int) -> None:
        edge, main = self.queue.popleft()
        work = main + edge * self.edge_weight[-1]
        self.starting[sm].append((self.now[sm] + self.pace.start, work))

    def _next_event(self, sm: int) -> float:
        times = [t for t, _ in self.starting[sm]] + self.ending[sm]
        if self.computing[sm]:
            per_tile = self.pace.main[len(self.computing[sm]) - 1].clocks_per_pass
            times.append(self.now[sm] + min(self.computing[sm]) * per_tile)
        return min(times)

    def _advance(self, sm: int, to: float) -> None:
        computing = self.computing[sm]
        if computing:
            per_tile = self.pace.main[len(computing) - 1].clocks_per_pass
            done = (to - self.now[sm]) / per_tile
            left = [work - done for work in computing]
            self.ending[sm] += [to + self.pace.end for work in left if work <= 1e-9]
            self.computing[sm] = [work for work in left if work > 1e-9]
        self.now[sm] = to
        arrived = [work for t, work in self.starting[sm] if t <= to + 1e-9]
        self.starting[sm] = [x for x in self.starting[sm] if x[0] > to + 1e-9]
        self.computing[sm] += arrived
        finished = len(self.ending[sm])
        self.ending[sm] = [t for t in self.ending[sm] if t > to + 1e-9]
        for _ in range(min(finished - len(self.ending[sm]), len(self.queue))):
            self._begin(sm)

    def clocks(self) -> float:
        """Until the last block has ended."""
        num_sms = len(self.now)
        for _ in range(self.pace.resident):
            for sm in range(num_sms):
                if self.queue:
                    self._begin(sm)
        events = [(self._next_event(sm), sm) for sm in range(num_sms) if self.starting[sm]]
        heapq.heapify(events)
        last = 0.0
        while events:
            t, sm = heapq.heappop(events)
            last = t
            self._advance(sm, t)
            if self.starting[sm] or self.computing[sm] or self.ending[sm]:
                heapq.heappush(events, (self._next_event(sm), sm))
        return last


@dataclass(frozen=True)
class Prediction:
    """The prediction for one kernel and one problem on one device."""

    seconds: float
    peak_share: float  # of the tensor cores' peak for its products, by the usual count
    loop_share: float  # of the tensor cores' peak, in the long loop alone
    bound: str


def _bound_of_loop(run: Run) -> str:
    name = max(run.busy, key=lambda pipe: run.busy[pipe])
    names = {"memory": "shared memory", "mufu": "MUFU", "fma": "FMA", "alu": "ALU"}
    return names.get(name, name) if run.busy[name] >= _FULL else "latency"


def dram_seconds(problem: Problem, device: Device, shape: Shape) -> float:
    """For Q, K, V and out, once each; K and V of a head again per wave if L2 cannot hold them."""
    elements = float(problem.batch * problem.heads * problem.seqlen * problem.head_dim)
    tensor = problem.input_bytes * elements
    query = 2 * elements if problem.quantises else tensor
    kv_of_head = 2.0 * problem.input_bytes * problem.seqlen * problem.head_dim
    m_blocks = -(-problem.seqlen // shape.block_m)
    heads_at_once = max(1.0, device.num_sms / m_blocks)
    times = 1.0 if kv_of_head * heads_at_once <= device.l2_bytes else float(m_blocks)
    return (query + 2 * elements + 2 * tensor * times) / device.dram_bytes_per_second


def quantisation_seconds(problem: Problem, device: Device) -> float:
    """The launch before a problem that quantises: it reads and writes k and v."""
    if not problem.quantises:
        return 0.0
    elements = 2.0 * problem.batch * problem.heads * problem.seqlen * problem.head_dim
    rate = _SHARE_OF_BANDWIDTH * device.dram_bytes_per_second
    return LAUNCH_SECONDS + elements * (2 + problem.input_bytes) / rate


def predict(kernel: Kernel, pace_: Pace, device: Device, problem: Problem) -> Prediction:
    """The time of a problem, and what holds it up."""
    shape, outside = kernel.shape, tiles_outside(kernel)
    clocks = _Walk(pace_, device, blocks_of(problem, shape, outside)).clocks()
    computing = clocks / device.clock_hz
    memory = dram_seconds(problem, device, shape)
    seconds = max(computing, memory) + LAUNCH_SECONDS
    full = pace_.main[-1]
    tiles = sum(edge + main for edge, main in blocks_of(problem, shape, outside))
    spread_evenly = tiles * full.clocks_per_pass / pace_.resident / device.num_sms
    if memory > computing:
        bound = "DRAM"
    elif sum(1 for _ in blocks_of(problem, shape, outside)) < device.num_sms * pace_.resident:
        bound = "too few blocks"
    elif spread_evenly < _FULL * clocks:
        bound = "tail and edges"
    else:
        bound = _bound_of_loop(full)
    return Prediction(
        seconds,
        problem.flops / seconds / peak_of(kernel.paths.main, device),
        full.busy["tensor"],
        bound,
    )

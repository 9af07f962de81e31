"""The time of a call of the decode family: fixed costs, bytes on their way, DRAM.

Few queries over many keys: what counts is when the first byte comes, how many thread blocks read at
the same time, and what is left to do behind the last byte. Thread blocks, and what each of them
has to read, are those of plan.cpp and work_partition.h, which the model compiles. They share DRAM
evenly, and none reads faster than its long loop goes, or than the bytes that it has on their way
allow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sass_model.devices import DEVICES, Device
from sass_model.kernels import RESERVED_SMEM, Kernel, run_planner
from sass_model.simulate import simulate

MEASURED_ON = DEVICES["H200"]

# Fitted to eight measured calls on an H200 in graphs of such calls (research/model/
# decode-calls.json, K and V cold), where programmatic dependent launch hides part of both launches.
# Ada is taken to need the same seconds.
FIRST_SECONDS = 2.8e-6  # launch, set-up, the first byte, and what follows the last one
COMBINE_SECONDS = 4.0e-6  # from the last part's end to the end of the kernel that adds parts up
LENGTHS_SECONDS = 3.4e-6  # where the device alone knows lengths: one call of either kind there

# Measured on an H200.
NEXT_SECONDS = 0.9e-6  # of each further part of a thread block, without a byte: plan.cpp
KEY_SECONDS = 11e-9  # of a key of head_dim 128, of a thread block that waits for no byte: plan.cpp
KEY_SECONDS_8_BIT = 0.65 * KEY_SECONDS
READ_BYTES_PER_SECOND = 4.42e12  # the most that reads of DRAM reach
# The part of a launch that programmatic dependent launch saves, 0.79 to 1.04 in three shapes of
# research/LOG.md. Ada has none of it, so that each launch takes so much longer there.
DEPENDENT_LAUNCH_SECONDS = 0.9e-6

# The part of a data sheet's bandwidth that reads reach on Ada: an assumption, that of
# cuda/plan/cost.h.
SUSTAINED_SHARE = 0.9
TARGET_SHARE = 0.9  # of a data sheet's bandwidth, by a call's bytes over its time
_NEAR = 0.02  # by so much longer than bytes over bandwidth is still bound by it


@dataclass(frozen=True)
class Call:
    """Attention of some queries of each sequence to all its keys, in a cache or not."""

    batch: int
    heads: int
    heads_kv: int
    keys: int  # of a sequence
    head_dim: int
    key_bytes: int = 2  # of an element of K and V
    queries: int = 1  # of a sequence
    lengths_on_device: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of K and V."""
        return 2 * self.batch * self.heads_kv * self.keys * self.head_dim * self.key_bytes

    @property
    def text(self) -> str:
        """As benchmarks/RESULTS.md has it: "(1,32/8,8192,128)"."""
        heads = f"{self.heads}/{self.heads_kv}" if self.heads != self.heads_kv else f"{self.heads}"
        return f"({self.batch},{heads},{self.keys},{self.head_dim})"


@dataclass(frozen=True)
class Plan:
    """The partition that plan.cpp and work_partition.h make for a call."""

    variant: str
    block_n: int  # keys of a tile
    stages: int
    smem_bytes: int
    resident: int  # blocks that an SM holds
    grid: int
    row_blocks: int
    row_tiles: int  # of keys, of each row block
    begin: int  # tiles' time that it is taken to take to begin a row block
    whole: bool  # a thread block has whole row blocks, and nothing is left to be added up
    part_tiles: int  # of a part where row blocks are divided into parts of one size; 0: by tiles

    @property
    def parts(self) -> list[list[int]]:
        """For each thread block the tiles of its parts of row blocks, one behind the other."""
        if self.whole:
            return [[self.row_tiles] for _ in range(self.row_blocks)]
        begin, units = self.begin, self.begin + self.row_tiles
        if self.part_tiles:
            each, begin = self.part_tiles, 0
            units = -(-self.row_tiles // each)
        total = self.row_blocks * units
        per = -(-total // self.grid)
        found = []
        for block in range(self.grid):
            first, end = min(block * per, total), min((block + 1) * per, total)
            own = []
            while first < end:
                within = first % units
                count = min(units - within, end - first)
                if self.part_tiles:
                    count = 1
                    own.append(min(each, self.row_tiles - within * each))
                elif within + count > begin:
                    own.append(within + count - max(within, begin))
                first += count
            found.append(own)
        return [own for own in found if own]


def plans(calls: Sequence[tuple[Device, Call]]) -> list[Plan]:
    """The plan of the family. Raises ValueError where it refuses a call."""
    asked = [
        (
            device,
            (
                call.batch,
                call.heads,
                call.heads_kv,
                call.queries,
                call.keys,
                call.head_dim,
                call.key_bytes,
                int(call.lengths_on_device),
            ),
        )
        for device, call in calls
    ]
    problem = """
          static const std::int32_t lengths[1] = {};
          p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat16;
          if (key_bytes == 1) p.k.dtype = p.v.dtype = DType::kFloat8E4M3;
          p.batch_size = batch, p.num_heads = heads, p.num_heads_kv = kv;
          p.seqlen_q = queries, p.seqlen_k = keys, p.head_dim = p.head_dim_v = dim;
          p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = dim;
          p.q.row_stride = p.out.row_stride = heads * dim;
          p.k.row_stride = p.v.row_stride = kv * dim;
          p.q.batch_stride = p.out.batch_stride = std::int64_t{queries} * heads * dim;
          p.k.batch_stride = p.v.batch_stride = std::int64_t{keys} * kv * dim;
          if (on_device) p.seqused_k = lengths;"""
    show = """
          try {
            const Plan plan = core::make_plan(p, d, options);
            const bool whole = plan.num_splits == 1;
            const std::int64_t rows = decode::num_row_blocks(p, plan.block_m);
            std::printf("%s %d %d %lld %lld %lld %lld %d %d %d\\n", plan.variant_name, plan.block_n,
                        plan.num_stages, (long long)plan.smem_bytes, (long long)plan.grid,
                        (long long)rows, (long long)((keys + plan.block_n - 1) / plan.block_n),
                        decode::fixed_overhead_tiles(plan.block_n), int(whole),
                        whole ? 0 : decode::part_tiles_of(p, plan, 1));
          } catch (const std::exception& error) {
            std::printf("refused: %s\\n", error.what());
          }"""
    parameters = "batch, heads, kv, queries, keys, dim, key_bytes, on_device"
    header = "cuda/forward/decode/choices.h"
    lines = run_planner("decode", parameters, asked, problem, show, header)
    found = []
    for (device, call), line in zip(calls, lines, strict=True):
        variant, *rest = line.split()
        if variant == "refused:":
            raise ValueError(f"{device.name}, {call.text}: {line}")
        block_n, stages, smem, grid, row_blocks, tiles, begin, whole, part_tiles = map(int, rest)
        by_smem = device.smem_per_sm // (smem + RESERVED_SMEM)
        resident = min(max(by_smem, 1), 2 if variant == "rows16" else 1)  # as plan.cpp has it
        found.append(
            Plan(
                variant,
                block_n,
                stages,
                smem,
                resident,
                grid,
                row_blocks,
                tiles,
                begin,
                bool(whole),
                part_tiles,
            )
        )
    return found


def in_parts(plan: Plan, device: Device) -> Plan:
    """The same call with row blocks divided into parts of one size, as many as fit the device."""
    slots = plan.resident * device.num_sms
    each = -(-plan.row_tiles // max(slots // plan.row_blocks, 1))
    return replace(plan, whole=False, grid=slots, part_tiles=each)


def loop_clocks(kernel: Kernel, device: Device) -> float:
    """The clocks of a pass through the long loop, for a thread block alone on its SM, whose bytes
    are there.

    Groups of warps have tiles of their own and do not meet.
    """
    shape = kernel.shape
    meeting = shape.num_warps // shape.key_groups
    return simulate(kernel.paths.main, device, 1, shape.num_warps, meeting=meeting).clocks_per_pass


def key_seconds(call: Call, plan: Plan, device: Device, slower: float = 1.0) -> float:
    """The clocks of a key in a thread block that waits for no byte.

    As many clocks as on an H200, times `slower`: the clocks of the long loop by those on an H200,
    both by the model.
    """
    measured = KEY_SECONDS_8_BIT if call.key_bytes == 1 else KEY_SECONDS
    if plan.variant == "rows32":
        measured *= 12 / 11  # as plan.cpp has it
    measured *= call.head_dim / 128
    return measured * slower * MEASURED_ON.clock_hz / device.clock_hz


def sustained(device: Device) -> float:
    """Bytes per second that reads of DRAM reach."""
    if device == MEASURED_ON:
        return READ_BYTES_PER_SECOND
    return SUSTAINED_SHARE * device.dram_bytes_per_second


def stream_seconds(
    parts: Iterable[Sequence[float]], slots: int, most: float, bandwidth: float
) -> float:
    """Until the last byte has come, from when the first thread blocks' first bytes do.

    `parts`: of each thread block the bytes of its parts; `slots`: thread blocks at a time; `most`:
    bytes per second of one of them. Those that read have the same share of the bandwidth.
    """
    queue = list(parts)[::-1]
    # By when they begin to read: (time, number, parts), and by when they are done, in bytes that a
    # thread block has read that reads all the time.
    beginning: list[tuple[float, int, Sequence[float]]] = []
    reading: list[tuple[float, int, Sequence[float]]] = []
    for number in range(min(slots, len(queue))):
        heapq.heappush(beginning, (0.0, number, queue.pop()))
    now = read = 0.0
    while beginning or reading:
        rate = min(most, bandwidth / len(reading)) if reading else 0.0
        done = now + (reading[0][0] - read) / rate if reading else math.inf
        if beginning and beginning[0][0] <= done:
            read += rate * (beginning[0][0] - now)
            now, number, own = heapq.heappop(beginning)
            heapq.heappush(reading, (read + own[0], number, own[1:]))
            continue
        now = done
        read, number, own = heapq.heappop(reading)
        if not own and queue:
            own = queue.pop()
        if own:
            heapq.heappush(beginning, (now + NEXT_SECONDS, number, own))
    return now


@dataclass(frozen=True)
class Prediction:
    """The times of one call on one device."""

    seconds: float
    fixed: float  # seconds without a byte: launches, first byte, end, adding up
    reading: float  # the others
    blocks: int  # that read
    block_bytes_per_second: float  # the most that one of them reads
    bytes_on_their_way: float  # of all blocks that are there at a time
    bytes_needed: float  # for the bandwidth: times the latency of DRAM
    bound: str

    def share(self, call: Call, device: Device) -> float:
        """The share of the data sheet's bandwidth."""
        return call.bytes / self.seconds / device.dram_bytes_per_second


def fixed_seconds(call: Call, plan: Plan, device: Device) -> float:
    """The time of a call beside reading."""
    launches = 1 if plan.whole else 2
    seconds = FIRST_SECONDS + (0.0 if plan.whole else COMBINE_SECONDS)
    if call.lengths_on_device:
        seconds += LENGTHS_SECONDS
    has_dependent_launch = int(device.arch[3:]) >= 90
    return seconds + (0.0 if has_dependent_launch else launches * DEPENDENT_LAUNCH_SECONDS)


def predict(
    call: Call,
    plan: Plan,
    device: Device,
    *,
    slower: float = 1.0,
    bandwidth: float | None = None,
) -> Prediction:
    """The time of a call; `slower` as key_seconds() has it, `bandwidth` that of sustained()."""
    bandwidth = bandwidth or sustained(device)
    tile_bytes = 2.0 * plan.block_n * call.head_dim * call.key_bytes
    parts = [[tiles * tile_bytes for tiles in own] for own in plan.parts]
    slots = plan.resident * device.num_sms
    # A stage is being multiplied while the others are on their way.
    held = (plan.stages - 1) * tile_bytes
    latency = device.dram_latency / device.clock_hz
    pace = tile_bytes / (plan.block_n * key_seconds(call, plan, device, slower))
    most = min(pace, held / latency)
    reading = stream_seconds(parts, slots, most, bandwidth)
    fixed = fixed_seconds(call, plan, device)
    at_a_time = min(slots, len(parts))
    if reading > (1 + _NEAR) * sum(map(sum, parts)) / bandwidth:
        bound = "thread blocks" if at_a_time * most < bandwidth else "tail"
    else:
        bound = "DRAM" if fixed < reading / 10 else "DRAM and fixed costs"
    return Prediction(
        reading + fixed,
        fixed,
        reading,
        len(parts),
        most,
        at_a_time * held,
        bandwidth * latency,
        bound,
    )


def share_needed(call: Call, prediction: Prediction, device: Device) -> float:
    """The share of the data sheet's bandwidth that brings the call to TARGET_SHARE of it.

    More than 1: none is enough.
    """
    bare = call.bytes / device.dram_bytes_per_second
    left = bare / TARGET_SHARE - prediction.fixed
    return bare / left if left > 0 else math.inf

"""Rates of the GPUs, with where they come from, and how instructions spread over the pipes.

Clocks of Ada are the boost clocks that the documents' own peak figures rest on: a card at its power
limit (an L4 has 72 W) runs slower, and every figure in microseconds with it; percentages stay.
Latencies of Ada and bytes per clock from L2 are assumptions; loops are long enough not to care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from sass_model.sass import WARP_LANES, Instruction, operations

SUB_PARTITIONS = 4  # of a multiprocessor, each with a scheduler and one tensor core
HMMA_FLOPS = 2 * 16 * 8 * 16  # of m16n8k16
SMEM_BYTES_PER_CLOCK = 128  # per multiprocessor; 32 banks of 4 bytes, CUDA C++ Programming Guide
LAUNCH_SECONDS = 0.6e-6  # an empty kernel in a CUDA graph on an H200

ADA_WHITEPAPER = "NVIDIA Ada GPU Architecture whitepaper (v2.1), appendix A"
BLACKWELL_WHITEPAPER = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
GUIDE = "CUDA C++ Programming Guide, Arithmetic Instructions (results per clock and SM)"


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    arch: str
    num_sms: int
    clock_hz: float
    hmma_clocks: float  # of a sub-partition's tensor core, per HMMA.16816.F32
    hmma_latency: float  # clocks until the result of a product may be read
    dram_bytes_per_second: float
    l2_bytes: int
    smem_per_sm: int  # bytes
    max_warps_per_sm: int
    memory_latency: float  # clocks from a copy's issue to its arrival, L2 hit
    dram_latency: float  # the same, from DRAM
    l2_bytes_per_clock: float  # that one SM reads
    source: str
    # The same per HMMA.16816.F16, IMMA.16832, QMMA.16832.F32 and .F16; 0: has none, or not known.
    hmma_float16_clocks: float = 0.0
    imma_clocks: float = 0.0
    qmma_clocks: float = 0.0
    qmma_float16_clocks: float = 0.0

    @property
    def peak_flops(self) -> float:
        """Dense fp16 operations with fp32 accumulation, per second."""
        return self.num_sms * SUB_PARTITIONS * HMMA_FLOPS / self.hmma_clocks * self.clock_hz


class _Products(TypedDict):
    hmma_clocks: float
    hmma_float16_clocks: float
    imma_clocks: float
    qmma_clocks: float
    qmma_float16_clocks: float


# An SM does 1024 operations a clock in 16 bits, 2048 in 8 bits, whatever accumulates them; m16n8k16
# has 4096, m16n8k32 8192. GeForce has half of that where the accumulators are fp32.
_FULL_RATE: _Products = {
    "hmma_clocks": 16.0,
    "hmma_float16_clocks": 16.0,
    "imma_clocks": 16.0,
    "qmma_clocks": 16.0,
    "qmma_float16_clocks": 16.0,
}
_GEFORCE: _Products = {**_FULL_RATE, "hmma_clocks": 32.0, "qmma_clocks": 32.0}


class _Common(TypedDict):
    arch: str
    hmma_latency: float
    smem_per_sm: int
    max_warps_per_sm: int
    memory_latency: float
    dram_latency: float
    l2_bytes_per_clock: float


_ADA: _Common = {
    "arch": "sm_89",
    "hmma_latency": 33.0,
    "smem_per_sm": 100 * 1024,
    "max_warps_per_sm": 48,
    "memory_latency": 300.0,
    "dram_latency": 600.0,
    "l2_bytes_per_clock": 64.0,
}
_BLACKWELL: _Common = {**_ADA, "arch": "sm_120"}

DEVICES = {
    "L4": Device(
        name="L4",
        num_sms=58,
        clock_hz=2.04e9,
        dram_bytes_per_second=300e9,
        l2_bytes=48 << 20,
        source="NVIDIA L4 Tensor Core GPU datasheet: FP16 tensor 242 TFLOPS with sparsity (121 "
        "dense), FP8 and INT8 485 (242), 300 GB/s, 72 W; 58 SMs, boost 2040 MHz",
        **_FULL_RATE,
        **_ADA,
    ),
    "L40S": Device(
        name="L40S",
        num_sms=142,
        clock_hz=2.52e9,
        dram_bytes_per_second=864e9,
        l2_bytes=96 << 20,
        source="NVIDIA L40S datasheet: FP16 tensor 733 TFLOPS with sparsity (366 dense), FP8 and "
        "INT8 1466 (733), 864 GB/s, 18176 CUDA cores (142 SMs), FP32 91.6 TFLOPS (boost 2520 MHz)",
        **_FULL_RATE,
        **_ADA,
    ),
    "RTX 4090": Device(
        name="RTX 4090",
        num_sms=128,
        clock_hz=2.52e9,
        dram_bytes_per_second=1008e9,
        l2_bytes=72 << 20,
        source=f"{ADA_WHITEPAPER}: peak FP16 tensor TFLOPS with FP32 accumulate 165.2, with FP16 "
        "330.3; FP8 330.3 and 660.6; INT8 660.6; 128 SMs, boost 2520 MHz, 1008 GB/s, L2 72 MB",
        **_GEFORCE,
        **_ADA,
    ),
    "RTX 5090": Device(
        name="RTX 5090",
        num_sms=170,
        clock_hz=2.407e9,
        dram_bytes_per_second=1792e9,
        l2_bytes=96 << 20,
        source=f"{BLACKWELL_WHITEPAPER}: peak FP16 tensor TFLOPS with FP32 accumulate 209.5, with "
        "FP16 419; FP8 419 and 838; INT8 838; 170 SMs, boost 2407 MHz, 1792 GB/s, L2 96 MB",
        **_GEFORCE,
        **_BLACKWELL,
    ),
    "H200": Device(
        name="H200",
        arch="sm_90",
        num_sms=132,
        clock_hz=1.85e9,
        hmma_clocks=6.5,
        imma_clocks=6.5,
        hmma_latency=24.0,
        dram_bytes_per_second=4.23e12,
        l2_bytes=50 << 20,
        smem_per_sm=228 * 1024,
        max_warps_per_sm=64,
        memory_latency=300.0,
        dram_latency=700.0,
        l2_bytes_per_clock=64.0,
        source="measured: 6.5 clocks per mma.sync of a sub-partition and 4.0 per ldmatrix.x4 by "
        "clock64; mma.sync of s8 on registers 2.1 times as many operations a second as of fp16, so "
        "6.5 clocks at the most; 1.77 to 1.92 GHz while wmma runs at the power limit (690 W); "
        "copies 4.23 TB/s",
    ),
}


@dataclass(frozen=True)
class Use:
    """The resources that one warp instruction needs."""

    pipe: str  # "tensor", "mufu", "fma", "alu", "uniform", "memory" or "" for the issue slot alone
    clocks: float  # that the pipe is busy
    latency: float  # clocks until a scoreboard that it holds is released


# Clocks a warp instruction keeps a sub-partition's pipe busy: 32 lanes over a quarter of the SM's
# results per clock. GUIDE, for compute capability 8.9 and 9.0: fp32 add, multiply and fma 128;
# 32-bit integer arithmetic, comparison, minimum, logic, shifts and conversions to 16-bit 64;
# exp2 and other conversions 16. I2FP, and F2FP from and to e4m3, 64: measured on an H200. fp16 add,
# multiply and fma 128 for 8.9, two to a lane.
_FMA = frozenset({"FFMA", "FADD", "FMUL"})
_HALF_FMA = frozenset({"IMAD", "HADD2", "HFMA2", "HMUL2"})
_MUFU = frozenset({"MUFU", "I2F", "F2I", "POPC"})
_MEMORY = frozenset({"LDSM", "LDS", "STS", "LDGSTS", "LDG", "STG", "SHFL", "LD", "ST", "RED"})
_MBARRIER = frozenset({"SYNCS", "ARRIVES", "ATOMS"})
_JUMPS = frozenset({"BRA", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "WARPSYNC", "YIELD"})
_WAITS = frozenset({"BAR", "DEPBAR", "LDGDEPBAR", "NOP", "ERRBAR", "MEMBAR"})
_CONSTANT = frozenset({"LDC", "ULDC", "S2R", "S2UR", "CS2R"})

MUFU_LATENCY = 20.0
SMEM_LATENCY = 33.0  # inferred: ldmatrix.x4 with address arithmetic takes 41.5 on an H200
CONSTANT_LATENCY = 30.0
BARRIER_LATENCY = 20.0
FENCE_STALL = 60.0  # of MEMBAR, which comes before an arrival at an mbarrier on Ada: an assumption
WRITE_LATENCY = 400.0  # until a block's last stores have left and another may take its place


def product_clocks(i: Instruction, device: Device) -> float:
    """The clocks of a sub-partition's tensor core. Raises ValueError for a product that a GPU has
    not."""
    sums = "float16_clocks" if i.float16_sums else "clocks"
    clocks: float = getattr(device, f"{i.name.lower()}_{sums}", 0.0)
    if not clocks:
        raise ValueError(f"{device.name}: no rate is known of {i.opcode}")
    return clocks


def peak_of(code: Sequence[Instruction], device: Device) -> float:
    """Operations per second where tensor cores do nothing but the products of some code."""
    clocks = sum(product_clocks(i, device) for i in code if i.operations)
    return operations(code) / clocks * SUB_PARTITIONS * device.num_sms * device.clock_hz


def use_of(i: Instruction, device: Device) -> Use:
    """Where an instruction runs and for how long, in clocks."""
    if i.never_runs or i.name in _JUMPS | _WAITS:
        return Use("", 0.0, 0.0)
    if i.operations:
        return Use("tensor", product_clocks(i, device), device.hmma_latency)
    if i.name in _MUFU:
        return Use("mufu", 8.0, MUFU_LATENCY)
    if i.name in _FMA:
        return Use("fma", 1.0, 4.0)
    if i.name in _HALF_FMA:
        return Use("fma", 2.0, 5.0)
    if i.name in _CONSTANT:
        return Use("uniform", 2.0, CONSTANT_LATENCY)
    if i.name.startswith("U") or i.name == "R2UR":
        return Use("uniform", 2.0, 12.0)
    if i.name in _MBARRIER:
        return Use("memory", 1.0, SMEM_LATENCY)
    if i.name in _MEMORY:
        size = WARP_LANES * (4 if i.name == "SHFL" else i.bytes_per_lane)
        clocks = max(1.0, size / SMEM_BYTES_PER_CLOCK)
        far = i.name in ("LDGSTS", "LDG", "LD")
        return Use("memory", clocks, device.memory_latency if far else SMEM_LATENCY)
    return Use("alu", 2.0, 6.0)

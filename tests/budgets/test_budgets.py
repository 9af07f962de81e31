"""Tests the resources of the compiled kernels: no spills on sm_89 (of sm90: sm_90a), recorded
registers."""

from __future__ import annotations

import re
from collections import Counter

import cubins
import pytest

# Per block.
MAX_SMEM = {cubins.SM_89: 99 * 1024, cubins.SM_90: 227 * 1024, cubins.SM_90A: 227 * 1024}
# Variants that no plan takes on 8.9 have the limit of compute capability 8.0, or 9.0.
BEYOND_ADA = {"single_pass": 163 * 1024, "128_large": 227 * 1024, "256_large": 227 * 1024}
MAX_LADDER_REGISTERS = 120  # of the WMMA kernels at head_dim 64
LADDER = ("wmma_qk", "wmma_smem")
# The shapes of wmma on sm_89: warps of a block, and blocks that an SM holds.
OCCUPANCY = {
    "32_wide": (4, 2),
    "32_narrow": (4, 4),
    "32_split": (8, 1),
    "64_wide": (4, 2),
    "64_narrow": (4, 3),
    "64_split": (8, 1),
    "96_wide": (4, 1),
    "96_narrow": (4, 3),
    "96_split": (8, 1),
    "128_wide": (4, 1),
    "128_narrow": (4, 3),
    "128_split": (8, 1),
    "192_wide": (8, 1),
    "192_narrow": (4, 2),
    "256_wide": (8, 1),
    "256_narrow": (4, 1),
}

BUDGETS = cubins.budgets()


@pytest.fixture(scope="module")
def kernels() -> cubins.Kernels:
    try:
        return cubins.load()
    except cubins.NoTools as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def smem() -> dict[str, int]:
    try:
        return cubins.dynamic_smem()
    except cubins.NoTools as missing:
        pytest.skip(str(missing))


def needs(kernels: cubins.Kernels, kernel: str) -> cubins.Usage:
    """The resources of a kernel on the architecture of its budget."""
    archs = kernels.usage.get(kernel, {})
    arch = cubins.arch_of(kernel)
    if arch != cubins.SM_89 and not any(arch in others for others in kernels.usage.values()):
        pytest.skip(f"no code for {arch} in {kernels.source}")
    assert arch in archs, f"not in {kernels.source}"
    return archs[arch]


@pytest.mark.parametrize("kernel", cubins.expected_kernels())
def test_kernel_is_there(kernels: cubins.Kernels, kernel: str) -> None:
    needs(kernels, kernel)
    assert kernel in BUDGETS["kernels"], "no budget: run tests/budgets/cubins.py --write"


@pytest.mark.parametrize("kernel", cubins.expected_kernels())
def test_no_spills(kernels: cubins.Kernels, kernel: str) -> None:
    usage = needs(kernels, kernel)
    assert (usage.stack, usage.local) == (0, 0)  # without which there is nowhere to spill to


@pytest.mark.parametrize("kernel", cubins.expected_kernels())
def test_registers(kernels: cubins.Kernels, kernel: str) -> None:
    needs(kernels, kernel)
    usage = kernels.usage[kernel]
    if kernel.startswith(LADDER) and kernel.endswith("_64"):
        assert usage[cubins.SM_89].registers <= MAX_LADDER_REGISTERS
    if BUDGETS["cuda"] != cubins.cuda_version():
        pytest.skip(f"budgets are those of CUDA {BUDGETS['cuda']}")
    budget = BUDGETS["kernels"][kernel]["registers"]
    over = {
        arch: (use.registers, budget[arch])
        for arch, use in usage.items()
        if arch in budget and use.registers > budget[arch]
    }
    assert not over, f"registers over budget (now, budget): {over}"


@pytest.mark.parametrize(
    "kernel", [k for k in cubins.expected_kernels() if k.endswith(("wide", "narrow", "split"))]
)
def test_occupancy(kernels: cubins.Kernels, smem: dict[str, int], kernel: str) -> None:
    _, _, tile, variant = kernel.split("_")
    warps, blocks = OCCUPANCY[f"{tile}_{variant}"]
    registers = -(-kernels.usage[kernel][cubins.SM_89].registers // 8) * 8
    assert blocks * registers * warps * 32 <= 65536
    assert blocks * (smem[kernel] + 1024) <= 100 * 1024


@pytest.mark.parametrize("kernel", sorted(BUDGETS["kernels"]))
def test_shared_memory(kernels: cubins.Kernels, smem: dict[str, int], kernel: str) -> None:
    dynamic = smem.get(kernel, 0)
    assert dynamic == BUDGETS["kernels"][kernel]["dynamic_smem"]
    most = BEYOND_ADA.get(kernel.split("_", 3)[-1], MAX_SMEM[cubins.arch_of(kernel)])
    assert dynamic + needs(kernels, kernel).static_smem <= most


def kernels_read(family: str) -> list[str]:
    names = cubins.expected_kernels()
    return [name for name in names if name.startswith(family) and cubins.reads_code(name)]


def count(opcodes: Counter[str], pattern: str) -> int:
    """The instructions whose opcodes begin with a pattern."""
    return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))


@pytest.mark.parametrize("kernel", kernels_read("wmma"))
def test_tensor_cores_are_fed_by_ldmatrix(kernels: cubins.Kernels, kernel: str) -> None:
    needs(kernels, kernel)
    opcodes = cubins.opcodes(kernels.code[kernel])
    products, loads = count(opcodes, r"[HQ]MMA\."), count(opcodes, r"LDSM\.")
    assert products, "no tensor core instruction"
    assert loads, "no ldmatrix"
    # There rows of bias and mask, in global memory, begin where a pointer in shared memory says.
    if not kernel.endswith("_256_general"):
        assert not count(opcodes, r"LD\."), "a generic load: shared memory nvcc did not see"
    # Half as many matrix loads as products is what fragments take; without ldmatrix it is far more.
    assert loads <= products


@pytest.mark.parametrize(
    "kernel",
    [n for n in kernels_read("sm90") if re.fullmatch(r"sm90_\w+16_64_short(_cached)?", n)],
)
def test_consumers_that_share_rows_wait_at_the_same_instructions(
    kernels: cubins.Kernels, kernel: str
) -> None:
    """All threads that wait at a `bar.sync` must do so by one instruction, which synccheck holds.

    For ping-pong one of two warpgroups arrives and one waits, equally often in the code. Both wait
    where one hands its accumulators over, and where those have been read: at two instructions.
    """
    needs(kernels, kernel)
    waits, arrivals = (
        len(re.findall(rf"\bBAR\.{kind}\b[^;]*, 0x100 ;", kernels.code[kernel]))
        for kind in ("SYNC", "ARV")
    )
    assert arrivals > 0
    assert waits - arrivals == 2


OF_FEW_THREADS = ("_rows16", "_rows32")  # with registers enough for each


def has_asynchronous_products(kernels: cubins.Kernels, kernel: str) -> Counter[str]:
    """The opcodes of a kernel of warpgroups' products, none of which waits by itself."""
    needs(kernels, kernel)
    opcodes = cubins.opcodes(kernels.code[kernel])
    products = count(opcodes, r"[HQ]GMMA\.")
    assert products, "no warpgroup product"
    # Where ptxas lacks registers it waits for each product by itself (C7510, C7512, C7513).
    assert count(opcodes, r"WARPGROUP\.DEPBAR\b") <= products // 2
    if not kernel.endswith(OF_FEW_THREADS):
        assert count(opcodes, "USETMAXREG") == 2, "setmaxnreg was ignored (C7508)"
    assert count(opcodes, r"UTMALDG\.")
    return opcodes


OF_TWO_CONSUMERS = ("sm90_latent", "sm90_wide")  # which share rows


@pytest.mark.parametrize(
    "kernel",
    [n for f in OF_TWO_CONSUMERS for n in kernels_read(f) if not n.endswith("_combine")],
)
def test_products_of_shared_rows_are_asynchronous(kernels: cubins.Kernels, kernel: str) -> None:
    has_asynchronous_products(kernels, kernel)


@pytest.mark.parametrize(
    "kernel", [n for n in kernels_read("sm90") if not n.startswith(OF_TWO_CONSUMERS)]
)
def test_wgmma_runs_asynchronously(kernels: cubins.Kernels, kernel: str) -> None:
    opcodes = has_asynchronous_products(kernels, kernel)
    # Results of the narrow tiles go by way of shared memory, of the others and of 8-bit inputs 16
    # bytes a lane.
    plain = re.sub("(_varlen|_short|_pairs|_cached)+$", "", kernel)
    by_tma = "float8" not in kernel and not plain.endswith(("_128", "_192", "_v128", "_256"))
    assert bool(count(opcodes, r"UTMASTG\.")) == by_tma
    assert bool(count(opcodes, r"STG\.E\.128\b")) != by_tma

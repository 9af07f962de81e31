"""Lengths in a GPU's memory that nobody could check, and slices of larger batches, on every kernel.

Whatever cu_seqlens and seqused_k hold, nothing outside the tensors is written, what the sequences
have of them is right, rows of no sequence stay as they are, and the GPU's context lives on.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpu_checks import DEVICE, HALF, HOPPER, assert_close, attend, normal, torch

import dlattn

pytestmark = pytest.mark.gpu

LEAST, MOST = -(2**31), 2**31 - 1
ROWS_Q, ROWS_K = 700, 650  # of the tensors
BAND = 512  # rows before and after them
POISON = -77.0

# Kernels by name, with the head_dim they are tried with.
KERNELS = [
    ("scalar", "float32", 64),
    *(
        (kernel, dtype, dim)
        for dtype in HALF
        for kernel, dim in (
            ("scalar", 64),
            ("wmma_qk", 64),
            ("wmma_smem", 64),
            ("wmma_halves", 320),
            ("wmma:wide", 64),
            ("wmma:wide", 128),
            ("wmma:narrow+unpacked", 64),
            ("wmma:narrow+packed", 64),
            ("wmma:pipelined", 192),
            ("wmma:split+unpacked", 64),
            ("wmma:split", 128),
            ("wmma:general", 60),
            ("wmma:general", 256),
            ("decode:rows16", 64),
            ("decode:rows32", 128),
            ("auto", 128),
        )
    ),
    *(("sm90", dtype, dim) for dtype in HALF for dim in (64, 96, 128, 192, 256) if HOPPER),
]
# The values of cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, and seqused_k.
SLICES: list[tuple[Any, ...]] = [
    ([37, 50, 50, 120], [20, 60, 63, 140], 70, 77),
    ([0, 13, 80], [400, 520, 650], 67, 130),
    ([600, 601, 680], [300, 340, 625], 79, 285),
    ([129, 500, 700], [5, 90, 600], 371, 510, [70, 300]),
    ([650, 700], [0, 650], 50, 650),
]
HOSTILE: list[tuple[Any, ...]] = [
    ([350, 20, 480, 10], [290, 40, 500, 5], 460, 460),
    ([700, 300, 100, 0], [0, 40, 80, 120], 700, 40),
    ([0, 340, 100_000], [0, 60, 100_000], 400, 600),
    ([1000, 2000, 3000], [651, 652, 800], 500, 500),
    ([0, 40, 700], [10_000, 10_030, 11_000], 660, 90),
    ([0, 40, MOST], [0, 60, MOST], 700, 650),
    ([MOST, MOST, MOST], [MOST, MOST, MOST], 100, 100),
    ([-5, 20, 400], [-70, 10, 400], 400, 400),
    ([LEAST, 300, 600], [LEAST, 300, 600], 300, 300),
    ([LEAST, MOST, LEAST, MOST], [MOST, LEAST, MOST, LEAST], 700, 650),
    ([10, LEAST], [10, LEAST], 700, 650),
    ([0, 200, 400, 500, 600], [0, 130, 260, 390, 520], 200, 130, [-3, 1000, LEAST, MOST]),
    # Sequences longer than max_seqlen, and a max_seqlen longer than the tensors.
    ([0, 400, 700], [0, 420, 650], 33, 47),
    ([0, 5000], [0, 5000], 4000, 6000),
    # No sequences.
]
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (100, None), "sinks": True},
]
# The kernels that have them, with varlen batches.
TERMS = [("scalar", 64), ("wmma:general", 64), ("wmma:general", 100)] + [
    ("sm90", dim) for dim in (64, 128, 256) if HOPPER
]


def rows_of(starts: list[int], b: int, total: int, longest: int) -> tuple[int, int]:
    """The first row of sequence b, and the one after its last."""
    start = min(max(starts[b], 0), total)
    end = min(max(starts[b + 1], start), total)
    return start, min(end, start + longest)


def banded(x: Any, value: float) -> tuple[Any, Any]:
    """The same rows amid others of `value`: all of them, and those in the middle."""
    band = torch.full((BAND, *x.shape[1:]), value, dtype=x.dtype, device=x.device)
    whole = torch.cat([band, x, band])
    return whole, whole[BAND : BAND + len(x)]


def canaries(like: Any) -> list[Any]:
    """Tensors of that size with room for another one between every two of them.

    The caching allocator gives lse, which the library has it allocate, one of those places.
    """
    all_of_them = [torch.full_like(like, POISON) for _ in range(32)]
    torch.cuda.synchronize()
    return all_of_them[::2]


def attend_lengths(kernel: str, dtype: str, dim: int, lengths: Any, **options: Any) -> None:
    """Run `kernel`, look at the surroundings of its results and compare these with float64."""
    starts_q, starts_k, max_q, max_k, *used = lengths
    heads, heads_kv, batch = 4, 2, len(starts_q) - 1
    _, q = banded(normal(ROWS_Q, heads, dim, dtype=dtype, seed=1), math.nan)
    _, k = banded(normal(ROWS_K, heads_kv, dim, dtype=dtype, seed=2), math.nan)
    _, v = banded(normal(ROWS_K, heads_kv, dim, dtype=dtype, seed=3, offset=0.5), math.nan)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, heads, device=DEVICE)
    whole, out = banded(torch.full_like(q, POISON), POISON)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts_q, starts_k))
    seqused = torch.tensor(used[0], dtype=torch.int32, device=DEVICE) if used else None
    guards = canaries(torch.empty(heads, ROWS_Q, device=DEVICE))
    _, lse = dlattn.attention_varlen(
        q, k, v, cu_q, cu_k, max_q, max_k,
        seqused_k=seqused, kernel=kernel, out=out, return_lse=True, **options,
    )  # fmt: skip
    torch.cuda.synchronize()  # a context that is no more says so here
    assert all((guard == POISON).all() for guard in guards), "wrote beside lse"
    assert (whole[:BAND] == POISON).all(), "wrote before out"
    assert (whole[BAND + ROWS_Q :] == POISON).all(), "wrote after out"

    owners = torch.zeros(ROWS_Q, dtype=torch.int32, device=DEVICE)
    rows = [rows_of(starts_q, b, ROWS_Q, max_q) for b in range(batch)]
    for first, end in rows:
        owners[first:end] += 1
    assert (out[owners == 0] == POISON).all(), "wrote to rows of no sequence"
    for b, (first, end) in enumerate(rows):
        # Where sequences overlap, either's results may be the last.
        alone = owners[first:end] == 1
        if not alone.any():
            continue
        first_key, end_key = rows_of(starts_k, b, ROWS_K, max_k)
        if used:
            end_key = first_key + min(max(used[0][b], 0), end_key - first_key)
        keys = slice(first_key, end_key)
        own = {
            name: x[b : b + 1, :, : end - first, : end_key - first_key]
            if name in ("bias", "mask")
            else x
            for name, x in options.items()
        }
        parts = (q[None, first:end], k[None, keys], v[None, keys])
        want, want_lse = attend(*parts, torch.float64, **own)
        plain, plain_lse = attend(*parts, torch.float32, **own)
        assert_close(out[first:end][alone], want[0][alone], plain[0][alone], dtype, f"out {b}")
        assert_close(
            lse[:, first:end][:, alone],
            want_lse[0][:, alone],
            plain_lse[0][:, alone],
            "float32",
            f"lse {b}",
        )


@pytest.mark.parametrize(("kernel", "dtype", "dim"), KERNELS)
@pytest.mark.parametrize("lengths", SLICES, ids=str)
def test_slices_of_a_pack(kernel: str, dtype: str, dim: int, lengths: Any) -> None:
    for options in FEATURES:
        attend_lengths(kernel, dtype, dim, lengths, **options)


@pytest.mark.parametrize(("kernel", "dtype", "dim"), KERNELS)
@pytest.mark.parametrize("lengths", HOSTILE, ids=str)
def test_hostile_lengths(kernel: str, dtype: str, dim: int, lengths: Any) -> None:
    for options in FEATURES:
        attend_lengths(kernel, dtype, dim, lengths, **options)


@pytest.mark.parametrize(("kernel", "dim"), TERMS)
@pytest.mark.parametrize("lengths", SLICES + HOSTILE, ids=str)
def test_score_terms(kernel: str, dim: int, lengths: Any) -> None:
    slopes = torch.tensor([0.1, -0.05, 0.3, 0.0], device=DEVICE)
    attend_lengths(kernel, "float16", dim, lengths, causal=True, softcap=5.0, alibi_slopes=slopes)


@pytest.mark.parametrize("kernel", ["scalar", "wmma:general"])
@pytest.mark.parametrize("lengths", SLICES + HOSTILE[:-1], ids=str)
def test_bias_and_mask_are_as_large_as_the_longest(kernel: str, lengths: Any) -> None:
    """They have max_seqlen_q by max_seqlen_k elements for each sequence, however long it is."""
    shape = (len(lengths[0]) - 1, 4, lengths[2], lengths[3])
    if math.prod(shape) > 2**25:
        shape = (shape[0], 1, *shape[2:])
    bias = normal(*shape, dtype="float32", seed=4)
    mask = normal(*shape, dtype="float32", seed=5) > -1
    attend_lengths(kernel, "float16", 64, lengths, bias=bias, mask=mask)


@pytest.mark.parametrize(("kernel", "dtype", "dim"), KERNELS)
def test_a_fine_call_after_all_of_them(kernel: str, dtype: str, dim: int) -> None:
    attend_lengths(kernel, dtype, dim, ([0, 400, 700], [0, 350, 650], 400, 350), causal=True)

"""Head dims of 257 to 512, which `wmma_halves` and `sm90_wide` have, against float64."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_checks import CAUSAL, DEVICE, HALF, check, normal, padded, qkv, torch

import dlattn

pytestmark = pytest.mark.gpu

KERNELS = ["auto", "wmma_halves"]
LENGTHS = [
    (1, 1), (1, 200), (15, 17), (17, 31), (32, 33), (63, 64), (65, 63), (100, 173), (173, 100),
    (257, 129),
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_lengths(dtype: str, seqlen_q: int, seqlen_k: int, causal: Any) -> None:
    check("wmma_halves", *qkv(dtype, seqlen_q, seqlen_k, dim=512), causal=causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("dim", "dim_v"), [(257, 257), (320, 320), (504, 511), (512, 40), (64, 512), (272, 300)]
)
def test_head_dims(kernel: str, dtype: str, dim: int, dim_v: int) -> None:
    check(kernel, *qkv(dtype, 75, 190, dim=dim, dim_v=dim_v), causal=True)


@pytest.mark.parametrize("dtype", HALF)
def test_many_rows(dtype: str) -> None:
    check("auto", *qkv(dtype, 2048, 2048, heads=8, dim=512), causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [320, 512])
def test_features(dtype: str, dim: int) -> None:
    q, k, v = qkv(dtype, 70, 150, dim=dim)
    mask = normal(2, 1, 70, 150, dtype="float32", seed=3) > 0
    options: dict[str, Any] = {
        "window": {"window": (20, 5)},
        "softcap": {"softcap": 5.0},
        "bias": {"bias": normal(2, 4, 70, 150, dtype=dtype, seed=4)},
        "bias in float32": {"bias": normal(1, 4, 1, 150, dtype="float32", seed=5)},
        "mask": {"mask": mask},
        "alibi_slopes": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.5, 1.0], device=DEVICE)},
        "sinks": {"sinks": torch.tensor([0.5, 3.0, -1.0, 0.0], device=DEVICE)},
    }
    for each in options.values():
        check("wmma_halves", q, k, v, **each)
    together = {name: x for each in options.values() for name, x in each.items()}
    check("wmma_halves", q, k, v, causal="top_left", **together)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("pad", "start"), [(8, 0), (4, 4), (2, 2), (1, 1)])
def test_alignments(dtype: str, pad: int, start: int) -> None:
    q, k, v = (padded(x, pad, start) for x in qkv(dtype, 70, 150, dim=320))
    out = padded(torch.empty_like(q), pad, start)
    check("wmma_halves", q, k, v, out, causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("constant", [False, True])
def test_rows_of_many_keys(dtype: str, constant: bool) -> None:
    """Accumulators are set aside, or would lose a part of V's mean."""
    q = normal(1, 20, 1, 512, dtype=dtype, seed=0)
    k = normal(1, 200_000, 1, 512, dtype=dtype, seed=1)
    v = normal(1, 1 if constant else 200_000, 1, 512, dtype=dtype, seed=2, offset=1.0)
    check("wmma_halves", q, k, v.expand(1, 200_000, 1, 512))
    if not constant:  # the maximum rises at the end, when they are set aside
        k[:, -1] = 4 * q[:, -1:, 0]
        check("wmma_halves", q, k, v)


@pytest.mark.parametrize("dtype", HALF)
def test_a_sequence_has_the_same_bits_in_any_batch(dtype: str) -> None:
    lengths_q, lengths_k = (17, 0, 130, 65), (300, 40, 129, 0)
    q, k, v = (
        normal(sum(lengths), heads, 512, dtype=dtype, seed=seed)
        for lengths, heads, seed in ((lengths_q, 4, 0), (lengths_k, 2, 1), (lengths_k, 2, 2))
    )
    starts = [
        torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    ]
    options: dict[str, Any] = {"causal": True, "kernel": "wmma_halves"}
    together = dlattn.attention_varlen(q, k, v, *starts, 130, 300, **options)
    for i in range(4):
        rows, keys = (slice(int(x[i]), int(x[i + 1])) for x in starts)
        alone = dlattn.attention(q[None, rows], k[None, keys], v[None, keys], **options)
        assert torch.equal(together[rows], alone[0])


# By wgmma, where the GPU has it. Clusters of two thread blocks have 128 rows, tiles 64 keys.
WIDE_LENGTHS = [
    (1, 1), (1, 64), (63, 65), (64, 300), (65, 63), (127, 129), (129, 128), (200, 500), (300, 40),
    (1025, 1090),
]  # fmt: skip


def wide(*tensors: Any, **options: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm90_wide needs compute capability 9.0")
    check("sm90_wide", *tensors, **options)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), WIDE_LENGTHS)
def test_lengths_by_wgmma(dtype: str, seqlen_q: int, seqlen_k: int, causal: Any) -> None:
    wide(*qkv(dtype, seqlen_q, seqlen_k, dim=512), causal=causal)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(264, 264), (320, 320), (336, 328), (384, 384), (384, 64), (504, 512), (512, 40), (64, 512)],
)
def test_head_dims_by_wgmma(dtype: str, dim: int, dim_v: int) -> None:
    q, k, v = qkv(dtype, 150, 390, dim=dim, dim_v=dim_v)
    wide(q, k, v, causal=True)
    sinks = torch.tensor([0.5, 3.0, -1.0, 0.0], device=DEVICE)
    wide(q, k, v, window=(70, 5), sinks=sinks)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [320, 384, 512])
def test_many_rows_by_wgmma(dim: int, dtype: str) -> None:
    """More clusters than the GPU has at one time, whose slots are used many times."""
    tensors = qkv(dtype, 2048, 2048, heads=8, dim=dim)
    wide(*tensors)
    wide(*tensors, causal=True)
    first, *others = (dlattn.attention(*tensors, kernel="sm90_wide") for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


def test_what_no_gpu_has() -> None:
    q, k, v = qkv("float16", 20, 40, dim=512)
    with pytest.raises(dlattn.UnsupportedError, match="head_dim is 512; accepted: 1 to 256"):
        dlattn.attention(q.float(), k.float(), v.float())
    lengths = torch.tensor([40, 30], dtype=torch.int32, device=DEVICE)
    with pytest.raises(dlattn.UnsupportedError, match="head_dim is 512; accepted: 1 to 256"):
        dlattn.attention_with_kvcache(q.float(), k.float(), v.float(), seqused_k=lengths)
    small = qkv("float16", 20, 40, dim=256)
    with pytest.raises(dlattn.UnsupportedError, match="accepted: one of them above 256"):
        dlattn.attention(*small, kernel="wmma_halves")

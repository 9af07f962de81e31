"""Rows of a million keys, whose products with V a tensor core must not add up in one go.

V has a mean, so that what an accumulator cuts off goes one way, or P and V are constant; references
are raised before and after something has been set aside, in some of the rows of a warp.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_checks import DEVICE, HALF, HOPPER, attend, check, normal, torch

import dlattn

pytestmark = pytest.mark.gpu

KEYS = (1 << 20) + 13
KERNELS = ["auto", "wmma", "wmma:general"]


def inputs(dtype: str, dim: int, seqlen_q: int = 70, seqlen_k: int = KEYS) -> list[Any]:
    return [
        normal(1, rows, 1, dim, dtype=dtype, seed=seed)
        for seed, rows in enumerate((seqlen_q, seqlen_k, seqlen_k))
    ]


def raise_half(q: Any, k: Any, first: int, end: int) -> None:
    """Raise the scores of keys first .. end - 1 by 15 in every other row, and lower the others'."""
    q[..., 0] = torch.where(torch.arange(q.shape[1], device=DEVICE) % 2 == 0, 4, -4)[None, :, None]
    k[..., 0] = 0
    k[:, first:end, :, 0] = 15 / 4 * q.shape[3] ** 0.5


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_million_keys(kernel: str, dim: int, dtype: str) -> None:
    check(kernel, *inputs(dtype, dim))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("first", "end"), [(0, KEYS - 200_000), (400_000, 400_100)])
def test_references_raised_on_the_way(kernel: str, dim: int, first: int, end: int) -> None:
    q, k, v = inputs("float16", dim)
    raise_half(q, k, first, end)
    check(kernel, q, k, v)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_million_keys_of_edge_tiles(kernel: str, dim: int) -> None:
    q, k, v = inputs("float16", dim, seqlen_q=300)
    check(kernel, q, k, v, causal=True)
    check(kernel, q, k, v, window=(300_000, 10), causal=False)


@pytest.mark.parametrize("dim", [40, 64, 128, 256])
@pytest.mark.parametrize("kernel", ["auto", "wmma"])
def test_million_keys_with_terms(kernel: str, dim: int) -> None:
    q, k, v = inputs("float16", dim, seqlen_q=20)
    check(kernel, q, k, v, softcap=20.0)
    check(kernel, q, k, v, alibi_slopes=torch.tensor([2e-5], device=DEVICE))
    bias = normal(1, 1, 20, KEYS + 3, dtype="float16", seed=9)[..., :KEYS]
    check(kernel, q, k, v, bias=bias)


@pytest.mark.parametrize("kernel", KERNELS)
def test_million_keys_of_packs_and_shared_heads(kernel: str) -> None:
    q = normal(1, 3, 8, 64, dtype="float16", seed=0)
    k, v = (normal(1, KEYS, 2, 64, dtype="float16", seed=seed) for seed in (1, 2))
    check(kernel, q, k, v)
    check(kernel, q[:, :1], k, v)
    lengths_q, lengths_k = ([0, 1, 3], [0, 500_000, KEYS])
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths_q, lengths_k))
    out = dlattn.attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=2,
        max_seqlen_k=KEYS - 500_000, kernel=kernel,
    )  # fmt: skip
    for i in range(2):
        rows, keys = slice(*lengths_q[i : i + 2]), slice(*lengths_k[i : i + 2])
        parts = q[:, rows], k[:, keys], v[:, keys]
        want, _ = attend(*parts, torch.float64)
        plain, _ = attend(*parts, torch.float32)
        bound = 2 * float((plain - want).abs().max()) + 2.0**-12
        assert float((out[None, rows] - want).abs().max()) <= bound


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("auto", "float32"), *((kernel, dtype) for kernel in ("scalar", "wmma_qk") for dtype in HALF)],
)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seqlen_k", [4096, 16400, KEYS])
def test_constant_p_and_v(kernel: str, dtype: str, dim: int, seqlen_k: int) -> None:
    """All are rounded the same way, where P V runs on CUDA cores."""
    q = normal(1, 70, 1, dim, dtype=dtype, seed=0)
    k, v = (
        normal(1, 1, 1, dim, dtype=dtype, seed=seed).expand(1, seqlen_k, 1, dim) for seed in (1, 2)
    )
    check(kernel, q, k, v)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_constant_v_of_accumulators_set_aside(dim: int) -> None:
    """A tensor core's sum cuts off less than a rounding to float16 before it is set aside."""
    q, k = (normal(1, n, 1, dim, dtype="float16", seed=n) for n in (20, 200_000))
    v = normal(1, 1, 1, dim, dtype="float16", seed=2, offset=1.0)
    check("wmma:general", q, k, v.expand(1, 200_000, 1, dim))


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_constant_p_and_v_of_wide_heads(dtype: str) -> None:
    test_constant_p_and_v("scalar", dtype, 256, 131_073)


@pytest.mark.parametrize(
    ("kernel", "options", "most"),
    [("wmma_smem", {}, 131072), ("wmma:split", {}, 524288)]
    + [(f"wmma:{variant}", {}, 131072) for variant in ("wide", "narrow")]
    + ([("wmma:persistent", {}, 131072), ("sm90", {}, 131072)] if HOPPER else []),
)
def test_what_sets_nothing_aside_refuses_more(
    kernel: str, options: dict[str, Any], most: int
) -> None:
    q, k, v = inputs("float16", 96, seqlen_q=20, seqlen_k=most + 1)
    check(kernel, q, k[:, :-1], v[:, :-1], **options)
    with pytest.raises(dlattn.UnsupportedError, match=rf"seqlen_k is {most + 1}; accepted.*{most}"):
        dlattn.attention(q, k, v, kernel=kernel, **options)

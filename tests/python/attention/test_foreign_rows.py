"""Rows of no sequence are of no consequence: gaps between packed sequences, keys behind those in
use, rows about a tensor that is a view of a larger one. NaN and infinity there change no bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import dlattn

torch = pytest.importorskip("torch")

FILLERS = (math.nan, math.inf)
PRECISIONS = ("int8_fp8", "int8_fp16", "fp8")
GPU_KERNELS = [
    ("scalar", "float32", 64),
    *(
        (kernel, dtype, dim)
        for dtype in ("float16", "bfloat16")
        for kernel, dim in (
            ("scalar", 64),
            ("wmma_qk", 64),
            ("wmma_smem", 64),
            ("wmma_halves", 320),
            ("wmma:wide", 64),
            ("wmma:wide", 128),
            ("wmma:narrow", 64),
            ("wmma:pipelined", 192),
            ("wmma:split", 128),
            ("wmma:persistent", 128),
            ("wmma:general", 60),
            ("wmma:general", 256),
            ("decode:rows16", 64),
            ("decode:rows32", 128),
            ("sm90", 64),
            ("sm90", 96),
            ("sm90", 256),
        )
    ),
    ("auto", "float8_e4m3fn", 64),
    ("auto", "float8_e4m3fn", 128),
]
CPU_KERNELS = [("cpu", dtype, 40) for dtype in ("float16", "bfloat16", "float32", "float64")]
CPU_KERNELS += [("cpu", "float8_e4m3fn", 64)]


def on(device: str, kernels: Any) -> list[Any]:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [
        pytest.param(device, *(k if isinstance(k, tuple) else (k,)), marks=marks) for k in kernels
    ]


every_kernel = pytest.mark.parametrize(
    ("device", "kernel", "dtype", "dim"), on("cpu", CPU_KERNELS) + on("cuda", GPU_KERNELS)
)
every_precision = pytest.mark.parametrize(
    ("device", "precision"), on("cpu", PRECISIONS) + on("cuda", PRECISIONS)
)


def normal(*shape: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) + 0.25


def filled(x: Any, inside: Any, filler: float, device: str, dtype: str) -> Any:
    """x, with `filler` in the rows that are not `inside`; float8 has no infinity, and saturates."""
    if dtype.startswith("float8") and math.isinf(filler):
        filler = math.nan
    x = torch.where(inside.reshape(inside.shape + (1,) * (x.ndim - inside.ndim)), x, filler)
    return x.to(getattr(torch, dtype)).to(device)


def check(compute: Callable[[float], tuple[Any, Any] | None]) -> None:
    """`compute(filler)` has the bits it has with zeros; None where the kernel does not serve it."""
    want = compute(0.0)
    if want is None:
        return
    assert want[0].float().isfinite().all() and not want[1].isnan().any()
    assert want[0].float().abs().max() > 0.1
    for filler in FILLERS:
        for x, y in zip(compute(filler) or (), want, strict=True):
            assert torch.equal(x, y), filler


def served(support: Any, kernel: str) -> bool:
    """Whether a kernel serves a problem; of those that this build has, each serves some."""
    if kernel.partition(":")[0] not in ("auto", "cpu", *dlattn.info().kernels):
        pytest.skip(f"this build has no kernel {kernel}")
    return bool(support)


STARTS_Q, STARTS_K, USED = [3, 20, 20, 90, 190], [7, 60, 100, 230, 330], [40, 0, 129, 77]
ROWS_Q, ROWS_K, MAX_Q, MAX_K = 200, 340, 100, 130


def pack(device: str, dtype: str, dim: int, filler: float) -> tuple[Any, ...]:
    """Arguments of `attention_varlen`, whose sequences have gaps between them."""
    in_q, in_k = torch.zeros(ROWS_Q, dtype=torch.bool), torch.zeros(ROWS_K, dtype=torch.bool)
    in_q[STARTS_Q[0] : STARTS_Q[-1]] = True
    for start, count in zip(STARTS_K, USED, strict=False):
        in_k[start : start + count] = True
    heads = {"q": (4, in_q, ROWS_Q), "k": (2, in_k, ROWS_K), "v": (2, in_k, ROWS_K)}
    tensors = [
        filled(normal(rows, n, dim, seed=seed), inside, filler, device, dtype)
        for seed, (n, inside, rows) in enumerate(heads.values())
    ]
    lists = [torch.tensor(x, dtype=torch.int32, device=device) for x in (STARTS_Q, STARTS_K)]
    return (*tensors, *lists, MAX_Q, MAX_K)


def attend_pack(
    device: str, dtype: str, dim: int, filler: float, kernel: str = "auto", **options: Any
) -> tuple[Any, Any] | None:
    arguments = pack(device, dtype, dim, filler)
    options["seqused_k"] = torch.tensor(USED, dtype=torch.int32, device=device)
    q, k, v, *rest = arguments
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    asked = dict(zip(names, rest, strict=True))
    if not served(dlattn.supported(q, k, v, **asked, kernel=kernel, **options), kernel):
        return None
    out, lse = dlattn.attention_varlen(*arguments, return_lse=True, kernel=kernel, **options)
    inside = slice(STARTS_Q[0], STARTS_Q[-1])
    return out[inside], lse[:, inside]


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (30, None), "softcap": 3.0},
]


@every_kernel
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_packs_with_gaps(device: str, kernel: str, dtype: str, dim: int, features: Any) -> None:
    check(lambda filler: attend_pack(device, dtype, dim, filler, kernel, **features))


@every_precision
@pytest.mark.parametrize("causal", [False, True])
def test_packs_with_gaps_in_8_bits(device: str, precision: str, causal: bool) -> None:
    for dtype in ("float16", "bfloat16"):
        check(
            lambda filler, dtype=dtype: attend_pack(
                device, dtype, 64, filler, causal=causal, precision=precision
            )
        )


def view(x: Any, filler: float, device: str, dtype: str) -> Any:
    """x as the middle of a tensor that has more rows before and behind those of each entry."""
    batch, rows, heads, dim = x.shape
    whole = torch.zeros(batch, rows + 150, heads, dim)
    whole[:, 11 : 11 + rows] = x
    inside = torch.zeros(batch, rows + 150, dtype=torch.bool)
    inside[:, 11 : 11 + rows] = True
    return filled(whole, inside, filler, device, dtype)[:, 11 : 11 + rows]


def attend_views(
    device: str, dtype: str, dim: int, filler: float, kernel: str = "auto", **options: Any
) -> tuple[Any, Any] | None:
    q, k, v = (
        view(normal(2, rows, heads, dim, seed=seed), filler, device, dtype)
        for seed, (rows, heads) in enumerate(((70, 4), (201, 2), (201, 2)))
    )
    if options.pop("bias", False):
        bias = normal(2, 70, 1, 201, seed=4)
        options["bias"] = view(bias, filler, device, dtype).transpose(1, 2)
    if not served(dlattn.supported(q, k, v, kernel=kernel, **options), kernel):
        return None
    out, lse = dlattn.attention(q, k, v, return_lse=True, kernel=kernel, **options)
    return out, lse


@every_kernel
@pytest.mark.parametrize("features", [*FEATURES, {"bias": True}], ids=str)
def test_views_of_larger_tensors(
    device: str, kernel: str, dtype: str, dim: int, features: Any
) -> None:
    check(lambda filler: attend_views(device, dtype, dim, filler, kernel, **features))


@every_precision
@pytest.mark.parametrize("causal", [False, True])
def test_views_of_larger_tensors_in_8_bits(device: str, precision: str, causal: bool) -> None:
    for dtype in ("float16", "bfloat16"):
        check(
            lambda filler, dtype=dtype: attend_views(
                device, dtype, 64, filler, causal=causal, precision=precision
            )
        )

"""Shared by the tests of the CUDA kernels: a float64 reference on the GPU, the bound, inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import dlattn
from dlattn.reference import bound_of

torch = pytest.importorskip("torch")

DEVICE = "cuda"
HALF = ["float16", "bfloat16"]
# sm90 is for compute capability 9.0, and builds for others lack it.
HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and "sm90" in dlattn.info().kernels
)
# Pairs of a kernel and a dtype that it serves.
SERVED = [
    ("scalar", "float32"),
    *(
        (kernel, dtype)
        for kernel in (
            "scalar",
            "wmma_qk",
            "wmma_smem",
            "wmma",
            "wmma:split",
            "wmma:general",
            "decode",
        )
        for dtype in HALF
    ),
    *(("sm90", dtype) for dtype in HALF if HOPPER),
]
CAUSAL = [False, "bottom_right", "top_left"]

every_kernel = pytest.mark.parametrize(("kernel", "dtype"), SERVED)


def visible_keys(seqlen_q: int, seqlen_k: int, causal: Any, window: Any) -> Any:
    shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
    position = torch.arange(seqlen_q, device=DEVICE)[:, None] + shift
    key = torch.arange(seqlen_k, device=DEVICE)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE)
    left, right = window
    if causal:
        seen &= key <= position
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen


def attend(
    q: Any,
    k: Any,
    v: Any,
    compute: Any,
    *,
    causal: Any = False,
    softmax_scale: float | None = None,
    window: Any = (None, None),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """Attention as it is defined, in the dtype `compute`; (batch, seqlen, heads, dim) in and out.

    In float32 the probabilities and the result are rounded to q's dtype: the plain computation.
    """
    dtype = q.dtype
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).to(compute) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scores = q @ k.transpose(2, 3) * (softmax_scale or 1 / math.sqrt(q.shape[3]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
        position = torch.arange(seqlen_q, device=DEVICE)[:, None] + shift
        distance = (position - torch.arange(seqlen_k, device=DEVICE)[None, :]).abs()
        scores = scores - alibi_slopes.to(compute)[..., None, None] * distance
    if bias is not None:
        scores = scores + bias.to(compute)
    seen = visible_keys(seqlen_q, seqlen_k, causal, window).expand(scores.shape)
    if mask is not None:
        seen = seen & mask
    scores = torch.where(seen, scores, -math.inf)
    if sinks is not None:
        sink = sinks.to(compute)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=3)
    lse = (
        torch.logsumexp(scores, dim=3)
        if scores.shape[3]
        else scores.new_full(q.shape[:3], -math.inf)
    )
    p = torch.exp(scores - torch.where(lse == -math.inf, 0, lse)[..., None])[..., :seqlen_k]
    if compute == torch.float32:
        p = p.to(dtype).to(compute)
    out = (p @ v).transpose(1, 2)
    return (out.to(dtype) if compute == torch.float32 else out), lse


def assert_close(got: Any, want: Any, plain: Any, dtype: str, what: str) -> None:
    want = want.double()
    got, plain = got.double(), plain.double()
    finite = want.isfinite()
    special = torch.where(finite, 0, want)
    assert torch.equal(
        torch.where(finite, 0, got).nan_to_num(nan=7.0), special.nan_to_num(nan=7.0)
    ), f"{what}: NaN or inf in other places than the reference"
    if not finite.any():
        return
    want, got, plain = want[finite], got[finite], plain[finite]
    # One rounding of the largest result is allowed: a plain probability close to 1 rounds more
    # finely than one that is not normalised. (flash-attn's own tests allow twice the error of 0.3
    # added and subtracted in the dtype, which is more.) In float32, a GPU's approximate exponential
    # and logarithm.
    largest = float(want.abs().max())
    rounding = torch.finfo(getattr(torch, dtype)).eps / 2 if dtype in HALF else 1e-5
    allowance = rounding * (largest if dtype in HALF else max(1.0, largest))
    bound = bound_of(dtype, float((plain - want).abs().max()), largest, allowance)
    errors = (got - want).abs()
    assert not errors.isnan().any(), f"{what}: NaN where the reference is finite"
    assert errors.max() <= bound, f"{what}: error {errors.max():.3e}, bound {bound:.3e}"


def check(kernel: str, q: Any, k: Any, v: Any, out: Any = None, **options: Any) -> None:
    """Run `kernel` on (batch, seqlen, heads, dim) views and compare out and lse."""
    dtype = str(q.dtype).removeprefix("torch.")
    if out is None:
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=DEVICE)
    out.fill_(math.nan)
    loaded = [options[name] for name in ("bias", "mask") if options.get(name) is not None]
    if kernel == "sm90" and not all(copied_in_boxes(x) for x in (q, k, v, out, *loaded)):
        lacks = r"sm90: .*accepted: (multiples of (8|16)|1$)|sm90: needs .* bytes of shared memory"
        with pytest.raises(dlattn.UnsupportedError, match=lacks):
            dlattn.attention(q, k, v, kernel=kernel, out=out, **options)
        return
    _, lse = dlattn.attention(q, k, v, kernel=kernel, out=out, return_lse=True, **options)
    want_out, want_lse = attend(q, k, v, torch.float64, **options)
    plain_out, plain_lse = attend(q, k, v, torch.float32, **options)
    assert_close(out, want_out, plain_out, dtype, "out")
    assert_close(lse, want_lse, plain_lse, "float32", "lse")


def copied_in_boxes(x: Any) -> bool:
    """Whether TMA, which sm90 copies with, takes a tensor: rows of 16-byte steps."""
    if x.numel() == 0:
        return True
    *outer, columns = zip(x.shape, x.stride(), strict=True)
    steps = [stride * x.element_size() for size, stride in outer if size > 1]
    neighbours = columns[0] == 1 or columns[1] == 1
    return neighbours and all(n % 16 == 0 for n in steps) and x.data_ptr() % 16 == 0


def normal(*shape: int, dtype: str, seed: int, offset: float = 0.3) -> Any:
    """Random normal plus an offset, so that outputs do not cancel and hide wrong indices."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(*shape, device=DEVICE, generator=generator) + offset
    return x.to(getattr(torch, dtype))


def qkv(
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 2,
    heads: int = 4,
    heads_kv: int = 2,
    dim: int = 64,
    dim_v: int | None = None,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    return (
        normal(batch, seqlen_q, heads, dim, dtype=dtype, seed=seed),
        normal(batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=seed + 1),
        normal(batch, seqlen_k, heads_kv, dim_v or dim, dtype=dtype, seed=seed + 2, offset=0.5),
    )


def padded(x: Any, pad: int, start: int = 0) -> Any:
    """The same values in rows that are `pad` elements longer, `start` elements into memory."""
    shape = (*x.shape[:3], x.shape[3] + pad)
    flat = torch.full((math.prod(shape) + start,), math.nan, dtype=x.dtype, device=x.device)
    view = flat[start:].view(shape)[..., : x.shape[3]]
    view.copy_(x)
    return view


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, which has run once before, and the call's result in it."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result

"""Kernels of float8_e4m3fn inputs, on a GPU, against float64 on what these stand for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gpu_checks import CAUSAL, DEVICE, assert_close, attend, normal, padded, torch, visible_keys

import dlattn

pytestmark = pytest.mark.gpu

FLOAT8 = getattr(torch, "float8_e4m3fn", None)
KERNELS = [name for name in dlattn.info().kernels if name in ("sm90_fp8", "wmma8")]
OUT_DTYPES = ("bfloat16", "float16", "float32")
DIMS = [64, 128, 192, 256]  # the tiles

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def inputs(
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 2,
    heads: int = 4,
    heads_kv: int = 2,
    dim: int = 64,
    dim_v: int | None = None,
    seed: int = 0,
    offset: float = 0.3,
) -> dict[str, Any]:
    """q, k and v, and their descales: random factors by KV head."""
    sizes = {
        "q": (seqlen_q, heads, dim),
        "k": (seqlen_k, heads_kv, dim),
        "v": (seqlen_k, heads_kv, dim_v or dim),
    }
    drawn: dict[str, Any] = {}
    for i, (name, (rows, count, width)) in enumerate(sizes.items()):
        x = normal(batch, rows, count, width, dtype="float32", seed=seed + i, offset=offset)
        drawn[name] = x.to(FLOAT8)
        factors = normal(batch, heads_kv, dtype="float32", seed=seed + 10 + i)
        drawn[f"{name}_descale"] = torch.exp2(0.5 * factors)
    return drawn


def dequantized(tensors: dict[str, Any]) -> list[Any]:
    """q, k and v as they are meant, in float64."""
    meant = []
    heads = tensors["q"].shape[2]
    for name in "qkv":
        x = tensors[name].double()
        descale = tensors.get(f"{name}_descale")
        if descale is not None:
            descale = descale.double().expand(x.shape[0], descale.shape[-1])
            if name == "q" and descale.shape[1] not in (1, heads):
                descale = descale.repeat_interleave(heads // descale.shape[1], 1)
            x = x * descale[:, None, :, None]
        meant.append(x)
    return meant


def exponent(x: Any, least: int) -> Any:
    return torch.where(x == 0, -200, torch.frexp(x.float()).exponent - 1).clamp(min=least)


def products(q: Any, k: Any) -> Any:
    """q·k as tensor cores add up e4m3 (arXiv:2511.10909).

    32 products and the sum so far are aligned to the largest exponent and cut to 13 bits behind it,
    and so is the sum.
    """
    sums = torch.zeros(*q.shape[:3], k.shape[2], device=DEVICE)
    for d in range(0, q.shape[3], 32):
        a, b = q[..., :, None, d : d + 32], k[..., None, :, d : d + 32]
        terms = a * b
        scales = torch.where(terms == 0, -200, exponent(a, -6) + exponent(b, -6))
        unit = torch.maximum(scales.amax(-1), exponent(sums, -200)).clamp(min=-100) - 13
        shift = torch.exp2(-unit.float())
        whole = torch.trunc(terms * shift[..., None]).sum(-1) + torch.trunc(sums * shift)
        sums = whole / shift
        sums = (sums.view(torch.int32) & ~0x3FF).view(torch.float32)
    return sums


def plain(tensors: dict[str, Any], out_dtype: str, **options: Any) -> tuple[Any, Any]:
    """The plain computation in 8 bits: cut accumulators of q·k, probabilities of e4m3 up to 256."""
    q, k, v = (tensors[name].float().transpose(1, 2) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    ones = torch.ones(q.shape[0], k.shape[1], device=DEVICE)
    factors = {name: tensors.get(f"{name}_descale", ones) for name in "qkv"}
    factors = {n: x.expand(q.shape[0], x.shape[-1]) for n, x in factors.items()}
    by_head = [
        x if x.shape[1] == q.shape[1] else x.expand(-1, k.shape[1]).repeat_interleave(group, 1)
        for x in factors.values()
    ]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    sums = products(q, k)
    scale = options.get("softmax_scale") or 1 / math.sqrt(q.shape[3])
    scores = sums * (scale * by_head[0] * by_head[1])[..., None, None]
    cap = options.get("softcap", 0.0)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    window = options.get("window", (None, None))
    seen = visible_keys(q.shape[2], k.shape[2], options.get("causal", False), window)
    if (bias := options.get("bias")) is not None:
        scores = scores + bias.float()
    if (mask := options.get("mask")) is not None:
        seen = seen & mask
    scores = torch.where(seen, scores, -math.inf)
    sinks = options.get("sinks")
    logits = scores
    if sinks is not None:
        sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sink], dim=3)
    if logits.shape[3] == 0:
        lse = scores.new_full(scores.shape[:3], -math.inf)
        return torch.zeros(*q.shape[:3], v.shape[3], device=DEVICE).transpose(1, 2), lse
    lse = torch.logsumexp(logits, dim=3)
    top = scores.amax(dim=3, keepdim=True) if scores.shape[3] else scores.new_zeros(1)
    top = torch.where(top == -math.inf, 0, top)
    p = (256 * torch.exp(scores - top)).to(FLOAT8).float() / 256
    share = torch.exp(top - torch.where(lse == -math.inf, 0, lse)[..., None])
    out = (p @ v) * share * by_head[2][..., None, None]
    return out.transpose(1, 2).to(getattr(torch, out_dtype)), lse


def check(
    kernel: str,
    tensors: dict[str, Any],
    out: Any = None,
    out_dtype: str = "float32",
    **options: Any,
) -> None:
    """Run `kernel` and compare; skip what it says that it lacks."""
    support = dlattn.supported(**tensors, kernel=kernel, **options)
    if not support:
        assert "does not implement" in str(support) or "accepted: " in str(support), str(support)
        pytest.skip(str(support))
    if out is None:
        shape = (*tensors["q"].shape[:3], tensors["v"].shape[3])
        out = torch.empty(shape, dtype=getattr(torch, out_dtype), device=DEVICE)
    out.fill_(math.nan)
    _, lse = dlattn.attention(**tensors, kernel=kernel, out=out, return_lse=True, **options)
    want_out, want_lse = attend(*dequantized(tensors), torch.float64, **options)
    plain_out, plain_lse = plain(tensors, out_dtype, **options)
    assert_close(out, want_out, plain_out, out_dtype, "out")
    assert_close(lse, want_lse, plain_lse, "float32", "lse")


@every_kernel
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", DIMS)
def test_lengths(kernel: str, dim: int, causal: Any) -> None:
    for seqlen in (1, 9, 12, 63, 64, 65, 127, 128, 129, 200, 503):
        check(kernel, inputs(seqlen, seqlen, dim=dim), causal=causal)
    for seqlen_q, seqlen_k in ((1, 300), (70, 5), (5, 70), (130, 257), (300, 40), (3, 0)):
        check(kernel, inputs(seqlen_q, seqlen_k, dim=dim), causal=causal)


@every_kernel
@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 112, 144, 160, 192, 208, 240])
def test_head_dims(kernel: str, dim: int) -> None:
    check(kernel, inputs(100, 150, dim=dim))
    check(kernel, inputs(100, 150, dim=dim), causal=True)
    check(kernel, inputs(300, 410, dim=dim), causal=True)


@every_kernel
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(64, 128), (128, 64), (96, 32), (192, 128), (48, 16), (32, 64), (256, 80), (160, 208)],
)
def test_head_dim_of_v(kernel: str, dim: int, dim_v: int) -> None:
    check(kernel, inputs(100, 150, dim=dim, dim_v=dim_v), causal=True)


@every_kernel
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_dtypes_of_out(kernel: str, dim: int, out_dtype: str) -> None:
    check(kernel, inputs(200, 333, dim=dim), out_dtype=out_dtype)
    check(kernel, inputs(129, 70, dim=dim), out_dtype=out_dtype, causal=True)


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 3), (5, 5)])
def test_heads(kernel: str, heads: tuple[int, int], dim: int) -> None:
    drawn = inputs(150, 200, heads=heads[0], heads_kv=heads[1], dim=dim, batch=3)
    check(kernel, drawn, causal=True)
    by_head = torch.exp2(normal(3, heads[0], dtype="float32", seed=5))
    check(kernel, {**drawn, "q_descale": by_head})
    check(kernel, {**drawn, "k_descale": by_head[:1, :1], "v_descale": by_head[:, :1]})
    check(kernel, {name: drawn[name] for name in "qkv"})


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [(0, 0), (70, 0), (50, 40), (None, 3), (20, None), (300, 300)])
def test_windows(kernel: str, dim: int, window: Any) -> None:
    for causal in CAUSAL:
        check(kernel, inputs(260, 300, dim=dim), window=window, causal=causal)


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
def test_sinks(kernel: str, dim: int) -> None:
    sinks = torch.tensor([1.0, -math.inf, 30.0, -2.0], device=DEVICE)
    check(kernel, inputs(150, 200, dim=dim), sinks=sinks, causal=True)
    check(kernel, inputs(150, 20, dim=dim), sinks=sinks, causal=True)


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bias_and_mask(kernel: str, dim: int, dtype: str) -> None:
    bias = normal(4, 260, 300, dtype=dtype, seed=7)
    bias[:, 5, ::2] = -math.inf
    mask = normal(2, 1, 260, 300, dtype="float32", seed=8) > -1.0
    mask[:, :, 7] = False
    drawn = inputs(260, 300, dim=dim)
    check(kernel, drawn, bias=bias)
    check(kernel, drawn, mask=mask, causal=True)
    check(kernel, drawn, bias=bias[0], mask=mask[0, 0], causal="top_left")
    check(kernel, drawn, bias=bias[:, :1], mask=mask.transpose(-1, -2).contiguous().mT)


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
def test_softcap(kernel: str, dim: int) -> None:
    check(kernel, inputs(150, 200, dim=dim), softcap=2.0, causal=True)
    check(kernel, inputs(150, 200, dim=dim), softcap=50.0)


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
def test_views(kernel: str, dim: int) -> None:
    drawn = inputs(150, 200, dim=dim)
    views = {n: padded(x, 16) if n in "qkv" else x for n, x in drawn.items()}
    out = padded(torch.empty(2, 150, 4, dim, device=DEVICE, dtype=torch.bfloat16), 8)
    check(kernel, views, out, "bfloat16")
    heads_first = {
        n: x.transpose(1, 2).contiguous().transpose(1, 2) if n in "qkv" else x
        for n, x in drawn.items()
    }
    check(kernel, heads_first, causal=True)
    shared = {n: x[:1].expand(2, *x.shape[1:]) if n in "kv" else x for n, x in drawn.items()}
    check(kernel, shared)
    odd = {n: padded(x, 3, 1) if n in "qkv" else x for n, x in drawn.items()}
    check(kernel, odd)  # or a refusal


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seqlen_k", [700, 1000, 3000])
def test_peaked_and_rising_scores(kernel: str, dim: int, seqlen_k: int) -> None:
    for scale in (1.0, 4.0):
        check(kernel, inputs(200, seqlen_k, dim=dim), softmax_scale=scale)
    drawn = inputs(200, seqlen_k, dim=dim)
    for order in (False, True):  # rows' maxima come early, or late
        steps = torch.linspace(0, 8, seqlen_k, device=DEVICE)
        steps = steps.flip(0) if order else steps
        keys = torch.zeros_like(drawn["k"].float())
        keys[..., 0] = steps[None, :, None]
        queries = torch.zeros_like(drawn["q"].float())
        queries[..., 0] = 16.0
        check(kernel, {**drawn, "q": queries.to(FLOAT8), "k": keys.to(FLOAT8)}, softmax_scale=0.5)


@every_kernel
def test_a_short_sequence(kernel: str) -> None:
    """Descales by head from the largest element, N(0, 1): the error is at most 1e-2."""
    tensors: dict[str, Any] = {}
    for i, name in enumerate("qkv"):
        x = normal(1, 512, 8, 64, dtype="float32", seed=i, offset=0.0)
        descale = x.abs().amax(dim=(1, 3)) / 448
        tensors[name] = (x / descale[:, None, :, None]).to(FLOAT8)
        tensors[f"{name}_descale"] = descale
    for causal, most in ((False, 1e-2), (True, 6e-2)):
        out = dlattn.attention(**tensors, causal=causal, kernel=kernel, out_dtype="float32")
        want, _ = attend(*dequantized(tensors), torch.float64, causal=causal)
        error = (out - want).abs().max()
        assert error <= most
        if not causal:
            assert (out - want).norm() <= 0.027 * want.norm()


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seqlen_k", [2048, 32768, 131072])
def test_the_mean_of_v_is_kept(kernel: str, dim: int, seqlen_k: int) -> None:
    """Accumulators of 14 bits would lose a part of it that grows with the keys."""
    tensors = inputs(256, seqlen_k, batch=1, heads=2, heads_kv=1, dim=dim)
    tensors = {name: tensors[name] for name in "qk"}
    v = normal(1, seqlen_k, 1, dim, dtype="float32", seed=9, offset=1.0)
    tensors["v"] = v.to(FLOAT8)
    support = dlattn.supported(**tensors, kernel=kernel)
    if not support:
        pytest.skip(str(support))
    out = dlattn.attention(**tensors, kernel=kernel, out_dtype="float32").double()
    q, k, v = dequantized(tensors)
    want, _ = attend(q, k, v, torch.float64)
    assert 0.999 <= out.mean() / want.mean() <= 1.001


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
def test_values_at_the_ends(kernel: str, dim: int) -> None:
    drawn = inputs(70, 200, dim=dim)
    drawn["v"] = torch.full_like(drawn["v"].float(), 448).to(FLOAT8)
    check(kernel, drawn)
    nan = drawn["v"].float()
    nan[0, 3, 1, 5] = math.nan
    out = dlattn.attention(**{**drawn, "v": nan.to(FLOAT8)}, kernel=kernel)
    assert out[0, :, 2:, 5].isnan().all()
    assert out[0, :, :2].isfinite().all()
    assert out[1].isfinite().all()
    query = drawn["q"].float()
    query[1, 7, 2, 9] = math.nan
    out, lse = dlattn.attention(**{**drawn, "q": query.to(FLOAT8)}, kernel=kernel, return_lse=True)
    assert out[1, 7, 2].isnan().all()
    assert lse[1, 2, 7].isnan()
    assert out[0].isfinite().all()
    largest = {n: torch.full_like(drawn[n].float(), 448).to(FLOAT8) for n in "qk"}
    check(kernel, {**drawn, **largest})


@every_kernel
@pytest.mark.parametrize("name", ["q_descale", "k_descale"])
@pytest.mark.parametrize("value", [-1.0, math.nan])
@pytest.mark.parametrize("dim", DIMS)
def test_descales_that_are_no_factors(kernel: str, name: str, value: float, dim: int) -> None:
    drawn = inputs(70, 200, dim=dim)
    drawn[name][1, 0] = value
    out, lse = dlattn.attention(**drawn, kernel=kernel, return_lse=True)
    assert out[1, :, :2].isnan().all()
    assert lse[1, :2].isnan().all()
    assert out[1, :, 2:].isfinite().all()
    assert out[0].isfinite().all()


@every_kernel
def test_descales_of_zero_and_of_any_size(kernel: str) -> None:
    drawn = inputs(70, 200, dim=128)
    drawn["k_descale"][0] = 0.0
    check(kernel, drawn)
    drawn = inputs(70, 200, dim=128)
    check(kernel, {**drawn, "q_descale": drawn["q_descale"] * 1e-20}, softmax_scale=1e19)
    check(kernel, {**drawn, "v_descale": drawn["v_descale"] * -1e6})


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
def test_rows_that_see_nothing(kernel: str, dim: int) -> None:
    drawn = inputs(200, 30, dim=dim)
    drawn["v_descale"][0] = math.nan
    out, lse = dlattn.attention(**drawn, kernel=kernel, causal=True, return_lse=True)
    assert (out[:, :170] == 0).all()
    assert (lse[..., :170] == -math.inf).all()
    assert out[0, 170:].isnan().all()


@every_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", CAUSAL)
def test_varlen(kernel: str, dim: int, causal: Any) -> None:
    lengths_q, lengths_k = (100, 0, 1, 257, 64, 9), (130, 40, 200, 257, 0, 500)
    pad = 7  # rows of no sequence, full of NaN
    starts_q, starts_k = ([pad], [pad])
    for q, k in zip(lengths_q, lengths_k, strict=True):
        starts_q.append(starts_q[-1] + q)
        starts_k.append(starts_k[-1] + k)
    heads, heads_kv, count = 4, 2, len(lengths_q)

    def rows(total: int, heads: int, seed: int) -> Any:
        x = normal(total + pad, heads, dim, dtype="float32", seed=seed)
        x[:pad] = math.nan
        x[total:] = math.nan
        return x.to(FLOAT8)

    q, k, v = (
        rows(starts_q[-1], heads, 1),
        rows(starts_k[-1], heads_kv, 2),
        rows(starts_k[-1], heads_kv, 3),
    )
    descales = {
        f"{n}_descale": torch.exp2(0.5 * normal(count, heads_kv, dtype="float32", seed=i))
        for i, n in enumerate("qkv")
    }
    used = torch.tensor([130, 40, 77, 257, 0, 500], dtype=torch.int32, device=DEVICE)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts_q, starts_k))
    arguments = (q, k, v, cu_q, cu_k, 257, 500)
    options = {"causal": causal, "seqused_k": used, "kernel": kernel, **descales}
    support = dlattn.supported(*arguments, **options)
    if not support:
        pytest.skip(str(support))
    out = torch.full((q.shape[0], heads, dim), math.nan, device=DEVICE)
    _, lse = dlattn.attention_varlen(*arguments, **options, out=out, return_lse=True)
    assert out[:pad].isnan().all()
    assert out[starts_q[-1] :].isnan().all()
    for b, (start_q, start_k) in enumerate(zip(starts_q[:-1], starts_k[:-1], strict=True)):
        of_q = slice(start_q, start_q + lengths_q[b])
        of_k = slice(start_k, start_k + int(used[b]))
        if lengths_q[b] == 0:
            continue
        part = {"q": q[None, of_q], "k": k[None, of_k], "v": v[None, of_k]}
        part |= {name: x[b : b + 1] for name, x in descales.items()}
        want_out, want_lse = attend(*dequantized(part), torch.float64, causal=causal)
        plain_out, plain_lse = plain(part, "float32", causal=causal)
        assert_close(out[None, of_q], want_out, plain_out, "float32", f"out of {b}")
        assert_close(lse[None, :, of_q], want_lse, plain_lse, "float32", f"lse of {b}")
        alone = dlattn.attention(
            **part, causal=causal, kernel=kernel, out_dtype="float32", batch_invariant=True
        )
        invariant = torch.full_like(out, math.nan)
        dlattn.attention_varlen(*arguments, **options, out=invariant, batch_invariant=True)
        assert torch.equal(alone[0], invariant[of_q]), f"bits of {b}"


@every_kernel
def test_graph_and_streams(kernel: str) -> None:
    drawn = inputs(300, 400, dim=128)
    want = dlattn.attention(**drawn, kernel=kernel)
    out = torch.full_like(want, math.nan)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        dlattn.attention(**drawn, kernel=kernel, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    drawn["v_descale"].mul_(2.0)  # read on the device, each time
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, dlattn.attention(**drawn, kernel=kernel))


@every_kernel
def test_offsets_beyond_32_bits(kernel: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    rows, stride = 600, 1 << 23  # bytes: the last row lies 5 GB behind the first
    if free < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    drawn = inputs(rows, rows, batch=1, heads=1, heads_kv=1, dim=128)
    for name in "kv":
        memory = torch.empty(rows * stride, dtype=torch.uint8, device=DEVICE)
        wide = memory.view(FLOAT8).view(1, rows, 1, stride)[..., :128]
        wide.copy_(drawn[name])
        drawn[name] = wide
    check(kernel, drawn, causal=True)


def test_auto_takes_a_kernel() -> None:
    drawn = inputs(300, 400, dim=128)
    plan = dlattn.plan(**drawn)
    assert plan.kernel in KERNELS
    out = dlattn.attention(**drawn)
    assert out.dtype == torch.bfloat16
    want, _ = attend(*dequantized(drawn), torch.float64)
    assert_close(out, want, plain(drawn, "bfloat16")[0], "bfloat16", "out")

"""`precision=` and `quantize_kv` on a GPU, against the CPU backend and float64."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from gpu_checks import DEVICE, normal, padded, torch

import dlattn

pytestmark = pytest.mark.gpu

PRECISIONS = ("int8_fp8", "int8_fp16", "fp8")
every_precision = pytest.mark.parametrize("precision", PRECISIONS)

# Relative L2 distance of a kernel, which rounds probabilities to e4m3, from the CPU backend, which
# computes on the same 8-bit numbers and does not: by simulation 0.024, and few-key rows' more. With
# probabilities in fp16 only out's own rounding is left.
ROUNDED = {"int8_fp8": 0.035, "int8_fp16": 0.004, "fp8": 0.035}


def inputs(
    seqlen_q: int = 300,
    seqlen_k: int = 500,
    *,
    batch: int = 2,
    heads: int = 4,
    heads_kv: int = 2,
    dim: int = 128,
    dim_v: int | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> list[Any]:
    q = normal(batch, seqlen_q, heads, dim, dtype=dtype, seed=seed)
    k = normal(batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=seed + 1, offset=1.0)
    v = normal(batch, seqlen_k, heads_kv, dim_v or dim, dtype=dtype, seed=seed + 2)
    return [q, k, v]


def needs(precision: str, *args: Any, **options: Any) -> None:
    support = dlattn.supported(*args, precision=precision, **options)
    if not support:
        pytest.skip(str(support))


def relative(a: Any, b: Any) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def check(q: Any, k: Any, v: Any, *, precision: str, **options: Any) -> tuple[Any, Any]:
    """Compare with the CPU; return out and lse."""
    needs(precision, q, k, v, **options)
    out, lse = dlattn.attention(q, k, v, precision=precision, return_lse=True, **options)
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want, want_lse = dlattn.attention(
        q.cpu(), k.cpu(), v.cpu(), precision=precision, return_lse=True, **on_cpu
    )
    assert out.dtype == q.dtype and out.device == q.device
    assert relative(out, want) < ROUNDED[precision]
    lse, want_lse = lse.cpu(), want_lse
    hidden = want_lse == float("-inf")
    assert (lse[hidden] == float("-inf")).all()
    error = (lse - want_lse)[~hidden].abs().max()
    assert error < (5e-3 if precision == "fp8" else 2e-4)
    return out, lse


def test_the_kernels_of_this_device() -> None:
    q, k, v = inputs()
    in_build = "sm90_fp8" not in dlattn.info().missing_kernels
    if torch.cuda.get_device_capability() == (9, 0) and in_build:
        assert dlattn.plan(q, k, v, precision="fp8").kernel == "sm90_fp8"
    if torch.cuda.get_device_capability() >= (8, 9):
        assert dlattn.supported(q, k, v, precision="int8_fp8")
    assert dlattn.supported(q, k, v, precision="int8_fp16")


@every_precision
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_against_the_cpu(precision: str, dtype: str, causal: Any, dim: int) -> None:
    q, k, v = inputs(dim=dim, dtype=dtype)
    check(q, k, v, precision=precision, causal=causal)


@every_precision
@pytest.mark.parametrize("seqlen", [1, 9, 12, 63, 64, 65, 95, 96, 97, 127, 128, 129, 503, 1500])
def test_lengths(precision: str, seqlen: int) -> None:
    q, k, v = inputs(min(seqlen, 200), seqlen, dim=64 if seqlen % 2 else 128)
    check(q, k, v, precision=precision, causal=True)


HEAD_DIMS = [
    *[(16, 16), (48, 64), (80, 80), (112, 32), (64, 128)],
    *[(256, 256), (136, 136), (200, 40), (64, 240)],
]


@every_precision
@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
def test_head_dims(precision: str, dim: int, dim_v: int) -> None:
    q, k, v = inputs(dim=dim, dim_v=dim_v)
    check(q, k, v, precision=precision)


@every_precision
def test_windows_and_sinks(precision: str) -> None:
    q, k, v = inputs()
    sinks = normal(4, dtype="float32", seed=5)
    check(q, k, v, precision=precision, causal=True, window=(100, 0), sinks=sinks)
    check(q, k, v, precision=precision, window=(30, 40))
    check(k[:, :400], k[:, :50], v[:, :50], precision=precision, causal=True, sinks=sinks[:2])


@every_precision
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bias_and_mask(precision: str, dim: int, dtype: str) -> None:
    q, k, v = inputs(dim=dim)
    bias = normal(4, 300, 500, dtype=dtype, seed=7)
    bias[:, 3] = torch.finfo(bias.dtype).min  # of all keys of a row, which is not hidden by that
    bias[:, 5, ::2] = -float("inf")
    mask = normal(2, 1, 300, 500, dtype="float32", seed=8) > -1.0
    mask[:, :, 7] = False
    check(q, k, v, precision=precision, bias=bias)
    check(q, k, v, precision=precision, mask=mask, causal=True)
    sinks = normal(4, dtype="float32", seed=5)
    check(q, k, v, precision=precision, bias=bias[0], mask=mask[0, 0], sinks=sinks)
    check(q, k, v, precision=precision, bias=bias[:, :1], mask=mask[..., :1])


# (batch, seqlen_q, seqlen_k, heads, dim), causal, window: warpgroups or whole blocks see nothing.
BLIND = [
    ((1, 1196, 65, 4, 16), True, (None, None)),
    ((1, 256, 128, 2, 64), False, (None, 7)),
    ((2, 400, 65, 2, 128), True, (None, None)),
    ((3, 700, 1, 3, 32), True, (9, None)),
]


@pytest.mark.parametrize("kind", ["float8", *PRECISIONS])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_see_nothing(kind: str, seed: int) -> None:
    """Their lse is -inf and their out 0, whatever registers a block happens to start with."""
    draw = random.Random(seed)
    sizes = (draw.randint(1, 3), draw.randint(100, 1500), draw.randint(1, 300))
    window = (draw.choice([None, 40]), draw.choice([None, 0, 9]))
    drawn = ((*sizes, draw.randint(1, 4), 16 * draw.randint(1, 8)), draw.random() < 0.7, window)
    for (batch, seqlen_q, seqlen_k, heads, dim), causal, window in [drawn, BLIND[seed % 4]]:
        dtype = draw.choice(["float16", "bfloat16"])
        args = inputs(
            seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads, dim=dim, dtype=dtype
        )
        options: dict[str, Any] = {"causal": causal, "window": window}
        if kind == "float8":
            args = [x.to(torch.float8_e4m3fn) for x in args]
        else:
            options["precision"] = kind
        support = dlattn.supported(*args, **options)
        if not support:
            pytest.skip(str(support))
        right = 0 if causal else window[1]
        last = torch.arange(seqlen_q, device=DEVICE) + seqlen_k - seqlen_q + (right or 0)
        blind = last < 0 if right is not None else torch.zeros_like(last, dtype=torch.bool)
        for _ in range(3):
            out, lse = dlattn.attention(*args, return_lse=True, **options)
            assert (lse[:, :, blind] == float("-inf")).all()
            assert (out[:, blind].float() == 0).all()
            assert out.float().isfinite().all() and not lse.isnan().any()


@every_precision
def test_strides_and_layouts(precision: str) -> None:
    q, k, v = inputs()
    out, _ = check(q, k, v, precision=precision)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    strided = dlattn.attention(*heads_first, precision=precision)
    assert torch.equal(strided, out)
    shifted = [padded(x, 3, 1) for x in (q, k, v)]  # rows aligned to an element alone
    assert torch.equal(dlattn.attention(*shifted, precision=precision), out)
    swapped = dlattn.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), precision=precision, layout="bhsd"
    )
    assert torch.equal(swapped.transpose(1, 2), out)


@every_precision
def test_kept_keys_give_the_same_bits(precision: str) -> None:
    q, k, v = inputs()
    needs(precision, q, k, v)
    out = dlattn.attention(q, k, v, precision=precision)
    kv = dlattn.quantize_kv(k, v, precision=precision)
    k.fill_(float("nan")), v.fill_(float("nan"))
    assert torch.equal(dlattn.attention(q, kv, None), out)


@every_precision
@pytest.mark.parametrize("dim", [64, 128, 72])
def test_bytes_are_the_cpus(precision: str, dim: int) -> None:
    _, k, v = inputs(dim=dim, dtype="float16")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs conversions to e4m3")
    kv = dlattn.quantize_kv(k, v, precision=precision)
    host = dlattn.quantize_kv(k.cpu(), v.cpu(), precision=precision)
    stored = k.shape[0] * k.shape[1] * k.shape[2] * (64 if dim <= 64 else 128)
    parts = [x.buffer.cpu().view(torch.uint8) for x in (kv, host)]
    assert stored % 256 == 0
    assert torch.equal(parts[0][: 2 * stored], parts[1][: 2 * stored])


@every_precision
def test_packed_sequences(precision: str) -> None:
    lengths_q, lengths_k, used = [70, 0, 300, 129], [200, 40, 640, 131], [150, 40, 0, 131]
    cu_q = torch.tensor([0, *lengths_q]).cumsum(0).int().to(DEVICE)
    cu_k = torch.tensor([0, *lengths_k]).cumsum(0).int().to(DEVICE)
    seqused = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    q, k, v = (x[0] for x in inputs(sum(lengths_q), sum(lengths_k), batch=1))
    start = 0
    for length, n in zip(lengths_k, used, strict=True):
        k[start + n : start + length] = float("nan")
        v[start + n : start + length] = float("nan")
        start += length
    arguments = (cu_q, cu_k, 300, 640)
    options: dict[str, Any] = {"seqused_k": seqused, "causal": True}
    support = dlattn.supported(q, k, v, *arguments, precision=precision, **options)
    if not support:
        pytest.skip(str(support))
    out, lse = dlattn.attention_varlen(
        q, k, v, *arguments, precision=precision, return_lse=True, **options
    )
    host = [x.cpu() for x in (q, k, v, cu_q, cu_k)]
    want, want_lse = dlattn.attention_varlen(
        *host, 300, 640, precision=precision, return_lse=True, seqused_k=seqused.cpu(), causal=True
    )
    assert relative(out, want) < ROUNDED[precision]
    hidden = want_lse == float("-inf")
    assert (lse.cpu()[hidden] == float("-inf")).all()
    kv = dlattn.quantize_kv(
        k, v, precision=precision, cu_seqlens_k=cu_k, max_seqlen_k=640, seqused_k=seqused
    )
    kept = dlattn.attention_varlen(q, kv, None, *arguments, **options)
    assert torch.equal(kept, out)
    more = [torch.cat([cu, cu[-1:]]) for cu in (cu_q, cu_k)]
    with pytest.raises(dlattn.UnsupportedError, match="k: batch_size is 4; accepted: 5"):
        dlattn.attention_varlen(q, kv, None, *more, 300, 640)
    with pytest.raises(dlattn.UnsupportedError, match="max_seqlen_k is 641; accepted: up to 640"):
        dlattn.attention_varlen(q, kv, None, cu_q, cu_k, 300, 641)


@every_precision
def test_a_graph_replays_with_other_values(precision: str) -> None:
    q, k, v = inputs()
    needs(precision, q, k, v)
    dlattn.attention(q, k, v, precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dlattn.attention(q, k, v, precision=precision)
    for old, new in zip((q, k, v), inputs(seed=20), strict=True):
        old.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, dlattn.attention(q, k, v, precision=precision))


@every_precision
def test_a_stream_of_its_own(precision: str) -> None:
    """Memory that torch hands on in its own stream meanwhile is not the workspace."""
    q, k, v = inputs(1000, 4000)
    needs(precision, q, k, v)
    want = dlattn.attention(q, k, v, precision=precision)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        torch.cuda._sleep(1000000)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3000000)
        out = dlattn.attention(q, k, v, precision=precision, stream=stream)
        for _ in range(4):
            torch.full((20_000_000,), float("nan"), device=DEVICE)
        torch.cuda.synchronize()
        assert torch.equal(out, want)


@every_precision
def test_the_first_call_of_a_thread(precision: str) -> None:
    q, k, v = inputs()
    needs(precision, q, k, v)
    want = dlattn.attention(q, k, v, precision=precision)
    torch.cuda.synchronize()
    results: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(dlattn.attention(q, k, v, precision=precision))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 4 and all(torch.equal(result, want) for result in results)


@every_precision
def test_numbers_that_are_not_finite(precision: str) -> None:
    q, k, v = inputs(400, 400)
    needs(precision, q, k, v)
    clean = dlattn.attention(q, k, v, causal=True, precision=precision)
    for bad in (float("nan"), float("inf")):
        broken = k.clone()
        broken[0, 300, 1, 3] = bad
        out = dlattn.attention(q, broken, v, causal=True, precision=precision)
        assert torch.isnan(out[0, 300:, 2:]).all()
        assert torch.equal(out[:, :, :2], clean[:, :, :2]) and torch.equal(out[1], clean[1])
        assert torch.isfinite(out[0, :256, 2:]).all()
        broken = v.clone()
        broken[0, 300, 1, 3] = bad
        out = dlattn.attention(q, k, broken, causal=True, precision=precision)
        assert torch.isnan(out[0, 300:, 2:, 3]).all()
        out[0, :, 2:, 3] = 0
        assert torch.isfinite(out).all()


@every_precision
def test_batch_invariance(precision: str) -> None:
    q, k, v = inputs(batch=3)
    needs(precision, q, k, v)
    out = dlattn.attention(q, k, v, precision=precision, batch_invariant=True)
    for b in range(3):
        one = (x[b : b + 1] for x in (q, k, v))
        alone = dlattn.attention(*one, precision=precision, batch_invariant=True)
        assert torch.equal(alone[0], out[b])


@every_precision
def test_values_with_a_mean_keep_it(precision: str) -> None:
    q, k, v = inputs(64, 32768, batch=1, heads=2, heads_kv=2, dtype="float16")
    v += 1.0
    needs(precision, q, k, v)
    out = dlattn.attention(q, k, v, precision=precision).double()
    # Rounding v itself to e4m3 moves its mean, here and there alike.
    expected = dlattn.attention(q.cpu(), k.cpu(), v.cpu(), precision=precision).double()
    assert abs(out.mean() / expected.mean().item() - 1) < 1e-3


@every_precision
def test_offsets_beyond_32_bits(precision: str) -> None:
    """In k, v and what they are quantised to: the last head's results are those alone."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    rows, heads = 140_000, 250
    k = torch.empty(1, rows, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    k.normal_()
    q, v = normal(1, 64, heads, 128, dtype="bfloat16", seed=3), k
    needs(precision, q, k, v)
    out = dlattn.attention(q, k, v, precision=precision)
    for head in (0, heads - 1):
        part = (x[:, :, head : head + 1] for x in (q, k, v))
        alone = dlattn.attention(*part, precision=precision, batch_invariant=True)
        assert relative(out[:, :, head : head + 1], alone) < 1e-2

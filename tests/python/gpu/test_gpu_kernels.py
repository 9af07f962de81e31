"""Every CUDA kernel against float64: sizes, head dims and strides.

Outputs are poisoned with NaN first; a result may err twice as much as a plain computation in the
same dtype, plus a tiny absolute term.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from gpu_checks import (
    CAUSAL,
    DEVICE,
    HALF,
    HOPPER,
    check,
    every_kernel,
    normal,
    padded,
    qkv,
    torch,
)

import dlattn

pytestmark = pytest.mark.gpu


# Around the edges of row groups (16 rows) and of tiles (16, 32 and 64 rows, 32 keys).
LENGTHS = [
    (1, 1), (1, 200), (15, 17), (16, 16), (17, 31), (31, 32), (32, 33), (33, 15), (63, 64),
    (64, 65), (65, 63), (100, 173), (173, 100), (200, 1), (128, 256), (257, 129),
]  # fmt: skip


@every_kernel
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_lengths(kernel: str, dtype: str, seqlen_q: int, seqlen_k: int, causal: Any) -> None:
    check(kernel, *qkv(dtype, seqlen_q, seqlen_k), causal=causal)


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 512, 64), (2, 8, 2048, 64), (2, 8, 2048, 128)])
def test_seed_shapes(kernel: str, dtype: str, shape: Any, causal: bool) -> None:
    batch, heads, seqlen, dim = shape
    inputs = qkv(dtype, seqlen, seqlen, batch=batch, heads=heads, heads_kv=heads, dim=dim)
    check(kernel, *inputs, causal=causal)


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", range(16, 129, 16))
def test_head_dims(kernel: str, dtype: str, dim: int, causal: bool) -> None:
    check(kernel, *qkv(dtype, 75, 90, dim=dim), causal=causal)


@every_kernel
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 16), (16, 128), (128, 48), (96, 32), (32, 80)])
def test_head_dim_of_v(kernel: str, dtype: str, dim: int, dim_v: int) -> None:
    check(kernel, *qkv(dtype, 75, 90, dim=dim, dim_v=dim_v), causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [
        *[(8, 8), (24, 40), (56, 104), (104, 72), (120, 8), (192, 128), (168, 136), (256, 200)],
        *((dim, dim) for dim in (1, 7, 20, 33, 63, 65, 90, 100, 127, 129, 161, 191, 193, 250, 255)),
        *[(1, 256), (256, 1), (40, 73), (65, 8), (190, 127)],
    ],
)
def test_head_dims_between_on_wmma(dtype: str, causal: bool, dim: int, dim_v: int) -> None:
    check("wmma", *qkv(dtype, 75, 90, dim=dim, dim_v=dim_v), causal=causal)
    inputs = qkv(dtype, 75, 190, dim=dim, dim_v=dim_v)
    check("wmma:general", *inputs, causal=causal, window=(120, None))


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0 and its kernels")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [
        *((dim, dim) for dim in (8, 72, 88, 96, 104, 136, 160, 184, 192, 200, 256)),
        *[(192, 128), (192, 136), (192, 8), (136, 120), (128, 192), (96, 24), (64, 96), (256, 72)],
    ],
)
def test_head_dims_on_sm90(dtype: str, causal: Any, dim: int, dim_v: int) -> None:
    check("sm90", *qkv(dtype, 75, 90, dim=dim, dim_v=dim_v), causal=causal)
    inputs = qkv(dtype, 333, 457, batch=2, heads=8, heads_kv=4, dim=dim, dim_v=dim_v)
    check("sm90", *inputs, causal=causal, window=(200, None))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("variant", ["wide", "narrow", "general"])
def test_long_walks_on_wmma(dtype: str, causal: Any, dim: int, variant: str) -> None:
    inputs = qkv(dtype, 333, 457, batch=2, heads=8, heads_kv=4, dim=dim)
    check(f"wmma:{variant}", *inputs, causal=causal, window=(200, None))


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [
        *((dim, dim) for dim in (1, 7, 40, 72, 100, 130, 192, 256)),
        *[(1, 256), (256, 1), (40, 73), (65, 8)],
    ],
)
def test_any_head_dim_on_scalar(dtype: str, dim: int, dim_v: int) -> None:
    check("scalar", *qkv(dtype, 37, 70, dim=dim, dim_v=dim_v), causal=True)


@every_kernel
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (8, 8), (8, 2), (6, 1), (12, 4)])
def test_grouped_heads(kernel: str, dtype: str, heads: int, heads_kv: int) -> None:
    check(kernel, *qkv(dtype, 50, 77, heads=heads, heads_kv=heads_kv), causal=True)


@every_kernel
def test_random_problems(kernel: str, dtype: str) -> None:
    rng = random.Random(f"{kernel} {dtype}")
    for seed in range(30):
        heads_kv = rng.randint(1, 3)
        inputs = qkv(
            dtype,
            rng.randint(1, 300),
            rng.randint(0, 300),
            batch=rng.randint(1, 3),
            heads=heads_kv * rng.randint(1, 3),
            heads_kv=heads_kv,
            dim=16 * rng.randint(1, 8),
            dim_v=16 * rng.randint(1, 8),
            seed=seed,
        )
        limit = [None, *range(0, 100, 7)]
        window = (rng.choice(limit), rng.choice(limit))
        scale = rng.choice([None, 0.02, 0.7])
        check(kernel, *inputs, causal=rng.choice(CAUSAL), window=window, softmax_scale=scale)


@every_kernel
def test_no_keys(kernel: str, dtype: str) -> None:
    check(kernel, *qkv(dtype, 40, 0))
    out, lse = dlattn.attention(*qkv(dtype, 40, 0), kernel=kernel, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@every_kernel
def test_empty(kernel: str, dtype: str) -> None:
    assert dlattn.attention(*qkv(dtype, 0, 20), kernel=kernel).shape == (2, 0, 4, 64)
    assert dlattn.attention(*qkv(dtype, 20, 20, batch=0), kernel=kernel).shape == (0, 20, 4, 64)


@every_kernel
def test_rows_that_see_nothing(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 150, 60)
    out, lse = dlattn.attention(q, k, v, causal=True, kernel=kernel, return_lse=True)
    assert (out[:, :90] == 0).all()
    assert (lse[..., :90] == -math.inf).all()
    check(kernel, q, k, v, causal=True)


@every_kernel
def test_more_than_65535_blocks(kernel: str, dtype: str) -> None:
    check(kernel, *qkv(dtype, 3, 5, batch=2, heads=40_000, heads_kv=8, dim=16))
    check(kernel, *qkv(dtype, 64 * 66_000, 3, batch=1, heads=1, heads_kv=1, dim=16))


@every_kernel
def test_more_than_2_to_the_31_elements(kernel: str, dtype: str) -> None:
    size = (1 << 31) + (1 << 28)
    if torch.cuda.mem_get_info()[0] < size * 5:
        pytest.skip("needs 12 GB of free GPU memory")
    memory = torch.empty(size, dtype=getattr(torch, dtype), device=DEVICE)
    far, mega = 1 << 31, 1 << 20

    def place(x: Any, start: int, *strides: int) -> Any:
        view = memory.as_strided(x.shape, (*strides, 1), start)
        return view.copy_(x)

    # q and out reach across 2^31 from batch to batch, k from row to row, v from head to head.
    q, k, v = qkv(dtype, 70, 34, dim=64)
    q_far = place(q, 0, far, 256, 64)
    k_far = place(k, mega, 128, 1 << 26, 64)
    v_far = place(v, 2 * mega, 34 * 64, 64, far)
    out = memory.as_strided(q.shape, (far, 256, 64, 1), 3 * mega)
    check(kernel, q_far, k_far, v_far, out=out, causal=True)


# --- strides -------------------------------------------------------------------------------------


@every_kernel
def test_bhsd(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 70, 90)
    qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out = dlattn.attention(qt, kt, vt, layout="bhsd", causal=True, kernel=kernel)
    assert out.shape == qt.shape
    assert torch.equal(out.transpose(1, 2), dlattn.attention(q, k, v, causal=True, kernel=kernel))
    check(kernel, *(x.transpose(1, 2) for x in (qt, kt, vt)), causal=True)


@every_kernel
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_qkv(kernel: str, dtype: str, dim: int) -> None:
    packed = normal(2, 90, 3, 4, dim, dtype=dtype, seed=3)
    check(kernel, *packed.unbind(2), causal=True)
    packed = normal(2, 90, 12, dim, dtype=dtype, seed=4)  # 8 heads of q, 2 of k, 2 of v
    check(kernel, packed[:, :, :8], packed[:, :, 8:10], packed[:, :, 10:], causal=True)


@every_kernel
@pytest.mark.parametrize("align", [16, 8, 4, 2])
@pytest.mark.parametrize("dim", [48, 64, 96])
def test_alignment_of_rows(kernel: str, dtype: str, align: int, dim: int) -> None:
    bytes_per_element = 4 if dtype == "float32" else 2
    if align < bytes_per_element:
        pytest.skip("rows of float32 are aligned to 4 bytes at least")
    pad = align // bytes_per_element
    for moved in range(3):  # q, k or v alone, then by its start as well
        for start in (0, pad):
            inputs = list(qkv(dtype, 70, 90, dim=dim))
            inputs[moved] = padded(inputs[moved], pad, start)
            if kernel == "decode" and align < 16:
                with pytest.raises(dlattn.UnsupportedError, match=f"aligned to {align} bytes"):
                    dlattn.attention(*inputs, kernel=kernel, causal=True)
                continue
            if kernel == "sm90" and align < 16:
                check(kernel, *inputs, causal=True)  # which expects a refusal
                continue
            if kernel in ("wmma", "wmma:split") and align < 16:
                fast = "wmma:narrow" if kernel == "wmma" else kernel
                with pytest.raises(dlattn.UnsupportedError, match=f"aligned to {align} bytes"):
                    dlattn.plan(*inputs, kernel=fast)
                assert dlattn.plan(*inputs).variant == "general"
                if kernel == fast:
                    continue
            assert dlattn.plan(*inputs, kernel=kernel).copy_bytes == align
            check(kernel, *inputs, causal=True)


@every_kernel
def test_broadcast_inputs(kernel: str, dtype: str) -> None:
    q, k, v = qkv(dtype, 70, 90, batch=1, heads=4, heads_kv=1)
    q, k, v = q.expand(3, -1, -1, -1), k.expand(3, -1, 4, -1), v.expand(3, -1, 4, -1)
    check(kernel, q, k, v, causal=True)
    check(kernel, q[:, :1].expand(-1, 50, -1, -1), k, v)


@every_kernel
@pytest.mark.parametrize(("pad", "start"), [(0, 1), (1, 0), (2, 0), (4, 2), (8, 0), (3, 5)])
@pytest.mark.parametrize("dim_v", [48, 64, 128])
def test_strided_out(kernel: str, dtype: str, pad: int, start: int, dim_v: int) -> None:
    q, k, v = qkv(dtype, 70, 90, dim_v=dim_v)
    shape = (2, 70, 4, dim_v + pad)
    flat = torch.full((math.prod(shape) + start + 64,), 123.0, dtype=q.dtype, device=DEVICE)
    out = flat[start : start + math.prod(shape)].view(shape)[..., :dim_v]
    check(kernel, q, k, v, out=out, causal=True)
    out.fill_(123.0)
    assert (flat == 123.0).all(), "wrote beside out"

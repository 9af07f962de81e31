"""Variants and forms of the CUDA kernels that no other test asks for by name, against float64.

Every variant of wmma with query heads packed; sm90's blocks, also in pairs; its score modification
at every head_dim and in varlen; chains of calls to different kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from gpu_checks import (
    CAUSAL,
    DEVICE,
    HALF,
    HOPPER,
    SERVED,
    assert_close,
    attend,
    check,
    normal,
    padded,
    qkv,
    torch,
)
from test_gpu_back_to_back import LINKS, check_chain

import dlattn

pytestmark = pytest.mark.gpu

# Features that a device or a head_dim may lack in a variant; other refusals are failures.
LACKS = (
    "no instance for this head_dim",
    "of shared memory",
    "compute capability",
    "needs code for",
)

hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0 and code for it")

# --- packed heads --------------------------------------------------------------------------------

VARIANTS = ["wide", "narrow", "split", "single_pass", "pipelined", "persistent", "general"]


def check_packed(variant: str, q: Any, k: Any, v: Any, **options: Any) -> bool:
    """Check a variant with the heads of a group as rows of one tile; False if there is none."""
    kernel = f"wmma:{variant}+packed"
    support = dlattn.supported(q, k, v, kernel=kernel, **options)
    if not support:
        assert any(lack in str(support) for lack in LACKS), str(support)
        return False
    plan = dlattn.plan(q, k, v, kernel=kernel, **options)
    assert (plan.variant, plan.packed_heads) == (variant, q.shape[2] // k.shape[2])
    check(kernel, q, k, v, **options)
    return True


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_query_of_packed_heads(variant: str, dim: int, dtype: str) -> None:
    served = False
    for heads, heads_kv in ((4, 2), (8, 1), (7, 1), (64, 2)):
        for seqlen_k in (1, 64, 200, 448):
            inputs = qkv(dtype, 1, seqlen_k, heads=heads, heads_kv=heads_kv, dim=dim)
            for causal in CAUSAL:
                served |= check_packed(variant, *inputs, causal=causal)
            served |= check_packed(variant, *inputs, window=(70, 0))
            served |= check_packed(variant, *inputs, window=(50, 40), causal="top_left")
    if not served:
        pytest.skip(f"no {variant} for head_dim {dim} here")


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_heads_whose_v_is_narrower(variant: str) -> None:
    served = False
    for dim, dim_v in ((64, 48), (64, 8), (128, 64), (192, 128), (256, 128)):
        inputs = qkv("float16", 1, 300, heads=8, heads_kv=2, dim=dim, dim_v=dim_v)
        served |= check_packed(variant, *inputs)
    if not served:
        pytest.skip(f"no {variant} here")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_packed_heads_that_rise(variant: str) -> None:
    served = False
    for dim, hot in itertools.product((64, 128), (0, 64, 255, 440)):
        q, k, v = qkv("float16", 1, 448, heads=8, heads_kv=2, dim=dim)
        k[:, hot] *= 20
        served |= check_packed(variant, q, k, v)
        # All scores are equal, and huge.
        served |= check_packed(variant, torch.full_like(q, 3e4), torch.full_like(k, 3e4), v)
    if not served:
        pytest.skip(f"no {variant} here")


# --- blocks of sm90 ------------------------------------------------------------------------------

BLOCKS = ["sm90:tall", "sm90:short"]


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dims", [(64, 64), (40, 56), (96, 96), (128, 128), (128, 72)])
@pytest.mark.parametrize("kernel", BLOCKS)
def test_blocks_of_sm90(kernel: str, dims: tuple[int, int], dtype: str) -> None:
    """Lengths around tiles of 64 and 128 keys and blocks of 128, 192 and 256 rows."""
    lengths = [
        (1, 1),
        (64, 64),
        (128, 63),
        (129, 65),
        (127, 128),
        (192, 129),
        (193, 192),
        (256, 257),
    ]
    lengths += [(257, 1), (300, 40), (70, 640), (400, 1000)]
    for causal in CAUSAL:
        for seqlen_q, seqlen_k in lengths:
            inputs = qkv(dtype, seqlen_q, seqlen_k, heads=4, heads_kv=2, dim=dims[0], dim_v=dims[1])
            check(kernel, *inputs, causal=causal)
        inputs = qkv(dtype, 300, 700, heads=4, heads_kv=2, dim=dims[0], dim_v=dims[1])
        check(kernel, *inputs, causal=causal, window=(100, 30))
        check(kernel, *inputs, causal=causal, window=(5, 0), sinks=torch.ones(4, device=DEVICE))


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kernel", BLOCKS)
def test_blocks_of_sm90_and_rising_scores(kernel: str, dim: int, dtype: str) -> None:
    """Row maxima that one group of keys raises far and the other does not, or beyond measure."""
    for hot in (0, 63, 64, 128, 290, 440):
        for size in (20.0, 2e4):
            q, k, v = qkv(dtype, 200, 448, dim=dim)
            k[:, hot] *= size if dtype == "bfloat16" else min(size, 2e3)
            check(kernel, q, k, v)
    q, k, v = qkv(dtype, 200, 448, dim=dim)
    check(kernel, torch.full_like(q, 3e4), torch.full_like(k, 3e4), v)
    k[:, 64:128] = 0  # scores of every other tile alone
    check(kernel, q * 50, k, v)


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", [*BLOCKS, "sm90:pairs"])
def test_keys_that_outweigh_all_others(kernel: str, dim: int, dtype: str) -> None:
    """Self-attention of a tensor with itself: results are v, rounded once."""
    if dim not in {"sm90:short": (64, 96, 128), "sm90:pairs": (256,)}.get(kernel, (dim,)):
        pytest.skip("this head_dim has no such blocks")
    q = normal(2, 1024, 8, dim, dtype=dtype, seed=3)
    scale = 16 / dim  # a row's own key is some 16 above the others
    out = dlattn.attention(q, q, q, kernel=kernel, softmax_scale=scale)
    wide = q.double().transpose(1, 2)
    exact = (torch.softmax(wide @ wide.mT * scale, 3) @ wide).transpose(1, 2)

    def error(x: Any) -> float:
        return float((x.double() - exact).pow(2).mean().sqrt())

    assert error(out) <= 1.05 * error(exact.to(q.dtype))


PAIRS_OF_BLOCKS = "sm90:pairs"


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dims", [(256, 256), (200, 256), (256, 136), (224, 24)])
def test_pairs_of_blocks(dims: tuple[int, int], dtype: str) -> None:
    """Lengths around tiles of 64 keys and two blocks of 128 rows, and other strides."""
    lengths = [(129, 1), (256, 64), (200, 65), (193, 700), (512, 129), (400, 1000), (250, 0)]
    for seqlen_q, seqlen_k in lengths:
        inputs = qkv(dtype, seqlen_q, seqlen_k, dim=dims[0], dim_v=dims[1])
        check(PAIRS_OF_BLOCKS, *inputs)
    q, k, v = qkv(dtype, 500, 300, heads=8, heads_kv=8, dim=dims[0], dim_v=dims[1])
    check(
        PAIRS_OF_BLOCKS, *(padded(x, 8, 8) for x in (q, k, v)), sinks=torch.ones(8, device=DEVICE)
    )
    check(PAIRS_OF_BLOCKS, q, k[:, :, :1].expand_as(k), v[:1].expand_as(v))


@hopper
@pytest.mark.parametrize("dtype", HALF)
def test_pairs_of_blocks_and_rising_scores(dtype: str) -> None:
    """One block of a pair takes longer for its rows than the other."""
    for hot, size in itertools.product((0, 63, 64, 290, 440), (20.0, 2e3)):
        q, k, v = qkv(dtype, 200, 448, dim=256)
        k[:, hot] *= size
        check(PAIRS_OF_BLOCKS, q, k, v)
        q[:, 128:] = 0
        check(PAIRS_OF_BLOCKS, q, k, v)


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 1024), (8, 1024), (16, 1000), (3, 2048)])
def test_pairs_of_blocks_that_auto_takes(batch: int, seqlen: int, dtype: str) -> None:
    """A block for each tile and blocks that stay for several, with the bits of tall ones."""
    q, k, v = qkv(dtype, seqlen, seqlen, batch=batch, heads=16, heads_kv=16, dim=256)
    if batch >= 8:
        assert dlattn.plan(q, k, v).variant == "pairs"
    check(PAIRS_OF_BLOCKS, q, k, v)
    want = dlattn.attention(q, k, v, kernel="sm90:tall", return_lse=True)
    for kernel in (PAIRS_OF_BLOCKS, "auto"):
        for _ in range(10):  # behind each other, so that two grids are under way
            got = dlattn.attention(q, k, v, kernel=kernel, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), kernel


# --- score modification on sm90 ------------------------------------------------------------------

DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
SLOPES = [0.5, -0.1, 0.0, 1.0]


def modifications(seqlen_q: int, seqlen_k: int, dtype: str, batch: int = 2) -> dict[str, Any]:
    """Options by name; bias and mask in rows that TMA takes."""
    columns = -(-seqlen_k // 16) * 16
    bias = normal(batch, 1, seqlen_q, columns, dtype=dtype, seed=5)[..., :seqlen_k]
    of_heads = normal(1, 4, seqlen_q, columns, dtype="float32", seed=6)[..., :seqlen_k]
    mask = (normal(batch, 4, seqlen_q, columns, dtype="float32", seed=7) > -0.4)[..., :seqlen_k]
    mask[:, 1, 3:9] = False  # rows that see nothing
    slopes = torch.tensor(SLOPES, device=DEVICE)
    sinks = torch.tensor([-2.0, 0.5, 6.0, -float("inf")], device=DEVICE)
    return {
        "softcap": {"softcap": 3.0},
        "large softcap": {"softcap": 1e5},
        "alibi": {"alibi_slopes": slopes},
        "alibi by batch": {"alibi_slopes": torch.stack([slopes, slopes.flip(0)] * batch)[:batch]},
        "softcap and alibi": {"softcap": 20.0, "alibi_slopes": slopes},
        "bias": {"bias": bias},
        "float32 bias": {"bias": of_heads},
        "mask": {"mask": mask},
        "bias and mask": {"bias": bias, "mask": mask, "sinks": sinks},
        "all": {
            "bias": of_heads,
            "mask": mask,
            "sinks": sinks,
            "softcap": 20.0,
            "alibi_slopes": slopes,
        },
    }


NAMES = [
    *("softcap", "large softcap", "alibi", "alibi by batch", "softcap and alibi", "bias"),
    *("float32 bias", "mask", "bias and mask", "all"),
]


def check_modification(kernel: str, dtype: str, dims: tuple[int, int], name: str) -> None:
    for seqlen_q, seqlen_k in ((70, 96), (300, 176), (130, 400), (257, 641)):
        q, k, v = qkv(dtype, seqlen_q, seqlen_k, dim=dims[0], dim_v=dims[1])
        options = modifications(seqlen_q, seqlen_k, dtype)[name]
        if kernel == "sm90" and name == "large softcap":
            refused = dlattn.supported(q, k, v, kernel=kernel, **options)
            assert not refused and "softcap" in refused.reasons[0]
            continue
        for causal in CAUSAL:
            check(kernel, q, k, v, causal=causal, **options)
        check(kernel, q, k, v, window=(100, 30), **options)


@hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_score_modification_on_sm90(name: str, dims: tuple[int, int], dtype: str) -> None:
    # check() lets sm90 refuse what does not fit into boxes; here nothing may be refused.
    q, k, v = qkv(dtype, 130, 400, dim=dims[0], dim_v=dims[1])
    support = dlattn.supported(q, k, v, kernel="sm90", **modifications(130, 400, dtype)[name])
    if "bytes of shared memory" in str(support):
        pytest.skip(str(support))
    if name == "large softcap":
        assert "sm90: softcap / softmax_scale is " in str(support)
        return
    assert support, str(support)
    check_modification("sm90", dtype, dims, name)


def check_varlen_modification(
    kernel: str, dtype: str, dims: tuple[int, int], name: str, causal: Any
) -> None:
    lengths_q, lengths_k = (130, 0, 64, 1, 300, 3), (200, 17, 0, 65, 63, 128)
    starts = [
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=DEVICE)
        for x in (lengths_q, lengths_k)
    ]
    options = modifications(max(lengths_q), max(lengths_k), dtype, len(lengths_q))[name]
    q, k, v = qkv(
        dtype, sum(lengths_q), sum(lengths_k), batch=1, dim=dims[0], dim_v=dims[1], seed=3
    )
    arguments = (q[0], k[0], v[0], *starts, max(lengths_q), max(lengths_k))
    if not dlattn.supported(*arguments, kernel=kernel, causal=causal, **options):
        # Bias and mask come in boxes, which serve no varlen batch.
        # The polynomials of a softcap far from the scale overflow.
        assert kernel == "sm90", name
        assert {"bias", "mask"} & set(options) or name == "large softcap", name
        return
    out = torch.full((*q.shape[1:3], v.shape[3]), float("nan"), dtype=q.dtype, device=DEVICE)
    _, lse = dlattn.attention_varlen(
        *arguments, kernel=kernel, causal=causal, out=out, return_lse=True, **options
    )
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if not length_q:
            continue
        rows = slice(int(starts[0][b]), int(starts[0][b + 1]))
        keys = slice(int(starts[1][b]), int(starts[1][b + 1]))
        own = dict(options)
        for of_scores in {"bias", "mask"} & set(own):
            x = own[of_scores]
            x = x[b : b + 1] if x.shape[0] > 1 else x
            own[of_scores] = x[:, :, :length_q, :length_k]
        if "alibi_slopes" in own and own["alibi_slopes"].dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        part = (q[:, rows], k[:, keys], v[:, keys])
        want = attend(*part, torch.float64, causal=causal, **own)
        plain = attend(*part, torch.float32, causal=causal, **own)
        assert_close(out[None, rows], want[0], plain[0], dtype, f"out of sequence {b}")
        assert_close(lse[None, :, rows], want[1], plain[1], "float32", f"lse of sequence {b}")


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", ["scalar", "wmma:general", *(["sm90"] if HOPPER else [])])
def test_score_modification_in_varlen(
    kernel: str, name: str, dims: tuple[int, int], causal: Any
) -> None:
    check_varlen_modification(kernel, "float16", dims, name, causal)


@hopper
def test_sm90_serves_softcap_and_alibi_in_varlen() -> None:
    q, k, v = (x[0] for x in qkv("float16", 40, 40, batch=1, dim=128))
    starts = torch.tensor([0, 10, 40], dtype=torch.int32, device=DEVICE)
    for options in ({"softcap": 3.0}, {"alibi_slopes": torch.tensor(SLOPES, device=DEVICE)}):
        support = dlattn.supported(q, k, v, starts, starts, 30, 30, kernel="sm90", **options)
        assert support, str(support)


# --- chains of different kernels -----------------------------------------------------------------

BY_DTYPE = {dtype: [kernel for kernel, of in SERVED if of == dtype] for dtype in HALF}
MORE = ["wmma:wide", "wmma:narrow", "wmma:pipelined", "wmma:single_pass", "wmma:persistent"]


def check_chain_of(kernels: list[str], dtype: str, seqlen: int, dim: int, causal: bool) -> None:
    """Each output is the next kernel's q, k or v, in three buffers; nothing waits in between."""
    inputs = [normal(1, seqlen, 4, dim, dtype=dtype, seed=seed) for seed in range(3)]
    ring = [torch.empty_like(inputs[0]) for _ in range(3)]
    named = [kernel for kernel in kernels if dlattn.supported(*inputs, kernel=kernel)]
    assert len(named) > 1
    links = max(LINKS, len(named))

    def chain(pause: Callable[[], object]) -> None:
        for link in range(links):
            arguments = list(inputs)
            if link > 0:
                arguments[link % 3] = ring[(link - 1) % 3]
            out, kernel = ring[link % 3], named[link % len(named)]
            dlattn.attention(*arguments, causal=causal, softmax_scale=1.0, kernel=kernel, out=out)
            pause()

    check_chain(chain, ring, ring[(links - 1) % 3])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "dim"), [(96, 64), (512, 64), (512, 128), (300, 256)])
def test_chain_of_all_kernels(seqlen: int, dim: int, causal: bool, dtype: str) -> None:
    check_chain_of([*BY_DTYPE[dtype], *MORE], dtype, seqlen, dim, causal)


PAIRS = ["scalar", "wmma", "wmma:split", "wmma:persistent", "wmma:pipelined", "wmma:general"]


@pytest.mark.parametrize(("first", "second"), itertools.permutations([*PAIRS, "sm90"], 2))
def test_chain_of_two_kernels(first: str, second: str) -> None:
    x = normal(1, 512, 4, 64, dtype="float16", seed=0)
    for kernel in (first, second):
        if not dlattn.supported(x, x, x, kernel=kernel):
            pytest.skip(f"{kernel} is not for this GPU")
    check_chain_of([first, second], "float16", 512, 64, True)


def test_chain_of_packed_sequences_and_merges() -> None:
    """Varlen, whole batches and merged parts in turn, each of another kernel."""
    kernels = [kernel for kernel, dtype in SERVED if dtype == "float16"]
    start = normal(300, 4, 64, dtype="float16", seed=1)
    lengths = torch.tensor([0, 40, 41, 300], dtype=torch.int32, device=DEVICE)
    x = torch.empty_like(start)

    def chain(pause: Callable[[], object]) -> None:
        x.copy_(start)
        for kernel, after in itertools.pairwise([*kernels, kernels[0]]):
            y = dlattn.attention_varlen(
                start, x, x, lengths, lengths, 259, 259, softmax_scale=1.0, kernel=kernel
            )
            pause()
            parts = [
                dlattn.attention(
                    start[None], y[None, keys], x[None, keys], kernel=after, return_lse=True
                )
                for keys in (slice(0, 170), slice(170, 300))
            ]
            pause()
            merged, _ = dlattn.merge_states(*zip(*parts, strict=True))
            pause()
            x.copy_(merged[0])
            pause()

    check_chain(chain, [x], x)

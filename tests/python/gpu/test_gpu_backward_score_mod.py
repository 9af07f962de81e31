"""Gradients by sm90 with ALiBi, bias and mask on a GPU, against float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from gpu_checks import DEVICE, HALF, HOPPER, normal, qkv, torch, visible_keys
from gradients import check, random_problem, varlen_problem

import dlattn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="sm90 runs on compute capability 9.0"),
]
NEEDS = ("dq", "dk", "dv")
FEATURES = ("alibi", "bias", "mask", "sinks", "window", "scale", "causal", "dlse", "bhsd")
SOFTCAP_DIMS = (64, 256, 40, 192)  # the others have no kernel with both
ROWS = 1100  # several tiles of queries and of keys, the last ones with an edge


def in_own_dtype(problem: Any) -> Any:
    bias = problem.inputs.get("bias")
    if bias is not None:
        problem.inputs["bias"] = bias.to(problem.inputs["q"].dtype)
    return problem


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(dtype: str, seed: int) -> None:
    draw = random.Random(seed)
    chosen = [draw.choice(("alibi", "bias", "mask")), *(x for x in FEATURES if draw.random() < 0.4)]
    problem = random_problem(
        seed, dtype, DEVICE, most=150, features=set(chosen), dims=(64, 128, 40, 96)
    )
    check(in_own_dtype(problem), needs=NEEDS, kernel="sm90")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", range(16))
def test_random_problems_with_more(dtype: str, seed: int) -> None:
    """Wide heads, softcap, sums in turns and the gradient of slopes."""
    draw = random.Random(seed)
    chosen = {draw.choice(("alibi", "bias", "mask")), "softcap"}
    chosen |= {x for x in FEATURES if draw.random() < 0.4}
    if seed % 2:
        chosen.remove("softcap")
    problem = random_problem(
        seed,
        dtype,
        DEVICE,
        most=150,
        features=chosen,
        dims=(256, 160) if seed % 2 else SOFTCAP_DIMS,
    )
    needs = (*NEEDS, "dalibi_slopes") if "alibi" in chosen else NEEDS
    check(in_own_dtype(problem), needs=needs, kernel="sm90", deterministic=seed % 4 > 1)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", range(3))
def test_varlen(dtype: str, seed: int) -> None:
    features = ("seqused_k", "causal", "dlse", "bias", "mask", "alibi")[seed:]
    problem = varlen_problem(seed, dtype, DEVICE, most=200, features=features, dim=64)
    check(in_own_dtype(problem), needs=NEEDS, kernel="sm90")


def scores_of(case: str, dtype: Any) -> dict[str, Any]:
    """Bias, mask and slopes of a problem of 2 x 4 heads and ROWS x ROWS scores."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, generator=generator) + 0.25

    def bias(*shape: int) -> Any:
        return drawn(*shape).to(dtype)

    mask = drawn(2, 4, ROWS, ROWS) > -0.5
    full = bias(2, 4, ROWS, ROWS)
    lowest = torch.finfo(dtype).min
    if case == "alibi":
        return {"alibi_slopes": drawn(2, 4).abs() / 8}
    if case == "shared bias":
        return {"bias": bias(1, 4, ROWS, 1104)[..., :ROWS]}
    if case == "bias of a row":
        return {"bias": bias(2, 1, 1, ROWS)}
    if case == "bias of a column":
        return {"bias": bias(2, 1, ROWS, 1)}
    if case == "unaligned":
        return {"bias": bias(2, 4, ROWS, ROWS + 3)[..., 1 : ROWS + 1], "mask": mask}
    if case == "transposed":
        return {"bias": full.transpose(2, 3), "mask": mask.transpose(2, 3)}
    if case == "padding":
        lengths = torch.tensor([700, 130], device=DEVICE)
        return {"mask": torch.arange(ROWS, device=DEVICE) < lengths[:, None, None, None]}
    if case == "hidden tiles":
        mask[..., 256:640, :384] = False
        mask[:, :, 300:310] = False  # rows that see nothing
        return {"mask": mask}
    if case == "minus infinity":
        return {"bias": full.masked_fill(~mask, -math.inf).index_fill(2, one(17), -math.inf)}
    if case == "lowest":
        return {"bias": full.masked_fill(~mask, lowest)}
    assert case == "NaN under the mask"
    return {"bias": full.masked_fill(~mask, math.nan), "mask": mask, "alibi_slopes": drawn(4) / 8}


def one(index: int) -> Any:
    return torch.tensor([index], device=DEVICE)


CASES = (
    "alibi",
    "shared bias",
    "bias of a row",
    "bias of a column",
    "unaligned",
    "transposed",
    "padding",
    "hidden tiles",
    "minus infinity",
    "lowest",
    "NaN under the mask",
)


def expected(inputs: Any, dout: Any, given: dict[str, Any], causal: bool) -> Any:
    """In float64, of the bias too if there is one; a row without keys gives nothing."""
    leaves = [x.double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    rows = q.shape[2]
    place = torch.arange(rows, device=DEVICE)
    distance = (place[:, None] - place).abs()
    seen = visible_keys(rows, rows, causal, (None, None)).expand(scores.shape)
    if "alibi_slopes" in given:
        scores = scores - given["alibi_slopes"].double()[..., None, None] * distance
    if "mask" in given:
        seen = seen & given["mask"]
    if "bias" in given:
        leaves.append(given["bias"].double().requires_grad_())
        scores = scores + leaves[3].masked_fill(~seen, 0.0)
    scores = scores.masked_fill(~seen, -math.inf)
    blind = (scores == -math.inf).all(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(blind, 0.0), 3).masked_fill(blind, 0.0)
    (p @ v).transpose(1, 2).backward(dout.double())
    return [x.grad for x in leaves]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "dim", "causal"), [("bfloat16", 64, True), ("float16", 128, False)]
)
def test_large_problems(case: str, dtype: str, dim: int, causal: bool) -> None:
    """Results and workspace hold NaN before; the second call gives the same dk and dv."""
    q, k, v = qkv(dtype, ROWS, ROWS, batch=2, heads=4, heads_kv=2, dim=dim)
    dout = normal(*q.shape, dtype=dtype, seed=9)
    given = scores_of(case, q.dtype)
    want = expected((q, k, v), dout, given, causal)
    out, lse = dlattn.attention(q, k, v, causal=causal, return_lse=True, **given)
    found = []
    for _ in range(2):
        results = {
            name: torch.full_like(x, math.nan) for name, x in zip(NEEDS, (q, k, v), strict=True)
        }
        options = {"kernel": "sm90", "needs": NEEDS, "causal": causal, **given, **results}
        plan = dlattn.plan_backward(dout, q, k, v, out, lse, **options)
        assert plan.kernel == "sm90" and "score_mod" in str(plan)
        memory = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=DEVICE)
        dlattn.attention_backward(dout, q, k, v, out, lse, workspace=memory, **options)
        found.append(results)
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("dk", "dv"))
    others = dlattn.attention_backward(
        dout, q, k, v, out, lse, kernel="wmma", needs=NEEDS, causal=causal, **given
    )
    for name, exact, other in zip(NEEDS, want[:3], others[:3], strict=True):
        ours = found[0][name].double()
        assert ours.isfinite().all(), name
        error, theirs = ((x.double() - exact).abs().max() for x in (ours, other))
        largest = exact.abs().max()
        assert largest > 0 and error <= 0.05 * largest, (name, error, largest)
        assert error <= 2.0 * theirs + 1e-3 * largest, (name, error, theirs)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape", ["1HSS", "BHSS"])
@pytest.mark.parametrize(
    ("dtype", "dim", "causal"), [("bfloat16", 128, True), ("float16", 64, False)]
)
def test_dbias(batch: int, shape: str, dtype: str, dim: int, causal: bool) -> None:
    """Also where no query sees a key, and as a sum over the batch."""
    rows = 1096
    q, k, v = qkv(dtype, rows, rows, batch=batch, heads=4, heads_kv=2, dim=dim)
    dout = normal(*q.shape, dtype=dtype, seed=9)
    size = (1 if shape == "1HSS" else batch, 4, rows, rows)
    bias = normal(*size, dtype=dtype, seed=10)
    given = {"bias": bias, "mask": torch.rand(batch, 1, rows, rows, device=DEVICE) > 0.1}
    want = expected((q, k, v), dout, given, causal)
    out, lse = dlattn.attention(q, k, v, causal=causal, return_lse=True, **given)
    options = {"causal": causal, **given}
    torch.full_like(bias, math.nan)  # memory that the result will have
    found = dlattn.attention_backward(dout, q, k, v, out, lse, kernel="sm90", **options)[:4]
    others = dlattn.attention_backward(dout, q, k, v, out, lse, kernel="wmma", **options)[:4]
    again = dlattn.attention_backward(dout, q, k, v, out, lse, kernel="sm90", **options)[3]
    assert torch.equal(found[3], again)
    for ours, other, exact in zip(found, others, want, strict=True):
        error, theirs = ((x.double() - exact).abs().max() for x in (ours, other))
        largest = exact.abs().max()
        assert largest > 0 and error <= 0.05 * largest, (error, largest)
        # Where two entries of a batch share a bias, each one's share is rounded, and the sum.
        assert error <= 3.0 * theirs + 1e-3 * largest, (error, theirs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "softcap"), [(64, 0.0), (128, 0.0), (256, 0.0), (64, 4.0), (256, 4.0)]
)
def test_deterministic(dim: int, softcap: float, causal: bool) -> None:
    """The same bits at every call, near those of sums in any order; with dbias in two passes."""
    rows = 1096
    q, k, v = qkv("bfloat16", rows, rows, batch=2, heads=4, heads_kv=2, dim=dim)
    dout = normal(*q.shape, dtype="bfloat16", seed=9)
    given = {
        "bias": normal(1, 4, rows, rows, dtype="bfloat16", seed=10),
        "mask": torch.rand(2, 1, rows, rows, device=DEVICE) > 0.1,
        "alibi_slopes": torch.rand(2, 4, device=DEVICE) / 8,
        "softcap": softcap,
        "causal": causal,
    }
    out, lse = dlattn.attention(q, k, v, return_lse=True, **given)

    def run(**more: Any) -> Any:
        return dlattn.attention_backward(dout, q, k, v, out, lse, **given, **more)[:5]

    first = run(kernel="sm90", deterministic=True)
    for _ in range(10):
        again = run(kernel="sm90", deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    other = run(kernel="scalar")
    for ours, theirs in zip(first, other, strict=True):
        largest = theirs.abs().max()
        assert largest > 0 and (ours - theirs).abs().max() <= 0.02 * largest


def test_what_is_left_to_others() -> None:
    q, k, v = qkv("bfloat16", 64, 64, batch=1, heads=2, heads_kv=2, dim=128)
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    mask = torch.ones(64, 64, dtype=torch.bool, device=DEVICE)
    for more in ({"softcap": 3.0}, {"bias": mask.float()}):
        given = {"mask": mask, "needs": NEEDS, **more}
        assert dlattn.plan_backward(out, q, k, v, out, lse, **given).kernel != "sm90"
        with pytest.raises(dlattn.UnsupportedError, match="has no "):
            dlattn.plan_backward(out, q, k, v, out, lse, kernel="sm90", **given)

"""Gradients on a GPU against float64, by every family that computes them.

The workspace and the gradients' memory are poisoned with NaN before each call.
"""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
from gpu_checks import DEVICE, HALF, HOPPER, attend, normal, qkv, torch
from gradients import (
    FEATURES,
    NAMES,
    OF,
    array,
    check,
    check_finite_spellings,
    random_problem,
    varlen_problem,
)

import dlattn
from dlattn.reference import to_float64

pytestmark = pytest.mark.gpu

# The features that are tested of each family. Bias, mask and slopes have tests of their own for
# sm90 (test_gpu_backward_score_mod.py).
FEATURES_OF = {
    "scalar": FEATURES,
    "wmma": FEATURES,
    "sm90": ("softcap", "sinks", "window", "scale", "causal", "dlse", "bhsd"),
}
SERVED = [
    ("scalar", "float32"),
    *((kernel, dtype) for kernel in ("scalar", "wmma") for dtype in HALF),
    *(("sm90", dtype) for dtype in HALF if HOPPER),
]
every_family = pytest.mark.parametrize(("kernel", "dtype"), SERVED)
WORKSPACE = 1 << 24  # float32 elements


@pytest.fixture(scope="module")
def memory() -> Any:
    return torch.empty(WORKSPACE, dtype=torch.float32, device=DEVICE)


def poison(problem: Any, needs: Any = None) -> dict[str, Any]:
    """Tensors of NaN for dq, dk and dv."""
    wanted = [x for x in ("dq", "dk", "dv") if needs is None or x in needs]
    return {name: torch.full_like(problem.inputs[OF[name]], torch.nan) for name in wanted}


def needs_of(kernel: str, features: Any) -> Any:
    """The gradients that a family computes with these features; None: all."""
    if kernel == "wmma" and {"alibi", "softcap"} <= set(features):
        return [name for name in NAMES if name != "dalibi_slopes"]
    return None


def run(kernel: str, problem: Any, memory: Any, needs: Any = None, **more: Any) -> Any:
    memory.fill_(torch.nan)
    if needs is not None:
        needs = [x for x in needs if problem.inputs.get(OF[x]) is not None]
    given = poison(problem, needs)
    return check(problem, needs=needs, kernel=kernel, workspace=memory, **given, **more)


@every_family
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(kernel: str, dtype: str, seed: int, memory: Any) -> None:
    draw = random.Random(seed)
    features = [x for x in FEATURES_OF[kernel] if draw.random() < 0.4]
    dims = (64, 128) if kernel == "sm90" else (16, 64, 128, 256)
    problem = random_problem(seed, dtype, DEVICE, most=150, features=features, dims=dims)
    run(kernel, problem, memory, needs_of(kernel, features))


@every_family
@pytest.mark.parametrize("seed", range(3))
def test_all_features_at_once(kernel: str, dtype: str, seed: int, memory: Any) -> None:
    features = FEATURES_OF[kernel]
    problem = random_problem(seed, dtype, DEVICE, most=150, features=features, dims=(64,))
    run(kernel, problem, memory, needs_of(kernel, features))


@every_family
@pytest.mark.parametrize("seed", range(4))
def test_varlen(kernel: str, dtype: str, seed: int, memory: Any) -> None:
    """NaN in rows of no sequence, and behind seqused_k, reaches nothing."""
    features = ("seqused_k", "causal", "dlse") if seed % 2 else ()
    problem = varlen_problem(seed, dtype, DEVICE, most=200, features=features, dim=64)
    run(kernel, problem, memory)


@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("seed", range(8))
def test_the_family_that_is_chosen(dtype: str, seed: int) -> None:
    check(random_problem(100 + seed, dtype, DEVICE, most=100))


@every_family
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_workspace_of_the_plan(kernel: str, dtype: str, deterministic: bool) -> None:
    problem = random_problem(18, dtype, DEVICE, most=100, features=("causal",), dims=(64,))
    problem.forward()
    given = {**problem.inputs, **problem.options, "out": problem.out, "lse": problem.lse}
    given |= {"dout": problem.dout, "kernel": kernel, "deterministic": deterministic}
    plan = dlattn.plan_backward(**given)
    assert plan.kernel == kernel and plan.num_launches == len(plan.launches) > 1
    memory = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=DEVICE)
    check(problem, kernel=kernel, deterministic=deterministic, workspace=memory)
    with pytest.raises(dlattn.UnsupportedError, match="workspace has"):
        problem.gradients(kernel=kernel, deterministic=deterministic, workspace=memory[:-256])


@every_family
@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_dout_of_any_size(kernel: str, dtype: str, factor: float, memory: Any) -> None:
    problem = random_problem(5, dtype, DEVICE, most=100, features=("causal",), dims=(64,))
    problem.dout = array(to_float64(problem.dout) * factor, dtype, DEVICE)
    run(kernel, problem, memory)


@every_family
def test_rows_of_dout_may_be_one_row(kernel: str, dtype: str, memory: Any) -> None:
    problem = random_problem(7, dtype, DEVICE, most=100, features=("causal",), dims=(64,))
    problem.dout = problem.dout[:1, :1, :1].expand(problem.dout.shape)
    run(kernel, problem, memory)


@every_family
@pytest.mark.parametrize("needs", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dsinks")])
def test_only_what_is_asked_for(kernel: str, dtype: str, needs: Any, memory: Any) -> None:
    features = ("sinks", "causal", "softcap")
    problem = random_problem(11, dtype, DEVICE, most=100, features=features, dims=(64,))
    run(kernel, problem, memory, needs)


@pytest.mark.parametrize("kernel", ["scalar", "wmma"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("lowest", [-1e9, -1e20, -3.4028234663852886e38])
def test_finite_spellings_of_minus_infinity(kernel: str, dtype: str, lowest: float) -> None:
    check_finite_spellings(lowest, dtype, DEVICE, kernel=kernel)


@pytest.mark.parametrize("kernel", ["scalar", "wmma"])
@pytest.mark.parametrize("dtype", HALF)
def test_rows_that_see_nothing(kernel: str, dtype: str, memory: Any) -> None:
    features = ("mask", "softcap", "dlse")
    problem = random_problem(8, dtype, DEVICE, most=100, features=features, dims=(64,))
    found = run(kernel, problem, memory)
    blind = problem.inputs["q"].shape[1] // 2
    assert (found.dq[:, blind] == 0).all() and (found.dq[:, 0] != 0).any()


@pytest.mark.parametrize("kernel", ["auto", *dict.fromkeys(kernel for kernel, _ in SERVED)])
def test_the_same_bits_each_time(kernel: str, memory: Any) -> None:
    problem = random_problem(12, "float16", DEVICE, most=400, features=("causal",), dims=(64,))
    problem.forward()

    def gradients() -> Any:
        memory.fill_(torch.nan)
        return problem.gradients(kernel=kernel, workspace=memory, deterministic=True)

    first = gradients()
    for _ in range(1000):
        again = gradients()
        assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3], strict=True))


# Calls with more thread blocks than the GPU has SMs: lengths of sequences, or one of a batch of 2,
# heads and what else there is.
FULL_GRIDS = {
    "full": (2048, 16, {}),
    "causal": (2048, 16, {"causal": True}),
    "window": (2048, 16, {"window": (300, 100)}),
    "softcap": (1024, 16, {"causal": True, "softcap": 2.0}),
    "grouped": (2048, 8, {"causal": True}),
    "varlen": ([1500, 40, 0, 777, 2048], 4, {"causal": True}),
}


def exact_gradients(inputs: Any, dout: Any, lengths: Any, **options: Any) -> Any:
    """In float64, sequence by sequence where there are lengths."""
    leaves = [x.double().requires_grad_() for x in inputs]
    parts = [(slice(None), slice(None))]
    if lengths is not None:
        starts = [0, *accumulate(lengths)]
        parts = [(slice(None), slice(*x)) for x in pairwise(starts)]
    for part in parts:
        q, k, v = (x[part] for x in leaves)
        if q.shape[1] == 0:
            continue
        out, _ = attend(q, k, v, torch.float64, **options)
        (out * dout[part].double()).sum().backward()
    return [x.grad for x in leaves]


@pytest.mark.skipif(not HOPPER, reason="sm90 runs on compute capability 9.0")
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("case", FULL_GRIDS)
def test_sums_in_turns_on_a_busy_gpu(case: str, dim: int) -> None:
    """50 times the same bits, beside another stream, and as near to float64 as the fast sums."""
    given, heads_kv, options = FULL_GRIDS[case]
    lengths = given if isinstance(given, list) else None
    rows, batch = (sum(lengths), 1) if lengths else (given, 2)
    dtype = "bfloat16" if case == "grouped" else "float16"
    q, k, v = qkv(dtype, rows, rows, batch=batch, heads=16, heads_kv=heads_kv, dim=dim)
    dout = normal(*q.shape, dtype=dtype, seed=9)
    forward, backward, more = dlattn.attention, dlattn.attention_backward, dict(options)
    if lengths:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        forward, backward = dlattn.attention_varlen, dlattn.attention_varlen_backward
        more |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        more |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    out, lse = forward(q, k, v, return_lse=True, **more)
    results = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    plan = dlattn.plan_backward(
        dout, q, k, v, out, lse, kernel="sm90", deterministic=True, **results, **more
    )
    assert plan.grid > torch.cuda.get_device_properties(0).multi_processor_count
    memory = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=DEVICE)

    def run(deterministic: bool) -> Any:
        memory.fill_(255)
        for x in results.values():
            x.fill_(torch.nan)
        more_here = {**results, **more, "workspace": memory, "deterministic": deterministic}
        backward(dout, q, k, v, out, lse, kernel="sm90", **more_here)
        return [x.clone() for x in results.values()]

    first, fast = run(True), run(False)
    other, noise = torch.cuda.Stream(), torch.randn(3072, 3072, device=DEVICE)
    for i in range(50):
        with torch.cuda.stream(other):
            torch.mm(noise[: 64 + 60 * i], noise)
        again = run(True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), i
    other.synchronize()
    inputs = [x[None] if lengths else x for x in (q, k, v)]
    exact = exact_gradients(inputs, dout[None] if lengths else dout, lengths, **options)
    for name, ours, theirs, want in zip(results, first, fast, exact, strict=True):
        want = want.reshape(ours.shape)
        error, of_fast = ((x.double() - want).abs().max() for x in (ours, theirs))
        largest = want.abs().max()
        assert largest > 0 and error <= 0.05 * largest, (name, error, largest)
        assert error <= 1.2 * of_fast + 1e-4 * largest, (name, error, of_fast)


# Blocks that walk 96 tiles of queries and more: of a dtype, head_dim, queries, keys and heads of q
# that share one.
LONG_WALKS = [
    ("bfloat16", 128, 6208, 6333, 1, False),
    ("float16", 128, 1603, 1990, 4, False),
    ("bfloat16", 128, 3200, 3200, 4, True),
    ("float16", 64, 3300, 2100, 4, False),
    ("bfloat16", 64, 3205, 6400, 8, "bottom_right"),
    ("float16", 64, 12400, 500, 1, False),
    ("float16", 96, 1700, 1100, 4, False),
]


@pytest.mark.skipif(not HOPPER, reason="sm90 runs on compute capability 9.0")
@pytest.mark.parametrize(("dtype", "dim", "queries", "keys", "group", "causal"), LONG_WALKS)
def test_long_walks(
    dtype: str, dim: int, queries: int, keys: int, group: int, causal: Any, memory: Any
) -> None:
    """As near to float64 as sums in turns, by another kernel."""
    q, k, v = qkv(dtype, queries, keys, batch=1, heads=2 * group, heads_kv=2, dim=dim)
    dout = normal(*q.shape, dtype=dtype, seed=9)
    out, lse = dlattn.attention(q, k, v, return_lse=True, causal=causal)
    results = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    given = {**results, "workspace": memory, "kernel": "sm90", "causal": causal}
    assert dlattn.plan_backward(dout, q, k, v, out, lse, **given).variant == "late"

    def run(deterministic: bool) -> Any:
        memory.fill_(torch.nan)
        for x in results.values():
            x.fill_(torch.nan)
        dlattn.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **given)
        return [x.clone() for x in results.values()]

    exact, in_turns = exact_gradients((q, k, v), dout, None, causal=causal), run(True)
    for _ in range(3):
        for name, ours, other, want in zip(results, run(False), in_turns, exact, strict=True):
            error, of_other = ((x.double() - want).abs().max() for x in (ours, other))
            largest = want.abs().max()
            assert largest > 0 and error <= 0.05 * largest, (name, error, largest)
            assert error <= 1.2 * of_other + 1e-4 * largest, (name, error, of_other)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (
        torch.ones(2, n, 2, 64, dtype=torch.float16, device=DEVICE)
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    given = {name: torch.full_like(x, torch.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    found = dlattn.attention_backward(torch.ones_like(out), q, k, v, out, lse, **given)
    assert all((x == 0).all() for x in found[:3])


def test_torch_computes_these_gradients() -> None:
    """By the operator, on a stream of its own, and compiled."""
    import dlattn.torch

    problem = random_problem(20, "float16", DEVICE, most=100, features=("causal",), dims=(64,))
    tensors = [x.requires_grad_() for x in problem.inputs.values()]
    causal = problem.options["causal"]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return dlattn.torch.attention(q, k, v, causal=causal)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = function(*tensors)
        torch.cuda.current_stream().wait_stream(stream)
        results.append(torch.autograd.grad(out, tensors, problem.dout))
    for x in tensors:
        x.requires_grad_(False)
    found = problem.gradients()
    for name, one, other, mine in zip(NAMES, *results, found, strict=False):
        assert torch.allclose(one, other, atol=1e-2, rtol=1e-2), name
        assert torch.allclose(one, mine, atol=1e-2, rtol=1e-2), name
    check(problem, found)

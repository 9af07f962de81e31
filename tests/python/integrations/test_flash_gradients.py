"""Gradients of the functions named as flash-attn's against float64, of tensors as models have them.

Leaves lie in memory in another order and with gaps, some queries see no key, some sequences are
empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import normal
from gradients import Problem, check

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn import flash_attn  # noqa: E402

HEADS, HEADS_KV, DIM = 4, 2, 16
DTYPES = ("float32", "bfloat16")
FORMS = ("", "kvpacked_", "qkvpacked_")


def strided(x: Any) -> Any:
    """A leaf of these values, its dimensions in memory the other way round, with gaps of NaN."""
    *outer, dim = x.shape
    memory = torch.full((*outer[::-1], dim + 3), float("nan"), dtype=x.dtype)
    view = memory.permute(*range(len(outer) - 1, -1, -1), len(outer))[..., :dim]
    return view.copy_(x).detach().requires_grad_()


def tensor(*shape: int, seed: int, dtype: str = "float32") -> Any:
    return torch.from_numpy(normal(*shape, seed=seed)).to(getattr(torch, dtype))


def unpacked(form: str, leaves: list[Any], axis: int) -> list[Any]:
    if form == "qkvpacked_":
        return list(leaves[0].unbind(axis))
    return [leaves[0], *(leaves[1].unbind(axis) if form == "kvpacked_" else leaves[1:])]


def leaves_of(form: str, rows_q: tuple[int, ...], rows_k: tuple[int, ...], dtype: str) -> Any:
    if form == "qkvpacked_":
        return [strided(tensor(*rows_q, 3, HEADS, DIM, seed=1, dtype=dtype))]
    q = strided(tensor(*rows_q, HEADS, DIM, seed=1, dtype=dtype))
    if form == "kvpacked_":
        return [q, strided(tensor(*rows_k, 2, HEADS_KV, DIM, seed=2, dtype=dtype))]
    k, v = (strided(tensor(*rows_k, HEADS_KV, DIM, seed=n, dtype=dtype)) for n in (2, 3))
    return [q, k, v]


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (4, 1), "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": np.abs(normal(HEADS, seed=7)).astype(np.float32)},
}


def check_gradients(
    form: str, function: Any, leaves: Any, axis: int, name: str, lengths: Any
) -> None:
    """Gradients of out and lse; slopes that require grad have one too, else None."""
    options = dict(OPTIONS[name])
    given: dict[str, Any] = dict(zip("qkv", unpacked(form, leaves, axis), strict=True))
    inputs = {key: x.detach() for key, x in given.items()}
    if "alibi_slopes" in options:
        slopes = torch.from_numpy(options.pop("alibi_slopes"))
        inputs["alibi_slopes"] = slopes
        given["alibi_slopes"] = slopes.clone().requires_grad_()
    out, lse, _ = function(
        *leaves,
        **options,
        alibi_slopes=given.get("alibi_slopes"),
        return_attn_probs=True,
        deterministic=True,
    )
    named = {"window": options["window_size"]} if "window_size" in options else {}
    options.pop("window_size", None)
    problem = Problem(inputs, {**options, **named}, lengths=lengths)
    problem.forward()
    blind = problem.lse == -torch.inf
    assert blind.any() == (form != "qkvpacked_")
    assert torch.equal(lse.isposinf(), blind) and torch.equal(out, problem.out)
    problem.dout = torch.from_numpy(normal(*out.shape, seed=11)).to(out.dtype)
    problem.dlse = torch.from_numpy(normal(*lse.shape, seed=12))
    torch.autograd.backward([out, lse], [problem.dout, problem.dlse])
    found = [*unpacked(form, [x.grad for x in leaves], axis), None]
    slopes = given.get("alibi_slopes")
    found += [None if slopes is None else slopes.grad, None]
    check(problem, dlattn.Gradients(*found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_dense(form: str, name: str, dtype: str) -> None:
    leaves = leaves_of(form, (2, 11), (2, 7), dtype)
    check_gradients(form, getattr(flash_attn, f"flash_attn_{form}func"), leaves, 2, name, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_varlen(form: str, name: str, dtype: str) -> None:
    starts_q = torch.tensor([0, 6, 6, 10, 19], dtype=torch.int32)  # the second has no queries,
    starts_k = torch.tensor([0, 4, 7, 7, 20], dtype=torch.int32)  # the third no keys
    starts_k = starts_q if form == "qkvpacked_" else starts_k
    longest = [int((x[1:] - x[:-1]).max()) for x in (starts_q, starts_k)]
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = dict(zip(names, (starts_q, starts_k, *longest), strict=True))
    leaves = leaves_of(form, (19,), (20,), dtype)
    function = getattr(flash_attn, f"flash_attn_varlen_{form}func")
    same = {"cu_seqlens": starts_q, "max_seqlen": longest[0]}
    own = same if form == "qkvpacked_" else lengths

    def call(*tensors: Any, **options: Any) -> Any:
        return function(*tensors, **own, **options)

    check_gradients(form, call, leaves, 1, name, lengths)


def test_slopes_that_need_no_gradient_have_none() -> None:
    q, k, v = leaves_of("", (2, 5), (2, 7), "float32")
    slopes = torch.from_numpy(OPTIONS["alibi"]["alibi_slopes"])
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True)
    out.sum().backward()  # a gradient all of whose strides are 0
    assert slopes.grad is None and all(x.grad.isfinite().all() for x in (q, k, v))
    torch.testing.assert_close(v.grad.sum(), torch.tensor(2.0 * 5 * HEADS * DIM))


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_mapped_and_differentiated_by_torch_func(wants_gradient: bool) -> None:
    """vmap, with tensors that require grad and with others, as of dlattn.torch's functions."""
    q, k, v = (tensor(3, 2, 5, HEADS, DIM, seed=n) for n in (1, 2, 3))
    call = flash_attn.flash_attn_func
    if wants_gradient:
        call = torch.func.grad(lambda q, k, v: flash_attn.flash_attn_func(q, k, v).square().sum())
    want = torch.stack([call(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v), want)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(call)(q, k, v), want)
    offsets = torch.tensor([0, 2, 10], dtype=torch.int32)

    def packed(q: Any, k: Any, v: Any) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn.flash_attn_varlen_func(*rows, offsets, offsets, 8, 8)

    want = torch.stack([packed(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(packed)(q, k, v), want)


def test_tangents_are_refused() -> None:
    q = tensor(2, 5, HEADS, DIM, seed=1)
    with pytest.raises(dlattn.UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda x: flash_attn.flash_attn_func(x, q, q), (q,), (q,))

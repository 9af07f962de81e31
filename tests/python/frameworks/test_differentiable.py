"""Gradients of the formula, in parts: against finite differences, and against torch's autograd."""

from __future__ import annotations

from typing import Any

import pytest
from arrays import normal, qkv

torch = pytest.importorskip("torch")

from dlattn import UnsupportedError  # noqa: E402
from dlattn.integrations.torch import differentiable  # noqa: E402
from dlattn.integrations.torch.differentiable import attention  # noqa: E402


def tensor(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    values = torch.from_numpy(normal(*shape, seed=seed))
    return values.to(dtype or torch.float64).requires_grad_()


def inputs(num_heads_kv: int = 2, seqlen_k: int = 7, dtype: Any = None) -> list[Any]:
    arrays = qkv(2, 5, seqlen_k, 4, num_heads_kv, 3, 6)
    return [torch.from_numpy(x).to(dtype or torch.float64).requires_grad_() for x in arrays]


def some_mask(*shape: int) -> Any:
    mask = torch.from_numpy(normal(*shape, seed=5)) > -0.2
    mask[..., 1, :] = False  # a query that sees nothing
    return mask


def check_gradients(function: Any, tensors: list[Any]) -> None:
    torch.autograd.gradcheck(function, tensors, fast_mode=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 1.5},
    "mask": {"mask": some_mask(2, 1, 5, 7)},
    "mask of heads": {"mask": some_mask(4, 5, 7)},
    "mask of all": {"mask": some_mask(5, 7), "softcap": 0.7},
}


@pytest.fixture(params=["whole", "heads", "queries"])
def parts(request, monkeypatch):
    """How much of the problem is computed at a time."""
    most = {"whole": 1 << 23, "heads": 2 * 5 * 7, "queries": 2 * 7 * 2}[request.param]
    monkeypatch.setattr(differentiable, "MOST_SCORES", most)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("num_heads_kv", [1, 2, 4])
def test_finite_differences(parts, num_heads_kv, name, causal):
    options = {"softmax_scale": None, **OPTIONS[name], "causal": causal}
    check_gradients(lambda *x: attention(*x, **options), inputs(num_heads_kv))


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 5, 7), (4, 5, 7), (5, 7), (1, 5, 1), (2, 1, 1, 7), (7,), (4, 1, 1), (1, 4, 5, 7)],
)
def test_finite_differences_of_a_bias(parts, shape):
    """Which is summed where it broadcasts."""

    def function(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(
            q, k, v, causal=False, softmax_scale=None, bias=bias, mask=some_mask(5, 7), softcap=2.0
        )

    check_gradients(function, [*inputs(), tensor(*shape, seed=7)])


def by_autograd(q: Any, k: Any, v: Any, sinks: Any, *, softcap: float, mask: Any) -> Any:
    """A few lines that torch differentiates."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    columns = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    p = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_sinks(parts, dtype):
    """They are float32, too coarse for finite differences."""
    options = {"softcap": 1.5, "mask": some_mask(5, 7)}
    tensors = [*inputs(dtype=getattr(torch, dtype)), tensor(4, dtype=torch.float32)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    grad_out = torch.from_numpy(normal(2, 5, 4, 6, seed=9)).to(tensors[0].dtype)
    by_autograd(*exact, **options).backward(grad_out.double())
    q, k, v, sinks = tensors
    attention(q, k, v, sinks=sinks, causal=False, softmax_scale=None, **options).backward(grad_out)
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-5)
    for found, want in zip(tensors, exact, strict=True):
        assert found.grad.dtype == found.dtype
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(found.grad.double(), want.grad, **close)


def test_queries_that_see_nothing_have_no_gradient():
    """Not even NaN, with or without keys."""
    for seqlen_k in (7, 0):
        q, k, v = inputs(seqlen_k=seqlen_k)
        mask = some_mask(5, seqlen_k)
        attention(q, k, v, causal=False, softmax_scale=None, mask=mask).sum().backward()
        assert (q.grad[:, 1] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))
        assert (q.grad[:, 0] != 0).any() == (seqlen_k > 0)


def test_an_empty_batch():
    arrays = [x.detach()[:0].requires_grad_() for x in inputs()]
    attention(*arrays, causal=True, softmax_scale=None).sum().backward()
    assert [x.grad.shape for x in arrays] == [x.shape for x in arrays]


def test_parts_are_no_larger_than_said(monkeypatch):
    for most in (1, 100, 1000, 1 << 23):
        monkeypatch.setattr(differentiable, "MOST_SCORES", most)
        seen = torch.zeros(2, 3, 40)
        q = torch.zeros(2, 3, 4, 40, 8)
        for batch, heads, rows in differentiable._chunks(q, 50):
            seen[batch, heads, rows] += 1
            count = seen[batch, heads, rows].numel()
            assert count == 1 or count * 4 * 50 <= most
        assert (seen == 1).all()


def test_autocast_changes_no_gradient():
    found = []
    for enabled in (False, True):
        tensors = inputs(dtype=torch.float32)
        out = attention(*tensors, causal=True, softmax_scale=None, softcap=2.0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out.sum().backward()
        found.append([x.grad for x in tensors])
    assert all(map(torch.equal, *found))


def test_gradients_have_none():
    q, k, v = inputs()
    out = attention(q, k, v, causal=False, softmax_scale=None)
    with pytest.raises(UnsupportedError, match=r"create_graph is True.*accepted: False"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_only_what_is_asked_for(monkeypatch):
    """A mask made into a bias needs no gradient, which would be as large."""
    asked: list[Any] = []
    gradients = differentiable._gradients

    def spied(*arguments: Any, **options: Any) -> Any:
        asked.append(options["needs_bias"])
        return gradients(*arguments, **options)

    monkeypatch.setattr(differentiable, "_gradients", spied)
    for wanted in (False, True):
        bias = tensor(5, 7).detach().requires_grad_(wanted)
        out = attention(*inputs(), causal=False, softmax_scale=None, bias=bias)
        out.sum().backward()
        assert (bias.grad is not None) == wanted
    assert asked == [False, True]

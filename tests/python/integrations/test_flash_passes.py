"""The passes that code for training calls itself, where it looks for flash-attn's.

It spreads keys over parts, merges what the parts give by softmax_lse, and computes each part's
gradients with out and softmax_lse of all keys.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
from arrays import normal

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn import UnsupportedError, flash_attn  # noqa: E402
from dlattn.flash_attn import flash_attn_interface as flash  # noqa: E402
from dlattn.reference import (  # noqa: E402
    attention_backward_reference,
    attention_reference,
    attention_varlen_backward_reference,
    attention_varlen_reference,
)

HEADS, HEADS_KV, DIM = 4, 2, 16
BOUNDS = {"float32": 2e-5, "bfloat16": 0.06}  # bfloat16 is rounded in each part
# Parameters as in flash-attn 2.8.
SIDES = ["window_size_left", "window_size_right"]
COMMON = ["dropout_p", "softmax_scale", "causal", *SIDES, "softcap", "alibi_slopes"]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
CACHE = ["block_table", "leftpad_k", "seqused_k", "zero_tensors", "num_splits"]
TENSORS = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
LATER = ["deterministic", "rng_state"]
SIGNATURES = {
    "_flash_attn_forward": ["q", "k", "v", *COMMON, "return_softmax"],
    "_flash_attn_varlen_forward": ["q", "k", "v", *LENGTHS, *COMMON, "return_softmax", *CACHE],
    "_flash_attn_backward": [*TENSORS, *COMMON, *LATER],
    "_flash_attn_varlen_backward": [*TENSORS, *LENGTHS, *COMMON, *LATER, "zero_tensors"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Callers read it and pass all that is positional; window_size is an older version's."""
    function = getattr(flash, name)
    assert inspect.isfunction(function)
    spec = inspect.getfullargspec(function)
    assert spec.args == SIGNATURES[name] and spec.kwonlyargs == ["window_size"]


def call(function: Any, **given: Any) -> Any:
    """Call as rings of attention do: every parameter by name, those not given by its default."""
    spec = inspect.getfullargspec(function)
    defaults = spec.defaults or ()
    named = dict(zip(spec.args[-len(defaults) :], defaults, strict=True))
    return function(**{**named, "dropout_p": 0, "softmax_scale": DIM**-0.5, **given})


def tensor(*shape: int, seed: int, dtype: str = "float32") -> Any:
    return torch.from_numpy(normal(*shape, seed=seed)).to(getattr(torch, dtype))


def poisoned(x: Any) -> Any:
    return torch.full_like(x, float("nan"))


def merged(out: Any, lse: Any, part_out: Any, part_lse: Any) -> Any:
    """float32 (batch, seqlen, heads, .) and (batch, seqlen, heads): the latter lies transposed."""
    part_out, part_lse = part_out.float(), part_lse.transpose(1, 2)
    if out is None:
        return part_out, part_lse
    more = torch.sigmoid(part_lse - lse)[..., None]
    return out + more * (part_out - out), torch.logaddexp(lse, part_lse).contiguous()


class Ring(torch.autograd.Function):
    """Causal or full attention of `parts` processes, one after the other: process r has part r."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, parts: int, causal: bool) -> Any:
        results = []
        for r, queries in enumerate(q.chunk(parts, 1)):
            out = lse = None
            for step in range(parts):
                s = (r - step) % parts
                if causal and s > r:
                    continue
                keys, values = k.chunk(parts, 1)[s], v.chunk(parts, 1)[s]
                found = call(
                    flash._flash_attn_forward,
                    q=queries,
                    k=keys,
                    v=values,
                    causal=causal and s == r,
                )
                out, lse = merged(out, lse, *found[:2])
                assert found[2].shape == (0,) and found[3].shape == (2,)
            results.append((out.to(q.dtype), lse.transpose(1, 2)))
        assert parts == 1 or not results[-1][1].is_contiguous()
        ctx.save_for_backward(q, k, v, *(x for pair in results for x in pair))
        ctx.given = parts, causal
        return torch.cat([out for out, _ in results], 1)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        q, k, v, *results = ctx.saved_tensors
        parts, causal = ctx.given
        sums = [torch.zeros(x.shape) for x in (q, k, v)]
        buffers = [poisoned(x.chunk(parts, 1)[0]) for x in (q, k, v)]
        for r in range(parts):
            for s in range(r + 1 if causal else parts):
                call(
                    flash._flash_attn_backward,
                    dout=dout.chunk(parts, 1)[r],
                    q=q.chunk(parts, 1)[r],
                    k=k.chunk(parts, 1)[s],
                    v=v.chunk(parts, 1)[s],
                    out=results[2 * r],
                    softmax_lse=results[2 * r + 1],
                    causal=causal and s == r,
                    **dict(zip(("dq", "dk", "dv"), buffers, strict=True)),
                )
                for total, part, place in zip(sums, buffers, (r, s, s), strict=True):
                    total.chunk(parts, 1)[place].add_(part)
                    part.fill_(float("nan"))
        return (*(x.to(q.dtype) for x in sums), None, None)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_ring_has_the_gradients_of_the_whole(parts: int, causal: bool, dtype: str) -> None:
    leaves = [
        tensor(2, 21, heads, DIM, seed=n, dtype=dtype).requires_grad_()
        for n, heads in enumerate((HEADS, HEADS_KV, HEADS_KV))
    ]
    out = Ring.apply(*leaves, parts, causal)
    exact = dict(zip("qkv", (x.detach().double().numpy() for x in leaves), strict=True))
    want, lse = attention_reference(**exact, causal=causal)
    bound = {"rtol": BOUNDS[dtype], "atol": BOUNDS[dtype]}
    np.testing.assert_allclose(out.detach().double(), want, **bound)
    weights = torch.linspace(-1, 1, DIM).to(out.dtype)
    for dout in (torch.ones_like(weights), weights):
        found = torch.autograd.grad((out * dout).sum(), leaves, retain_graph=True)
        expanded = np.broadcast_to(dout.double().numpy(), want.shape)
        expected = attention_backward_reference(expanded, **exact, out=want, lse=lse, causal=causal)
        for one, other in zip(found, expected, strict=False):
            np.testing.assert_allclose(one.double(), other, **bound)
    found = torch.autograd.grad(out.sum(), leaves)  # of which every stride is 0
    assert all(x.isfinite().all() for x in found)


STARTS_Q = torch.tensor([0, 6, 6, 10, 19], dtype=torch.int32)  # the second has no queries,
STARTS_K = torch.tensor([0, 4, 7, 7, 20], dtype=torch.int32)  # the third no keys
VARLEN = dict(zip(LENGTHS, (STARTS_Q, STARTS_K, 9, 13), strict=True))


def test_heads_of_a_pack_in_turn() -> None:
    """Each key head with its query heads, all as views; softmax_lse of a row without keys is inf
    or, as `attention` tells it, -inf."""
    q = tensor(19, HEADS, DIM, seed=1)
    k, v = (tensor(20, HEADS_KV, DIM, seed=n) for n in (2, 3))
    dout = tensor(19, HEADS, DIM, seed=4)
    dq, dk, dv = map(poisoned, (q, k, v))
    options = {"softcap": 2.0, "causal": True}
    sides = {"window_size_left": 5, "window_size_right": 0}
    host = {name: x if isinstance(x, int) else x.numpy() for name, x in VARLEN.items()}
    host |= {**options, "window": (5, 0)}
    exact = {name: x.double().numpy() for name, x in zip("qkv", (q, k, v), strict=True)}
    want, lse = attention_varlen_reference(**exact, **host)
    expected = attention_varlen_backward_reference(
        dout.double().numpy(), **exact, out=want, lse=lse, **host
    )
    for sign in (1, -1):
        for g in range(HEADS_KV):
            heads = slice(2 * g, 2 * g + 2)
            own = {"q": q[:, heads], "k": k[:, g : g + 1], "v": v[:, g : g + 1]}
            out, part_lse, *_ = call(
                flash._flash_attn_varlen_forward, **own, **VARLEN, **options, **sides
            )
            np.testing.assert_allclose(out, want[:, heads], atol=1e-5)
            hidden = torch.from_numpy(np.isneginf(lse[heads]))
            assert hidden.any() and torch.equal(part_lse.isposinf(), hidden)
            assert torch.equal(~part_lse.isfinite(), hidden)
            softmax_d = call(
                flash._flash_attn_varlen_backward,
                dout=dout[:, heads],
                out=out,
                softmax_lse=torch.where(hidden, sign * torch.inf, part_lse),
                dq=dq[:, heads],
                dk=dk[:, g : g + 1],
                dv=dv[:, g : g + 1],
                **own,
                **VARLEN,
                **options,
                **sides,
            )
            delta = (dout[:, heads].double() * out.double()).sum(-1).T
            check_softmax_d(softmax_d, delta)
        for one, other in zip((dq, dk, dv), expected, strict=False):
            np.testing.assert_allclose(one, other, atol=2e-5)
            one.fill_(float("nan"))


def check_softmax_d(softmax_d: Any, delta: Any) -> None:
    """flash-attn leaves 128 rows behind each sequence."""
    expected = torch.zeros(delta.shape[0], 19 + 4 * 128)
    for b, (begin, end) in enumerate(itertools.pairwise(STARTS_Q)):
        expected[:, begin + 128 * b : end + 128 * b] = delta[:, begin:end]
    torch.testing.assert_close(softmax_d, expected)


def dense() -> dict[str, Any]:
    """The arguments of a backward pass; dq, dk and dv hold NaN."""
    given = {name: tensor(2, 9, HEADS, DIM, seed=n) for n, name in enumerate(("q", "k", "v"))}
    out, lse, *_ = flash._flash_attn_forward(*given.values(), 0.0, None, True, -1, -1, 0.0, None)
    given |= {"dout": tensor(2, 9, HEADS, DIM, seed=5), "out": out, "softmax_lse": lse}
    given |= {f"d{name}": poisoned(given[name]) for name in "qkv"}
    return {**given, "dropout_p": 0.0, "softmax_scale": None, "causal": True}


def test_results_of_the_forward_pass() -> None:
    """Those of flash_attn_func, whose gradients the backward pass gives, of those asked for."""
    given = dense()
    leaves = [given[name].clone().requires_grad_() for name in "qkv"]
    out, lse, _ = flash_attn.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert torch.equal(out, given["out"]) and torch.equal(lse, given["softmax_lse"])
    want = torch.autograd.grad(out, leaves, given["dout"])
    softmax_d = flash._flash_attn_backward(**{**given, "dk": None}, deterministic=True)
    assert torch.equal(given["dq"], want[0]) and torch.equal(given["dv"], want[2])
    assert given["dk"].isnan().all()
    delta = (given["dout"] * given["out"]).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d, torch.nn.functional.pad(delta, (0, 128 - 9)))


def test_the_older_keyword_of_windows() -> None:
    """Both spellings, in both passes, are the window of flash_attn_func."""
    given = dense()
    q, k, v = (given[name] for name in "qkv")
    common = {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
    want, lse, _ = flash_attn.flash_attn_func(q, k, v, window_size=(3, 1), return_attn_probs=True)
    assert not torch.equal(want, given["out"])
    found = {}
    for window in ({"window_size": (3, 1)}, {"window_size_left": 3, "window_size_right": 1}):
        out, found_lse, *_ = flash._flash_attn_forward(q, k, v, **common, **window)
        assert torch.equal(out, want) and torch.equal(found_lse, lse)
        given |= {"out": out, "softmax_lse": lse, "dq": poisoned(q), **common}
        flash._flash_attn_backward(**given, **window)
        found[len(window)] = given["dq"]
    assert torch.equal(found[1], found[2]) and found[1].isfinite().all()
    wanted = dlattn.attention_backward(given["dout"], q, k, v, want, lse, window=(3, 1))
    assert torch.equal(found[1], wanted.dq)


Wrong = tuple[dict[str, Any], type[Exception], str]
WRONG_BACKWARD: dict[str, Wrong] = {
    "dropout": ({"dropout_p": 0.1}, UnsupportedError, "dropout_p is 0.1"),
    "causal": ({"causal": 1}, TypeError, "causal is of type int"),
    "window": ({"window_size_left": None}, TypeError, r"window_size is \(None, -1\)"),
    "windows": (
        {"window_size": (1, 1), "window_size_left": 1},
        UnsupportedError,
        r"window_size is \(1, 1\) with window_size_left and window_size_right of 1 and -1",
    ),
    "softcap": ({"softcap": None}, TypeError, "softcap is of type NoneType"),
    "lse": (
        {"softmax_lse": torch.zeros(2, HEADS, 8)},
        UnsupportedError,
        r"^softmax_lse: shape is \(2, 4, 8\)",
    ),
    "no lse": ({"softmax_lse": None}, TypeError, "softmax_lse is of type NoneType"),
    "deterministic": ({"deterministic": "yes"}, TypeError, "deterministic is of type str"),
    "sparse dout": (
        {"dout": torch.zeros(2, 9, HEADS, DIM).to_sparse()},
        TypeError,
        "^dout: .*accepted: a dense tensor",
    ),
    "dout of NumPy": ({"dout": np.zeros(3)}, TypeError, "dout is of type numpy.ndarray"),
    "dq of another dtype": (
        {"dq": torch.zeros(2, 9, HEADS, DIM, dtype=torch.float16)},
        UnsupportedError,
        "^dq: dtype is float16; accepted: float32",
    ),
    "no gradients": ({"dq": None, "dk": None, "dv": None}, UnsupportedError, "at least one of"),
}


@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_wrong_calls(name: str) -> None:
    """Refused by flash-attn's names, before anything is written."""
    changed, error, message = WRONG_BACKWARD[name]
    given = dense()
    with pytest.raises(error, match=message) as caught:
        flash._flash_attn_backward(**{**given, **changed})
    assert type(caught.value) is error
    assert all(given[name].isnan().all() for name in ("dq", "dk", "dv"))


def test_wrong_forward_calls() -> None:
    x = tensor(19, HEADS, DIM, seed=1)
    pack = (x, x, x, STARTS_Q, STARTS_Q, 9, 9, 0.0, None, False)
    for wrong, message in (
        ({"return_softmax": True}, "return_softmax is True; accepted: False"),
        ({"zero_tensors": True}, "zero_tensors is True; accepted: False"),
        ({"leftpad_k": STARTS_Q[:4]}, "leftpad_k is given; accepted: None"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            flash._flash_attn_varlen_forward(*pack, **wrong)
    with pytest.raises(UnsupportedError, match="return_softmax is True"):
        flash._flash_attn_forward(x[None], x[None], x[None], 0.0, None, False, return_softmax=True)


def test_gradients_of_gradients_are_refused() -> None:
    given = dense()
    given["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match="q requires grad, and this function has no grad"):
        flash._flash_attn_backward(**given)
    with torch.no_grad():
        flash._flash_attn_backward(**given)

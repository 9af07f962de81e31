"""Gradients of torch's operators: eager, compiled, mapped, checkpointed; against float64."""

from __future__ import annotations

from typing import Any

import pytest
from arrays import normal

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch import _functions  # noqa: E402
from dlattn.reference import (  # noqa: E402
    attention_backward_reference,
    attention_reference,
    attention_varlen_backward_reference,
    attention_varlen_reference,
)

OPS = torch.ops.dlattn
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def tensor(*shape: int, seed: int, dtype: Any = torch.float32) -> Any:
    return torch.from_numpy(normal(*shape, seed=seed)).to(dtype).requires_grad_()


def inputs(dtype: Any = torch.float32) -> dict[str, Any]:
    return {
        "q": tensor(2, 8, 4, 16, seed=1, dtype=dtype),
        "k": tensor(2, 9, 2, 16, seed=2, dtype=dtype),
        "v": tensor(2, 9, 2, 8, seed=3, dtype=dtype),
    }


def special(dtype: Any = torch.float32) -> dict[str, Any]:
    return {
        "bias": tensor(4, 1, 9, seed=4, dtype=dtype),
        "alibi_slopes": tensor(4, seed=5),
        "sinks": tensor(4, seed=6),
    }


OPTIONS: dict[str, Any] = {
    "causal": "top_left",
    "softmax_scale": 0.3,
    "window": (5, 3),
    "softcap": 1.5,
    "mask": torch.rand(8, 9, generator=torch.Generator().manual_seed(1)) > 0.2,
}


def values(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach().double().numpy() for name, x in given.items()}


def expected(given: dict[str, Any], dout: Any, dlse: Any = None, **options: Any) -> dict[str, Any]:
    exact = values(given)
    if "mask" in options:
        options["mask"] = options["mask"].numpy()
    out, lse = attention_reference(**exact, **options)
    dout, dlse = (x if x is None else x.double().numpy() for x in (dout, dlse))
    found = attention_backward_reference(dout, **exact, out=out, lse=lse, dlse=dlse, **options)
    return dict(zip(NAMES, found, strict=True))


def check(given: dict[str, Any], want: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name, x in given.items():
        assert x.grad is not None and x.grad.dtype == x.dtype, name
        close = {"rtol": tolerance, "atol": tolerance}
        found = x.grad.double()
        torch.testing.assert_close(found, torch.from_numpy(want[name]).double(), **close)


@pytest.mark.parametrize(
    "dtype, tolerance", [("float64", 1e-6), ("float32", 2e-5), ("float16", 2e-2), ("bfloat16", 0.1)]
)
def test_every_feature(dtype: str, tolerance: float) -> None:
    kind = getattr(torch, dtype)
    given = inputs(kind) | special(kind)
    out, lse = dlattn.torch.attention(**given, **OPTIONS, return_lse=True)
    dout, dlse = tensor(2, 8, 4, 8, seed=7, dtype=kind), tensor(2, 4, 8, seed=8)
    ((out * dout.detach()).sum() + (lse * dlse.detach()).sum()).backward()
    check(given, expected(given, dout.detach(), dlse.detach(), **OPTIONS), tolerance)


@pytest.mark.parametrize("of", ["out", "lse"])
def test_of_one_result(of: str) -> None:
    given = inputs()
    out, lse = dlattn.torch.attention(**given, return_lse=True)
    (out if of == "out" else lse).sum().backward()  # of which every stride is 0
    dout, dlse = torch.ones(2, 8, 4, 8), torch.ones(2, 4, 8)
    if of == "out":
        return check(given, expected(given, dout))
    given["v"].grad = given["v"].grad if given["v"].grad is not None else torch.zeros(2, 9, 2, 8)
    check(given, expected(given, None, dlse))


def test_varlen() -> None:
    given = {
        "q": tensor(20, 4, 16, seed=1),
        "k": tensor(24, 2, 16, seed=2),
        "v": tensor(24, 2, 8, seed=3),
    }
    starts = {
        "cu_seqlens_q": torch.tensor([0, 8, 8, 19], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 11, 24], dtype=torch.int32),
    }
    lengths = {"max_seqlen_q": 12, "max_seqlen_k": 13}
    options = {"seqused_k": torch.tensor([9, 1, 7], dtype=torch.int32), "causal": True}
    out = dlattn.torch.attention_varlen(**given, **starts, **lengths, **options)
    dout = tensor(20, 4, 8, seed=7).detach()
    dout[19] = 0  # which belongs to no sequence
    (out * dout)[:19].sum().backward()
    host = {name: x.numpy() for name, x in starts.items()} | lengths
    host |= {"seqused_k": options["seqused_k"].numpy(), "causal": True}
    exact_out, lse = attention_varlen_reference(**values(given), **host)
    found = attention_varlen_backward_reference(
        dout.double().numpy(), **values(given), out=exact_out, lse=lse, **host
    )
    check(given, dict(zip(NAMES, found, strict=True)))


def gradients(function: Any, given: dict[str, Any]) -> list[Any]:
    tensors = [x.detach().requires_grad_() for x in given.values()]
    weights = torch.linspace(-1, 1, 8)
    (function(*tensors) * weights).sum().backward()
    return [x.grad for x in tensors]


def attend(q: Any, k: Any, v: Any, *others: Any) -> Any:
    named = dict(zip(("bias", "alibi_slopes", "sinks"), others, strict=False))
    return dlattn.torch.attention(2 * q, k, v, causal=True, softcap=2.0, **named)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    given = inputs() | special()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for found, want in zip(gradients(compiled, given), gradients(attend, given), strict=True):
        torch.testing.assert_close(found, want)


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    given = inputs() | special()
    found = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), given)
    assert all(map(torch.equal, found, gradients(attend, given)))


@pytest.mark.parametrize("traced", [False, True])
def test_hooks(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of tensors, of nodes and of saved tensors, in a graph that is used twice.

    `traced`: by the operator, which calls take that are not eager.
    """
    if traced:
        monkeypatch.setattr(_functions, "called_eagerly", lambda *_: False)
    given = inputs()
    plain = gradients(attend, given)
    seen: list[Any] = []
    handles = [given["q"].register_hook(lambda gradient: gradient * 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = attend(*given.values())
    handles.append(out.grad_fn.register_prehook(lambda given: seen.append(len(given))))
    handles.append(out.register_hook(lambda gradient: seen.append(gradient.shape)))
    weights = torch.linspace(-1, 1, 8)
    for again in (True, False):
        loss = (out * weights).sum()
        found = torch.autograd.grad(loss, list(given.values()), retain_graph=again)
        assert torch.equal(found[0], 2 * plain[0])
        assert all(map(torch.equal, found[1:], plain[1:]))
    assert seen == [out.shape, 2] * 2
    for handle in handles:
        handle.remove()


def test_what_is_saved_does_not_grow_with_the_square() -> None:
    saved: list[Any] = []

    def pack(x: Any) -> Any:
        saved.append(x.numel())
        return x

    given = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        dlattn.torch.attention(**given)
    assert sum(saved) == 2 * (8 * 4 * 16 + 9 * 2 * 16 + 9 * 2 * 8 + 8 * 4 * 8 + 4 * 8)


def test_changed_inputs_are_noticed() -> None:
    given = inputs()
    k = given["k"] * 1
    out = dlattn.torch.attention(given["q"], k, given["v"])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast() -> None:
    given = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dlattn.torch.attention(**given)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    check(given, expected(given, torch.ones(2, 8, 4, 8)), 0.1)


def test_only_what_is_asked_for() -> None:
    given = inputs() | special()
    for name, x in given.items():
        x.requires_grad_(name in ("k", "sinks"))
    out = dlattn.torch.attention(**given)
    out.sum().backward()
    assert [name for name, x in given.items() if x.grad is not None] == ["k", "sinks"]


def test_vmap_and_functional_gradients() -> None:
    given = inputs()
    q, k, v = (x.detach() for x in given.values())
    qs = torch.stack([q, 2 * q, -q])
    found = torch.func.grad(loss_of, argnums=(0, 1, 2))(q, k, v)
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(loss_of(*tensors), tensors)
    torch.testing.assert_close(found, want)
    mapped = torch.vmap(torch.func.grad(loss_of), in_dims=(0, None, None))(qs, k, v)
    each = [torch.func.grad(loss_of)(x, k, v) for x in qs]
    torch.testing.assert_close(mapped, torch.stack(each))
    qs.requires_grad_()
    torch.vmap(loss_of, in_dims=(0, None, None))(qs, k, v).sum().backward()
    torch.testing.assert_close(qs.grad, mapped)


@pytest.mark.parametrize("constant", [False, True])
def test_gradients_have_none(constant: bool) -> None:
    """Also where dout is a constant, and only what was saved requires grad."""
    given = inputs()
    out = dlattn.torch.attention(**given)
    dout = torch.ones_like(out).requires_grad_(not constant)
    found = torch.autograd.grad(out, list(given.values()), dout, create_graph=True)
    message = r"gradients of dlattn's attention are differentiated .*; accepted: gradients of out"
    for one in found:
        assert one.requires_grad
        with pytest.raises(dlattn.UnsupportedError, match=message):
            torch.autograd.grad(one.sum(), given["q"], retain_graph=True)
    with pytest.raises(dlattn.UnsupportedError, match=message):
        torch.func.grad(lambda q: torch.func.grad(loss_of)(q, given["k"], given["v"]).sum())(
            given["q"].detach()
        )


def loss_of(q: Any, k: Any, v: Any) -> Any:
    return dlattn.torch.attention(q, k, v, causal=True).square().sum()


def test_float8_has_none() -> None:
    """Which the forward pass tells, of a bias' gradient too, and of flash-attn's names."""
    q, k, v = (torch.ones(1, 4, 2, 8).to(torch.float8_e4m3fn) for _ in range(3))
    bias = torch.zeros(4, 4, requires_grad=True)
    message = "^q: dtype is float8_e4m3fn and an input requires grad; accepted: float16, "
    own = q.clone().requires_grad_()
    calls: list[tuple[Any, dict[str, Any]]] = [
        (dlattn.torch.attention, {"q": own}),
        (dlattn.torch.attention, {"q": q, "bias": bias}),
        (torch.ops.dlattn.attention, {"q": own}),
        (dlattn.flash_attn.flash_attn_func, {"q": own}),
    ]
    for function, given in calls:
        with pytest.raises(dlattn.UnsupportedError, match=message):
            function(k=k, v=v, **given)
    with torch.no_grad():
        assert dlattn.torch.attention(own, k, v).dtype is torch.bfloat16


def test_a_precision_has_none() -> None:
    given = inputs(torch.float16)
    message = "precision is 'int8_fp8' and an input requires grad; accepted: None"
    with pytest.raises(dlattn.UnsupportedError, match=message):
        dlattn.torch.attention(**given, precision="int8_fp8")
    with torch.no_grad():
        dlattn.torch.attention(**given, precision="int8_fp8")


def test_operators_without_gradients() -> None:
    q, k, v = inputs().values()
    lengths = torch.full((2,), 9, dtype=torch.int32)
    out = torch.empty(2, 8, 4, 8)
    message = "an input requires grad, and this operator has no gradients"
    for call in (
        lambda: dlattn.torch.attention_with_kvcache(q, k, v, seqused_k=lengths),
        lambda: OPS.attention_out(q, k, v, out=out),
        lambda: OPS.merge_states([v], [torch.zeros(2, 2, 9)]),
    ):
        with pytest.raises(dlattn.UnsupportedError, match=message):
            call()


def test_opcheck() -> None:
    torch.library.opcheck(OPS.attention, tuple(inputs().values()), {"causal": 1, **special()})
    q, k, v = (x.detach() for x in inputs().values())
    out, lse = dlattn.torch.attention(q, k, v, return_lse=True)
    given = (torch.ones_like(out), q, k, v, out, lse, None)
    needs = [True, False, True, False, False, False]
    torch.library.opcheck(OPS.attention_backward, given, {"needs": needs})


def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given = inputs()
    with FlopCounterMode(display=False) as counter:
        dlattn.torch.attention(**given).sum().backward()
    forward = 2 * 2 * 4 * 8 * 9 * (16 + 8)
    assert counter.get_total_flops() == forward + forward * 5 // 2


def test_deterministic_algorithms(monkeypatch: Any) -> None:
    """Asked for by the function in Python, which sinks go by."""
    asked: list[bool] = []
    function = dlattn.attention_backward
    from dlattn.integrations.torch import gradients as module

    monkeypatch.setattr(
        module,
        "backward_operator",
        lambda name: (
            lambda *given, deterministic, needs: (
                asked.append(deterministic) or [torch.zeros_like(x) for x in given[1:4]]
            )
        ),
    )
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            dlattn.torch.attention(**inputs(), sinks=torch.zeros(4)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True] and function is dlattn.attention_backward

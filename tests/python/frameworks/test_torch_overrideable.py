"""Gradients by torch's own node: the same bits as by a function in Python, and the same manners."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from arrays import normal

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch import kernels, overrideable  # noqa: E402
from dlattn.integrations.torch.ops import KERNELS  # noqa: E402


def tensor(*shape: int, seed: int, dtype: Any = torch.float32) -> Any:
    return torch.from_numpy(normal(*shape, seed=seed)).to(dtype)


def inputs(heads_kv: int = 2, bhsd: bool = False) -> list[Any]:
    given = [
        tensor(2, 8, 4, 16, seed=1),
        tensor(2, 9, heads_kv, 16, seed=2),
        tensor(2, 9, heads_kv, 8, seed=3),
    ]
    return [(x.transpose(1, 2) if bhsd else x).clone().requires_grad_() for x in given]


def is_carried(out: Any) -> bool:
    return "Overrideable" in type(out.grad_fn).__name__


@contextmanager
def by_python() -> Iterator[None]:
    before = dict(overrideable.why)
    overrideable.why.update(dict.fromkeys(before, "it is not to be used"))
    try:
        yield
    finally:
        overrideable.why.update(before)


@pytest.fixture(autouse=True)
def _is_there() -> None:
    if not is_carried(dlattn.torch.attention(*inputs())):
        pytest.skip(f"torch {torch.__version__}: {overrideable.why['cpu']}")


CARRIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "bhsd": {"layout": "bhsd", "causal": True},
    "window": {"window": (5, 3)},
    "one side": {"window": (None, 0)},
    "list": {"window": [0, None]},
    "scale": {"softmax_scale": 0.3},
    "bias": {"bias": tensor(4, 1, 9, seed=4)},
    "mask": {"mask": tensor(8, 9, seed=5) > -0.5},
    "mask of rows": {"mask": torch.arange(8)[:, None] > torch.zeros(9)},
    "batch_invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("name", CARRIED)
def test_bits_are_those_of_the_function(name: str) -> None:
    options = dict(CARRIED[name])
    results = []
    for kept in (True, False):
        given = inputs(bhsd="layout" in options)
        if "bias" in options:
            given.append(options["bias"].clone().requires_grad_())
            options["bias"] = given[-1]
        if kept:
            out = dlattn.torch.attention(*given[:3], **options)
        else:
            with by_python():
                out = dlattn.torch.attention(*given[:3], **options)
        assert is_carried(out) == kept
        weights = torch.linspace(-1, 1, out.shape[-1])
        results.append([out, *torch.autograd.grad((out * weights).sum(), given)])
    for found, want in zip(*results, strict=True):
        assert found.dtype == want.dtype and found.stride() == want.stride()
        assert torch.equal(found, want)


def test_batch_invariance_is_the_forward_pass_s() -> None:
    """Few rows and many heads: with it the CPU would sum gradients in another order."""
    q, k, v = tensor(3, 2, 8, 16, seed=1), tensor(3, 40, 2, 16, seed=2), tensor(3, 40, 2, 8, seed=3)
    found = []
    for options in ({}, {"batch_invariant": True}):
        out = dlattn.torch.attention(q, k, v.requires_grad_(), **options)
        assert is_carried(out)
        found.append(torch.autograd.grad(out, v, tensor(3, 2, 8, 8, seed=4))[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_only_what_is_asked_for(wanted: tuple[int, ...]) -> None:
    given = [x.detach() for x in inputs()] + [tensor(8, 9, seed=4)]
    for i in wanted:
        given[i].requires_grad_()
    out = dlattn.torch.attention(*given[:3], bias=given[3])
    assert is_carried(out)
    out.sum().backward()
    found = [x.grad for x in given]
    assert [i for i, x in enumerate(found) if x is not None] == list(wanted)
    for x in given:
        x.grad = None
    with by_python():
        dlattn.torch.attention(*given[:3], bias=given[3]).sum().backward()
    for i in wanted:
        assert torch.equal(found[i], given[i].grad)


def test_one_of_several_is_asked_for() -> None:
    """The graph has more of them."""
    q, k, v = inputs()
    out = dlattn.torch.attention(q, k, v)
    dout = torch.ones_like(out)
    (one,) = torch.autograd.grad(out, k, dout, retain_graph=True)
    assert torch.equal(one, torch.autograd.grad(out, (q, k, v), dout)[1])


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"softcap": 2.0},
        {"alibi_slopes": tensor(4, seed=5)},
        {"sinks": tensor(4, seed=6)},
        {"bias": tensor(8, 9, seed=4), "mask": tensor(8, 9, seed=5) > 0},
        {"window": (1 << 23, None)},
    ],
    ids=lambda options: " ".join(options),
)
def test_what_is_not_carried(options: dict[str, Any]) -> None:
    out = dlattn.torch.attention(*inputs(), **options)
    out = out[0] if "return_lse" in options else out
    assert out.grad_fn is not None and not is_carried(out)


def test_settings_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[float] = []

    def call(*given: Any, **_: Any) -> Any:
        packed.append(given[4])
        return (given[0],)

    monkeypatch.setattr(overrideable, "_call", call)
    most = (1 << 23) - 2
    from dlattn.integrations.torch.gradients import deterministic_gradients

    with deterministic_gradients(True):
        dlattn.torch.attention(
            *inputs(bhsd=True),
            causal="top_left",
            window=(most, most),
            layout="bhsd",
            mask=torch.ones(8, 9, dtype=torch.bool),
            batch_invariant=True,
        )
    dlattn.torch.attention(*inputs(), window=(0, None))
    names = ("causal", "bhsd", "deterministic", "is_mask", "batch_invariant")
    windows = ("window_left", "window_right")
    every = dict(zip((*names, *windows), (2, True, True, True, True, most, most), strict=True))
    few = dict(zip((*names, *windows), (0, False, False, False, False, 0, -1), strict=True))
    assert [overrideable.unpack(x) for x in packed] == [every, few]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("num_heads is 2", {"k": tensor(2, 9, 3, 16, seed=1)}),
    ("bias", {"bias": tensor(7, 9, seed=1)}),
    ("mask: dtype", {"mask": torch.ones(8, 9)}),
    ("bias: dtype", {"bias": torch.ones(8, 9, dtype=torch.bool)}),
    ("softmax_scale is", {"softmax_scale": float("nan")}),
    ("softmax_scale is of type", {"softmax_scale": "1"}),
    ("batch_invariant is of type", {"batch_invariant": "1"}),
    ("v is None", {"v": None}),
]


@pytest.mark.parametrize("message, wrong", WRONG, ids=[" ".join(wrong) for _, wrong in WRONG])
def test_errors_are_those_of_the_function(message: str, wrong: dict[str, Any]) -> None:
    given = dict(zip(("q", "k", "v"), inputs(), strict=True)) | wrong
    with by_python(), pytest.raises((dlattn.UnsupportedError, TypeError), match=message) as want:
        dlattn.torch.attention(**given)
    with pytest.raises(want.type, match=message) as found:
        dlattn.torch.attention(**given)
    assert str(found.value) == str(want.value)


def test_what_lacked_memory_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has no gradients; autograd, which has them, is above."""
    monkeypatch.setattr(kernels, "_lacked_memory", lambda error: True)
    q, _, v = inputs()
    with pytest.raises(dlattn.UnsupportedError, match="num_heads is"):
        dlattn.torch.attention(q, tensor(2, 9, 3, 16, seed=1), v)


def test_operators_in_python_take_what_native_code_left() -> None:
    """They have no gradients either."""
    given = inputs(bhsd=True)
    with KERNELS.in_python(), torch._C._AutoDispatchBelowAutograd():
        found = overrideable._forward(None, *given, dropout_p=-5.0)[0]  # bhsd and nothing else
    assert torch.equal(found, dlattn.torch.attention(*given, layout="bhsd"))


def test_a_failure_in_the_backward_pass_has_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it: native code leaves to it what it refuses or has no memory for."""
    given = inputs()
    out = dlattn.torch.attention(*given)

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("there is none")

    key = (f"{overrideable._FORWARD}_backward", "AutogradCPU")
    monkeypatch.setitem(overrideable.sdpa_native._left, key, no_memory)
    q, k, v = (x.detach() for x in given)
    nothing = [None] * 2
    wrong = (out.detach(), q, k[:, :3], v, None, [True] * 3 + [False], out.detach(), q)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="there is none"):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
            *wrong, *nothing, 0, 0, -1.0, False, *nothing
        )


def test_python_computes_what_native_code_left() -> None:
    given = inputs()
    out = dlattn.torch.attention(*given, mask=tensor(8, 9, seed=5) > 0, window=(4, None))
    want = torch.autograd.grad(out.sum(), given, retain_graph=True)
    again = torch.autograd.grad(out.sum(), given, create_graph=True)  # by Python
    assert all(map(torch.equal, again, want))
    assert torch.equal(torch.autograd.grad(out.sum(), given[1], create_graph=True)[0], want[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast(autocast: bool) -> None:
    results = []
    for kept in (True, False):
        given = [*inputs(), tensor(8, 9, seed=4).requires_grad_()]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if kept:
                out = dlattn.torch.attention(*given[:3], bias=given[3])
            else:
                with by_python():
                    out = dlattn.torch.attention(*given[:3], bias=given[3])
        assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
        assert is_carried(out) == kept
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    assert all(map(torch.equal, *results))


def test_hooks_of_saved_tensors_and_nodes() -> None:
    given = inputs()
    plain = torch.autograd.grad(dlattn.torch.attention(*given).sum(), given)
    sizes: list[int] = []

    def pack(x: Any) -> Any:
        sizes.append(x.numel())
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = dlattn.torch.attention(*given)
    assert sum(sizes) == 2 * (8 * 4 * 16 + 9 * 2 * 16 + 9 * 2 * 8 + 8 * 4 * 8 + 4 * 8)
    seen: list[Any] = []
    out.grad_fn.register_prehook(lambda gradients: seen.append("before"))
    out.grad_fn.register_hook(lambda *_: seen.append("after"))
    given[0].register_hook(lambda gradient: gradient * 2)
    for again in (True, False):
        found = torch.autograd.grad(out.sum(), given, retain_graph=again)
        assert torch.equal(found[0], 2 * plain[0]) and torch.equal(found[1], plain[1])
    assert seen == ["before", "after"] * 2


@pytest.mark.parametrize("which", ["k", "out"])
def test_changes_are_noticed(which: str) -> None:
    q, k, v = inputs()
    key = k * 1
    out = dlattn.torch.attention(q, key, v)
    loss = out.sum()
    with torch.no_grad():
        (key if which == "k" else out).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    given = inputs()
    want = torch.autograd.grad(dlattn.torch.attention(*given).sum(), given)
    checkpoint(dlattn.torch.attention, *given, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(given, want, strict=True))


def test_mapped_gradients() -> None:
    """dout of several at once, each as if it were alone."""
    given = inputs()
    out = dlattn.torch.attention(*given)
    douts = torch.stack([torch.ones_like(out), tensor(2, 8, 4, 8, seed=8)])
    mapped = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        each = torch.autograd.grad(out, given, dout, retain_graph=True)
        for found, want in zip(mapped, each, strict=True):
            torch.testing.assert_close(found[i], want)


def test_negated_gradients() -> None:
    """Memory of dout that holds the negatives of its values."""
    given = inputs()
    out = dlattn.torch.attention(*given)
    dout = tensor(2, 8, 4, 8, seed=8)
    want = torch.autograd.grad(out, given, -dout, retain_graph=True)
    found = torch.autograd.grad(out, given, torch._neg_view(dout))
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_operations_of_a_backward_pass_are_counted(layout: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given = inputs(bhsd=layout == "bhsd")
    out = dlattn.torch.attention(*given, layout=layout)
    assert is_carried(out)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 9 * (16 + 8) * 5 // 2


def test_calls_of_others_fail_as_before() -> None:
    q = tensor(1, 1, 1, 8, seed=1)
    operator = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    with pytest.raises(NotImplementedError, match="backends that have kernels of their own"):
        operator(q, q, q)


def test_gradients_on_another_thread() -> None:
    import threading

    given = inputs()
    out = dlattn.torch.attention(*given)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), given)))
    thread.start()
    thread.join()
    want = torch.autograd.grad(dlattn.torch.attention(*given).sum(), given)
    assert all(map(torch.equal, found, want))


def test_a_kernel_of_somebody_else_stays() -> None:
    program = """
import torch
library = torch.library.Library("aten", "IMPL")
def kernel(q, *others, **options):
    raise RuntimeError("somebody else's")
library.impl("_scaled_dot_product_fused_attention_overrideable", kernel, "CPU")
import dlattn.torch
q = torch.ones(1, 1, 1, 8, requires_grad=True)
dlattn.torch.attention(q, q, q).sum().backward()
try:
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, q, q)
except RuntimeError as error:
    print(error, q.grad is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "somebody else's True\n", done.stderr


def test_removing_torchs_kernels_leaves_it() -> None:
    dlattn.torch.activate()
    dlattn.torch.deactivate(remove=True)
    given = inputs()
    out = dlattn.torch.attention(*given)
    assert is_carried(out)
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.torch.attention(given[0], given[1][:, :, :1, :8], given[2])
    out.sum().backward()


def test_undefined_gradients() -> None:
    """Those of a node behind that gives none, as gradcheck tries."""

    class Without(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return None

    given = inputs()
    for again in (False, True):
        out = Without.apply(dlattn.torch.attention(*given))
        found = torch.autograd.grad(
            out.sum(), given, create_graph=again, allow_unused=True, materialize_grads=False
        )
        assert found == (None,) * 3
    given = [x.detach().double().requires_grad_() for x in given]
    assert torch.autograd.gradcheck(
        dlattn.torch.attention, given, eps=1e-4, atol=1e-4, rtol=1e-3, nondet_tol=0
    )


def test_compiled_autograd() -> None:
    """Torch traces the node's backward pass, whose forward pass was eager."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    given = inputs()
    out = dlattn.torch.attention(*given)
    want = torch.autograd.grad(out.sum(), given, retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.sum().backward()
    torch._dynamo.reset()
    assert all(torch.equal(x.grad, y) for x, y in zip(given, want, strict=True))

"""The native kernels in the place of torch's attention, against those in Python and torch's own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import _core  # noqa: E402
from dlattn.integrations.torch import activation, sdpa_native  # noqa: E402

F = torch.nn.functional
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(VERSION < (2, 13), reason="torch's C ABI lacks what they need")


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    dlattn.torch.deactivate()
    dlattn.torch.activate("dlattn")
    dlattn.torch.stats(reset=True)
    yield
    dlattn.torch.deactivate()


def test_they_are_where_torchs_own_were() -> None:
    keys = ("CPU", "CUDA") if torch.version.cuda else ("CPU",)
    expected = [name for name, key in sdpa_native.NATIVE.items() if key in keys]
    assert {name: sdpa_native.why[name] for name in expected} == dict.fromkeys(expected, "")


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) + 0.2).to(dtype) for shape in shapes]


def qkv(dtype: Any = torch.float32, rows: int = 33, keys: int = 47) -> list[Any]:
    return drawn((2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, 16), dtype=dtype)


def packed(dtype: Any) -> list[Any]:
    """q, k and v of one buffer, the heads of a row side by side."""
    return [x.transpose(1, 2) for x in drawn((2, 33, 3, 4, 16), dtype=dtype)[0].unbind(2)]


def mask(shape: tuple[int, ...], dtype: Any) -> Any:
    (found,) = drawn(shape, dtype=dtype, seed=1)
    found[..., 5, :] = -torch.inf  # a row that sees nothing
    return found


CALLS: dict[str, Callable[[Any], tuple[list[Any], dict[str, Any]]]] = {
    "full": lambda dtype: (qkv(dtype), {}),
    "causal": lambda dtype: (qkv(dtype), {"is_causal": True, "scale": 0.7}),
    "packed": lambda dtype: (packed(dtype), {"is_causal": True}),
    "mask": lambda dtype: (qkv(dtype), {"attn_mask": mask((33, 47), dtype)}),
    "expanded mask": lambda dtype: (
        qkv(dtype),
        {"attn_mask": mask((2, 1, 33, 47), dtype).expand(2, 4, 33, 47)},
    ),
    "every other head": lambda dtype: ([x[:, ::2] for x in qkv(dtype)], {}),
    "one row": lambda dtype: (qkv(dtype, rows=1), {}),
    "no rows": lambda dtype: (qkv(dtype, rows=0), {}),
    "no keys": lambda dtype: (qkv(dtype, keys=0), {}),
    "float64": lambda dtype: ([x.double() for x in qkv()], {}),
    "scale": lambda dtype: (qkv(dtype), {"scale": 1e-42}),
    "head dims": lambda dtype: ([*qkv(dtype)[:2], qkv(dtype)[2][..., :8]], {}),
    "dropout": lambda dtype: (qkv(dtype), {"dropout_p": 0.1}),
    "bool mask": lambda dtype: (qkv(dtype), {"attn_mask": mask((33, 47), dtype) > 0}),
    "ranks": lambda dtype: ([x[0] for x in qkv(dtype)], {}),
}


def outcome(call: Callable[[], Any]) -> Any:
    """Results with their strides, or the error; and what was counted."""
    dlattn.torch.stats(reset=True)
    found: Any
    try:
        found = [(x, x.stride(), x.dtype, x.requires_grad) for x in call()]
    except (RuntimeError, IndexError) as error:
        found = str(error).splitlines()[0]
    return found, dlattn.torch.stats()


def equal(found: Any, want: Any) -> bool:
    (found, counted), (want, expected) = found, want
    assert counted == expected
    if isinstance(want, str) or isinstance(found, str):
        return bool(found == want)
    return all(
        torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and about == expected
        for (x, *about), (y, *expected) in zip(found, want, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_refusals_are_those_of_the_kernels_in_python(name: str, dtype: Any) -> None:
    inputs, options = CALLS[name](dtype)

    def forward() -> Any:
        return getattr(torch.ops.aten, FORWARD)(*inputs, **options)

    found = outcome(forward)
    with sdpa_native.in_python():
        assert equal(found, outcome(forward))
    assert found[1].served or found[1].refused
    if isinstance(found[0], str):
        return
    out, lse = (x for x, *_ in found[0])
    given = {"dropout_p": 0.0, "is_causal": False, **options}
    for dout in (
        torch.linspace(-1, 1.5, out.numel()).reshape(out.shape).to(out.dtype),
        torch.ones((), dtype=out.dtype).expand(out.shape),  # of out.sum()
        torch.full(out.shape, 0.5, dtype=torch.float64),
    ):

        def backward(dout: Any = dout) -> Any:
            return getattr(torch.ops.aten, BACKWARD)(dout, *inputs, out, lse, **given)

        found = outcome(backward)
        with sdpa_native.in_python():
            assert equal(found, outcome(backward))
        assert found[1].served or found[1].refused


def test_python_stands_between_neither_served_nor_handed_on_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(activation, "count_served", counted)
    monkeypatch.setattr(activation, "count_refused", counted)
    inputs = [x.requires_grad_() for x in qkv()[:1] + drawn(*[(2, 4, 47, 16)] * 2)]
    torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sum(), inputs)
    assert dlattn.torch.stats(reset=True).served == {FORWARD: 1, BACKWARD: 1}
    dlattn.torch.deactivate()
    torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sum(), inputs)
    assert dlattn.torch.stats() == dlattn.torch.Stats()
    with sdpa_native.in_python(), dlattn.torch.active(), pytest.raises(AssertionError):
        F.scaled_dot_product_attention(*inputs)


@pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not tell")
@pytest.mark.parametrize("serving", [False, True])
def test_tensors_are_let_go_of_once(serving: bool) -> None:
    def counts(tensors: list[Any]) -> list[int]:
        gc.collect()
        return [x._use_count() for x in tensors]

    forward, backward = (getattr(torch.ops.aten, name) for name in (FORWARD, BACKWARD))
    inputs, bias = drawn(*[(2, 4, 33, 16)] * 3), mask((33, 33), torch.float32)
    every_other = [x[:, ::2] for x in inputs]
    dout = torch.ones(2, 4, 33, 16)
    held = [*inputs, *every_other, bias, dout]
    before = counts(held)
    if not serving:
        dlattn.torch.deactivate()
    for _ in range(3):
        found = forward(*inputs, attn_mask=bias, scale=0.3)
        gradients = backward(dout, *inputs, *found, 0.0, False, attn_mask=bias, scale=0.3)
        made = [*found, *gradients, *forward(*every_other)]
        assert counts(made) == counts([*torch.empty(len(made), 1)])
        for wrong in ({"dropout_p": 0.5}, {"scale": 1e-42}, {"attn_mask": bias > 0}):
            outcome(lambda wrong=wrong: forward(*inputs, **wrong))
        outcome(lambda: forward(inputs[0], every_other[1], inputs[2]))
    del found, gradients, made
    assert counts(held) == before


def test_traced_exported_and_mapped() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = drawn(*[(2, 4, 33, 16)] * 3)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    want = Layer()(*inputs)
    assert dlattn.torch.stats(reset=True).served == {FORWARD: 1}
    with FakeTensorMode() as mode:
        fake = Layer()(*(mode.from_tensor(x) for x in inputs))
    assert fake.shape == want.shape and dlattn.torch.stats() == dlattn.torch.Stats()
    exported = torch.export.export(Layer(), tuple(inputs))
    dlattn.torch.stats(reset=True)
    torch.testing.assert_close(exported.module()(*inputs), want)
    mapped = torch.func.vmap(Layer())(*(x[:, None] for x in inputs))
    torch.testing.assert_close(mapped[:, 0], want)
    assert dlattn.torch.stats().served[FORWARD] >= 2


def test_why_they_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(torch.__file__).parent / "lib")

    def register(name: str, *arguments: str, where: str = folder, backend: str = "CPU") -> str:
        return _core.register_torch_sdpa(where, backend, {name: arguments}, print)

    schema = getattr(torch.ops.aten, FORWARD).default._schema.arguments
    arguments = [f"{a.type} {a.name}" for a in schema]
    assert register(FORWARD, *arguments[:-1]) == f"the native {FORWARD} has other arguments"
    for name, backend in ((FORWARD, "CUDA"), ("relu", "CPU")):
        found = register(name, *arguments, backend=backend)
        assert found == "an operator has no native kernel"
    found = register(FORWARD, *arguments, where=str(tmp_path))
    assert found == f"libtorch_cpu of this process does not lie in {tmp_path}"

    # An operator that nobody replaced stands for torch's attention in a process without dlattn.
    monkeypatch.setattr(sdpa_native, "NATIVE", {"hardshrink": "CPU"})
    monkeypatch.setattr(sdpa_native, "why", {})
    assert sdpa_native.replaceable(["hardshrink"]) == {"hardshrink"}
    library = torch.library.Library("aten", "IMPL")
    library.impl("hardshrink", lambda x, _: x, "CPU", allow_override=True)
    assert sdpa_native.replaceable(["hardshrink"]) == set()
    assert sdpa_native.why == {"hardshrink": "it was replaced before"}
    library._destroy()


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_a_torch_whose_function_leads_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python's kernels stay, which call what was there before."""
    assert sdpa_native._is_reached(name)
    library = torch.library.Library("aten", "IMPL")

    def elsewhere(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch's own kernel is not reached")

    monkeypatch.setattr(sdpa_native, "why", {})
    monkeypatch.setattr(
        sdpa_native,
        "_register",
        lambda names: library.impl(name, elsewhere, "CPU", allow_override=True) or {name: ""},
    )
    removed: list[bool] = []
    monkeypatch.setattr(_core, "unregister_torch_sdpa", lambda: removed.append(True))
    sdpa_native.register({name: elsewhere})
    library._destroy()
    assert removed == [True]
    assert sdpa_native.why == {name: "torch's own kernel is not reached by its function"}


THREADS = """
import torch, dlattn.torch
q, k, v = (torch.randn(8, 4, 40, 16, requires_grad=True) for _ in range(3))
for threads in (2, 8):
    torch.set_num_threads(threads)
    with dlattn.torch.active(gradients="dlattn"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
"""


def test_threads_are_no_more_than_torchs() -> None:
    """And no more than dlattn's own."""
    variables = {"DLATTN_NUM_THREADS": "3", "DLATTN_PRINT_PLAN": "1"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [line.split(",")[0] for line in done.stderr.splitlines() if "threads: " in line]
    assert told == ["threads: 2"] * 2 + ["threads: 3"] * 2

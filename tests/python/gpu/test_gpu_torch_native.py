"""CUDA's native kernels in the place of torch's attention, against those in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import _core  # noqa: E402
from dlattn.integrations.torch import activation, sdpa_native  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(VERSION < (2, 11), reason="torch's C ABI lacks what they need"),
    pytest.mark.skipif(not sdpa_native.ON_CUDA, reason="DLATTN_NATIVE_ON_CUDA is 0"),
]

FLASH, EFFICIENT, CUDNN = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)
ATEN = torch.ops.aten
BACKENDS = torch.nn.attention.SDPBackend
CHOSEN = {
    FLASH: BACKENDS.FLASH_ATTENTION,
    EFFICIENT: BACKENDS.EFFICIENT_ATTENTION,
    CUDNN: BACKENDS.CUDNN_ATTENTION,
}


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    dlattn.torch.deactivate()
    dlattn.torch.activate("dlattn")
    dlattn.torch.stats(reset=True)
    yield
    dlattn.torch.deactivate()


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float16) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        (torch.randn(shape, device="cuda", generator=generator) + 0.2).to(dtype) for shape in shapes
    ]


def qkv(
    dtype: Any = torch.float16, rows: int = 130, keys: int = 70, columns: int = 64
) -> list[Any]:
    shapes = (2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, columns)
    return drawn(*shapes, dtype=dtype)


def packed(dtype: Any, rows: int = 130) -> list[Any]:
    """q, k and v of one buffer, the heads of a row side by side."""
    return [x.transpose(1, 2) for x in drawn((2, rows, 3, 4, 64), dtype=dtype)[0].unbind(2)]


def bias(dtype: Any = torch.float16) -> Any:
    found = drawn((2, 1, 130, 80), dtype=dtype)[0][..., :70]
    found[..., 5, :] = -torch.inf  # a row that sees nothing
    return found.expand(2, 4, 130, 70)


def test_they_are_native() -> None:
    names = [name for name, key in sdpa_native.NATIVE.items() if key == "CUDA"]
    assert {name: sdpa_native.why[name] for name in names} == dict.fromkeys(names, "")


Case = tuple[str, Callable[[], tuple[Any, ...]], Callable[[Any, Any, Any], tuple[Any, ...]]]


def flash(inputs: list[Any], causal: bool) -> Case:
    def backward(dout: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        none = (None, None, 0, 0)
        return (dout, *inputs, out, lse, *none, 0.0, causal, None, None)

    return FLASH, lambda: (*inputs, 0.0, causal), backward


def efficient(inputs: list[Any], mask: Any, causal: bool = False) -> Case:
    def backward(dout: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        wanted = [True, True, True, mask is not None]
        return (dout, *inputs, mask, out, lse, None, None, 0.0, wanted, causal)

    return EFFICIENT, lambda: (*inputs, mask, True, 0.0, causal), backward


def cudnn(inputs: list[Any], mask: Any, causal: bool = False) -> Case:
    def backward(dout: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        return (dout, *inputs, out, lse, None, None, mask, None, None, 0, 0, 0.0, causal)

    return CUDNN, lambda: (*inputs, mask, True, 0.0, causal), backward


CASES: dict[str, Callable[[], Case]] = {
    "flash": lambda: flash(qkv(), False),
    "flash causal, blind rows": lambda: flash(qkv(torch.bfloat16), True),
    "flash packed": lambda: flash(packed(torch.float16), True),
    "flash no keys": lambda: flash(qkv(keys=0), False),
    "flash one row": lambda: flash(qkv(rows=1), False),
    "efficient": lambda: efficient(qkv(torch.float32), None, True),
    "efficient bias": lambda: efficient(qkv(), bias()),
    "efficient columns": lambda: efficient(qkv(columns=32), None),
    "efficient 128 rows": lambda: efficient(qkv(rows=128), None),
    "cudnn": lambda: cudnn(qkv(torch.bfloat16), None, True),
    "cudnn bias": lambda: cudnn(qkv(), bias()),
    "cudnn float32 bias": lambda: cudnn(packed(torch.float16), bias(torch.float32)[..., :1]),
    "cudnn columns": lambda: cudnn(qkv(columns=32), bias()),
}


def close(found: Any, want: Any, exact: bool) -> None:
    for i, (x, y) in enumerate(zip(found, want, strict=True)):
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        assert (x.shape, x.dtype, x.device, x.stride()) == (y.shape, y.dtype, y.device, y.stride())
        if y.dtype in (torch.uint64, torch.int64):  # seed and offset, which are not written
            continue
        if exact:
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), i
        else:  # sums of gradients may be in another order
            atol = 1e-2 * max(y.abs().max().item(), 1e-3) if y.numel() else 0.0
            torch.testing.assert_close(x, y, rtol=1e-2, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_kernels_in_python(name: str) -> None:
    operator, arguments, of_backward = CASES[name]()
    call, backward = getattr(ATEN, operator), getattr(ATEN, f"{operator}_backward")
    found = call(*arguments())
    with sdpa_native.in_python():
        want = call(*arguments())
    close(found, want, exact=True)
    given = of_backward(torch.ones((), device="cuda").expand_as(found[0]), *found[:2])
    gradients = backward(*given)
    natively = _core.torch_sdpa_served(False)
    with sdpa_native.in_python():
        close(gradients, backward(*given), exact=False)
    if "no keys" not in name:
        assert natively == {operator: 1, f"{operator}_backward": 1}


def test_they_run_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(activation, "count_served", counted)
    monkeypatch.setattr(activation, "count_refused", counted)
    inputs = [x.requires_grad_() for x in packed(torch.float16)]
    torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*inputs).sum(), inputs)
    assert sum(_core.torch_sdpa_served(False).values()) == 2


@pytest.mark.filterwarnings("ignore")  # a kernel is overridden
@pytest.mark.parametrize("operator", CHOSEN)
def test_torchs_own_gradients_are_reached_without_python(operator: str) -> None:
    # torch keeps what it compiled for cuDNN by the strides of q, k and v alone. Rows as in another
    # test of the process, whose dout has other strides, would be given wrong gradients by it.
    inputs = [x.requires_grad_() for x in packed(torch.float16, rows=134)]
    library = torch.library.Library("dlattn", "IMPL")
    backward = f"{operator}_backward"
    library.impl(backward, lambda *_: None, "CUDA", allow_override=True)
    library.impl("_flash_attention_backward", lambda *_: None, "CUDA", allow_override=True)
    try:
        with torch.nn.attention.sdpa_kernel(CHOSEN[operator]):
            try:
                out = torch.nn.functional.scaled_dot_product_attention(*inputs)
            except RuntimeError as error:
                pytest.skip(f"torch has no such kernel for it: {error}")
        by_dlattn = torch.autograd.grad(out, inputs, out, retain_graph=True)
        with dlattn.torch.active("torch"):
            by_torch = torch.autograd.grad(out, inputs, out, retain_graph=True)
        dlattn.torch.deactivate(remove=False)
        by_torch_again = torch.autograd.grad(out, inputs, out)
    finally:
        library._destroy()
    assert dlattn.torch.stats() == dlattn.torch.Stats({operator: 1, backward: 1}, {})
    close(by_torch, by_dlattn, exact=False)
    close(by_torch_again, by_dlattn, exact=False)


def test_out_of_memory_is_torchs_error() -> None:
    many = [x.expand(1, 8, 1 << 30, 64) for x in drawn(*[(1, 1, 1, 64)] * 3)]
    with pytest.raises(torch.OutOfMemoryError):
        ATEN._scaled_dot_product_flash_attention(*many)
    inputs = [x.requires_grad_() for x in drawn(*[(1, 8, 16384, 128)] * 3)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs)
    dout = torch.ones_like(out)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):  # on autograd's thread
            torch.autograd.grad(out, inputs, dout, retain_graph=True)
        with pytest.raises(torch.OutOfMemoryError):
            more = [x.detach().expand(64, 8, 16384, 128) for x in inputs]
            ATEN._scaled_dot_product_cudnn_attention(*more, None, True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_the_current_stream(operator: str) -> None:
    """The inputs are written late on it."""
    more = [] if operator == FLASH else [None, True]
    call = getattr(ATEN, operator)
    inputs = drawn(*[(1, 4, 256, 64)] * 3)
    want = call(*inputs, *more)[0]
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for to, x in zip(late, inputs, strict=True):
            to.copy_(x)
        found = call(*late, *more)[0].clone()
    stream.synchronize()
    assert torch.equal(found, want)


def test_another_device_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    for operator, more in ((FLASH, []), (EFFICIENT, [None, True]), (CUDNN, [None, True])):
        call = getattr(ATEN, operator)
        inputs = [x.requires_grad_() for x in drawn(*[(1, 4, 256, 64)] * 3)]
        there = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
        want, found = (call(*x, *more)[0] for x in (inputs, there))
        assert found.device == there[0].device and torch.equal(found.cpu(), want.cpu())
        gradients = torch.autograd.grad(found.sum(), there)
        expected = torch.autograd.grad(want.sum(), inputs)
        close([x.cpu() for x in gradients], [x.cpu() for x in expected], exact=False)


def test_deterministic_gradients() -> None:
    inputs = drawn(*[(1, 4, 2048, 64)] * 3)
    out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*inputs)
    given = (out, *inputs, out, lse, None, None, 0, 0, 0.0, False, None, None)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            ATEN._scaled_dot_product_flash_attention_backward(*given) for _ in "12345"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert f"{FLASH}_backward" in dlattn.torch.stats().served
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(other, first, strict=True))

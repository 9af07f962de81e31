"""Tensors of Paddle, Warp and tinygrad, on the CPU, where these are installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, normal, poisoned, qkv, to_float64
from capsules import Exporter

import dlattn
from dlattn import UnsupportedError, _core
from dlattn.reference import merge_states_reference


class Library:
    """How a library's tensors are made and read."""

    dtypes = ("float16", "bfloat16", "float32", "float64")

    def __init__(self, name: str) -> None:
        self.module = pytest.importorskip(name)
        self.kind: Any = self.module.Tensor if name == "paddle" else self.module.array
        self.is_paddle = name == "paddle"

    def array(self, values: np.ndarray, dtype: str = "float32") -> Any:
        if self.is_paddle:
            return self.module.to_tensor(values, place="cpu").astype(dtype)
        kind = getattr(self.module, dtype)
        return self.module.array(values, dtype=kind, device="cpu")

    def transposed(self, x: Any) -> Any:
        return x.transpose((0, 2, 1, 3))

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("paddle.") if self.is_paddle else x.dtype.__name__

    def pointer(self, x: Any) -> int:
        return x.data_ptr() if self.is_paddle else x.ptr

    def numbers(self, x: Any) -> np.ndarray:
        return to_float64(x.astype("float32").numpy() if self.is_paddle else x.numpy())


@pytest.fixture(params=["paddle", "warp"])
def library(request):
    return Library(request.param)


@pytest.mark.parametrize("dtype", Library.dtypes)
def test_attention(library, dtype):
    arrays = [library.array(x, dtype) for x in qkv()]
    seen = _core.inspect(arrays[0])
    assert seen["pointer"] == library.pointer(arrays[0]) and seen["dtype"] == dtype
    assert seen["device"] == "cpu" and seen["shape"] == (2, 5, 4, 8)
    out, lse = dlattn.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(out, library.kind) and isinstance(lse, library.kind)
    assert library.dtype(out) == dtype and library.dtype(lse) == "float32"
    want = dlattn.attention(*map(library.numbers, arrays), causal=True, return_lse=True)
    scale = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 2e-6)
    for got, true in zip((out, lse), want, strict=True):
        np.testing.assert_allclose(library.numbers(got), true, rtol=2 * scale, atol=2 * scale)


def test_results_outlive_everything_else(library):
    results = [dlattn.attention(*map(library.array, qkv())) for _ in range(20)]
    for result in results:
        assert_attention(library.numbers(result), *qkv())


def test_strides(library):
    """Heads first, as a view of tokens first."""
    arrays = [library.array(x) for x in qkv()]
    views = [library.transposed(x) for x in arrays]
    assert _core.inspect(views[0])["pointer"] == library.pointer(arrays[0])
    assert _core.inspect(views[0])["strides"] == (160, 8, 32, 1)
    out = library.transposed(dlattn.attention(*views, layout="bhsd"))
    assert_attention(library.numbers(out), *qkv())


def test_out_is_written_in_place(library):
    out = library.array(poisoned(2, 5, 4, 8))
    arrays = [library.array(x) for x in qkv()]
    for inputs in (arrays, qkv()):  # whoever the inputs come from
        assert dlattn.attention(*inputs, out=out) is out
        assert_attention(library.numbers(out), *qkv())


def test_no_keys(library):
    q, k, v = (library.array(x) for x in qkv(seqlen_k=0))
    assert (library.numbers(dlattn.attention(q, k, v)) == 0).all()


def test_options(library):
    options = {"bias": normal(5, 7), "mask": normal(5, 7) > 0, "sinks": normal(4)}
    given = {
        name: library.array(x, "bool" if name == "mask" else "float32")
        for name, x in options.items()
    }
    out = dlattn.attention(*map(library.array, qkv()), **given)
    assert_attention(library.numbers(out), *qkv(), **options)


def test_varlen(library):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv())
    offsets = [np.array([0, n, 2 * n], np.int32) for n in (5, 7)]
    tensors = [*map(library.array, (q, k, v)), *(library.array(x, "int32") for x in offsets)]
    out = dlattn.attention_varlen(*tensors, 5, 7)
    assert isinstance(out, library.kind)
    want = dlattn.attention_varlen(q, k, v, *offsets, 5, 7)
    np.testing.assert_array_equal(library.numbers(out), want)


def test_the_other_functions(library):
    outs = [normal(2, 5, 4, 8, seed=n) for n in range(2)]
    lses = [normal(2, 4, 5, seed=n) for n in range(2)]
    merged = dlattn.merge_states([library.array(x) for x in outs], [library.array(x) for x in lses])
    expected = merge_states_reference(outs, lses)
    for got, want in zip(merged, expected, strict=True):
        assert isinstance(got, library.kind)
        np.testing.assert_allclose(library.numbers(got), want, atol=2e-6)

    q, k, v = (library.array(x, "float16") for x in qkv())
    kv = dlattn.quantize_kv(k, v)
    assert isinstance(kv.buffer, library.kind)
    out = dlattn.attention(q, kv, None, precision="int8_fp8")
    want = dlattn.attention(q, k, v, precision="int8_fp8")
    np.testing.assert_array_equal(library.numbers(out), library.numbers(want))


@pytest.mark.gpu
def test_warp_on_a_gpu():
    """On Warp's current stream, on which the inputs arrive late."""
    warp = pytest.importorskip("warp")
    if not warp.is_cuda_available():
        pytest.skip("Warp finds no GPU")
    arrays = [warp.array(x, dtype=warp.float16, device="cuda:0") for x in qkv(head_dim=64)]
    stream = warp.Stream("cuda:0")
    warp.synchronize()
    with warp.ScopedStream(stream, sync_enter=False):
        late = [warp.empty_like(x) for x in arrays]
        for x, y in zip(late, arrays, strict=True):
            warp.copy(x, y)
        out = dlattn.attention(*late)
    warp.synchronize()
    assert isinstance(out, warp.array) and out.dtype is warp.float16
    assert_attention(out.numpy(), *(x.numpy() for x in arrays))


# Paddle's autograd


@pytest.fixture
def paddle():
    return pytest.importorskip("paddle")


@pytest.mark.parametrize("exchange", [True, False])
def test_paddle_tensors_that_require_grad(paddle, exchange):
    _core.use_exchange_api(exchange)
    try:
        q, k, v = (paddle.to_tensor(x, place="cpu") for x in qkv())
        want = dlattn.attention(*qkv())
        k.stop_gradient = False
        words = (
            r"k requires grad \(its stop_gradient is False\).*accepted: a tensor that does not\. "
            r"Call it under paddle\.no_grad\(\) or pass k\.detach\(\)"
        )
        with pytest.raises(UnsupportedError, match=words):
            dlattn.attention(q, k, v)
        np.testing.assert_array_equal(np.asarray(dlattn.attention(q, k.detach(), v)), want)
        with paddle.no_grad():
            np.testing.assert_array_equal(np.asarray(dlattn.attention(q, k, v)), want)
        parameter = paddle.create_parameter([2, 5, 4, 8], "float32")
        with pytest.raises(UnsupportedError, match="q requires grad"):
            dlattn.attention(parameter, k.detach(), v)
    finally:
        _core.use_exchange_api(True)


def test_paddle_sees_that_out_is_written(paddle):
    out = paddle.zeros([2, 5, 4, 8])
    weight = paddle.ones([2, 5, 4, 8])
    weight.stop_gradient = False
    loss = (weight * out).sum()  # keeps out for the gradient of weight
    dlattn.attention(*qkv(), out=out)
    assert out.inplace_version == 1
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_paddle_without_the_exchange_api(paddle, no_exchange_api):
    """As before Paddle 3.3: as of any exporter, with NumPy's arrays as outputs."""
    arrays = [paddle.to_tensor(x, place="cpu") for x in qkv()]
    assert not _core.inspect(arrays[0])["exchange_api"]
    out = dlattn.attention(*arrays)
    assert type(out) is np.ndarray
    assert_attention(out, *qkv())


# Tests without a library


class Fake(Exporter):
    """An exporter that passes for an object of another library."""

    requires_grad = True
    stop_gradient = False


def fake(module: str) -> type:
    return type("Tensor", (Fake,), {"__module__": module})


def test_who_needs_not_detach():
    """Warp's arrays can require grad, and have no detach()."""
    kind = type("Other", (Fake,), {})
    np.testing.assert_array_equal(dlattn.attention(*map(kind, qkv())), dlattn.attention(*qkv()))


def test_paddle_refusal_needs_no_paddle(monkeypatch):
    grad = SimpleNamespace(is_grad_enabled=lambda: True)
    monkeypatch.setitem(sys.modules, "paddle", grad)  # type: ignore[arg-type]
    q = fake("paddle")(qkv()[0])
    with pytest.raises(UnsupportedError, match="q requires grad"):
        dlattn.attention(q, *qkv()[1:])


def test_a_cpu_without_a_number():
    """Paddle's."""
    arrays = [Exporter(x, device=(1, None), capsule_device=(1, 0)) for x in qkv()]
    np.testing.assert_array_equal(dlattn.attention(*arrays), dlattn.attention(*qkv()))
    arrays = [Exporter(x, device=(2, None), capsule_device=(2, 0)) for x in qkv()]
    with pytest.raises(TypeError, match=r"q: its __dlpack_device__ returned \(2, None\)"):
        dlattn.attention(*arrays)


@pytest.mark.skipif(bool(dlattn.info().devices), reason="the fake memory would be used")
def test_warp_arrays_on_a_gpu(monkeypatch):
    """Their stream is asked for, and the outputs come from Warp."""
    made: list[Any] = []

    def empty(shape: Any, *, dtype: str, device: Any) -> Any:
        made.append((shape, dtype, device.name))
        return kind(poisoned(*shape), device=(2, 0))

    stream = SimpleNamespace(cuda_stream=0x7000)
    device = SimpleNamespace(name="cuda:0", stream=stream)
    kind = type("array", (Exporter,), {"__module__": "warp._src.types"})
    fake_warp = SimpleNamespace(empty=empty, float32="wp.float32")
    monkeypatch.setitem(sys.modules, "warp", fake_warp)  # type: ignore[arg-type]
    arrays = [kind(x, device=(2, 0)) for x in qkv()]
    for x in arrays:
        x.device = device
    with pytest.raises(dlattn.DeviceError, match="CUDA"):
        dlattn.attention(*arrays)
    assert [x.streams for x in arrays] == [[0x7000]] * 3
    assert made == [((2, 5, 4, 8), "wp.float32", "cuda:0")]


@pytest.mark.parametrize("module", ["paddle.pir", "warp._src.types", "tinygrad.tensor"])
def test_what_has_no_dlpack_is_no_tensor(module):
    """Paddle's static graphs, Warp's indexed arrays, all of tinygrad."""
    kind = type("Value", (), {"__module__": module})
    with pytest.raises(TypeError, match=r"q is of type .*Value; accepted: a torch, CuPy, JAX"):
        dlattn.attention(kind(), kind(), kind())

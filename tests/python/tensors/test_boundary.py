"""How tensors come in and go out: without a copy, in any strides."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, assert_attention, normal, poisoned, qkv, to_float64
from capsules import Exporter

import dlattn
from dlattn import _core

# No copy


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_come_in_where_they_are(framework, dtype):
    x = framework.array(normal(2, 5, 4, 8), dtype)
    seen = _core.inspect(x)
    assert seen["pointer"] == framework.pointer(x)
    assert seen["dtype"] == dtype and seen["device"] == "cpu"
    assert seen["shape"] == (2, 5, 4, 8) and seen["strides"] == (160, 32, 8, 1)


def test_torch_comes_in_by_the_exchange_api_if_it_can():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2)
    offers = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert _core.inspect(x)["exchange_api"] == offers


def test_torch_without_the_exchange_api(no_exchange_api):
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv(head_dim_v=6)]
    assert not _core.inspect(arrays[0])["exchange_api"]
    assert _core.inspect(arrays[0])["pointer"] == arrays[0].data_ptr()
    out, lse = dlattn.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == torch.float32
    assert_attention((out, lse), *arrays, causal=True)
    half = [x.to(torch.bfloat16) for x in arrays]
    assert dlattn.attention(*half).dtype == torch.bfloat16
    given = torch.full((2, 5, 4, 6), torch.nan)
    assert dlattn.attention(*arrays, out=given) is given
    assert_attention(given, *arrays)


def test_torch_compile_runs_the_call_as_it_is():
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv()]

    @torch.compile(backend="eager")
    def model(q: Any, k: Any, v: Any) -> Any:
        return dlattn.attention(2 * q, k, v, causal=True) + 1

    want = dlattn.attention(2 * arrays[0], *arrays[1:], causal=True) + 1
    torch.testing.assert_close(model(*arrays), want)


def test_views_come_in_with_their_offset(framework):
    if framework.name == "jax":
        pytest.skip("JAX has no views")
    whole = framework.array(normal(2, 5, 4, 8))
    seen = _core.inspect(whole[:, 1:, 2:, 4:])
    assert seen["pointer"] == framework.pointer(whole) + 4 * (32 + 16 + 4)
    assert seen["shape"] == (2, 4, 2, 4) and seen["strides"] == (160, 32, 8, 1)


def test_out_is_written_in_place(framework):
    if framework.name == "jax":
        pytest.skip("JAX arrays are immutable")
    out = framework.array(poisoned(2, 5, 4, 8))
    before = framework.pointer(out)
    dlattn.attention(*map(framework.array, qkv()), out=out)
    assert framework.pointer(out) == before and np.isfinite(to_float64(out)).all()


@pytest.mark.parametrize("exchange", [True, False])
def test_autograd_sees_that_out_is_written(exchange):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv())
    _core.use_exchange_api(exchange)
    try:
        for arguments in ((q, k, v), qkv()):  # whoever the inputs come from
            out = torch.zeros(2, 5, 4, 8)
            dlattn.attention(*arguments, out=out)
            assert out._version == 1
            with pytest.raises(dlattn.UnsupportedError):
                dlattn.attention(*arguments, out=out, softmax_scale=-1.0)
            dlattn.plan(*arguments, out=out)
            assert out._version == 1
        weight = torch.ones(2, 5, 4, 8, requires_grad=True)
        loss = (weight * out).sum()  # keeps out for the gradient of weight
        dlattn.attention(q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            out = torch.zeros(2, 5, 4, 8)  # has no version
            dlattn.attention(q, k, v, out=out)
        assert_attention(out, *qkv())
    finally:
        _core.use_exchange_api(True)


@pytest.mark.parametrize("layout", ["bs4hd", "bsh4d", "b4shd", "4bshd"])
def test_out_may_be_a_slice_of_the_buffer_of_q_k_and_v(layout):
    """As a model with one buffer for all has it: no element is in two of the slices."""
    sizes = {"b": 2, "s": 5, "4": 4, "h": 3, "d": 8}
    buffer = normal(*(sizes[dim] for dim in layout))
    q, k, v, out = np.moveaxis(buffer, layout.index("4"), 0)
    before = buffer.copy()
    copies = q.copy(), k.copy(), v.copy()
    assert dlattn.attention(q, k, v, out=out) is out
    assert_attention(out, *copies)
    np.moveaxis(before, layout.index("4"), 0)[3] = out
    np.testing.assert_array_equal(buffer, before)


def test_jax_takes_the_result_over_without_a_copy(monkeypatch):
    jax = FRAMEWORKS["jax"]()
    pointers = []
    framework = sys.modules["dlattn.frameworks"]._FRAMEWORKS["jax"]
    empty = type(framework).empty

    def spied(self: Any, *arguments: Any) -> Any:
        buffer = empty(self, *arguments)
        pointers.append(_core.inspect(buffer)["pointer"])
        return buffer

    monkeypatch.setattr(type(framework), "empty", spied)
    result = dlattn.attention(*map(jax.array, qkv()), return_lse=True)
    assert [jax.pointer(x) for x in result] == pointers
    assert all(pointer % 64 == 0 for pointer in pointers)


def test_jax_results_outlive_everything_else():
    jax = FRAMEWORKS["jax"]()
    arrays = [jax.array(x) for x in qkv()]
    results = [dlattn.attention(*arrays) for _ in range(50)]
    del arrays
    gc.collect()
    for result in results:
        assert_attention(result, *qkv())
    total = sum(results[1:], start=results[0])  # JAX computes with them
    np.testing.assert_allclose(np.asarray(total), 50 * np.asarray(results[0]), rtol=1e-5)


# Strides


def strided(x: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of x in other strides, the last dimension contiguous."""
    b, s, h, d = x.shape
    if kind == "sliced":
        whole = poisoned(b + 1, 2 * s, h + 2, d + 5, dtype=x.dtype.name)
        view = whole[1:, ::2, 1:-1, 3 : d + 3]
    elif kind == "transposed":
        view = poisoned(h, b, s, d, dtype=x.dtype.name).transpose(1, 2, 0, 3)
    elif kind == "odd rows":
        view = poisoned(b, s, h, d + 1, dtype=x.dtype.name)[..., 1:]
    else:
        raise AssertionError(kind)
    view[...] = x
    return view


@pytest.mark.parametrize("kind", ["sliced", "transposed", "odd rows"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_strides(kind, dtype):
    arrays = [strided(x, kind) for x in qkv(2, 33, 40, 4, 2, 24, dtype=dtype)]
    seen = _core.inspect(arrays[0])
    assert seen["strides"] == tuple(s // arrays[0].itemsize for s in arrays[0].strides)
    assert_attention(dlattn.attention(*arrays, causal=True), *arrays, causal=True)


@pytest.mark.parametrize("kind", ["sliced", "transposed", "odd rows"])
@pytest.mark.parametrize("exchange", [True, False])
def test_strides_of_torch(kind, exchange):
    torch = pytest.importorskip("torch")
    _core.use_exchange_api(exchange)
    try:
        arrays = [torch.from_numpy(strided(x, kind)) for x in qkv()]
        assert _core.inspect(arrays[0])["strides"] == arrays[0].stride()
        assert_attention(dlattn.attention(*arrays), *arrays)
    finally:
        _core.use_exchange_api(True)


def test_broadcast_by_zero_strides():
    q, k, v = qkv()
    one = (np.broadcast_to(k[:1, :, :1], k.shape), np.broadcast_to(v[:, :1], v.shape))
    assert _core.inspect(one[0])["strides"] == (0, 16, 0, 1)
    assert_attention(dlattn.attention(q, *one), q, *one)
    scores = normal(1, 4, 1, 7, seed=5)
    bias, mask = np.broadcast_to(scores, (2, 4, 5, 7)), np.broadcast_to(scores > -0.5, (2, 4, 5, 7))
    assert bias.strides[2] == 0
    assert_attention(dlattn.attention(q, k, v, bias=bias, mask=mask), q, k, v, bias=bias, mask=mask)


def test_offsets_beyond_32_bits():
    """Batches more than 2^31 elements apart, in memory that is mapped but hardly touched."""
    far = 2**31 + 4096
    memory = np.empty(far + (1 << 20), np.float16)

    def place(x: np.ndarray, offset: int) -> np.ndarray:
        view = np.lib.stride_tricks.as_strided(
            memory[offset:], x.shape, (2 * far, *x[0].strides), writeable=True
        )
        view[...] = x
        return view

    arrays = [place(x, 8192 * n) for n, x in enumerate(qkv(2, 33, 40, 2, 2, 32, dtype="float16"))]
    out = place(poisoned(2, 33, 2, 32, dtype="float16"), 4 * 8192)
    dlattn.attention(*arrays, out=out, causal=True)
    assert_attention(out, *arrays, causal=True)


def test_bias_and_mask_of_any_strides():
    q, k, v = qkv()
    bias = normal(2, 7, 4, 10, seed=5).transpose(0, 2, 3, 1)[:, :, ::-2][:, :, ::-1]
    mask = normal(7, 5, seed=6).T > -0.5
    assert bias.shape == (2, 4, 5, 7)
    assert_attention(dlattn.attention(q, k, v, bias=bias, mask=mask), q, k, v, bias=bias, mask=mask)


def test_slopes_and_sinks_of_any_strides():
    q, k, v = qkv()
    slopes, sinks = np.abs(normal(4, 6, seed=5)).T[::3], normal(8, seed=6)[::2]
    assert_attention(
        dlattn.attention(q, k, v, alibi_slopes=slopes, sinks=sinks), q, k, v, alibi_slopes=slopes,
        sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize("stride", [0, -7, 3, 2**62, -(2**62)])
def test_strides_of_dimensions_of_one_element_mean_nothing(stride):
    q, k, v = qkv(1, 1, 7, 1, 1)
    odd = Exporter(q, strides=(stride, stride, stride, 1))
    np.testing.assert_array_equal(dlattn.attention(odd, k, v), dlattn.attention(q, k, v))
    out = poisoned(1, 1, 1, 8)
    dlattn.attention(q, k, v, out=Exporter(out, strides=(stride, stride, stride, 1)))
    assert_attention(out, q, k, v)


def test_head_dim_of_one_may_have_any_stride():
    q, k, v = (x[..., :1] for x in qkv())
    assert q.strides[-2] == 32
    odd = [Exporter(x, strides=(*(s // 4 for s in x.strides[:3]), 5)) for x in (q, k, v)]
    np.testing.assert_array_equal(dlattn.attention(*odd), dlattn.attention(q, k, v))


def test_strides_left_out_mean_contiguous():
    q, k, v = qkv()
    old = Exporter(q, strides=None, version=None)
    assert _core.inspect(old)["strides"] == (160, 32, 8, 1)
    np.testing.assert_array_equal(dlattn.attention(old, k, v), dlattn.attention(q, k, v))


def test_byte_offset():
    q, k, v = qkv()
    whole = np.concatenate([normal(3), q.ravel()])
    shifted = Exporter(whole, shape=q.shape, strides=(160, 32, 8, 1), byte_offset=12)
    assert _core.inspect(shifted)["pointer"] == whole.ctypes.data + 12
    np.testing.assert_array_equal(dlattn.attention(shifted, k, v), dlattn.attention(q, k, v))


def test_empty_tensors_may_have_any_strides_and_no_memory():
    q = Exporter(normal(1), shape=(0, 5, 4, 8), strides=(-3, 7, 2**62, 9), pointer=0)
    k = Exporter(normal(1), shape=(0, 7, 2, 8), strides=(-3, 7, 2**62, 9), pointer=0)
    out = dlattn.attention(q, k, k)
    assert type(out) is np.ndarray and out.shape == (0, 5, 4, 8)


def test_memory_mapped_arrays_and_other_subclasses(tmp_path):
    q, k, v = qkv()
    q.tofile(tmp_path / "q.bin")
    mapped = np.memmap(tmp_path / "q.bin", np.float32, "r", shape=q.shape)
    out = dlattn.attention(mapped, k, v)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v))


def test_read_only_inputs_are_fine():
    arrays = qkv()
    for x in arrays:
        x.flags.writeable = False
    assert _core.inspect(arrays[0])["read_only"]
    assert_attention(dlattn.attention(*arrays), *arrays)

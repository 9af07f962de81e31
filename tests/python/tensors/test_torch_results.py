"""The tensors that torch gets back: made by torch's C ABI, as torch's own functions make theirs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from arrays import assert_attention, qkv

import dlattn

torch = pytest.importorskip("torch")


def tensors() -> list[Any]:
    return [torch.from_numpy(x) for x in qkv()]


@pytest.fixture(params=[True, False], ids=["exchange", "adapter"])
def exchange(request):
    dlattn._core.use_exchange_api(request.param)
    yield request.param
    dlattn._core.use_exchange_api(True)


@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_results_are_as_torch_makes_its_own(exchange, mode):
    q, k, v = tensors()
    with getattr(torch, mode)():
        out, lse = dlattn.attention(q, k, v, return_lse=True)
        like = torch.empty(out.shape)
    assert_attention(out, *qkv())
    for x in (out, lse):
        assert type(x) is torch.Tensor and x.is_contiguous() and x.storage_offset() == 0
        assert not x.requires_grad and x.is_leaf and x.grad_fn is None and x._base is None
        assert x.is_inference() == like.is_inference()
    assert out.stride() == like.stride() and out.dtype == like.dtype and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_comes_back(dtype):
    q, k, v = (x.to(getattr(torch, dtype)) for x in tensors())
    assert dlattn.attention(q, k, v).dtype is q.dtype


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_results_without_elements_have_torchs_strides(exchange, empty):
    shape = [2, 5, 4, 8]
    shape[empty] = 0
    q = torch.empty(shape)
    k = torch.ones(shape[0], 7, 4, 8)
    if empty == 2:
        return  # no heads are refused
    out = dlattn.attention(q, k, k)
    assert out.shape == q.shape and out.stride() == q.stride()


def test_a_result_is_let_go_of_with_its_last_reference():
    q, k, v = tensors()
    out = dlattn.attention(q, k, v)
    gone = weakref.ref(out)
    part = out[:1]
    values = part.clone()
    del q, k, v, out
    gc.collect()
    assert torch.equal(part, values)
    del part
    gc.collect()
    assert gone() is None


def test_results_can_be_changed_in_place_and_saved_for_gradients():
    q, k, v = tensors()
    out = dlattn.attention(q, k, v)
    weight = torch.ones(out.shape, requires_grad=True)
    (weight * out).sum().backward()
    assert torch.equal(weight.grad, out)
    assert out.add_(1.0)._version == 1 and out.resize_(1).shape == (1,)


@pytest.mark.parametrize("rows", [1 << 13, 1 << 14], ids=["small", "large"])
def test_results_of_every_size_are_torchs(exchange, rows):
    """Large ones are made another way: of more than 16 MiB."""
    q, k = torch.ones(1, rows, 8, 64), torch.ones(1, 2, 8, 64)
    out = dlattn.attention(q, k, k)
    assert (out.nbytes > 16 << 20) == (rows > 1 << 13)
    assert torch.equal(out, q) and out.stride() == q.stride() and not out.requires_grad


def test_results_belong_to_no_thread():
    results: list[Any] = []
    q, k, v = tensors()
    thread = threading.Thread(target=lambda: results.append(dlattn.attention(q, k, v)))
    thread.start()
    thread.join()
    assert_attention(results[0], *qkv())


def test_without_memory_the_error_is_torchs(exchange):
    q = torch.zeros(1, 1, 1, 8).expand(1 << 16, 1 << 16, 1, 8)
    with pytest.raises(RuntimeError, match="allocate memory"):
        dlattn.attention(q, q[:, :1], q[:, :1])
    assert_attention(dlattn.attention(*tensors()), *qkv())

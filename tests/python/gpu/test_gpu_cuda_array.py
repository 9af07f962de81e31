"""Arrays with `__cuda_array_interface__` alone, on a GPU: torch's memory, lent, and Numba's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, max_error, normal, poisoned, qkv
from cuda_arrays import Borrowed

import dlattn
from dlattn import UnsupportedError, _core
from dlattn.reference import merge_states_reference

pytestmark = pytest.mark.gpu

HALF_SECOND = 1_000_000_000  # clock cycles, about
SIZES = {"batch": 1, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 8, "num_heads_kv": 8,
         "head_dim": 64}  # fmt: skip


def on_gpu(torch: Any, *arrays: np.ndarray, device: Any = "cuda") -> list[Any]:
    return [torch.from_numpy(x).to(device, torch.float16) for x in arrays]


def lent(*tensors: Any, **changes: Any) -> list[Borrowed]:
    return [Borrowed(x, **changes) for x in tensors]


def nan_like(torch: Any, x: Any) -> Any:
    return torch.full_like(x, torch.nan)


# Results


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(torch, causal, layout):
    arrays = on_gpu(torch, *qkv(2, 70, 90, 4, 2, 32, layout=layout))
    out = nan_like(torch, arrays[0])
    given = Borrowed(out)
    torch.cuda.synchronize()
    assert dlattn.attention(*lent(*arrays), causal=causal, layout=layout, out=given) is given
    assert_attention(out, *arrays, causal=causal, layout=layout)
    assert torch.equal(out, dlattn.attention(*arrays, causal=causal, layout=layout))


def test_strides(torch):
    """Every other row of a buffer, heads first, with columns that are not used."""
    arrays = []
    for x in qkv(2, 33, 40, 4, 2, 32):
        b, s, h, d = x.shape
        view = torch.full((b, h, s * 2, d + 8), torch.nan, device="cuda").half()
        view = view[:, :, ::2, 8:].transpose(1, 2)
        view.copy_(torch.from_numpy(x))
        arrays.append(view)
    seen = _core.inspect(Borrowed(arrays[0]))
    assert seen["pointer"] == arrays[0].data_ptr() and seen["strides"] == arrays[0].stride()
    assert seen["device"] == "cuda:0" and seen["dtype"] == "float16"
    out = torch.full((2, 33, 4, 40), torch.nan, device="cuda").half()[..., 8:]
    torch.cuda.synchronize()
    dlattn.attention(*lent(*arrays), causal=True, out=Borrowed(out))
    assert_attention(out, *arrays, causal=True)


def test_every_other_tensor(torch):
    arrays = on_gpu(torch, *qkv(head_dim=16))
    options = {
        "bias": normal(5, 7),
        "mask": normal(5, 7) > 0,
        "alibi_slopes": normal(4),
        "sinks": normal(4),
    }
    others = {name: Borrowed(torch.from_numpy(x).cuda()) for name, x in options.items()}
    out = nan_like(torch, arrays[0])
    torch.cuda.synchronize()
    dlattn.attention(*lent(*arrays), **others, out=Borrowed(out), kernel="scalar")
    assert_attention(out, *arrays, **options)


def test_varlen(torch):
    q, k, v = on_gpu(torch, *(x.reshape(-1, *x.shape[2:]) for x in qkv(head_dim=16)))
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (5, 7)]
    used = torch.tensor([3, 7], dtype=torch.int32, device="cuda")
    want = dlattn.attention_varlen(q, k, v, *offsets, 5, 7, seqused_k=used)
    out = nan_like(torch, q)
    torch.cuda.synchronize()
    tensors = lent(q, k, v, *offsets)
    dlattn.attention_varlen(*tensors, 5, 7, seqused_k=Borrowed(used), out=Borrowed(out))
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_empty(torch):
    q, k, v = on_gpu(torch, *qkv(seqlen_k=0))
    out = nan_like(torch, q)
    torch.cuda.synchronize()
    dlattn.attention(*lent(q, k, v), out=Borrowed(out))
    torch.cuda.synchronize()
    assert (out == 0).all()
    empty = on_gpu(torch, *qkv(batch=0))
    dlattn.attention(*lent(*empty), out=Borrowed(torch.empty_like(empty[0])))


def test_they_mix_with_torch(torch):
    q, k, v = on_gpu(torch, *qkv(**SIZES))
    want = dlattn.attention(q, k, v)
    torch.cuda.synchronize()
    got = dlattn.attention(q, Borrowed(k), v)
    assert type(got) is torch.Tensor and torch.equal(got, want)
    out = nan_like(torch, q)
    torch.cuda.synchronize()
    dlattn.attention(Borrowed(q), k, v, out=out)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_what_is_refused(torch):
    q, k, v = on_gpu(torch, *qkv(head_dim=16))
    out = torch.empty_like(q)
    read_only = Borrowed(out, data=(out.data_ptr(), True))
    with pytest.raises(UnsupportedError, match="out is read-only; accepted"):
        dlattn.attention(*lent(q, k, v), out=read_only)
    with pytest.raises(UnsupportedError, match="out is None, and dlattn cannot allocate"):
        dlattn.attention(*lent(q, k, v))
    with pytest.raises(UnsupportedError, match="precision is given, and dlattn cannot allocate"):
        dlattn.attention(*lent(q, k, v), out=Borrowed(out), precision="int8_fp16")


# Order


def test_the_stream_of_q_is_the_one_used(torch):
    """q, k and v arrive late on it; so does what out is waited for on."""
    arrays = on_gpu(torch, *qkv(**SIZES))
    want = dlattn.attention(*arrays)
    late = [nan_like(torch, x) for x in arrays]
    out = nan_like(torch, want)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_SECOND)
        for x, y in zip(late, arrays, strict=True):
            x.copy_(y)
    dlattn.attention(*lent(*late, stream=stream.cuda_stream), out=Borrowed(out))
    assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("late_one", range(4))
@pytest.mark.parametrize("given", [None, 0, 1, 2, "another"])
def test_other_streams_are_waited_for(torch, late_one, given):
    """One of q, k, v and out is late on a stream that is not the call's."""
    arrays = on_gpu(torch, *qkv(**SIZES))
    want = dlattn.attention(*arrays)
    out = nan_like(torch, want)
    dlattn.attention(*lent(*arrays), out=Borrowed(out), stream=given if given != "another" else 1)
    tensors = [*arrays, out]
    true = tensors[late_one].clone()
    tensors[late_one].fill_(torch.nan)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_SECOND)
        # The contents of out are overwritten, so that they must come before the call's own writes.
        tensors[late_one].copy_(true if late_one < 3 else torch.zeros_like(true))
    borrowed = lent(*tensors)
    borrowed[late_one] = Borrowed(tensors[late_one], stream=stream.cuda_stream)
    used: Any = other.cuda_stream if given == "another" else given
    dlattn.attention(*borrowed[:3], out=borrowed[3], stream=used)
    assert not stream.query(), "the call waited for the stream"
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_append_waits_for_other_streams(torch):
    """New keys are late on a stream that is not the call's."""
    k, v = on_gpu(torch, normal(1, 64, 2, 64), normal(1, 64, 2, 64, seed=1))
    caches = [nan_like(torch, torch.cat([x, x], 1)) for x in (k, v)]
    used = torch.zeros(1, dtype=torch.int32, device="cuda")
    dlattn.append_kv(*lent(k, v, *caches), seqused_k=Borrowed(used), stream=1)
    late, stream, other = nan_like(torch, k), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_SECOND)
        late.copy_(k)
    given = [Borrowed(late, stream=stream.cuda_stream), *lent(v, *caches)]
    dlattn.append_kv(*given, seqused_k=Borrowed(used), stream=other)
    assert not stream.query(), "the call waited for the stream"
    torch.cuda.synchronize()
    assert torch.equal(caches[0][:, :64], k)
    assert torch.equal(caches[1][:, :64], v)


def test_nothing_is_waited_for_without_need(torch):
    """Neither by a call whose arrays name no stream, nor by one that computes nothing."""
    arrays = on_gpu(torch, *qkv(**SIZES))
    out = nan_like(torch, arrays[0])
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    dlattn.attention(*lent(*arrays), out=Borrowed(out), stream=other)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * HALF_SECOND)
    busy = lent(*arrays, stream=stream.cuda_stream)
    assert dlattn.supported(*busy, out=Borrowed(out), stream=other)
    dlattn.plan(*busy, out=Borrowed(out), stream=other)
    with pytest.raises(UnsupportedError, match="out: shape"):
        dlattn.attention(*busy, out=Borrowed(out[:, :-1]), stream=other)
    dlattn.attention(*lent(*arrays), out=Borrowed(out), stream=other)
    other.synchronize()
    assert not stream.query(), "the call was ordered after a stream that it has nothing to do with"


def test_graph_capture(torch):
    arrays = on_gpu(torch, *qkv(**SIZES))
    out = nan_like(torch, arrays[0])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    dlattn.attention(*lent(*arrays), out=Borrowed(out), stream=stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        dlattn.attention(*lent(*arrays, stream=stream.cuda_stream), out=Borrowed(out))
    for seed in range(2):
        for n, x in enumerate(arrays):
            x.copy_(torch.from_numpy(normal(*x.shape, seed=10 * seed + n)))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_attention(out, *arrays)


def test_a_stream_outside_a_capture():
    """In a process of its own: torch's random numbers and allocator take the broken capture to be
    under way for ever."""
    program = f"import runpy, torch; runpy.run_path({__file__!r})['outside_a_capture'](torch)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


def outside_a_capture(torch):
    """CUDA's own refusal, which leaves no trace for later calls."""
    q, k, v = on_gpu(torch, *qkv(**SIZES))
    out = nan_like(torch, q)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    dlattn.attention(*lent(q, k, v), out=Borrowed(out), stream=stream)
    torch.cuda.synchronize()
    late = Borrowed(k, stream=other.cuda_stream)
    with (
        suppress(RuntimeError),  # torch may then find its capture broken
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        pytest.raises(dlattn.DeviceError, match="cudaStreamWaitEvent failed: "),
    ):
        dlattn.attention(Borrowed(q), late, Borrowed(v), out=Borrowed(out), stream=stream)
    torch.cuda.synchronize()
    dlattn.attention(Borrowed(q), late, Borrowed(v), out=Borrowed(out), stream=stream)
    torch.cuda.synchronize()
    assert_attention(out, q, k, v)


# Threads and devices


def test_a_thread_that_has_not_used_cuda(torch):
    q, k, v = on_gpu(torch, *qkv(**SIZES))
    want = dlattn.attention(q, k, v)
    out = nan_like(torch, want)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            late = Borrowed(k, stream=stream.cuda_stream)
            dlattn.attention(Borrowed(q), late, Borrowed(v), out=Borrowed(out))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures and torch.equal(out, want)


def test_second_gpu(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = on_gpu(torch, *qkv(**SIZES), device="cuda:1")
    out = nan_like(torch, q)
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize(1)
    assert _core.inspect(Borrowed(q))["device"] == "cuda:1"
    late = Borrowed(k, stream=stream.cuda_stream)
    dlattn.attention(Borrowed(q), late, Borrowed(v), out=Borrowed(out))
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert_attention(out, q, k, v)
    with pytest.raises(UnsupportedError, match=r"k is on cuda:0; accepted: cuda:1, where q is"):
        dlattn.attention(Borrowed(q), Borrowed(k.to("cuda:0")), Borrowed(v), out=Borrowed(out))


# Numba


@pytest.fixture
def cuda():
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("Numba finds no GPU")
    yield cuda
    cuda.synchronize()


def test_numba(cuda):
    arrays = qkv(2, 70, 90, 4, 2, 32, dtype="float16")
    tensors = [cuda.to_device(x) for x in arrays]
    out, lse = dlattn.attention(*tensors, causal=True, return_lse=True)
    assert type(out) is type(lse) is type(tensors[0])
    assert out.dtype == np.float16 and lse.dtype == np.float32
    assert_attention((out.copy_to_host(), lse.copy_to_host()), *arrays, causal=True)
    given = cuda.to_device(poisoned(*arrays[0].shape, dtype="float16"))
    assert dlattn.attention(*tensors, causal=True, out=given) is given
    np.testing.assert_array_equal(given.copy_to_host(), out.copy_to_host())


def test_numba_streams(cuda):
    """Outputs name the stream that writes them, on which their copies wait."""
    arrays = qkv(**SIZES, dtype="float16")
    want = dlattn.attention(*map(cuda.to_device, arrays)).copy_to_host()
    stream, other = cuda.stream(), cuda.stream()
    tensors = [cuda.to_device(x, stream=stream).bind(stream) for x in arrays]
    out = dlattn.attention(*tensors)
    assert int(out.stream) == int(stream)
    np.testing.assert_array_equal(out.copy_to_host(), want)
    out = dlattn.attention(*tensors, stream=int(other))
    assert int(out.stream) == int(other)
    np.testing.assert_array_equal(out.copy_to_host(), want)


def test_numba_arrays_in_host_memory(cuda):
    """Mapped and managed ones, which are NumPy arrays as well, are computed with on the GPU."""
    arrays = qkv(head_dim=16, dtype="float16")
    for make in (cuda.mapped_array, cuda.managed_array):
        tensors = [make(x.shape, dtype=x.dtype) for x in arrays]
        for tensor, x in zip(tensors, arrays, strict=True):
            tensor[...] = x
        out = dlattn.attention(*tensors)
        assert not isinstance(out, np.ndarray)
        assert_attention(out.copy_to_host(), *arrays)


def test_numba_for_the_other_functions(cuda):
    outs = [normal(2, 5, 4, 8, seed=n) for n in range(3)]
    lses = [normal(2, 4, 5, seed=n) for n in range(3)]
    merged = dlattn.merge_states(
        [cuda.to_device(x) for x in outs], [cuda.to_device(x) for x in lses]
    )
    expected = merge_states_reference(outs, lses)
    for got, want in zip(merged, expected, strict=True):
        assert max_error(got.copy_to_host(), want) <= 2e-6
    q, k, v = (cuda.to_device(x) for x in qkv(**SIZES, dtype="float16"))
    stored = dlattn.quantize_kv(k, v, precision="int8_fp16")
    assert stored.buffer.size * 4 == stored.nbytes and q.size

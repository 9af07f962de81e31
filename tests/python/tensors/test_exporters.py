"""Tensors of whoever exports them by DLPack, and those that dlattn exports."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, normal, poisoned, qkv
from capsules import (
    Exporter,
    Managed,
    OldestExporter,
    OldExporter,
    capsule_pointer,
    device_tensor,
    set_capsule_name,
)

import dlattn
from dlattn import _core

# Coming in


@pytest.mark.parametrize("kind", [Exporter, OldExporter, OldestExporter])
def test_exporters_of_any_age(kind):
    q, k, v = qkv()
    exporters = [kind(x) for x in (q, k, v)]
    out = dlattn.attention(*exporters)
    assert type(out) is np.ndarray  # who cannot allocate gets NumPy arrays, on the CPU
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v))
    assert [x.alive for x in exporters] == [0, 0, 0]
    assert all(x.streams == [None] for x in exporters)


def test_a_type_error_of_an_exporter_is_its_own():
    """A signature without max_version tells of an old exporter; nothing else is tried again."""
    calls: list[int] = []

    class Nested(Exporter):
        def __init__(self, depth: int) -> None:
            super().__init__(normal(2, 3))
            self.depth = depth

        def __dlpack__(self, **keywords: Any) -> Any:
            calls.append(self.depth)
            if self.depth == 0:
                return len(0)  # type: ignore[arg-type]
            return _core.inspect(Nested(self.depth - 1))

    with pytest.raises(TypeError, match=r"tensor: .*Nested cannot be taken in") as caught:
        _core.inspect(Nested(10))
    assert calls == list(range(10, -1, -1))
    cause: BaseException = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert "object of type 'int' has no len()" in str(cause)


def test_frameworks_mix_on_the_cpu():
    torch, jax = FRAMEWORKS["torch"](), FRAMEWORKS["jax"]()
    q, k, v = qkv()
    want = dlattn.attention(q, k, v)
    for first, second, third in [
        (torch.array(q), jax.array(k), v),
        (jax.array(q), v * 0 + k, torch.array(v)),
        (q, Exporter(k), torch.array(v)),
        (Exporter(q), torch.array(k), jax.array(v)),
    ]:
        got = dlattn.attention(first, second, third)
        np.testing.assert_array_equal(np.asarray(got), want)
        assert type(got) is (type(first) if not isinstance(first, Exporter) else np.ndarray)
    out = torch.array(poisoned(2, 5, 4, 8))
    assert dlattn.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.numpy(), want)


def test_pinned_host_memory_is_cpu_memory():
    q, k, v = qkv()
    pinned = [device_tensor(3, 0, x) for x in (q, k, v)]
    assert _core.inspect(pinned[0])["device"] == "cpu"
    np.testing.assert_array_equal(dlattn.attention(*pinned), dlattn.attention(q, k, v))


@pytest.mark.skipif(bool(dlattn.info().devices), reason="the fake memory would be used")
@pytest.mark.parametrize("device_type", [2, 13])
def test_cuda_exporters_are_asked_for_the_right_stream(device_type):
    arrays = qkv()

    class TorchStream:
        cuda_stream = 0x5000

    class CupyStream:
        ptr = 0x6000

    class CudaStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0x7000)

    for stream, asked in [
        (0, 1),  # DLPack's name for the legacy default stream
        (1, 1),
        (2, 2),
        (0x4000, 0x4000),
        (np.int64(0x4000), 0x4000),
        (TorchStream(), 0x5000),
        (CupyStream(), 0x6000),
        (CudaStream(), 0x7000),
    ]:
        tensors = [device_tensor(device_type, 0, x) for x in arrays]
        out = device_tensor(device_type, 0, poisoned(2, 5, 4, 8))
        assert not dlattn.supported(*tensors, out=out, stream=stream)
        assert [x.streams for x in [*tensors, out]] == [[asked]] * 4


def test_device_of_the_capsule_counts():
    q, k, v = qkv()
    liar = Exporter(k, device=(1, 0), capsule_device=(2, 0))
    with pytest.raises(dlattn.UnsupportedError, match="k is on cuda:0; accepted: cpu"):
        dlattn.attention(q, liar, v)
    assert liar.alive == 0


def test_a_capsule_is_consumed_once():
    exporter = Exporter(normal(2, 3))
    exporter.capsule = capsule = exporter.__dlpack__()
    _core.inspect(exporter)
    assert '"used_dltensor"' in repr(capsule)
    assert exporter.alive == 0
    with pytest.raises(dlattn.UnsupportedError, match="used before"):
        _core.inspect(exporter)


def test_capsules_are_released_when_a_call_fails():
    q, k, v = (Exporter(x) for x in qkv())
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.attention(q, k, v, softmax_scale=-1.0)
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.attention(q, k, Exporter(normal(2, 7, 3, 8)))
    assert (q.alive, k.alive, v.alive) == (0, 0, 0)


# Going out


def test_host_buffer_exports_itself():
    buffer = _core.HostBuffer((2, 3), "bfloat16")
    assert buffer.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(buffer.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(buffer.__dlpack__(stream=None, copy=False))
    assert _core.inspect(buffer)["dtype"] == "bfloat16"
    assert np.from_dlpack(_core.HostBuffer((4, 5), "float32")).shape == (4, 5)
    with pytest.raises(dlattn.UnsupportedError, match=r"dtype is int8; accepted: float16"):
        _core.HostBuffer((2,), "int8")


def consume(capsule: Any) -> Callable[[], None]:
    """Takes a "dltensor" capsule over; what is returned lets go of it, without the GIL."""
    managed = Managed.from_address(capsule_pointer(capsule, b"dltensor"))
    set_capsule_name(capsule, b"used_dltensor")
    return lambda: managed.deleter(ctypes.addressof(managed))


def in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_relayed_capsule_tells_what_the_first_one_told():
    exporter = Exporter(np.asfortranarray(normal(3, 4)), byte_offset=8)
    truth = _core.inspect(exporter)
    again = Exporter(exporter.array, capsule=_core.relay(exporter.__dlpack__()))
    assert _core.inspect(again) == truth
    assert exporter.alive == 0


def test_relayed_exporter_is_let_go_in_the_main_thread():
    threads: list[int] = []

    class Watched(Exporter):
        def _deleted(self) -> None:
            super()._deleted()
            threads.append(threading.get_ident())

    exporter = Watched(normal(3, 4))
    for _ in range(100):  # more than Python's queue of calls to make holds
        let_go = consume(_core.relay(exporter.__dlpack__()))
        assert exporter.alive == 1
        in_another_thread(let_go)
        assert exporter.alive == 0
    assert set(threads) == {threading.get_ident()}

    many = [consume(_core.relay(exporter.__dlpack__())) for _ in range(100)]
    in_another_thread(lambda: [let_go() for let_go in many])
    assert exporter.alive == 0


def test_jax_takes_over_what_is_relayed():
    jax = pytest.importorskip("jax")
    values = normal(3, 64)
    x = jax.numpy.asarray(values)

    class Relayed:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
            return _core.relay(self.array.__dlpack__(stream=stream))

    y = jax.dlpack.from_dlpack(Relayed(x))
    assert y.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    del x
    gc.collect()
    others = [jax.numpy.zeros((3, 64), "float32") for _ in range(10)]
    np.testing.assert_array_equal(np.asarray(y), values)
    del y, others


def test_relayed_capsule_that_nobody_takes():
    exporter = Exporter(normal(3, 4))
    capsule = _core.relay(exporter.__dlpack__())
    assert exporter.alive == 1
    del capsule
    gc.collect()
    assert exporter.alive == 0
    with pytest.raises(TypeError, match="capsule"):
        _core.relay(exporter)

"""Arrays with `__cuda_array_interface__` alone: what is read of them, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import normal, poisoned, qkv
from cuda_arrays import Borrowed, CudaArray, interface_of
from programs import HERE
from wrong_calls import K, Q, V

import dlattn
from dlattn import UnsupportedError, _core, frameworks
from dlattn.frameworks.cuda_array import Numba

no_gpu = pytest.mark.skipif(bool(dlattn.info().devices), reason="the fake memory would be used")


def cuda_arrays(*arrays: np.ndarray, **changes: Any) -> list[CudaArray]:
    return [CudaArray(x, **changes) for x in arrays]


# Accepted interfaces


@no_gpu
@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [
        ("<f2", "float16"),
        ("<f4", "float32"),
        ("<f8", "float64"),
        ("<i4", "int32"),
        ("|b1", "bool"),
        ("|u1", "uint8"),
        ("=i8", "int64"),
        ("<c8", "complex64"),
    ],
)
def test_what_the_interface_says(typestr, dtype):
    x = np.zeros((3, 4, 5), np.dtype(typestr))
    seen = _core.inspect(CudaArray(x, typestr=typestr))
    assert seen == {
        "pointer": x.ctypes.data,
        "dtype": dtype,
        "device": "cuda:0",
        "shape": (3, 4, 5),
        "strides": (20, 5, 1),
        "read_only": False,
        "exchange_api": False,
    }


@no_gpu
@pytest.mark.parametrize("version", [2, 3])
def test_strides_are_in_bytes(version):
    """The pointer of a slice backward is that of its first element."""
    x = normal(4, 6, 8)[::-2, 1:, ::1]
    stream = ... if version == 2 else 1
    seen = _core.inspect(CudaArray(x, version=version, stream=stream))
    assert seen["pointer"] == x.ctypes.data and seen["shape"] == (2, 5, 8)
    assert seen["strides"] == (-96, 8, 1)


@no_gpu
@pytest.mark.parametrize("data", [(0, False), (12345, True)])
def test_an_array_without_elements_has_no_memory(data):
    seen = _core.inspect(CudaArray(normal(2, 0, 8), data=data))
    assert seen["pointer"] == 0 and seen["shape"] == (2, 0, 8) and seen["strides"] == (0, 0, 0)


@no_gpu
def test_numbers_need_not_be_ints():
    x = normal(2, 8)
    described = {
        "shape": tuple(map(np.int64, x.shape)),
        "strides": list(map(np.int64, x.strides)),
        "data": [np.uint64(x.ctypes.data), np.bool_(True)],
        "version": np.int32(3),
        "stream": np.int64(2),
    }
    seen = _core.inspect(CudaArray(x, **described))
    assert seen["pointer"] == x.ctypes.data and seen["strides"] == (8, 1) and seen["read_only"]


@no_gpu
def test_an_attribute_of_the_object_counts_too():
    """A common way to hand a pointer on, though its type then says nothing."""
    x = normal(2, 8)
    owner = CudaArray(x)
    assert not hasattr(Borrowed, "__cuda_array_interface__")
    assert _core.inspect(Borrowed(owner))["pointer"] == x.ctypes.data


def test_dlpack_goes_first():
    class Both:
        __cuda_array_interface__ = "nonsense"

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.array.__dlpack__()

    np.testing.assert_array_equal(
        dlattn.attention(*map(Both, (Q, K, V))), dlattn.attention(Q, K, V)
    )


@no_gpu
def test_every_function_takes_them():
    """As far as it comes without a GPU, which is that the device is missing."""
    q, k, v = cuda_arrays(*qkv(dtype="float16"))
    out = CudaArray(poisoned(2, 5, 4, 8, dtype="float16"))
    mask, bias = CudaArray(normal(5, 7) > 0), CudaArray(normal(5, 7))
    slopes, sinks = CudaArray(normal(4)), CudaArray(normal(4))
    missing = "no CUDA|no device"
    options = {"out": out, "mask": mask, "bias": bias, "alibi_slopes": slopes, "sinks": sinks}
    for call in (dlattn.attention, dlattn.plan):
        with pytest.raises(dlattn.DeviceError, match=missing):
            call(q, k, v, **options)
    support = dlattn.supported(q, k, v, **options)
    assert not support and "CUDA" in str(support)
    assert [x.reads for x in (q, mask, bias, slopes, sinks, out)] == [3] * 6  # once a call

    offsets_q, offsets_k = (CudaArray(np.array([0, n, 2 * n], np.int32)) for n in (5, 7))
    packed = cuda_arrays(*(x.reshape(-1, *x.shape[2:]) for x in (Q, K, V)))
    packed_out = CudaArray(poisoned(10, 4, 8))
    with pytest.raises(dlattn.DeviceError, match=missing):
        dlattn.attention_varlen(*packed, offsets_q, offsets_k, 5, 7, out=packed_out)
    assert offsets_q.reads == offsets_k.reads == 1


@no_gpu
def test_any_stream_may_be_named():
    arrays = cuda_arrays(Q, K, V, stream=0x5000)
    out = CudaArray(poisoned(2, 5, 4, 8))
    for stream in (None, 0, 1, 2, 0x4000):
        assert "CUDA" in str(dlattn.supported(*arrays, out=out, stream=stream))
        with pytest.raises(dlattn.DeviceError, match="CUDA"):
            dlattn.attention(*arrays, out=out, stream=stream)


# Refused interfaces


def refused(error: type[Exception], *words: str, **changes: Any) -> None:
    """The same for each tensor of a call, and by its own name."""
    for name in ("q", "k"):
        arrays: dict[str, Any] = dict(zip("qkv", cuda_arrays(Q, K, V), strict=True))
        arrays[name] = CudaArray(arrays[name].array, **changes)
        if name == "k" and dlattn.info().devices:
            continue  # q's fake memory is refused first
        with pytest.raises((UnsupportedError, TypeError)) as caught:
            dlattn.attention(**arrays, out=CudaArray(poisoned(2, 5, 4, 8)))
        assert type(caught.value) is error
        for word in (f"{name}: ", "accepted: ", *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("version", [4, -1, "3", True, None, ..., 3.0])
def test_versions(version):
    told = None if version is ... else version
    refused(UnsupportedError, f"is of version {told!r}; accepted: 0 to 3", version=version)


@pytest.mark.parametrize("key", ["shape", "typestr", "data"])
def test_what_is_missing(key):
    refused(TypeError, f"has no {key!r}", "shape, typestr, data and version", **{key: ...})


@pytest.mark.parametrize(
    "typestr",
    ["<V2", "<f1", "|V1", "<f16", "<f3", ">f4", "f4", "<f", "<f-4", "|O8", "", None, 4, "<t4"],
)
def test_typestrs(typestr):
    """'<V2' and '<f1' are what ml_dtypes' arrays say of bfloat16 and float8."""
    words = (f"has the typestr {typestr!r}", "'<f2'", "bfloat16 and float8", "__dlpack__")
    refused(UnsupportedError, *words, typestr=typestr)


@pytest.mark.parametrize("shape", [None, 5, (2, -1), (2, 1.5), ("2",), (2**63,), (2, None)])
def test_shapes(shape):
    refused(TypeError, f"has the shape {shape!r}", "a tuple of ints >= 0", shape=shape)


@no_gpu
def test_impossible_shapes():
    words = f"its exporter gave the impossible shape ({2**40}, {2**40})"
    with pytest.raises(TypeError, match=words.replace("(", r"\(").replace(")", r"\)")):
        _core.inspect(CudaArray(Q, shape=(2**40, 2**40)))
    with pytest.raises(UnsupportedError, match="tensor has 9 dimensions; accepted: at most 8"):
        _core.inspect(CudaArray(Q, shape=(1,) * 9))


@pytest.mark.parametrize("strides", [5, "8", (8, 4, 4.5, 4), (8, 4, 2**63, 4)])
def test_strides(strides):
    refused(TypeError, f"has the strides {strides!r}", "4 ints, or None", strides=strides)


@pytest.mark.parametrize("strides", [(), (8, 4, 4), (8, 4, 4, 4, 4)])
def test_a_stride_for_each_dimension(strides):
    words = (f"has the strides {strides}", "for the shape (2, ", "4 ints, or None")
    refused(TypeError, *words, strides=strides)


def test_strides_between_elements():
    words = "the stride of dimension 1 is 130 bytes; accepted: multiples of the element's 4"
    refused(UnsupportedError, words, strides=(640, 130, 32, 4))


@pytest.mark.parametrize("data", [None, 5, (5,), (5, False, 0), (-1, False), (2**64, False),
                                  ("5", False), (None, False), (True, False)])  # fmt: skip
def test_data(data):
    refused(TypeError, f"has the data {data!r}", "a pair (pointer, read-only)", data=data)


@no_gpu
def test_a_null_pointer():
    refused(TypeError, "its exporter gave a null pointer", data=(0, False))


def test_a_mask():
    words = "has a mask, which attention would not see; accepted: an array without one, and the"
    refused(UnsupportedError, words, "mask=", mask=CudaArray(Q > 0))


@pytest.mark.parametrize("stream", [0, -1, True, "1", 1.0, 2**64])
def test_streams(stream):
    words = (f"has the stream {stream!r}", "None, 1 (the legacy default stream), 2 (the per-thread")
    refused(UnsupportedError, *words, stream=stream)


def test_long_values_are_cut_in_messages():
    with pytest.raises(TypeError) as caught:
        _core.inspect(CudaArray(Q, data=tuple(range(100))))
    assert "has the data (0, 1, 2, " in str(caught.value) and "...; accepted" in str(caught.value)


@pytest.mark.parametrize("interface", [None, 5, ("shape",)])
def test_what_is_no_interface(interface):
    class Odd:
        __cuda_array_interface__ = interface

    with pytest.raises(TypeError, match=r"q: its __cuda_array_interface__ is .*accepted: a dict"):
        dlattn.attention(Odd(), Odd(), Odd())


@pytest.mark.parametrize("error", [AttributeError, BufferError, RuntimeError, ValueError])
def test_an_interface_that_raises(error):
    class Odd:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise error("not today\nas the second line says")

    words = r"q: .*Odd cannot be taken in through __cuda_array_interface__ \(not today\); accepted"
    with pytest.raises(TypeError, match=words) as caught:
        dlattn.attention(Odd(), Odd(), Odd())
    assert isinstance(caught.value.__cause__, error)


def test_errors_of_the_library_itself_are_its_own():
    class Odd:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise KeyError("context")

    with pytest.raises(KeyError, match="context"):
        dlattn.attention(Odd(), Odd(), Odd())


def test_what_raises_anything_at_all_is_no_array():
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    with pytest.raises(
        TypeError, match=r"q is of type .*Odd; accepted: .*__cuda_array_interface__"
    ):
        dlattn.attention(Odd(), K, V)


@no_gpu
def test_an_object_that_has_lost_its_interface():
    tensor = Borrowed(CudaArray(Q))
    assert _core.inspect(tensor)["device"] == "cuda:0"
    del tensor.__cuda_array_interface__
    with pytest.raises(TypeError, match=r"tensor: .*Borrowed cannot be taken in through"):
        _core.inspect(tensor)


@no_gpu
def test_a_read_only_out():
    out = poisoned(2, 5, 4, 8)
    out.flags.writeable = False
    arrays = cuda_arrays(Q, K, V)
    with pytest.raises(UnsupportedError, match="out is read-only; accepted: a tensor that can be"):
        dlattn.attention(*arrays, out=CudaArray(out))
    Q_, K_, V_ = cuda_arrays(Q, K, V, data=(64, True))  # of inputs, who cares
    assert "read-only" not in str(dlattn.supported(Q_, K_, V_, out=CudaArray(poisoned(2, 5, 4, 8))))


@no_gpu
def test_who_is_not_allocated_for():
    q, k, v = cuda_arrays(Q, K, V)
    words = (
        r"out is None, and dlattn cannot allocate for cuda_arrays\.CudaArray; accepted: a tensor "
        r"to write to \(and return_lse=False\), or arrays of torch, CuPy, JAX or Numba"
    )
    with pytest.raises(UnsupportedError, match=words):
        dlattn.attention(q, k, v)
    with pytest.raises(UnsupportedError, match=words):
        dlattn.attention(q, k, v, out=CudaArray(poisoned(2, 5, 4, 8)), return_lse=True)
    lses = [CudaArray(normal(2, 4, 5)), CudaArray(normal(2, 4, 5))]
    with pytest.raises(UnsupportedError, match=words):
        dlattn.merge_states([q, q], lses)
    with pytest.raises(UnsupportedError, match=words):
        dlattn.quantize_kv(*cuda_arrays(K.astype(np.float16), V.astype(np.float16)))


@no_gpu
def test_they_do_not_mix_with_the_cpu():
    q, k, v = cuda_arrays(Q, K, V)
    with pytest.raises(UnsupportedError, match="k is on cuda:0; accepted: cpu, where q is"):
        dlattn.attention(Q, k, V)
    with pytest.raises(UnsupportedError, match="k is on cpu; accepted: cuda:0, where q is"):
        dlattn.attention(q, K, v)
    with pytest.raises(UnsupportedError, match="k is on cuda:0; accepted: cpu, where q is"):
        dlattn.attention(Q, CudaArray(K[:, :0]), V[:, :0])


@pytest.mark.gpu
def test_host_memory_is_refused():
    with pytest.raises(UnsupportedError, match=r"q: .*the pointer 0x.*no memory of a CUDA device"):
        dlattn.attention(*cuda_arrays(Q, K, V))


# Numba, whose arrays can be made


class FakeNumba:
    """The functions of numba.cuda that are called, and the array that it makes, in host memory."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gpus = {n: nullcontext() for n in range(2)}

    def external_stream(self, handle: int) -> Any:
        return SimpleNamespace(handle=handle)

    def device_array(self, shape: Any, dtype: str, *, stream: Any) -> Any:
        self.log.append((shape, dtype, stream))
        values = poisoned(*shape, dtype=dtype)
        if dtype == "float32":  # aligned as a GPU's allocations are
            memory = poisoned(values.size + 64)
            start = -memory.ctypes.data % 256 // 4
            values = memory[start : start + values.size].reshape(shape)
        return self.array(values, stream)

    def array(self, values: np.ndarray, stream: Any = 0) -> Any:
        return NumbaArray(values, stream)


class NumbaArray:
    __module__ = "numba.cuda.cudadrv.devicearray"

    def __init__(self, array: np.ndarray, stream: Any) -> None:
        self.array = array
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        handle = None if self.stream == 0 else self.stream.handle
        return interface_of(self.array, stream=handle)


@pytest.fixture
def numba(monkeypatch):
    fake = FakeNumba()
    monkeypatch.setitem(sys.modules, "numba.cuda", fake)  # type: ignore[arg-type]
    return fake


@no_gpu
def test_numba_makes_the_outputs(numba):
    """On the stream that writes them, which who reads them then finds in their interface."""
    own = SimpleNamespace(handle=0x7000)
    for stream, given, told in [
        (0, None, 0),
        (own, None, own),
        (0, 1, 0),
        (own, 0, 0),
        (0, 0x4000, SimpleNamespace(handle=0x4000)),
        (own, 2, SimpleNamespace(handle=2)),
    ]:
        numba.log.clear()
        arrays = [numba.array(x, stream) for x in (Q, K, V)]
        with pytest.raises(dlattn.DeviceError):
            dlattn.attention(*arrays, return_lse=True, stream=given)
        assert numba.log == [((2, 5, 4, 8), "float32", told), ((2, 4, 5), "float32", told)]


@no_gpu
def test_numba_for_the_other_functions(numba):
    q = numba.array(Q)
    lse = numba.array(normal(2, 4, 5))
    with pytest.raises(dlattn.DeviceError):
        dlattn.merge_states([q, q], [lse, lse])
    assert [shape for shape, _, _ in numba.log] == [(2, 5, 4, 8), (2, 4, 5)]
    with pytest.raises(dlattn.DeviceError):
        dlattn.quantize_kv(*(numba.array(x.astype(np.float16)) for x in (K, V)))
    assert numba.log[-1][1] == "float32" and len(numba.log) == 3


def test_other_objects_of_numba_are_no_tensors():
    kind = type("List", (), {"__module__": "numba.typed.typedlist"})
    with pytest.raises(TypeError, match=r"q is of type numba\.typed\.typedlist\.List; accepted"):
        dlattn.attention(kind(), K, V)


def test_numba_arrays_that_are_numpy_arrays_too_are_on_the_gpu():
    """Its mapped and managed ones."""
    kind = type("ManagedNDArray", (NumbaArray, np.ndarray), {"__module__": "numba.cuda"})
    assert isinstance(frameworks.find(kind, "q"), Numba)


def test_no_library_is_imported():
    code = (
        "import sys\n"
        "from cuda_arrays import CudaArray\n"
        "from arrays import qkv\n"
        "import dlattn\n"
        "dlattn.supported(*map(CudaArray, qkv()))\n"
        "assert not {'numba', 'torch', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE)

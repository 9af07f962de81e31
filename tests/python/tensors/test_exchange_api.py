"""DLPack's C exchange API, offered by a tensor type made for the purpose."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import pytest
from arrays import assert_attention, normal, poisoned, qkv
from capsules import DLTensor, Exporter, ManagedVersioned, kept, make_managed, new_capsule

import dlattn
from dlattn import _core

no_gpu = pytest.mark.skipif(bool(dlattn.info().devices), reason="it would be used")

SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
Pointer = ctypes.POINTER(ctypes.c_void_p)
Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(DLTensor), Pointer, ctypes.c_void_p, SetError
)
Export = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, Pointer)
Borrow = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(DLTensor))
CurrentStream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, Pointer)


class Api(ctypes.Structure):
    pass


Api._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(Api)),
    ("allocate", Allocate),
    ("export_managed", Export),
    ("import_managed", Export),
    ("export_borrowed", Borrow),
    ("current_stream", CurrentStream),
)


def make_type(
    *, version: tuple[int, int] = (1, 3), borrow: bool = True, older: Any = None
) -> type[Exporter]:
    """A tensor type with an exchange API that logs what it is asked for."""

    class Tensor(Exporter):
        log: ClassVar[list[Any]]
        alive = 0  # exports and allocations not yet deleted
        fail = ""

    def released() -> None:
        Tensor.alive -= 1

    def of(address: int) -> Any:
        return ctypes.cast(address, ctypes.py_object).value

    def allocate(prototype: Any, out: Any, context: Any, set_error: Any) -> int:
        want = prototype.contents
        shape = [want.shape[i] for i in range(want.ndim)]
        Tensor.log.append(("allocate", (want.device_type, want.device_id), tuple(shape)))
        if Tensor.fail:
            set_error(context, b"MemoryError", Tensor.fail.encode())
            return -1
        array = poisoned(*shape, dtype=f"float{want.bits}")
        exporter = Tensor(array, device=(want.device_type, want.device_id))
        Tensor.alive += 1
        out[0] = make_managed(
            **exporter.arguments, version=(1, 1), on_delete=released, keep=exporter
        )
        return 0

    def export_managed(address: int, out: Any) -> int:
        Tensor.log.append("export")
        Tensor.alive += 1
        out[0] = make_managed(**of(address).arguments, version=(1, 1), on_delete=released)
        return 0

    def import_managed(address: int, out: Any) -> int:
        exporter = kept(address)
        ManagedVersioned.from_address(address).deleter(address)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(exporter))
        out[0] = id(exporter)
        return 0

    def export_borrowed(address: int, out: Any) -> int:
        managed = ManagedVersioned.from_address(
            make_managed(**of(address).arguments, version=(1, 1))
        )
        ctypes.memmove(out, ctypes.byref(managed.tensor), ctypes.sizeof(DLTensor))
        return 0

    def current_stream(device_type: int, device_id: int, out: Any) -> int:
        Tensor.log.append(("stream", (device_type, device_id)))
        out[0] = 0x5000
        return 0

    functions = (
        Allocate(allocate),
        Export(export_managed),
        Export(import_managed),
        Borrow(export_borrowed) if borrow else Borrow(),
        CurrentStream(current_stream),
    )
    previous = ctypes.pointer(older) if older is not None else None
    Tensor.log = []
    Tensor.api = Api(*version, previous, *functions)
    Tensor.functions = functions
    address = ctypes.addressof(Tensor.api)
    Tensor.__dlpack_c_exchange_api__ = new_capsule(address, b"dlpack_exchange_api", None)
    return Tensor


@pytest.mark.parametrize("borrow", [True, False])
def test_a_call_runs_no_dlpack_method(borrow):
    kind = make_type(borrow=borrow)
    arrays = qkv(head_dim_v=6)
    tensors = [kind(x) for x in arrays]
    seen = _core.inspect(tensors[0])
    assert seen["exchange_api"] and seen["pointer"] == arrays[0].ctypes.data
    out, lse = dlattn.attention(*tensors, causal=True, return_lse=True)
    assert type(out) is kind and type(lse) is kind
    assert_attention((out.array, lse.array), *arrays, causal=True)
    assert all(x.streams == [] for x in [*tensors, out, lse])
    assert ("allocate", (1, 0), (2, 5, 4, 6)) in kind.log
    assert ("allocate", (1, 0), (2, 4, 5)) in kind.log
    assert not any("stream" in entry for entry in kind.log)
    assert kind.alive == 0


def test_out_is_exported_with_its_flags():
    kind = make_type()
    arrays = qkv()
    out = kind(poisoned(2, 5, 4, 8))
    assert dlattn.attention(*arrays, out=out) is out
    assert kind.log == ["export"] and kind.alive == 0
    assert_attention(out.array, *arrays)
    with pytest.raises(dlattn.UnsupportedError, match="out is read-only"):
        dlattn.attention(*arrays, out=kind(poisoned(2, 5, 4, 8), read_only=True))
    assert kind.alive == 0


def test_an_older_table_behind_a_newer_one_is_found():
    kind = make_type(version=(2, 0), older=make_type().api)
    assert _core.inspect(kind(normal(2, 3)))["exchange_api"]


def test_a_newer_table_alone_is_left_alone():
    tensor = make_type(version=(2, 0))(normal(2, 3))
    assert not _core.inspect(tensor)["exchange_api"]
    assert tensor.streams == [None]


def test_an_attribute_that_is_no_table_is_left_alone():
    kind = type("Tensor", (Exporter,), {"__dlpack_c_exchange_api__": "nonsense"})
    assert not _core.inspect(kind(normal(2, 3)))["exchange_api"]


def test_a_failed_allocation():
    kind = make_type()
    tensors = [kind(x) for x in qkv()]
    kind.fail = "no room"
    with pytest.raises(RuntimeError, match="allocating out failed: MemoryError: no room"):
        dlattn.attention(*tensors)
    assert kind.alive == 0


def test_merge_states():
    kind = make_type()
    outs, lses = [normal(2, 5, 4, 8, seed=n) for n in range(2)], [normal(2, 4, 5) for _ in range(2)]
    out, lse = dlattn.merge_states([kind(x) for x in outs], [kind(x) for x in lses])
    want = dlattn.merge_states(outs, lses)
    np.testing.assert_array_equal(out.array, want[0])
    np.testing.assert_array_equal(lse.array, want[1])


@no_gpu
def test_the_current_stream_of_the_right_device():
    kind = make_type()
    tensors = [kind(x, device=(2, 3)) for x in qkv()]
    with pytest.raises(dlattn.DeviceError):
        dlattn.attention(*tensors, return_lse=True)
    assert kind.log == [
        ("stream", (2, 3)),
        ("allocate", (2, 3), (2, 5, 4, 8)),
        ("allocate", (2, 3), (2, 4, 5)),
    ]
    assert kind.alive == 0  # all allocations are given back


@no_gpu
def test_a_stream_given_is_the_one_used():
    kind = make_type()
    tensors = [kind(x, device=(2, 0)) for x in qkv()]
    with pytest.raises(dlattn.DeviceError):
        dlattn.attention(*tensors, stream=7)
    assert kind.log == [("allocate", (2, 0), (2, 5, 4, 8))]


@no_gpu
def test_tensors_of_other_frameworks_are_ordered_on_the_stream():
    """An exchange API orders nothing, so it serves only the framework whose stream is used."""
    mine, other = make_type(), make_type()
    q, k, v = qkv()
    tensors = [mine(q, device=(2, 0)), other(k, device=(2, 0)), Exporter(v, device=(2, 0))]
    with pytest.raises(dlattn.DeviceError):
        dlattn.attention(*tensors)
    assert [x.streams for x in tensors] == [[], [0x5000], [0x5000]]
    assert other.log == []

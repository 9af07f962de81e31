"""Wrong calls: each raises the right exception, naming argument, value and what is accepted."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import pytest
from arrays import normal, poisoned, qkv
from capsules import Exporter, device_tensor
from wrong_calls import K, Q, V, Wrong, check

import dlattn
from dlattn import UnsupportedError

HALF = qkv(dtype="float16")


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def used_capsule() -> Exporter:
    exporter = Exporter(Q)
    exporter.capsule = exporter.__dlpack__()
    dlattn._core.inspect(exporter)
    return exporter


def misaligned() -> np.ndarray:
    record = np.zeros((2, 5, 4, 8), dtype=np.dtype([("pad", "i1"), ("x", "<f4")], align=False))
    return record["x"]


def odd_address() -> np.ndarray:
    memory = bytearray(Q.nbytes + 1)
    return np.frombuffer(memory, dtype=Q.dtype, offset=1).reshape(Q.shape)


class Unnamed(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise AttributeError("none")


class Anonymous(Exporter, metaclass=Unnamed):
    """A type that does not tell its module."""


class Nowhere:
    __module__ = 3  # type: ignore[assignment]
    __qualname__ = "Now\udc80here"


class Claiming(Exporter):
    """__dlpack_device__ need not return a device."""

    def __init__(self, claim: Any) -> None:
        super().__init__(Q)
        self.claim = claim

    def __dlpack_device__(self) -> Any:
        return self.claim


def shifted_out(elements: int) -> dict[str, np.ndarray]:
    """q, and an out that begins so many elements after it in the same memory."""
    memory = normal(Q.size + abs(elements))
    start_q, start_out = max(0, -elements), max(0, elements)
    return {
        "q": memory[start_q : start_q + Q.size].reshape(Q.shape),
        "out": memory[start_out : start_out + Q.size].reshape(Q.shape),
    }


def out_about(name: str, shape: tuple[int, ...], start: int) -> dict[str, np.ndarray]:
    """An input that begins so many elements after out begins, in the same memory."""
    memory = normal(Q.size + math.prod(shape))
    return {
        "out": memory[: Q.size].reshape(Q.shape),
        name: memory[start : start + math.prod(shape)].reshape(shape),
    }


WRONG = {
    # no tensors
    "q a list": Wrong({"q": [[1.0]]}, ("q is of type list", "torch", "NumPy"), TypeError),
    "k None": Wrong({"k": None}, ("k is of type NoneType", "accepted"), TypeError),
    "v a float": Wrong({"v": 1.0}, ("v is of type float", "accepted"), TypeError),
    "q a NumPy scalar": Wrong(
        {"q": np.float32(1)}, ("q is of type numpy.float32", "accepted"), TypeError
    ),
    "q a type": Wrong({"q": np.ndarray}, ("q is of type type", "accepted"), TypeError),
    "mask a string": Wrong({"mask": "causal"}, ("mask is of type str", "accepted"), TypeError),
    "q a masked array": Wrong(
        {"q": np.ma.masked_array(Q)}, ("q is a masked array", "accepted", "mask="), TypeError
    ),
    "q a bare capsule": Wrong(
        {"q": lambda: Exporter(Q).__dlpack__()},
        ("q is of type PyCapsule", "__dlpack__", "accepted"),
        TypeError,
    ),
    "q a used capsule": Wrong({"q": used_capsule}, ("q", "used before", "accepted")),
    "__dlpack__ returns no capsule": Wrong(
        {"k": lambda: Exporter(K, capsule="capsule")},
        ("k", "'capsule'", "accepted", "dltensor"),
        TypeError,
    ),
    "__dlpack__ raises": Wrong(
        {"k": lambda: Exporter(K, error=BufferError("no memory to show"))},
        ("k", "no memory to show", "accepted: a dense tensor"),
        TypeError,
    ),
    "an unknown DLPack version": Wrong(
        {"q": lambda: Exporter(Q, version=(2, 0))}, ("q", "DLPack 2.0", "accepted: 1.x"), TypeError
    ),
    # dtypes
    "q int32": Wrong(
        {"q": np.ones((2, 5, 4, 8), np.int32)}, ("q: dtype is int32", "accepted", "bfloat16")
    ),
    "q complex64": Wrong({"q": Q.astype(np.complex64)}, ("q: dtype is complex64", "accepted")),
    "q of long complex numbers": Wrong(
        {"q": Q.astype(np.clongdouble)},
        (f"q: dtype is {np.dtype(np.clongdouble).name}; accepted", "float8_e4m3fn"),
    ),
    "q bool": Wrong({"q": Q > 0}, ("q: dtype is bool", "accepted", "float16")),
    "q of objects": Wrong({"q": Q.astype(object)}, ("q: dtype is object", "accepted")),
    "q of structures": Wrong(
        {"q": np.zeros((2, 5, 4, 8), [("a", "f4")])}, ("q: dtype is [('a'", "accepted: bool, bfl")
    ),
    "q big-endian": Wrong({"q": Q.astype(">f4")}, ("q: dtype is >f4", "accepted", "byte order")),
    "q longdouble": Wrong({"q": Q.astype(np.longdouble)}, ("q: dtype is float128", "accepted")),
    "q float8_e5m2": Wrong(
        {"q": lambda: Q.astype(pytest.importorskip("ml_dtypes").float8_e5m2)},
        ("q: dtype is float8_e5m2; accepted", "float8_e4m3fn"),
    ),
    "q int4": Wrong(
        {"q": lambda: Q.astype(pytest.importorskip("ml_dtypes").int4)},
        ("q: dtype is int4; accepted", "float8_e4m3fn", "up to 64 bits"),
    ),
    "k float32 with q float8": Wrong(
        {"q": lambda: Q.astype(pytest.importorskip("ml_dtypes").float8_e4m3fn)},
        ("k: dtype is float32; accepted: float8_e4m3fn, that of q",),
    ),
    "q_descale with float32": Wrong(
        {"q_descale": np.ones((2, 2), np.float32)},
        ("q_descale is given with q of float32; accepted: none",),
    ),
    "out_dtype of another type": Wrong(
        {"out_dtype": np.float32},
        ('out_dtype is of type type; accepted: "bfloat16"',),
        TypeError,
    ),
    "out_dtype unknown": Wrong(
        {"out_dtype": "float8_e4m3fn"}, ("out_dtype is 'float8_e4m3fn'; accepted: \"bfloat16\"",)
    ),
    "out_dtype not that of q": Wrong(
        {"out_dtype": "bfloat16"},
        ('out_dtype is "bfloat16"; accepted: None or "float32", the dtype of q',),
    ),
    "k float64": Wrong(
        {"k": K.astype(np.float64)}, ("k: dtype is float64", "accepted: float32, that of q")
    ),
    "v float16": Wrong({"v": HALF[2]}, ("v: dtype is float16", "accepted: float32, that of q")),
    "bias float64": Wrong(
        {"bias": np.ones((5, 7))}, ("bias: dtype is float64", "accepted: float32")
    ),
    "bias float64 to half": Wrong(
        {"q": HALF[0], "k": HALF[1], "v": HALF[2], "bias": np.ones((5, 7))},
        ("bias: dtype is float64", "accepted: float16 (that of q) or float32"),
    ),
    "bias int": Wrong(
        {"bias": np.ones((5, 7), np.int64)}, ("bias: dtype is int64", "accepted", "float32")
    ),
    "mask float": Wrong({"mask": normal(5, 7)}, ("mask: dtype is float32", "accepted: bool")),
    "mask uint8": Wrong(
        {"mask": np.ones((5, 7), np.uint8)}, ("mask: dtype is uint8", "accepted: bool")
    ),
    "mask of bits": Wrong(
        {"mask": lambda: Exporter(np.ones((5, 7), bool), dtype=(6, 1, 1))},
        ("mask: dtype is bool of 1 bits; accepted: bool",),
    ),
    "mask of pairs": Wrong(
        {"mask": lambda: Exporter(np.ones((5, 7), bool), dtype=(6, 8, 2))},
        ("mask: dtype is bool x 2; accepted: bool",),
    ),
    "float8 of 16 bits": Wrong(
        {"q": lambda: Exporter(Q, dtype=(10, 16, 1))},
        ("q: dtype is float8_e4m3fn of 16 bits", "accepted"),
    ),
    "type that nobody knows": Wrong(
        {"q": lambda: Exporter(Q, dtype=(99, 32, 1))},
        ("q: dtype is DLPack type code 99 of 32 bits", "accepted"),
    ),
    "alibi_slopes float64": Wrong(
        {"alibi_slopes": np.ones(4)}, ("alibi_slopes: dtype is float64", "accepted: float32")
    ),
    "sinks float16": Wrong(
        {"sinks": np.ones(4, np.float16)}, ("sinks: dtype is float16", "accepted: float32")
    ),
    # shapes
    "q of rank 3": Wrong(
        {"q": Q[0]}, ("q has 3 dimensions", "(5, 4, 8)", "accepted: 4", "num_heads")
    ),
    "k of rank 5": Wrong({"k": K[None]}, ("k has 5 dimensions", "accepted: 4")),
    "v of rank 0": Wrong({"v": np.array(1, np.float32)}, ("v has 0 dimensions", "accepted: 4")),
    "k of rank 12": Wrong({"k": np.zeros((1,) * 12, np.float32)}, ("k has 12 dimensions", "accep")),
    "batch of k": Wrong({"k": K[:1]}, ("k: batch is 1", "(1, 7, 2, 8)", "accepted: 2")),
    "batch of v": Wrong({"v": V[:1]}, ("v: batch is 1", "accepted: 2")),
    "seqlen of v": Wrong({"v": V[:, :6]}, ("v: seqlen is 6", "accepted: 7, that of k")),
    "head_dim of k": Wrong({"k": K[..., :7]}, ("k: head_dim is 7", "accepted: 8, that of q")),
    "num_heads of v": Wrong({"v": V[:, :, :1]}, ("v: num_heads is 1", "accepted: 2, that of k")),
    "num_heads that do not divide": Wrong(
        {"k": normal(2, 7, 3, 8), "v": normal(2, 7, 3, 8)},
        ("k: num_heads_kv = 3", "num_heads = 4"),
    ),
    "no heads": Wrong({"q": Q[:, :, :0]}, ("num_heads is 0", "accepted: at least 1")),
    "no heads of k": Wrong(
        {"k": K[:, :, :0], "v": V[:, :, :0]}, ("num_heads_kv is 0", "accepted: at least 1")
    ),
    "head_dim 0": Wrong(
        {"q": Q[..., :0], "k": K[..., :0]}, ("head_dim is 0", "accepted: at least 1")
    ),
    "head_dim of v 0": Wrong({"v": V[..., :0]}, ("head_dim of v is 0", "accepted: at least 1")),
    "bias that does not broadcast": Wrong(
        {"bias": normal(5, 6)}, ("bias: shape is (5, 6)", "accepted", "(2, 4, 5, 7)")
    ),
    "bias of rank 5": Wrong(
        {"bias": normal(1, 2, 4, 5, 7)}, ("bias: shape is (1, 2, 4, 5, 7)", "accepted")
    ),
    "mask that does not broadcast": Wrong(
        {"mask": np.ones((3, 1, 1, 7), bool)}, ("mask: shape is (3, 1, 1, 7)", "(2, 4, 5, 7)")
    ),
    "alibi_slopes of the wrong size": Wrong(
        {"alibi_slopes": normal(2)}, ("alibi_slopes: shape is (2,)", "accepted", "(4,)", "(2, 4)")
    ),
    "sinks of the wrong size": Wrong(
        {"sinks": normal(5)}, ("sinks: shape is (5,)", "accepted: (4,)")
    ),
    "impossible shape": Wrong(
        {"q": lambda: Exporter(Q, shape=(2, -5, 4, 8))}, ("q", "(2, -5, 4, 8); accepted"), TypeError
    ),
    "shape beyond 64 bits": Wrong(
        {"q": lambda: Exporter(Q, shape=(2**40, 2**40, 4, 8))}, ("q", "impossible shape"), TypeError
    ),
    "null pointer": Wrong({"q": lambda: Exporter(Q, pointer=0)}, ("q", "null pointer"), TypeError),
    # strides
    "last dimension of q strided": Wrong(
        {"q": normal(2, 5, 4, 16)[..., ::2]},
        ("q: the stride of the last dimension is 2", "accepted: 1"),
    ),
    "last dimension of k reversed": Wrong(
        {"k": K[..., ::-1]}, ("k: the stride of the last dimension is -1", "accepted: 1")
    ),
    "v transposed": Wrong(
        {"v": np.asfortranarray(V)}, ("v: the stride of the last dimension", "accepted: 1")
    ),
    "sequence of q reversed": Wrong(
        {"q": Q[:, ::-1]}, ("q: the stride of dimension seqlen is -32", "negative")
    ),
    "heads of k reversed": Wrong(
        {"k": K[:, :, ::-1]}, ("k: the stride of dimension num_heads is -8", "negative")
    ),
    "mask reversed": Wrong(
        {"mask": np.ones((5, 7), bool)[::-1]}, ("mask: the stride of", "negative")
    ),
    "out upside down": Wrong(
        {"out": np.empty((2, 5, 4, 8), np.float32)[:, ::-1]},
        ("out: the stride of dimension seqlen is -32", "negative"),
    ),
    "strides within an element": Wrong(
        {"q": misaligned}, ("q: the stride of dimension", "bytes", "accepted: multiples")
    ),
    "an odd address": Wrong(
        {"q": odd_address}, ("q: its address is", "past a multiple of 4", "accepted: multiples")
    ),
    # devices
    "k on a CUDA device": Wrong(
        {"k": lambda: device_tensor(2, 1, K)}, ("k is on cuda:1", "accepted: cpu, where q is")
    ),
    "mask on a CUDA device": Wrong(
        {"mask": lambda: device_tensor(2, 0, np.ones((5, 7), bool))},
        ("mask is on cuda:0", "accepted: cpu"),
    ),
    "q on a Metal device": Wrong(
        {"q": lambda: device_tensor(8, 0, Q)}, ("q is on a device of type 8", "Metal", "CUDA")
    ),
    "q on a device of a type to come": Wrong(
        {"q": lambda: device_tensor(99, 0, Q)}, ("q is on a device of type 99", "accepted")
    ),
    **{
        f"__dlpack_device__ returns {claim!r}": Wrong(
            {"q": Claiming(claim)},
            ("q: its __dlpack_device__ returned", repr(claim), "accepted: a pair"),
            TypeError,
        )
        for claim in (
            None,
            1,
            (),
            (1,),
            (1, 0, 0),
            "10",
            ("1", "0"),
            (2, None),
            (1, -1),
            (2**40, 0),
            (1, 2**31),
            {1: 0, 2: 0},
        )
    },
    "q on a device other than it says": Wrong(
        {"q": lambda: Exporter(Q, capsule_device=(2, 0))},
        ("q is on cuda:0; accepted: cpu, as its own __dlpack_device__ says",),
    ),
    "q of a type without a module": Wrong(
        {"q": lambda: Anonymous(Q, error=BufferError("none"))},
        ("q: Anonymous cannot be taken in", "accepted"),
        TypeError,
    ),
    "q of a type with a wrong module": Wrong(
        {"q": Nowhere()}, ("q is of type Now", "here; accepted"), TypeError
    ),
    "layout of such a type": Wrong(
        {"layout": Nowhere()}, ("layout is of type Now\\udc80here", "accepted"), TypeError
    ),
    # out
    "out read-only": Wrong(
        {"out": lambda: read_only(np.zeros((2, 5, 4, 8), np.float32))},
        ("out is read-only", "accepted"),
    ),
    "out read-only by DLPack": Wrong(
        {"out": lambda: Exporter(np.zeros((2, 5, 4, 8), np.float32), read_only=True)},
        ("out is read-only", "accepted"),
    ),
    "out of which DLPack gives a copy": Wrong(
        {"out": lambda: Exporter(np.zeros((2, 5, 4, 8), np.float32), copied=True)},
        ("out: its exporter gave a copy", "accepted: a tensor whose own memory is exported"),
    ),
    "out of the wrong shape": Wrong(
        {"out": poisoned(2, 5, 4, 7)}, ("out: shape is (2, 5, 4, 7)", "accepted: (2, 5, 4, 8)")
    ),
    "out of the wrong rank": Wrong({"out": poisoned(5, 4, 8)}, ("out: shape is (5, 4, 8)", "acce")),
    "out of the wrong dtype": Wrong(
        {"out": np.zeros((2, 5, 4, 8))}, ("out: dtype is float64", "accepted: float32")
    ),
    "out with a strided last dimension": Wrong(
        {"out": poisoned(2, 5, 4, 16)[..., ::2]},
        ("out: the stride of the last dimension is 2", "accepted: 1"),
    ),
    "out that overlaps itself": Wrong(
        {"out": np.lib.stride_tricks.as_strided(poisoned(8), (2, 5, 4, 8), (0, 0, 0, 4))},
        ("out: a stride of 0", "at least 8"),
    ),
    "out that is q": Wrong({"out": Q}, ("out shares memory with q", "accepted: memory of its own")),
    "out that begins within q": Wrong(
        shifted_out(1), ("out shares memory with q", "accepted: memory of its own")
    ),
    "out that ends within q": Wrong(
        shifted_out(-1), ("out shares memory with q", "accepted: memory of its own")
    ),
    "out within bias": Wrong(
        out_about("bias", (2, 4, 5, 7), 319), ("out shares memory with bias", "accepted")
    ),
    "out within sinks": Wrong(
        out_about("sinks", (4,), 90), ("out shares memory with sinks", "accepted")
    ),
    "out no tensor": Wrong({"out": True}, ("out is of type bool", "accepted"), TypeError),
    # options
    "layout unknown": Wrong({"layout": "sbhd"}, ("layout is 'sbhd'", '"bshd" or "bhsd"')),
    "layout no text": Wrong({"layout": 3}, ("layout is of type int", '"bshd"'), TypeError),
    "kernel unknown": Wrong({"kernel": "flash"}, ("kernel is 'flash'", '"auto"', '"wmma_smem"')),
    "kernel long and not ASCII": Wrong(
        {"kernel": "x" + "é" * 200}, ("kernel is 'xé", "é...", '"auto"')
    ),
    "kernel with a lone surrogate": Wrong(
        {"kernel": "wmma:\ud800"}, (r"kernel is 'wmma:\ud800'", "accepted", "wmma_smem")
    ),
    "kernel with a null": Wrong(
        {"kernel": "wmma:narrow\0"}, (r"kernel is 'wmma:narrow\x00'", "accepted", "wmma_smem")
    ),
    "layout with a lone surrogate": Wrong(
        {"layout": "bs\udcff"}, (r"layout is 'bs\udcff'", '"bshd"')
    ),
    "causal with a lone surrogate": Wrong(
        {"causal": "\ud83d"}, (r"causal is '\ud83d'", '"top_left"')
    ),
    "kernel no text": Wrong({"kernel": None}, ("kernel is of type NoneType", '"cpu"'), TypeError),
    "kernel without variants": Wrong({"kernel": "cpu:wide"}, ("cpu: variant is wide", "none")),
    "variant of no kernel": Wrong(
        {"kernel": "flash:wide"}, ("kernel is 'flash:wide'", "wmma:narrow")
    ),
    "kernel of the GPU": Wrong({"kernel": "wmma_smem"}, ("wmma_smem", "CPU")),
    "causal unknown": Wrong({"causal": "upper"}, ("causal is 'upper'", '"top_left"', "True")),
    "causal an int": Wrong({"causal": 1}, ("causal is of type int", '"bottom_right"'), TypeError),
    "scale NaN": Wrong({"softmax_scale": math.nan}, ("softmax_scale is nan", "1.18e-38 to 8.5e37")),
    "scale infinite": Wrong(
        {"softmax_scale": math.inf}, ("softmax_scale is inf", "1.18e-38 to 8.5e37")
    ),
    "scale negative": Wrong({"softmax_scale": -0.5}, ("softmax_scale is -0.5", "1.18e-38")),
    "scale zero": Wrong({"softmax_scale": 0.0}, ("softmax_scale is 0", "1.18e-38")),
    "scale that is 0 in fp32": Wrong({"softmax_scale": 1e-46}, ("softmax_scale is 1e-46", "1.18e")),
    "scale beyond fp32": Wrong({"softmax_scale": 2.4e38}, ("softmax_scale is 2.4e+38", "8.5e37")),
    "scale beyond floats": Wrong({"softmax_scale": 10**400}, ("softmax_scale is 1000", "finite")),
    "scale text": Wrong(
        {"softmax_scale": "1"}, ("softmax_scale is of type str", "accepted: a float"), TypeError
    ),
    "scale a bool": Wrong({"softmax_scale": True}, ("softmax_scale is of type bool",), TypeError),
    "scale an array": Wrong(
        {"softmax_scale": np.ones(1)}, ("softmax_scale is of type numpy.ndarray",), TypeError
    ),
    "softcap negative": Wrong(
        {"softcap": -1.0}, ("softcap is -1", "accepted: 7.9e-31 to 1.27e30", "or 0")
    ),
    "softcap NaN": Wrong({"softcap": math.nan}, ("softcap is nan", "7.9e-31 to 1.27e30")),
    "softcap tiny": Wrong({"softcap": 7.8e-31}, ("softcap is 7.8e-31", "accepted: 7.9e-31")),
    "softcap huge": Wrong({"softcap": 1.3e30}, ("softcap is 1.3e+30", "to 1.27e30")),
    "softcap None": Wrong({"softcap": None}, ("softcap is of type NoneType", "float"), TypeError),
    "window an int": Wrong({"window": 4}, ("window is 4", "accepted: a pair"), TypeError),
    "window None": Wrong({"window": None}, ("window is None", "accepted: a pair"), TypeError),
    "window of three": Wrong({"window": (1, 2, 3)}, ("window is (1, 2, 3)", "a pair"), TypeError),
    "window of floats": Wrong(
        {"window": (1.0, None)}, ("window is (1.0, None)", "left", "float", "int >= 0"), TypeError
    ),
    "window of bools": Wrong(
        {"window": (None, True)}, ("window is (None, True)", "right", "bool", "int"), TypeError
    ),
    "window negative": Wrong(
        {"window": (-1, None)}, ("window is (-1, None)", "left", "int >= 0, or None")
    ),
    "return_lse an int": Wrong(
        {"return_lse": 1}, ("return_lse is of type int", "accepted: a bool"), TypeError
    ),
    "stream on the CPU": Wrong({"stream": 0}, ("stream is 0", "accepted: None", "CPU")),
    "unknown keyword": Wrong(
        {"dropout": 0.1}, ("unexpected keyword argument 'dropout'",), TypeError
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    check(WRONG[name], dlattn.attention)


@pytest.mark.parametrize("name", WRONG)
def test_supported_tells_the_same(name):
    wrong = WRONG[name]
    if wrong.error is TypeError:
        check(wrong, dlattn.supported)
        return
    support = wrong.call(dlattn.supported)
    assert not support
    for word in wrong.words:
        assert word in str(support)


@pytest.mark.parametrize("name", WRONG)
def test_plan_raises_the_same(name):
    check(WRONG[name], dlattn.plan)


def test_wrong_calls_write_nothing():
    out = poisoned(2, 5, 4, 8)
    for wrong in WRONG.values():
        if "out" not in wrong.changes:
            with pytest.raises((UnsupportedError, TypeError)):
                Wrong({**wrong.changes, "out": out}, ()).call(dlattn.attention)
    assert np.isnan(out).all()


def varlen(**changes: Any) -> Wrong:
    words = changes.pop("words")
    error = changes.pop("error", UnsupportedError)
    defaults = {
        "q": normal(10, 4, 8, seed=1),
        "k": normal(14, 2, 8, seed=2),
        "v": normal(14, 2, 8, seed=3),
        "cu_seqlens_q": np.array([0, 3, 10], np.int32),
        "cu_seqlens_k": np.array([0, 5, 14], np.int32),
        "max_seqlen_q": 7,
        "max_seqlen_k": 9,
    }
    return Wrong(changes, words, error, defaults)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


WRONG_VARLEN = {
    "q of rank 4": varlen(q=Q, words=("q has 4 dimensions", "accepted: 3", "total")),
    "cu_seqlens_q int64": varlen(
        cu_seqlens_q=np.array([0, 3, 10]), words=("cu_seqlens_q: dtype is int64", "int32")
    ),
    "cu_seqlens_q of rank 2": varlen(
        cu_seqlens_q=int32(0, 3, 10)[None], words=("cu_seqlens_q has 2 dim", "(batch + 1,)")
    ),
    "cu_seqlens_q empty": varlen(cu_seqlens_q=int32(), words=("cu_seqlens_q is empty", "accepted")),
    "cu_seqlens_k of another batch": varlen(
        cu_seqlens_k=int32(0, 14), words=("cu_seqlens_k: shape is (2,)", "accepted: (3,)")
    ),
    "cu_seqlens_k strided": varlen(
        cu_seqlens_k=int32(0, 0, 5, 0, 14)[::2], words=("cu_seqlens_k: the stride", "accepted: 1")
    ),
    "cu_seqlens_q None": varlen(
        cu_seqlens_q=None, words=("cu_seqlens_q is of type NoneType",), error=TypeError
    ),
    "cu_seqlens_q from below 0": varlen(
        cu_seqlens_q=int32(-1, 3, 10), words=("cu_seqlens_q[0] is -1", "accepted: 0 or more")
    ),
    "cu_seqlens_q too long for max_seqlen_q": varlen(
        cu_seqlens_q=int32(0, 11, 10), words=("cu_seqlens_q: sequence 0 has 11", "max_seqlen_q = 7")
    ),
    "cu_seqlens_k descending": varlen(
        cu_seqlens_k=int32(0, 5, 3),
        words=("cu_seqlens_k[2] is 3, less than cu_seqlens_k[1] = 5", "do not decrease"),
    ),
    "cu_seqlens_q beyond total": varlen(
        cu_seqlens_q=int32(1, 4, 11), words=("cu_seqlens_q[2] is 11", "up to the 10 tokens")
    ),
    "cu_seqlens_k beyond total": varlen(
        cu_seqlens_k=int32(0, 6, 15), words=("cu_seqlens_k[2] is 15", "up to the 14 tokens")
    ),
    "cu_seqlens of no sequence": varlen(
        cu_seqlens_q=int32(0),
        cu_seqlens_k=int32(0),
        words=("batch_size is 0", "cu_seqlens_q of one offset", "q has 10 tokens", "accepted"),
    ),
    "max_seqlen_q too small": varlen(
        max_seqlen_q=6, words=("cu_seqlens_q: sequence 1 has 7 tokens", "max_seqlen_q = 6")
    ),
    "max_seqlen_k negative": varlen(
        max_seqlen_k=-1, words=("max_seqlen_k is -1", "accepted: an int from 0")
    ),
    "max_seqlen_q a float": varlen(
        max_seqlen_q=7.0, words=("max_seqlen_q is of type float", "int >= 0"), error=TypeError
    ),
    "max_seqlen_q beyond 32 bits": varlen(
        max_seqlen_q=2**40, words=("max_seqlen_q is 1099511627776", "accepted")
    ),
    "seqused_k too large": varlen(
        seqused_k=int32(6, 1), words=("seqused_k[0] is 6", "accepted: 0 to 5")
    ),
    "seqused_k negative": varlen(seqused_k=int32(1, -1), words=("seqused_k[1] is -1", "0 to 9")),
    "seqused_k of another batch": varlen(
        seqused_k=int32(1), words=("seqused_k: shape is (1,)", "accepted: (2,)")
    ),
    "v of other tokens": varlen(v=normal(13, 2, 8), words=("v: the number of tokens is 13", "14")),
}


@pytest.mark.parametrize("name", WRONG_VARLEN)
def test_wrong_varlen_call(name):
    check(WRONG_VARLEN[name], dlattn.attention_varlen)


def test_wrong_lengths_write_nothing():
    out = poisoned(10, 4, 8)
    for wrong in WRONG_VARLEN.values():
        with pytest.raises((UnsupportedError, TypeError)):
            Wrong({**wrong.changes, "out": out}, (), wrong.error, wrong.defaults).call(
                dlattn.attention_varlen
            )
    assert np.isnan(out).all()


OUTS = [normal(2, 5, 4, 8, seed=n) for n in range(2)]
LSES = [normal(2, 4, 5, seed=n) for n in range(2)]
WRONG_MERGES = {
    "no parts": ([], [], ("outs is empty", "accepted: 1 to 32")),
    "a stack of none": (np.stack(OUTS)[:0], np.stack(LSES)[:0], ("outs", "1 to 32")),
    "33 parts": (OUTS[:1] * 33, LSES[:1] * 33, ("outs holds 33", "1 to 32")),
    "a stack of 40": (
        np.stack(OUTS * 20),
        np.stack(LSES * 20),
        ("outs holds 33 parts or more", "32"),
    ),
    "fewer lses": (OUTS, LSES[:1], ("lses holds 1 parts", "accepted: 2")),
    "outs of rank 3": (OUTS[0], LSES[0], ("outs has 3 dimensions", "accepted: 4")),
    "outs of two shapes": (
        [OUTS[0], OUTS[1][:, :4]],
        LSES,
        ("outs: shape is (2, 4, 4, 8)", "(2, 5, 4, 8)"),
    ),
    "outs of two dtypes": (
        [OUTS[0], OUTS[1].astype(np.float16)],
        LSES,
        ("outs", "float16", "float32"),
    ),
    "outs of ints": ([OUTS[0].astype(np.int32)], LSES[:1], ("outs: dtype is int32", "accepted")),
    "outs strided": (
        [normal(2, 5, 4, 16)[..., ::2]],
        LSES[:1],
        ("outs: the stride", "accepted: 1"),
    ),
    "lses of the wrong shape": (
        OUTS,
        [x[:, :, :4] for x in LSES],
        ("lses: shape is (2, 4, 4)", "(2, 4, 5)"),
    ),
    "a stack whose parts no memory holds": (
        np.lib.stride_tricks.as_strided(np.stack(OUTS), strides=(2**60, 640, 128, 32, 4)),
        np.stack(LSES),
        (
            "outs: the stride of dimension 0, of size 2, is 288230376151711744",
            "accepted: strides by which the tensor spans up to 72057594037927936 elements",
        ),
    ),
    "lses float64": (OUTS, [x.astype(np.float64) for x in LSES], ("lses", "float64", "float32")),
    "lses no tensors": (OUTS, [1.0, 2.0], ("lses is of type float", "accepted"), TypeError),
    "outs a set": (set(), LSES, ("outs is of type set", "accepted"), TypeError),
}


@pytest.mark.parametrize("name", WRONG_MERGES)
def test_wrong_merge(name):
    outs, lses, words, *error_class = WRONG_MERGES[name]
    error = error_class[0] if error_class else UnsupportedError
    with pytest.raises((UnsupportedError, TypeError)) as caught:
        dlattn.merge_states(outs, lses)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_errors_are_of_python_kinds():
    assert issubclass(dlattn.UnsupportedError, ValueError)
    assert issubclass(dlattn.DeviceError, RuntimeError)
    assert repr(dlattn.UnsupportedError) == "<class 'dlattn.UnsupportedError'>"


def test_a_type_without_a_module_is_as_good_as_any():
    np.testing.assert_array_equal(dlattn.attention(Anonymous(Q), K, V), dlattn.attention(Q, K, V))


def test_a_number_that_fails_tells_its_own_error():
    class Real:
        def __float__(self) -> float:
            raise KeyError("mine")

    numbers.Real.register(Real)
    with pytest.raises(KeyError, match="mine"):
        dlattn.attention(Q, K, V, softcap=Real())


def test_the_cause_of_a_failed_export_is_kept():
    cause = BufferError("no memory to show")
    with pytest.raises(TypeError) as caught:
        dlattn.attention(Exporter(Q, error=cause), K, V)
    assert caught.value.__cause__ is cause


def test_other_exceptions_of_an_exporter_pass_through():
    with pytest.raises(KeyError, match="mine"):
        dlattn.attention(Exporter(Q, error=KeyError("mine")), K, V)

"""The handlers that XLA calls, by call frames made here: no JAX is needed, and no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, normal, qkv

import dlattn
from dlattn import UnsupportedError, _core

I32, I64, SIZE, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
CAPSULE_POINTER: Any = ctypes.pythonapi.PyCapsule_GetPointer
CAPSULE_POINTER.restype, CAPSULE_POINTER.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
Function = ctypes.CFUNCTYPE(POINTER, POINTER)
DTYPES = {"float32": 11, "float16": 10}
INVALID_ARGUMENT, INTERNAL = 3, 13


def struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    """One of XLA's: its size and extensions come first."""
    head = [("struct_size", SIZE), ("extensions", POINTER)]
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields.items()]})


Version = struct("Version", major=ctypes.c_int, minor=ctypes.c_int)
Buffer = struct("Buffer", dtype=I32, data=POINTER, rank=I64, dims=POINTER)
Items = struct("Items", size=I64, types=POINTER, items=POINTER)
Attributes = struct("Attributes", size=I64, types=POINTER, names=POINTER, values=POINTER)
ErrorArguments = struct("ErrorArguments", message=ctypes.c_char_p, code=I32)
StreamArguments = struct("StreamArguments", context=POINTER, stream=POINTER)
OrdinalArguments = struct("OrdinalArguments", context=POINTER, ordinal=I32)
Api = struct(
    "Api",
    version=Version,
    internal=POINTER,
    create_error=Function,
    others=POINTER * 3,
    get_stream=Function,
    more=POINTER * 12,
    get_ordinal=Function,
)
Frame = struct(
    "Frame",
    api=POINTER,
    context=POINTER,
    stage=I32,
    inputs=Items,
    results=Items,
    attributes=Attributes,
)


class Span(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_char_p), ("size", SIZE))


class Scalar(ctypes.Structure):
    _fields_ = (("dtype", I32), ("value", POINTER))


class Extension(ctypes.Structure):
    _fields_ = (("struct_size", SIZE), ("type", I32), ("next", POINTER), ("metadata", POINTER))


class Metadata(ctypes.Structure):
    _fields_ = (("struct_size", SIZE), ("version", Version), ("traits", ctypes.c_uint32))


class Caller:
    """Stands for XLA: calls a handler, and keeps what it answered."""

    def __init__(self, platform: str, handlers: Any = _core.xla_handlers) -> None:
        address = CAPSULE_POINTER(handlers()[platform], None)
        self.handler: Callable[..., Any] = Function(address)
        self.kept: list[Any] = []
        self.error: tuple[int, str] | None = None
        self.api_size = ctypes.sizeof(Api)
        self.asked: list[str] = []

    def keep(self, x: Any) -> int:
        self.kept.append(x)
        return ctypes.addressof(x)

    def pointers(self, addresses: list[int]) -> int:
        return self.keep((POINTER * max(1, len(addresses)))(*addresses))

    def types(self, values: list[int]) -> int:
        return self.keep((I32 * max(1, len(values)))(*values))

    def buffers(self, arrays: list[np.ndarray]) -> Any:
        made = []
        for x in arrays:
            self.kept.append(x)
            dims = self.keep((I64 * max(1, x.ndim))(*x.shape))
            buffer = Buffer(ctypes.sizeof(Buffer), None, DTYPES.get(str(x.dtype), 6))
            buffer.data, buffer.rank, buffer.dims = x.ctypes.data, x.ndim, dims
            made.append(self.keep(buffer))
        types = self.types([1] * len(made))
        return Items(ctypes.sizeof(Items), None, len(made), types, self.pointers(made))

    def attributes(self, values: dict[str, Any]) -> Any:
        types, names, items = [], [], []
        for name, value in sorted(values.items()):
            names.append(self.keep(Span(name.encode(), len(name))))
            if isinstance(value, str):
                types.append(4)
                items.append(self.keep(Span(value.encode(), len(value))))
                continue
            whole = isinstance(value, int)
            number = self.keep(I64(value) if whole else ctypes.c_double(value))
            types.append(3)
            items.append(self.keep(Scalar(5 if whole else 12, number)))
        size = ctypes.sizeof(Attributes)
        lists = self.types(types), self.pointers(names), self.pointers(items)
        return Attributes(size, None, len(names), *lists)

    def api(self) -> int:
        def create_error(pointer: int) -> int:
            given = ErrorArguments.from_address(pointer)
            self.error = given.code, given.message.decode()
            return 1

        def get_stream(pointer: int) -> None:
            self.asked.append("stream")

        def get_ordinal(pointer: int) -> None:
            self.asked.append("ordinal")
            OrdinalArguments.from_address(pointer).ordinal = 1000

        api = Api(self.api_size)
        api.create_error, api.get_stream, api.get_ordinal = (
            Function(f) for f in (create_error, get_stream, get_ordinal)
        )
        return self.keep(api)

    def call(
        self,
        inputs: list[np.ndarray],
        results: list[np.ndarray],
        attributes: dict[str, Any],
        stage: int = 3,
    ) -> Any:
        frame = Frame(ctypes.sizeof(Frame), None, self.api(), None, stage)
        frame.inputs, frame.results = self.buffers(inputs), self.buffers(results)
        frame.attributes = self.attributes(attributes)
        return self.handler(ctypes.addressof(frame))


DEFAULTS = (False, None, (None, None), 0.0, *[None] * 8, "bshd", None, None, True, None, "auto")
INPUTS = qkv(2, 9, 13, 4, 2, 16, 8)
SPECS = [(str(x.dtype), x.shape) for x in INPUTS]


def described() -> Any:
    return _core.xla_call(*SPECS, *DEFAULTS, False)


def empty() -> list[np.ndarray]:
    _, (dtype, shape), lse_shape, _ = described()
    return [np.full(shape, np.nan, dtype), np.full(lse_shape, np.nan, np.float32)]


def test_what_a_call_is_made_of() -> None:
    attributes, out, lse_shape, _ = described()
    assert out == ("float32", (2, 9, 4, 8)) and lse_shape == (2, 4, 9)
    assert attributes["operands"] == "q k v" and attributes["softmax_scale"] == 0.25
    assert attributes["kernel"] == "auto" and attributes["return_lse"] == 1


def test_shapes_that_no_number_counts() -> None:
    specs = [(dtype, (2**31, 2**31, *shape[2:])) for dtype, shape in SPECS]
    message = "q: dimension 1 is of size 2147483648; accepted: sizes whose product is up to 4503"
    with pytest.raises(UnsupportedError, match=message):
        _core.xla_call(*specs, *DEFAULTS, False)


def test_a_call() -> None:
    results = empty()
    caller = Caller("cpu")
    assert caller.call(INPUTS, results, described()[0]) is None
    assert caller.error is None and not caller.asked
    assert_attention((results[0], results[1]), *INPUTS)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_is_computed_before_its_stage(stage: int) -> None:
    results = empty()
    assert Caller("cpu").call(INPUTS, results, described()[0], stage) is None
    assert np.isnan(results[0]).all()


@pytest.mark.parametrize("handlers", [_core.xla_handlers, _core.xla_backward_handlers])
@pytest.mark.parametrize(("platform", "traits"), [("cpu", 0), ("CUDA", 1)])
def test_metadata(platform: str, traits: int, handlers: Any) -> None:
    """Version 0.1, and whether XLA may put the call into a CUDA graph."""
    metadata = Metadata(ctypes.sizeof(Metadata))
    metadata.version.major, metadata.traits = 9, 9
    extension = Extension(ctypes.sizeof(Extension), 1, None, ctypes.addressof(metadata))
    unknown = Extension(ctypes.sizeof(Extension), 77, ctypes.addressof(extension), None)
    frame = Frame(ctypes.sizeof(Frame), ctypes.addressof(unknown))
    assert Caller(platform, handlers).handler(ctypes.addressof(frame)) is None
    version = metadata.version
    assert (version.major, version.minor, metadata.traits) == (0, 1, traits)
    assert version.struct_size == ctypes.sizeof(Version)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"softcap": None},
            "attribute softcap is missing; accepted: what dlattn.jax of version ",
        ),
        ({"causal": 1.0}, "attribute causal is of XLA's type 12"),
        ({"causal": "x"}, "attribute causal is missing; accepted: "),
        ({"causal": 99}, "attribute causal is 99; accepted: 0 to 2"),
        ({"causal": 2**32 + 1}, "attribute causal is 4294967297; accepted: 0 to 2"),
        ({"precision": 4}, "attribute precision is 4; accepted: 0 to 3"),
        ({"precision": -1}, "attribute precision is -1; accepted: 0 to 3"),
        ({"layout": 2}, "attribute layout is 2; accepted: 0 to 1"),
        ({"out_dtype": 5}, "attribute out_dtype is 5; accepted: 0 to 4"),
        ({"return_lse": 2}, "attribute return_lse is 2; accepted: 0 to 1"),
        ({"batch_invariant": 2**40}, "attribute batch_invariant is 1099511627776; accepted: 0 to"),
        ({"softcap": -1.0}, "softcap is -1; accepted: "),
        ({"kernel": "fastest"}, "no kernel can run this: kernel is fastest; accepted: auto, cpu"),
        ({"kernel": "cpu:wide"}, "no kernel can run this: cpu: variant is wide; accepted: none"),
        ({"causal": 256}, "attribute causal is 256; accepted: 0 to 2"),
        ({"precision": -1}, "attribute precision is -1; accepted: 0 to 3"),
        ({"layout": 2}, "attribute layout is 2; accepted: 0 to 1"),
        ({"out_dtype": 258}, "attribute out_dtype is 258; accepted: 0 to 4"),
        ({"layout": 1}, "lse: shape is (2, 4, 9); accepted: (2, 9, 4)"),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    attributes = {**described()[0], **change}
    given = {name: x for name, x in attributes.items() if x is not None}
    results = empty()
    caller = Caller("cpu")
    assert caller.call(INPUTS, results, given) == 1
    assert caller.error is not None and caller.error[0] == INVALID_ARGUMENT
    assert caller.error[1].startswith(words), caller.error
    assert np.isnan(results[0]).all()


def test_wrong_buffers() -> None:
    attributes = described()[0]
    for inputs, results, words in (
        (INPUTS, empty()[:1], "result 1 is missing"),
        (INPUTS, [*empty(), np.zeros((), np.float32)], "the workspace has 0 dimensions and XLA's"),
        (INPUTS, [*empty(), np.zeros(9, np.float32)], "the workspace has 1 dimensions and XLA's"),
        (INPUTS, [x[:1].copy() for x in empty()], "out: shape is (1, 9, 4, 8); accepted: "),
        ([INPUTS[0].view(np.uint8), *INPUTS[1:]], empty(), "q: dtype is XLA's number 6"),
        ([INPUTS[0].reshape((1,) * 6 + INPUTS[0].shape), *INPUTS[1:]], empty(), "q has 10 dim"),
    ):
        caller = Caller("cpu")
        assert caller.call(inputs, results, attributes) == 1
        assert caller.error is not None and caller.error[0] == INVALID_ARGUMENT
        assert caller.error[1].startswith(words), caller.error
    with pytest.raises(UnsupportedError, match=r"^q: shape is \(2, 9.5, 4, 8\); accepted: a tuple"):
        _core.xla_call(("float32", (2, 9.5, 4, 8)), *SPECS[1:], *DEFAULTS, False)


def test_a_gpu_is_named_by_xla() -> None:
    """Which there is none of, with this number."""
    _, attributes, _ = described_backward("dq")
    for caller, inputs, results, given in (
        (Caller("CUDA"), INPUTS, empty(), described()[0]),
        (Caller("CUDA", _core.xla_backward_handlers), BACKWARD, [nan(INPUTS[0])], attributes),
    ):
        assert caller.call(inputs, results, given) == 1
        assert caller.error is not None and caller.error[0] == INTERNAL
        assert caller.asked == ["ordinal", "stream"]
    caller = Caller("CUDA")
    caller.api_size -= 8
    assert caller.call(INPUTS, empty(), described()[0]) == 1
    words = "this jaxlib does not tell on which GPU a call runs; accepted: that of JAX 0.8 or later"
    assert caller.error == (INTERNAL, words) and not caller.asked


BIAS, SINKS = normal(4, 1, 13, seed=7), normal(4, seed=8)
OUT, LSE = dlattn.attention(*INPUTS, bias=BIAS, sinks=SINKS, causal=True, return_lse=True)
RESULTS = {"out": OUT, "lse": LSE, "dout": normal(*OUT.shape, seed=9)}
BACKWARD = [*INPUTS, BIAS, SINKS, *RESULTS.values()]


def nan(like: np.ndarray) -> np.ndarray:
    return np.full_like(like, np.nan)


def described_backward(needs: str, **changes: Any) -> Any:
    tensors = dict(zip("qkv", INPUTS, strict=True)) | {"bias": BIAS, "sinks": SINKS}
    specs = {name: (str(x.dtype), x.shape) for name, x in tensors.items()}
    options = {"causal": True, "window": (None, None), "softcap": 0.0, "layout": "bshd"}
    options |= {"precision": None, "out_dtype": None, "return_lse": True}
    options |= {"kernel": "auto", "batch_invariant": False, **specs, **changes}
    results = {name: (str(x.dtype), x.shape) for name, x in RESULTS.items()}
    attributes, made, workspace_bytes = _core.xla_call_backward(options, results, needs, True)
    return made, attributes, workspace_bytes


@pytest.mark.parametrize("needs", ["dq", "dk dv", "dbias", "dsinks", "dq dk dv dbias dsinks"])
def test_a_backward_call(needs: str) -> None:
    """Those that are asked for, and the same bits as outside of XLA."""
    names = needs.split()
    made, attributes, _ = described_backward(needs)
    assert attributes["operands"] == "q k v bias sinks out lse dout"
    assert attributes["needs"] == needs and attributes["deterministic"] == 1
    results = [np.full(shape, np.nan, dtype) for dtype, shape in made]
    caller = Caller("cpu", _core.xla_backward_handlers)
    assert caller.call(BACKWARD, results, attributes) is None
    given = {**RESULTS, **dict(zip("qkv", INPUTS, strict=True)), "bias": BIAS, "sinks": SINKS}
    want = dlattn.attention_backward(given.pop("dout"), **given, causal=True, needs=names)
    for name, got in zip(names, results, strict=True):
        assert np.abs(got).max() > 0.01
        np.testing.assert_array_equal(got, getattr(want, name), err_msg=name)


def test_wrong_backward_calls() -> None:
    _, attributes, _ = described_backward("dq dbias")
    right = [nan(INPUTS[0]), nan(BIAS)]
    without_lse = {**attributes, "operands": "q k v bias sinks out dout"}
    for inputs, results, given, words in (
        (BACKWARD, right, {**attributes, "needs": 1}, "attribute needs is missing; accepted: what"),
        (BACKWARD, right, {**attributes, "needs": "dq dq"}, "needs has dq; accepted: dq, dk, dv, "),
        (BACKWARD, right, {**attributes, "needs": "dp"}, "needs has dp; accepted: dq, dk, dv, "),
        (BACKWARD, right, {**attributes, "deterministic": 2}, "attribute deterministic is 2; acc"),
        (BACKWARD, right, {**attributes, "precision": 1}, "precision is int8_fp8; accepted: inp"),
        (BACKWARD, right[:1], attributes, "result 1 is missing"),
        (BACKWARD, [right[0], right[0]], attributes, "dbias: shape is (2, 9, 4, 16); accepted: (4"),
        (BACKWARD[:6] + BACKWARD[7:], right, without_lse, "lse is missing; accepted: one, in a b"),
        (BACKWARD[:7], right, attributes, "dout and dlse are null; accepted: at least one of"),
    ):
        caller = Caller("cpu", _core.xla_backward_handlers)
        assert caller.call(inputs, results, given) == 1, words
        assert caller.error is not None and caller.error[0] == INVALID_ARGUMENT
        assert caller.error[1].startswith(words), caller.error
        assert all(np.isnan(x).all() for x in results)
    with pytest.raises(UnsupportedError, match=r"^kernel is 'decode'; accepted: "):
        described_backward("dq", kernel="decode")
    with pytest.raises(UnsupportedError, match=r"^alibi_slopes is missing; accepted: one, in a "):
        described_backward("dalibi_slopes")

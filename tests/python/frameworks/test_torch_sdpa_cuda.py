"""CUDA's native kernels in the place of torch's attention, on tensors of the CPU.

They ask the device for its stream alone, so they are tested as kernels of the CPU's, of which
torch's operators have none, against those in Python.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import _core  # noqa: E402
from dlattn.integrations.torch import sdpa, sdpa_backward, sdpa_native  # noqa: E402

FLASH, EFFICIENT, CUDNN = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
PYTHON = sdpa.KERNELS["CUDA"] | sdpa_backward.KERNELS["CUDA"]

pytestmark = pytest.mark.skipif(VERSION < (2, 11), reason="torch's C ABI lacks what they need")


class Left:
    """The calls that native kernels left to Python, and what those raise instead."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: BaseException | None = None

    def kernel(self, name: str) -> Callable[..., Any]:
        def serve(_: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            return PYTHON[name](*arguments, **options)

        return serve


@pytest.fixture(scope="module")
def as_kernels_of_the_cpu() -> Iterator[Left]:
    left = Left()
    dlattn.torch.deactivate()
    with sdpa_native.in_python():
        for name in sdpa_native.NATIVE:
            if sdpa_native.NATIVE[name] == "CUDA":
                sdpa_native.leave_calls_to(left.kernel(name), name, "CPU")
                assert sdpa_native._register_for("CPU", name) == ""
        yield left
        _core.unregister_torch_sdpa()


@pytest.fixture
def left(as_kernels_of_the_cpu: Left) -> Iterator[Left]:
    as_kernels_of_the_cpu.__init__()  # type: ignore[misc]
    sdpa_native.serve(True, "dlattn")
    dlattn.torch.stats(reset=True)
    yield as_kernels_of_the_cpu
    sdpa_native.serve(False, "auto")
    dlattn.torch.stats(reset=True)


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) + 0.2).to(dtype) for shape in shapes]


def qkv(dtype: Any, rows: int = 33, keys: int = 47, columns: int = 16) -> list[Any]:
    shapes = (2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, columns)
    return drawn(*shapes, dtype=dtype)


def packed(dtype: Any) -> list[Any]:
    """q, k and v of one buffer, the heads of a row side by side."""
    return [x.transpose(1, 2) for x in drawn((2, 33, 3, 4, 16), dtype=dtype)[0].unbind(2)]


def bias(shape: tuple[int, ...], dtype: Any, padded: bool = False) -> Any:
    *rest, columns = shape
    found = drawn((*rest, 64 if padded else columns), dtype=dtype, seed=1)[0][..., :columns]
    found[..., 5, :] = -torch.inf  # a row that sees nothing
    return found


TENSORS: dict[str, Callable[[Any], list[Any]]] = {
    "grouped": qkv,
    "packed": packed,
    "every other head": lambda dtype: [x[:, ::2] for x in qkv(dtype)],
    "one row": lambda dtype: qkv(dtype, rows=1),
    "32 rows": lambda dtype: qkv(dtype, rows=32, keys=33),
    "more rows": lambda dtype: qkv(dtype, rows=61),
    "no rows": lambda dtype: qkv(dtype, rows=0),
    "no keys": lambda dtype: qkv(dtype, keys=0),
}
WITH_BIAS: dict[str, Callable[[Any], tuple[list[Any], Any]]] = {
    "none": lambda dtype: (qkv(dtype), None),
    "padded": lambda dtype: (qkv(dtype), bias((2, 4, 33, 47), dtype, padded=True)),
    "expanded": lambda dtype: (qkv(dtype), bias((33, 47), dtype).expand(2, 4, 33, 47)),
    "by row": lambda dtype: (qkv(dtype), bias((2, 1, 33, 1), dtype)),
    "float32": lambda dtype: (qkv(dtype), bias((1, 4, 33, 47), torch.float32)),
    "columns": lambda dtype: (qkv(dtype, columns=8), bias((33, 47), dtype)),
    "packed": lambda dtype: (packed(dtype), bias((33, 33), dtype)),
}


def same(found: Any, want: Any) -> None:
    assert len(found) == len(want)
    for i, (x, y) in enumerate(zip(found, want, strict=True)):
        if not isinstance(y, torch.Tensor):
            assert (type(x), x) == (type(y), y)
            continue
        about = [(z.shape, z.dtype, z.device, z.stride(), z.requires_grad) for z in (x, y)]
        assert about[0] == about[1], i
        if y.dtype not in (torch.uint64, torch.int64):  # seed and offset, which are not written
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), i


def native(left: Left, name: str, *arguments: Any, **options: Any) -> Any:
    """The results of a call that must not arrive in Python, after comparing them."""
    dlattn.torch.stats(reset=True)
    found = getattr(torch.ops.aten, name)(*arguments, **options)
    assert dlattn.torch.stats().served == {name: 1} and left.calls == []
    found = found if isinstance(found, tuple) else (found,)
    same(found, PYTHON[name](*arguments, **options))
    return found


def douts(out: Any) -> list[Any]:
    return [
        torch.linspace(-1, 1.5, out.numel()).reshape(out.shape).to(out.dtype),
        torch.ones((), dtype=out.dtype).expand(out.shape),  # of out.sum()
        torch.full(out.shape, 0.5, dtype=torch.float64),
    ]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KINDS = pytest.mark.parametrize("name", TENSORS)
BIASES = pytest.mark.parametrize("name", WITH_BIAS)
NONE_YET = (None, None, 0, 0)  # cum_seq_q, cum_seq_k, max_q, max_k
SEEDS = (None, None)


@DTYPES
@KINDS
@pytest.mark.parametrize("causal", [False, True])
def test_flash(left: Left, name: str, dtype: Any, causal: bool) -> None:
    inputs = TENSORS[name](dtype)
    out, lse, *_ = native(left, FLASH, *inputs, 1e-11, causal, scale=0.3)
    assert not torch.isneginf(lse).any()
    for dout in douts(out):
        given = (dout, *inputs, out, lse, *NONE_YET, 0.0, causal, *SEEDS)
        native(left, f"{FLASH}_backward", *given, scale=0.3)


@DTYPES
@BIASES
@pytest.mark.parametrize("wants_lse", [False, True])
def test_efficient(left: Left, name: str, dtype: Any, wants_lse: bool) -> None:
    inputs, attn_bias = WITH_BIAS[name](dtype)
    causal = attn_bias is None
    with torch.set_grad_enabled(wants_lse):
        out, lse, *_ = native(left, EFFICIENT, *inputs, attn_bias, wants_lse, 0.0, causal)
    assert lse.shape[2] == (64 if wants_lse else 0)
    if not wants_lse:
        return
    assert torch.isposinf(lse[..., 33:]).all() and not torch.isneginf(lse).any()
    for dout in douts(out):
        for masked in ((True, True, True, True), (False, True, True, False), (False,) * 4):
            given = (dout, *inputs, attn_bias, out, lse, *SEEDS, 0.0, masked, causal)
            native(left, f"{EFFICIENT}_backward", *given)


@DTYPES
@BIASES
def test_cudnn(left: Left, name: str, dtype: Any) -> None:
    inputs, attn_bias = WITH_BIAS[name](dtype)
    causal = attn_bias is None
    out, lse, *_ = native(left, CUDNN, *inputs, attn_bias, True, 0.0, causal, scale=0.3)
    assert lse.shape == (2, 4, 33, 1) and not torch.isneginf(lse).any()
    for dout in douts(out):
        given = (dout, *inputs, out, lse, *SEEDS, attn_bias, *NONE_YET, 0.0, causal)
        native(left, f"{CUDNN}_backward", *given, scale=0.3)


@KINDS
def test_layouts_of_the_other_two(left: Left, name: str) -> None:
    inputs = TENSORS[name](torch.float32)
    out, lse, *_ = native(left, EFFICIENT, *inputs, None, True, 0.0, False)
    given = (out, *inputs, None, out, lse, *SEEDS, 0.0, (True,) * 4, False)
    native(left, f"{EFFICIENT}_backward", *given)
    out, lse, *_ = native(left, CUDNN, *inputs, None, True, 0.0, True)
    for given_lse in (lse, lse[..., 0]):
        given = (out, *inputs, out, given_lse, *SEEDS, None, *NONE_YET, 0.0, True)
        native(left, f"{CUDNN}_backward", *given)


REFUSED: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "dropout_p is above 0": (FLASH, lambda: (*qkv(torch.float32), 0.1)),
    "dropout_p is no probability": (CUDNN, lambda: (*qkv(torch.float32), None, True, torch.nan)),
    "return_debug_mask is True": (FLASH, lambda: (*qkv(torch.float32), 0.0, False, True)),
    "k: batch is 1": (
        EFFICIENT,
        lambda: (*drawn((2, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), None, True),
    ),
    "q: the stride of the last dimension": (
        CUDNN,
        lambda: (*(x.transpose(2, 3) for x in qkv(torch.float32)), None, True),
    ),
    "cum_seq_q or cum_seq_k is given": (
        f"{CUDNN}_backward",
        lambda: (
            *[torch.ones(1, 1, 8, 8)] * 5,
            torch.ones(1, 1, 8, 1),
            *(None, None, None, torch.ones(2), None, 8, 8, 0.0, False),
        ),
    ),
    "logsumexp was not computed": (
        f"{EFFICIENT}_backward",
        lambda: (
            *[torch.ones(1, 1, 8, 8)] * 4,
            *(None, torch.ones(1, 1, 8, 8), torch.ones(1, 1, 0), None, None, 0.0, [True] * 4),
        ),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_is_left_to_python(left: Left, reason: str) -> None:
    """Which then raises, as there is nothing below it: torch's callers meet just that."""
    name, arguments = REFUSED[reason]
    with pytest.raises(sdpa.Refused, match=reason):
        getattr(torch.ops.aten, name)(*arguments())
    assert left.calls == [name] and dlattn.torch.stats().served == {}


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_results_come_from_python_as_they_are(left: Left, operator: str) -> None:
    """Numbers and tensors that are none among them."""
    sdpa_native.serve(False, "dlattn")
    inputs, attn_bias = WITH_BIAS["padded"](torch.float32)
    more = [] if operator == FLASH else [attn_bias, True]
    results = getattr(torch.ops.aten, operator)(*inputs, *more)
    same(results, PYTHON[operator](*inputs, *more))
    out, lse, *_ = results
    given = {
        FLASH: (out, *inputs, out, lse, *NONE_YET, 0.0, False, *SEEDS),
        EFFICIENT: (out, *inputs, attn_bias, out, lse, *SEEDS, 0.0, [True] * 4),
        CUDNN: (out, *inputs, out, lse, *SEEDS, attn_bias, *NONE_YET, 0.0, False),
    }[operator]
    backward = f"{operator}_backward"
    same(getattr(torch.ops.aten, backward)(*given), PYTHON[backward](*given))
    assert left.calls == [operator, backward] and dlattn.torch.stats().served == {}


def test_a_bias_that_may_require_grad_and_strides_of_lse_are_left_to_python(left: Left) -> None:
    inputs, attn_bias = WITH_BIAS["padded"](torch.float32)
    call = torch.ops.aten._scaled_dot_product_efficient_attention
    assert call(*inputs, attn_bias.requires_grad_(), False)[1].shape == (2, 4, 64)
    out, lse, *_ = PYTHON[CUDNN](*inputs, None, True)
    strided = lse[..., 0].transpose(1, 2).contiguous().transpose(1, 2)
    given = (out, *inputs, out, strided, *SEEDS, None, *NONE_YET, 0.0, False)
    same(
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given),
        PYTHON[f"{CUDNN}_backward"](*given),
    )
    assert left.calls == [EFFICIENT, f"{CUDNN}_backward"]


def test_gradients_and_calls_of_torchs_are_left_to_python(left: Left) -> None:
    inputs, attn_bias = WITH_BIAS["padded"](torch.float32)
    out, lse, *_ = PYTHON[CUDNN](*inputs, attn_bias, True)

    def backward(mask: Any) -> None:
        call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        call(out, *inputs, out, lse, *SEEDS, mask, *NONE_YET, 0.0, False)

    for gradients, expected in (("auto", [None]), ("torch", [None, attn_bias]), ("dlattn", [])):
        sdpa_native.serve(True, gradients)
        left.calls.clear()
        for mask in (None, attn_bias):
            backward(mask)
        assert len(left.calls) == len(expected)
    sdpa_native.serve(False, "dlattn")
    backward(None)
    assert len(left.calls) == 1


def test_torch_is_asked_for_determinism(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's bits do not depend on the number of sequences then."""
    shapes = [(batch, 1, 300, 64) for batch in (1, 8)]
    few, many = ([x.half() for x in drawn(*[shape] * 3)] for shape in shapes)

    def bits(inputs: list[Any]) -> list[Any]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs)
        given = (out, *inputs, out, lse, *NONE_YET, 0.0, False, *SEEDS)
        return list(torch.ops.aten._scaled_dot_product_flash_attention_backward(*given))

    asked: list[bool] = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked.append(True))
    first = bits([x.clone() for x in few])
    torch.use_deterministic_algorithms(True)
    try:
        alone = bits([x[:1] for x in many])
        among = bits(many)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0].shape == few[0].shape and asked == [] and left.calls == []
    for x, y in zip(alone, among, strict=True):
        assert torch.equal(x, y[:1])


class Meets(torch.autograd.Function):
    """Lets autograd's thread of the CPU meet the backward operator."""

    @staticmethod
    def forward(ctx: Any, x: Any, call: Callable[[], Any]) -> Any:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.call()
        return None, None


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyError, KeyboardInterrupt])
def test_exceptions_keep_their_class(left: Left, kind: Any) -> None:
    left.error = kind("mine")
    inputs = qkv(torch.float32)

    def call() -> None:
        torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.5)

    found: list[BaseException] = []

    def on_a_thread() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    on_a_thread()
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(kind, match="mine"):
        Meets.apply(x, call).backward()
    assert found == [left.error, left.error] and len(left.calls) == 3


def test_memory_that_is_not_to_be_had_is_pythons_to_ask_for(left: Left) -> None:
    inputs = [x.expand(1, 1, 1 << 42, 16) for x in drawn(*[(1, 1, 1, 16)] * 3)]
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        torch.ops.aten._scaled_dot_product_flash_attention(*inputs)
    assert left.calls == [FLASH] and type(raised.value) is RuntimeError
    left.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.ops.aten._scaled_dot_product_flash_attention(*inputs)
    assert raised.value is left.error


@pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not tell")
def test_tensors_are_let_go_of_once(left: Left) -> None:
    def counts(tensors: list[Any]) -> list[int]:
        gc.collect()
        return [x._use_count() for x in tensors]

    inputs, attn_bias = WITH_BIAS["padded"](torch.float32)
    every_other, dout = [x[:, ::2] for x in inputs], torch.ones(2, 4, 33, 16)
    held = [*inputs, *every_other, attn_bias, dout]
    before = counts(held)
    for error in (None, KeyError("mine")):
        left.error = error
        for _ in range(3):
            out, lse, *rest = torch.ops.aten._scaled_dot_product_efficient_attention(
                *inputs, attn_bias, True, scale=0.3
            )
            made = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                dout, *inputs, attn_bias, out, lse, *rest, 0.0, [True] * 4, scale=0.3
            )
            flash = torch.ops.aten._scaled_dot_product_flash_attention(*every_other)
            tensors = [x for x in (out, lse, *made, *flash) if isinstance(x, torch.Tensor)]
            assert counts(tensors) == counts([*torch.empty(len(tensors), 1)])
            for refused in ((*inputs, attn_bias, True, 0.5), (*inputs, attn_bias, False)):
                with suppress(KeyError, sdpa.Refused):
                    torch.ops.aten._scaled_dot_product_efficient_attention(*refused, scale=0.3)
    del out, lse, rest, made, flash, tensors, refused
    left.error = None
    assert counts(held) == before


def test_why_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = getattr(torch.ops.aten, FLASH).default._schema.arguments
    schema = tuple(f"{a.type} {a.name}" for a in arguments)
    register = _core.register_torch_sdpa
    for key, name in (("CUDA", f"{FLASH}_for_cpu"), ("CPU", "relu"), ("XPU", FLASH)):
        found = register(sdpa_native._FOLDER, key, {name: schema}, print)
        assert found == "an operator has no native kernel"
    found = register(sdpa_native._FOLDER, "CUDA", {FLASH: schema[:-1]}, print)
    assert found == f"the native {FLASH} has other arguments"
    if torch.version.cuda is None:
        assert sdpa_native._register_for("CUDA", FLASH) == "torch has no CUDA"
    monkeypatch.setattr(sdpa_native, "why", {})
    monkeypatch.setattr(sdpa_native, "ON_CUDA", False)
    assert sdpa_native.replaceable([FLASH]) == set()
    assert sdpa_native.why == {FLASH: "it is switched off"}
    monkeypatch.setattr(sdpa_native, "why_exceptions_are_lost", lambda: "they are lost")
    assert sdpa_native._register_for("CUDA", FLASH) == "they are lost"

"""The native kernels of torch's operators: what they refuse, what they own, what they tell."""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import _core  # noqa: E402
from dlattn.integrations.torch import gradients  # noqa: E402
from dlattn.integrations.torch.kernels import IN_PYTHON, _arguments, own_error  # noqa: E402
from dlattn.integrations.torch.ops import KERNELS  # noqa: E402

OPS = torch.ops.dlattn
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
native_only = pytest.mark.skipif(not KERNELS.native, reason=KERNELS.why["CPU"])


def drawn(*shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(s, generator=generator) + 0.2).to(dtype or torch.float32) for s in shapes]


def inputs(dtype: Any = None) -> list[Any]:
    return drawn((2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8), dtype=dtype)


def starts(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.skipif(VERSION < (2, 10), reason="torch's stable ABI is of 2.10")
def test_they_run_where_torch_has_what_they_need() -> None:
    operators = dlattn.torch.operators()
    assert operators["CPU"] == "native"
    assert (operators["CUDA"] == "native") == (torch.version.cuda is not None)


def test_why_they_cannot_run(tmp_path: Path) -> None:
    def why(folder: Path | str, backend: str = "CPU", **other: Any) -> str:
        schemas = {name: _arguments(name) for name in KERNELS.python}
        return _core.register_torch_ops(str(folder), backend, schemas | other)

    folder = Path(torch.__file__).parent / "lib"
    assert why(tmp_path) == f"libtorch_cpu of this process does not lie in {tmp_path}"
    swapped = tuple(reversed(_arguments("attention")))
    for other in (("Tensor q", "Tensor k"), swapped):
        assert why(folder, attention=other) == "the native attention has other arguments"
    # A library that is loaded and is no torch.
    loaded = next(p for p in _loaded_libraries() if "libdlattn" in p.name)
    (tmp_path / "libtorch_cpu.so").symlink_to(loaded)
    found = why(tmp_path)
    assert found == "libtorch_cpu has no function aoti_torch_library_init_impl"
    if torch.version.cuda is None and KERNELS.native:
        found = why(folder, "CUDA")
        assert found == "libtorch_cuda has no function aoti_torch_get_current_cuda_stream"


def _loaded_libraries() -> list[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Path(line.split()[-1]) for line in lines if ".so" in line]


def lacking_memory() -> Any:
    x = torch.randn(2, 8, 4, 16)
    x.untyped_storage().resize_(0)
    return x


q, k, v = inputs()
CU = (starts(0, 8, 16), starts(0, 9, 18), 8, 9)
LSE = drawn((2, 4, 8))[0]
FLAT = [x.flatten(0, 1) for x in (q, k, v)]
REFUSED: dict[str, Callable[[], Any]] = {
    "causal": lambda: OPS.attention(q, k, v, causal=3),
    "precision": lambda: OPS.attention(q, k, v, precision="int4"),
    "long precision": lambda: OPS.attention(q, k, v, precision="int" + 200 * "\u00e4"),
    "precision of float32": lambda: OPS.attention(q, k, v, precision="int8_fp8"),
    "softcap": lambda: OPS.attention(q, k, v, softcap=-1.0),
    "scale": lambda: OPS.attention(q, k, v, scale=float("inf")),
    "rank": lambda: OPS.attention(q[0], k, v),
    "nine dimensions": lambda: OPS.attention(torch.randn((1,) * 9), k, v),
    "heads": lambda: OPS.attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v),
    "dtype of k": lambda: OPS.attention(q, k.half(), v),
    "dtype of q": lambda: OPS.attention(q.to(torch.int64), k, v),
    "float8_e5m2": lambda: OPS.attention(*(x.to(torch.float8_e5m2) for x in (q, k, v))),
    "complex": lambda: OPS.attention(*(x.to(torch.complex64) for x in (q, k, v))),
    "no memory": lambda: OPS.attention(lacking_memory(), k, v),
    "last stride": lambda: OPS.attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v),
    "mask": lambda: OPS.attention(q, k, v, mask=torch.ones(8, 9, dtype=torch.uint8)),
    "bias": lambda: OPS.attention(q, k, v, bias=torch.zeros(7, 9)),
    "sinks": lambda: OPS.attention(q, k, v, sinks=torch.zeros(3)),
    "slopes": lambda: OPS.attention(q, k, v, alibi_slopes=torch.zeros(4).double()),
    "out's shape": lambda: OPS.attention_out(q, k, v, out=torch.empty(2, 8, 4, 16)),
    "out's dtype": lambda: OPS.attention_out(q, k, v, out=torch.empty(2, 8, 4, 8).half()),
    "out in q": lambda: OPS.attention_out(q, k, v, out=q[..., :8]),
    "max_seqlen_q": lambda: OPS.attention_varlen(*FLAT, *CU[:2], -1, 9),
    "max_seqlen_k": lambda: OPS.attention_varlen(*FLAT, *CU[:2], 8, 2**31),
    "cu_seqlens_q": lambda: OPS.attention_varlen(*FLAT, CU[0].long(), *CU[1:]),
    "cu_seqlens_k": lambda: OPS.attention_varlen(*FLAT, CU[0], starts(0, 9), *CU[2:]),
    "lengths": lambda: OPS.attention_varlen(*FLAT, starts(0, 9, 8), *CU[1:]),
    "33 parts": lambda: OPS.merge_states([q] * 33, [LSE] * 33),
    "parts": lambda: OPS.merge_states([q, q], [LSE]),
    "a part's shape": lambda: OPS.merge_states([q, k], [LSE, LSE]),
    "a part's dtype": lambda: OPS.merge_states([q, q.half()], [LSE, LSE]),
    "a part's lse": lambda: OPS.merge_states([q, q], [LSE, LSE.double()]),
    "seqused_k": lambda: OPS.attention_varlen(*FLAT, *CU, seqused_k=starts(1)),
    "no bias": lambda: backward(needs=[True] * 4 + [False] * 2),
    "nothing wanted": lambda: backward(needs=[False] * 6),
    "dout's shape": lambda: backward(dout=q),
    "dout's dtype": lambda: backward(dout=torch.ones(2, 8, 4, 8).half()),
    "lse's dtype": lambda: backward(lse=torch.ones(2, 4, 8).double()),
    "dlse's shape": lambda: backward(dlse=torch.ones(2, 8, 4)),
    "out's columns": lambda: backward(out=q),
    "backward's causal": lambda: backward(causal=3),
}


def backward(**options: Any) -> list[Any]:
    ones = torch.ones(2, 8, 4, 8)
    given = {"dout": ones, "q": q, "k": k, "v": v, "out": ones, "lse": torch.ones(2, 4, 8)}
    asked = {"dlse": None, "needs": [True] * 3 + [False] * 3}
    return list(OPS.attention_backward(**{**given, **asked, **options}))


def raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        call()
    return error.type, str(error.value)


@native_only
@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_the_kernels_in_python(name: str) -> None:
    found = raised(REFUSED[name])
    with KERNELS.in_python():
        assert found == raised(REFUSED[name])
    assert found[0] in (dlattn.UnsupportedError, TypeError)


@native_only
def test_dtypes_that_dlpack_lacks() -> None:
    bits = torch.empty(2, 8, 4, 16, dtype=torch.bits8)
    with pytest.raises(dlattn.UnsupportedError, match=r"q: dtype is torch's number \d+; accepted"):
        OPS.attention(bits, bits, bits)


@native_only
def test_errors_in_inference_mode_are_torchs_with_dlattns_words() -> None:
    """There no Python stands between torch and the kernel."""
    with torch.inference_mode():
        tensors = inputs()
        with pytest.raises(RuntimeError, match=r"causal is 3; accepted: 0 \(no\), 1"):
            OPS.attention(*tensors, causal=3)
        with pytest.raises(dlattn.UnsupportedError, match="softcap is -1"):
            dlattn.torch.attention(*tensors, softcap=-1.0)
        other = RuntimeError("of another's")
        assert own_error(other) is other
        OPS.attention(*tensors)
        assert _core.torch_ops_failure() is None


@native_only
@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_are_those_of_the_kernels_in_python(varlen: bool, bhsd: bool) -> None:
    bias, slopes, sinks = drawn((1, 4, 8, 9), (2, 4), (4,))
    tensors, lengths = [q, k, v], []
    if varlen:
        tensors, lengths, bias = [*FLAT], [*CU], bias[:, :1]
        lengths.append(starts(9, 5))
    if bhsd:
        tensors = [x.transpose(-3, -2).contiguous() for x in tensors]
    scores = [bias, None, slopes, sinks, 1, 0.3, 5, -1, 2.0]
    name = "attention_varlen" if varlen else "attention"
    forward, of_gradients = getattr(OPS, name), getattr(OPS, f"{name}_backward")
    out, lse = forward(*tensors, *lengths, *scores, None, bhsd)
    dout = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    for dlse in (None, lse * 0.1):
        for needs in ([True] * 6, [False, True, False, True, False, False]):
            given = (dout, *tensors, out, lse, dlse, *lengths, *scores, bhsd)
            found = of_gradients(*given, needs=needs, deterministic=True)
            with KERNELS.in_python():
                want = of_gradients(*given, needs=needs, deterministic=True)
            assert len(found) == len(want) == sum(needs)
            for x, y in zip(found, want, strict=True):
                assert (x.dtype, x.stride()) == (y.dtype, y.stride()) and torch.equal(x, y)


@native_only
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_memory_that_torch_cannot_give_is_pythons_to_ask_for(name: str, monkeypatch: Any) -> None:
    """Whose exceptions keep their class."""
    many = [x[:1, :1].expand(-1, 1 << 46, -1, -1) for x in (q, k, v)]

    def call() -> None:
        scores = [*[None] * 4, 0, None, -1, -1, 0.0]
        if name == "attention":
            dlattn.torch.attention(many[0], k[:1], v[:1])
        else:
            out, lse = torch.ones(1, 8, 4, 8), torch.ones(1, 4, 8)
            given = (out, q[:1], *many[1:], out, lse, None, *scores, False)
            gradients._gradients("attention", given, [True] * 3 + [False] * 3, False)

    with torch.no_grad(), pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        call()
    assert not str(raised.value).startswith("allocating")  # in dlattn's words
    calls = []

    def in_python(*given: Any, **_: Any) -> None:
        calls.append(given)
        raise torch.OutOfMemoryError

    monkeypatch.setitem(IN_PYTHON, name, in_python)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        call()
    assert len(calls) == 1
    with torch.inference_mode(), pytest.raises(RuntimeError, match="allocating out failed"):
        OPS.attention(many[0], k[:1], v[:1])


def counts(tensors: list[Any]) -> list[int]:
    gc.collect()
    return [x._use_count() for x in tensors]


@native_only
@pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not tell")
def test_tensors_are_let_go_of_once() -> None:
    bias, mask, slopes, sinks = (
        *drawn((1, 4, 8, 9)),
        torch.ones(8, 9, dtype=torch.bool),
        *drawn((2, 4), (4,)),
    )
    out = torch.full((2, 8, 4, 8), torch.nan)
    options = {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks, "scale": 0.3}
    packed = [*FLAT, *CU]
    held = [LSE, q, k, v, bias, mask, slopes, sinks, out, *FLAT, *CU[:2]]
    before = counts(held)
    for _ in range(3):
        found = OPS.attention(q, k, v, **options)
        assert counts(list(found)) == counts(list(torch.empty(2, 1)))
        OPS.attention_out(q, k, v, **options, out=out)
        OPS.attention_varlen(*packed, seqused_k=starts(9, 9), alibi_slopes=slopes)
        for wrong in ({"softcap": -1.0}, {"precision": "int4"}, {"causal": 7}):
            for call in (
                lambda wrong=wrong: OPS.attention(q, k, v, **options, **wrong),
                lambda wrong=wrong: OPS.attention_out(q, k, v, **options, **wrong, out=out),
                lambda wrong=wrong: OPS.attention_varlen(*packed, **options, **wrong),
            ):
                raised(call)
        raised(lambda: OPS.attention(q, k[:1], v, **options))
        backward(dlse=LSE)
        raised(lambda: backward(dout=q))
        OPS.merge_states([q, q, q], [LSE, LSE, LSE])
        raised(lambda: OPS.merge_states([q, k], [LSE, LSE]))
    assert counts(held) == before


@native_only
def test_texts_are_let_go_of() -> None:
    def resident() -> int:
        gc.collect()  # tracebacks hold arguments
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    text = "x" * (1 << 24)
    raised(lambda: OPS.attention(q, k, v, precision=text))
    before = resident()
    for _ in range(20):
        kind, message = raised(lambda: OPS.attention(q, k, v, precision=text))
        assert len(message) < 300, kind
    assert resident() - before < 10 * len(text)


@native_only
@pytest.mark.parametrize(("batch", "rows", "keys"), [(2, 8, 9), (0, 8, 9), (2, 0, 9), (2, 8, 0)])
def test_results_lie_as_those_of_the_kernels_in_python(batch: int, rows: int, keys: int) -> None:
    tensors = drawn((batch, rows, 4, 16), (batch, keys, 2, 16), (batch, keys, 2, 8))
    found = OPS.attention(*tensors)
    with KERNELS.in_python():
        want = OPS.attention(*tensors)
    for x, y in zip(found, want, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@native_only
def test_threads_share_the_operators() -> None:
    wanted = OPS.attention(q, k, v)

    def work(seed: int) -> None:
        for _ in range(50):
            with torch.inference_mode(seed % 2 == 0):
                for x, y in zip(OPS.attention(q, k, v), wanted, strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=0)
                kind, text = raised(lambda: OPS.attention(q, k, v, softcap=-1.0 - seed))
                assert re.match(f"softcap is -{seed + 1}", text), (kind, text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

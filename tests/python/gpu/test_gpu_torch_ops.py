"""The operators of torch on a GPU: native, and with Python's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch.gradients import deterministic_gradients  # noqa: E402
from dlattn.integrations.torch.ops import KERNELS  # noqa: E402

pytestmark = pytest.mark.gpu

OPS = torch.ops.dlattn


@pytest.fixture(autouse=True, params=["native", "Python"])
def kernels(request: Any) -> Iterator[None]:
    """The ways to run the operators."""
    if request.param == "Python":
        with KERNELS.in_python():
            yield
        return
    if KERNELS.why["CUDA"]:
        pytest.skip(KERNELS.why["CUDA"])
    yield


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float16, device: str = "cuda") -> list[Any]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [(torch.randn(s, generator=generator) + 0.2).to(device, dtype) for s in shapes]


def inputs(dtype: Any = torch.float16) -> list[Any]:
    return drawn((2, 130, 4, 64), (2, 140, 2, 64), (2, 140, 2, 64), dtype=dtype)


def equal(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_operators_are_the_functions(dtype: Any) -> None:
    q, k, v = inputs(dtype)
    want = dlattn.attention(q, k, v, causal=True, window=(100, None), return_lse=True)
    equal(OPS.attention(q, k, v, causal=1, window_left=100), want)
    out = torch.full_like(q, torch.nan)
    equal((out, OPS.attention_out(q, k, v, causal=1, window_left=100, out=out)), want)
    with torch.inference_mode():
        equal(OPS.attention(*(x.clone() for x in (q, k, v)), causal=1, window_left=100), want)

    packed = [x.flatten(0, 1) for x in (q, k, v)]
    starts = [
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 130, 260], [0, 140, 280])
    ]
    want = dlattn.attention_varlen(*packed, *starts, 130, 140, causal=True, return_lse=True)
    equal(OPS.attention_varlen(*packed, *starts, 130, 140, causal=1), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_those_of_the_function(dtype: Any) -> None:
    q, k, v = inputs(dtype)
    bias = drawn((1, 4, 130, 140), dtype=dtype)[0]
    tensors = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    with deterministic_gradients(True):
        out, lse = OPS.attention(*tensors, causal=1, window_left=100)
    dout, dlse = (torch.linspace(-1, 2, x.numel(), device="cuda") for x in (out, lse))
    given = [dout.reshape(out.shape).to(dtype), dlse.reshape(lse.shape)]
    found = torch.autograd.grad((out, lse), tensors, given)  # on autograd's thread
    want = dlattn.attention_backward(
        given[0],
        *(q, k, v, out.detach(), lse.detach()),
        dlse=given[1],
        bias=bias,
        causal=True,
        window=(100, None),
        deterministic=True,
    )
    equal(found, want[:4])


def test_out_of_memory_is_torchs_error() -> None:
    tensors = [x.requires_grad_() for x in drawn(*[(1, 16384, 8, 64)] * 3)]
    out = OPS.attention(*tensors)[0]
    dout = torch.ones_like(out)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled), pytest.raises(torch.OutOfMemoryError):
                dlattn.torch.attention(*tensors)
        with pytest.raises(torch.OutOfMemoryError):  # on autograd's thread
            torch.autograd.grad(out, tensors, dout, retain_graph=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, tensors, dout))


@pytest.mark.parametrize("precision", ["int8_fp8", "int8_fp16"])
def test_a_precision_gets_its_workspace(precision: str) -> None:
    q, k, v = inputs()
    options = {"precision": precision}
    support = dlattn.supported(q, k, v, **options)
    if not support.ok:
        pytest.skip(support.reasons[0])
    before = torch.cuda.memory_allocated()
    found = OPS.attention(q, k, v, **options)
    equal(found, dlattn.attention(q, k, v, return_lse=True, **options))
    del found
    assert torch.cuda.memory_allocated() == before


def test_work_goes_to_the_current_stream() -> None:
    q, k, v = inputs()
    want = OPS.attention(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.full_like(q, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        found = OPS.attention(late, k, v)
    stream.synchronize()
    equal(found, want)


def test_a_cuda_graph_captures_the_operator() -> None:
    q, k, v = inputs()
    OPS.attention(q, k, v, causal=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = OPS.attention(q, k, v, causal=1)
    q.copy_(q.flip(1))
    graph.replay()
    equal(found, dlattn.attention(q, k, v, causal=True, return_lse=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def function(q: Any, k: Any, v: Any) -> Any:
        return dlattn.torch.attention(q, k, v, causal=True).transpose(1, 2) + 1

    q, k, v = inputs()
    want = dlattn.attention(q, k, v, causal=True).transpose(1, 2) + 1
    torch.testing.assert_close(function(q, k, v), want)


def test_opcheck() -> None:
    q, k, v = inputs()
    torch.library.opcheck(OPS.attention, (q, k, v), {"causal": 1})
    torch.library.opcheck(OPS.attention_out, (q, k, v), {"out": torch.full_like(q, torch.nan)})


def test_tensors_on_the_cpu_are_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(dlattn.UnsupportedError, match="k is on cpu; accepted: cuda:0, where q is"):
        OPS.attention(q, k.cpu(), v)
    with pytest.raises(dlattn.UnsupportedError, match="k is on cuda:0; accepted: cpu, where q is"):
        OPS.attention(q.cpu(), k, v)
    with pytest.raises(dlattn.UnsupportedError, match="out is on cpu; accepted: cuda:0"):
        OPS.attention_out(q, k, v, out=torch.empty_like(q, device="cpu"))


def test_autocast() -> None:
    q, k, v = inputs(torch.float32)
    want = [x.to(torch.bfloat16) for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = OPS.attention(q, k, v.to(torch.bfloat16), causal=1)
        one = dlattn.torch.attention(q, k, v, causal=True)
    equal(found, dlattn.attention(*want, causal=True, return_lse=True))
    equal(one, found[0])


def mapped_as_one_by_one(function: Any, *stacked: Any) -> None:
    found = torch.vmap(function)(*stacked)
    each = [function(*tensors) for tensors in zip(*stacked, strict=True)]
    for part, want in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(want), rtol=4e-3, atol=4e-3)


def test_packs_are_mapped() -> None:
    """Each with lengths of its own; the second has rows that belong to no sequence."""
    q, k, v = drawn((3, 130, 4, 64), (3, 130, 2, 64), (3, 130, 2, 64))
    starts = torch.tensor([[0, 70, 130], [9, 30, 100], [0, 0, 130]], device="cuda").int()

    def function(q: Any, k: Any, v: Any, starts: Any) -> Any:
        out, lse = OPS.attention_varlen(q, k, v, starts, starts, 130, 130, causal=1)
        rows = torch.arange(130, device="cuda")
        mine = (rows >= starts[0]) & (rows < starts[-1])
        return torch.where(mine[:, None, None], out, 0.0), torch.where(mine, lse, 0.0)

    mapped_as_one_by_one(function, q, k, v, starts)


def test_caches_are_mapped() -> None:
    q, k, v = drawn((3, 2, 1, 4, 64), (3, 9, 16, 2, 64), (3, 9, 16, 2, 64))
    table = torch.tensor([[[7, 0, 3], [2, 8, -1]]] * 3, device="cuda").int()
    used = torch.tensor([[48, 20], [1, 32], [0, 17]], device="cuda").int()

    def function(q: Any, k: Any, v: Any, used: Any, table: Any) -> Any:
        return OPS.attention_with_kvcache(q, k, v, used, page_table=table, causal=1)

    mapped_as_one_by_one(function, q, k, v, used, table)

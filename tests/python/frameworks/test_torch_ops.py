"""The operators of torch: traced, exported, mapped and counted, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch.ops import KERNELS  # noqa: E402

OPS = torch.ops.dlattn


@pytest.fixture(autouse=True, params=["native", "Python"])
def kernels(request: Any) -> Iterator[None]:
    """The ways to run the operators."""
    if request.param == "native":
        if not KERNELS.native:
            pytest.skip(dlattn.torch.operators()["CPU"])
        yield
        return
    before = dlattn.torch.operators()
    with KERNELS.in_python():
        assert dlattn.torch.operators()["CPU"] == "Python: they were not asked for"
        yield
    assert dlattn.torch.operators() == before


def drawn(*shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(s, generator=generator) + 0.2).to(dtype or torch.float32) for s in shapes]


def inputs(dtype: Any = None) -> list[Any]:
    return drawn((2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8), dtype=dtype)


def swapped(tensors: list[Any]) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


def equal(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0)


EVERY = {
    "causal": 2,
    "scale": 0.3,
    "window_left": 3,
    "window_right": 5,
    "softcap": 2.0,
    "batch_invariant": True,
}


def special() -> dict[str, Any]:
    bias, slopes, sinks = drawn((1, 4, 8, 9), (2, 4), (4,))
    mask = torch.rand(8, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    return {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_operator_is_the_function(dtype: Any) -> None:
    q, k, v = inputs(dtype)
    asked = special() | {"bias": special()["bias"].to(dtype)}
    out, lse = OPS.attention(q, k, v, **EVERY, **asked)
    want = dlattn.attention(
        q,
        k,
        v,
        causal="top_left",
        softmax_scale=0.3,
        window=(3, 5),
        softcap=2.0,
        batch_invariant=True,
        return_lse=True,
        **asked,
    )
    equal((out, lse), want)


def test_the_functions_arguments() -> None:
    q, k, v = inputs()
    for options in (
        {"causal": True},
        {"causal": "bottom_right", "window": (2, None)},
        {"causal": "top_left", "softcap": 1.5, "return_lse": True},
        {"softmax_scale": 0.7, "window": (None, 4), **special()},
    ):
        equal(
            dlattn.torch.attention(q, k, v, **options),
            dlattn.attention(q, k, v, **options),
        )
    equal(
        dlattn.torch.attention(*swapped([q, k, v]), layout="bhsd"),
        dlattn.attention(*swapped([q, k, v]), layout="bhsd"),
    )
    q, k, v = inputs(torch.float16)
    equal(
        dlattn.torch.attention(q, k, v, precision="int8_fp8"),
        dlattn.attention(q, k, v, precision="int8_fp8"),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "middle"}, r"causal is 'middle'; accepted: False, True, "),
        ({"layout": "sbhd"}, r"layout is 'sbhd'; accepted: \"bshd\" or \"bhsd\"$"),
        ({"softcap": -1.0}, r"softcap"),
        ({"precision": "int4"}, r"precision"),
        ({"causal": ["left"]}, r"causal is of type list; accepted: False, True, "),
        ({"window": 5}, r"window is 5; accepted: a pair \(left, right\) of int >= 0 or None$"),
        ({"window": (-1, 0)}, r"window is \(-1, 0\): its left side is negative; accepted: "),
        ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\); accepted: "),
        ({"softcap": "a"}, r"softcap is of type str; accepted: a float$"),
        ({"softmax_scale": [1]}, r"softmax_scale is of type list; accepted: a float$"),
        ({"bias": 3.0}, r"bias is of type float; accepted: a torch.Tensor or None$"),
        ({"q": "a"}, r"q is of type str; accepted: a torch.Tensor$"),
        ({"v": None}, r"v is (None|of type NoneType); accepted: a torch"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dlattn.torch.attention(**{**dict(zip("qkv", inputs(), strict=True)), **options})


def test_wrong_arguments_of_the_operator() -> None:
    with pytest.raises(dlattn.UnsupportedError, match=r"causal is 3; accepted: 0 \(no\)"):
        OPS.attention(*inputs(), causal=3)


@pytest.mark.parametrize(
    "options", [{}, {"causal": 1, "bhsd": True}, EVERY, special()], ids=["", "bhsd", "every", "4"]
)
def test_opcheck(options: dict[str, Any]) -> None:
    tensors = swapped(inputs()) if options.get("bhsd") else inputs()
    torch.library.opcheck(OPS.attention, tuple(tensors), options)
    out = torch.full((*tensors[0].shape[:3], 8), torch.nan)
    torch.library.opcheck(OPS.attention_out, tuple(tensors), {**options, "out": out})


def varlen() -> tuple[Any, ...]:
    q, k, v = drawn((20, 4, 16), (24, 2, 16), (24, 2, 8))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 8, 8, 20], [0, 9, 11, 24])]
    return q, k, v, *starts, 12, 13


def test_varlen() -> None:
    arguments = varlen()
    used = torch.tensor([9, 1, 7], dtype=torch.int32)
    found = OPS.attention_varlen(*arguments, seqused_k=used, causal=1)
    want = dlattn.attention_varlen(*arguments, seqused_k=used, causal=True, return_lse=True)
    equal(found, want)
    out = torch.full_like(found[0], torch.nan)
    lse = OPS.attention_varlen_out(*arguments, seqused_k=used, causal=1, out=out)
    equal((out, lse), want)
    torch.library.opcheck(OPS.attention_varlen, arguments, {"causal": 1})
    torch.library.opcheck(OPS.attention_varlen_out, arguments, {"out": out})


def test_merge_states() -> None:
    q, k, v = inputs()
    parts = [
        dlattn.attention(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(0, 4), slice(4, 9))
    ]
    outs, lses = map(list, zip(*parts, strict=True))
    equal(OPS.merge_states(outs, lses), dlattn.merge_states(outs, lses))
    torch.library.opcheck(OPS.merge_states, (outs, lses))


def test_out_is_written() -> None:
    q, k, v = inputs()
    want, want_lse = dlattn.attention(q, k, v, return_lse=True)
    block = torch.full((2, 8, 4, 16), torch.nan)
    lse = OPS.attention_out(q, k, v, out=block[..., :8])
    equal((block[..., :8], lse), (want, want_lse))
    assert block[..., 8:].isnan().all()


def test_autograd_sees_that_out_is_written() -> None:
    tensors = inputs()
    out = torch.full((2, 8, 4, 8), torch.nan)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        before = out._version
        with mode():
            OPS.attention_out(*tensors, out=out)
        assert out._version == before + 1
    with torch.inference_mode():
        inferred = torch.full_like(out, torch.nan)
        OPS.attention_out(*tensors, out=inferred)
    equal(inferred, out)
    with pytest.raises(dlattn.UnsupportedError):
        OPS.attention_out(*tensors, out=out, softcap=-1.0)
    assert out._version == before + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        out = dlattn.torch.attention(2 * q, k, v, causal=True, window=(4, None))
        return out.transpose(1, 2).contiguous() + 1

    q, k, v = inputs()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))


def test_exported_with_any_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return dlattn.torch.attention(q, k, v, causal=True)

    q, k, v = inputs()
    length = torch.export.Dim("length", min=2, max=100)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({1: length}, None, None))
    longer = drawn((2, 30, 4, 16))[0]
    equal(program.module()(longer, k, v), dlattn.attention(longer, k, v, causal=True))


def test_tracing_tells_what_is_not_a_batch_of_heads() -> None:
    with torch.device("meta"), pytest.raises(dlattn.UnsupportedError, match="q has 3 dimensions"):
        OPS.attention(*(torch.empty(2, 8, 16) for _ in range(3)))


def test_tracing_tells_the_dtype_of_a_result_of_float8() -> None:
    tensors = inputs(torch.float8_e4m3fn)
    packed = [x.flatten(0, 1) for x in tensors]
    lengths = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (8, 9)]
    for operator, given in (
        (OPS.attention, tensors),
        (OPS.attention_varlen, [*packed, *lengths, 8, 9]),
    ):
        real = operator(*given)
        traced = operator(*(x.to("meta") if torch.is_tensor(x) else x for x in given))
        for x, of_meta in zip(real, traced, strict=True):
            assert (x.dtype, x.shape) == (of_meta.dtype, of_meta.shape)


def test_vmap() -> None:
    q, v = drawn((3, 2, 8, 4, 16), (2, 3, 9, 2, 8))
    k = inputs()[1]
    asked = special()
    masks = torch.rand(3, 8, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    slopes = drawn((3, 2, 4))[0]

    def function(q: Any, k: Any, v: Any, mask: Any, slopes: Any, bias: Any) -> Any:
        options = {"mask": mask, "alibi_slopes": slopes, "bias": bias, "sinks": asked["sinks"]}
        return dlattn.torch.attention(q, k, v, return_lse=True, **options)

    mapped = torch.vmap(function, in_dims=(0, None, 1, 0, 0, None))
    found = mapped(q, k, v, masks, slopes, asked["bias"])
    each = [function(q[i], k, v[:, i], masks[i], slopes[i], asked["bias"]) for i in range(3)]
    for part, wanted in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(wanted))
    # Only keys, values and one mask are mapped.
    mapped = torch.vmap(function, in_dims=(None, 0, 1, None, None, None))
    ks, bias = drawn((3, 2, 9, 2, 16))[0], asked["bias"]
    found = mapped(q[0], ks, v, masks[0], slopes[0, 0], bias)
    each = [function(q[0], ks[i], v[:, i], masks[0], slopes[0, 0], bias) for i in range(3)]
    torch.testing.assert_close(found[0], torch.stack([out for out, _ in each]))


def test_vmap_over_sinks_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="sinks: vmap over them"):
        torch.vmap(lambda sinks: dlattn.torch.attention(q, k, v, sinks=sinks))(torch.zeros(3, 4))


def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tensors = inputs()
    with FlopCounterMode(display=False) as counter:
        OPS.attention(*tensors, causal=1)
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 9 * (16 + 8)
    with FlopCounterMode(display=False) as counter:
        OPS.attention(*swapped(tensors), bhsd=True)
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 9 * (16 + 8)


def test_tangents_are_refused() -> None:
    q, k, v = inputs()
    message = "an input has a tangent .*; accepted: tensors without one"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(dlattn.UnsupportedError, match=message):
            OPS.attention(dual, k, v)
        OPS.attention(q, k, v)
    with pytest.raises(dlattn.UnsupportedError, match=message):
        torch.func.jvp(lambda q: OPS.attention(q, k, v)[0], (q,), (q,))


def test_importing_dlattn_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, dlattn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

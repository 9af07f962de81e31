"""torch.autocast: faces of torch cast q, k and v as torch's own attention does, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402

OPS = torch.ops.dlattn
BF16 = torch.bfloat16


def bf16(enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=BF16, enabled=enabled)


def mixed(dtypes: tuple[Any, Any, Any] = (torch.float32, torch.float32, BF16)) -> list[Any]:
    """q and k as rotary tables of float32 leave them, v as a layer under autocast does."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8))
    return [
        (torch.randn(shape, generator=generator) + 0.2).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def of_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (batch, heads, rows, dim) with (batch, rows, heads, dim)."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)
        return out.transpose(1, 2)

    return call


def packed(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    starts = [torch.arange(3, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    tensors = (x.flatten(0, 1) for x in (q, k, v))
    out = OPS.attention_varlen(*tensors, *starts, q.shape[1], k.shape[1], bias=bias)[0]
    return out.unflatten(0, (2, -1))


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        out = function(q, k, v, seqused_k=torch.tensor([11, 11], dtype=torch.int32))
        return out[0] if isinstance(out, tuple) else out

    return call


FACES = {
    "attention": dlattn.torch.attention,
    "operator": lambda *tensors, **options: OPS.attention(*tensors, **options)[0],
    "varlen": packed,
    "kvcache": cached(dlattn.torch.attention_with_kvcache),
    "kvcache operator": cached(OPS.attention_with_kvcache),
    "sdpa": of_heads(dlattn.scaled_dot_product_attention),
}


# A function that is no operator is not compiled.
COMPILED = [(name, False) for name in FACES] + [(name, True) for name in FACES if name != "sdpa"]


@pytest.mark.parametrize(("name", "compiled"), COMPILED)
def test_faces_cast_as_torchs_function(name: str, compiled: bool) -> None:
    face = FACES[name]
    if compiled:
        torch._dynamo.reset()
        face = torch.compile(face, fullgraph=True, backend="aot_eager")
    for dtypes in ((torch.float32, torch.float32, BF16), (torch.float32,) * 3, (BF16,) * 3):
        tensors = mixed(dtypes)
        with bf16():
            want = of_heads(torch.nn.functional.scaled_dot_product_attention)(*tensors)
            found = face(*tensors)
        assert found.dtype == want.dtype == BF16
        assert torch.equal(found, dlattn.attention(*(x.to(BF16) for x in tensors)))
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    with bf16(enabled=False):
        assert face(*mixed((torch.float32,) * 3)).dtype == torch.float32
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FACES)
def test_without_autocast_dtypes_must_agree(name: str) -> None:
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises((dlattn.UnsupportedError, RuntimeError), match="dtype"):
            FACES[name](*mixed())


def test_autocast_of_another_device_casts_nothing() -> None:
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch._C._is_any_autocast_enabled()
        for face in FACES.values():
            assert face(*mixed((torch.float32,) * 3)).dtype == torch.float32
            with pytest.raises(dlattn.UnsupportedError, match="dtype"):
                face(*mixed())
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("name", FACES)
def test_float64_stays(name: str) -> None:
    tensors = mixed((torch.float64,) * 3)
    with bf16():
        found = FACES[name](*tensors)
    assert found.dtype == torch.float64
    assert torch.equal(found, dlattn.attention(*tensors))


@pytest.mark.parametrize("name", ["attention", "operator", "sdpa"])
def test_masks_stay(name: str) -> None:
    mask = torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(1)) > 0.3
    tensors = mixed()
    with bf16():
        found = FACES[name](*tensors, **{"attn_mask" if name == "sdpa" else "mask": mask})
    assert torch.equal(found, dlattn.attention(*(x.to(BF16) for x in tensors), mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("name", ["attention", "operator", "varlen", "sdpa"])
def test_biases(name: str, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(2, 1, 9, 11, generator=generator).to(dtype)
    tensors = mixed()
    with bf16():
        found = FACES[name](*tensors, **{"attn_mask" if name == "sdpa" else "bias": bias})
    bias = bias.to(BF16) if dtype == torch.float16 else bias
    assert torch.equal(found, dlattn.attention(*(x.to(BF16) for x in tensors), bias=bias))


def test_caches_of_8_bits_stay() -> None:
    q, k, v = mixed()
    k, v = ((x.float() * 20).to(torch.int8) for x in (k, v))
    used = torch.tensor([11, 4], dtype=torch.int32)
    scales = {"k_descale": torch.tensor(0.05), "v_descale": torch.tensor(0.05)}
    with bf16():
        found = dlattn.torch.attention_with_kvcache(q, k, v, seqused_k=used, **scales)
    want = dlattn.attention_with_kvcache(q.to(BF16), k, v, seqused_k=used, **scales)
    assert found.dtype == BF16 and torch.equal(found, want)


def test_out_decides_its_dtype_itself() -> None:
    """As functions of torch with out= do."""
    tensors = mixed((torch.float32,) * 3)
    out = torch.full((2, 9, 4, 8), torch.nan)
    with bf16():
        OPS.attention_out(*tensors, out=out)
    assert torch.equal(out, dlattn.attention(*tensors))


def test_other_arrays_under_autocast() -> None:
    q, k, v = (x.transpose(1, 2).numpy() for x in mixed((torch.float32,) * 3))
    with bf16():
        found = dlattn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert found.dtype == q.dtype


def test_flash_faces_cast_nothing() -> None:
    """Nor do the packages whose names they have."""
    import dlattn.flash_attn
    import dlattn.sageattention

    for requires_grad in (False, True):
        q, k, v = (x.requires_grad_(requires_grad) for x in mixed())
        with bf16():
            with pytest.raises(dlattn.UnsupportedError, match="dtype"):
                dlattn.flash_attn.flash_attn_func(q, k, v)
            starts = torch.tensor([0, 9], dtype=torch.int32)
            arguments = (q[0], q[0], q[0], starts, starts, 9, 9)
            for out in (
                dlattn.flash_attn.flash_attn_func(q, q, q),
                dlattn.flash_attn.flash_attn_varlen_func(*arguments),
            ):
                assert out.dtype == q.dtype and out.requires_grad is requires_grad
            assert torch.is_autocast_enabled("cpu")
    with bf16(), pytest.raises(dlattn.UnsupportedError, match="dtype"):
        dlattn.sageattention.sageattn(*mixed(), tensor_layout="NHD")


def test_diffusers() -> None:
    pytest.importorskip("diffusers")
    import dlattn.diffusers
    from dlattn.integrations import diffusers

    tensors = mixed()
    wide = mixed((torch.float32,) * 3)
    bias = torch.randn(2, 1, 9, 11, generator=torch.Generator().manual_seed(1))
    with bf16(), torch.no_grad():
        assert torch.equal(
            diffusers.attend(*tensors, bias),
            dlattn.attention(*(x.to(BF16) for x in tensors), bias=bias),
        )
        assert diffusers.attend(*wide, precision="int8_fp8").dtype == BF16
        compiled = torch.compile(diffusers.attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*wide), dlattn.attention(*(x.to(BF16) for x in wide)))
    with bf16():
        out = diffusers.attend(wide[0].requires_grad_(), *tensors[1:])
    assert out.dtype == BF16
    out.float().sum().backward()
    assert wide[0].grad is not None and wide[0].grad.dtype == torch.float32
    with torch.no_grad(), pytest.raises(dlattn.UnsupportedError, match="dtype"):
        diffusers.attend(*mixed())
    torch._dynamo.reset()

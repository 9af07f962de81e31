"""Tiny random transformers of diffusers with dlattn's backends, against the native one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch  # noqa: E402

import dlattn.diffusers  # noqa: E402
from dlattn.integrations import diffusers as integration  # noqa: E402

DEVICE = "cpu"  # `device` sets it


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the models and their inputs are."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", request.param)


def drawn(*sizes: int, seed: int = 0) -> Any:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def randomize(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * values + (0.5 if parameter.dim() == 1 else 0.0))
    return model.eval().to(DEVICE)


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {
        "hidden_states": drawn(1, 16, 4),
        "encoder_hidden_states": drawn(1, 8, 32, seed=1),
        "pooled_projections": drawn(1, 32, seed=2),
        "timestep": torch.tensor([1.0], device=DEVICE),
        "img_ids": torch.zeros(16, 3, device=DEVICE),
        "txt_ids": torch.zeros(8, 3, device=DEVICE),
    }
    return randomize(model), inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """With a mask of the text's padding."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    mask = torch.ones(2, 7, dtype=torch.long, device=DEVICE)
    mask[0, 4:] = 0
    inputs = {
        "hidden_states": drawn(2, 16, 16),
        "encoder_hidden_states": drawn(2, 7, 16, seed=1),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 0.5], device=DEVICE),
        "img_shapes": [(1, 4, 4)] * 2,
    }
    return randomize(model), inputs


def wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": drawn(1, 4, 2, 8, 8),
        "encoder_hidden_states": drawn(1, 6, 16, seed=1),
        "timestep": torch.tensor([3], device=DEVICE),
    }
    return randomize(model), inputs


def sd3() -> tuple[Any, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    inputs = {
        "hidden_states": drawn(1, 4, 8, 8),
        "encoder_hidden_states": drawn(1, 5, 32, seed=1),
        "pooled_projections": drawn(1, 64, seed=2),
        "timestep": torch.tensor([3], device=DEVICE),
    }
    return randomize(model), inputs


MODELS = {"flux": flux, "qwen_image": qwen_image, "wan": wan}


@pytest.fixture(autouse=True)
def native_again() -> Iterator[None]:
    """A model's backend becomes that of all models without one."""
    yield
    registry = attention_dispatch._AttentionBackendRegistry
    registry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each call of dlattn.attention."""
    seen: list[dict[str, Any]] = []
    attention = dlattn.attention

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return attention(*arguments, **options)

    monkeypatch.setattr(dlattn, "attention", counted)
    return seen


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models(name: str, calls: list[dict[str, Any]]) -> None:
    model, inputs = MODELS[name]()
    want = model(**inputs, return_dict=False)[0]
    assert not calls and want.std() > 0.01
    model.set_attention_backend("dlattn")
    found = model(**inputs, return_dict=False)[0]
    assert calls
    assert any(call["mask"] is not None for call in calls) == (name == "qwen_image")
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    calls.clear()
    model.set_attention_backend("native")
    torch.testing.assert_close(model(**inputs, return_dict=False)[0], want)
    assert not calls


@torch.no_grad()
def test_sd3_calls_torch_itself(calls: list[dict[str, Any]]) -> None:
    """Its attention knows no backends: nothing is changed behind its back."""
    model, inputs = sd3()
    want = model(**inputs, return_dict=False)[0]
    model.set_attention_backend("dlattn")
    torch.testing.assert_close(model(**inputs, return_dict=False)[0], want)


@pytest.mark.parametrize("name", ["dlattn_int8_fp8", "dlattn_int8_fp16", "dlattn_fp8"])
@torch.no_grad()
def test_precisions(name: str, calls: list[dict[str, Any]]) -> None:
    model, inputs = flux()
    model = model.to(torch.bfloat16)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    want = model(**inputs, return_dict=False)[0].double()
    model.set_attention_backend(name)
    found = model(**inputs, return_dict=False)[0].double()
    assert {call["precision"] for call in calls} == {name.removeprefix("dlattn_")}
    error = ((found - want).norm() / want.norm()).item()
    assert 0 < error < 0.05


@torch.no_grad()
def test_compiled_as_one_graph() -> None:
    model, inputs = flux()
    want = model(**inputs, return_dict=False)[0]
    model.set_attention_backend("dlattn")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, return_dict=False)[0], want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mapped_by_torch_func() -> None:
    q, k, v = (drawn(3, 1, 4, 2, 8, seed=n) for n in range(3))
    attend = integration.attend
    want = torch.stack([attend(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), want)


@torch.no_grad()
def test_the_context_manager(calls: list[dict[str, Any]]) -> None:
    q, k, v = (drawn(2, 9, 2, 16, seed=i) for i in range(3))
    want = attention_dispatch.dispatch_attention_fn(q, k, v)
    with attention_dispatch.attention_backend("dlattn"):
        found = attention_dispatch.dispatch_attention_fn(q, k, v)
    assert len(calls) == 1
    torch.testing.assert_close(found, want)


def exact(q: Any, k: Any, v: Any, seen: Any = None, bias: Any = 0.0) -> Any:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[3] ** 0.5 + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())


@torch.no_grad()
def test_masks() -> None:
    q, k, v = drawn(2, 9, 4, 16), drawn(2, 11, 2, 16, seed=1), drawn(2, 11, 2, 16, seed=2)
    keys = torch.ones(2, 11, dtype=torch.bool, device=DEVICE)
    keys[0, 6:] = False
    each = drawn(9, 11) > -0.5
    each[:, 0] = True
    additive = drawn(2, 4, 9, 11)
    cases = (
        (keys, exact(q, k, v, keys[:, None, None])),
        (each, None),
        (additive, exact(q, k, v, bias=additive.double())),
    )
    for mask, want in cases:
        if want is None:  # two dimensions are (batch, seqlen_k): this one needs four
            mask = mask[None, None]
            want = exact(q, k, v, mask)
        found = integration.attend(q, k, v, mask)
        np.testing.assert_allclose(found.cpu(), want.cpu(), rtol=1e-4, atol=1e-5)
    found = integration.attend(q, k[:, :9], v[:, :9], is_causal=True)
    seen = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()
    np.testing.assert_allclose(found.cpu(), exact(q, k[:, :9], v[:, :9], seen).cpu(), atol=1e-5)


def test_training_goes_through_torchs_attention(calls: list[dict[str, Any]]) -> None:
    model, inputs = flux()
    gradients = []
    for name in ("native", "dlattn"):
        model.set_attention_backend(name)
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert not calls
    for found, want in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_of_0_and_below(scale: float) -> None:
    q, k, v = drawn(2, 9, 4, 16), drawn(2, 11, 4, 16, seed=1), drawn(2, 11, 4, 16, seed=2)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*rows, scale=scale).transpose(1, 2)
    torch.testing.assert_close(integration.attend(q, k, v, scale=scale), want)


def test_refusals() -> None:
    q, k, v = (drawn(1, 4, 2, 16, seed=i).to(torch.float16) for i in range(3))
    q.requires_grad_()
    with pytest.raises(ValueError, match="precision 'fp8': with it dlattn has no gradients"):
        integration.attend(q, k, v, precision="fp8")
    with pytest.raises(ValueError, match="return_lse=True: with it dlattn has no gradients"):
        integration.attend(q, k, v, return_lse=True)
    backend = attention_dispatch._AttentionBackendRegistry._backends
    with torch.no_grad(), pytest.raises(NotImplementedError, match="no context parallelism"):
        backend[attention_dispatch.AttentionBackendName("dlattn")](q, k, v, _parallel_config=1)
    wide = drawn(1, 4, 2, 264).half()
    with torch.no_grad(), pytest.raises(dlattn.UnsupportedError, match="head_dim is 264"):
        integration.attend(wide, wide, wide, precision="int8_fp8")


def test_the_names_are_members_as_others() -> None:
    names = attention_dispatch.AttentionBackendName
    for value in dlattn.diffusers.BACKENDS:
        member = names(value)
        assert member is names[value.upper()] and member in list(names) and member == value
        assert integration._member(value) is member
    assert len(list(names)) == len({x.value for x in names})

"""The node for ComfyUI, with stand-ins for ComfyUI's objects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402

PATH = Path(__file__).resolve().parents[3] / "examples/comfyui/__init__.py"
BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 9, 11, 16


@pytest.fixture
def node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("comfyui_dlattn", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Patcher:
    """As far as nodes see of ComfyUI's ModelPatcher."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model_options = options

    def clone(self) -> Patcher:
        return Patcher(self.model_options)


def drawn(dtype: Any = torch.float32) -> list[Any]:
    """(batch, heads, rows, dim)."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(BATCH, HEADS, n, DIM, generator=generator) + 0.2).to(dtype)
        for n in (ROWS, KEYS, KEYS)
    ]


def packed(x: Any) -> Any:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def exact(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 3 else mask
        shown = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if shown else scores + mask
    return scores.softmax(-1) @ v.double()


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("ComfyUI's own attention was called")


def overridden(node: ModuleType, precision: str = "exact") -> Any:
    model = Patcher({"transformer_options": {"other": 1}})
    (patched,) = node.DlattnAttention().patch(model, precision)
    return patched.model_options["transformer_options"]["optimized_attention_override"]


def close(found: Any, want: Any) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def generated(*sizes: int) -> Any:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


MASKS = {
    "none": None,
    "two": generated(ROWS, KEYS) > -1,
    "three": generated(BATCH, ROWS, KEYS) > -1,
    "four": generated(BATCH, 1, ROWS, KEYS) > -1,
    "additive": generated(BATCH, HEADS, ROWS, KEYS),
    "additive, three": generated(1, ROWS, KEYS),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_shapes(node: ModuleType, mask: Any) -> None:
    q, k, v = drawn()
    want = exact(q, k, v, mask)
    override = overridden(node)
    by_head = override(refuse, q, k, v, HEADS, mask=mask, skip_reshape=True)
    close(by_head, packed(want))
    kept = {"skip_reshape": True, "skip_output_reshape": True}
    close(override(refuse, q, k, v, HEADS, mask, **kept), want)
    rows = [packed(x) for x in (q, k, v)]
    close(override(refuse, *rows, HEADS, mask=mask, attn_precision=torch.float32), packed(want))
    close(override(refuse, *rows, HEADS, mask=mask, skip_output_reshape=True), want)


@pytest.mark.parametrize("precision", ["int8_fp8", "int8_fp16", "fp8"])
def test_precisions(node: ModuleType, precision: str) -> None:
    q, k, v = drawn(torch.float16)
    out = overridden(node, precision)(refuse, *map(packed, (q, k, v)), HEADS)
    want = dlattn.attention(q, k, v, precision=precision, layout="bhsd")
    np.testing.assert_array_equal(out, packed(want))


@pytest.mark.parametrize(
    "given", [{"low_precision_attention": False}, {"attn_precision": torch.float32}]
)
@pytest.mark.parametrize("precision", ["int8_fp8", "int8_fp16", "fp8"])
def test_models_that_forbid_low_precision(
    node: ModuleType, precision: str, given: dict[str, Any]
) -> None:
    q, k, v = drawn(torch.float16)
    override = overridden(node, precision)
    want = dlattn.attention(q, k, v, layout="bhsd")
    out = override(refuse, *map(packed, (q, k, v)), HEADS, **given)
    np.testing.assert_array_equal(out, packed(want))
    low = override(refuse, *map(packed, (q, k, v)), HEADS, low_precision_attention=True)
    assert not torch.equal(low, packed(want))


def test_scale_and_grouped_heads(node: ModuleType) -> None:
    q, *_ = drawn()
    q = torch.cat([q, q.flip(2)], 1)  # twice the heads of k and v
    _, k, v = drawn()
    scale = 0.7
    want = exact(q * scale * DIM**0.5, *(x.repeat_interleave(2, 1) for x in (k, v)))
    override = overridden(node)
    options = {"scale": scale, "enable_gqa": True, "transformer_options": {"a": 1}}
    rows = override(refuse, *map(packed, (q, k, v)), 2 * HEADS, **options)
    close(rows, packed(want))
    close(override(refuse, q, k, v, 2 * HEADS, skip_reshape=True, **options), packed(want))
    # Without enable_gqa it is ComfyUI's matter what that is.
    for arrays, form in ((map(packed, (q, k, v)), {}), ((q, k, v), {"skip_reshape": True})):
        assert override(lambda *_, **__: "own", *arrays, 2 * HEADS, **form) == "own"
    odd = [packed(x)[..., :-1] for x in (q, k, v)]
    for grouped in (False, True):
        given = {"enable_gqa": grouped}
        assert override(lambda *_, **__: "own", *odd, 2 * HEADS, **given) == "own"


def test_what_is_not_known_is_comfyuis(node: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = map(packed, drawn())
    seen = []

    def own(*_: Any, **kwargs: Any) -> str:
        seen.append(kwargs["is_causal"])
        return "own"

    override = overridden(node)
    with caplog.at_level("INFO"):
        assert override(own, q, k, v, HEADS, is_causal=True, scale=0.5) == "own"
    assert seen == [True] and "is_causal is given; accepted: " in caplog.messages[0]
    assert override(refuse, q, k, v, HEADS, is_causal=None, _inside_attn_wrapper=True).shape


def test_what_dlattn_refuses_is_comfyuis(
    node: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = map(packed, drawn())
    seen = []

    def own(*arguments: Any, **kwargs: Any) -> str:
        seen.append((arguments, kwargs))
        return "own"

    override = overridden(node, "fp8")  # float32 has no 8-bit products
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert override(own, q, k, v, HEADS, mask=None, transformer_options={"a": 1}) == "own"
    assert len(seen) == 2 and seen[0][0] == (q, k, v, HEADS)
    assert seen[0][1]["transformer_options"] == {"a": 1} and not seen[0][1]["skip_reshape"]
    assert len(caplog.messages) == 1 and "precision is fp8 with q of float32" in caplog.messages[0]
    wrong = torch.ones(BATCH + 1, 1, ROWS, KEYS, dtype=torch.bool)
    assert overridden(node)(own, q, k, v, HEADS, mask=wrong) == "own"


def test_the_model_is_not_changed(node: ModuleType) -> None:
    inner = {"other": 1, "_inside_attn_wrapper": True}
    options = {"transformer_options": inner, "more": 2}
    model = Patcher(options)
    (patched,) = node.DlattnAttention().patch(model, "exact")
    assert model.model_options is options and set(inner) == {"other", "_inside_attn_wrapper"}
    assert patched.model_options["more"] == 2
    assert set(patched.model_options["transformer_options"]) == {
        "other",
        "optimized_attention_override",
    }


def test_what_comfyui_looks_for(node: ModuleType) -> None:
    (name,) = node.NODE_CLASS_MAPPINGS
    assert name in node.NODE_DISPLAY_NAME_MAPPINGS
    required = node.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"]
    assert required["precision"][0] == ["exact", "int8_fp8", "int8_fp16", "fp8"]
    assert hasattr(node.NODE_CLASS_MAPPINGS[name], node.NODE_CLASS_MAPPINGS[name].FUNCTION)

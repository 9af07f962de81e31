"""Models of transformers that pass more to their attention than most, against eager attention."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402, F401
    DECODER,
    SIZES,
    VOCABULARY,
    decoder,
    device,
    on_device,
    randomize,
    tokens,
)

import dlattn.transformers  # noqa: E402
from dlattn.integrations import transformers_arguments as arguments  # noqa: E402
from dlattn.integrations import transformers_flash as flash_face  # noqa: E402


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
    )


def mimo() -> Any:
    """Sinks in its layers with windows, and values narrower than keys."""
    sizes = {**DECODER, "head_dim": 24, "v_head_dim": 16, "sliding_window": 5}
    return transformers.MiMoV2FlashConfig(
        **sizes, moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1
    )


def granite_swa() -> Any:
    return transformers.GraniteSWAConfig(**DECODER, sliding_window=5)


def deepseek() -> Any:
    """An indexer chooses 3 keys for each query."""
    return transformers.DeepseekV32Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        index_topk=3,
        index_head_dim=16,
        index_n_heads=2,
        max_position_embeddings=128,
    )


def gemma4() -> Any:
    """Its last layers share keys, and get the queries alone whose logits are asked for."""
    return transformers.Gemma4TextConfig(
        **{**DECODER, "num_hidden_layers": 4},
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        global_head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def model_of(config: Callable[[], Any], implementation: str) -> Any:
    try:
        made = config()
    except AttributeError as error:
        pytest.skip(f"this transformers has no such model: {error}")
    return randomize(
        transformers.AutoModelForCausalLM.from_config(made, attn_implementation=implementation)
    )


@pytest.mark.parametrize("config", [gpt_oss, mimo, granite_swa])
@pytest.mark.parametrize("name", ["dlattn", "dlattn_flash", "dlattn_flash2"])
@torch.no_grad()
def test_models_that_list_their_flash_implementations(config: Any, name: str) -> None:
    """transformers would take a kernel of the hub for a name that is not in the list."""
    model = model_of(config, name)
    assert model.config._attn_implementation == name
    ids, mask = tokens()
    want = model_of(config, "eager")(input_ids=ids, attention_mask=mask).logits
    found = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], want[mask == 1], rtol=1e-4, atol=1e-4)
    assert want.std() > 0.1
    other = model_of(config, "eager")
    other.set_attn_implementation(name)
    assert other.config._attn_implementation == name


@pytest.mark.parametrize("name", ["dlattn_flash", "dlattn_flash2"])
def test_models_without_flash_attention(name: str) -> None:
    """T5 has biases, which flash attention would leave out in silence."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4
    )
    message = f'attn_implementation is "{name}", and T5.* does not support flash attention'
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=name)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="dlattn")
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_keys_that_an_indexer_chose(static: bool) -> None:
    eager, model = (model_of(deepseek, name) for name in ("eager", "dlattn"))
    ids = tokens()[0][1:]
    want = eager(input_ids=ids).logits
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
    options = {"cache_implementation": "static", "disable_compile": True} if static else {}
    found, tokens_of_eager = (
        x.generate(ids, max_new_tokens=6, do_sample=False, **options) for x in (model, eager)
    )
    assert torch.equal(found, tokens_of_eager)


def test_masks_of_an_indexer() -> None:
    key = torch.zeros(1, 1, 5, 8)
    indices = torch.tensor([[[0, 2], [4, 4]]], dtype=torch.int32)
    mask = torch.tensor([[True, True, True, False, False], [False, True, True, True, True]])
    want = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]])
    assert torch.equal(arguments.chosen(mask[None, None], indices, key), want[None, None])
    additive = torch.randn(1, 1, 2, 5)
    found = arguments.chosen(additive, indices, key)
    seen = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]])
    assert torch.equal(found, additive.masked_fill(~seen, -torch.inf))
    with pytest.raises(ValueError, match="attention_mask is None, and the model passes keys"):
        arguments.chosen(None, indices, key)


@pytest.mark.parametrize("kept", [0, 1, 3])
@torch.no_grad()
def test_queries_that_later_layers_drop(kept: int) -> None:
    ids = tokens()[0][1:]
    eager, model = (model_of(gemma4, name) for name in ("eager", "dlattn"))
    found, want = (
        x(input_ids=ids, logits_to_keep=kept, use_cache=True).logits for x in (model, eager)
    )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    parameters = inspect.signature(model.model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    found = model(input_ids=ids, logits_to_keep=kept, **{name: cache}).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dlattn", "dlattn_flash"])
@torch.no_grad()
def test_attention_weights_are_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under "sdpa" there are none, and a warning says so."""
    said: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, text, *_: said.append(text))
    model = decoder("llama", name)
    model(input_ids=tokens()[0][1:])
    assert not any("output_attentions" in text for text in said)
    out = model(input_ids=tokens()[0][1:], output_attentions=True)
    assert not any(x is not None for x in out.attentions)
    assert any("does not support `output_attentions=True`" in text for text in said)


@pytest.mark.parametrize("option", ["block_indices", "sinks", "indices", "position_bias"])
def test_what_is_not_computed_is_refused(option: str) -> None:
    q = torch.randn(1, 4, 3, 16)
    module = torch.nn.Module()
    given = {option: torch.zeros(1, 4, 3, 3)}
    if option in ("block_indices", "sinks"):
        with pytest.raises(ValueError, match=f'{option}: .*"dlattn" does not compute; accepted: '):
            dlattn.transformers.attention_forward(module, q, q, q, None, **given)
    with pytest.raises(
        ValueError, match=f'{option}: .*"dlattn_flash" does not compute; accepted: '
    ):
        flash_face._flash_forward(module, q, q, q, None, **given)
    nothing = {option: None}
    dlattn.transformers.attention_forward(module, q, q, q, None, **nothing)

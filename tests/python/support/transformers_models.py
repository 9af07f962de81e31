"""Tiny random models of transformers, and what they call of dlattn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import dlattn.transformers
from dlattn.integrations import transformers_flash
from dlattn.integrations.torch import _functions

VOCABULARY = 97
DEVICE = "cpu"  # `on_device` sets it


def device() -> str:
    """Where models and their inputs are."""
    return DEVICE


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on each device. Modules that import this have it for all their tests."""
    global DEVICE
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    DEVICE = request.param
    yield
    DEVICE = "cpu"


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "max_position_embeddings": 128,
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **DECODER, sliding_window=5, query_pre_attn_scalar=16
    ),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=5),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{k: v for k, v in DECODER.items() if k != "head_dim"}, sliding_window=5
    ),
}

# Left padding in the first of two sequences.
IDS = [[0, 0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10]]


def tokens() -> tuple[Any, Any]:
    ids = torch.tensor(IDS, device=device())
    return ids, (ids != 0).long()


def randomize(model: Any) -> Any:
    """Weights large enough that attention is not flat, the same for the same configuration."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * values + (0.5 if parameter.dim() == 1 else 0.0))
    return model.eval().to(device())


def decoder(name: str, implementation: str, dtype: Any = None) -> Any:
    config = DECODERS[name]()
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    return randomize(model).to(dtype or torch.float32)


class Calls:
    """Counts the calls of dlattn's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[dict[str, Any]] = []
        attention, cached = dlattn.attention, dlattn.attention_with_kvcache
        varlen = transformers_flash.flash_attn.flash_attn_varlen_func

        def counted(*arguments: Any, **options: Any) -> Any:
            self.seen.append({"k": arguments[1], **options})
            return attention(*arguments, **options)

        def counted_cached(*arguments: Any, **options: Any) -> Any:
            self.seen.append({"k": arguments[1], **options})
            return cached(*arguments, **options)

        def counted_varlen(*arguments: Any, **options: Any) -> Any:
            self.seen.append({"varlen": True, **options})
            return varlen(*arguments, **options)

        operator = _functions.attention

        def counted_operator(*arguments: Any, **options: Any) -> Any:
            self.seen.append({"k": arguments[1], **options})
            return operator(*arguments, **options)

        monkeypatch.setattr(dlattn, "attention", counted)
        monkeypatch.setattr(_functions, "attention", counted_operator)
        monkeypatch.setattr(dlattn, "attention_with_kvcache", counted_cached)
        monkeypatch.setattr(transformers_flash.flash_attn, "attention", counted, raising=False)
        monkeypatch.setattr(transformers_flash.flash_attn, "flash_attn_varlen_func", counted_varlen)


def generate(model: Any, **options: Any) -> Any:
    ids, mask = tokens()
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options
    )

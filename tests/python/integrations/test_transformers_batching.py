"""Continuous batching of transformers: prompts and decoding steps over a cache in pages."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
# As docs/transformers.md says; before 5.18 pages had another name.
transformers = pytest.importorskip("transformers", minversion="5.20")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")

from transformers_models import (  # noqa: E402, F401
    DECODERS,
    decoder,
    device,
    on_device,
)

import dlattn.transformers  # noqa: E402
from dlattn.integrations import transformers_flash as flash_face  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10], [11, 12], [13] * 7]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let transformers pass its pages on a CPU too, where it would gather keys; what it passed."""
    seen: list[Any] = []
    attend = flash_face.flash_attn.flash_attn_with_kvcache

    def counted(q: Any, k_cache: Any, v_cache: Any, *arguments: Any, **options: Any) -> Any:
        seen.append((q.shape, k_cache.shape, options))
        return attend(q, k_cache, v_cache, *arguments, **options)

    monkeypatch.setattr(flash_face.flash_attn, "flash_attn_with_kvcache", counted)
    if device() == "cpu":
        name = "ensure_decode_fast_path_is_available"
        monkeypatch.setattr(initialization, name, lambda *_, **__: None)
    return seen


def one_by_one(name: str, new_tokens: int) -> list[list[int]]:
    """The tokens that eager attention generates of each prompt alone."""
    model = decoder(name, "eager")
    outs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device())
        out = model.generate(input_ids=ids, max_new_tokens=new_tokens, do_sample=False)
        outs.append(out[0, len(prompt) :].tolist())
    return outs


def batched(model: Any, new_tokens: int, **options: Any) -> list[list[int]]:
    config = transformers.ContinuousBatchingConfig(
        page_size=4, num_blocks=256, max_batch_tokens=64, use_cuda_graph=False, **options
    )
    outs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=96, pad_token_id=0
        ),
        continuous_batching_config=config,
        progress_bar=False,
    )
    found = [outs[key] for key in sorted(outs, key=lambda key: int(key.rsplit("_", 1)[-1]))]
    assert all(out.error is None for out in found)
    return [out.generated_tokens for out in found]


@pytest.mark.parametrize("name", DECODERS)
def test_batches_give_the_tokens_of_each_prompt_alone(name: str, pages: list[Any]) -> None:
    found = batched(decoder(name, "dlattn"), 8)
    assert found == one_by_one(name, 8)
    windows = getattr(DECODERS[name](), "sliding_window", None)
    if not windows or name == "qwen3":
        assert pages and all(options["causal"] for *_, options in pages)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_batches_without_pages(name: str) -> None:
    """The ways of transformers with prompts, on CPUs and for windows: it gathers keys for each."""
    assert batched(decoder(name, "dlattn"), 4, max_blocks_per_request=0) == one_by_one(name, 4)


@pytest.mark.parametrize("given", ["dlattn", "paged|dlattn", "dlattn_flash"])
@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")
def test_names(given: str, pages: list[Any]) -> None:
    model = decoder("llama", given)
    before = model.config._attn_implementation
    assert before == given.removeprefix("paged|")
    assert batched(model, 3) == one_by_one("llama", 3)
    assert pages
    assert model.config._attn_implementation == before


def test_sinks_and_windows_reach_the_cache(pages: list[Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, h, 16, generator=generator).to(device()) for h in (4, 2, 2))
    pool = torch.randn(6, 4, 2, 16, generator=generator).to(device())
    sinks = torch.tensor([0.5, -0.5, 1.0, 0.0], device=device(), dtype=torch.bfloat16)
    table = torch.tensor([[4, 0], [2, -1]], dtype=torch.int32, device=device())
    lengths = torch.tensor([5, 1], dtype=torch.int32, device=device())
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (2, 2), "softcap": 2.0}
    found = flash_face._flash_attn_with_kvcache(
        q, pool[:-1], pool[1:], k, v, lengths, table, s_aux=sinks, **options
    )
    for b in range(2):
        used = int(lengths[b]) + 1
        rows = [int(table[b, j // 4]) * 4 + j % 4 for j in range(used)]
        keys, values = (x.flatten(0, 1)[rows][None] for x in (pool[:-1], pool[1:]))
        want = dlattn.attention(
            q[b : b + 1],
            keys,
            values,
            softmax_scale=0.3,
            causal=True,
            window=(2, 0),
            softcap=2.0,
            sinks=sinks.float(),
        )
        torch.testing.assert_close(keys[0, -1], k[b, 0])
        torch.testing.assert_close(found[b : b + 1], want, rtol=1e-5, atol=1e-5)


def test_registering_again_changes_nothing() -> None:
    manager = transformers.generation.continuous_batching.ContinuousBatchingManager
    before = manager.switch_to_cb_friendly_attn
    flash_face.register()
    assert manager.switch_to_cb_friendly_attn is before


def test_other_names_are_switched_as_before() -> None:
    model = decoder("llama", "eager")
    batched(model, 2, auto_switch_to_flash=False)
    assert model.config._attn_implementation == "eager"

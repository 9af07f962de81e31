"""Tiny random models of transformers with dlattn's attention, against their own eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402, F401
    DECODER,
    DECODERS,
    IDS,
    SIZES,
    VOCABULARY,
    Calls,
    decoder,
    device,
    generate,
    on_device,
    randomize,
    tokens,
)

import dlattn.transformers  # noqa: E402
from dlattn.integrations import transformers as integration  # noqa: E402
from dlattn.integrations import transformers_flash as flash_face  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def forgotten_graphs() -> None:
    """Other tests compile the same code too, and torch keeps a limited number of its graphs."""
    torch._dynamo.reset()


fresh_compiler = pytest.mark.usefixtures("forgotten_graphs")


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_logits_of_a_padded_batch(name: str, calls: Calls) -> None:
    ids, mask = tokens()
    want = decoder(name, "eager")(input_ids=ids, attention_mask=mask).logits
    found = decoder(name, "dlattn")(input_ids=ids, attention_mask=mask).logits
    assert len(calls.seen) == 2
    torch.testing.assert_close(found[mask == 1], want[mask == 1], rtol=1e-4, atol=1e-4)
    assert want.std() > 0.1
    # Keys of shared heads are not repeated.
    assert all(call["k"].shape[2] == 2 for call in calls.seen)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_logits_without_padding(name: str, calls: Calls) -> None:
    ids = tokens()[0][1:]
    want = decoder(name, "eager")(input_ids=ids).logits
    found = decoder(name, "dlattn")(input_ids=ids).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    # Causal layers need no mask, those with a window that is shorter than the batch do.
    windows = getattr(DECODERS[name](), "sliding_window", None)
    assert any(call["mask"] is None for call in calls.seen) or windows


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens(name: str, cache: str, calls: Calls) -> None:
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    if cache == "static":
        options["disable_compile"] = True
    want = generate(decoder(name, "eager"), **options)
    found = generate(decoder(name, "dlattn"), **options)
    assert calls.seen
    assert torch.equal(found, want)
    assert len(torch.unique(want[:, len(IDS[0]) :])) > 1


@torch.no_grad()
def test_an_empty_static_cache_is_longer_than_the_queries(calls: Calls) -> None:
    model = decoder("llama", "dlattn")
    ids = tokens()[0][1:]
    want = decoder("llama", "eager")(input_ids=ids).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    found = model(input_ids=ids, past_key_values=cache).logits
    assert calls.seen[0]["k"].shape[1] == 32 and calls.seen[0]["mask"] is None
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@fresh_compiler
@torch.no_grad()
def test_compiled_as_one_graph() -> None:
    model = decoder("gemma2", "dlattn")
    ids, mask = tokens()
    want = model(input_ids=ids, attention_mask=mask).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], want[mask == 1], rtol=1e-4, atol=1e-4)


@fresh_compiler
def test_compiled_decoding() -> None:
    """A static cache, whose decoding steps transformers compiles where it can."""
    ids, mask = tokens()
    model = decoder("llama", "dlattn")
    want = generate(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        found = [out.logits[:, -1:].argmax(-1)]
        while len(found) < 4:  # each step has a mask of its own length, and is compiled anew
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = mask.sum(1, keepdim=True) - 1
            out = step(
                input_ids=found[-1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            )
            found.append(out.logits[:, -1:].argmax(-1))
    # Tokens behind the end of a sequence are padding.
    want = want[:, ids.shape[1] :][:, : len(found)]
    assert torch.equal(torch.cat(found, 1)[:, : want.shape[1]][want != 0], want[want != 0])


@torch.no_grad()
def test_a_chunk_behind_a_cache() -> None:
    ids = tokens()[0][1:]
    models = [decoder("llama", name) for name in ("eager", "dlattn")]
    logits = []
    for model in models:
        first = model(input_ids=ids[:, :5], use_cache=True)
        second = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values)
        logits.append(second.logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bert(calls: Calls) -> None:
    ids, mask = tokens()
    outs = []
    for name in ("eager", "dlattn"):
        config = transformers.BertConfig(**SIZES, max_position_embeddings=64)
        config._attn_implementation = name
        outs.append(randomize(transformers.BertModel(config))(ids, attention_mask=mask)[0])
    assert len(calls.seen) == 2
    torch.testing.assert_close(outs[1][mask == 1], outs[0][mask == 1], rtol=1e-4, atol=1e-4)


def test_t5(calls: Calls) -> None:
    """Biases by position, an encoder's padding, and the cross-attention of a decoder."""
    ids, mask = tokens()
    outs = []
    for name in ("eager", "dlattn"):
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=name)
        model = randomize(model)
        outs.append(
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        )
    assert any(call["bias"] is not None for call in calls.seen)
    assert torch.equal(outs[0], outs[1])


@torch.no_grad()
def test_vit(calls: Calls) -> None:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device())
    outs = []
    for name in ("eager", "dlattn"):
        sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        config._attn_implementation = name
        outs.append(randomize(transformers.ViTModel(config))(pixels)[0])
    assert len(calls.seen) == 2 and not calls.seen[0]["causal"]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


def test_whisper(calls: Calls) -> None:
    features = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(1)).to(device())
    outs = []
    for name in ("eager", "dlattn"):
        config = transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_source_positions=30,
            max_target_positions=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=96,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        config._attn_implementation = name
        model = randomize(transformers.WhisperForConditionalGeneration(config))
        start = torch.tensor([[1, 5, 9], [1, 6, 3]], device=device())
        with torch.no_grad():
            outs.append(model(input_features=features, decoder_input_ids=start).logits)
    assert calls.seen
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


def qwen2_vl(name: str) -> Any:
    text = {**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    text.pop("head_dim")
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "in_channels": 3,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=90, vision_start_token_id=91
    )
    config._attn_implementation = name
    return randomize(transformers.Qwen2VLForConditionalGeneration(config))


@pytest.mark.parametrize("name", ["dlattn", "dlattn_flash"])
@torch.no_grad()
def test_qwen2_vl(name: str, calls: Calls) -> None:
    """Two images of different sizes in one packed sequence of patches."""
    grid = torch.tensor([[1, 4, 4], [1, 2, 6]], device=device())
    patches = int(grid.prod(1).sum())
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(patches, 48, generator=generator).to(device())
    outs = [
        model.model.visual(pixels, grid_thw=grid) for model in (qwen2_vl("eager"), qwen2_vl(name))
    ]
    want, found = (x if isinstance(x, torch.Tensor) else x[0] for x in outs)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    # By lengths the images are one call a layer; without, one each.
    assert len(calls.seen) == (4 if name == "dlattn" else 2)


@pytest.mark.parametrize("name", DECODERS)
def test_the_flash_face(name: str, calls: Calls) -> None:
    want = generate(decoder(name, "eager"))
    found = generate(decoder(name, "dlattn_flash"))
    assert any("varlen" in call for call in calls.seen)  # the padded batch
    assert torch.equal(found, want)


@torch.no_grad()
def test_packed_sequences() -> None:
    """Several sequences in one row, told apart by their positions."""
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11]], device=device())
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=device())
    eager = decoder("llama", "eager")
    want = torch.cat([eager(ids[:, :4]).logits, eager(ids[:, 4:]).logits], 1)
    for name in ("dlattn", "dlattn_flash"):
        model = decoder("llama", name)
        found = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def labels_of(ids: Any, mask: Any) -> Any:
    """Mask tokens behind a token: conventions differ about the contents of a row of padding."""
    if mask is None:
        return ids
    return ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)


def gradients(model: Any, ids: Any, mask: Any = None) -> dict[str, Any]:
    labels = labels_of(ids, mask)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys() and found
    for name in found:
        torch.testing.assert_close(found[name], want[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_training(name: str, padded: bool, calls: Calls) -> None:
    """By torch's attention where that has all that the model asks for."""
    ids, mask = tokens()
    if not padded:
        ids, mask = ids.clamp(min=2), None
    want, found = (
        gradients(decoder(name, implementation).train(), ids, mask)
        for implementation in ("eager", "dlattn")
    )
    assert len(calls.seen) == (2 if name in ("gemma2", "gpt_oss") else 0)
    assert_same(found, want)
    assert ("model.layers.0.self_attn.sinks" in found) == (name == "gpt_oss")
    assert all(x.abs().max() > 0 for key, x in found.items() if "attn" in key)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_training_with_checkpoints(name: str) -> None:
    """A model of which not all is trained."""
    ids, mask = tokens()
    models = [decoder(name, implementation).train() for implementation in ("eager", "dlattn")]
    for model in models:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in key)
    checkpointing = "activation_checkpointing_enable"  # its name since transformers 5.24
    getattr(models[1], checkpointing, models[1].gradient_checkpointing_enable)()
    want, found = (gradients(model, ids, mask) for model in models)
    assert_same(found, want)
    assert len(found) == 2 * (2 if name == "gpt_oss" else 1)  # and their biases


@fresh_compiler
def test_compiled_training() -> None:
    ids, mask = tokens()
    want = gradients(decoder("gemma2", "dlattn").train(), ids, mask)
    model = decoder("gemma2", "dlattn").train()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    labels = labels_of(ids, mask)
    step(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert_same({key: p.grad for key, p in model.named_parameters()}, want)


@pytest.mark.parametrize(("name", "argument"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_dropout_with_what_torch_lacks_is_refused(name: str, argument: str) -> None:
    ids, mask = tokens()
    model = decoder(name, "dlattn").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    words = rf"^dropout is 0\.1, with {argument}, for which neither .*accepted: 0\.0"
    with pytest.raises(ValueError, match=words):
        model(input_ids=ids, attention_mask=mask, labels=ids)


def test_a_softcap_of_zero_is_none(calls: Calls) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, device=device(), requires_grad=True) for _ in range(3))
    layer = torch.nn.Module()
    for dropout in (0.0, 0.5):
        out, _ = integration.attention_forward(layer, q, k, v, None, dropout, softcap=0.0)
        assert out.requires_grad
    assert not calls.seen


@torch.no_grad()
def test_mapped_by_torch_func() -> None:
    q, k, v = (torch.randn(3, 1, 2, 4, 8, device=device()) for _ in range(3))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return integration.attention_forward(torch.nn.Module(), q, k, v, None)[0]

    want = torch.stack([attend(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), want)


@torch.no_grad()
def test_additive_masks_and_sixteen_bits() -> None:
    """A mask of four dimensions that the caller made, as numbers, in the model's dtype."""
    ids, _ = tokens()
    length = ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=device()).tril()
    seen[5, 2] = False
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        additive = torch.zeros(2, 1, length, length, dtype=dtype, device=device())
        additive.masked_fill_(~seen, torch.finfo(dtype).min)
        outs = [
            decoder("llama", name, dtype)(input_ids=ids, attention_mask=additive).logits
            for name in ("eager", "dlattn")
        ]
        torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_of_0_and_below(scale: float) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16, device=device())
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, None, scaling=scale)
    hidden = torch.ones(9, 9, dtype=torch.bool, device=device()).triu(1)
    scores = (scale * q @ k.mT).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(1, 2))


@torch.no_grad()
def test_what_dlattn_refuses_is_told() -> None:
    q = torch.zeros(1, 2, 4, 300, device=device(), dtype=torch.int32)
    with pytest.raises(dlattn.UnsupportedError, match="accepted"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None)


def test_registering_again_changes_nothing() -> None:
    before = transformers.modeling_flash_attention_utils._lazy_imports
    flash_face.register()
    assert transformers.modeling_flash_attention_utils._lazy_imports is before
    assert transformers.AttentionInterface()["dlattn"] is dlattn.transformers.attention_forward


def test_other_flash_names_are_looked_up_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"flash_attn|kernels|flash"):
        transformers.modeling_flash_attention_utils._lazy_imports("flash_attention_3")


def test_masks_are_those_of_sdpa() -> None:
    asked = {"batch_size": 2, "q_length": 4, "kv_length": 6, "q_offset": 2}
    config = copy.deepcopy(DECODERS["llama"]())
    found = dlattn.transformers.attention_mask(**asked, config=config, dtype=torch.float32)
    assert found.dtype == torch.bool and found.shape == (2, 1, 4, 6)


AUTOCAST = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss")


def under_autocast(name: str, implementation: str, *, train: bool) -> tuple[Any, list[Any]]:
    """Logits of a float32 model under autocast, and gradients in training."""
    model = decoder(name, implementation).train(train)
    ids = tokens()[0][1:]
    with torch.set_grad_enabled(train), torch.autocast(device(), dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits
    if not train:
        return logits, []
    logits.float().square().mean().backward()
    return logits, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str, train: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k are float32 there, from rotary tables and norms, and v is bfloat16."""
    # All experts of each token: which one of two is chosen may depend on the last bit.
    sizes = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 5}
    monkeypatch.setitem(DECODERS, "gpt_oss", lambda: transformers.GptOssConfig(**sizes))
    want, want_gradients = under_autocast(name, "eager", train=train)
    found, gradients = under_autocast(name, "dlattn", train=train)
    assert calls.seen or train
    assert all(call["k"].dtype == torch.bfloat16 for call in calls.seen)
    assert found.dtype == want.dtype
    difference = (found - want).float().norm() / want.float().norm()
    assert difference < 0.03
    for x, y in zip(gradients, want_gradients, strict=True):
        assert (x - y).norm() <= 0.06 * y.norm() + 1e-6


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize(
    ("implementation", "options"), [("dlattn", {}), ("dlattn_flash", {}), ("dlattn", STATIC)]
)
def test_decoding_under_autocast(
    implementation: str, options: dict[str, Any], calls: Calls
) -> None:
    """Caches of both dtypes, dynamic and static."""
    with torch.autocast(device(), dtype=torch.bfloat16):
        try:
            generate(decoder("llama", "eager"), **options)
        except RuntimeError as error:  # an older transformers
            pytest.skip(f"its own attention cannot: {error}")
        generate(decoder("llama", implementation), **options)
    assert calls.seen
    assert any("leftpad_k" in call for call in calls.seen) == bool(options)


@fresh_compiler
@torch.no_grad()
def test_compiled_under_autocast() -> None:
    model = decoder("qwen3", "dlattn")
    ids = tokens()[0][1:]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast(device(), dtype=torch.bfloat16):
        want = model(input_ids=ids).logits
        found = compiled(input_ids=ids).logits
    torch.testing.assert_close(found, want, rtol=3e-2, atol=3e-2)


def test_dtypes_that_differ_are_refused_without_autocast() -> None:
    q = torch.randn(1, 4, 3, 16, device=device())
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(dlattn.UnsupportedError, match="dtype"):
            dlattn.transformers.attention_forward(torch.nn.Module(), q, q, q.to(dtype), None)

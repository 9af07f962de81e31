"""Decoding with static caches of transformers: the keys in use are read, and no mask."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.comptime import comptime  # noqa: E402
from transformers_models import (  # noqa: E402, F401
    DECODERS,
    Calls,
    decoder,
    device,
    generate,
    on_device,
    tokens,
)

import dlattn.transformers  # noqa: E402
from dlattn.integrations import transformers_ranges as ranges  # noqa: E402
from dlattn.integrations.torch import _functions  # noqa: E402

CONFIG = DECODERS["llama"]()
STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.fixture
def every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compared in float32, whose caches are given as ranges on a CPU alone."""
    monkeypatch.setattr(ranges, "reads_caches", lambda *_: True)


@pytest.fixture
def calls(every_cache: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def steps(calls: Calls) -> list[dict[str, Any]]:
    """The calls of decoding: one query, a cache, ranges."""
    return [call for call in calls.seen if "seqused_k" in call]


@pytest.mark.parametrize("name", DECODERS)
def test_steps_read_the_keys_in_use(name: str, calls: Calls) -> None:
    """Left padding in one of two sequences, windows of 5 in some layers of most models."""
    want = generate(decoder(name, "eager"), **STATIC)
    found = generate(decoder(name, "dlattn"), **STATIC)
    assert torch.equal(found, want)
    generated = want.shape[1] - tokens()[0].shape[1]
    assert len(steps(calls)) == 2 * (generated - 1)  # of two layers; the prompt is none
    for call in steps(calls):
        assert call.get("mask") is None
        assert call["seqused_k"].dtype == torch.int32 and call["seqused_k"].is_contiguous()
        assert (call["leftpad_k"] < call["seqused_k"]).all()
    if name == "llama":
        assert [int(call["seqused_k"].max()) for call in steps(calls)[::2]] == list(
            range(9, 9 + generated - 1)
        )
        assert all(call["leftpad_k"].tolist() == [3, 0] for call in steps(calls))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_what_lies_behind_the_keys_is_not_read(
    name: str, every_cache: None, monkeypatch: Any
) -> None:
    """NaN in all of a full layer's cache that no key has been written to."""
    want = generate(decoder(name, "dlattn"), **STATIC)
    attend, poisoned = dlattn.attention_with_kvcache, []

    def poison(q: Any, k: Any, v: Any, **options: Any) -> Any:
        end = int(options["seqused_k"].max())
        if end < k.shape[1]:
            poisoned.append(end)
            k[:, end:], v[:, end:] = float("nan"), float("nan")
        return attend(q, k, v, **options)

    monkeypatch.setattr(dlattn, "attention_with_kvcache", poison)
    found = generate(decoder(name, "dlattn"), **STATIC)
    assert poisoned
    assert torch.equal(found, want)


MASKED: list[bool] = []  # of each call that torch traced, whether it has a mask


def note_of_a_trace(context: Any) -> None:
    """Runs while torch traces: a list that traced code appends to makes it compile each step."""
    MASKED.append(context.get_local("masked").as_python_constant())


# torch takes seconds to compile a model.
@pytest.mark.parametrize(
    "name", [*(pytest.param(x, marks=pytest.mark.nightly) for x in ("llama", "gemma2")), "gpt_oss"]
)
def test_steps_compiled_as_one_graph(name: str, every_cache: None, monkeypatch: Any) -> None:
    """As generate compiles them: with masks that it makes outside of the graph of a step."""
    torch._dynamo.reset()
    MASKED.clear()
    operator = _functions.attention_with_kvcache

    def counted(*arguments: Any, **options: Any) -> Any:
        masked = "mask" in options  # noqa: F841, which the note reads
        comptime(note_of_a_trace)
        return operator(*arguments, **options)

    monkeypatch.setattr(_functions, "attention_with_kvcache", counted)
    want = generate(decoder(name, "eager"))
    compiling = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    found = generate(
        decoder(name, "dlattn"), cache_implementation="static", compile_config=compiling
    )
    assert torch.equal(found, want)
    assert len(MASKED) >= 2 and not any(MASKED)
    torch._dynamo.reset()


def asked(mask: Any, **options: Any) -> Any:
    """The mask of a step at position 4 of a static cache of 8 keys."""
    given = {
        "batch_size": 2,
        "q_length": 1,
        "kv_length": 8,
        "q_offset": 4,
        "attention_mask": mask,
        "allow_is_causal_skip": False,
        "config": CONFIG,
        "device": device(),
    }
    return dlattn.transformers.attention_mask(**(given | options))


def rows(*values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.bool, device=device())


def test_ranges_of_a_step() -> None:
    found = asked(rows([1, 1, 1, 1, 1], [0, 0, 1, 1, 1]))
    assert found.shape == (2, 2, 1, 1)
    assert found[:, :, 0, 0].tolist() == [[0, 2], [5, 5]]
    masks = ranges.mask_of(found, 8)
    assert torch.equal(
        masks,
        ranges.sdpa_mask(
            2,
            1,
            8,
            4,
            attention_mask=rows([1, 1, 1, 1, 1], [0, 0, 1, 1, 1]),
            allow_is_causal_skip=False,
            device=device(),
        ),
    )
    assert asked(None)[:, :, 0, 0].tolist() == [[0, 0], [5, 5]]
    # A sequence of padding alone sees nothing.
    found = asked(rows([0, 0, 0, 0, 0], [0, 0, 0, 0, 1]))
    assert found[1, :, 0, 0].tolist() == [0, 5] and found[0, 1] == 4


def test_what_stays_a_mask() -> None:
    """Holes, several queries, caches that grow, layers that read the mask themselves, tracing."""
    holes = asked(rows([1, 1, 1, 1, 1], [1, 0, 0, 1, 1]))
    assert holes.dtype == torch.bool and holes.shape == (2, 1, 1, 8)
    whole = rows([0, 1, 1, 1, 1], [1, 1, 1, 1, 1])
    assert asked(whole, q_length=2).dtype == torch.bool
    assert asked(whole, kv_length=5, allow_is_causal_skip=True).dtype == torch.bool
    assert asked(whole, allow_is_bidirectional_skip=True).dtype == torch.bool
    config = DECODERS["llama"]()
    config.index_topk = 4
    assert asked(whole, config=config).dtype == torch.bool
    traced = torch.compile(asked, fullgraph=True, backend="eager")
    assert traced(whole).dtype == torch.bool


@pytest.mark.parametrize("padding", ["left", "inner"])
def test_padding_between_tokens_is_masked(padding: str, calls: Calls) -> None:
    """Padding on the right of a prompt has tokens on both sides, once the prompt goes on."""
    ids, mask = tokens()
    if padding == "inner":
        mask = mask.clone()
        mask[0], mask[0, 4:6] = 1, 0
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    outs = [decoder("llama", name).generate(**options, **STATIC) for name in ("eager", "dlattn")]
    assert torch.equal(outs[0], outs[1])
    assert bool(steps(calls)) == (padding == "left")


@torch.no_grad()
@pytest.mark.parametrize("why", ["position_bias", "gradients", "no kernel"])
def test_ranges_become_a_mask_where_a_cache_is_not_read(why: str, monkeypatch: Any) -> None:
    layer, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=generator).to(device())
               for h, n in ((4, 1), (2, 8), (2, 8)))  # fmt: skip
    layer.num_key_value_groups = 2
    given = asked(rows([1, 1, 1, 1, 1], [0, 0, 1, 1, 1]))
    mask, options = ranges.mask_of(given, 8), {}
    if why == "position_bias":
        options["position_bias"] = torch.randn(1, 4, 1, 8, generator=generator).to(device())
    want, _ = dlattn.transformers.attention_forward(layer, q, k, v, mask, **options)
    if why == "no kernel":
        monkeypatch.setattr(ranges, "reads_caches", lambda *_: False)
    monkeypatch.setattr(dlattn, "attention_with_kvcache", None)
    with torch.set_grad_enabled(why == "gradients"):
        q.requires_grad_(why == "gradients")
        found, _ = dlattn.transformers.attention_forward(layer, q, k, v, given, **options)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_which_tensors_the_gpu_reads_as_a_cache() -> None:
    def tensor(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = tensor(2, 4, 1, 64), tensor(2, 2, 8, 64)
    assert ranges.reads_caches(q, k, k)
    assert not ranges.reads_caches(q.float(), k.float(), k.float())
    assert not ranges.reads_caches(tensor(2, 4, 1, 36), tensor(2, 2, 8, 36), k)
    assert not ranges.reads_caches(tensor(2, 4, 1, 264), tensor(2, 2, 8, 264), k)
    assert not ranges.reads_caches(q, tensor(2, 2, 8, 65)[..., :64], k)

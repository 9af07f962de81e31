"""A part of the random problems of KV caches; `kvcache_differential.py` runs any more."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvcache_differential
import numpy as np
import pytest
from differential import alignment
from kvcache_differential import APPEND, KERNELS, LIMITS, KVCacheRun, NumPyBlocks, TorchBlocks, run
from kvcache_draws import BESIDE_8_BITS, CALLS, Limits, draw_kvcache
from kvcache_eight_bits import CACHE_DTYPES
from kvcache_problems import KVCacheProblem
from random_problems import Placed

import dlattn

pytest.importorskip("ml_dtypes")
DTYPES = ("float16", "bfloat16", "float32", "float64")


def problems(
    count: int, checked: bool = True, dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
) -> Iterator[KVCacheProblem]:
    """Problems of the first seeds, small ones."""
    for seed in range(count):
        yield draw_kvcache(seed, dtypes, Limits(1 << 13, 1 << 15, checked))


def test_random_problems_on_the_cpu() -> None:
    pytest.importorskip("torch")
    summary = run(TorchBlocks("cpu"), KERNELS["cpu"], 0, 400, 4.0)
    assert not summary.failures
    assert all(summary.kernels[name].runs > 0 for name in KERNELS["cpu"])
    assert 0 < summary.kernels["cpu"].worst_out[0] < 1


@pytest.mark.gpu
@pytest.mark.slow
def test_random_problems_on_a_gpu() -> None:
    pytest.importorskip("torch")
    summary = run(TorchBlocks(), KERNELS["cuda"], 0, None, 20.0)
    assert not summary.failures
    assert summary.kernels["auto"].runs > 0 and summary.kernels[APPEND].runs > 0


def test_a_seed_is_a_problem() -> None:
    one, two = (draw_kvcache(77, DTYPES, LIMITS["cpu"]) for _ in range(2))
    assert one.describe() == two.describe() and one.places == two.places
    for x, y in zip(one.numbers, two.numbers, strict=True):
        np.testing.assert_array_equal(x, y)
    assert draw_kvcache(78, DTYPES, LIMITS["cpu"]).describe() != one.describe()


def test_what_is_drawn() -> None:
    features: Counter[str] = Counter()
    for problem in problems(500):
        features.update(problem.features())
    wanted = (*(f"call: {name}" for name in CALLS), "page_size 1", "page_size 16", "page_size 17",
              "page_size 64", "memory: halves, heads first", "memory: one row, rows first",
              "cache_batch_idx", "page_table_from_csr", "no pages before a window",
              "shared pages or entries", "leftpad_k",
              "max_seqlen_k", "no keys", "one key", "all the room", "whole pages",
              "rotary interleaved", "rotary halves", "ragged new rows",
              "slots", "slots of tokens", "rows of no place", "drafts", "chunks of a prompt",
              "cache of int8", "cache of float8_e4m3fn", "mask", "bias", "sinks", "window",
              "head dims beyond 256", "memory: latents", "softcap", "alibi_slopes",
              "batch_invariant", "num_splits", "split_size", "workspace")  # fmt: skip
    assert all(features[name] >= 3 for name in wanted), features
    assert features["values out of range"] == 0
    told = [p for p in problems(200, checked=False) if "values out of range" in p.features()]
    assert len(told) >= 3


SCALES = ("scales of one element", "scales by KV head", "scales by sequence and KV head")
BESIDE_EACH = ("layout bhsd", "cache_batch_idx", "page_size 16", "max_seqlen_k", "num_splits",
               "split_size", "batch_invariant", "workspace", "softcap", "window", "sinks",
               "mask", "alibi_slopes", "lse", *SCALES)  # fmt: skip


def test_what_is_drawn_of_8_bits() -> None:
    """Each dtype of a cache in each call, and beside each feature; kinds of scales in each call."""
    features: Counter[tuple[str, ...]] = Counter()
    for problem in problems(1500):
        found = problem.features()
        caches = [name for name in found if name.startswith("cache of ")]
        assert bool(caches) == bool(problem.scales)
        assert not caches or problem.dtype in BESIDE_8_BITS[problem.call]
        for cache in caches:
            features.update((cache, name) for name in found)
            features.update((f"call: {problem.call}", name) for name in found if name in SCALES)
    for dtype in CACHE_DTYPES:
        wanted = (*(f"call: {name}" for name in CALLS), *BESIDE_EACH, "leftpad_k", "rotary halves",
                  "page_table_from_csr", "bias", "scales by sequence")  # fmt: skip
        for name in wanted:
            assert features[f"cache of {dtype}", name] > 0, (dtype, name)
    for call in CALLS:
        assert all(features[f"call: {call}", name] > 0 for name in SCALES), call


def test_the_ways_to_split_keys() -> None:
    """Alone and together, as far as they are accepted."""
    seen = set()
    for problem in problems(400):
        if problem.call == "append":
            continue
        asked = problem.options
        splits, size = asked["num_splits"], asked["split_size"]
        assert splits is None or size is None
        assert not asked["batch_invariant"] or splits in (None, 1)
        seen.add((splits is not None, size is not None, asked["batch_invariant"],
                  bool(problem.workspace)))  # fmt: skip
    assert len(seen) == 12  # of three ways, with and without batch_invariant and a workspace


def test_unused_memory_is_nan() -> None:
    """And used memory is not."""
    for problem in problems(60):
        if problem.cache_dtype == "int8":
            continue
        leftpads = problem.leftpads or (0,) * problem.batch
        used = np.zeros(problem.numbers[0].shape[:2], bool)
        for b, n in enumerate(problem.before):
            used[problem.where(b, np.arange(min(leftpads[b], n), n))] = True
        for x in problem.numbers:
            assert np.isnan(x[~used]).all() and not np.isnan(x[used]).any()


def failed(
    function: str,
    change: Callable[[dict[str, Any]], Any],
    wanted: Callable[[KVCacheProblem], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, int]:
    """The failures among up to 8 problems where a function gets arguments that are changed."""
    whole = getattr(dlattn, function)

    def wrong(**given: Any) -> Any:
        change(given)
        return whole(**given)

    tried = count = 0
    for problem in problems(600):
        if not wanted(problem) or 0 in problem.lengths[:1] or 0 in problem.lengths_q[:1]:
            continue
        trial = KVCacheRun(NumPyBlocks(), problem)
        tried += 1
        kernel = APPEND if problem.call == "append" else "cpu"
        monkeypatch.setattr(dlattn, function, wrong)
        try:
            out, lse, trouble = trial.check(kernel)
        except dlattn.UnsupportedError:
            out, lse, trouble = 0.0, 0.0, "refused"
        monkeypatch.setattr(dlattn, function, whole)
        count += bool(trouble) or out > 1 or lse > 1
        if tried == 8:
            break
    return count, tried


def called(call: str, *features: str) -> Callable[[KVCacheProblem], bool]:
    """Problems of a call that have all of the features."""
    return lambda p: p.call == call and set(features) <= set(p.features())


def without(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda given: given.update({name: value})


def one_key_less(given: dict[str, Any]) -> None:
    given["seqused_k"] = np.maximum(given["seqused_k"] - 1, 0)


def one_page_twice(given: dict[str, Any]) -> None:
    """The second one in the place of the first, where there are two or more."""
    table = np.array(given["page_table"])
    several = given["seqused_k"] > given["k_cache"].shape[2 if given["layout"] == "bhsd" else 1]
    table[several, 0] = table[several, 1]
    given["page_table"] = table


def other_form(given: dict[str, Any]) -> None:
    given["rotary_interleaved"] = not given["rotary_interleaved"]


def next_slot(given: dict[str, Any]) -> None:
    given["slots"] = np.where(given["slots"] > 0, given["slots"] - 1, given["slots"])


def doubled_scale(given: dict[str, Any]) -> None:
    given["v_descale"] = np.asarray(given["v_descale"] * 2, np.float32)


def other_heads(given: dict[str, Any]) -> None:
    """Scales of the next KV head."""
    for name in ("k_descale", "v_descale"):
        given[name] = np.roll(given[name], 1, axis=-1) if given[name].ndim else given[name]


def scale_of_keys(given: dict[str, Any]) -> None:
    given["k_descale"] = np.asarray(given["k_descale"] * 2, np.float32)


WRONG: dict[str, tuple[str, Any, Any]] = {
    "leftpad_k": ("attend", without("leftpad_k", None), ("leftpad_k",)),
    "a key": ("attend", one_key_less, ()),
    "a page": ("attend", one_page_twice, ("page_size 1",)),
    "the causal mask": ("attend", without("causal", False), ("causal bottom-right", "drafts")),
    "sinks": ("attend", without("sinks", None), ("sinks",)),
    "a mask": ("attend", without("mask", None), ("mask",)),
    "the queries' positions": ("varlen", without("causal", "top_left"), ("causal bottom-right",)),
    "the form of rotation": ("new keys", other_form, ("rotary q",)),
    "the place of a row": ("append", next_slot, ("slots",)),
    "a scale": ("append", doubled_scale, ("cache of int8",)),
    "a scale of values of int8": ("attend", doubled_scale, ("cache of int8",)),
    "a scale of values of e4m3": ("varlen", doubled_scale, ("cache of float8_e4m3fn",)),
    "a scale of keys of int8": ("varlen", scale_of_keys, ("cache of int8", "lse")),
    "a scale of keys of e4m3": ("attend", scale_of_keys, ("cache of float8_e4m3fn", "lse")),
    "a scale of new keys": ("new keys", scale_of_keys, ("cache of int8",)),
    "a KV head's scales": ("attend", other_heads, ("scales by KV head",)),
    "the form of rotation, stored": ("append", other_form, ("rotary halves",)),
}
FUNCTIONS = {"append": "append_kv", "varlen": "attention_varlen"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_left_out_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, change, features = WRONG[name]
    function = FUNCTIONS.get(call, "attention_with_kvcache")
    count, tried = failed(function, change, called(call, *features), monkeypatch)
    assert tried >= 3 and count >= tried * 0.6, f"{count} of {tried}"


@pytest.mark.parametrize("call", ["attend", "append"])
def test_a_write_to_another_row_fails(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = FUNCTIONS.get(call, "attention_with_kvcache")
    whole = getattr(dlattn, function)

    def careless(**given: Any) -> Any:
        given["v_cache"][-1, -1, -1, -1] = 3.0
        return whole(**given)

    monkeypatch.setattr(dlattn, function, careless)
    kernel = APPEND if call == "append" else "cpu"
    found = [
        KVCacheRun(NumPyBlocks(), p).check(kernel)[2]
        for p in problems(40, dtypes=("float32",))
        if p.call == call
    ]
    assert "other bits in the cache" in found


def test_a_write_beside_the_workspace_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function writes one byte behind it."""
    whole = dlattn.attention_with_kvcache

    def careless(**given: Any) -> Any:
        memory = given["workspace"].view(np.uint8)
        np.lib.stride_tricks.as_strided(memory[-1:], (2,), (1,))[1] = 3
        return whole(**given)

    monkeypatch.setattr(dlattn, "attention_with_kvcache", careless)
    problem = next(p for p in problems(400) if p.workspace and p.call == "attend")
    found = KVCacheRun(NumPyBlocks(), problem).check("cpu")
    assert found[2] == "a write beside the workspace"


def test_bits_that_depend_on_the_batch_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With split_size too."""
    whole = dlattn.attention_with_kvcache

    def careless(**given: Any) -> Any:
        return whole(**given | {"softmax_scale": 0.1 + len(given["q"])})

    def wanted(p: KVCacheProblem) -> bool:
        asked = p.options
        return p.call == "attend" and p.batch > 1 and asked["split_size"] and p.lengths[0] > 1

    problem = next(p for p in problems(600) if wanted(p) and not p.options["batch_invariant"])
    monkeypatch.setattr(dlattn, "attention_with_kvcache", careless)
    found = KVCacheRun(NumPyBlocks(), problem).check("cpu")
    assert found[2] == "other bits alone than in a batch"


def test_bits_may_follow_the_alignment_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone the first sequence's rows are aligned as they are beside the others."""
    whole = dlattn.attention_with_kvcache
    asked: list[list[int]] = []

    def aligned(x: np.ndarray) -> int:
        return alignment(x.ctypes.data, x.shape, x.strides)

    def by_alignment(**given: Any) -> Any:
        result = whole(**given)
        out = result[0] if isinstance(result, tuple) else result
        asked.append([aligned(x) for x in (given["q"], given["k_cache"], given["v_cache"], out)])
        out *= np.float32(1 + sum(asked[-1]))
        return result

    def wanted(p: KVCacheProblem) -> bool:
        several = p.call == "attend" and p.batch > 1 and max(p.lengths_q) == 1
        return several and p.options["batch_invariant"] and p.dims[0] % 8 == 0

    # One query each: the stride between sequences is none of the first one's rows alone.
    problem = next(filter(wanted, problems(600)))
    sizes = problem.inputs["q"].sizes
    row = sizes[2] * sizes[3]
    problem.inputs["q"] = Placed.of(sizes, (row + 1, row, sizes[3], 1))
    trial = KVCacheRun(NumPyBlocks(), problem)
    monkeypatch.setattr(dlattn, "attention_with_kvcache", by_alignment)
    assert trial.check("cpu")[2] == ""
    assert len(asked) == 3 and asked[2] == asked[0]
    q = trial.made["q"]
    assert aligned(q[:1]) > aligned(q)


def test_a_wrong_table_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dlattn.page_table_from_csr

    def wrong(*lists: Any, **options: Any) -> Any:
        table, lengths = whole(*lists, **options)
        return table, lengths + 1

    monkeypatch.setattr(dlattn, "page_table_from_csr", wrong)
    problem = next(p for p in problems(400) if p.csr is not None)
    found = KVCacheRun(NumPyBlocks(), problem).check("cpu")
    assert found[2] == "page_table_from_csr makes other lengths"


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "kvcache.json"
    words = ["kvcache_differential.py", "--device", "cpu", "--seed", "5", "--count", "8"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(path)])
    assert kvcache_differential.main() == 0
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (document["problems"], document["seeds"]) == (8, [5, 13])
    kernels = document["kernels"]
    assert sum(kernels[name]["runs"] for name in KERNELS["cpu"]) == 8

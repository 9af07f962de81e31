"""The program that serves models by vLLM: how it compares, and what its plug-in knows of calls.

A server is not started here: that takes vLLM, and minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vllm_suite  # noqa: E402
import vllm_suite_plugin  # noqa: E402

import dlattn  # noqa: E402

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 4
NEW, KEYS = [3, 0, 1], [5, 0, 9]  # the middle one is of padding


def test_comparing() -> None:
    likely = {4: -0.5, 5: -0.75, 6: -1.5}
    want = [(4, likely), (4, likely), (4, likely)]

    def found(*tokens: int, off: float = 0.0) -> dict[str, Any]:
        ours = [(t, {n: x + off for n, x in likely.items()}) for t in tokens]
        return vllm_suite.compare([want], [ours], 0.3)

    same = found(4, 4, 4, off=-0.125)
    assert same == {"equal": 3, "ties": 0, "wrong": [], "largest_difference": 0.125}
    tie = found(4, 5, 6)
    assert (tie["equal"], tie["ties"], tie["wrong"]) == (1, 1, [])
    for other, words in ((6, "request 0, token 1: 6, not 4"), (7, "request 0, token 1: 7, not 4")):
        assert found(4, other, 4)["wrong"] == [words]
    assert "probability off by 0.5" in found(4, off=0.5)["wrong"][1]
    assert found(4, off=float("nan"))["wrong"][1].endswith("off by nan")
    assert found(4, 4)["wrong"] == ["request 0: 2 tokens, not 3"]


def test_prompts() -> None:
    """Some are longer than a step, and later ones begin with whole blocks of earlier ones."""
    first, again = vllm_suite.waves()
    assert max(map(len, first)) > vllm_suite.STEP and 1 in map(len, first)
    begun = [p for p in again if any(p[: vllm_suite.BLOCK] == o[: vllm_suite.BLOCK] for o in first)]
    assert len(begun) >= 2 and len(begun) < len(again)
    assert all(p not in first for p in again)


@pytest.mark.parametrize(
    ("new", "keys", "kinds"),
    [
        ([1, 1], [7, 1], ["single tokens alone"]),
        ([1, 5], [7, 5], ["single tokens beside prompts"]),
        ([3, 1], [9, 7], ["single tokens beside prompts", "chunks behind others"]),
        ([5], [5], []),
    ],
)
def test_kinds_of_steps(new: list[int], keys: list[int], kinds: list[str]) -> None:
    assert vllm_suite_plugin.kinds(new, keys) == kinds


def call(dtype: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by which dlattn's backend of vLLM attends; pages that no key uses are NaN."""
    generator = torch.Generator().manual_seed(1)
    caches = torch.full((2, 8, PAGE, HEADS_KV, DIM), float("nan"))
    table = torch.tensor([[6, 1, 0], [0, 0, 0], [3, 7, 2]], dtype=torch.int32)
    for r, keys in enumerate(KEYS):
        for j in range(keys):
            drawn = torch.randn(2, HEADS_KV, DIM, generator=generator) + 0.3
            caches[:, table[r, j // PAGE], j % PAGE] = drawn
    q = torch.randn(sum(NEW), HEADS, DIM, generator=generator).half()
    starts = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32)
    given = {
        "seqused_k": torch.tensor(KEYS, dtype=torch.int32),
        "page_table": table,
        "causal": True,
        "softmax_scale": 0.3,
        "out": torch.full_like(q, float("nan")),
        **options,
    }
    return (q, *caches.to(dtype), starts, None, max(NEW), 3 * PAGE), given


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"window": (3, 0), "softcap": 2.0, "sinks": torch.tensor([1.0, -1, 0, 2])}),
        (torch.float8_e4m3fn, {"k_descale": torch.tensor(0.5), "v_descale": torch.tensor(3.0)}),
    ],
)
def test_errors_of_calls(
    dtype: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call is within the limit; one whose keys, scale or factors are others is far beyond."""
    monkeypatch.setenv("SUITE_CALLS", str(tmp_path / "calls"))
    arguments, given = call(dtype, **options)
    vllm_suite_plugin._counted(*arguments, **given)
    (line,) = (tmp_path / "calls").read_text().splitlines()
    record = json.loads(line)
    assert record["kinds"] == ["single tokens beside prompts", "chunks behind others"]
    assert 0 < record["error"] <= vllm_suite.ERROR
    changes = [{"seqused_k": given["seqused_k"].clamp(1) - 1}, {"softmax_scale": 0.25}]
    for change in [*changes, *({name: None} for name in options)]:
        if dtype == torch.float8_e4m3fn and None in change.values():
            change = {next(iter(change)): torch.tensor(1.25)}
        other = {**given, **change, "out": torch.empty_like(given["out"])}
        dlattn.attention_varlen(*arguments, **{k: x for k, x in other.items() if x is not None})
        wrong = vllm_suite_plugin.error(arguments, {**given, "out": other["out"]})
        assert wrong > 10 * vllm_suite.ERROR, change
    given["out"][0, 0, 0] = float("nan")
    assert vllm_suite_plugin.error(arguments, given) > vllm_suite.ERROR

"""A part of the random problems of 8-bit products; `eight_bit_problems.py` runs any more."""

from __future__ import annotations

from typing import Any

import pytest

import dlattn

pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from eight_bit_problems import KERNELS, KINDS, EightBitDraw, EightBitRun, TorchArrays, run


def test_random_problems_on_the_cpu() -> None:
    summary = run(TorchArrays("cpu"), KERNELS["cpu"], 0, 400, 4.0)
    assert not summary.failures
    assert summary.kernels["cpu"].runs == summary.problems > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_random_problems_on_a_gpu() -> None:
    summary = run(TorchArrays(), KERNELS["cuda"], 0, None, 20.0)
    assert not summary.failures
    assert any(summary.kernels[kernel].runs > 0 for kernel in KERNELS["cuda"])


def test_what_is_drawn() -> None:
    features: dict[str, int] = {}
    for seed in range(400):
        draw = EightBitDraw(seed, ("float16", "bfloat16"), 1 << 12)
        for name in (draw.kind, *draw.problem().features()):
            features[name] = features.get(name, 0) + 1
    wanted = (*KINDS, "causal bottom-right", "causal top-left", "window", "mask", "sinks", "varlen",
              "seqused_k", "lse", "out", "grouped heads", "head_dim_v", "rows off 16 bytes",
              "layout bhsd", "batch_invariant", "softmax_scale")  # fmt: skip
    assert all(features.get(name, 0) >= 3 for name in wanted), features


def without(name: str, value: Any) -> Any:
    return lambda arguments, options: (arguments, {**options, name: value})


def without_last_key(arguments: Any, options: Any) -> Any:
    """As if the last key of every head were of no value."""
    q, k, v = arguments
    v = v.clone()
    (v[:, :, -1] if options["layout"] == "bhsd" else v[:, -1]).zero_()
    return (q, k, v), options


@pytest.mark.parametrize(
    ("feature", "change", "least"),
    [
        ("causal top-left", without("causal", True), 6),
        ("window", without("window", (None, None)), 6),
        ("mask", without("mask", None), 6),
        ("sinks", without("sinks", None), 6),
        ("lse", without_last_key, 2),  # of hundreds of keys one is no more than what is rounded
    ],
)
def test_what_is_left_out_fails(
    feature: str, change: Any, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = dlattn.attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        arguments, options = change(arguments, dict(options))
        return attention(*arguments, **options)

    monkeypatch.setattr(dlattn, "attention", wrong)
    failed = tried = 0
    for seed in range(900):
        problem = EightBitDraw(seed, ("float16",), 1 << 13).problem()
        asked = problem.features()
        if feature not in asked or problem.varlen or "no keys" in asked:
            continue
        tried += 1
        out, lse, trouble = EightBitRun(TorchArrays("cpu"), problem).check("cpu")
        failed += bool(trouble) or out > 1 or lse > 1
        if tried == 12:
            break
    assert failed >= least, f"{failed} of {tried}"


def test_values_a_fifth_too_large_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = dlattn.attention

    def larger(q: Any, k: Any, v: Any, **options: Any) -> Any:
        result = attention(q, k, v, **options)
        return (result[0] * 1.2, result[1]) if options["return_lse"] else result * 1.2

    monkeypatch.setattr(dlattn, "attention", larger)
    failed = tried = 0
    for seed in range(99):
        problem = EightBitDraw(seed, ("float16",), 1 << 13).problem()
        sizes = problem.tensors["q"][1].sizes + problem.tensors["k"][1].sizes
        if not problem.options["return_lse"] or problem.varlen or problem.out or 0 in sizes:
            continue
        tried += 1
        failed += EightBitRun(TorchArrays("cpu"), problem).check("cpu")[0] > 1
    # Long sums of both signs leave little, so that the bound allows more errors.
    assert failed >= 0.8 * tried > 5, f"{failed} of {tried}"

"""A part of the randomised differential test, limited in time; `differential.py` runs any more."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import differential
import numpy as np
import pytest
from differential import KERNELS, NumPyArrays, Run, TorchArrays, alignment, run
from random_problems import Placed, Problem, contiguous, draw

import dlattn

CPU_DTYPES = ("float16", "float32", "float64")


def cpu_dtypes() -> tuple[str, ...]:
    """bfloat16 too where NumPy knows it."""
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return CPU_DTYPES
    return ("bfloat16", *CPU_DTYPES)


def test_random_problems_on_the_cpu() -> None:
    summary = run(NumPyArrays(), KERNELS["cpu"], 0, 400, 4.0, cpu_dtypes())
    assert not summary.failures
    assert summary.kernels["cpu"].runs == summary.problems > 0
    assert summary.kernels["cpu"].worst_out[0] > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_random_problems_on_a_gpu() -> None:
    pytest.importorskip("torch")
    summary = run(TorchArrays(), KERNELS["cuda"], 0, None, 20.0)
    assert not summary.failures
    for kernel in ("scalar", "wmma"):
        assert summary.kernels[kernel].runs > 0


def test_the_same_on_torch_tensors() -> None:
    pytest.importorskip("torch")
    summary = run(TorchArrays("cpu"), KERNELS["cpu"], 1000, 400, 4.0, ("bfloat16", "float16"))
    assert not summary.failures
    assert summary.kernels["cpu"].runs > 0


def test_workers_share_the_seeds() -> None:
    pytest.importorskip("ml_dtypes")  # without it bfloat16 is among the problems, and fails
    alone = run(NumPyArrays(), KERNELS["cpu"], 50, 4)
    arrays = differential.arrays_of
    shared = differential.run_workers(arrays, run, "cpu", KERNELS["cpu"], 50, 4, None, 2)
    assert (shared.first_seed, shared.end_seed, shared.problems) == (50, 54, 4)
    assert shared.workers == 2 and shared.features == alone.features
    assert shared.kernels["cpu"] == alone.kernels["cpu"]


def test_a_seed_is_a_problem() -> None:
    one, two = (draw(77, CPU_DTYPES, 1 << 16) for _ in range(2))
    assert one.describe() == two.describe()
    for name, (values, place) in one.tensors.items():
        assert place == two.tensors[name][1]
        np.testing.assert_array_equal(values, two.tensors[name][0])
    assert draw(78, CPU_DTYPES, 1 << 16).describe() != one.describe()


def test_what_is_drawn() -> None:
    features: dict[str, int] = {}
    for seed in range(300):
        for name in draw(seed, CPU_DTYPES, 1 << 12).features():
            features[name] = features.get(name, 0) + 1
    wanted = ("causal bottom-right", "causal top-left", "window", "softcap", "alibi_slopes", "bias",
              "mask", "sinks", "varlen", "varlen with an empty sequence", "seqused_k", "lse", "out",
              "grouped heads", "head_dim_v", "rows off 16 bytes", "no keys", "layout bhsd",
              "batch_invariant")  # fmt: skip
    assert all(features.get(name, 0) >= 3 for name in wanted), features


def distorted(change: Any) -> Any:
    """dlattn.attention with results or arguments that are changed."""
    attention = dlattn.attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        arguments, options = change(arguments, dict(options))
        return attention(*arguments, **options)

    return wrong


def without(name: str, value: Any) -> Any:
    return lambda arguments, options: (arguments, {**options, name: value})


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("causal top-left", without("causal", True)),
        ("softcap", without("softcap", 0.0)),
        ("window", without("window", (None, None))),
        ("bias", without("bias", None)),
        ("mask", without("mask", None)),
        ("alibi_slopes", without("alibi_slopes", None)),
        ("sinks", without("sinks", None)),
    ],
)
def test_a_feature_that_is_left_out_fails(
    feature: str, change: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dlattn, "attention", distorted(change))
    failed = tried = 0
    for seed in range(400):
        problem = draw(seed, ("float16",), 1 << 14)
        if feature not in problem.features() or problem.varlen or "no keys" in problem.features():
            continue
        tried += 1
        out, lse, trouble = Run(NumPyArrays(), problem).check("cpu")
        failed += bool(trouble) or out > 1 or lse > 1
        if tried == 12:
            break
    assert failed >= 6, f"{failed} of {tried}"  # a wide window, say, leaves nothing out


def test_a_write_beside_the_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[np.ndarray] = []
    attention, poisoned = dlattn.attention, NumPyArrays.poisoned

    def remember(self: NumPyArrays, *arguments: Any) -> Any:
        view, block = poisoned(self, *arguments)
        blocks.append(block)
        return view, block

    def careless(*arguments: Any, **options: Any) -> Any:
        result = attention(*arguments, **options)
        beside = np.flatnonzero(np.isnan(blocks[-1]))
        blocks[-1][beside[:1]] = 0.0
        return result

    monkeypatch.setattr(NumPyArrays, "poisoned", remember)
    monkeypatch.setattr(dlattn, "attention", careless)
    troubles = set()
    for seed in range(60):
        problem = draw(seed, ("float32",), 1 << 12)
        if problem.out is not None and not problem.varlen:
            troubles.add(Run(NumPyArrays(), problem).check("cpu")[2])
    assert "a write beside out" in troubles


def test_other_bits_the_second_time_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, calls = dlattn.attention, []

    def unsteady(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        result = attention(*arguments, **options)
        out = result[0] if isinstance(result, tuple) else result
        out[0, 0, 0, 0] *= 1 + 1e-3 * len(calls)
        return result

    monkeypatch.setattr(dlattn, "attention", unsteady)
    problem = next(
        p for p in (draw(seed, ("float32",), 1 << 12) for seed in range(99))
        if not p.varlen and 0 not in p.tensors["q"][1].sizes + p.tensors["k"][1].sizes
        and not p.options["causal"] and "mask" not in p.tensors
    )  # fmt: skip
    assert Run(NumPyArrays(), problem).check("cpu")[2] == "other bits the second time"


def test_other_bits_alone_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = dlattn.attention

    def of_batch(*arguments: Any, **options: Any) -> Any:
        result = attention(*arguments, **options)
        out = result[0] if isinstance(result, tuple) else result
        out *= np.float32(arguments[0].shape[0])
        return result

    monkeypatch.setattr(dlattn, "attention", of_batch)
    troubles = set()
    for seed in range(300):
        problem = draw(seed, ("float32",), 1 << 12)
        if problem.options["batch_invariant"] and not problem.varlen:
            troubles.add(Run(NumPyArrays(), problem).check("cpu")[2])
    assert "other bits alone than in a batch" in troubles


@pytest.mark.parametrize("varlen", [False, True])
def test_bits_may_follow_the_alignment_of_rows(
    varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone the first sequence's rows are aligned as they are beside the others."""
    name = "attention_varlen" if varlen else "attention"
    attention = getattr(dlattn, name)
    asked: list[list[int]] = []

    def aligned(x: np.ndarray) -> int:
        return alignment(x.ctypes.data, x.shape, x.strides)

    def by_alignment(*arguments: Any, **options: Any) -> Any:
        out = attention(*arguments, **options)
        asked.append([aligned(x) for x in (*arguments[:3], out)])
        out *= np.float32(sum(asked[-1]))
        return out

    # One query and key each: the stride between sequences is none of the first one's rows alone.
    sizes = (2, 1, 16) if varlen else (2, 1, 1, 16)
    place = Placed.of(sizes, (17, *contiguous(sizes[1:])))
    numbers = np.random.default_rng(0)
    tensors = {x: (numbers.standard_normal(sizes, dtype=np.float32), place) for x in "qkv"}
    options = {"causal": False, "window": (None, None), "softmax_scale": None, "softcap": 0.0,
               "return_lse": False, "batch_invariant": True}  # fmt: skip
    lengths = ((1, 1), (1, 1), (), 1, 1) if varlen else ()
    trial = Run(NumPyArrays(), Problem(0, "float16", "bshd", tensors, options, None, *lengths))
    monkeypatch.setattr(dlattn, name, by_alignment)
    assert trial.check("cpu")[2] == ""
    assert asked == [[2, 2, 2, 16]] * 3
    assert aligned(trial.inputs[0][:1]) == 16


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "differential.json"
    words = ["differential.py", "--device", "cpu", "--seed", "5", "--count", "4"]
    monkeypatch.setattr(differential, "DTYPES", {"cpu": CPU_DTYPES})
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(path)])
    assert differential.main() == 0
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (document["problems"], document["seeds"]) == (4, [5, 9])
    cpu = document["kernels"]["cpu"]
    assert (cpu["runs"], cpu["failures"]) == (4, 0)
    assert 0 < cpu["worst_out"]["error_over_bound"] < 1
    assert sum(count for name, count in cpu["features"].items() if name.startswith("dtype")) == 4
    attention = dlattn.attention
    monkeypatch.setattr(dlattn, "attention", lambda *a, **o: attention(*a, **o) and None)
    assert differential.main() == 1
    assert json.loads(path.read_text())["failures"]

"""Gradients of random problems, limited in time; `backward_differential.py` runs any more."""

from __future__ import annotations

from typing import Any

import backward_differential
import pytest
from backward_differential import KERNELS, run
from differential import NumPyArrays, TorchArrays

import dlattn

DTYPES = ("float16", "float32", "float64")


def test_random_problems_on_the_cpu() -> None:
    summary = run(NumPyArrays(), KERNELS["cpu"], 0, 150, 3.0, DTYPES)
    assert not summary.failures
    tally = summary.kernels["cpu"]
    assert tally.runs == summary.problems > 0 and tally.worst_out[0] > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_random_problems_on_a_gpu() -> None:
    pytest.importorskip("torch")
    summary = run(TorchArrays(), KERNELS["cuda"], 0, None, 20.0)
    assert not summary.failures
    for kernel in ("auto", "scalar", "wmma"):
        assert summary.kernels[kernel].runs > 0


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one gradient of a problem is wrong by a fifth, it is named."""
    wrong = set()

    def attention_backward(*arguments: Any, **options: Any) -> Any:
        found = dlattn.attention_backward(*arguments, **options)
        there = [name for name in found._fields if getattr(found, name) is not None]
        name = there[sum(arguments[1].shape) % len(there)]
        gradient = getattr(found, name)
        gradient *= 1.2
        if (gradient != 0).any():
            wrong.add(name)
        return found

    monkeypatch.setattr(backward_differential, "_attention_backward", attention_backward)
    summary = run(NumPyArrays(), KERNELS["cpu"], 300, 80, None, ("float32",))
    assert wrong == set(dlattn.Gradients._fields)
    for name in wrong:
        assert any(f"of the bound {name};" in text for text in summary.failures), name

"""Gradients of random problems, limited in time; `backward_differential.py` runs any more."""

from __future__ import annotations

from typing import Any

import backward_differential
import numpy as np
import pytest
from backward_differential import KERNELS, BackwardRun, run
from differential import NumPyArrays, TorchArrays
from random_problems import Placed, Problem, contiguous

import dlattn
from dlattn.reference import dtype_name

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


def one_head(dtype: str, **tensors: Any) -> BackwardRun:
    """All gradients of one head, with `dout` and tensors of (rows, columns)."""
    dout = tensors.pop("dout")
    placed = {}
    for name, values in tensors.items():
        x = np.array(values, np.float32)
        x = x[None, :, None] if name in ("q", "k", "v") else x
        placed[name] = (x, Placed.of(x.shape, contiguous(x.shape)))
    options = {"causal": False, "window": (None, None), "softmax_scale": 1.0, "softcap": 0.0,
               "return_lse": True, "batch_invariant": False}  # fmt: skip
    trial = BackwardRun(NumPyArrays(), Problem(0, dtype, "bshd", placed, options, None))
    trial.needs = None
    trial.wanted = [name for name, of in backward_differential.OF.items() if of in trial.tensors]
    trial.dout, trial.dlse = np.array(dout, trial.out.dtype)[None, :, None], None
    return trial


def change(monkeypatch: pytest.MonkeyPatch, name: str, to: Any) -> None:
    """Make one gradient another."""

    def attention_backward(*arguments: Any, **options: Any) -> Any:
        found = dlattn.attention_backward(*arguments, **options)
        getattr(found, name)[...] = to(getattr(found, name)) if callable(to) else to
        return found

    monkeypatch.setattr(backward_differential, "_attention_backward", attention_backward)


def test_shares_below_the_least_normal_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp2 of a GPU gives 0 for exp(-91), whatever the gradient of the score is."""
    trial = one_head("float32", q=[[91.0]], k=[[1.0]], v=[[1.0]], sinks=[0.0], dout=[[5000.0]])
    exact = trial.expected[0]["dsinks"]
    assert 1e-37 < -exact[0] < 5000.0 * 2.0**-126
    assert trial.check("cpu")[2] == ""
    change(monkeypatch, "dsinks", 0.0)
    assert trial.check("cpu")[2] == ""
    change(monkeypatch, "dsinks", 1e-30)
    assert trial.check("cpu")[2] == "dsinks"


def test_numbers_beyond_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are infinite, or the largest; no other number, and others are held to their bounds."""
    trial = one_head("float16", q=[[0.0]] * 16, k=[[0.0]] * 4, v=[[10.0], [-10.0], [0.0], [0.0]],
                     bias=[[0.0] * 4], dout=[[2000.0]] * 16)  # fmt: skip
    assert dtype_name(trial.tensors["bias"]) == "float16"
    found = trial._results("cpu")[0]["dbias"]
    np.testing.assert_array_equal(found[0], np.array([np.inf, -np.inf, 0, 0], np.float16))
    assert trial.check("cpu")[2] == ""
    for wrong in (np.nan, 6e4, [-np.inf, -np.inf, 0, 0], [np.inf, -np.inf, np.inf, 0]):
        change(monkeypatch, "dbias", wrong)
        assert trial.check("cpu")[2] == "dbias", wrong
    change(monkeypatch, "dbias", [65504.0, -65504.0, 0, 0])
    assert trial.check("cpu")[2] == ""

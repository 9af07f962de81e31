"""num_splits, split_size and workspace of attention over keys in a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arrays import NumPy
from kvcaches import Cache, Problem
from test_kvcache import run
from wrong_calls import Wrong, check

import dlattn

NUMPY = NumPy().array
CACHE = Cache((0, 1, 700, 300), 16, seqlen_q=2, dtype="float32")


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 1000])
def test_any_number_of_parts(num_splits):
    run(Problem(CACHE), causal=True, num_splits=num_splits)
    run(Problem(dataclasses.replace(CACHE, page_size=0)), window=(100, None), num_splits=num_splits)


@pytest.mark.parametrize("split_size", [None, 128, 1024])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_size_of_parts(batch_invariant, split_size):
    run(Problem(CACHE), causal=True, split_size=split_size, batch_invariant=batch_invariant)


def test_the_plan_tells():
    arrays = Problem(CACHE).arrays(NUMPY)
    arrays["k"], arrays["v"] = arrays.pop("k_cache"), arrays.pop("v_cache")
    assert dlattn.plan(**arrays, num_splits=3).num_splits == 3
    assert dlattn.plan(**arrays, split_size=256).split_size == 256
    assert "of 256 keys" in str(dlattn.plan(**arrays, split_size=256))


def test_a_workspace_may_come_with_the_call():
    run(Problem(CACHE), causal=True, workspace=np.empty(4096, np.uint8))
    out, lse = np.float32(0), None
    arrays = Problem(CACHE).arrays(NUMPY)
    arrays["k"], arrays["v"] = arrays.pop("k_cache"), arrays.pop("v_cache")
    varlen = {
        "cu_seqlens_q": np.array([0, 2, 4, 6, 8], np.int32),
        "cu_seqlens_k": None,
        "max_seqlen_q": 2,
        "max_seqlen_k": 700,
    }
    arrays["q"] = arrays["q"].reshape(8, *arrays["q"].shape[2:])
    out, lse = dlattn.attention_varlen(
        **arrays, **varlen, num_splits=2, workspace=np.empty((2, 8), np.float32), return_lse=True
    )
    whole = dlattn.attention_varlen(**arrays, **varlen, split_size=128, return_lse=True)
    np.testing.assert_allclose(out, whole[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=1e-5)


def read_only():
    memory = np.empty(64, np.uint8)
    memory.flags.writeable = False
    return memory


WRONG = [
    Wrong({"num_splits": 0}, ("num_splits is 0; accepted: an int >= 1, or None",)),
    Wrong({"num_splits": -2}, ("num_splits is -2; accepted: an int from 0",)),
    Wrong({"num_splits": 2.0}, ("num_splits is of type float",), TypeError),
    Wrong({"split_size": 0}, ("split_size is 0; accepted: a multiple of 128 keys",)),
    Wrong({"split_size": 100}, ("split_size is 100; accepted: multiples of 128 keys",)),
    Wrong({"split_size": "all"}, ("split_size is of type str",), TypeError),
    Wrong(
        {"num_splits": 2, "split_size": 128},
        ("num_splits is given with split_size; accepted: one of them",),
    ),
    Wrong(
        {"num_splits": 2, "batch_invariant": True},
        ("num_splits is 2 with batch_invariant; accepted: 0 or 1, or a split_size",),
    ),
    Wrong({"workspace": 4096}, ("workspace is of type int",), TypeError),
    Wrong({"workspace": read_only}, ("workspace is read-only",)),
    Wrong(
        {"workspace": lambda: np.empty((4, 8), np.uint8)[:, :4]},
        ("workspace: its elements have gaps between them, shape (4, 4); accepted: a contiguous",),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ", ".join(wrong.changes))
def test_wrong_calls(wrong):
    arrays = Problem(CACHE).arrays(NUMPY)
    check(dataclasses.replace(wrong, defaults=arrays), dlattn.attention_with_kvcache)


@pytest.mark.parametrize("wrong", [w for w in WRONG if "workspace" in w.changes])
def test_a_wrong_workspace_is_not_supported(wrong):
    arrays = Problem(CACHE).arrays(NUMPY)
    arrays = {name.removesuffix("_cache"): x for name, x in arrays.items()}
    check(dataclasses.replace(wrong, defaults=arrays), dlattn.plan)
    if wrong.error is TypeError:
        return check(dataclasses.replace(wrong, defaults=arrays), dlattn.supported)
    support = dataclasses.replace(wrong, defaults=arrays).call(dlattn.supported)
    assert not support and wrong.words[0] in str(support)

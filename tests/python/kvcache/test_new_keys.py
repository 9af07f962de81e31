"""New keys and values of attention_with_kvcache itself: appended, and attended to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, normal
from kvcaches import Cache, Problem, rotated
from wrong_calls import Wrong, check

import dlattn
import dlattn.flash_attn

NEW = 3
BEFORE = np.array([6, 0, 37, 30], np.int32)
LENGTHS = tuple(int(n) + NEW for n in BEFORE)
CACHES = {
    "pages": {"page_size": 16},
    "pages of one": {"page_size": 1, "leftpads": (2, 0, 0, 30)},
    "entries": {},
    "chosen entries": {"chosen": True, "leftpads": (2, 0, 0, 30)},
}


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("mode", ["causal", "window", "full"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cache", CACHES)
def test_new_keys(cache, layout, mode, rotary, name):
    """Elements that no new key has stay as they are, and positions count from leftpad_k."""
    framework = FRAMEWORKS[name]()
    problem = Problem(
        Cache(LENGTHS, seqlen_q=NEW, capacity=60, layout=layout, **CACHES[cache])  # type: ignore
    )
    k, v = problem.take_out(BEFORE, NEW)
    given: dict[str, Any] = problem.arrays(lambda x, dtype: framework.array(x))
    given["seqused_k"] = framework.array(BEFORE)
    modes: dict[str, Any] = {
        "causal": {"causal": True}, "window": {"window": (11, None)}, "full": {}
    }  # fmt: skip
    tables: dict[str, Any] = {}
    own_q, own_k = problem.q, k
    if rotary:
        angles = normal(80, 16, seed=3)
        cos, sin, interleaved = np.cos(angles), np.sin(angles), rotary == "interleaved"
        tables = {"rotary_cos": framework.array(cos), "rotary_sin": framework.array(sin)}
        tables["rotary_interleaved"] = interleaved
        first = BEFORE if problem.leftpad_k is None else BEFORE - problem.leftpad_k
        positions = first[:, None] + np.arange(NEW)
        of_q = positions[:, :1].repeat(NEW, 1) if mode == "full" else positions

        def rotate(x: Any, at: Any) -> Any:
            if layout == "bshd":
                return rotated(x, cos, sin, at, interleaved)
            return rotated(x.swapaxes(1, 2), cos, sin, at, interleaved).swapaxes(1, 2)

        own_q, own_k = rotate(problem.q, of_q), rotate(k, positions)
    out, lse = dlattn.attention_with_kvcache(
        **given, **modes[mode], **tables, return_lse=True,
        k=framework.array(np.ascontiguousarray(k)), v=framework.array(np.ascontiguousarray(v)),
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(given["seqused_k"]), BEFORE)
    problem.put_back(BEFORE, own_k, v)
    for name, buffer in zip(("k_cache", "v_cache"), problem.buffers, strict=True):
        np.testing.assert_allclose(np.asarray(given[name]), buffer, rtol=1e-5, atol=1e-6)
    problem.q = own_q
    problem.check(np.asarray(out), np.asarray(lse), **modes[mode])


def call() -> dict[str, Any]:
    """One that is right."""
    return {
        "q": normal(4, NEW, 4, 64),
        "k_cache": normal(4, 60, 2, 64, seed=1),
        "v_cache": normal(4, 60, 2, 64, seed=2),
        "k": normal(4, NEW, 2, 64, seed=3),
        "v": normal(4, NEW, 2, 64, seed=4),
        "seqused_k": BEFORE,
        "causal": True,
    }


def wrong(word: str, error: type[Exception] = dlattn.UnsupportedError, **changes: Any) -> Wrong:
    return Wrong(changes, (word,), error, call())


TABLE = normal(80, 16)
WRONG = {
    "values alone": wrong("v is given and k is None", k=None),
    "tables alone": wrong("rotary_cos is given and k is None", k=None, v=None, rotary_cos=TABLE),
    "sines alone": wrong("accepted: both tables or none", rotary_sin=TABLE),
    "no values": wrong("v is of type NoneType", TypeError, v=None),
    "other batch": wrong("k: batch is 2, shape (2, 3, 2, 64); accepted: 4", k=normal(2, 3, 2, 64)),
    "other heads": wrong("v: shape is", k=normal(4, 3, 4, 64)),
    "no room": wrong(
        "seqused_k[2] is 58 with 3 new keys; accepted: 0 to 57, so that they end by 60, the room "
        "in the cache",
        seqused_k=np.array([0, 1, 58, 2], np.int32),
    ),
    "a length beyond int32 with the new keys": wrong(
        "seqused_k[1] is 2147483647 with 3 new keys; accepted: 0 to 57",
        seqused_k=np.array([0, 2**31 - 1, 58, 2], np.int32),
    ),
    "a negative length": wrong(
        "seqused_k[0] is -1 with 3 new keys", seqused_k=np.array([-1, 0, 0, 0], np.int32)
    ),
    "beyond max_seqlen_k": wrong(
        "seqused_k[2] is 37 with 3 new keys; accepted: 0 to 36, so that they end by 39, which is "
        "max_seqlen_k",
        max_seqlen_k=39,
    ),
    "lengths of bool": wrong("seqused_k: dtype is bool", seqused_k=np.zeros(4, bool)),
    "lengths of uint8": wrong(
        "seqused_k: dtype is uint8",
        seqused_k=np.zeros(4, np.uint8),
        **{x: normal(4, 300, 2, 64) for x in ("k", "v")},
    ),
    "lengths of float32": wrong("seqused_k: dtype is float32", seqused_k=np.zeros(4, np.float32)),
    "no lengths": wrong("seqused_k is of type NoneType", TypeError, seqused_k=None),
    "no array": wrong("k is of type int", TypeError, k=7),
    "no cache": wrong("k_cache is of type int", TypeError, k_cache=7),
    "out of another shape": wrong("out: shape is", out=np.empty((4, NEW, 4, 32), np.float32)),
    "a stream": wrong("stream is given with k", stream=1),
    "softcap": wrong("softcap is nan", softcap=math.nan),
    "a window that is no pair": wrong("window", TypeError, window=5),
    "a kernel of no name": wrong("kernel is 'flash'; accepted:", kernel="flash"),
    "a kernel of a GPU": wrong("the tensors are on the CPU", kernel="decode"),
    "splits": wrong("num_splits is -1", num_splits=-1),
    "caches of another dtype": wrong(
        "k_cache: dtype is float16; accepted: float32",
        **{f"{x}_cache": normal(4, 60, 2, 64).astype(np.float16) for x in "kv"},
    ),
    "scales": wrong("k_descale is given", k_descale=np.ones(2, np.float32)),
    "a text for a workspace": wrong("workspace is of type str", TypeError, workspace="4096"),
    "a list for a workspace": wrong("workspace is of type list", TypeError, workspace=[0] * 64),
    "a workspace with gaps": wrong(
        "workspace: its elements have gaps between them, shape (4, 4); accepted: a contiguous",
        workspace=np.empty((4, 8), np.uint8)[:, :4],
    ),
    "a read-only workspace": wrong(
        "workspace is read-only", workspace=np.frombuffer(bytes(256), np.uint8)
    ),
    "a read-only out": wrong(
        "out is read-only",
        out=np.frombuffer(bytes(4 * NEW * 4 * 64 * 4), np.float32).reshape(4, NEW, 4, 64),
    ),
    "a list of entries": wrong(
        "cache_batch_idx: shape is (3,)", cache_batch_idx=np.zeros(3, np.int32)
    ),
    "an entry that is none": wrong(
        "cache_batch_idx[3] is 4; accepted: 0 to 3",
        cache_batch_idx=np.array([0, 1, 2, 4], np.int32),
    ),
    "too much padding": wrong("leftpad_k[1] is 4", leftpad_k=np.array([0, 4, 0, 0], np.int32)),
    "a mask of another length": wrong("mask: shape is", mask=np.ones((NEW, 61), bool)),
    "sinks of other heads": wrong("sinks: shape is", sinks=np.ones(3, np.float32)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_writes_nothing(name):
    problem = WRONG[name]
    given = {**problem.defaults, **problem.changes}
    before = {x: a.tobytes() for x, a in given.items() if isinstance(a, np.ndarray)}
    check(problem, dlattn.attention_with_kvcache)
    assert {x: given[x].tobytes() for x in before} == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_seqlens": np.array([0, 1, 58, 2], np.int32)}, "cache_seqlens[2] is 58 with 3 new"),
        ({"cache_seqlens": np.zeros(4, bool)}, "cache_seqlens: dtype is bool"),
        ({"cache_seqlens": 58}, "cache_seqlens is 58; accepted: 0 to 57"),
        ({"s_aux": np.ones(3, np.float32)}, "s_aux: shape is (3,)"),
        ({"window_size": 3}, "window_size is 3"),
    ],
)
def test_a_wrong_call_of_flash_attn_writes_nothing(changes, words):
    given = call()
    given["cache_seqlens"] = given.pop("seqused_k")
    given |= changes
    before = {x: a.tobytes() for x, a in given.items() if isinstance(a, np.ndarray)}
    with pytest.raises((TypeError, dlattn.UnsupportedError)) as caught:
        dlattn.flash_attn.flash_attn_with_kvcache(**given)
    assert words in str(caught.value)
    assert {x: given[x].tobytes() for x in before} == before


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    given = {name: jax.numpy.asarray(x) for name, x in call().items() if name != "causal"}
    with pytest.raises(dlattn.UnsupportedError, match="q is a JAX array and k is given; accepted"):
        dlattn.attention_with_kvcache(**given)


def test_autograd_is_told_what_was_written():
    torch = pytest.importorskip("torch")
    given = {name: torch.from_numpy(np.array(x)) for name, x in call().items() if name != "causal"}
    caches = given["k_cache"], given["v_cache"]
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.attention_with_kvcache(**given, softcap=-1.0)
    assert [x._version for x in caches] == [0, 0]
    dlattn.attention_with_kvcache(**given)
    assert [x._version for x in caches] == [1, 1] and given["k"]._version == 0


def test_lengths_to_which_nothing_can_be_added():
    class Lengths:
        shape, dtype = (4,), np.dtype(np.int32)
        __array_interface__ = BEFORE.__array_interface__

        def __dlpack__(self, **options: Any) -> Any:
            return BEFORE.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return BEFORE.__dlpack_device__()

    given = {**call(), "seqused_k": Lengths()}
    with pytest.raises(TypeError, match=r"seqused_k is of type .*Lengths, to which no int can be"):
        dlattn.attention_with_kvcache(**given)


def test_bits_are_those_of_two_calls():
    given = call()
    other = {name: np.array(x) if name.endswith("cache") else x for name, x in given.items()}
    out = dlattn.attention_with_kvcache(**given)
    k, v = other.pop("k"), other.pop("v")
    dlattn.append_kv(k, v, other["k_cache"], other["v_cache"], seqused_k=BEFORE)
    other["seqused_k"] = BEFORE + NEW
    np.testing.assert_array_equal(out, dlattn.attention_with_kvcache(**other))

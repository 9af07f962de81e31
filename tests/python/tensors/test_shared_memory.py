"""Outputs of a call share no memory with another tensor of the call, whatever that is for.

Each pair of tensors is laid one over the other by a few bytes: the call is refused by both names,
and no byte of any of its tensors changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import normal

import dlattn

NEW, HEADS, HEADS_KV, DIM, CAPACITY = 3, 4, 2, 8, 24
BEFORE = (6, 0, 17)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def poisoned(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, 7, dtype)


def varlen() -> dict[str, Any]:
    return {
        "q": normal(12, HEADS, DIM),
        "k": normal(20, HEADS_KV, DIM, seed=1),
        "v": normal(20, HEADS_KV, DIM, seed=2),
        "cu_seqlens_q": ints(0, 5, 5, 12),
        "cu_seqlens_k": ints(0, 9, 12, 20),
        "max_seqlen_q": 7,
        "max_seqlen_k": 9,
        "seqused_k": ints(4, 3, 8),
        "sinks": normal(HEADS),
        "alibi_slopes": normal(3, HEADS),
        "out": poisoned(12, HEADS, DIM),
        "workspace": poisoned(256, dtype=np.uint8),
    }


def entries() -> dict[str, Any]:
    return {
        "q": normal(3, NEW, HEADS, DIM),
        "k_cache": normal(5, CAPACITY, HEADS_KV, DIM, seed=1),
        "v_cache": normal(5, CAPACITY, HEADS_KV, DIM, seed=2),
        "seqused_k": ints(*BEFORE),
        "cache_batch_idx": ints(4, 0, 2),
        "leftpad_k": ints(1, 0, 5),
        "mask": np.ones((NEW, CAPACITY), bool),
        "sinks": normal(HEADS),
        "alibi_slopes": normal(HEADS),
        "causal": True,
        "out": poisoned(3, NEW, HEADS, DIM),
        "workspace": poisoned(256, dtype=np.uint8),
    }


def pages() -> dict[str, Any]:
    given = entries()
    for name in ("cache_batch_idx", "leftpad_k"):
        del given[name]
    for name in ("k_cache", "v_cache"):
        given[name] = normal(10, 8, HEADS_KV, DIM)
    return given | {"page_table": np.arange(9, dtype=np.int32).reshape(3, 3)}


def in_8_bits() -> dict[str, Any]:
    given = entries()
    for name in ("k_cache", "v_cache"):
        x = normal(5, CAPACITY, HEADS_KV, DIM)
        given[name] = (20 * x).astype(np.int8)
    for name in ("q", "out"):
        given[name] = given[name].astype(np.float16)
    scales = {name: np.full(HEADS_KV, 0.05, np.float32) for name in ("k_descale", "v_descale")}
    return given | scales


def with_new_keys(given: dict[str, Any], rotary: bool = False) -> dict[str, Any]:
    for seed, name in enumerate(("k", "v")):
        given[name] = normal(3, NEW, HEADS_KV, DIM, seed=seed).astype(given["q"].dtype)
    if rotary:
        given |= {f"rotary_{name}": normal(CAPACITY, DIM // 2) for name in ("cos", "sin")}
    return given


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "varlen": (dlattn.attention_varlen, varlen),
    "entries": (dlattn.attention_with_kvcache, entries),
    "pages": (dlattn.attention_with_kvcache, pages),
    "new keys": (dlattn.attention_with_kvcache, lambda: with_new_keys(entries())),
    "new keys in pages": (dlattn.attention_with_kvcache, lambda: with_new_keys(pages())),
    "new keys in 8 bits": (dlattn.attention_with_kvcache, lambda: with_new_keys(in_8_bits())),
    "rotary": (dlattn.attention_with_kvcache, lambda: with_new_keys(entries(), rotary=True)),
}


def arrays_of(given: dict[str, Any]) -> list[str]:
    return [name for name, x in given.items() if isinstance(x, np.ndarray)]


def pairs() -> list[tuple[str, str, str]]:
    """Every tensor that a call writes, beside every other one of it."""
    found = []
    for call, (_, make) in CALLS.items():
        given = make()
        written = ["out", "workspace"]
        if {"k", "k_cache"} <= given.keys():
            written += ["k_cache", "v_cache"]
        for i, name in enumerate(written):
            others = (x for x in arrays_of(given) if x not in written[: i + 1])
            found += [(call, name, other) for other in others]
    return found


@pytest.mark.parametrize(("call", "written", "other"), pairs())
def test_no_memory_is_shared(call: str, written: str, other: str) -> None:
    function, make = CALLS[call]
    given = make()
    if "pages" in call and {written, other} == {"k_cache", "v_cache"}:
        given["v_cache"] = given["k_cache"]  # pages of one pool may be of both
    else:
        pool = np.zeros(1 << 18, np.uint8)
        # The other one begins in what is written, eight bytes before its end.
        for name, at in ((written, 0), (other, given[written].nbytes - 8)):
            x = given[name]
            given[name] = pool[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
            given[name][...] = x
    before = {name: given[name].tobytes() for name in arrays_of(given)}
    with pytest.raises(dlattn.UnsupportedError, match="shares memory with") as caught:
        function(**given)
    assert {name: given[name].tobytes() for name in before} == before
    words = str(caught.value).split(";")[0].split()
    assert {words[0], words[-1]} == {written, other}, caught.value


@pytest.mark.parametrize("call", CALLS)
def test_apart_they_are_accepted(call: str) -> None:
    function, make = CALLS[call]
    given = make()
    assert function(**given) is given["out"]
    assert not np.any(given["out"] == 7) and np.all(given["workspace"] == 7)


def test_a_slice_that_has_no_element_in_common() -> None:
    """New keys and out as parts of one buffer."""
    given = with_new_keys(entries())
    both = np.zeros((3, NEW, HEADS + HEADS_KV, DIM), np.float32)
    both[:, :, HEADS:] = given["k"]
    want = dlattn.attention_with_kvcache(**given).copy()
    again = with_new_keys(entries()) | {"k": both[:, :, HEADS:], "out": both[:, :, :HEADS]}
    np.testing.assert_array_equal(dlattn.attention_with_kvcache(**again), want)


@pytest.mark.parametrize("other", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
@pytest.mark.parametrize("native", [True, False])
def test_operators_of_torch(other: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from dlattn.integrations.torch import ops

    given = {n: torch.from_numpy(x) for n, x in varlen().items() if isinstance(x, np.ndarray)}
    pool = torch.zeros(1 << 12, dtype=torch.uint8)
    at = given["out"].nbytes
    out = pool[:at].view(torch.float32).view(given["out"].shape)
    shared = pool[at - 8 : at - 8 + given[other].nbytes].view(torch.int32)
    given[other] = shared.copy_(given[other])
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    arguments = [*(given[n] for n in names), 7, 9, given["seqused_k"]]
    before = pool.clone()
    schema = f"attention_varlen_out({ops._VARLEN}{ops._OPTIONS}, *, Tensor(a!) out) -> Tensor"
    call = torch.ops.dlattn.attention_varlen_out if native else ops.by_name(schema, ops._varlen)
    with pytest.raises(dlattn.UnsupportedError, match=f"out shares memory with {other}"):
        call(*arguments, out=out)
    assert torch.equal(pool, before)

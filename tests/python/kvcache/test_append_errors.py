"""Wrong calls of `append_kv`: messages name the argument, the value got and what is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from capsules import Exporter

import dlattn
from dlattn import append_kv

CACHE = (2, 8, 2, 16)


def zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def good(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "k": zeros((2, 3, 2, 16)),
        "v": zeros((2, 3, 2, 16)),
        "k_cache": zeros(CACHE),
        "v_cache": zeros(CACHE),
        "seqused_k": ints(1, 2),
    }
    return given | changes


def paged(**changes: Any) -> dict[str, Any]:
    table = {"page_table": np.arange(6, dtype=np.int32).reshape(2, 3)}
    caches = {name: zeros((7, 4, 2, 16)) for name in ("k_cache", "v_cache")}
    return good(**(table | caches | changes))


def slots(**changes: Any) -> dict[str, Any]:
    caches = {name: zeros((7, 4, 2, 16)) for name in ("k_cache", "v_cache")}
    numbers = {"slots": np.arange(6).reshape(2, 3), "seqused_k": None}
    return good(**(numbers | caches | changes))


def rotary(**changes: Any) -> dict[str, Any]:
    tables = {name: zeros((8, 4)) for name in ("rotary_cos", "rotary_sin")}
    return good(**(tables | {"q": zeros((2, 3, 4, 16))} | changes))


def in_8_bits(**changes: Any) -> dict[str, Any]:
    caches = {name: zeros(CACHE, np.int8) for name in ("k_cache", "v_cache")}
    scales = {name: np.ones(2, np.float32) for name in ("k_descale", "v_descale")}
    return good(**(caches | scales | changes))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


WRONG = [
    (good(seqused_k=None), "seqused_k is None; accepted: int32 (batch,), the lengths before"),
    (good(seqused_k=ints(1)), "seqused_k: shape is (1,); accepted: (2,), (batch,)"),
    (good(seqused_k=np.array([1, 2])), "seqused_k: dtype is int64; accepted: int32"),
    (good(seqused_k=ints(1, 6)), "seqused_k[1] is 6 with 3 new keys; accepted: 0 to 5, so that"),
    (good(seqused_k=ints(0, 9, 1)[::2][:2]), "seqused_k: the stride of the last dimension is 2"),
    (good(v=zeros((2, 4, 2, 16))), "v: shape is (2, 4, 2, 16); accepted: that of k but for head_d"),
    (
        good(k=zeros((3, 2, 16))),
        "k has 3 dimensions, shape (3, 2, 16); accepted: 4, (batch, seqlen",
    ),
    (good(k=zeros((2, 3, 2, 32))[..., ::2]), "k: the stride of the last dimension is 2; accepted"),
    (good(k=zeros((2, 3, 2, 16), np.int32)), "k: dtype is int32; accepted: float16, bfloat16"),
    (good(k=zeros((2, 3, 2, 16), np.int8)), "k: dtype is int8; accepted: float16, bfloat16, flo"),
    (good(v=zeros((2, 3, 2, 16), np.float16)), "v: dtype is float16; accepted: float32, that of k"),
    (good(k=zeros((2, 9, 2, 16)), v=zeros((2, 9, 2, 16))), "seqlen_new is 9; accepted: up to 8"),
    (good(k_cache=zeros((2, 8, 3, 16))), "k_cache: shape is (2, 8, 3, 16); accepted: (2, 8, 2, 1"),
    (
        good(k_cache=zeros((3, 8, 2, 16)), v_cache=zeros((3, 8, 2, 16))),
        "k_cache: batch size is 3; a",
    ),
    (good(v_cache=zeros((2, 7, 2, 16))), "v_cache: shape is (2, 7, 2, 16); accepted: (2, 8, 2, 16"),
    (
        good(k_cache=zeros((2, 8, 16))),
        "k_cache has 3 dimensions, shape (2, 8, 16); accepted: 4, (b",
    ),
    (
        good(k_cache=zeros((2, 8, 2, 16), np.float16)),
        "k_cache: dtype is float16; accepted: float32, that of k, int8 or float8_e4m3fn",
    ),
    (good(k_cache=zeros(CACHE, np.uint8)), "k_cache: dtype is uint8; accepted: float16, bfloat16"),
    (good(k_cache=read_only(zeros(CACHE))), "k_cache is read-only; accepted: a tensor that can be"),
    (good(v_cache=read_only(zeros(CACHE))), "v_cache is read-only; accepted: a tensor that can be"),
    (
        good(v_cache=Exporter(zeros(CACHE), copied=True)),
        "v_cache: its exporter gave a copy, by whi",
    ),
    (good(k_cache=list(range(3))), "k_cache is of type list"),
    (good(cache_batch_idx=ints(0, 2)), "cache_batch_idx[1] is 2; accepted: 0 to 1, the entries of"),
    (good(cache_batch_idx=ints(0)), "cache_batch_idx: shape is (1,); accepted: (2,), (batch,)"),
    (good(layout="hbsd"), 'layout is \'hbsd\'; accepted: "bshd" or "bhsd"'),
    (good(stream=3), "stream is 3; accepted: None, as k is on the CPU"),
    (
        good(k_descale=np.ones(1, np.float32)),
        "k_descale is given with k_cache of float32; accepted: n",
    ),
    (
        good(cu_seqlens_q=ints(0, 3, 6)),
        "k has 4 dimensions, shape (2, 3, 2, 16); accepted: 3, (total",
    ),
    (good(cu_seqlens_q=ints()), "cu_seqlens_q is empty; accepted: shape (batch + 1,)"),
    (
        good(cu_seqlens_q=zeros((2, 2), np.int32)),
        "cu_seqlens_q has 2 dimensions, shape (2, 2); acc",
    ),
    (
        good(k=zeros((6, 2, 16)), v=zeros((6, 2, 16)), cu_seqlens_q=ints(0, 5, 7)),
        "cu_seqlens_q[2] is 7; accepted: up to the 6 tokens of the tensor",
    ),
    (
        good(k=zeros((6, 2, 16)), v=zeros((6, 2, 16)), cu_seqlens_q=ints(0, 5, 4)),
        "cu_seqlens_q[2] is 4, less than cu_seqlens_q[1] = 5; accepted: offsets that do not decr",
    ),
    (
        paged(page_table=ints(0, 1)),
        "page_table has 1 dimensions, shape (2,); accepted: 2, (batch, p",
    ),
    (paged(page_table=zeros((3, 3), np.int32)), "page_table: shape is (3, 3); accepted: (2, pages"),
    (paged(page_table=zeros((2, 3), np.int64)), "page_table: dtype is int64; accepted: int32"),
    (
        paged(page_table=np.full((2, 3), 7, np.int32)),
        "page_table[0, 0] is 7; accepted: 0 to 6, the",
    ),
    (
        paged(page_table=zeros((2, 6), np.int32)[:, ::2]),
        "page_table: the stride of the last dimens",
    ),
    (paged(cache_batch_idx=ints(0, 1)), "cache_batch_idx is given with page_table; accepted: none"),
    (
        paged(page_table=zeros((2, 0), np.int32)),
        "seqlen_new is 3; accepted: up to 0, the keys that",
    ),
    (slots(page_table=zeros((2, 3), np.int32)), "page_table is given with slots; accepted: one of"),
    (slots(slots=np.arange(5)), "slots: shape is (5,); accepted: (2, 3), one for each row of k"),
    (slots(slots=zeros((2, 3))), "slots: dtype is float32; accepted: int64 or int32"),
    (
        slots(slots=np.zeros((2, 6), int)[:, ::2]),
        "slots: the stride of dimension 0 is 6; accepted: 3",
    ),
    (slots(slots=np.full((2, 3), 28)), "slots[0] is 28; accepted: 0 to 27, or -1 for none"),
    (slots(slots=np.full((2, 3), -2)), "slots[0] is -2; accepted: 0 to 27, or -1 for none"),
    (slots(cache_batch_idx=ints(0, 1)), "cache_batch_idx is given with slots; accepted: none, as"),
    (
        slots(rotary_cos=zeros((8, 4)), rotary_sin=zeros((8, 4))),
        "rotary_cos is given with slots and without seqused_k; accepted: with seqused_k, which t",
    ),
    (
        slots(k=zeros((6, 2, 16)), v=zeros((6, 2, 16)), slots=np.arange(5)),
        "slots: shape is (5,); accepted: (6,), one for each row of k",
    ),
    (rotary(rotary_cos=None), "rotary_cos is null; accepted: both tables or none"),
    (rotary(rotary_sin=None), "rotary_sin is null; accepted: both tables or none"),
    (
        rotary(rotary_sin=zeros((8, 3))),
        "rotary_sin: shape is (8, 3); accepted: (8, 4), that of rot",
    ),
    (rotary(rotary_cos=zeros((8, 0))), "rotary_cos: shape is (8, 0); accepted: at least one posit"),
    (
        rotary(rotary_cos=zeros(8)),
        "rotary_cos has 1 dimensions, shape (8,); accepted: 2, (position",
    ),
    (
        rotary(rotary_cos=zeros((8, 4), np.int32)),
        "rotary_cos: dtype is int32; accepted: that of k, or float32",
    ),
    (
        rotary(rotary_cos=zeros((8, 4), np.float64)),
        "rotary_cos: dtype is float64; accepted: float32",
    ),
    (
        rotary(rotary_sin=zeros((8, 4), np.float16)),
        "rotary_sin: dtype is float16; accepted: float32",
    ),
    (
        rotary(rotary_cos=zeros((8, 9)), rotary_sin=zeros((8, 9))),
        "rotary_dim is 18, twice the columns of rotary_cos; accepted: even, 2 to head_dim = 16",
    ),
    (
        rotary(rotary_cos=zeros((7, 4)), rotary_sin=zeros((7, 4))),
        "rotary_cos has 7 rows; accepted: at least 8, the keys that the cache has room for",
    ),
    (
        rotary(rotary_cos=None, rotary_sin=None),
        "q is given without rotary_cos and rotary_sin; acce",
    ),
    (good(leftpad_k=ints(0, 0)), "leftpad_k is given without rotary_cos and rotary_sin; accepted"),
    (good(q_fixed_position=True), "q_fixed_position is given without rotary_cos and rotary_sin; a"),
    (rotary(leftpad_k=ints(0, -1)), "leftpad_k[1] is -1; accepted: 0 or more"),
    (
        rotary(q=zeros((2, 4, 4, 16))),
        "q: shape is (2, 4, 4, 16); accepted: that of k but for num_h",
    ),
    (rotary(q=zeros((2, 3, 4, 8))), "q: head_dim is 8; accepted: 16, that of k"),
    (
        rotary(q=zeros((2, 3, 4, 16), np.float16)),
        "q: dtype is float16; accepted: float32, that of k",
    ),
    (rotary(rotary_interleaved=1), "rotary_interleaved is of type int; accepted: a bool"),
    (rotary(q_fixed_position=None), "q_fixed_position is of type NoneType; accepted: a bool"),
    (
        in_8_bits(k_descale=None),
        "k_descale is null with k_cache of int8; accepted: a float32 tensor o",
    ),
    (
        in_8_bits(v_descale=None),
        "v_descale is null with v_cache of int8; accepted: a float32 tensor o",
    ),
    (
        in_8_bits(v_descale=np.ones(3, np.float32)),
        "v_descale: shape is (3,); accepted: one that broadcasts to (batch, num_heads_kv) = (2, 2)",
    ),
    (in_8_bits(k_descale=np.ones(2)), "k_descale: dtype is float64; accepted: float32"),
    (in_8_bits(k_descale=2.0), "k_descale is of type float"),
    (
        in_8_bits(v_cache=zeros(CACHE)),
        "v_cache: dtype is float32; accepted: int8, that of k_cache",
    ),
]


def test_pages_whose_keys_no_number_counts() -> None:
    row = zeros((16,), np.float16)
    pool = np.lib.stride_tricks.as_strided(row, (1, 2**56, 2, 16), (0, 0, 0, 2))
    table = zeros((2, 128), np.int32)
    k = np.ones((2, 3, 2, 16), np.float16)
    message = "page_table: a sequence has 128 pages of 72057594037927936 keys; accepted: room for"
    with pytest.raises(dlattn.UnsupportedError, match=message):
        append_kv(k, k, pool, pool, page_table=table, seqused_k=ints(0, 0))
    assert (row == 0).all()


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[m[:50] for _, m in WRONG])
def test_wrong_calls(arguments: dict[str, Any], message: str) -> None:
    """Nothing is written before."""
    caches = [arguments["k_cache"], arguments["v_cache"]]
    for cache in caches:
        if isinstance(cache, np.ndarray) and cache.flags.writeable:
            cache[...] = 3
    with pytest.raises((dlattn.UnsupportedError, TypeError)) as error:
        append_kv(**arguments)
    assert str(error.value).startswith(message), str(error.value)
    for cache in caches:
        assert not isinstance(cache, np.ndarray) or not cache.flags.writeable or (cache == 3).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_whose_elements_share_memory(name: str) -> None:
    shared = np.lib.stride_tricks.as_strided(zeros((8, 2, 16)), CACHE, (0, 128, 64, 4))
    with pytest.raises(dlattn.UnsupportedError, match=f"{name}: a stride of 0 elements makes"):
        append_kv(**good(**{name: shared}))
    both = zeros(CACHE)
    message = "k_cache shares memory with v_cache; accepted: memory of its own"
    with pytest.raises(dlattn.UnsupportedError, match=message):
        append_kv(**good(k_cache=both, v_cache=both))
    # Views of one pool, of which only pages may have parts in common.
    pool = zeros((CACHE[0] + 1, *CACHE[1:]))
    parts = {"k_cache": pool[:-1], "v_cache": pool[1:]}
    with pytest.raises(dlattn.UnsupportedError, match=message):
        append_kv(**good(**parts))
    slots = {"slots": np.zeros((2, 3), np.int64), "seqused_k": None}
    with pytest.raises(dlattn.UnsupportedError, match=message):
        append_kv(**good(k_cache=both, v_cache=both, **slots))


def test_pages_of_one_pool() -> None:
    """Keys in even pages of a pool, values in the odd ones, as transformers has them."""
    rng = np.random.default_rng(0)
    pool = zeros((9, 4, 2, 16))
    k, v = rng.standard_normal((2, 2, 3, 2, 16), dtype=np.float32)
    table = np.array([[4, 2], [0, 6]], np.int32)
    used = np.array([2, 0], np.int32)
    append_kv(k, v, pool[:-1], pool[1:], seqused_k=used, page_table=table)
    want = zeros(pool.shape)
    for b, i in np.ndindex(2, 3):
        page, row = table[b, (used[b] + i) // 4], (used[b] + i) % 4
        want[page, row], want[page + 1, row] = k[b, i], v[b, i]
    assert np.array_equal(pool, want)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.zeros(CACHE, "float32")
    for name in ("k_cache", "v_cache"):
        message = f"{name}: JAX arrays are immutable; accepted: a tensor that can be written"
        with pytest.raises(dlattn.UnsupportedError, match=message):
            append_kv(**good(**{name: array}))
    with pytest.raises(dlattn.UnsupportedError, match="k is a JAX array; accepted: a tensor of"):
        append_kv(**good(k=jax.numpy.zeros((2, 3, 2, 16), "float32")))


def test_torch_tensors() -> None:
    """In place: autograd is told, and what it holds is refused."""
    torch = pytest.importorskip("torch")
    caches = {name: torch.full(CACHE, 3.0) for name in ("k_cache", "v_cache")}
    tables = {name: torch.rand(8, 8) for name in ("rotary_cos", "rotary_sin")}
    k, v, q = torch.rand(2, 3, 2, 16), torch.rand(2, 3, 2, 16), torch.rand(2, 3, 4, 16)
    used = torch.tensor([1, 2], dtype=torch.int32)
    versions = [cache._version for cache in caches.values()]
    out = append_kv(k, v, **caches, seqused_k=used, q=q, **tables)
    assert type(out) is torch.Tensor and out.shape == q.shape
    assert [cache._version for cache in caches.values()] == [n + 1 for n in versions]
    for b, first in enumerate(used.tolist()):
        assert torch.equal(caches["v_cache"][b, first : first + 3], v[b])
        assert (caches["v_cache"][b, :first] == 3).all()
        assert (caches["v_cache"][b, first + 3 :] == 3).all()
    learnt = torch.zeros(CACHE, requires_grad=True)
    with pytest.raises(dlattn.UnsupportedError, match="k_cache requires grad"):
        append_kv(k, v, learnt, caches["v_cache"], seqused_k=used)


def test_torch_8_bit_caches() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        caches = [torch.zeros(CACHE).to(dtype) for _ in "kv"]
        x = torch.arange(192.0).reshape(2, 3, 2, 16) - 96
        used = torch.tensor([0, 5], dtype=torch.int32)
        scale = torch.tensor(2.0)
        append_kv(x, x, *caches, seqused_k=used, k_descale=scale, v_descale=scale)
        halves = x / 2
        stored = torch.round(halves) if dtype is torch.int8 else halves.to(dtype).float()
        assert torch.equal(caches[0][0, :3].float(), stored[0])
        assert torch.equal(caches[1][1, 5:].float(), stored[1])

"""Every int of a call may be an integer of another library, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import normal

import dlattn
from dlattn import flash_attn, sageattention
from dlattn._numbers import integer

Int = Callable[[int], Any]


class Index:
    """An integer of a library that registers it nowhere."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


Q, K, V = normal(9, 4, 64, seed=1), normal(20, 2, 64, seed=2), normal(20, 2, 64, seed=3)
CU_Q, CU_K = np.array([0, 4, 9], np.int32), np.array([0, 12, 20], np.int32)
VARLEN = (Q, K, V, CU_Q, CU_K)
PAGES = normal(6, 16, 2, 64, seed=4), normal(6, 16, 2, 64, seed=5)
TABLE, USED = np.array([[4, 1], [2, -1]], np.int32), np.array([19, 7], np.int32)
PAGED: dict[str, Any] = {"page_table": TABLE, "seqused_k": USED}
LISTS = [np.array(x, np.int32) for x in ([0, 2, 3], [4, 1, 2], [3, 7])]


def quantized(number: Int) -> Any:
    q, k, v = (x.astype("f2") for x in (Q, K, V))
    kv = dlattn.quantize_kv(k, v, cu_seqlens_k=CU_K, max_seqlen_k=number(12))
    return dlattn.attention_varlen(q, kv, None, CU_Q, CU_K, 5, 12)


def jax_window(number: Int) -> Any:
    pytest.importorskip("jax")
    import dlattn.jax

    return dlattn.jax.dot_product_attention(
        Q[None], K[None, :9], V[None, :9], local_window_size=(number(3), number(1))
    )


def jax_attention(number: Int) -> Any:
    pytest.importorskip("jax")
    import dlattn.jax

    return dlattn.jax.attention(Q[None], K[None], V[None], window=(number(3), None))


CALLS: dict[str, Callable[[Int], Any]] = {
    "window": lambda n: dlattn.attention(Q[None], K[None], V[None], window=(n(3), n(2))),
    "max_seqlen": lambda n: dlattn.attention_varlen(*VARLEN, n(5), n(12)),
    "max_seqlen_k of pages": lambda n: dlattn.attention_varlen(
        Q, *PAGES, CU_Q, None, n(5), n(32), **PAGED
    ),
    "num_splits": lambda n: dlattn.attention_with_kvcache(
        Q[None, :2].reshape(2, 1, 4, 64), *PAGES, **PAGED, num_splits=n(2)
    ),
    "split_size": lambda n: dlattn.attention_with_kvcache(
        Q[None, :2].reshape(2, 1, 4, 64), *PAGES, **PAGED, split_size=n(128)
    ),
    "quantize_kv": quantized,
    "page_size": lambda n: dlattn.page_table_from_csr(*LISTS, page_size=n(16), max_pages=n(4))[1],
    "max_pages": lambda n: dlattn.page_table_from_csr(*LISTS, page_size=16, max_pages=n(4))[0],
    # The lengths of an engine's model, more than the pages have, are clamped.
    "flash_attn's max_seqlen_k": lambda n: flash_attn.flash_attn_varlen_func(
        Q, *PAGES, CU_Q, None, n(5), n(131072), block_table=TABLE, seqused_k=USED
    ),
    "flash_attn's window_size": lambda n: flash_attn.flash_attn_varlen_func(
        *VARLEN, n(5), n(12), window_size=(n(12), n(2))
    ),
    "flash_attn's num_splits": lambda n: flash_attn.flash_attn_varlen_func(
        *VARLEN, 5, 12, num_splits=n(1)
    ),
    "flash_attn's cache_seqlens": lambda n: flash_attn.flash_attn_with_kvcache(
        Q[None], K[None], V[None], cache_seqlens=n(17)
    ),
    "sageattention's max_seqlen": lambda n: sageattention.sageattn_varlen(
        Q.astype("f2"), K.astype("f2"), V.astype("f2"), CU_Q, CU_K, n(5), n(12)
    ),
    "jax's local_window_size": jax_window,
    "jax's window": jax_attention,
}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.uint64, Index])
@pytest.mark.parametrize("call", CALLS)
def test_integers_of_other_libraries(call: str, kind: Int) -> None:
    def number(value: int) -> Any:
        return kind(value) if kind is not np.uint8 or value < 256 else np.uint32(value)

    np.testing.assert_array_equal(CALLS[call](number), CALLS[call](int))


WRONG: dict[str, Int] = {
    "bool": bool,
    "np.bool": np.bool_,
    "float": float,
    "np.float32": np.float32,
    "array": np.array,  # as one on a GPU, which reading would wait for
    "text": str,
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", [call for call in CALLS if call != "flash_attn's cache_seqlens"])
def test_what_is_no_integer(call: str, kind: str) -> None:
    with pytest.raises(TypeError, match="accepted: "):
        CALLS[call](WRONG[kind])


def test_integer() -> None:
    assert [integer(x) for x in (3, np.int8(-3), Index(5), 2**80)] == [3, -3, 5, 2**80]
    assert type(integer(np.int64(3))) is int
    assert [integer(kind(1)) for kind in WRONG.values()] == [None] * len(WRONG)
    torch = pytest.importorskip("torch")
    assert integer(torch.tensor(3)) is None


@pytest.mark.parametrize("softcap", [np.float32(-1), np.float16(0), np.int64(-2), -1.0])
def test_softcap_of_flash_attn_that_is_none(softcap: Any) -> None:
    out = flash_attn.flash_attn_func(Q[None], K[None], V[None], softcap=softcap)
    np.testing.assert_array_equal(out, flash_attn.flash_attn_func(Q[None], K[None], V[None]))

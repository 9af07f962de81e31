"""Few rows per KV head, which the CPU computes with keys in its lanes: the bits are those of the
same rows among many, which have queries in the lanes. Right results are other tests' matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import NumPy, normal

import dlattn

MANY, KEYS, HEADS = 40, 3300, 4  # more keys than are added up without totals in double
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def bias(dtype: str, value: float | None = None, keys_first: bool = False) -> np.ndarray:
    """(1, HEADS, MANY, KEYS), with a value among the others if one is given."""
    shape = (1, HEADS, KEYS, MANY) if keys_first else (1, HEADS, MANY, KEYS)
    x = normal(*shape, seed=8, dtype=dtype if dtype == "float64" else "float32")
    if value is not None:
        x[..., 5::7, 3::11] = value
    return np.swapaxes(x, 2, 3) if keys_first else x


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (None, 3)},  # to the left it decides where tiles of keys begin
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": np.array([0.3, 0.01, -0.002, 1e30], np.float32), "causal": True},
    "sinks": {"sinks": normal(HEADS, seed=6)},
    "bias": {"bias": lambda dtype: bias(dtype)},
    "bias by keys": {"bias": lambda dtype: bias(dtype, keys_first=True)},
    "hidden": {"bias": lambda dtype: bias(dtype, -np.inf), "softcap": 3.0},
    "least": {"bias": lambda dtype: bias(dtype, np.finfo(np.float32).min)},
    "mask": {"mask": np.random.default_rng(1).random((1, 1, MANY, KEYS)) < 0.4},
    "mask by keys": {"mask": np.random.default_rng(2).random((1, HEADS, 1, KEYS)) < 0.1},
}


def last_rows(rows: int, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the last rows of q."""
    found = {}
    for name, value in options.items():
        x = value(dtype) if callable(value) else value
        by_rows = name in ("bias", "mask") and x.shape[2] == MANY
        found[name] = x[:, :, -rows:] if by_rows else x
    return found


def assert_same(x: np.ndarray, y: np.ndarray) -> None:
    """Equal numbers, or NaN where the other is."""
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_of_rows_among_many(name, dtype):
    options = OPTIONS[name]
    for num_heads_kv, head_dim, head_dim_v, keys in (
        (4, 64, 64, KEYS),
        (2, 20, 40, 97),
        (1, 72, 24, 200),
        (4, 128, 136, 7),
    ):
        q = normal(1, MANY, HEADS, head_dim, dtype=dtype)
        k = normal(1, keys, num_heads_kv, head_dim, seed=2, dtype=dtype)
        v = normal(1, keys, num_heads_kv, head_dim_v, seed=3, dtype=dtype)
        k[:, keys // 2] = np.inf if name == "mask" else k[:, 0]
        common = {"batch_invariant": True, "return_lse": True}

        def run(
            rows: int,
            q: np.ndarray = q,
            k: np.ndarray = k,
            v: np.ndarray = v,
            common: dict[str, Any] = common,
        ) -> tuple[np.ndarray, np.ndarray]:
            given = last_rows(rows, dtype, options)
            for tensor in {"bias", "mask"} & given.keys():
                given[tensor] = given[tensor][..., : k.shape[1]]
            out = np.full((1, rows, HEADS, v.shape[-1]), np.nan, q.dtype)
            return dlattn.attention(q[:, -rows:], k, v, **given, **common, out=out)

        out, lse = run(MANY)
        for rows in (1, 2, 3):
            few, few_lse = run(rows)
            assert_same(few, out[:, -rows:])
            assert_same(few_lse, lse[:, :, -rows:])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn"])
def test_keys_in_pages(dtype):
    """Pages of 16 keys, which lie apart; NaN where no sequence has a key."""
    lengths, page = np.array([130, 1, 67], np.int32), 16
    num_pages = -(-int(lengths.max()) // page)
    table = np.arange(3 * num_pages, dtype=np.int32).reshape(3, -1)[:, ::-1]
    kept = "float16" if dtype == "float8_e4m3fn" else dtype
    k, v = (normal(3 * num_pages, page, 2, 64, seed=seed) for seed in (2, 3))
    for b, length in enumerate(lengths):
        for n in range(length, num_pages * page):
            k[table[b, n // page], n % page] = v[table[b, n // page], n % page] = np.nan
    k, v = (NumPy().array(x, dtype) for x in (k, v))
    q = normal(3, MANY, 4, 64, dtype=kept)
    options = {
        "seqused_k": lengths,
        "page_table": np.ascontiguousarray(table),
        "causal": True,
        "batch_invariant": True,
    }
    if dtype == "float8_e4m3fn":
        descale = np.full((3, 2), 0.5, np.float32)
        options |= {"k_descale": descale, "v_descale": descale}
    out = dlattn.attention_with_kvcache(q, k, v, **options)
    assert np.isfinite(out.astype(np.float32)).all()
    for rows in (1, 2):
        few = dlattn.attention_with_kvcache(q[:, -rows:], k, v, **options)
        assert_same(few, out[:, -rows:])

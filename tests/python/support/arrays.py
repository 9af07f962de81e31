"""Arrays of every tensor library, made from the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlattn.reference import attention_reference, error_bound, max_error, to_float64


class Framework:
    """How to make an array of one library, and how to look at it."""

    name: str
    dtypes = ("float16", "bfloat16", "float32", "float64")

    def array(self, values: Any, dtype: str | None = None) -> Any:
        raise NotImplementedError

    def is_array(self, x: Any) -> bool:
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def pointer(self, x: Any) -> int:
        raise NotImplementedError


class NumPy(Framework):
    name = "numpy"

    def array(self, values, dtype=None):
        if dtype in ("bfloat16", "float8_e4m3fn"):
            dtype = getattr(pytest.importorskip("ml_dtypes"), str(dtype))
        return np.array(values, dtype=dtype)

    def is_array(self, x):
        return type(x) is np.ndarray

    def pointer(self, x):
        return x.__array_interface__["data"][0]


class Torch(Framework):
    name = "torch"

    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def array(self, values, dtype=None):
        values = np.array(values)
        return self.torch.from_numpy(values).to(getattr(self.torch, dtype or str(values.dtype)))

    def is_array(self, x):
        return type(x) is self.torch.Tensor

    def pointer(self, x):
        return x.data_ptr()


class Jax(Framework):
    name = "jax"
    dtypes = ("float16", "bfloat16", "float32")  # float64 is off unless a program turns it on

    def __init__(self):
        self.jax = pytest.importorskip("jax")

    def array(self, values, dtype=None):
        cpu = self.jax.devices("cpu")[0]
        return self.jax.device_put(self.jax.numpy.asarray(values, dtype=dtype), cpu)

    def is_array(self, x):
        return isinstance(x, self.jax.Array)

    def pointer(self, x):
        return x.unsafe_buffer_pointer()


FRAMEWORKS = {"numpy": NumPy, "torch": Torch, "jax": Jax}


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Normal values around 0.25: no result is right by being zero."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.25
    return NumPy().array(values, dtype)


def qkv(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    num_heads: int = 4,
    num_heads_kv: int = 2,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    *,
    layout: str = "bshd",
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = (
        normal(batch, seqlen_q, num_heads, head_dim, seed=1, dtype=dtype),
        normal(batch, seqlen_k, num_heads_kv, head_dim, seed=2, dtype=dtype),
        normal(batch, seqlen_k, num_heads_kv, head_dim_v or head_dim, seed=3, dtype=dtype),
    )
    if layout == "bhsd":
        return tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays)
    return arrays


def assert_attention(actual: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """`actual`, out or (out, lse), is within the bound of the float64 reference."""
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    expected = attention_reference(q, k, v, **options)
    bound = error_bound(q, k, v, expected=expected, **options)
    assert max_error(out, expected[0]) <= bound.out
    if lse is not None:
        # lse is stored in float32, even of a computation in float64.
        finite = expected[1][np.isfinite(expected[1])]
        rounding = np.spacing(np.float32(np.max(np.abs(finite), initial=1.0)))
        assert max_error(lse, expected[1]) <= bound.lse + rounding


def poisoned(*shape: int, dtype: str = "float32") -> np.ndarray:
    return NumPy().array(np.full(shape, np.nan), dtype)


__all__ = [
    "FRAMEWORKS",
    "Framework",
    "assert_attention",
    "max_error",
    "normal",
    "poisoned",
    "qkv",
    "to_float64",
]

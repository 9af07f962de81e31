"""Every contestant is right before it is timed: NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.bench.cases import Case
from dlattn.reference import attention_reference, error_bound, max_error

Array = NDArray[Any]

OFFSET = 0.25  # a mean that is not zero, so that an indexing error cannot cancel out

_ALL_SCORES = 1 << 27  # problems with more scores than this are checked on a sample of rows
_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class Expected:
    """The right values of some rows, and how far off a correct result may be there."""

    where: tuple[slice, slice, slice]  # batch entries, heads, query rows
    out: Array
    bound: float


def draw(case: Case, seed: int = 0) -> tuple[Array, Array, Array]:
    """Normal inputs with a mean that is not zero, (batch, num_heads, seqlen, head_dim)."""
    rng = np.random.default_rng(seed)
    dtype: Any = case.dtype
    if case.dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    q, k, v = (rng.standard_normal(case.sizes, dtype=np.float32) + OFFSET for _ in range(3))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def expect(case: Case, q: Array, k: Array, v: Array) -> list[Expected]:
    """The float64 reference: everything, or the first and last rows of the first and last heads."""
    expected = []
    for batch, heads, rows, keys in _samples(case):
        part = (q[batch, heads, rows], k[batch, heads, keys], v[batch, heads, keys])
        # The rows at the end of a causal problem see the keys that a shorter one, aligned at the
        # end, shows them: so a slice of rows is a problem of its own.
        out, lse = attention_reference(*part, causal=case.causal, layout="bhsd")
        bound = error_bound(*part, expected=(out, lse), causal=case.causal, layout="bhsd")
        expected.append(Expected((batch, heads, rows), out, bound.out))
    return expected


def measure(out: Array, expected: list[Expected]) -> tuple[float, float]:
    """Largest error, and the largest error in units of its bound."""
    errors = [(max_error(out[e.where], e.out), e.bound) for e in expected]
    return max(error for error, _ in errors), max(error / bound for error, bound in errors)


class Expectations:
    """The result of `expect`, as the GPU's counterpart in `tensors` offers it."""

    def __init__(self, case: Case, q: Array, k: Array, v: Array) -> None:
        """Compute it."""
        self._expected = expect(case, q, k, v)

    def errors(self, out: Array) -> tuple[float, float]:
        """Largest error, and the largest error in units of its bound."""
        return measure(out, self._expected)


def _samples(case: Case) -> Iterator[tuple[slice, slice, slice, slice]]:
    batch_size, num_heads, seqlen, _ = case.sizes
    whole = slice(None)
    if batch_size * num_heads * seqlen**2 <= _ALL_SCORES:
        yield whole, whole, whole, whole
        return
    first_rows, last_rows = slice(0, _SAMPLE_ROWS), slice(seqlen - _SAMPLE_ROWS, seqlen)
    for b, h in {(0, 0), (batch_size - 1, num_heads - 1)}:
        for rows in (first_rows, last_rows):
            keys = slice(0, rows.stop) if case.causal else whole
            yield slice(b, b + 1), slice(h, h + 1), rows, keys

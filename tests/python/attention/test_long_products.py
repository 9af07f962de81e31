"""The rounding of scores on CPUs: of products over head_dim."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn
from dlattn.reference import attention_reference, error_bound, max_error


@pytest.mark.parametrize("rows", (1, 64))
@pytest.mark.parametrize("dim", (64, 256, 250))
def test_products_are_as_exact_as_plain_ones(rows: int, dim: int) -> None:
    """With one key lse is its score: its error, root mean square, and that of a sum by NumPy."""
    rng = np.random.default_rng([rows, dim])
    q, k = (
        (rng.standard_normal((1024 // rows, n, 2, dim)) + 0.2).astype(np.float32) for n in (rows, 1)
    )
    _, lse = dlattn.attention(q, k, k, softmax_scale=1.0, return_lse=True)
    exact = (q.astype(np.float64) * k).sum(-1).swapaxes(1, 2)
    plain = (q * k).sum(-1).swapaxes(1, 2)
    errors = [float(np.sqrt(np.mean((x - exact) ** 2))) for x in (lse, plain)]
    assert errors[0] <= 2 * errors[1], errors


def test_large_scores_with_sinks_and_a_window() -> None:
    """Scores of some 50, as models with sinks have them, which leave few keys their weight."""
    rng = np.random.default_rng(7)
    q, k, v = ((rng.standard_normal((2, n, h, 64)) + 0.2) for n, h in ((9, 8), (180, 2), (180, 2)))
    q, k, v = (x.astype(np.float32) for x in (10 * q, k, v))
    options = {
        "causal": True,
        "window": (127, 0),
        "sinks": rng.standard_normal(8).astype(np.float32),
    }
    out = np.full(q.shape, np.nan, np.float32)
    dlattn.attention(q, k, v, out=out, **options)
    expected = attention_reference(q, k, v, **options)
    assert max_error(out, expected[0]) <= error_bound(q, k, v, expected=expected, **options).out

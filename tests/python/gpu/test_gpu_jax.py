"""JAX on a GPU: its own streams, memory under pressure, what is held and let go."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, max_error, qkv, to_float64

import dlattn
from dlattn import UnsupportedError, _core
from dlattn.reference import attention_reference, error_bound

pytestmark = pytest.mark.gpu

SIZES = {"batch": 1, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 8, "num_heads_kv": 8,
           "head_dim": 64}  # fmt: skip


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax {jax.__version__} finds no GPU")
    return jax


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_jax(jax, dtype, return_lse):
    arrays = [jax.numpy.asarray(x, dtype=dtype) for x in qkv(2, 70, 90, 4, 2, 32)]
    assert _core.inspect(arrays[0])["pointer"] == arrays[0].unsafe_buffer_pointer()
    result = dlattn.attention(*arrays, causal=True, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert (
        isinstance(out, jax.Array) and out.dtype == dtype and out.devices() == arrays[0].devices()
    )
    assert_attention(result, *arrays, causal=True)


def test_jax_with_much_going_on(jax):
    """Inputs just computed and dropped at once, results used at once, memory under pressure."""
    numbers = qkv(2, 256, 256, 4, 4, 64)
    half = [jax.numpy.asarray(x, dtype="float16") for x in numbers]
    rounded = [np.asarray(x) for x in half]
    expected = attention_reference(*rounded, causal=True)
    bound = error_bound(*rounded, causal=True, expected=expected)

    @jax.jit
    def produce(x: Any, n: Any) -> Any:
        big = jax.numpy.sin(jax.numpy.full((1024, 1024), 0.5) * n)
        for _ in range(8):
            big = jax.numpy.tanh(big @ big)  # takes a while
        return x + 0 * big[0, 0].astype(x.dtype)

    results, sums = [], []
    for n in range(200):
        q, k, v = (produce(x, n) for x in half)
        out, lse = dlattn.attention(q, k, v, causal=True, return_lse=True)
        q.delete()
        del k, v
        junk = [jax.numpy.full(half[0].shape, jax.numpy.nan, dtype="float16") for _ in range(3)]
        sums.append(out.astype("float32").sum() + lse.sum())
        del junk
        if n % 3 == 0:
            results.append((out, lse))
        else:
            out.delete()
    want = np.asarray(sums[0])
    for out, lse in results:
        assert max_error(np.asarray(out), expected[0]) <= bound.out
        assert max_error(np.asarray(lse), expected[1]) <= bound.lse
        np.testing.assert_array_equal(np.asarray(out), np.asarray(results[0][0]))
    np.testing.assert_allclose(np.asarray(sums), want, rtol=1e-4)


def test_jax_memory_is_let_go(jax):
    framework = sys.modules["dlattn.frameworks"]._FRAMEWORKS["jax"]
    arrays = [jax.numpy.asarray(x, dtype="float16") for x in qkv(**SIZES)]
    for _ in range(50):
        dlattn.attention(*arrays).block_until_ready()
    for sentinel, _ in framework._in_flight:
        sentinel.block_until_ready()
    dlattn.attention(*arrays)
    assert len(framework._in_flight) == 1


def test_jax_wrong_calls(jax):
    q, k, v = (jax.numpy.asarray(x, dtype="float16") for x in qkv())
    with pytest.raises(UnsupportedError, match="k: head_dim is 7"):
        dlattn.attention(q, k[..., :7], v)
    with pytest.raises(UnsupportedError, match="out: JAX arrays are immutable"):
        dlattn.attention(q, k, v, out=q)
    assert dlattn.supported(q, k, v) and dlattn.plan(q, k, v).device == "cuda:0"


def test_jax_merge_states(jax):
    arrays = [jax.numpy.asarray(x, dtype="float32") for x in qkv(seqlen_k=12)]
    q, k, v = arrays
    parts = [
        dlattn.attention(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(0, 5), slice(5, 12))
    ]
    outs, lses = zip(*parts, strict=True)
    out, lse = dlattn.merge_states(outs, lses)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    expected = attention_reference(*arrays)
    assert max_error(to_float64(np.asarray(out)), expected[0]) <= 1e-5
    assert max_error(to_float64(np.asarray(lse)), expected[1]) <= 1e-5

"""`dlattn.jax` on a GPU: under jit, in CUDA graphs, with a workspace, sharded over GPUs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, normal, qkv
from programs import HERE

import dlattn

pytestmark = pytest.mark.gpu


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax {jax.__version__} finds no GPU")
    return jax


@pytest.fixture
def face(jax):
    import dlattn.jax

    return dlattn.jax


def arrays(jax: Any, *shape: int, dtype: str = "float16") -> list[Any]:
    return [jax.numpy.asarray(x, dtype=dtype) for x in qkv(*shape)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("jit", [True, False])
def test_attention(jax, face, dtype, jit):
    q, k, v = arrays(jax, 2, 70, 90, 4, 2, 64, dtype=dtype)
    call = functools.partial(face.attention, causal=True, return_lse=True)
    result = (jax.jit(call) if jit else call)(q, k, v)
    assert result[0].devices() == q.devices() and result[0].dtype == dtype
    assert_attention(result, q, k, v, causal=True)
    np.testing.assert_array_equal(
        np.asarray(result[0], np.float32),
        np.asarray(dlattn.attention(q, k, v, causal=True), np.float32),
    )


def test_every_tensor(jax, face):
    q, k, v = arrays(jax, 2, 70, 90, 4, 2, 64)
    tensors = {
        "bias": normal(4, 70, 90, seed=4),
        "mask": np.random.default_rng(1).random((2, 1, 70, 90)) < 0.8,
        "alibi_slopes": np.abs(normal(2, 4, seed=5)),
        "sinks": normal(4, seed=6),
    }
    call = jax.jit(lambda a, t: face.attention(*a, **t, softcap=5.0, return_lse=True))
    assert_attention(call((q, k, v), tensors), q, k, v, softcap=5.0, **tensors)


@pytest.mark.parametrize("graphs", [True, False])
def test_among_other_work(jax, face, graphs):
    """Results feed further kernels at once, many times over; in a CUDA graph where XLA makes one.

    Flags of XLA are read as JAX starts, so the process is another.
    """
    code = """
import functools, jax, numpy as np, dlattn, dlattn.jax
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (2, 256, 4, 64), "float16") for key in keys)
@jax.jit
def layers(q, k, v):
    for _ in range(4):
        q = dlattn.jax.attention(jax.numpy.tanh(q), k, v, causal=True) * 1.5
    return q
want = q
for _ in range(4):
    want = dlattn.attention(jax.numpy.tanh(want), k, v, causal=True) * 1.5
for n in range(50):
    got = layers(q, k, v)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=2e-3)
    k = k + 0 * got[:, :1].mean().astype(k.dtype)
"""
    kinds = "FUSION,CUBLAS,CUSTOM_CALL" if graphs else ""
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["int8_fp8", "fp8"])
@pytest.mark.parametrize("mapped", [True, False])
def test_workspace(jax, face, precision, mapped):
    q, k, v = arrays(jax, 2, 300, 500, 4, 2, 128, dtype="bfloat16")
    if not dlattn.supported(q, k, v, precision=precision):
        pytest.skip(f"this GPU has no kernel for precision {precision}")
    call = functools.partial(face.attention, precision=precision)
    want = np.asarray(dlattn.attention(q, k, v, precision=precision), np.float32)
    if mapped:
        got = jax.jit(jax.vmap(call))(*(x[:, None] for x in (q, k, v)))[:, 0]
    else:
        got = jax.jit(call)(q, k, v)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def test_float8(jax, face):
    q, k, v = arrays(jax, 2, 70, 90, 4, 2, 64, dtype="float8_e4m3fn")
    if not dlattn.supported(q, k, v):
        pytest.skip("this GPU has no kernel for float8")
    scale = np.exp2(normal(2, 2, seed=1))
    got = jax.jit(lambda *a: face.attention(*a, k_descale=scale))(q, k, v)
    want = dlattn.attention(q, k, v, k_descale=jax.numpy.asarray(scale))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_lengths(jax, face):
    q, k, v = arrays(jax, 3, 70, 90, 4, 2, 64)
    lengths = np.array([90, 1, 33], np.int32)
    out = jax.jit(face.dot_product_attention)(q, k, v, key_value_seq_lengths=lengths)
    for n, length in enumerate(lengths):
        one = [x[n : n + 1] for x in (q, k[:, :length], v[:, :length])]
        assert_attention(out[n : n + 1], *one)


def test_gradients(jax, face):
    q, k, v = arrays(jax, 2, 70, 90, 4, 2, 64, dtype="float32")

    def gradient(function: Any, **options: Any) -> Any:
        return jax.jit(
            jax.grad(lambda *a: jax.numpy.sin(function(*a, **options)).sum(), argnums=(0, 1, 2))
        )(q, k, v)

    own = gradient(face.attention, causal="top_left")
    with jax.default_matmul_precision("highest"):
        nn = gradient(jax.nn.dot_product_attention, is_causal=True)
    for got, want in zip(own, nn, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-3, atol=1e-4)


def test_refusals_at_tracing_and_later(jax, face):
    q, k, v = arrays(jax, 1, 16, 16, 2, 2, 16)
    with pytest.raises(dlattn.UnsupportedError, match="no kernel can run this: "):
        jax.jit(functools.partial(face.attention, kernel="wmma:no_such"))(q, k, v)
    jax.config.update("jax_enable_x64", True)  # float64 is the CPU's, which tracing cannot rule out
    try:
        wide = [jax.numpy.asarray(np.asarray(x), "float64") for x in (q, k, v)]
        with pytest.raises(Exception, match="no kernel can run this: "):
            np.asarray(jax.jit(face.attention)(*wide))
    finally:
        jax.config.update("jax_enable_x64", False)


def test_sharded_over_gpus(jax):
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    program = HERE / "jax_sharded.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr

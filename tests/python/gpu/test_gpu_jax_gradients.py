"""Gradients of `dlattn.jax` on a GPU: by the backward pass's kernels, in CUDA graphs, sharded."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from arrays import qkv
from gradients import random_problem
from programs import HERE

pytestmark = pytest.mark.gpu
FLAGS = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax {jax.__version__} finds no GPU")
    return jax


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
def test_random_problems(jax, seed, dtype):
    from jax_gradients import check_problem

    check_problem(random_problem(seed, dtype, most=150, dims=(64, 128)))


@pytest.mark.parametrize(
    "features",
    [
        ("bias", "causal", "dlse"),
        ("alibi", "sinks", "window", "bhsd"),
        ("mask", "softcap", "sinks", "bias", "alibi", "causal"),
    ],
)
def test_features(jax, features):
    from jax_gradients import check_problem

    check_problem(random_problem(3, "float16", most=150, features=features, dims=(64,)))


def test_no_scores_in_memory(jax):
    import dlattn.jax as face

    arrays = [jax.numpy.asarray(x, "float16") for x in qkv(1, 4096, 4096, 4, 2, 64)]
    gradient = jax.grad(lambda a: face.attention(*a, causal=True).astype("float32").sum())
    used = jax.jit(gradient).lower(arrays).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * 4096 * 4096 * 2 // 4  # of one matrix of scores in 16 bits


def test_vmap(jax):
    import dlattn.jax as face

    q, k, v = (jax.numpy.asarray(x, "float16") for x in qkv(3, 70, 90, 4, 2, 64))
    bias = jax.numpy.asarray(np.random.default_rng(1).random((4, 1, 90)), "float32")

    def gradient(q, k, v, bias):
        def loss(bias):
            out = face.attention(q[None], k[None], v[None], bias=bias)
            return jax.numpy.sin(out.astype("float32")).sum()

        return jax.grad(loss)(bias)

    found = jax.jit(jax.vmap(gradient, in_axes=(0, 0, 0, None)))(q, k, v, bias)
    for n in range(3):
        want = np.asarray(gradient(q[n], k[n], v[n], bias))
        assert np.abs(want).max() > 1e-2
        np.testing.assert_allclose(found[n], want, atol=2e-2 * np.abs(want).max())


@pytest.mark.parametrize("kinds", ["", "FUSION,CUBLAS,CUSTOM_CALL"])
def test_among_other_work(jax, kinds):
    """Many times over, in a CUDA graph where XLA makes one: the same bits, and those of one call.

    Flags of XLA are read as JAX starts, so the process is another.
    """
    code = """
import jax, numpy as np, dlattn, dlattn.jax
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (2, 256, 4, 64), "float16") for key in keys)
def loss(q, k, v):
    for _ in range(3):
        q = dlattn.jax.attention(jax.numpy.tanh(q), k, v, causal=True) * 1.5
    return (q.astype("float32") ** 2).sum()
step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
first = [np.asarray(x) for x in step(q, k, v)]
for n in range(30):
    for got, want in zip(step(q, k, v), first):
        np.testing.assert_array_equal(np.asarray(got), want)
single = jax.jit(jax.vjp(lambda *a: dlattn.jax.attention(*a, causal=True), q, k, v)[1])
out, lse = dlattn.attention(q, k, v, causal=True, return_lse=True)
want = dlattn.attention_backward(q, q, k, v, out, lse, causal=True, deterministic=True)
for got, exact in zip(single(q), want):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(exact))
"""
    flags = f"{FLAGS}{kinds} --xla_gpu_deterministic_ops=true"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_over_four_gpus(jax):
    if len(jax.devices()) < 4:
        pytest.skip("there are fewer than four GPUs")
    program = HERE / "jax_sharded_gradients.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr

"""Gradients of `dlattn.jax` by dlattn's backward pass: against float64, and transformed by JAX."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from arrays import normal, qkv
from gradients import FEATURES, random_problem
from programs import HERE

from dlattn import UnsupportedError, _core

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax_gradients import TARGET, check_problem  # noqa: E402

import dlattn.jax as face  # noqa: E402
from dlattn.integrations.jax import _call, _formula, _launch  # noqa: E402

DEFAULTS = {"softmax_scale": None, "window": (None, None), "softcap": 0.0, "causal": False}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("seed", [2, 11, 14])
def test_random_problems(seed: int, dtype: str) -> None:
    check_problem(random_problem(seed, dtype))


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_all_features_at_once(seed: int) -> None:
    """Both alignments of the causal mask, biases that broadcast, rows that see nothing."""
    check_problem(random_problem(seed, "float32", features=FEATURES))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(seqlen_q: int, seqlen_k: int) -> None:
    shapes = [(2, seqlen_q, 2, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8)]
    arrays = [jnp.ones(shape, "float32") for shape in shapes]
    found = jax.jit(jax.grad(lambda a: face.attention(*a, sinks=jnp.ones(2)).sum()))(arrays)
    assert [x.shape for x in found] == shapes and all((np.asarray(x) == 0).all() for x in found)


def test_lengths() -> None:
    """Sequences whose keys are used up to some: each as alone with those, and 0 for the others."""
    arrays = [jnp.asarray(x) for x in (*qkv(2, 5, 7, 4, 2, 8), normal(4, 5, 1, seed=3))]
    lengths = np.array([7, 3], np.int32)

    def loss(*given: Any, used: Any = None) -> Any:
        rest = {"bias": given[3], "key_value_seq_lengths": used, "is_causal": True}
        return jnp.sin(face.dot_product_attention(*given[:3], **rest)).sum()

    gradient = jax.jit(jax.grad(functools.partial(loss, used=lengths), argnums=(0, 1, 2, 3)))
    assert TARGET in gradient.lower(*arrays).as_text()
    found = gradient(*arrays)
    dbias = np.zeros((4, 5, 1), np.float32)
    for n, length in enumerate(lengths):
        one = [x[n : n + 1] for x in arrays[:3]]
        short = [one[0], one[1][:, :length], one[2][:, :length], arrays[3]]
        want = jax.grad(loss, argnums=(0, 1, 2, 3))(*short)
        for got, exact in zip(found[:3], want[:3], strict=True):
            assert np.abs(exact).max() > 0.05
            np.testing.assert_allclose(got[n, : exact.shape[1]], exact[0], rtol=1e-4, atol=1e-5)
            assert not np.asarray(got[n, exact.shape[1] :]).any()
        dbias += np.asarray(want[3])
    np.testing.assert_allclose(found[3], dbias, rtol=1e-4, atol=1e-5)


def asked_of(function: Any, *arguments: Any) -> list[tuple[str, str]]:
    """The inputs of each custom call of the backward pass, and the gradients that it computes."""
    text = jax.jit(function).lower(*arguments).as_text()
    calls = re.findall(rf"custom_call @{TARGET}\(.*", text)
    return [
        (re.findall(r'operands = "([^"]*)"', call)[0], re.findall(r'needs = "([^"]*)"', call)[0])
        for call in calls
    ]


def test_only_what_is_asked_for() -> None:
    q, k, v = qkv(2, 5, 7, 4, 2, 8)
    sinks = normal(4, seed=6)

    def both(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return face.attention(q, k, v, sinks=sinks, return_lse=True)

    def out(*arrays: Any) -> Any:
        return both(*arrays)[0].sum()

    def lse(*arrays: Any) -> Any:
        return both(*arrays)[1].sum()

    def all_of(*arrays: Any) -> Any:
        return out(*arrays) + lse(*arrays)

    own = "q k v sinks out lse"
    for loss, numbers, operands, needs in (
        (out, (0,), f"{own} dout", "dq"),
        (out, (1, 2), f"{own} dout", "dk dv"),
        (lse, (0,), f"{own} dlse", "dq"),
        (lambda *x: sum(r.sum() for r in both(*x)), (3,), f"{own} dout dlse", "dsinks"),
    ):
        gradient = jax.grad(loss, argnums=numbers)
        assert asked_of(gradient, q, k, v, sinks) == [(operands, needs)]
    q_alone = jax.grad(lambda q: face.attention(q, k, v).sum())
    assert asked_of(q_alone, q) == [("q k v out lse dout", "dq")]
    assert asked_of(lambda q: face.attention(q, k, v), q) == []
    # JAX has traced all of these once, and each derivative asks for what is its own.
    first, lone = jax.grad(lse)(q, k, v, sinks), jax.grad(lambda q: lse(q, k, v, sinks))(q)
    assert np.abs(first).max() > 1e-3
    np.testing.assert_array_equal(first, lone)
    # v has no part in the lse: its gradient is 0, and written.
    dv = jax.jit(jax.grad(lse, argnums=2))(q, k, v, sinks)
    assert (np.asarray(dv) == 0).all()
    test = jax.grad(all_of, argnums=(0, 3))(q, k, v, sinks)
    assert all(np.abs(x).max() > 1e-3 for x in test)


def buffers(jaxpr: Any) -> Iterator[Any]:
    """The shapes of all values of a program, those of its parts too."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from buffers(inner)


def test_no_scores_in_memory() -> None:
    """Nothing has as many elements as the scores; with the formula something does."""
    size = 300
    q, k, v = qkv(1, size, size, 2, 1, 8)

    def largest(precision: str | None) -> int:
        def loss(*arrays: Any) -> Any:
            return face.attention(*arrays, causal=True, precision=precision).sum()

        given = [jnp.asarray(x, "float16") for x in (q, k, v)]
        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*given)
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*given).compile().as_text()
        shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)]
        return max(int(np.prod(shape)) for shape in [*buffers(program.jaxpr), *shapes])

    assert largest(None) < size * size // 8
    assert largest("int8_fp16") >= 2 * size * size


def mapped_problem() -> tuple[dict[str, Any], dict[str, int | None]]:
    shapes = {
        "q": (3, 2, 5, 4, 8),
        "k": (2, 7, 2, 8),
        "v": (3, 2, 7, 2, 8),
        "bias": (4, 1, 7),
        "alibi_slopes": (4,),
        "sinks": (4,),
    }
    given = {name: jnp.asarray(normal(*x, seed=7), "float32") for name, x in shapes.items()}
    return given, {name: 0 if name in "qv" else None for name in shapes}


def weighted(given: dict[str, Any]) -> Any:
    out, lse = face.attention(**given, causal=True, return_lse=True)
    return (out * jnp.arange(out.size).reshape(out.shape)).sum() / 99 + jnp.sin(lse).sum()


@pytest.mark.parametrize(("also", "sinks"), [("", True), ("bias", False), ("alibi_slopes", False)])
def test_vmap(also: str, sinks: bool) -> None:
    """Each of those mapped over has gradients of its own, and their sum outside of the map."""
    given, axes = mapped_problem()
    if not sinks:
        del given["sinks"], axes["sinks"]
    if also:
        given[also] = jnp.stack([given[also], 2 * given[also], -given[also]])
        axes[also] = 0

    def one(n: int) -> dict[str, Any]:
        return {name: x if axes[name] is None else x[n] for name, x in given.items()}

    each = [jax.grad(weighted)(one(n)) for n in range(3)]
    inside = jax.jit(jax.vmap(jax.grad(weighted), in_axes=(axes,)))
    text = inside.lower(given).as_text()
    assert text.count(f"custom_call @{TARGET}(") == 1 and ("while" in text) == sinks
    found = inside(given)
    outside = jax.jit(jax.grad(lambda given: jax.vmap(weighted, in_axes=(axes,))(given).sum()))(
        given
    )
    for name in given:
        want = np.stack([np.asarray(x[name]) for x in each])
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(found[name], want, rtol=2e-4, atol=2e-5, err_msg=name)
        want = want if axes[name] == 0 else want.sum(axis=0)
        np.testing.assert_allclose(outside[name], want, rtol=2e-4, atol=2e-5, err_msg=name)


def test_two_maps_of_a_bias_of_each_sequence() -> None:
    q, k, v = (jnp.asarray(normal(2, 3, *x.shape, seed=3), "float32") for x in qkv(2, 5, 7, 4, 2))
    bias = jnp.asarray(normal(3, 2, 1, 5, 7, seed=4))

    def gradient(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax.grad(lambda bias: weighted({"q": q, "k": k, "v": v, "bias": bias}))(bias)

    inner = jax.vmap(gradient)
    found = jax.jit(jax.vmap(inner, in_axes=(0, 0, 0, None)))(q, k, v, bias)
    for i, j in np.ndindex(2, 3):
        want = gradient(q[i, j], k[i, j], v[i, j], bias[j])
        np.testing.assert_allclose(found[i, j], want, rtol=2e-4, atol=2e-5)


def test_gradients_of_gradients() -> None:
    """The gradient of a part of the gradients, of slopes, sinks and the lse too."""
    given, _ = mapped_problem()
    given = {name: x[0] if name in "qv" else x for name, x in given.items()}
    settings = {**DEFAULTS, "causal": True, "layout": "bshd"}

    def derivatives(attention: Any) -> Any:
        def first(given: Any) -> Any:
            def loss(given: Any) -> Any:
                out, lse = attention(given)
                return (jnp.sin(out).sum() + jnp.cos(lse).sum()) / 8

            found = jax.grad(loss)(given)
            return sum((found[name] ** 2).sum() for name in ("q", "alibi_slopes", "sinks"))

        return jax.grad(first)(given)

    found = jax.jit(
        lambda: derivatives(lambda x: face.attention(**x, causal=True, return_lse=True))
    )()
    want = jax.jit(lambda: derivatives(lambda x: _formula.attention(settings, x)))()
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        largest = np.abs(exact).max()
        assert largest > 1e-4
        np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-3 * largest)


def test_calls_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the gradients of the formula."""
    given, _ = mapped_problem()
    given = {name: x[0] if name in "qv" else x for name, x in given.items()}
    own = jax.jit(jax.grad(weighted))(given)

    def refused(*_: Any) -> None:
        raise UnsupportedError("no kernel can run this")

    monkeypatch.setattr(_core, "xla_call_backward", refused)
    _call.differentiable.cache_clear()
    gradient = jax.jit(jax.grad(lambda given: weighted(given)))
    assert TARGET not in gradient.lower(given).as_text()
    for name, want in gradient(given).items():
        np.testing.assert_allclose(own[name], want, rtol=1e-4, atol=1e-4, err_msg=name)
    monkeypatch.undo()
    _call.differentiable.cache_clear()


def test_a_precision_has_the_gradient_of_what_is_approximated() -> None:
    given = {name: jnp.asarray(x, "float16") for name, x in zip("qkv", qkv(2, 19, 33), strict=True)}

    def gradient(**options: Any) -> Any:
        def loss(given: Any) -> Any:
            return face.attention(**given, causal=True, **options).astype("float32").sum()

        return jax.jit(jax.grad(loss)).lower(given)

    approximate = gradient(precision="int8_fp16")
    assert TARGET not in approximate.as_text() and TARGET in gradient().as_text()
    found, want = approximate.compile()(given), gradient().compile()(given)
    for name in given:
        np.testing.assert_allclose(
            *(np.asarray(x[name], np.float32) for x in (found, want)), atol=0.02
        )


FLAGS = [
    ("", 0),
    ("--xla_gpu_deterministic_ops=false --xla_dump_to=x", 0),
    ("--xla_dump_to=x --xla_gpu_deterministic_ops=true", 1),
    ("--xla_gpu_exclude_nondeterministic_ops", 1),
]


def test_xlas_flags_ask_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, (flags, asked) in enumerate(FLAGS, 21):  # other shapes: JAX traces them anew
        q, k, v = qkv(1, size, 7, 2, 2, 8)
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert _launch._deterministic() == bool(asked)
        text = jax.jit(jax.grad(lambda q: face.attention(q, k, v).sum())).lower(q).as_text()  # noqa: B023
        assert f"deterministic = {asked} : i64" in text


def test_over_four_devices() -> None:
    """Sums over devices, and nothing gathered."""
    program = HERE / "jax_sharded_gradients.py"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)]))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr

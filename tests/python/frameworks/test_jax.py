"""`dlattn.jax`: under jit, vmap, grad and shard_map on the CPU, against float64 and jax.nn."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, normal, qkv
from programs import HERE

import dlattn
from dlattn import UnsupportedError
from dlattn.reference import attention_reference, error_bound, max_error

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import dlattn.jax as face  # noqa: E402
from dlattn.integrations.jax import _formula, _launch, _operands  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 19, 33
INPUTS = qkv(BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, 24, 16)
MASK = np.random.default_rng(1).random((BATCH, 1, SEQLEN_Q, SEQLEN_K)) < 0.6
MASK[0, 0, 3] = False  # a row that sees nothing
TENSORS = {
    "bias": normal(HEADS, SEQLEN_Q, SEQLEN_K, seed=4),
    "mask": MASK,
    "alibi_slopes": np.abs(normal(BATCH, HEADS, seed=5)),
    "sinks": normal(HEADS, seed=6),
}
FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"window": (7, 2)},
    {"window": [None, 0], "causal": "top_left"},
    {"softcap": 2.5},
    {"softmax_scale": 0.5},
    *({name: x} for name, x in TENSORS.items()),
    {"causal": True, "window": (9, None), "softcap": 3.0, **TENSORS},
]
every_feature = pytest.mark.parametrize(
    "options", FEATURES, ids=lambda options: "+".join(options) or "plain"
)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def settings(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name not in TENSORS}


@every_feature
@pytest.mark.parametrize("jit", [True, False])
def test_attention(options: dict[str, Any], jit: bool) -> None:
    tensors = {name: x for name, x in options.items() if name in TENSORS}

    def call(arrays: Any, tensors: Any) -> Any:
        return face.attention(*arrays, **tensors, **settings(options), return_lse=True)

    result = (jax.jit(call) if jit else call)(INPUTS, tensors)
    assert all(isinstance(x, jax.Array) for x in result)
    assert_attention(result, *INPUTS, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes_and_layouts(dtype: str, layout: str, x64: None) -> None:
    arrays = [jnp.asarray(x, dtype) for x in INPUTS]
    if layout == "bhsd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    result = jax.jit(
        functools.partial(face.attention, causal=True, layout=layout, return_lse=True)
    )(*arrays)
    assert result[0].dtype == dtype and result[1].dtype == "float32"
    assert_attention(result, *map(np.asarray, arrays), causal=True, layout=layout)


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_float8(out_dtype: str | None) -> None:
    arrays = [jnp.asarray(x, "float8_e4m3fn") for x in qkv(2, 19, 33, 4, 2, 32, 16)]
    descales = {
        "q_descale": np.exp2(normal(2, 4, seed=1)),
        "k_descale": np.exp2(normal(1, 2, seed=2)),
        "v_descale": np.exp2(normal(2, seed=3)),
    }
    call = jax.jit(lambda a, d: face.attention(*a, **d, causal=True, out_dtype=out_dtype))
    out = call(arrays, descales)
    name = out_dtype or "bfloat16"
    assert out.dtype == name
    given = [np.asarray(x) for x in arrays]
    expected = attention_reference(*given, **descales, causal=True)
    bound = error_bound(*given, **descales, causal=True, dtype=name, expected=expected)
    assert max_error(np.asarray(out), expected[0]) <= bound.out
    with pytest.raises(UnsupportedError, match=r"^q is of float8_e4m3fn and a gradient is asked"):
        jax.vjp(call, arrays, descales)


@pytest.mark.parametrize("precision", ["int8_fp8", "fp8"])
def test_precision(precision: str) -> None:
    """The same bits as outside of XLA, whose threads take denormal numbers for 0."""
    arrays = [jnp.asarray(x, "bfloat16") for x in qkv(2, 19, 90, 4, 2, 64)]
    out = jax.jit(functools.partial(face.attention, precision=precision))(*arrays)
    own = dlattn.attention(*map(np.asarray, arrays), precision=precision)
    np.testing.assert_array_equal(np.asarray(out), own)


def test_empty() -> None:
    q, k, v = INPUTS
    assert face.attention(q[:0], k[:0], v[:0]).shape == (0, SEQLEN_Q, HEADS, 16)
    assert not np.asarray(face.attention(q, k[:, :0], v[:, :0])).any()


def loop(axes: list[int | None], values: list[Any], function: Any) -> Any:
    """The results of vmap, computed one by one."""
    counts = {x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None}
    (count,) = counts
    results = [
        function(
            *(
                x if axis is None else np.take(x, n, axis)
                for x, axis in zip(values, axes, strict=True)
            )
        )
        for n in range(count)
    ]
    return [np.stack([np.asarray(r[i]) for r in results]) for i in range(2)]


@pytest.mark.parametrize("mapped", ["q", "k v", "q k v", "bias", "mask", "sinks", "all"])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap(mapped: str, batch: int) -> None:
    random = np.random.default_rng(3)
    shapes = {
        "q": (batch, 5, 4, 8),
        "k": (batch, 7, 2, 8),
        "v": (batch, 7, 2, 8),
        "bias": (1, 4, 5, 7),
        "mask": (5, 7),
        "alibi_slopes": (4,),
        "sinks": (4,),
    }
    names = list(shapes)
    moving = names if mapped == "all" else mapped.split()
    axes = [(i % 2 if name in moving else None) for i, name in enumerate(names)]
    values = []
    for name, axis in zip(names, axes, strict=True):
        shape = shapes[name] if axis is None else np.insert(shapes[name], axis, 3)
        x = random.standard_normal(shape).astype(np.float32)
        values.append(x > -0.5 if name == "mask" else x)

    def call(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        return face.attention(**given, return_lse=True)

    result = jax.jit(jax.vmap(call, in_axes=axes))(*values)
    for got, want in zip(result, loop(axes, values, call), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6)


def test_vmap_of_every_batched_tensor() -> None:
    """Operands with a batch of their own, mapped and not, at two levels."""
    random = np.random.default_rng(4)
    q = random.standard_normal((3, 2, 2, 5, 4, 8), np.float32)
    k, v = random.standard_normal((2, 2, 2, 7, 2, 8), np.float32)
    bias = random.standard_normal((3, 2, 4, 5, 7), np.float32)
    slopes = random.random((2, 4), np.float32)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return face.attention(q, k, v, bias=bias, alibi_slopes=slopes, causal=True)

    inner = jax.vmap(call, in_axes=(0, 0, 0, None))
    out = jax.jit(jax.vmap(inner, in_axes=(0, None, None, 0)))(q, k, v, bias)
    for i, j in np.ndindex(3, 2):
        want = call(q[i, j], k[j], v[j], bias[i])
        np.testing.assert_allclose(np.asarray(out[i, j]), want, rtol=2e-5, atol=2e-6)


def test_a_map_is_one_call() -> None:
    q, k, v = (np.stack([x, x]) for x in INPUTS)
    mapped = jax.jit(jax.vmap(face.attention))
    text = mapped.lower(q, k, v).as_text()
    assert text.count("@dlattn_attention(") == 1 + text.count("call @dlattn_attention(")
    assert len(re.findall(r"custom_call @dlattn_attention\(", text)) == 1
    assert "while" not in text


@every_feature
def test_gradients(options: dict[str, Any], x64: None) -> None:
    """The gradients of the formula, against differences of dlattn's results in float64."""
    test_util = pytest.importorskip("jax.test_util")
    random = np.random.default_rng(5)
    shapes = [(2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 2)]
    arrays = [random.standard_normal(shape) for shape in shapes]
    small: dict[str, Any] = {
        "bias": random.standard_normal((4, 5, 6)).astype(np.float64),
        "alibi_slopes": random.random((2, 4)).astype(np.float32),
        "sinks": random.standard_normal(4).astype(np.float32),
    }
    mask = random.random((2, 1, 5, 6)) < 0.7
    mask[1, 0, 2] = False
    # Differences need float64 inputs, so those of float32 are given.
    moving = {"bias": small["bias"]} if "bias" in options else {}
    fixed = {n: x for n, x in small.items() if n in options and n not in moving}
    fixed |= {"mask": mask} if "mask" in options else {}
    window = options.get("window", (None, None))
    rest = {**settings(options), "window": [None if x is None else x // 3 for x in window]}

    def call(q: Any, k: Any, v: Any, moving: Any) -> Any:
        out = face.attention(q, k, v, **moving, **fixed, **rest)
        return out * jnp.arange(out.size).reshape(out.shape)

    test_util.check_grads(call, (*arrays, moving), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_gradients_of_gradients(x64: None) -> None:
    """As those of the formula, of each operand that has any."""
    shapes = {"q": (1, 4, 2, 3), "k": (1, 5, 1, 3), "v": (1, 5, 1, 2), "bias": (2, 4, 5)}
    moving = {
        name: jnp.asarray(normal(*shape, seed=seed) + 0.2, "float64")
        for seed, (name, shape) in enumerate(shapes.items())
    }
    rest = {"causal": True, "softcap": 3.0}
    both = {**rest, "softmax_scale": None, "layout": "bshd", "window": (None, None)}

    def second(function: Any) -> Any:
        def loss(operands: Any) -> Any:
            out, lse = function(operands)
            return jnp.sin(out).sum() + jnp.sin(lse).sum()

        def of_gradient(operands: Any) -> Any:
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(jax.grad(loss)(operands)))

        return jax.jit(jax.grad(of_gradient)).lower(moving)

    attention = second(lambda operands: face.attention(**operands, **rest, return_lse=True))
    assert "custom_call @dlattn_attention(" in attention.as_text()
    found = attention.compile()(moving)
    want = second(lambda operands: _formula.attention(both, operands)).compile()(moving)
    for name in moving:
        assert np.abs(want[name]).max() > 1e-2, name
        np.testing.assert_allclose(found[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_of_what_is_float32(x64: None) -> None:
    """Slopes, sinks and the lse: against differences of the float64 formula."""
    random = np.random.default_rng(6)
    operands = {
        "q": random.standard_normal((2, 5, 4, 3)),
        "k": random.standard_normal((2, 6, 2, 3)),
        "v": random.standard_normal((2, 6, 2, 2)),
        "alibi_slopes": random.random((2, 4)).astype(np.float32),
        "sinks": random.standard_normal(4).astype(np.float32),
    }
    weight = random.standard_normal((2, 4, 5))

    def loss(operands: Any) -> Any:
        out, lse = face.attention(**operands, return_lse=True)
        return jnp.sin(out).sum() + (lse * weight).sum()

    def exact(operands: Any) -> float:
        out, lse = attention_reference(**operands)
        return float(np.sin(out).sum() + (lse * weight).sum())

    gradients = jax.grad(loss)(operands)
    for name, x in operands.items():
        for index in list(np.ndindex(*x.shape))[:4]:
            step = np.zeros(x.shape)
            step[index] = 1e-5
            both = [exact({**operands, name: x.astype(np.float64) + s}) for s in (step, -step)]
            difference = (both[0] - both[1]) / 2e-5
            assert abs(difference - float(gradients[name][index])) < 1e-4, (name, index)


def test_gradients_where_nothing_is_seen() -> None:
    q, k, v = INPUTS
    bias = np.zeros((SEQLEN_Q, SEQLEN_K), np.float32)
    bias[4] = -np.inf

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return face.attention(q, k, v, mask=MASK, bias=bias).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)
    assert all(np.isfinite(x).all() for x in gradients)
    assert not np.asarray(gradients[0][0, 3]).any() and not np.asarray(gradients[0][:, 4]).any()
    assert np.asarray(gradients[0][1, 3]).any()


@every_feature
def test_formula(options: dict[str, Any]) -> None:
    defaults = {"causal": False, "softmax_scale": None, "window": (None, None), "softcap": 0.0}
    both = {**defaults, **settings(options), "layout": "bshd"}
    tensors = {name: jnp.asarray(x) for name, x in options.items() if name in TENSORS}
    operands = dict(zip("qkv", map(jnp.asarray, INPUTS), strict=True))
    assert_attention(_formula.attention(both, {**operands, **tensors}), *INPUTS, **options)


SCALARS = [
    {"bias": np.array(0.75, np.float32)},
    {"bias": np.float32(-0.5), "mask": np.array(True)},
    {"mask": np.bool_(False)},
]


@pytest.mark.parametrize("options", SCALARS, ids=["bias", "bias+mask", "mask"])
def test_scalars_broadcast(options: dict[str, Any]) -> None:
    """A bias and a mask without dimensions, as outside of XLA."""
    result = jax.jit(lambda a, t: face.attention(*a, **t, return_lse=True))(INPUTS, options)
    for found in (result, face.attention(*INPUTS, **options, return_lse=True)):
        assert_attention(found, *INPUTS, **{n: np.asarray(x) for n, x in options.items()})
    q, k = INPUTS[:2]
    out, want = (f(q, k, k, **options) for f in (face.dot_product_attention, nn))
    if options.get("mask", True):  # else rows see nothing
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6)
    else:
        assert not np.asarray(out).any()


def test_scalars_in_transformations() -> None:
    """The operands of which each sequence of a mapped call has its own; and the gradient of one."""
    q, k, v = (np.stack([x, 2 * x, 3 * x]) for x in INPUTS)
    bias, mask = normal(3, seed=9), np.array([True, False, True])

    def call(*arrays: Any) -> Any:
        return face.attention(*arrays[:3], bias=arrays[3], mask=arrays[4], return_lse=True)

    result = jax.jit(jax.vmap(call))(q, k, v, bias, mask)
    for got, want in zip(result, loop([0] * 5, [q, k, v, bias, mask], call), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6)

    def lse(bias: Any) -> Any:
        return face.attention(*INPUTS, bias=bias, return_lse=True)[1].mean()

    gradient = jax.grad(lse)(jnp.float32(0.5))  # lse rises by a number that is added to all scores
    assert gradient.shape == () and abs(gradient - 1) < 1e-5


def nn(*arrays: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(*arrays, **options)


LENGTHS = {
    "query_seq_lengths": np.array([19, 7], np.int32),
    "key_value_seq_lengths": np.array([33, 12], np.int32),
}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"local_window_size": 5},
    {"local_window_size": (20, 20)},
    {"local_window_size": (4, 0), "is_causal": True},
    {"bias": normal(1, HEADS, SEQLEN_Q, SEQLEN_K, seed=7)},
    {"mask": MASK | (np.arange(SEQLEN_K) == 0)},
    LENGTHS,
    {"key_value_seq_lengths": np.array([33, 50], np.int32), "local_window_size": (99, 3)},
    {**LENGTHS, "is_causal": True, "bias": normal(1, HEADS, SEQLEN_Q, SEQLEN_K, seed=8)},
]


def with_keys(options: dict[str, Any], keys: int) -> Any:
    """JAX compiles four programs for each. Where a row sees all keys, more of them than queries
    show what fewer do: those are for the nightly run."""
    later = keys != SEQLEN_K and options.keys() <= {"scale", "bias", "mask"}
    name = f"{keys}-{'+'.join(options) or 'plain'}"
    return pytest.param(options, keys, id=name, marks=[pytest.mark.nightly] if later else [])


@pytest.mark.parametrize(
    ("options", "keys"),
    [with_keys(options, keys) for keys in (SEQLEN_K, SEQLEN_Q, 9) for options in OPTIONS],
)
def test_dot_product_attention(options: dict[str, Any], keys: int) -> None:
    """As jax.nn has it, wherever a row sees a key."""
    if "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters:
        pytest.skip(f"jax.nn of jax {jax.__version__} returns no residual")
    shapes = [(2, SEQLEN_Q, HEADS, 24), (2, keys, HEADS_KV, 24), (2, keys, HEADS_KV, 24)]
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    options = {n: x[..., :keys] if n in ("bias", "mask") else x for n, x in options.items()}
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    rest = {n: x for n, x in options.items() if n not in tensors}

    def run(function: Any) -> Any:
        call = functools.partial(function, **rest, return_residual=True)
        return jax.jit(lambda a, t: call(*a, **t))(arrays, tensors)

    out, lse = run(face.dot_product_attention)
    want, want_lse = run(nn)
    assert out.shape == want.shape and lse.shape == want_lse.shape and lse.dtype == want_lse.dtype
    seen = np.asarray(want_lse) > -1e8
    for got, expected in ((out, want), (lse, want_lse)):
        np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-5, atol=2e-6)
    assert not np.asarray(out[~seen]).any() and np.isneginf(lse[~seen]).all()

    def gradient(function: Any) -> Any:
        def loss(a: Any) -> Any:
            return (function(*a, **options) * seen[..., None]).sum()

        return jax.jit(jax.grad(loss))(arrays)

    for got, expected in zip(gradient(face.dot_product_attention), gradient(nn), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_rows_beyond_lengths_reach_no_result(filler: float) -> None:
    """Neither out nor a gradient, whatever they hold."""
    lengths = {**LENGTHS, "query_seq_lengths": np.array([11, 7], np.int32)}

    def results(filler: float) -> Any:
        arrays = [x.copy() for x in INPUTS]
        for x, name in zip(arrays, ("query", "key_value", "key_value"), strict=True):
            for b, length in enumerate(lengths[f"{name}_seq_lengths"]):
                x[b, length:] = filler

        def loss(a: Any) -> Any:
            out = face.dot_product_attention(*a, is_causal=True, **lengths)
            return (out * out).sum(), out

        gradients, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
        return [out, *gradients]

    for got, want in zip(results(filler), results(0.0), strict=True):
        assert np.isfinite(got).all() and np.abs(got).max() > 0.1
        np.testing.assert_array_equal(got, want)


def test_dot_product_attention_without_batch() -> None:
    q, k, v = (x[0] for x in INPUTS)
    out, lse = face.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert out.shape == (SEQLEN_Q, HEADS, 16) and lse.shape == (SEQLEN_Q, HEADS)
    same = face.attention(q[None], k[None], v[None], causal="top_left")
    np.testing.assert_array_equal(out, same[0])


def test_dot_product_attention_maps_with_lengths() -> None:
    q, k, v = (np.stack([x, 2 * x, 3 * x]) for x in INPUTS)
    lengths = np.array([[33, 2], [1, 0], [20, 21]], np.int32)
    call = functools.partial(face.dot_product_attention, is_causal=True, return_residual=True)
    mapped = jax.jit(jax.vmap(lambda q, k, v, n: call(q, k, v, key_value_seq_lengths=n)))
    result = mapped(q, k, v, lengths)
    for n in range(3):
        want = call(q[n], k[n], v[n], key_value_seq_lengths=lengths[n])
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_allclose(got[n], expected, rtol=2e-5, atol=2e-6)


def test_signatures() -> None:
    assert inspect.signature(face.attention) == inspect.signature(dlattn.attention)
    own = inspect.signature(face.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    for name, parameter in own.items():
        if name in theirs or name != "return_residual":  # which came with jax 0.9
            assert (parameter.kind, parameter.default) == (
                theirs[name].kind,
                theirs[name].default,
            )
    assert set(theirs) <= set(own)
    assert "softcap" in (face.attention.__doc__ or "")


SETTINGS: dict[str, Any] = {
    "causal": True,
    "softmax_scale": 0.25,
    "window": (3, 5),
    "softcap": 20.0,
    "precision": "int8_fp8",
    "layout": "bhsd",
    "out_dtype": "float32",
    "return_lse": True,
    "kernel": "cpu",
    "batch_invariant": True,
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in inspect.signature(dlattn.attention).parameters
        if name not in (*_operands.NAMES, "out", "stream")
    ],
)
def test_every_setting_reaches_the_custom_call(name: str) -> None:
    """The attributes are written one by one: a setting that is none would be ignored."""
    x = jnp.zeros((1, 4, 4, 32), "bfloat16")
    setting = {name: SETTINGS[name]}
    if name == "out_dtype":  # is for 8 bits alone
        x = x.astype("float8_e4m3fn")
    operands = {"q": x, "k": x, "v": x}
    assert _launch.describe(setting, operands)[0] != _launch.describe({}, operands)[0]


Q, K, V = INPUTS
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": K[:1]}, UnsupportedError, "k: batch is 1, shape (1, 33, 2, 24); accepted: 2, that of q"),
    (
        {"q": Q[..., :20]},
        UnsupportedError,
        "k: head_dim is 24, shape (2, 33, 2, 24); accepted: 20, that of q",
    ),
    (
        {"v": V.astype("float16")},
        UnsupportedError,
        "v: dtype is float16; accepted: float32, that of q",
    ),
    (
        {"q": Q[0]},
        UnsupportedError,
        "q has 3 dimensions, shape (19, 4, 24); accepted: 4, (batch, seqlen, num_heads, head_dim)",
    ),
    (
        {"causal": "left"},
        UnsupportedError,
        'causal is \'left\'; accepted: False, True, "bottom_right" or "top_left"',
    ),
    (
        {"softcap": -1.0},
        UnsupportedError,
        "softcap is -1; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none",
    ),
    ({"softcap": "1"}, TypeError, "softcap is of type str; accepted: a float"),
    (
        {"sinks": np.zeros(3, np.float32)},
        UnsupportedError,
        "sinks: shape is (3,); accepted: (4,), (num_heads,)",
    ),
    ({"mask": MASK.astype(np.int32)}, UnsupportedError, "mask: dtype is int32; accepted: bool"),
    ({"out": Q}, UnsupportedError, "out: JAX arrays are immutable; accepted: None"),
    (
        {"stream": 0},
        UnsupportedError,
        "stream is given; accepted: None for JAX arrays, as JAX orders its work itself",
    ),
    ({"q": [1.0]}, TypeError, "q is of type list; accepted: an array of JAX or NumPy"),
    (
        {"k": dlattn.quantize_kv(K.astype("float16"), V.astype("float16")), "v": None},
        TypeError,
        "k is of type dlattn.QuantizedKV; accepted: an array, in dlattn.jax",
    ),
    (
        {name: x.astype(np.int32) for name, x in zip("qkv", INPUTS, strict=True)},
        UnsupportedError,
        "q: dtype is int32; accepted: float16, bfloat16, float32, float64, float8_e4m3fn",
    ),
    ({"return_lse": 1}, TypeError, "return_lse is of type int; accepted: a bool"),
    ({"q": None}, TypeError, "q is of type NoneType; accepted: an array of JAX or NumPy"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), WRONG, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("jit", [True, False])
def test_wrong_calls(changes: dict[str, Any], kind: type[Exception], words: str, jit: bool) -> None:
    given: dict[str, Any] = {**dict(zip("qkv", INPUTS, strict=True)), **changes}
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray) and n != "out"}
    rest = {n: x for n, x in given.items() if n not in arrays}

    def call(arrays: Any) -> Any:
        return face.attention(**arrays, **rest)

    with pytest.raises(kind) as raised:
        jax.jit(call).lower(arrays) if jit else call(arrays)
    assert type(raised.value) is kind and str(raised.value) == words


def test_symbolic_sizes() -> None:
    """jax.export is refused by the names of each function; plain sizes are exported."""
    export = pytest.importorskip("jax.export")
    sizes = export.symbolic_shape("b, s")

    def array(*shape: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    symbolic = [array(*sizes, heads, 8) for heads in (4, 2, 2)]
    for call, name in ((face.attention, "q"), (face.dot_product_attention, "query")):
        words = rf"^{name} is of shape \(b, s, 4, 8\), which has symbolic sizes; accepted: numbers"
        with pytest.raises(UnsupportedError, match=words):
            export.export(jax.jit(call))(*symbolic)
    plain = [array(2, 5, heads, 8) for heads in (4, 2, 2)]
    with pytest.raises(UnsupportedError, match=r"^bias is of shape \(s, 5\), which has symbolic"):
        export.export(jax.jit(lambda a, b: face.attention(*a, bias=b)))(plain, array(sizes[1], 5))
    mapped = jax.jit(jax.vmap(lambda q: face.attention(q, *(jnp.ones((2, 5, 4, 8)),) * 2)))
    with pytest.raises(UnsupportedError, match=r"^q is of shape \(2\*b, 5, 4, 8\), which has sym"):
        export.export(mapped)(array(sizes[0], 2, 5, 4, 8))
    checks = [export.DisabledSafetyCheck.custom_call("dlattn_attention")]
    exported = export.export(jax.jit(face.attention), disabled_checks=checks)(*plain)
    arrays = qkv(2, 5, 5, 4, 2, 8)
    np.testing.assert_array_equal(exported.call(*arrays), face.attention(*arrays))


def test_kernels_that_no_device_has() -> None:
    if dlattn.info().gpu:
        pytest.skip("a GPU runs it")
    with pytest.raises(UnsupportedError, match="no kernel can run this: "):
        jax.jit(functools.partial(face.attention, kernel="scalar")).lower(*INPUTS)


def test_wrong_calls_of_dot_product_attention() -> None:
    call = face.dot_product_attention
    with pytest.raises(UnsupportedError, match=r"^implementation is 'cudnn'; accepted: None$"):
        call(*INPUTS, implementation="cudnn")
    with pytest.raises(TypeError, match=r"^is_causal is of type int; accepted: a bool$"):
        call(*INPUTS, is_causal=1)
    with pytest.raises(TypeError, match=r"^local_window_size is 1.5; accepted: an int >= 0, a"):
        call(*INPUTS, local_window_size=1.5)
    with pytest.raises(TypeError, match=r"^local_window_size is \(1, True\); accepted"):
        call(*INPUTS, local_window_size=(1, True))
    with pytest.raises(UnsupportedError, match=r"^local_window_size is -1; accepted: ints >= 0"):
        call(*INPUTS, local_window_size=-1)
    with pytest.raises(UnsupportedError, match=r"^key_value_seq_lengths is of int32 and shape \(3"):
        call(*INPUTS, key_value_seq_lengths=np.zeros(3, np.int32))
    with pytest.raises(UnsupportedError, match=r"^query_seq_lengths is of float32 and shape \(2,"):
        call(*INPUTS, query_seq_lengths=np.zeros(2, np.float32))
    with pytest.raises(UnsupportedError, match=r"^key: batch is 1, shape"):
        call(Q, K[:1], V)
    with pytest.raises(UnsupportedError, match=r"^key: batch is 1, shape"):
        call(Q, K[:1], V[:1], key_value_seq_lengths=np.zeros(2, np.int32))
    with pytest.raises(UnsupportedError, match=r"^scale is inf; accepted"):
        call(*INPUTS, scale=-np.inf)
    with pytest.raises(TypeError, match=r"^mask is of type str; accepted: an array"):
        call(*INPUTS, mask="mask")


@pytest.mark.parametrize("scale", [0, -0.5, 1e-42])
def test_scales_of_0_and_below(scale: float) -> None:
    """As in jax.nn, gradients included."""

    def both(function: Any) -> Any:
        def total(q: Any, k: Any, v: Any) -> Any:
            return jnp.sum(jnp.sin(function(q, k, v, scale=scale)))

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(Q, K, K)

    want = both(jax.nn.dot_product_attention)
    found = both(face.dot_product_attention)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


def test_lists_are_named_as_lists() -> None:
    with pytest.raises(TypeError, match=r"^softcap is of type list; accepted: a float$"):
        face.attention(*INPUTS, softcap=[1.0])
    assert face.attention(*INPUTS, window=[1, None]).shape


def test_values_that_jax_cannot_hold() -> None:
    """No array of numbers, and windows wider than an int32."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    text = np.array(["a"])
    with pytest.raises(TypeError, match=r"^bias is of dtype <U1; accepted: numbers, or bool$"):
        face.attention(*INPUTS, bias=text)
    for mask, words in (
        (jax.random.key(0), "mask: dtype is key<fry>; accepted: bool, bfloat16, "),
        (np.ones((1,) * 9, bool), "mask has 9 dimensions; accepted: at most 8"),
    ):
        with pytest.raises(dlattn.UnsupportedError, match=f"^{words}"):
            face.attention(*INPUTS, mask=mask)
    for name in ("query", "key", "value"):
        given = {**dict(zip(("query", "key", "value"), INPUTS, strict=True)), name: None}
        with pytest.raises(TypeError, match=rf"^{name} is of type NoneType; accepted: an array"):
            face.dot_product_attention(**given)
    q, k, v = (x[:, :5] for x in INPUTS)
    wide = face.dot_product_attention(q, k, v, local_window_size=(2**70, 2))
    close(wide, face.attention(q, k, v, window=(None, 2)))
    used = np.array([5, 4], np.int32)
    with_lengths = face.dot_product_attention(
        q, k, v, local_window_size=(2**70, 2**40), key_value_seq_lengths=used
    )
    close(with_lengths, face.dot_product_attention(q, k, v, key_value_seq_lengths=used))

    def gradient(window: Any) -> Any:
        return jax.grad(lambda q: face.attention(q, k, v, window=window).sum())(q)

    close(gradient((2**70, 0)), gradient((None, 0)))


def test_a_tracer_that_outlives_its_function() -> None:
    kept: list[Any] = []
    jax.grad(lambda q: (kept.append(q), q.sum())[1])(INPUTS[0])
    with pytest.raises(jax.errors.UnexpectedTracerError):
        face.attention(*kept, *INPUTS[1:])


def test_what_the_handler_refuses_arrives_in_words() -> None:
    out = jax.ShapeDtypeStruct((1,), jnp.float32)
    call = jax.ffi.ffi_call("dlattn_attention", out)
    with pytest.raises(Exception, match=r"attribute \w+ is missing; accepted: what dlattn\.jax"):
        call(jnp.zeros(1), softcap=np.float64(0)).block_until_ready()


def test_within_scan_checkpoint_and_remat() -> None:
    """A layer that is scanned over, whose backward pass computes it again."""

    @jax.checkpoint
    def layer(x: Any, weight: Any) -> Any:
        return face.attention(x * weight, x, x, causal=True), None

    def run(x: Any, weights: Any) -> Any:
        return jax.lax.scan(layer, x, weights)[0].sum()

    x, weights = normal(2, 9, 4, 8, seed=1), np.array([0.5, 1.5, 1.0], np.float32)
    by_hand = x
    for weight in weights:
        by_hand = dlattn.attention(by_hand * weight, by_hand, by_hand, causal=True)
    value, gradient = jax.jit(jax.value_and_grad(run, argnums=1))(x, weights)
    assert abs(value - by_hand.sum()) < 1e-3
    step = np.array([0, 0.01, 0], np.float32)
    difference = (run(x, weights + step) - run(x, weights - step)) / 0.02
    assert abs(difference - gradient[1]) < 0.02


def test_many_threads() -> None:
    call = jax.jit(functools.partial(face.attention, causal=True))
    want = np.asarray(call(*INPUTS))
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: np.asarray(call(*INPUTS)), range(200))
        assert all((x == want).all() for x in results)


def test_import_brings_no_jax() -> None:
    code = (
        "import sys, dlattn; assert 'jax' not in sys.modules\n"
        "dlattn.jax.attention; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "name", ["jax_devices", pytest.param("jax_sharded", marks=pytest.mark.slow)]
)
def test_several_devices(name: str) -> None:
    program = HERE / f"{name}.py"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)]))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr


def test_structs_are_xlas(tmp_path: Path) -> None:
    """xla_abi.h beside the header that this jaxlib brings."""
    if not shutil.which("g++"):
        pytest.skip("not found: g++")
    fields = {
        "XLA_FFI_Extension_Base": ("Extension", ["type", "next"]),
        "XLA_FFI_Api_Version": ("ApiVersion", ["major_version", "minor_version"]),
        "XLA_FFI_Metadata": ("Metadata", ["api_version", "traits"]),
        "XLA_FFI_Metadata_Extension": ("MetadataExtension", ["metadata"]),
        "XLA_FFI_Buffer": ("Buffer", ["dtype", "data", "rank", "dims"]),
        "XLA_FFI_Args": ("Items", ["size", "types", "args:items"]),
        "XLA_FFI_Rets": ("Items", ["size", "types", "rets:items"]),
        "XLA_FFI_Attrs": ("Attributes", ["size", "types", "names", "attrs:values"]),
        "XLA_FFI_ByteSpan": ("ByteSpan", ["ptr:begin", "len:size"]),
        "XLA_FFI_Scalar": ("Scalar", ["dtype", "value"]),
        "XLA_FFI_Error_Create_Args": ("ErrorArguments", ["message", "errc:code"]),
        "XLA_FFI_Stream_Get_Args": ("StreamArguments", ["ctx:context", "stream"]),
        "XLA_FFI_DeviceOrdinal_Get_Args": (
            "OrdinalArguments",
            ["ctx:context", "device_ordinal:ordinal"],
        ),
        "XLA_FFI_Api": (
            "Api",
            [
                "XLA_FFI_Error_Create:create_error",
                "XLA_FFI_Stream_Get:get_stream",
                "XLA_FFI_DeviceOrdinal_Get:get_ordinal",
            ],
        ),
        "XLA_FFI_CallFrame": (
            "CallFrame",
            ["api", "ctx:context", "stage", "args:inputs", "rets:results", "attrs:attributes"],
        ),
    }
    values = {
        "XLA_FFI_Extension_Metadata": "kMetadataExtension",
        "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE": "kCommandBufferCompatible",
        "XLA_FFI_AttrType_SCALAR": "kScalar",
        "XLA_FFI_AttrType_STRING": "kString",
        "XLA_FFI_ExecutionStage_EXECUTE": "kExecute",
        "XLA_FFI_Error_Code_INVALID_ARGUMENT": "kInvalidArgument",
        "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": "kResourceExhausted",
        "XLA_FFI_Error_Code_INTERNAL": "kInternal",
    }
    text = (ROOT / "python" / "bindings" / "xla_abi.h").read_text()
    types = re.search(r"enum DataType .*?\{(.*?)\}", text, re.DOTALL)
    assert types
    for name in re.findall(r"\bk(\w+) =", types[1]):
        values[f"XLA_FFI_DataType_{name.upper()}"] = f"k{name}"
    lines = ['#include "xla/ffi/api/c_api.h"', "#include <cstddef>", '#include "xla_abi.h"']
    lines.append("namespace own = dlattn::python::xla;")
    for theirs, (ours, names) in fields.items():
        for name in names:
            their_name, _, our_name = name.partition(":")
            their_offset = f"offsetof({theirs}, {their_name})"
            our_offset = f"offsetof(own::{ours}, {our_name or their_name})"
            lines.append(f'static_assert({their_offset} == {our_offset}, "{theirs}.{name}");')
    for theirs, ours in values.items():
        lines.append(f'static_assert(int({theirs}) == int(own::{ours}), "{theirs}");')
    lines.append("static_assert(XLA_FFI_API_MAJOR == own::kMajorVersion);")
    (tmp_path / "check.cpp").write_text("\n".join(lines))
    folders = ["-I", jax.ffi.include_dir(), "-I", str(ROOT / "python" / "bindings")]
    command = ["g++", "-std=c++17", "-fsyntax-only", *folders, str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""`dlattn.jax` over arrays that are split over devices; a program, as JAX fixes their number.

    python tests/python/support/jax_sharded.py

Where JAX finds one device, it makes four of the CPU. What is computed is compared with float64,
and programs whose operands fit must not gather any.
"""

from __future__ import annotations

import functools
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import sys
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dlattn.jax
from dlattn.reference import attention_reference, error_bound, max_error

DTYPE = "float32" if jax.default_backend() == "cpu" else "float16"


BATCH, HEADS, WHOLE = P("x"), P(None, None, "x"), P()


def make_mesh(kind: Any, *sizes: int) -> Any:
    """Axes x and y. Explicit ones stand in the types of arrays, as jax.make_mesh has them."""
    devices = jax.devices()[: int(np.prod(sizes))]
    names = ("x", "y")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def within(mesh: Any) -> Any:
    """Where types of arrays have their sharding: in a mesh of explicit axes that is set."""
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else nullcontext()


def arrays(heads: int, heads_kv: int) -> list[Any]:
    shapes = [(4, 24, heads, 16), (4, 33, heads_kv, 16), (4, 33, heads_kv, 32)]
    keys = jax.random.split(jax.random.key(3), 3)
    return [
        jax.random.normal(key, shape).astype(DTYPE) for key, shape in zip(keys, shapes, strict=True)
    ]


def check(name: str, function: Any, qkv: list[Any], specs: Any, mesh: Any, **options: Any) -> None:
    """`specs`: of q, k and v, or of one for all and then of the tensors in options."""
    expected = attention_reference(*map(np.asarray, qkv), **options)
    bound = error_bound(*map(np.asarray, qkv), expected=expected, **options)
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    settings = {n: x for n, x in options.items() if n not in tensors}
    if DTYPE == "float16" and "bias" in tensors:
        tensors["bias"] = tensors["bias"].astype(np.float32)
    put = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip([*qkv, *tensors.values()], specs, strict=True)
    ]

    def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        given = dict(zip(tensors, rest, strict=True))
        return function(q, k, v, **given, **settings, return_lse=True)

    with within(mesh):
        compiled = jax.jit(call).lower(*put).compile()
        out, lse = compiled(*put)
    assert max_error(out, expected[0]) <= bound.out, (name, max_error(out, expected[0]))
    assert max_error(lse, expected[1]) <= bound.lse, name
    text = compiled.as_text()
    moved = [word for word in ("all-gather", "all-to-all", "all-reduce", "collective-permute")
             if f" {word}" in text]  # fmt: skip
    print(name, out.sharding.spec, *moved)
    assert out.sharding.is_equivalent_to(put[0].sharding, 4) or moved, name
    assert not moved or name.endswith("(gathers)"), (name, moved)


def splits(kind: Any) -> None:
    """Every way to split operands over a mesh, whose axes are of this kind."""
    count = len(jax.devices())
    two = make_mesh(kind, 2)
    random = np.random.default_rng(1)
    bias = random.standard_normal((4, 8, 24, 33)).astype(np.float32)
    mask = random.random((4, 1, 1, 33)) < 0.7
    sinks = random.standard_normal(8).astype(np.float32)
    slopes = random.random((4, 8)).astype(np.float32)
    attend = dlattn.jax.attention
    for kv in (8, 4, 2, 1):
        qkv = arrays(8, kv)
        check(f"batch, {kv} KV heads", attend, qkv, [BATCH] * 3, two, causal=True)
        of_kv = HEADS if kv > 1 else WHOLE
        check(f"heads, {kv} KV heads", attend, qkv, [HEADS, of_kv, of_kv], two, causal=True)
    qkv = arrays(8, 4)
    scores = {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks}
    check("batch, all tensors", attend, qkv, [BATCH] * 6 + [WHOLE], two, **scores)
    split = [P(None, "x"), WHOLE, P(None, "x"), P("x")]
    scalars = {"bias": np.array(0.5, np.float32), "mask": np.array(True)}
    check("batch, scalars", attend, qkv, [BATCH] * 3 + [WHOLE] * 2, two, **scalars)
    check("heads, all tensors", attend, qkv, [HEADS] * 3 + split, two, **scores)
    check("queries (gathers)", attend, qkv, [P(None, "x"), WHOLE, WHOLE], two)
    swapped = [x.swapaxes(1, 2) for x in qkv]
    check("bhsd", attend, swapped, [P(None, "x")] * 3, two, layout="bhsd", window=(5, 3))
    if count >= 4:
        four, square = make_mesh(kind, 4), make_mesh(kind, 2, 2)
        check("four devices", attend, qkv, [HEADS] * 3, four)
        both = P("x", None, "y")
        check("batch and heads", attend, qkv, [both] * 3, square)
        check("heads over two axes", attend, qkv, [P(None, None, ("x", "y"))] * 3, square)
        # Two KV heads do not go over four devices.
        few = arrays(8, 2)
        check("few KV heads (gathers)", attend, few, [HEADS, WHOLE, WHOLE], four)


def transformations(kind: Any) -> None:
    two = make_mesh(kind, 2)
    attend = dlattn.jax.attention
    qkv = arrays(8, 4)
    expected = attention_reference(*map(np.asarray, qkv), causal=True)
    bound = error_bound(*map(np.asarray, qkv), expected=expected, causal=True)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(attend(q, k, v, causal=True).astype(jnp.float32)).sum()

    want = jax.grad(loss, argnums=(0, 1, 2))(*qkv)
    mapped = jax.vmap(lambda q, k, v: attend(q[None], k[None], v[None], causal=True)[0])
    lengths = np.array([33, 5, 1, 20], np.int32)
    some = jax.jit(dlattn.jax.dot_product_attention)
    shorter = some(*qkv, key_value_seq_lengths=lengths)
    for spec in (BATCH, HEADS):
        put = [jax.device_put(x, NamedSharding(two, spec)) for x in qkv]
        with within(two):
            gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*put)
            each = jax.jit(mapped)(*put)
            some_of = some(*put, key_value_seq_lengths=lengths)
        same_gradients(gradients, want)
        assert max_error(each, expected[0]) <= bound.out
        assert max_error(some_of, shorter) <= bound.out


def shard_map() -> None:
    two = make_mesh(jax.sharding.AxisType.Auto, 2)
    qkv = arrays(8, 4)
    expected = attention_reference(*map(np.asarray, qkv), causal=True)
    bound = error_bound(*map(np.asarray, qkv), expected=expected, causal=True)
    over = functools.partial(jax.shard_map, mesh=two, in_specs=(BATCH,) * 3, out_specs=BATCH)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return dlattn.jax.attention(q, k, v, causal=True)

    def parts(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(attend(q, k, v).astype(jnp.float32)).sum()[None]

    def loss(*arrays: Any, function: Any) -> Any:
        return function(*arrays).sum()

    assert max_error(jax.jit(over(attend))(*qkv), expected[0]) <= bound.out
    want, got = (
        jax.jit(jax.grad(functools.partial(loss, function=f), argnums=(0, 1, 2)))(*qkv)
        for f in (parts, over(parts))
    )
    same_gradients(got, want)


def same_gradients(got: Any, want: Any) -> None:
    for pair in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in pair), atol=2e-5)


def main() -> None:
    assert len(jax.devices()) >= 2
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        print(kind)
        splits(kind)
        transformations(kind)
    shard_map()
    print("passed")


if __name__ == "__main__":
    sys.exit(main())

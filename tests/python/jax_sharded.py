"""`dlattn.jax` over arrays that are split over devices; a program, as JAX fixes their number.

    python tests/python/jax_sharded.py

Where JAX finds one device, it makes four of the CPU. What is computed is compared with float64,
and programs whose operands fit must not gather any.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dlattn.jax
from dlattn.reference import attention_reference, error_bound, max_error

DTYPE = "float32" if jax.default_backend() == "cpu" else "float16"


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


def main() -> None:
    count = len(jax.devices())
    assert count >= 2, count
    auto = jax.sharding.AxisType.Auto
    two = jax.make_mesh((2,), ("x",), axis_types=(auto,), devices=jax.devices()[:2])
    random = np.random.default_rng(1)
    bias = random.standard_normal((4, 8, 24, 33)).astype(np.float32)
    mask = random.random((4, 1, 1, 33)) < 0.7
    sinks = random.standard_normal(8).astype(np.float32)
    slopes = random.random((4, 8)).astype(np.float32)
    batch, heads, whole = P("x"), P(None, None, "x"), P()
    attend = dlattn.jax.attention
    for kv in (8, 4, 2, 1):
        qkv = arrays(8, kv)
        check(f"batch, {kv} KV heads", attend, qkv, [batch] * 3, two, causal=True)
        of_kv = heads if kv > 1 else whole
        check(f"heads, {kv} KV heads", attend, qkv, [heads, of_kv, of_kv], two, causal=True)
    qkv = arrays(8, 4)
    scores = {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks}
    check("batch, all tensors", attend, qkv, [batch] * 6 + [whole], two, **scores)
    split = [P(None, "x"), whole, P(None, "x"), P("x")]
    check("heads, all tensors", attend, qkv, [heads] * 3 + split, two, **scores)
    check("queries (gathers)", attend, qkv, [P(None, "x"), whole, whole], two)
    swapped = [x.swapaxes(1, 2) for x in qkv]
    check("bhsd", attend, swapped, [P(None, "x")] * 3, two, layout="bhsd", window=(5, 3))
    if count >= 4:
        four = jax.make_mesh((4,), ("x",), axis_types=(auto,), devices=jax.devices()[:4])
        square = jax.make_mesh((2, 2), ("x", "y"), axis_types=(auto,) * 2)
        check("four devices", attend, qkv, [heads] * 3, four)
        both = P("x", None, "y")
        check("batch and heads", attend, qkv, [both] * 3, square)
        check("heads over two axes", attend, qkv, [P(None, None, ("x", "y"))] * 3, square)
        # Two KV heads do not go over four devices.
        few = arrays(8, 2)
        check("few KV heads (gathers)", attend, few, [heads, whole, whole], four)

    mapped = jax.shard_map(
        lambda q, k, v: attend(q, k, v, causal=True),
        mesh=two, in_specs=(batch,) * 3, out_specs=batch,
    )  # fmt: skip
    out = jax.jit(mapped)(*qkv)
    expected = attention_reference(*map(np.asarray, qkv), causal=True)
    bound = error_bound(*map(np.asarray, qkv), expected=expected, causal=True)
    assert max_error(out, expected[0]) <= bound.out
    print("shard_map")

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(attend(q, k, v, causal=True).astype(jnp.float32)).sum()

    want = jax.grad(loss, argnums=(0, 1, 2))(*qkv)
    for spec in (batch, heads):
        put = [jax.device_put(x, NamedSharding(two, spec)) for x in qkv]
        got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*put)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), atol=2e-5)
    got = jax.jit(
        jax.grad(
            lambda *x: jax.shard_map(
                loss_of_parts, mesh=two, in_specs=(batch,) * 3, out_specs=batch
            )(*x).sum(),
            argnums=(0, 1, 2),
        )
    )(*qkv)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), atol=2e-5)
    print("gradients")
    print("passed")


def loss_of_parts(q: Any, k: Any, v: Any) -> Any:
    return jnp.sin(dlattn.jax.attention(q, k, v, causal=True).astype(jnp.float32)).sum()[None]


if __name__ == "__main__":
    sys.exit(main())

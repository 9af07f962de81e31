"""`dlattn.jax.ring_attention`: its steps, what it refuses, and four devices against float64."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from programs import HERE

from dlattn import UnsupportedError
from dlattn.integrations.ring import shards
from dlattn.integrations.ring.programs import Part, Step, steps
from dlattn.integrations.ring.schedule import Mask

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import dlattn.jax as face  # noqa: E402

QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def positions_of(length: int, n: int, rank: int, order: str) -> list[int]:
    return [p for rows in shards.positions(length, n, rank, order) for p in range(*rows)]


def scores_of(part: Part, queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    """(query, key) of what a call computes, by the meaning of its window."""
    q, k = queries[slice(*part.q)], keys[slice(*part.k)]
    left, right = (1000 if side is None else side for side in (part.left, part.right))
    if part.side:
        assert min(q) > max(k) if part.side > 0 else max(q) < min(k)
    return [
        (p, x)
        for i, p in enumerate(q)
        for j, x in enumerate(k)
        if -left <= j - i - (len(k) - len(q)) <= right
    ]


def computed(step: Step, rank: int, queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    travelled = keys[slice(*step.rows)]
    parts = step.kinds[step.kind_of[rank]]
    assert bool(parts) == (rank in step.receivers)
    found = []
    for part, offset in zip(parts, step.offsets[rank], strict=False):
        assert offset == queries[part.q[0]] - travelled[part.k[0]]
        found += scores_of(part, queries, travelled)
    return found


def test_every_score_is_computed_once() -> None:
    draw = random.Random(7)
    for _ in range(120):
        n, order = draw.choice([1, 2, 3, 4]), draw.choice(shards.ORDERS)
        length = n * draw.randrange(1, 9)
        sides = [draw.choice([None, None, 0, 1, 3, 8, 40]) for _ in range(2)]
        mask = Mask(*sides, distances=draw.random() < 0.3)
        left, right = (100 if side is None else side for side in sides)
        want = {(p, x) for p in range(length) for x in range(length) if -left <= x - p <= right}
        found: list[tuple[int, int]] = []
        each = [positions_of(length, n, rank, order) for rank in range(n)]
        for step in steps(length, n, order, mask):
            for rank in range(n):
                found += computed(step, rank, each[rank], each[(rank - step.shift) % n])
        assert len(found) == len(set(found)) and set(found) == want, (length, n, order, mask)


def test_few_ways_and_few_rows() -> None:
    causal = steps(8192, 8, "zigzag", Mask(None, 0))
    assert [len(step.kinds) for step in causal] == [1, *[2] * 7]
    assert not any(step.sums for step in causal)
    assert any(step.sums for step in steps(64, 4, "zigzag", Mask(20, 20)))
    near = steps(8192, 8, "contiguous", Mask(100, 0))
    assert [(step.shift, step.rows) for step in near] == [(0, (0, 1024)), (1, (924, 1024))]
    assert near[1].receivers == tuple(range(1, 8))


def arrays(rows: int = 6, rows_k: int = 6) -> list[Any]:
    numbers = np.random.default_rng(0)
    shapes = [(1, rows, 2, 8), (1, rows_k, 2, 8), (1, rows_k, 2, 8)]
    return [numbers.standard_normal(shape).astype("float32") + 0.25 for shape in shapes]


def on_one_device(q: Any, k: Any, v: Any, **options: Any) -> Any:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "x")
    attend = functools.partial(face.ring_attention, **{"axis_name": "x", **options})
    over = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return over(q, k, v)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rows_k": 4}, "k has 4 rows on a device and q has 6; accepted: as many"),
    ({"axis_name": "y"}, "axis_name is 'y'; accepted: an axis of the jax.shard_map around"),
    ({"order": "striped"}, "order is 'striped'; accepted: 'zigzag', 'contiguous'"),
    ({"causal": "left"}, "causal is 'left'; accepted: False, True"),
    ({"window": (1, -1)}, r"window is \(1, -1\); accepted: None or \(left, right\)"),
    ({"window": 5}, r"window is 5; accepted: None or \(left, right\)"),
    ({"axis_name": -1}, "axis_name is -1; accepted: an axis of the jax.shard_map around"),
    ({"softcap": -1.0}, "softcap"),
    ({"layout": "sbhd"}, "layout"),
    ({"sinks": np.float32(1)}, r"sinks: shape is \(\); accepted: \(2,\)"),
    ({"dtype": "float8_e4m3fn"}, "q is of float8_e4m3fn; accepted: float16, bfloat16"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda x: str(x))
def test_wrong_calls(changes: dict[str, Any], words: str) -> None:
    options = dict(changes)
    qkv = arrays(rows_k=options.pop("rows_k", 6))
    dtype = options.pop("dtype", "float32")
    with pytest.raises(UnsupportedError, match=words):
        on_one_device(*(jnp.asarray(x, dtype) for x in qkv), **options)


def test_axes_in_another_order_than_the_mesh_has_them() -> None:
    """jax.lax.ppermute counts devices in the mesh's order, whatever that of its axes."""
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for axes in (("x", "y"), ("y", "x")):
        spec = P(None, axes)
        attend = functools.partial(face.ring_attention, axis_name=axes)
        over = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        if axes == ("x", "y"):
            assert over(*arrays()).shape == (1, 6, 2, 8)
            continue
        with pytest.raises(UnsupportedError, match=r"axis_name is \('y', 'x'\); accepted: \('x',"):
            over(*arrays())


def test_gradients_that_there_are_not() -> None:
    q, k, v = arrays()
    slopes = np.array([0.5, 0.25], np.float32)
    with pytest.raises(UnsupportedError, match="alibi_slopes has a gradient asked for"):
        jax.grad(lambda x: on_one_device(q, k, v, alibi_slopes=x).sum())(slopes)

    def first(q: Any) -> Any:
        return jax.grad(lambda q: (on_one_device(q, k, v) ** 2).sum())(q).sum()

    with pytest.raises(UnsupportedError, match="gradients of ring_attention are differentiated"):
        jax.grad(first)(q)


def test_infinite_sinks() -> None:
    """One of +inf takes everything, and has the gradient of a sink that is merely large."""
    qkv = arrays()

    def gradient(sink: float) -> Any:
        sinks = jnp.asarray([sink, 0.5])
        return jax.grad(lambda x: (on_one_device(*qkv, sinks=x) ** 2).sum())(sinks)

    np.testing.assert_array_equal(gradient(np.inf), gradient(300.0))
    np.testing.assert_array_equal(gradient(-np.inf)[0], 0.0)
    assert gradient(np.inf)[1] != 0.0


@pytest.mark.parametrize("order", shards.ORDERS)
def test_sequences_in_the_order_of_devices(order: str) -> None:
    x = np.arange(2 * 24).reshape(2, 24)
    for n in (1, 3):
        found = face.shard_sequence(x, n, order=order)
        rows = [p for rank in range(n) for p in positions_of(24, n, rank, order)]
        np.testing.assert_array_equal(found, x[:, rows])
        back = face.unshard_sequence(found.T, n, axis=-2, order=order)
        np.testing.assert_array_equal(back.T, x)
    with pytest.raises(UnsupportedError, match="num_shards is 5; accepted: an int from 1 on that"):
        face.shard_sequence(x, 5, order=order)
    for axis in (2, "rows"):
        with pytest.raises(UnsupportedError, match=f"axis is {axis!r}; accepted: a dimension of"):
            face.unshard_sequence(x, 2, axis=axis, order=order)


def test_over_four_devices() -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE)]))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path,
        "XLA_FLAGS": " ".join(QUICK_TO_COMPILE),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "jax_ring.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr

"""Gradients of `dlattn.jax` over arrays that are split over devices, against float64; a program.

    python tests/python/support/jax_sharded_gradients.py

Where JAX finds one device, it makes four of the CPU. What a device has a part of is summed over
devices, and nothing is gathered.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import functools
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_sharded import make_mesh, within

import dlattn.jax
from dlattn.reference import attention_backward_reference, attention_reference

OPTIONS = {"causal": True, "softcap": 4.0}
WEIGHTS = np.random.default_rng(5).standard_normal((2, 4, 11, 8)).astype(np.float32) + 0.25
DTYPE = "float32" if jax.default_backend() == "cpu" else "float16"


def problem(heads_kv: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(heads_kv)
    own = {"q": (2, 11, 4, 16), "k": (2, 13, heads_kv, 16), "v": (2, 13, heads_kv, 8)}
    arrays = {n: random.standard_normal(shape) + 0.25 for n, shape in {**own, **shapes}.items()}
    return {n: x.astype(DTYPE if n in "qkv" else np.float32) for n, x in arrays.items()}


def results(given: dict[str, Any]) -> Any:
    return dlattn.jax.attention(**given, **OPTIONS, return_lse=True)


def loss(out: Any, lse: Any, weights: Any) -> Any:
    return (out.swapaxes(1, 2) * weights).sum() + lse.sum()


def expected(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out, lse = attention_reference(**given, **OPTIONS)
    dout, dlse = WEIGHTS.swapaxes(1, 2), np.ones_like(lse)
    found = attention_backward_reference(dout, **given, out=out, lse=lse, dlse=dlse, **OPTIONS)
    return {name: getattr(found, f"d{name}") for name in given}


def check(name: str, found: dict[str, Any], want: dict[str, np.ndarray]) -> None:
    for of, x in found.items():
        largest = np.abs(want[of]).max()
        assert largest > 0.1, (name, of)
        error = np.abs(np.asarray(x, np.float64) - want[of]).max() / largest
        assert error < (2e-5 if DTYPE == "float32" else 1e-2), (name, of, error)


def split(name: str, mesh: Any, given: dict[str, np.ndarray], specs: dict[str, Any]) -> None:
    put = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in given.items()}
    weights = jax.device_put(WEIGHTS, NamedSharding(mesh, specs["weights"]))

    @functools.partial(jax.jit)
    def gradients(given: Any, weights: Any) -> Any:
        return jax.grad(lambda given: loss(*results(given), weights))(given)

    with within(mesh):
        compiled = gradients.lower(put, weights).compile()
        found = compiled(put, weights)
    text = compiled.as_text()
    moved = [word for word in ("all-gather", "all-to-all", "all-reduce", "collective-permute")
             if f" {word}" in text]  # fmt: skip
    print(name, *moved)
    check(name, found, expected(given))
    assert set(moved) <= {"all-reduce"} or name.endswith("(gathers)"), (name, moved)
    if jax.__version_info__ >= (0, 10) or not mesh.explicit_axes:  # else by the formula
        assert "dlattn_attention_backward" in text, name


SHAPES: dict[str, tuple[int, ...]] = {"alibi_slopes": (4,), "sinks": (4,)}


def splits(kind: Any) -> None:
    square, four = make_mesh(kind, 2, 2), make_mesh(kind, 4)
    both = {name: P("x", None, "y") for name in "qkv"} | {"weights": P("x", "y")}
    by_head = {"alibi_slopes": P("y"), "sinks": P("y")}
    one = {"bias": (1, 1, 11, 13), **SHAPES}
    split("batch and heads", square, problem(2, **one), {**both, **by_head})
    each = {"bias": (2, 4, 11, 1), "alibi_slopes": (2, 4), "sinks": (4,)}
    own = {"bias": P("x", "y"), "alibi_slopes": P("x", "y"), "sinks": P("y")}
    split("a bias of each head", square, problem(2, **each), {**both, **own})
    heads = {"q": P(None, None, "x"), "weights": P(None, "x"), "alibi_slopes": P("x")}
    some = {"bias": (11, 13), "alibi_slopes": (4,)}
    split("heads of one KV head", four, problem(1, **some), heads)
    split("few KV heads (gathers)", four, problem(2, **some), heads)


def mapped(check_vma: bool) -> None:
    """In shard_map what all devices share has the sum of their gradients."""
    mesh = make_mesh(jax.sharding.AxisType.Auto, 2)
    given = problem(2, bias=(4, 11, 13), **SHAPES)
    specs = {name: P("x") if name in "qkv" else P() for name in given}

    def part(given: Any, weights: Any) -> Any:
        return loss(*results(given), weights)[None]

    over = jax.shard_map(
        part, mesh=mesh, in_specs=(specs, P("x")), out_specs=P("x"), check_vma=check_vma
    )
    gradients = jax.jit(jax.grad(lambda given: over(given, WEIGHTS).sum()))
    assert "dlattn_attention_backward" in gradients.lower(given).as_text()
    check(f"shard_map, check_vma={check_vma}", gradients(given), expected(given))

    def inside(given: Any, weights: Any) -> Any:
        return jax.grad(lambda given: loss(*results(given), weights))(given)

    if check_vma:  # else JAX sums nothing that is differentiated inside
        over = jax.shard_map(inside, mesh=mesh, in_specs=(specs, P("x")), out_specs=specs)
        check("grad in shard_map", jax.jit(over)(given, WEIGHTS), expected(given))


def main() -> None:
    assert len(jax.devices()) >= 4
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        print(kind)
        splits(kind)
    for check_vma in (True, False):
        mapped(check_vma)
    print("passed")


if __name__ == "__main__":
    sys.exit(main())

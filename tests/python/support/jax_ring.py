"""Sequences that are split over devices, against float64; a program, as JAX fixes their number.

`dlattn.jax.ring_attention` in shard_map, and `attention` of split arrays.

    python tests/python/support/jax_ring.py [CASE...]

Where JAX finds one device, it makes four of the CPU.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import math
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_sharded import make_mesh, within

import dlattn.jax
from dlattn.integrations.ring import shards
from dlattn.jax import ring_attention
from dlattn.reference import attention_backward_reference, attention_reference
from dlattn.reference.gradients import same_dtype_gradients

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
IN_TYPES = EXPLICIT if jax.__version_info__ >= (0, 10) else AUTO  # where they may be split
ON_CPU = jax.default_backend() == "cpu"


class Case(NamedTuple):
    """A problem, and the mesh whose axes `over` split its sequences."""

    length: int = 64
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 8)
    options: dict[str, Any] = {}  # noqa: RUF012  which nobody changes
    tensors: tuple[str, ...] = ()
    order: str = "zigzag"
    layout: str = "bshd"
    mesh: tuple[int, ...] = (4,)
    over: Any = "x"
    kind: Any = AUTO
    check_vma: bool = True
    dtype: str = "float64"
    mapped: bool = False


CASES = {
    "causal": Case(options={"causal": True}, dims=(64, 64), dtype="bfloat16"),
    "full": Case(
        length=28, options={"softcap": 3.0}, layout="bhsd", order="contiguous", over=("x",)
    ),
    "uneven work": Case(
        options={"causal": True, "softmax_scale": 0.5},
        order="contiguous",
        check_vma=False,
        mapped=True,
    ),
    "odd parts over two axes": Case(
        length=36, options={"causal": True}, mesh=(2, 2), over=("x", "y")
    ),
    "window and sinks": Case(options={"window": (9, 5)}, tensors=("sinks",), mesh=(2,)),
    "neighbours": Case(
        options={"causal": True, "window": (9, None), "deterministic": True},
        order="contiguous",
        tensors=("sinks",),
    ),
    "slopes": Case(
        options={"window": (30, 20), "softcap": 5.0}, tensors=("alibi_slopes", "sinks"), mesh=(2,)
    ),
    "causal slopes": Case(
        options={"causal": True}, tensors=("alibi_slopes",), layout="bhsd", order="contiguous"
    ),
    "one device": Case(length=21, options={"causal": True}, tensors=("sinks",), mesh=(1,)),
    "one axis of two": Case(options={"causal": True}, mesh=(2, 2), kind=EXPLICIT),
}


def arrays(case: Case) -> dict[str, Any]:
    """Inputs and dout, as (batch, rows, heads, dim)."""
    random = np.random.default_rng(len(case.options) + case.length)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.dims
    sizes = {
        "q": (heads, dim),
        "k": (heads_kv, dim),
        "v": (heads_kv, dim_v),
        "dout": (heads, dim_v),
    }
    found = {
        name: (random.standard_normal((2, case.length, *own)) + 0.25).astype(jnp.dtype(case.dtype))
        for name, own in sizes.items()
    }
    others = {"sinks": random.standard_normal(heads), "alibi_slopes": random.random((2, heads))}
    return {**found, **{name: others[name].astype("float32") for name in case.tensors}}


def expected(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    float64 = {name: np.asarray(x, "float64") for name, x in given.items()}
    options = {name: x for name, x in case.options.items() if name != "deterministic"}
    dout = float64.pop("dout")
    out, lse = attention_reference(**float64, **options)
    found = attention_backward_reference(dout, **float64, out=out, lse=lse, **options)
    return {"out": out, **{name: getattr(found, f"d{name}") for name in differentiated(case)}}


def plain(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    """The same in a plain computation in the case's dtype, of causal attention."""
    dout, *qkv = (np.asarray(given[name]) for name in ("dout", *"qkv"))
    out, lse = attention_reference(*qkv, **case.options)
    rounded = np.asarray(jnp.asarray(out, case.dtype))
    found = same_dtype_gradients(dout, *qkv, rounded, lse, dtype=case.dtype, **case.options)
    return {"out": rounded, **{name: getattr(found, f"d{name}") for name in "qkv"}}


def differentiated(case: Case) -> list[str]:
    return [*"qkv", *(name for name in case.tensors if name == "sinks")]


def program(case: Case, mesh: Any) -> Any:
    """out and gradients of all that has some, for inputs in the order of devices."""
    swap = case.layout == "bhsd"
    row = P(None, None, case.over) if swap else P(None, case.over)
    names = [*"qkv", *case.tensors]
    axes = set(case.over if isinstance(case.over, tuple) else (case.over,))

    def attention(*operands: Any) -> Any:
        return ring_attention(
            *operands[:3],
            **dict(zip(case.tensors, operands[3:], strict=True)),
            axis_name=case.over,
            layout=case.layout,
            order=case.order,
            **case.options,
        )

    def each(*operands: Any) -> Any:
        return jax.vmap(lambda *one: attention(*(x[None] for x in one))[0])(*operands)

    over = jax.shard_map(
        each if case.mapped else attention,
        mesh=mesh,
        in_specs=(row, row, row, *(P() for _ in case.tensors)),
        out_specs=row,
        axis_names=axes,
        check_vma=case.check_vma,
    )

    def run(given: dict[str, Any]) -> dict[str, Any]:
        wanted = differentiated(case)

        def of(moving: dict[str, Any]) -> Any:
            every = {**given, **moving}
            return over(*(turned(every[name], swap and name in "qkv") for name in names))

        out, pull = jax.vjp(of, {name: given[name] for name in wanted})
        (found,) = pull(turned(given["dout"], swap))
        return {"out": turned(out, swap), **found}

    return run


def turned(x: Any, swap: bool) -> Any:
    return x.swapaxes(1, 2) if swap else x


def check(name: str, case: Case) -> None:
    count = math.prod(case.mesh)
    over = case.over if isinstance(case.over, tuple) else (case.over,)
    mesh = make_mesh(case.kind, *case.mesh)
    n = math.prod(mesh.shape[axis] for axis in over)
    given = arrays(case)
    want = expected(case, given)
    bounds = {of: 3e-6 * np.abs(x).max() for of, x in want.items()}
    if case.dtype != "float64":
        bounds = {of: 2 * np.abs(x - want[of]).max() for of, x in plain(case, given).items()}
    each = [shards.positions(case.length, n, rank, case.order) for rank in range(n)]
    positions = [p for ranges in each for rows in ranges for p in range(*rows)]
    put = {}
    for of, x in given.items():
        row = of in (*"qkv", "dout")
        spec = P(None, case.over) if row else P()
        ordered = x[:, positions] if row else x
        put[of] = jax.device_put(ordered, NamedSharding(mesh, spec))
    with within(mesh):
        traced = jax.jit(program(case, mesh)).trace(put)
        lowered = traced.lower()
        compiled = lowered.compile()
        found = compiled(put)
    for of, x in found.items():
        whole = np.asarray(x)
        if of != "sinks":
            whole = np.empty_like(whole)
            whole[:, positions] = np.asarray(x)
        assert whole.dtype == given.get(of, given["q"]).dtype, (name, of, whole.dtype)
        assert np.abs(want[of]).max() > 0.1, (name, of)
        error = np.abs(whole.astype(np.float64) - want[of]).max()
        assert error <= bounds[of], (name, of, error, bounds[of])
    if n == count > 1:
        check_program(name, case, traced, lowered, compiled)
    print(name, flush=True)


def check_program(name: str, case: Case, traced: Any, lowered: Any, compiled: Any) -> None:
    """Nothing is gathered, and no array of a device is larger than its queries."""
    text = compiled.as_text()
    gathered = [word for word in ("all-gather", "all-to-all") if f" {word}" in text]
    assert not gathered and " collective-permute" in text, (name, gathered)
    own = 2 * case.length // math.prod(case.mesh) * case.heads[0] * max(case.dims)
    shapes = (found.split(",") for found in re.findall(r"[fsb][a-z]*\d+\[([\d,]+)\]", text))
    most = max(math.prod(map(int, shape)) for shape in shapes)
    assert most <= own, (name, most, own)
    asked = case.options.get("deterministic", False)
    assert f"deterministic = {int(asked)} : i64" in lowered.as_text(), name
    if name == "causal":  # the next keys are sent before those that are there are computed
        events = "".join(events_of(traced.jaxpr.jaxpr))
        assert events == "pcpcpcc" + "pcpcppcpcp", events


def events_of(jaxpr: Any) -> Iterator[str]:
    """p: rows are sent. c: a call of attention, or a choice among some."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("ppermute", "cond", "custom_partitioning", "ffi_call"):
            yield "p" if name == "ppermute" else "c"
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from events_of(inner)


class Split(NamedTuple):
    """A call outside of shard_map, of arrays that are split over a mesh, and how XLA serves it."""

    options: dict[str, Any]
    mesh: tuple[int, ...]
    spec: Any
    kind: Any = AUTO
    tensors: tuple[str, ...] = ()
    gathers: bool = False


SPLITS = {
    "jit, causal": Split({"causal": True}, (4,), P(None, "x")),
    "jit, batch, window, sinks": Split(
        {"window": (20, None), "causal": "top_left"}, (2, 2), P("y", "x"), IN_TYPES, ("sinks",)
    ),
    "jit, two axes": Split({"causal": True}, (2, 2), P(None, ("y", "x"))),
    "jit, bias": Split({}, (2,), P(None, "x"), tensors=("bias",), gathers=True),
}


def check_split(name: str, split: Split) -> None:
    """All results, and lse with a gradient of its own."""
    random = np.random.default_rng(3)
    shapes = {"q": (4, 16), "k": (2, 16), "v": (2, 8), "dout": (4, 8)}
    given = {of: random.standard_normal((2, 64, *own)) + 0.25 for of, own in shapes.items()}
    given["dlse"] = random.standard_normal((2, 4, 64)).astype("float32")
    others = {"sinks": (4,), "bias": (4, 64, 64)}
    given |= {of: random.standard_normal(others[of]).astype("float32") for of in split.tensors}
    own = [*"qkv", *split.tensors]
    float64 = {of: given[of] for of in own}
    out, lse = attention_reference(**float64, **split.options)
    both = {"out": out, "lse": lse, "dlse": given["dlse"]}
    found = attention_backward_reference(given["dout"], **float64, **both, **split.options)
    want = {"out": out, "lse": lse, **{of: getattr(found, f"d{of}") for of in own}}

    mesh = make_mesh(split.kind, *split.mesh)
    batch, rows = split.spec
    specs = dict.fromkeys(shapes, split.spec) | {"dlse": P(batch, None, rows), "sinks": P()}
    put = {
        of: jax.device_put(given[of], NamedSharding(mesh, spec))
        for of, spec in specs.items()
        if of in given
    }
    rest = {of: given[of] for of in given if of not in put}

    def run(given: dict[str, Any]) -> Any:
        def of(moving: dict[str, Any]) -> Any:
            return dlattn.jax.attention(**moving, **split.options, return_lse=True)

        results, pull = jax.vjp(of, {of: given[of] for of in own})
        (gradients,) = pull((given["dout"], given["dlse"]))
        return {**dict(zip(("out", "lse"), results, strict=True)), **gradients}

    with within(mesh):
        compiled = jax.jit(run).lower({**put, **rest}).compile()
        got = compiled({**put, **rest})
    for of, x in got.items():
        error = np.abs(np.asarray(x, np.float64) - want[of]).max() / np.abs(want[of]).max()
        assert error < 3e-6, (name, of, error)
    text = compiled.as_text()
    assert (" all-gather" in text) == split.gathers, name
    assert (" collective-permute" in text) != split.gathers, name
    print(name, flush=True)


def main() -> None:
    if ON_CPU:
        jax.config.update("jax_enable_x64", True)
    assert len(jax.devices()) >= 4
    for name in sys.argv[1:] or [*CASES, *SPLITS]:
        if name in CASES:
            check(name, CASES[name])
        else:
            check_split(name, SPLITS[name])
    print("passed")


if __name__ == "__main__":
    sys.exit(main())

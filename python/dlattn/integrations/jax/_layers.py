"""The layers between JAX's transformations and a custom call: vmap, sharding, shard_map.

From the outside: `mappable` takes what vmap maps over into the batch, `partitionable` tells XLA how
to split it over devices, and `Call.launch` calls the handler with the shapes that one device has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from dlattn.integrations.jax import _sequences
from dlattn.integrations.jax._calls import Call, spec_of, vary
from dlattn.integrations.jax._launch import Result
from dlattn.integrations.jax._operands import (
    axes_of,
    dims,
    fold,
    folds,
    in_order_of,
    last_dims,
    sharding_rule,
    size_of,
)


@functools.lru_cache(maxsize=1024)
def partitionable(call: Call, shapes: tuple[tuple[int, ...], ...]) -> Callable[..., Result]:
    layout = call.layout
    shape_of = dict(zip(call.names, shapes, strict=True))
    of_results = [(name, shape_of[name] if call.needs else None) for name in call.results]
    num_heads_kv = shapes[1][dims("k", layout).index("g")]
    length = shapes[0][dims("q", layout).index("s")]

    @custom_partitioning
    def function(*operands: Any) -> Result:
        return call.launch(operands)

    def split_as(q: Any) -> dict[str, Any]:
        mesh = q.sharding.mesh
        split = call.splits(q.sharding.spec, mesh, num_heads_kv, length)
        # A ring needs the order of the mesh, in which jax.lax.ppermute counts devices.
        rows = in_order_of(mesh, split["s"])
        return {**split, "s": rows, "t": rows}

    def shardings(q: Any) -> tuple[Result, Result, list[tuple[Any, ...]]]:
        """Those of all operands and results, from that of q; and the axes over which each result is
        a sum, as its own dimensions are not split over them."""
        mesh, split = q.sharding.mesh, split_as(q)

        def sharding(name: str, shape: tuple[int, ...] | None) -> NamedSharding:
            letters = dims(name, layout)
            if shape is None:
                return NamedSharding(mesh, PartitionSpec(*(split.get(x) for x in letters)))
            letters = last_dims(letters, len(shape))
            parts = (split.get(x) if n != 1 else None for x, n in zip(letters, shape, strict=True))
            return NamedSharding(mesh, PartitionSpec(*parts))

        own = tuple(sharding(name, shape_of[name]) for name in call.names)
        made = tuple(sharding(name, shape) for name, shape in of_results)
        all_axes = axes_of(split.values())
        sums = [tuple(x for x in all_axes if x not in axes_of(one.spec)) for one in made]
        return own, made, sums

    def infer(mesh: Any, operands: Any, result: Any) -> Any:
        return shardings(operands[0])[1]

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        own, made, sums = shardings(operands[0])
        mesh = own[0].mesh
        axes = axes_of((split_as(operands[0])["s"],))

        def part(*values: Any) -> Result:
            # In a mesh of explicit axes that is set, each array would get a sharding in its type.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                one = _sequences.launch(call, values, axes, mesh) if axes else call.launch(values)
                return tuple(map(_sum_over, one, sums))

        return mesh, part, made, own

    rule, factors = sharding_rule(call.names, shapes, of_results, layout, call.ring)
    function.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, **factors
    )
    return function


def _sum_over(x: Any, axes: tuple[Any, ...]) -> Any:
    if not axes:
        return x
    compute = jnp.promote_types(x.dtype, jnp.float32)  # rounded once
    return jax.lax.psum(x.astype(compute), axes).astype(x.dtype)


def can_sum(arguments: Any) -> bool:
    """Whether `_sum_over` works: not over explicit axes of a mesh before JAX 0.10."""
    if jax.__version_info__ >= (0, 10):
        return True
    return not any(jax.typeof(x).sharding.mesh.explicit_axes for x in jax.tree.leaves(arguments))


def _is_partly_manual() -> bool:
    """Whether this is in a shard_map over some of a mesh's axes.

    JAX does not tell custom_partitioning the mesh there, and XLA gathers what the others split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 0 < len(mesh.manual_axes) < len(mesh.axis_names)


def with_automatic_axes(function: Callable[..., Any], arguments: Any, specs: Any) -> Any:
    """function(*arguments), where arrays may have their sharding in their types.

    jax.make_mesh has such axes unless it is told otherwise. Within, XLA splits what it computes;
    the results get types with `specs(mesh)`, of q's mesh, or of the first that has one.
    """
    meshes = [x.sharding.mesh for x in map(jax.typeof, jax.tree.leaves(arguments))]
    explicit = [mesh for mesh in meshes if mesh.explicit_axes]
    if not explicit:
        return function(*arguments)
    mesh = explicit[0]
    call = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=specs(mesh))
    if not jax.sharding.get_abstract_mesh().empty:
        return call(*arguments)
    with jax.sharding.use_abstract_mesh(mesh):  # which JAX before 0.10 asks for
        return call(*arguments)


@functools.lru_cache(maxsize=1024)
def mappable(call: Call) -> Callable[..., Result]:
    names, layout = call.names, call.layout

    @jax.custom_batching.custom_vmap
    def function(*operands: Any) -> Result:
        if _is_partly_manual():
            return vary(call.launch(operands), operands)
        shapes = tuple(tuple(x.shape) for x in operands)
        return vary(partitionable(call, shapes)(*operands), operands)

    @function.def_vmap
    def _(axis_size: int, batched: list[bool], *operands: Any) -> tuple[Result, Any]:
        mapped = dict(zip(names, batched, strict=True))
        alone = [name for name in names if mapped[name] or name in call.needs]
        if not all(map(folds, alone)):
            # Sinks are the same for the whole batch, so each of theirs has a call of its own.
            result = _one_by_one(function, operands, batched)
            return result, (True,) * len(result)
        batch_size = size_of("b", "q", operands[0], layout)

        def run(*operands: Any) -> Result:
            # Each of those mapped over has a gradient of its own.
            result = function(
                *(
                    fold(name, x, axis_size, mapped[name], batch_size, layout, name in call.needs)
                    for name, x in zip(names, operands, strict=True)
                )
            )
            parts = [x.reshape(axis_size, batch_size, *x.shape[1:]) for x in result]
            if not call.needs:
                return tuple(parts)
            given = dict(zip(names, operands, strict=True))
            shapes = [given[name].shape[mapped[name] :] for name in call.needs]
            return tuple(map(_sum_to, parts, shapes))

        def specs(mesh: Any) -> Result:
            of_q = (*spec_of(operands[0]), *(None,) * operands[0].ndim)
            lead = spec_of(next(x for x, moves in zip(operands, batched, strict=True) if moves))
            own = call.specs(of_q[1:] if batched[0] else of_q, operands, mesh)
            moves = [call.needs != () and mapped[name] for name in call.results]
            return tuple(
                spec if has_lead else PartitionSpec(lead[0], *spec)
                for spec, has_lead in zip(own, moves, strict=True)
            )

        result = with_automatic_axes(run, operands, specs)
        return result, (True,) * len(result)

    return function


def _one_by_one(
    function: Callable[..., Result], operands: Sequence[Any], batched: list[bool]
) -> Result:
    def one(moving: list[Any]) -> Result:
        rest = iter(moving)
        pairs = zip(operands, batched, strict=True)
        return function(*(next(rest) if is_mapped else x for x, is_mapped in pairs))

    moving = [x for x, is_mapped in zip(operands, batched, strict=True) if is_mapped]
    result: Result = jax.lax.map(one, moving)
    return result


def _sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Gradients of (mapped, batch, ...) as those of an operand of this shape, mapped."""
    size = 1
    for count in (x.shape[0], *shape):
        size *= count
    if x.size != size:
        x = x.sum(axis=1)
    return x.reshape(x.shape[0], *shape)

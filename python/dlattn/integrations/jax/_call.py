"""Attention as a JAX function that can be compiled, mapped, sharded and differentiated.

Four layers, from the outside: `differentiable` gives it a gradient, `_mappable` takes what vmap
maps over into the batch, `_partitionable` tells XLA how to split it over devices, and `launch`
calls the handler of dlattn._core with the shapes that one device has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from dlattn import _core
from dlattn._attention import attention as _attention
from dlattn._attention import attention_varlen as _attention_varlen
from dlattn._errors import UnsupportedError
from dlattn.integrations.jax import _formula
from dlattn.integrations.jax._operands import (
    dims,
    fold,
    folds,
    last_dims,
    sharding_rule,
    size_of,
    splits,
)

SIGNATURE = inspect.signature(_attention)
_VARLEN = inspect.signature(_attention_varlen)
_TARGET = "dlattn_attention"

Options = tuple[tuple[str, Any], ...]  # names and values, which can be hashed
Names = tuple[str, ...]  # of the operands, in their order
Result = tuple[Any, ...]  # out, and lse if options say so

for _platform, _handler in _core.xla_handlers().items():
    jax.ffi.register_ffi_target(_TARGET, _handler, platform=_platform)


def check_sizes(name: str, x: Any) -> None:
    """Raise UnsupportedError for symbolic sizes, as jax.export gives arrays."""
    if not all(isinstance(size, int) for size in x.shape):
        shape = ", ".join(map(str, x.shape))
        raise UnsupportedError(
            f"{name} is of shape ({shape}), which has symbolic sizes; accepted: numbers, so a "
            "jax.export for each shape"
        )


def _spec(name: str, x: Any) -> tuple[str, tuple[int, ...]]:
    check_sizes(name, x)
    return str(x.dtype), tuple(x.shape)


def describe(options: dict[str, Any], operands: dict[str, Any]) -> Any:
    """The answer of `_core` about a call with these shapes. Raises what the call would raise."""
    given = {**options, **{name: _spec(name, x) for name, x in operands.items()}}
    signature, function = SIGNATURE, _core.xla_call
    if "cu_seqlens_q" in operands:
        signature, function = _VARLEN, _core.xla_call_varlen
    bound = signature.bind(**{n: x for n, x in given.items() if n in signature.parameters})
    bound.apply_defaults()
    return function(*bound.arguments.values())


def _attributes(values: dict[str, Any]) -> dict[str, Any]:
    kinds = {int: np.int64, float: np.float64, str: str}
    return {name: kinds[type(value)](value) for name, value in values.items()}


def _launch(options: dict[str, Any], operands: dict[str, Any]) -> Result:
    values, out, lse_shape, workspace_bytes = describe(options, operands)
    results = [jax.ShapeDtypeStruct(out[1], jnp.dtype(out[0]))]
    if options["return_lse"]:
        results.append(jax.ShapeDtypeStruct(lse_shape, jnp.float32))
    count = len(results)
    if workspace_bytes:  # 256 bytes to align it
        results.append(jax.ShapeDtypeStruct((workspace_bytes + 256,), jnp.uint8))
    order = values["operands"].split()
    call = jax.ffi.ffi_call(_TARGET, results)
    done = call(*(operands[name] for name in order), **_attributes(values))
    return tuple(done[:count])


def _launch_with_lengths(options: dict[str, Any], operands: dict[str, Any]) -> Result:
    """With seqused_k: sequences of one length, whose keys are used up to some."""
    q, k = operands["q"], operands["k"]
    (batch_size, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    starts = jnp.arange(batch_size + 1, dtype=jnp.int32)
    packed = {name: operands[name].reshape(-1, *operands[name].shape[2:]) for name in "qkv"}
    lengths = {"cu_seqlens_q": starts * seqlen_q, "cu_seqlens_k": starts * seqlen_k}
    sizes = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    out, *lse = _launch({**options, **sizes}, {**operands, **packed, **lengths})
    out = out.reshape(batch_size, seqlen_q, *out.shape[1:])
    return (out, *(x.reshape(-1, batch_size, seqlen_q).swapaxes(0, 1) for x in lse))


def launch(options: Options, names: Names, values: Sequence[Any]) -> Result:
    operands = dict(zip(names, values, strict=True))
    function = _launch_with_lengths if "seqused_k" in operands else _launch
    return function(dict(options), operands)


@functools.lru_cache(maxsize=1024)
def _partitionable(
    options: Options, names: Names, shapes: tuple[tuple[int, ...], ...]
) -> Callable[..., Result]:
    settings = dict(options)
    layout = settings["layout"]
    results = ("out", "lse") if settings["return_lse"] else ("out",)
    num_heads_kv = shapes[1][dims("k", layout).index("g")]

    @custom_partitioning
    def function(*operands: Any) -> Result:
        return launch(options, names, operands)

    def shardings(q: Any) -> tuple[tuple[Any, ...], Result]:
        """The shardings of all operands and results, from that of q."""
        mesh = q.sharding.mesh
        split = splits(q.sharding.spec, mesh.shape, num_heads_kv, layout)

        def sharding(name: str, shape: tuple[int, ...] | None) -> NamedSharding:
            letters = dims(name, layout)
            if shape is None:
                return NamedSharding(mesh, PartitionSpec(*(split.get(x) for x in letters)))
            letters = last_dims(letters, len(shape))
            parts = (split.get(x) if n != 1 else None for x, n in zip(letters, shape, strict=True))
            return NamedSharding(mesh, PartitionSpec(*parts))

        of_operands = (sharding(name, shape) for name, shape in zip(names, shapes, strict=True))
        return tuple(of_operands), tuple(sharding(name, None) for name in results)

    def infer(mesh: Any, operands: Any, result: Any) -> Any:
        return shardings(operands[0])[1]

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        own, of_results = shardings(operands[0])
        return own[0].mesh, lambda *x: launch(options, names, x), of_results, own

    rule, factors = sharding_rule(names, shapes, results, layout)
    function.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, **factors
    )
    return function


def _varying_axes(x: Any) -> frozenset[Any]:
    """The axes of shard_map's mesh along which devices have values of their own."""
    kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
    if hasattr(kind, "vma"):  # before JAX 0.10
        return frozenset(kind.vma)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else ())


def _vary(results: Result, operands: Sequence[Any]) -> Result:
    """In shard_map, results differ between devices if operands do; custom_partitioning forgets."""
    axes = frozenset[Any]().union(*map(_varying_axes, operands))

    def varying(x: Any) -> Any:
        missing = tuple(axes - _varying_axes(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # of older ones

    return tuple(map(varying, results))


def _with_automatic_axes(function: Callable[..., Any], arguments: Any, specs: Any) -> Any:
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


def _spec_of(x: Any) -> Any:
    return jax.typeof(x).sharding.spec


def _specs_of_results(settings: dict[str, Any], q_spec: Any, k: Any, mesh: Any) -> Result:
    layout = settings["layout"]
    split = splits(q_spec, mesh.shape, size_of("g", "k", k, layout), layout)
    results = ("out", "lse") if settings["return_lse"] else ("out",)
    return tuple(PartitionSpec(*map(split.get, dims(name, layout))) for name in results)


@functools.lru_cache(maxsize=1024)
def _mappable(options: Options, names: Names) -> Callable[..., Result]:
    settings = dict(options)
    layout = settings["layout"]

    @jax.custom_batching.custom_vmap
    def function(*operands: Any) -> Result:
        shapes = tuple(tuple(x.shape) for x in operands)
        return _vary(_partitionable(options, names, shapes)(*operands), operands)

    @function.def_vmap
    def _(axis_size: int, batched: list[bool], *operands: Any) -> tuple[Result, Any]:
        mapped = dict(zip(names, batched, strict=True))
        if any(mapped[name] and not folds(name) for name in names):
            # Sinks are the same for the whole batch, so each of theirs has a call of its own.
            def one(moving: list[Any]) -> Result:
                rest = iter(moving)
                pairs = zip(operands, batched, strict=True)
                return function(*(next(rest) if is_mapped else x for x, is_mapped in pairs))

            moving = [x for x, is_mapped in zip(operands, batched, strict=True) if is_mapped]
            result: Result = jax.lax.map(one, moving)
            return result, (True,) * len(result)
        batch_size = size_of("b", "q", operands[0], layout)

        def call(*operands: Any) -> Result:
            folded = (
                fold(name, x, axis_size, mapped[name], batch_size, layout)
                for name, x in zip(names, operands, strict=True)
            )
            result = function(*folded)
            return tuple(x.reshape(axis_size, batch_size, *x.shape[1:]) for x in result)

        def specs(mesh: Any) -> Result:
            of_q = (*_spec_of(operands[0]), *(None,) * operands[0].ndim)
            lead = _spec_of(next(x for x, moves in zip(operands, batched, strict=True) if moves))
            own = _specs_of_results(settings, of_q[1:] if batched[0] else of_q, operands[1], mesh)
            return tuple(PartitionSpec(lead[0], *spec) for spec in own)

        result = _with_automatic_axes(call, operands, specs)
        return result, (True,) * len(result)

    return function


@functools.lru_cache(maxsize=1024)
def differentiable(options: Options, names: Names) -> Callable[..., Result]:
    settings = dict(options)
    mappable = _mappable(options, names)

    def attend(*operands: Any) -> Result:
        def specs(mesh: Any) -> Result:
            return _specs_of_results(settings, _spec_of(operands[0]), operands[1], mesh)

        return _with_automatic_axes(mappable, operands, specs)

    @jax.custom_vjp
    def dlattn_attention(*operands: Any) -> Result:
        return attend(*operands)

    def forward(*operands: Any) -> tuple[Result, Any]:
        if operands[0].dtype == jnp.float8_e4m3fn:
            raise UnsupportedError(
                "q is of float8_e4m3fn and a gradient is asked for; accepted: float16, bfloat16, "
                "float32 or float64 where there is one"
            )
        # The function itself, which has a gradient of its own: that of this rule is a second one.
        return dlattn_attention(*operands), operands

    def gradients(operands: Any, cotangents: Result) -> list[Any]:
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]

        def formula(*moving: Any) -> Result:
            rest = iter(moving)
            pairs = zip(operands, floating, strict=True)
            values = (next(rest) if moves else x for x, moves in pairs)
            both = _formula.attention(settings, dict(zip(names, values, strict=True)))
            return both[: len(cotangents)]

        moving = [x for x, moves in zip(operands, floating, strict=True) if moves]
        return list(jax.vjp(formula, *moving)[1](cotangents))

    def backward(operands: Any, cotangents: Result) -> tuple[Any, ...]:
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]

        def specs(mesh: Any) -> list[Any]:
            pairs = zip(operands, floating, strict=True)
            return [_spec_of(x) for x, moves in pairs if moves]

        found = iter(_with_automatic_axes(gradients, (operands, cotangents), specs))
        return tuple(next(found) if moves else None for moves in floating)

    dlattn_attention.defvjp(forward, backward)
    compiled: Callable[..., Result] = jax.jit(dlattn_attention)
    return compiled

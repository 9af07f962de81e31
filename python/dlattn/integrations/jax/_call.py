"""Attention as a JAX function that can be compiled, mapped, sharded and differentiated.

The gradients are those of dlattn's backward pass, a custom call like attention's. They have
gradients themselves, of any order: those of the definition in jax.numpy, which serves calls without
a backward pass too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from dlattn._errors import UnsupportedError
from dlattn.integrations.jax import _formula, _launch, _sequences
from dlattn.integrations.jax._calls import Call, spec_of, vary
from dlattn.integrations.jax._launch import Names, Options, Result
from dlattn.integrations.jax._layers import (
    can_sum,
    mappable,
    with_automatic_axes,
)


def launch(call: Call, operands: tuple[Any, ...]) -> Result:
    call = call._replace(ring=can_sum(operands) and _sequences.may_be_split(call, operands))

    def specs(mesh: Any) -> Result:
        return call.specs(spec_of(operands[0]), operands, mesh)

    result: Result = with_automatic_axes(mappable(call), operands, specs)
    return result


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _of_formula(
    settings: dict[str, Any], operands: dict[str, Any], needs: Names, cotangents: dict[str, Any]
) -> Result:
    """The gradients of what `needs` names, for those of out and lse that there are."""

    def formula(*moving: Any) -> dict[str, Any]:
        given = {**operands, **dict(zip(needs, moving, strict=True))}
        out, lse = _formula.attention(settings, given)
        return {name: x for name, x in (("dout", out), ("dlse", lse)) if name in cotangents}

    result: Result = jax.vjp(formula, *(operands[name] for name in needs))[1](cotangents)
    return result


@functools.lru_cache(maxsize=1024)
def _gradients(options: Options, names: Names, given: Names, needs: Names) -> Callable[..., Result]:
    """The backward pass: of the operands, out, lse, and those of dout and dlse that are given.

    As out and lse are functions of the operands, its own gradients go all to those and to dout and
    dlse, and none to out and lse.
    """
    settings = dict(options)
    call = Call(options, (*names, "out", "lse", *given), needs)

    @jax.custom_vjp
    def dlattn_attention_backward(*values: Any) -> Result:
        return launch(call, values)

    def forward(*values: Any) -> tuple[Result, Any]:
        return dlattn_attention_backward(*values), values

    def backward(values: Any, cotangents: Result) -> tuple[Any, ...]:
        both = dict(zip(call.names, values, strict=True))
        moving = [
            name for name, x in both.items() if _is_floating(x) and name not in ("out", "lse")
        ]

        def first(*moved: Any) -> Result:
            all_of = {**both, **dict(zip(moving, moved, strict=True))}
            operands = {name: all_of[name] for name in names}
            return _of_formula(settings, operands, needs, {name: all_of[name] for name in given})

        def second(both: Any, cotangents: Result) -> Result:
            result: Result = jax.vjp(first, *(both[name] for name in moving))[1](cotangents)
            return result

        def specs(mesh: Any) -> Result:
            return tuple(spec_of(both[name]) for name in moving)

        found = with_automatic_axes(second, (both, cotangents), specs)
        by_name = dict(zip(moving, found, strict=True))
        return tuple(by_name.get(name) for name in call.names)

    dlattn_attention_backward.defvjp(forward, backward)
    return dlattn_attention_backward


@functools.lru_cache(maxsize=1024)
def differentiable(options: Options, names: Names) -> Callable[..., Result]:
    settings = dict(options)
    with_lse = tuple(sorted({**settings, "return_lse": True}.items()))

    @jax.custom_vjp
    def attention(*operands: Any) -> Result:
        return launch(Call(options, names), operands)

    def forward(*primals: Any) -> tuple[Result, Any]:
        values = tuple(x.value for x in primals)
        operands = dict(zip(names, values, strict=True))
        if operands["q"].dtype == jnp.float8_e4m3fn:
            raise UnsupportedError(
                "q is of float8_e4m3fn and a gradient is asked for; accepted: float16, bfloat16, "
                "float32 or float64 where there is one"
            )
        _formula.check_defined(operands)
        # The function has a gradient of its own: that of this rule is a second one.
        result = differentiable(with_lse, names)(*values)
        saved = jax.lax.stop_gradient(result)
        moving = [x.perturbed and _is_floating(x.value) for x in primals]
        return result if settings["return_lse"] else result[:1], (values, saved, _bits(moving))

    def backward(residuals: Any, cotangents: Result) -> tuple[Any, ...]:
        values, saved, moving = residuals
        operands = dict(zip(names, values, strict=True))
        needs = tuple(name for n, name in enumerate(names) if moving.shape[1] >> n & 1)
        pairs = zip(("dout", "dlse"), cotangents, strict=False)
        given = {name: x for name, x in pairs if not isinstance(x, SymbolicZero)}
        if not needs or not given:
            return gradients_as(values, names, {})
        own = settings["precision"] is None and can_sum(values)
        if own and _launch.has_backward(settings, operands, needs):
            function = _gradients(options, names, tuple(given), needs)
            found = function(*values, *saved, *given.values())
        else:

            def gradients(operands: Any, given: Any) -> Result:
                return _of_formula(settings, operands, needs, given)

            def specs(mesh: Any) -> Result:
                return tuple(spec_of(operands[name]) for name in needs)

            found = with_automatic_axes(gradients, (operands, given), specs)
        by_name = dict(zip(needs, found, strict=True))
        return gradients_as(values, names, by_name)

    attention.defvjp(forward, backward, symbolic_zeros=True)

    def dlattn_attention(*operands: Any) -> Result:
        # In shard_map gradients of what all devices share are sums over them, which JAX adds here.
        return attention(*vary(operands, operands))

    compiled: Callable[..., Result] = jax.jit(dlattn_attention)
    return compiled


def gradients_as(values: Result, names: Names, found: dict[str, Any]) -> tuple[Any, ...]:
    """Those that were found and zeros for the others: JAX before 0.10 asks for one structure."""

    def zero(x: Any) -> Any:
        return SymbolicZero(jax.typeof(x).to_tangent_aval()) if _is_floating(x) else None

    pairs = zip(names, values, strict=True)
    return tuple(found[name] if name in found else zero(x) for name, x in pairs)


def _bits(flags: list[bool]) -> Any:
    """The flags as the size of an array without elements.

    JAX has one structure of residuals for all derivatives of a call that it traced, and each
    derivative has flags of its own.
    """
    return jnp.zeros((0, sum(flag << n for n, flag in enumerate(flags))), bool)

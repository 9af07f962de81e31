"""The custom calls of `dlattn._core`'s handlers, with the shapes that one device has."""

from __future__ import annotations

import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlattn import _core
from dlattn._attention import attention as _attention
from dlattn._attention import attention_varlen as _attention_varlen
from dlattn._errors import UnsupportedError
from dlattn._types import QuantizedKV
from dlattn.frameworks.base import type_text

SIGNATURE = inspect.signature(_attention)
_VARLEN = inspect.signature(_attention_varlen)
_TARGET, _BACKWARD_TARGET = "dlattn_attention", "dlattn_attention_backward"
_RESULTS = ("out", "lse", "dout", "dlse")  # operands of a backward pass beside attention's own

Options = tuple[tuple[str, Any], ...]  # names and values, which can be hashed
Names = tuple[str, ...]  # of the operands, in their order
Result = tuple[Any, ...]  # out, and lse if options say so; or gradients

for _target, _handlers in (
    (_TARGET, _core.xla_handlers()),
    (_BACKWARD_TARGET, _core.xla_backward_handlers()),
):
    for _platform, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


def check_sizes(name: str, x: Any) -> None:
    """Raise UnsupportedError for symbolic sizes, as jax.export gives arrays."""
    if not all(isinstance(size, int) for size in x.shape):
        shape = ", ".join(map(str, x.shape))
        raise UnsupportedError(
            f"{name} is of shape ({shape}), which has symbolic sizes; accepted: numbers, so a "
            "jax.export for each shape"
        )


def array(x: Any, name: str) -> Any:
    """x as an array of JAX. Raises TypeError for what is none."""
    if isinstance(x, QuantizedKV):
        raise TypeError(f"{name} is of type dlattn.QuantizedKV; accepted: an array, in dlattn.jax")
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{name} is of type {type_text(type(x))}; accepted: an array of JAX or NumPy"
        )
    try:
        array = jnp.asarray(x)
    except TypeError as error:  # of text, or objects
        if isinstance(x, jax.Array):  # a tracer that outlived its function, of which JAX tells more
            raise
        raise TypeError(f"{name} is of dtype {x.dtype}; accepted: numbers, or bool") from error
    check_sizes(name, array)
    return array


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


def _describe_backward(
    options: dict[str, Any], operands: dict[str, Any], needs: Names
) -> tuple[dict[str, Any], Any, int]:
    specs = {name: _spec(name, x) for name, x in operands.items()}
    results = {name: specs.pop(name) for name in _RESULTS if name in specs}
    # The backward pass takes none of these from the forward pass.
    own = {**options, "kernel": "auto", "batch_invariant": False, "return_lse": True}
    deterministic = own.pop("deterministic", False) or _deterministic()
    asked = " ".join(f"d{name}" for name in needs)
    return _core.xla_call_backward({**own, **specs}, results, asked, deterministic)


def _deterministic() -> bool:
    """Whether XLA's flags ask for the same bits at every run on a GPU."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    return any(flag in (name, f"{name}=true", f"{name}=1") for flag in flags for name in names)


def _attributes(values: dict[str, Any]) -> dict[str, Any]:
    kinds = {int: np.int64, float: np.float64, str: str}
    return {name: kinds[type(value)](value) for name, value in values.items()}


def _custom_call(
    target: str,
    attributes: dict[str, Any],
    results: list[Any],
    workspace_bytes: int,
    operands: dict[str, Any],
) -> Result:
    count = len(results)
    if workspace_bytes:  # 256 bytes to align it
        results = [*results, jax.ShapeDtypeStruct((workspace_bytes + 256,), jnp.uint8)]
    order = attributes["operands"].split()
    call = jax.ffi.ffi_call(target, results)
    done = call(*(operands[name] for name in order), **_attributes(attributes))
    return tuple(done[:count])


def _sequences(
    options: dict[str, Any], operands: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """With seqused_k: sequences of one length in a row, whose keys are used up to some."""
    if "seqused_k" not in operands:
        return options, operands
    (batch_size, seqlen_q), seqlen_k = operands["q"].shape[:2], operands["k"].shape[1]
    starts = jnp.arange(batch_size + 1, dtype=jnp.int32)
    lengths = {"cu_seqlens_q": starts * seqlen_q, "cu_seqlens_k": starts * seqlen_k}
    packed: dict[str, Any] = {
        name: x.reshape(-1, *x.shape[2:])
        for name, x in operands.items()
        if name in ("q", "k", "v", "out", "dout")
    }
    by_head: dict[str, Any] = {
        name: operands[name].swapaxes(0, 1).reshape(operands[name].shape[1], -1)
        for name in ("lse", "dlse")
        if name in operands
    }
    sizes = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    return {**options, **sizes}, {**operands, **packed, **by_head, **lengths}


def forward(options: dict[str, Any], operands: dict[str, Any]) -> Result:
    settings, given = _sequences(options, operands)
    attributes, (dtype, shape), lse_shape, workspace_bytes = describe(settings, given)
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))]
    if options["return_lse"]:
        results.append(jax.ShapeDtypeStruct(lse_shape, jnp.float32))
    out, *lse = _custom_call(_TARGET, attributes, results, workspace_bytes, given)
    if given is operands:
        return out, *lse
    batch_size, seqlen_q = operands["q"].shape[:2]
    out = out.reshape(batch_size, seqlen_q, *out.shape[1:])
    return (out, *(x.reshape(-1, batch_size, seqlen_q).swapaxes(0, 1) for x in lse))


def backward(options: dict[str, Any], operands: dict[str, Any], needs: Names) -> Result:
    """The gradients of what `needs` names, each of its operand's shape and dtype."""
    settings, given = _sequences(options, operands)
    attributes, made, workspace_bytes = _describe_backward(settings, given, needs)
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for dtype, shape in made]
    done = _custom_call(_BACKWARD_TARGET, attributes, results, workspace_bytes, given)
    return tuple(x.reshape(operands[name].shape) for name, x in zip(needs, done, strict=True))


def has_backward(options: dict[str, Any], operands: dict[str, Any], needs: Names) -> bool:
    """Whether the machine's first GPU, or without one the CPU, computes these gradients."""

    def run(given: dict[str, Any]) -> Result:
        out, lse = forward({**options, "return_lse": True}, given)
        results = {"out": out, "lse": lse, "dout": out, "dlse": lse}
        return backward(options, {**given, **results}, needs)

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands.items()}
    try:
        jax.eval_shape(run, shapes)
    except UnsupportedError:
        return False
    return True

"""Gradients of eager calls by a node of torch's own, which is C++ and not a function in Python.

torch has an operator of attention for backends that bring kernels of their own,
`aten::_scaled_dot_product_fused_attention_overrideable`, and its derivative in C++. On the CPU and
on CUDA it has no kernel. It gets dlattn's native ones (python/bindings/torch_overrideable.cpp) with
the first call that can go by it: then saving tensors, counting their versions and asking for
gradients is torch's, and costs what it costs torch's own attention.

It carries q, k, v, a bias or a mask, a scale, and in the place of dropout_p the settings that
`unpack` lists. Other calls stay with gradients.py, as do those for which the logarithms are wanted:
of them the operator has no gradients. Calls of it that are not dlattn's fail as they did before.

Source: derivatives.yaml and native_functions.yaml of PyTorch.
"""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from dlattn import _core
from dlattn.integrations.torch import autocast, flops, sdpa_native
from dlattn.integrations.torch.gradients import (
    ASKED,
    any_requires_grad,
    backward_operator,
    called_eagerly,
    with_rows_side_by_side,
)
from dlattn.integrations.torch.kernels import run
from dlattn.integrations.torch.sdpa_native import leave_calls_to, why_exceptions_are_lost

_FORWARD = "_scaled_dot_product_fused_attention_overrideable"
_BACKWARD = f"{_FORWARD}_backward"
_GRADIENTS = "_overrideable_gradients"
_FOLDER = str(Path(torch.__file__).parent / "lib")
_WINDOW_BITS = 23
_NO_WINDOW = (-1, -1)

# By the type of a device, why its calls go by Python's function. Empty: they need not; None: no
# call has asked yet.
why: dict[str, str | None] = {"cpu": None, "cuda": None, "other": "dlattn has no such backend"}
_changing = threading.Lock()
_library: Any = torch.library.Library("dlattn", "FRAGMENT")


def unpack(dropout_p: float) -> dict[str, Any]:
    """Settings that stand in the place of dropout_p, which otherwise is a probability."""
    if not dropout_p <= -1.0:
        raise NotImplementedError(
            f"aten::{_FORWARD} is for backends that have kernels of their own; accepted on the CPU "
            "and on CUDA: calls of dlattn's"
        )
    bits = int(-1.0 - dropout_p)
    ones = (1 << _WINDOW_BITS) - 1
    return {
        "causal": bits & 3,
        "bhsd": bool(bits >> 2 & 1),
        "deterministic": bool(bits >> 3 & 1),
        "is_mask": bool(bits >> 4 & 1),
        "batch_invariant": bool(bits >> 5 & 1),
        "window_left": (bits >> 6 & ones) - 1,
        "window_right": (bits >> (6 + _WINDOW_BITS) & ones) - 1,
    }


def attention(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: int,
    softmax_scale: Any,
    window: tuple[int, int],
    softcap: float,
    bhsd: bool,
    batch_invariant: bool,
) -> torch.Tensor | None:
    """Attention with gradients, or None where this way does not carry the call.

    The caller has looked at all but the tensors. Errors are those of the operator.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not any_requires_grad(q, k, v, bias) or softcap != 0.0:
        return None
    given = bias if mask is None else mask
    if (given is not bias and bias is not None) or not called_eagerly(q, k, v, given, or_cast=True):
        return None
    if q is None or k is None or v is None or q.dtype.itemsize == 1:  # to be refused
        return None
    kind = "cuda" if q.is_cuda else "cpu" if q.is_cpu else "other"
    if k.is_meta or v.is_meta or (given is not None and given.is_meta):
        return None
    if why[kind] is None:
        _register_for(kind)
    if why[kind] or (softmax_scale is not None and type(softmax_scale) is not float):
        return None
    packed = -1.0 - (
        causal
        + 4 * bhsd
        + 8 * ASKED.deterministic
        + (0 if mask is None else 16)
        + 32 * batch_invariant
    )
    if window != _NO_WINDOW:
        left, right = (side + 1 for side in window)
        if max(left, right) >= 1 << _WINDOW_BITS:
            return None
        packed -= left << 6 | right << (6 + _WINDOW_BITS)
    if torch._C._is_any_autocast_enabled():
        q, k, v, given = autocast.cast(q, k, v, given)
    scale = {} if softmax_scale is None else {"scale": softmax_scale}
    out: torch.Tensor = _call(q, k, v, given, packed, **scale)[0]
    return out


_overload: Any = getattr(getattr(torch.ops.aten, _FORWARD, None), "default", None)
_call = getattr(_overload, "_op", _overload)


def _register_for(kind: str) -> None:
    """Register what calls of a device need, once."""
    with _changing:
        if why[kind] is None:
            why[kind] = _register(kind.upper())


def _register(key: str) -> str:
    if _overload is None:
        return f"torch has no operator {_FORWARD}"
    if key == "CUDA" and not sdpa_native.ON_CUDA:
        return "it is switched off"
    for name in (_FORWARD, _BACKWARD):
        if not _is_torchs_own(name, key):
            return "somebody else has a kernel for torch's operator"
    if reason := why_exceptions_are_lost():
        return reason
    _define_gradients()
    leave_calls_to(_forward, _FORWARD, key)
    for each in (key, f"Autograd{key}"):
        leave_calls_to(_backward, _BACKWARD, each)
    schemas = {_FORWARD: _schema(_FORWARD), _BACKWARD: _schema(_BACKWARD)}
    schemas[_GRADIENTS] = schemas[_BACKWARD]
    arguments = {
        name: tuple(f"{argument.type} {argument.name}" for argument in schema.arguments)
        for name, schema in schemas.items()
    }
    return _core.register_torch_overrideable(_FOLDER, key, arguments)


@cache
def _define_gradients() -> None:
    """The operator that computes gradients; torch's modes see it, and count its operations."""
    arguments = str(_schema(_BACKWARD)).partition("(")[2]
    _library.define(f"{_GRADIENTS}({arguments}")
    _library.impl(_GRADIENTS, torch.library.fallthrough_kernel, "Autograd")

    def shapes(*given: Any, **_: Any) -> Any:
        named = _by_name(_BACKWARD, given)
        inputs = (named[name] for name in (*_QKV, "attn_bias"))
        wanted = zip(inputs, named["grad_input_mask"], strict=True)
        return _all_results([x.new_empty(x.shape) if w else None for x, w in wanted], named)

    # Compiled autograd traces the node's backward pass, whose forward pass was eager.
    torch.library.register_fake(f"dlattn::{_GRADIENTS}", shapes, lib=_library)

    def count(*given: Any, out_val: Any = None, **_: Any) -> int:
        del out_val
        named = _by_name(_BACKWARD, given)
        q, k, v = (named[name] for name in _QKV)
        return flops.attention(q, k, v, bhsd=unpack(named["dropout_p"])["bhsd"]) * 5 // 2

    register_flop_formula(getattr(torch.ops.dlattn, _GRADIENTS), get_raw=True)(count)


def _schema(name: str) -> Any:
    return getattr(torch.ops.aten, name).default._schema


def _is_torchs_own(name: str, key: str) -> bool:
    """Whether the dispatcher has for an operator what torch has for it, and no kernel for a key."""
    taken = re.compile(rf"^(Autograd)?{key}: ", re.M)
    derivative = re.compile(r"^Autograd\[alias\]: registered at .*VariableType\w*\.cpp:", re.M)
    dump = torch._C._dispatch_dump(f"aten::{name}")
    return taken.search(dump) is None and derivative.search(dump) is not None


# Kernels for calls that the native ones refuse, or have no memory for.


def _forward(_keys: Any, *given: Any, scale: float | None = None, **options: Any) -> Any:
    named = _by_name(_FORWARD, given) | options
    settings = unpack(named.get("dropout_p", 0.0))
    del settings["deterministic"]
    arguments = _scores(named.get("attn_bias"), settings) | {"scale": scale}
    call = torch.ops.dlattn.attention.default
    with torch.no_grad():  # the operator may be Python's, which refuses what requires grad
        out, lse = run("attention", call, [named[name] for name in _QKV], arguments)
    return out, lse, None, None, 0, 0, None, None, None


def _backward(_keys: Any, *given: Any, scale: float | None = None, **options: Any) -> Any:
    named = _by_name(_BACKWARD, given) | options
    settings = unpack(named["dropout_p"])
    del settings["batch_invariant"]
    deterministic = settings.pop("deterministic") or torch.are_deterministic_algorithms_enabled()
    bias = named["attn_bias"]
    arguments = _scores(bias, settings) | {
        "scale": scale,
        "needs": [*named["grad_input_mask"], False, False],
        "deterministic": deterministic,
    }
    dout = with_rows_side_by_side(named["grad_out"], named["out"])
    inputs = [dout, *(named[name] for name in (*_QKV, "out", "logsumexp")), None]
    found = iter(run("attention_backward", backward_operator("attention"), inputs, arguments))
    results = [next(found) if wanted else None for wanted in named["grad_input_mask"]]
    return _all_results(results, named)


def _all_results(gradients: list[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """Those that are wanted and None, but for the first: a failure has no first result."""
    if gradients[0] is None:
        gradients[0] = named["query"].new_empty(0)  # nobody reads it
    return tuple(gradients)


_QKV = ("query", "key", "value")


def _by_name(operator: str, given: Any) -> dict[str, Any]:
    return dict(
        zip((argument.name for argument in _schema(operator).arguments), given, strict=False)
    )


def _scores(attn_bias: Any, settings: dict[str, Any]) -> dict[str, Any]:
    is_mask = settings.pop("is_mask")
    return {**settings, "mask" if is_mask else "bias": attn_bias}

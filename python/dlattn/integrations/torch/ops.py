"""torch operators: `torch.ops.dlattn.attention`, `attention_varlen` and `merge_states`.

They are for code that torch traces (torch.compile, torch.export, vmap, FlopCounterMode): there a
call of `dlattn.attention` is no operator. `attention` of _functions.py has its arguments and calls
the operator. Numbers, errors and accepted values are those of `dlattn.attention`; an operator that
is traced checks no more than shapes, and raises the rest where it runs.

`attention` and `attention_varlen` have gradients (gradients.py). An operator whose input has a
tangent raises, and so do the others where an input requires grad while gradients are on.

Source: torch.library, https://docs.pytorch.org/docs/stable/library.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import dlattn
from dlattn import _core
from dlattn._types import Causal, Window
from dlattn.integrations.torch import autocast, flops, vmap
from dlattn.integrations.torch.gradients import (
    Differentiable,
    autograd_kernel,
    forward_only,
    tensors_among,
)
from dlattn.integrations.torch.kernels import Kernels, count_write

# Alignments of the causal mask, in the order of their numbers.
_CAUSAL_OF: tuple[Causal, ...] = (False, "bottom_right", "top_left")

# The arguments of both operators of attention behind their tensors; -1: no limit of a window.
# Lengths are SymInt, which a compiled graph takes anew at each call: an int is a constant of the
# graph.
_TENSORS = [name for name, _, takers in _core.operands["forward"] if "torch" in takers]
SCORES = "".join(f"Tensor? {name}=None, " for name in _TENSORS) + (
    "int causal=0, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
    "float softcap=0.0, "
)
_OPTIONS = SCORES + "str? precision=None, bool bhsd=False, bool batch_invariant=False"
_QKV = "Tensor q, Tensor k, Tensor v, "
LENGTHS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_k=None, "
)
_VARLEN = _QKV + LENGTHS
_LIBRARY = torch.library.Library("dlattn", "DEF")
# The operators with gradients.
DIFFERENTIABLE: dict[str, Differentiable] = {}


def operators() -> dict[str, str]:
    """Return what runs the operators of torch.ops.dlattn, by backend.

    "native" (without Python, for torch 2.10 and later), or "Python: " and why they are not native.
    """
    return KERNELS.described()


def causal_of(causal: int) -> Causal:
    """`dlattn.attention`'s argument for an operator's."""
    if not 0 <= causal < len(_CAUSAL_OF):
        raise dlattn.UnsupportedError(
            f"causal is {causal}; accepted: 0 (no), 1 (bottom-right), 2 (top-left)"
        )
    return _CAUSAL_OF[causal]


def window_of(left: int, right: int) -> Window:
    """`dlattn.attention`'s argument for the two of an operator."""
    return (None if left < 0 else left, None if right < 0 else right)


def keywords(
    *,
    causal: int,
    scale: float | None,
    window_left: int,
    window_right: int,
    bhsd: bool,
    **same: Any,
) -> dict[str, Any]:
    """The arguments of dlattn's function for those of its operator, by name."""
    return {
        **same,
        "causal": causal_of(causal),
        "softmax_scale": scale,
        "window": window_of(window_left, window_right),
        "layout": "bhsd" if bhsd else "bshd",
        "return_lse": True,
    }


def _attention(**given: Any) -> Any:
    return dlattn.attention(**keywords(**given))


def _varlen(**given: Any) -> Any:
    return dlattn.attention_varlen(**keywords(**given))


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> Any:
    return dlattn.merge_states(outs, lses)


def _written(out: torch.Tensor) -> None:
    if KERNELS.native:
        count_write(out)


# Shapes, for tracing


def by_name(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that takes all arguments by name stand for an operator.

    Torch leaves out those that are the default. An operator that writes to `out` returns its last
    result alone.
    """
    arguments = torch._C.parse_schema(f"dlattn::{schema}").arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def call(*given: Any, **named: Any) -> Any:
        result = function(**{**defaults, **dict(zip(names, given, strict=False)), **named})
        return result[1] if "out" in named else result

    return call


def register_shapes(schema: str, fake: Callable[..., Any], library: Any) -> None:
    """Give an operator what torch traces in its place.

    Torch asks it too where one of a call's tensors is on the device "meta", whose results on the
    others' device would be memory that nobody wrote to.
    """

    def on_one_device(**given: Any) -> Any:
        name, first = ("q", given["q"]) if "q" in given else ("outs[0]", given["outs"][0])
        for other, values in given.items():
            for x in tensors_among([values]):
                if x.device != first.device:
                    raise dlattn.UnsupportedError(
                        f"{other} is on {x.device}; accepted: {first.device}, where {name} is"
                    )
        return fake(**given)

    name = schema.partition("(")[0]
    torch.library.register_fake(f"dlattn::{name}", by_name(schema, on_one_device), lib=library)


def register_operations(*operators: str) -> None:
    """Let torch count the operations of operators that have the first one's arguments."""
    formula = getattr(flops, operators[0])
    names = argument_names(operators[0])

    def count(*given: Any, out_val: Any = None, **named: Any) -> int:
        del out_val
        named.update(zip(names, given, strict=False))
        return int(formula(**named))

    packets = [getattr(torch.ops.dlattn, name) for name in operators]
    register_flop_formula(packets, get_raw=True)(count)


def argument_names(name: str) -> list[str]:
    """The argument names of an operator, in their order."""
    return [a.name for a in getattr(torch.ops.dlattn, name).default._schema.arguments]


def register_mapping(schema: str, fake: Callable[..., Any], library: Any) -> None:
    """Give an operator its rule of `vmap`, which gets all arguments and their dimensions.

    `fake` tells the shapes of what is mapped over nothing.
    """
    name = schema.partition("(")[0]
    rule = getattr(vmap, name)
    names = argument_names(name)
    all_by_name = by_name(schema, dict)

    def mapped(info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
        arguments = all_by_name(*given)
        dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
        if info.batch_size == 0:
            return vmap.over_nothing(fake, dims, arguments)
        return rule(info.batch_size, dims, arguments)

    torch.library.register_vmap(f"dlattn::{name}", mapped, lib=library)


def _empty_out(q: Any, *shape: Any) -> Any:
    """A result of attention: of q's dtype, but of q of 8 bits bfloat16."""
    return q.new_empty(*shape, dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)


def fake_attention(bhsd: bool, **qkv: Any) -> Any:
    """out and lse of q, and of keys and values under any names."""
    for name, x in qkv.items():
        if x.dim() != 4:
            raise dlattn.UnsupportedError(f"{name} has {x.dim()} dimensions; accepted: 4")
    q, _, v = qkv.values()
    heads, rows = (q.shape[1], q.shape[2]) if bhsd else (q.shape[2], q.shape[1])
    out = _empty_out(q, *q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[0], heads, rows, dtype=torch.float32)


def _fake_attention(*, q: Any, k: Any, v: Any, bhsd: bool, **_: Any) -> Any:
    return fake_attention(bhsd, q=q, k=k, v=v)


def _fake_varlen(*, q: Any, v: Any, bhsd: bool, **_: Any) -> Any:
    heads, rows = (q.shape[0], q.shape[1]) if bhsd else (q.shape[1], q.shape[0])
    out = _empty_out(q, *q.shape[:2], v.shape[2])
    return out, q.new_empty(heads, rows, dtype=torch.float32)


def _fake_merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> Any:
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), lses[0].new_empty(
        lses[0].shape
    )


def _register() -> Kernels:
    attention, varlen = (_attention, _fake_attention), (_varlen, _fake_varlen)
    results = "(Tensor out, Tensor lse)"
    operators: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        f"attention({_QKV}{_OPTIONS}) -> {results}": attention,
        f"attention_out({_QKV}{_OPTIONS}, *, Tensor(a!) out) -> Tensor": attention,
        f"attention_varlen({_VARLEN}{_OPTIONS}) -> {results}": varlen,
        f"attention_varlen_out({_VARLEN}{_OPTIONS}, *, Tensor(a!) out) -> Tensor": varlen,
        f"merge_states(Tensor[] outs, Tensor[] lses) -> {results}": (_merge, _fake_merge),
    }
    kernels = {}
    for schema, (function, fake) in operators.items():
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        kernels[name] = by_name(schema, function)
        if name in ("attention", "attention_varlen"):
            DIFFERENTIABLE[name] = Differentiable(name)
            autograd = autograd_kernel(name, DIFFERENTIABLE[name])
        else:
            autograd = forward_only(name, _written if name.endswith("_out") else None)
        _LIBRARY.impl(name, autograd, "Autograd")
        register_shapes(schema, fake, _LIBRARY)
        if not name.endswith("_out"):  # torch maps no operator that writes to its inputs
            register_mapping(schema, fake, _LIBRARY)
        if name in ("attention", "attention_varlen"):
            autocast.register(name, argument_names(name), _LIBRARY)
    for name in ("attention", "attention_varlen"):
        register_operations(name, f"{name}_out")
    found = Kernels(kernels)
    found.register()
    return found


KERNELS = _register()

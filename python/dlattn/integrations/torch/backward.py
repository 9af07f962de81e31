"""`torch.ops.dlattn.attention_backward` and `attention_varlen_backward`, for code that is traced.

They return the gradients that `needs` asks for, in the order of q, k,
v, bias, alibi_slopes and sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import dlattn
from dlattn.integrations.torch import flops, ops, vmap
from dlattn.integrations.torch.gradients import WITH_GRADIENTS, backward_only_once

_GIVEN = "Tensor? dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
_ASKED = "bool bhsd=False, *, bool[] needs, bool deterministic=False"
_SCHEMAS = {
    "attention": f"attention_backward({_GIVEN}{ops.SCORES}{_ASKED}) -> Tensor[]",
    "attention_varlen": (
        f"attention_varlen_backward({_GIVEN}{ops.LENGTHS}{ops.SCORES}{_ASKED}) -> Tensor[]"
    ),
}
_NAMES = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")
_LIBRARY = torch.library.Library("dlattn", "FRAGMENT")


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*, needs: list[bool], **given: Any) -> Any:
        arguments = ops.keywords(**given)
        del arguments["return_lse"]
        asked = [name for name, wanted in zip(_NAMES, needs, strict=True) if wanted]
        found = function(**arguments, needs=asked)
        return [getattr(found, name) for name in asked]

    return kernel


def _fake(*, needs: list[bool], **given: Any) -> Any:
    wanted = [name for name, is_wanted in zip(WITH_GRADIENTS, needs, strict=True) if is_wanted]
    return [given[name].new_empty(given[name].shape) for name in wanted]


def _mapped(name: str, names: list[str], all_by_name: Callable[..., Any]) -> Callable[..., Any]:
    """One call for each mapping: what is not mapped has a gradient of its own in each."""

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any, **asked: Any) -> Any:
        arguments = all_by_name(*given, **asked)
        dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
        if info.batch_size == 0:
            return vmap.over_nothing(_fake, dims, arguments)
        call = getattr(torch.ops.dlattn, name)
        each = []
        for i in range(info.batch_size):
            own = {
                key: x if dims[key] is None else x.select(dims[key], i)
                for key, x in arguments.items()
            }
            each.append(call(**own))
        results = [torch.stack(parts) for parts in zip(*each, strict=True)]
        return results, [0] * len(results)

    return rule


def _register_operations(name: str) -> None:
    """Five products of every query with every key, where the forward pass has two."""
    forward = getattr(flops, name.removesuffix("_backward"))
    names = ops.argument_names(name)

    def count(*given: Any, out_val: Any = None, **named: Any) -> int:
        del out_val
        named.update(zip(names, given, strict=False))
        return int(forward(**named)) * 5 // 2

    register_flop_formula(getattr(torch.ops.dlattn, name), get_raw=True)(count)


def _register() -> None:
    functions: dict[str, Callable[..., Any]] = {
        "attention": dlattn.attention_backward,
        "attention_varlen": dlattn.attention_varlen_backward,
    }
    for forward, function in functions.items():
        schema = _SCHEMAS[forward]
        name = f"{forward}_backward"
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        ops.KERNELS.add({name: ops.by_name(schema, _kernel(function))})
        _LIBRARY.impl(name, backward_only_once(name), "Autograd")
        ops.register_shapes(schema, _fake, _LIBRARY)
        rule = _mapped(name, ops.argument_names(name), ops.by_name(schema, dict))
        torch.library.register_vmap(f"dlattn::{name}", rule, lib=_LIBRARY)
        _register_operations(name)


_register()

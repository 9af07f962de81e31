"""Arguments of the functions of `dlattn.torch`: checked, and as operators have them.

They are refused as `dlattn.attention` refuses its own. Its checks are native, which torch cannot
trace, and torch's do not suffice: where an operator has a number they take a bool, a text or a
tensor on a device too, for which the host waits.
"""

from __future__ import annotations

import re
from numbers import Real
from typing import Any, get_args

import torch

import dlattn
from dlattn._numbers import integer
from dlattn._types import Precision
from dlattn.frameworks.base import shown, type_text
from dlattn.integrations.torch.kernels import own_error

# Alignments of the causal mask as the operators have them.
CAUSAL: dict[bool | str, int] = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}

_CAUSALS = ("bottom_right", "top_left")
_PRECISIONS: tuple[str, ...] = get_args(Precision)
_ACCEPTED_PRECISIONS = '"int8_fp8", "int8_fp16" or "fp8", or None for products of the inputs'
_MOST_LENGTH = 2**31 - 1
_MOST_WINDOW = 1 << 40  # more than any sequence has
_NO_SIDES = (-1, -1)


def check(
    causal: Any,
    softmax_scale: Any,
    softcap: Any,
    precision: Any,
    layout: Any,
    return_lse: Any,
    batch_invariant: Any,
) -> None:
    """Raise UnsupportedError or TypeError unless an operator can have them."""
    if causal is not False and causal is not True:
        _check_word("causal", causal, _CAUSALS, 'False, True, "bottom_right" or "top_left"')
    if softmax_scale is not None and type(softmax_scale) is not float:
        _check_number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        _check_number("softcap", softcap)
    if precision is not None:
        _check_word("precision", precision, _PRECISIONS, _ACCEPTED_PRECISIONS)
    if type(layout) is not str or layout != "bshd":
        _check_word("layout", layout, ("bshd", "bhsd"), '"bshd" or "bhsd"')
    if return_lse is not False and return_lse is not True:
        raise _wrong_type("return_lse", return_lse, "a bool")
    if batch_invariant is not False and batch_invariant is not True:
        raise _wrong_type("batch_invariant", batch_invariant, "a bool")


def sides_of(window: Any) -> Any:
    """The two sides of a window as operators have them. -1: no limit."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"window is {shown(window)}; accepted: a pair (left, right) of int >= 0 or None"
        )
    if window[0] is None and window[1] is None:
        return _NO_SIDES
    return [_side(window[0], "left", window), _side(window[1], "right", window)]


def length(value: Any, name: str) -> Any:
    """A length as operators have it."""
    if isinstance(value, torch.SymInt):
        return value
    number = integer(value)
    if number is None:
        raise _wrong_type(name, value, "an int >= 0")
    # A length that torch traces has no value yet.
    if not torch.compiler.is_compiling() and not 0 <= number <= _MOST_LENGTH:
        raise dlattn.UnsupportedError(
            f"{name} is {shown(number)}; accepted: an int from 0 to {_MOST_LENGTH}"
        )
    return number


def _side(value: Any, side: str, window: Any) -> Any:
    if value is None:
        return -1
    number = value if isinstance(value, torch.SymInt) else integer(value)
    if number is None:
        raise TypeError(
            f"window is {shown(window)}: its {side} side is of type {type_text(type(value))}; "
            "accepted: an int >= 0, or None for no limit"
        )
    if number < 0:
        raise dlattn.UnsupportedError(
            f"window is {shown(window)}: its {side} side is negative; accepted: an int >= 0, or "
            "None for no limit"
        )
    return number if number < _MOST_WINDOW else _MOST_WINDOW


def _check_word(name: str, value: Any, known: tuple[str, ...], accepted: str) -> None:
    if not isinstance(value, str):
        raise _wrong_type(name, value, accepted)
    if value not in known:
        raise dlattn.UnsupportedError(f"{name} is {shown(value)}; accepted: {accepted}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, value, "a float")
    if torch.compiler.is_compiling():
        return
    try:
        float(value)
    except OverflowError:  # an int beyond the floats
        raise dlattn.UnsupportedError(
            f"{name} is {shown(value)}; accepted: a finite number"
        ) from None


def _wrong_type(name: str, value: Any, accepted: str) -> TypeError:
    return TypeError(f"{name} is of type {type_text(type(value))}; accepted: {accepted}")


# torch's words for an argument of another type than the operator's, and the types in dlattn's.
_WRONG_TYPE = re.compile(
    r"Expected a value of type '([\w\[\]]+)' for argument '(\w+)' but instead found type '([\w.]+)'"
)
_ACCEPTED = {"Tensor": "a torch.Tensor", "float": "a float", "int": "an int", "bool": "a bool"}
_NAMES = {"scale": "softmax_scale"}


def error_of(error: RuntimeError, required: dict[str, Any], **optional: Any) -> Exception:
    """Return what `dlattn.attention` would raise where an operator raised `error`.

    Tensors of the call come by name, those that the operator requires and the others.
    """
    for name, x in required.items():
        if x is None:  # an undefined tensor to torch
            return TypeError(f"{name} is None; accepted: a torch.Tensor")
    if isinstance(error, NotImplementedError):  # the operator has no kernel for one of them
        for name, x in {**required, **optional}.items():
            if isinstance(x, torch.Tensor) and (kind := _what_is_not_served(x)):
                return TypeError(f"{name} is {kind}; accepted: a dense tensor on the CPU or CUDA")
    found = _WRONG_TYPE.search(str(error))
    if found is None:
        return own_error(error)
    kind, argument, given = found.groups()
    inner = kind.removeprefix("Optional[").removesuffix("]")
    accepted = _ACCEPTED.get(inner, inner) + (" or None" if kind != inner else "")
    name = _NAMES.get(argument, argument)
    return TypeError(f"{name} is of type {given}; accepted: {accepted}")


def _what_is_not_served(x: torch.Tensor) -> str:
    if x.is_nested:
        return "a nested tensor"
    if x.is_quantized:
        return f"a quantized tensor of {x.dtype}"
    if x.layout != torch.strided:
        return f"of layout {x.layout}"
    return "" if x.device.type in ("cpu", "cuda") else f"on {x.device}"

"""Shared by the functions with other libraries' signatures: views of arrays, names in errors."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from dlattn import frameworks
from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import type_text

Shape = tuple[int, ...]


def refuse_dropout(dropout_p: Any) -> None:
    try:
        none = bool(dropout_p == 0)
    except (RuntimeError, TypeError, ValueError):  # of an array
        kind = type_text(type(dropout_p))
        raise TypeError(f"dropout_p is of type {kind}; accepted: 0.0") from None
    if not none:
        raise UnsupportedError(
            f"dropout_p is {dropout_p!r}, and dlattn computes the forward pass without dropout; "
            "accepted: 0.0"
        )


_LEAST_SCALE = 2.0**-126


def with_any_scale(q: Any, scale: Any) -> tuple[Any, Any]:
    """Return q and the softmax_scale of `attention` for one that may be 0 or negative.

    Scores of a negative scale are those of -q, a new array, with its magnitude. A magnitude below
    2**-126, the least that kernels take, counts as that: beside it all scores are 0.
    """
    is_number: bool = isinstance(scale, Real) and type(scale) is not bool
    if not is_number:  # None; others are refused later on
        return q, scale
    if scale >= _LEAST_SCALE or scale != scale:
        return q, scale
    if scale <= -_LEAST_SCALE:
        return _negative(q), -scale
    return q, _LEAST_SCALE


def _negative(q: Any) -> Any:
    try:
        return -q
    except (RuntimeError, TypeError):  # NotImplementedError too: 8-bit numbers, what is no array
        library_of(q, "q")  # raises TypeError for what is no tensor
        raise UnsupportedError(
            "softmax_scale is negative with a q of which there is no -q; accepted: a scale of at "
            "least 0"
        ) from None


def wants_operator(*tensors: Any) -> bool:
    """Whether torch is to differentiate a call with one of these, or maps over one (torch.func)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if getattr(torch._C, "_are_functorch_transforms_active", bool)():
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if any(isinstance(x, torch.Tensor) and wrapped(x) for x in tensors):
            return True
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def check_flag(value: Any, name: str) -> None:
    if value is not True and value is not False:
        kind = type_text(type(value))
        raise TypeError(f"{name} is of type {kind}; accepted: a bool")


def rename(error: Exception, names: Mapping[str, str]) -> None:
    """Put the caller's argument names in place of those of `attention` in the error's message."""
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    error.args = (words.sub(lambda found: names[found[0]], str(error)),)


def shape_of(x: Any, name: str) -> Shape:
    try:
        return tuple(x.shape)
    except (AttributeError, TypeError, RuntimeError):  # torch's nested tensors raise the last one
        frameworks.find(type(x), name)  # raises TypeError for what is no tensor
        raise TypeError(
            f"{name} is of type {type_text(type(x))}, which has no shape; accepted: a torch, "
            "CuPy, JAX or NumPy array"
        ) from None


def parts(packed: Any, name: str, axis: int, count: int, dims: str) -> tuple[Any, ...]:
    """Views of what lies packed along `axis`, `count` of them; the array's shape is `dims`."""
    shape = shape_of(packed, name)
    if len(shape) != axis + 3 or shape[axis] != count:
        raise UnsupportedError(f"{name}: shape is {shape}; accepted: {dims}")
    library = _check_views(
        packed, name, "accepted: a torch, CuPy or NumPy array, or q, k and v unpacked"
    )
    if library == "torch":
        return packed.unbind(axis)  # a third of the time of as many indexings
    before = (slice(None),) * axis
    return tuple(packed[(*before, index)] for index in range(count))


def as_leading(x: Any, name: str, shape: Shape, size: int) -> Any:
    """View `x` with the dimensions before its last two broadcast to `shape`, then made `size`.

    Too many of them become one by merging the first ones, too few more by adding ones of 1.
    """
    full = (*shape, *x.shape[len(x.shape) - 2 :])
    if full == x.shape and len(shape) == size:
        return x
    library = _check_views(
        x, name, f"accepted: {size + 2} dimensions, equal in all but sequence and head_dim"
    )
    if full != tuple(x.shape):
        if library == "torch":
            x = x.expand(full)
        else:
            x = (np if library == "numpy" else sys.modules["cupy"]).broadcast_to(x, full)
    extra = len(shape) - size
    if extra <= 0:
        return x[(None,) * -extra] if extra else x
    strides = x.stride() if library == "torch" else x.strides
    if not _mergeable(full[: extra + 1], strides[: extra + 1]):
        raise UnsupportedError(
            f"{name}: its leading dimensions {full[: extra + 1]} have the strides "
            f"{tuple(strides[: extra + 1])}, of which no view makes one dimension; accepted: "
            "dimensions that lie in memory one within the other"
        )
    merged = (math.prod(full[: extra + 1]), *full[extra + 1 :])
    return x.view(merged) if library == "torch" else x.reshape(merged)


def _mergeable(sizes: Shape, strides: Shape) -> bool:
    """Whether dimensions are one dimension, cut up: each steps over all of the next."""
    if 0 in sizes:
        return True
    used = [pair for pair in zip(sizes, strides, strict=True) if pair[0] > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(used))


def library_of(x: Any, name: str) -> str:
    """The name of the library of `x`. Raises TypeError for what is no tensor."""
    kind: Any = type(x)
    return _library(kind, name)


def _check_views(x: Any, name: str, accepted: str) -> str:
    """Return the library of `x`, one whose arrays have views."""
    kind: Any = type(x)
    library = library_of(x, name)
    if library not in ("numpy", "torch", "cupy"):
        raise UnsupportedError(
            f"{name} is of type {type_text(kind)}, of which no view can be taken, and dlattn "
            f"makes no copies; {accepted}"
        )
    return library


@lru_cache(maxsize=64)
def _library(kind: type, name: str) -> str:
    return frameworks.find(kind, name).name

"""The public functions besides those in `_attention.py` and `_plan.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from dlattn import _core
from dlattn._types import DeviceInfo, Info, Layout, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Array = TypeVar("_Array")


@overload
def merge_states(
    outs: Sequence[NDArray[Any]] | NDArray[Any],
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: Layout = "bshd",
    stream: Any = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def merge_states(
    outs: Sequence[_Array],
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: Layout = "bshd",
    stream: Any = None,
) -> tuple[_Array, _Array]: ...
@overload
def merge_states(
    outs: _Array,
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: Layout = "bshd",
    stream: Any = None,
) -> tuple[_Array, _Array]: ...
def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    layout: Layout = "bshd",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Exact up to rounding: lse = log sum exp(lse_n), out = sum exp(lse_n - lse) out_n. A part whose
    lse is -inf, or +inf as `flash_attn_func` returns it, saw no key and contributes nothing,
    whatever its out holds; where all parts are such, out is 0 and lse -inf. NaN makes the result
    NaN. At most one part may have been computed with sinks, and none with a sink of +inf, whose
    lse is +inf too: it would count as empty.

    Args:
        outs: 1 to 32 results of `attention`, in a list or stacked along a first dimension; each of
            the same shape and dtype.
        lses: The lse that came with each, in a list or stacked; float32, (batch, num_heads,
            seqlen_q).
        layout: Of outs and out, as for `attention`.
        stream: As for `attention`.

    Returns:
        (out, lse), new tensors of the framework of outs.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.
    """
    return _core.merge_states(outs, lses, layout, stream)


def info() -> Info:
    """Tell what this build contains and which devices it finds. The result prints readably."""
    fields = _core.info()
    devices = tuple(DeviceInfo(**device) for device in fields.pop("devices"))
    return Info(devices=devices, **fields)

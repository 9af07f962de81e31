"""Numbers that callers give."""

from __future__ import annotations

import operator
from typing import Any


def integer(value: Any) -> int | None:
    """The int that `value` is; None for what is no integer.

    Integers of other libraries count, as np.int64. A bool does not, nor does an array of one
    element: it may lie on a device, which reading it would wait for. The native module reads
    integers by the same rule.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or hasattr(value, "__dlpack__"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None

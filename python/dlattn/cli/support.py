"""The table of what is supported, asked of the planner itself with made-up problems and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from dlattn import _core
from dlattn.console.text import markdown_table, table

DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn")
KERNELS = tuple(name for name in _core.kernel_names if name != "auto")

_CPU = 0
_CAPABILITIES = (80, 86, 89, 90, 100, 120)
_MOST_HEAD_DIM = 512  # as far as is asked
_COMMON_HEAD_DIMS = (64, 512)  # each kernel that serves a dtype serves one of them
# Labels of features; others read as they are.
_LABELS = {"gqa": "GQA/MQA", "head_dim_v": "head_dim of v differs", "kvcache": "KV cache"}
_HEADERS = ("kernel", "runs on", "dtype", "head_dim", "features")


def support_rows() -> list[list[str]]:
    """A row for each kernel, and for each group of dtypes with the same of everything."""
    rows = []
    for kernel in KERNELS:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for dtype in DTYPES:
            capabilities = [_CPU] if kernel == "cpu" else _where(kernel, dtype)
            dims = head_dims(kernel, dtype, capabilities) if capabilities else []
            if not dims:
                continue
            place = "CPU" if kernel == "cpu" else _capabilities_text(capabilities)
            features = ", ".join(_features(kernel, dtype, dims, capabilities))
            groups.setdefault((place, _ranges(dims), features), []).append(dtype)
        for (place, dims_text, features), dtypes in groups.items():
            rows.append([kernel, place, ", ".join(dtypes), dims_text, features])
    return rows


def support_table() -> str:
    """For a terminal."""
    return table(_HEADERS, support_rows())


def support_markdown() -> str:
    """For docs/kernels.md."""
    rows = [[f"`{row[0]}`", *row[1:]] for row in support_rows()]
    return markdown_table(_HEADERS, rows)


def head_dims(kernel: str, dtype: str, capabilities: Iterable[int]) -> list[int]:
    """The head dims that run on all of these devices."""
    accepts = partial(_accepts, kernel, dtype, feature="", capabilities=list(capabilities))
    return _all_that(accepts, range(1, _MOST_HEAD_DIM + 1))


def _where(kernel: str, dtype: str) -> list[int]:
    """The compute capabilities on which a kernel runs a common size."""
    return [
        c
        for c in _CAPABILITIES
        if any(_accepts(kernel, dtype, head_dim, "", [c]) for head_dim in _COMMON_HEAD_DIMS)
    ]


def _features(kernel: str, dtype: str, dims: list[int], capabilities: list[int]) -> list[str]:
    common = next(head_dim for head_dim in _COMMON_HEAD_DIMS if head_dim in dims)
    return [
        _LABELS.get(feature, feature)
        for feature in _core.feature_names
        if _accepts(kernel, dtype, common, feature, capabilities)
    ]


def _accepts(kernel: str, dtype: str, head_dim: int, feature: str, capabilities: list[int]) -> bool:
    return all(_core.refusal(kernel, dtype, head_dim, feature, c) == "" for c in capabilities)


def _all_that(accepts: Callable[[int], bool], values: Iterable[int]) -> list[int]:
    return [value for value in values if accepts(value)]


def _ranges(dims: list[int]) -> str:
    """A sorted list of head dims in few words."""
    if len(dims) == 1:
        return str(dims[0])
    step = dims[1] - dims[0]
    if any(b - a != step for a, b in pairwise(dims)):
        return ", ".join(map(str, dims))
    if dims[0] == 1 and dims[-1] == _MOST_HEAD_DIM:
        return "any"
    if step == 1:
        return f"{dims[0]} to {dims[-1]}"
    if dims[0] % step:
        return ", ".join(map(str, dims))
    first = "" if dims[0] == step else f"from {dims[0]} "
    return f"multiples of {step} {first}up to {dims[-1]}"


def _capabilities_text(capabilities: list[int]) -> str:
    return "sm_" + ", ".join(map(str, capabilities))

"""The features of `python -m dlattn check`: a small problem of each, by all kernels that serve it.

What is served differs by kernel and GPU: `auto` is checked always, and each family that takes the
problem by its name. The rule for the errors is the acceptance table's; of gradients it is three
times the error of a plain computation instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.console.devices import CPU_KERNELS, GPU_KERNELS, Device
from dlattn.frameworks.base import numpy_dtype
from dlattn.reference import (
    ABSOLUTE_TERM,
    attention_backward_reference,
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    error_bound,
    kvcache_problems,
    max_error,
    same_dtype_gradients,
)

Array = NDArray[Any]

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float16", "bfloat16")}
_BATCH_SIZE, _HEADS, _HEADS_KV, _ROWS, _KEYS, _HEAD_DIM = 2, 4, 2, 100, 150, 64
_PAGE_SIZE = 16
_LENGTHS = (70, 150)  # of the cache, and of sequences


@dataclass(frozen=True)
class Trial:
    """A call of one of dlattn's functions, and what its results should be."""

    function: str
    tensors: dict[str, Array]  # by argument
    options: dict[str, Any]
    expected: tuple[Array, ...]
    bounds: tuple[float, ...]


@dataclass(frozen=True)
class FeatureResult:
    """The result of one kernel for one feature."""

    feature: str
    dtype: str
    kernel: str
    error_over_bound: float
    failure: str  # the exception raised; empty if none

    @property
    def passed(self) -> bool:
        """All results within their bounds."""
        return self.error_over_bound <= 1 and not self.failure

    def entry(self) -> dict[str, Any]:
        """As JSON can hold it."""
        finite = self.error_over_bound if np.isfinite(self.error_over_bound) else None
        return asdict(self) | {"error_over_bound": finite, "passed": self.passed}


def _draw(dtype: str, *shapes: tuple[int, ...]) -> Iterator[Array]:
    """Normal numbers with a mean that is not zero."""
    rng = np.random.default_rng(0)
    for shape in shapes:
        values = rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25)
        yield values.astype(numpy_dtype(np, dtype))


def _qkv(dtype: str) -> dict[str, Any]:
    shapes = [(_BATCH_SIZE, n, h, _HEAD_DIM) for n, h in _sizes()]
    return dict(zip("qkv", _draw(dtype, *shapes), strict=True))


def _sizes() -> tuple[tuple[int, int], ...]:
    return (_ROWS, _HEADS), (_KEYS, _HEADS_KV), (_KEYS, _HEADS_KV)


def _forward(dtype: str, **options: Any) -> Trial:
    """A call of attention; options that are arrays are tensors too."""
    given = _qkv(dtype)
    want = attention_reference(**given, **options)
    bound = error_bound(**given, expected=want, **options)
    tensors = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    rest = {n: x for n, x in options.items() if n not in tensors}
    return Trial("attention", given | tensors, {**rest, "return_lse": True}, want, bound)


def _scores(dtype: str) -> Trial:
    (bias,) = _draw(dtype, (1, _HEADS, _ROWS, _KEYS))
    mask = np.random.default_rng(1).random((_BATCH_SIZE, 1, _ROWS, _KEYS)) < 0.8
    return _forward(dtype, bias=bias, mask=mask)


def _by_head() -> Array:
    return np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


def _varlen(dtype: str) -> Trial:
    """Two sequences, one after the other."""
    rows = (30, _ROWS)
    totals = [(sum(n), h) for n, (_, h) in zip((rows, _LENGTHS, _LENGTHS), _sizes(), strict=True)]
    q, k, v = _draw(dtype, *((n, h, _HEAD_DIM) for n, h in totals))
    starts_q, starts_k = (np.cumsum([0, *n]).astype(np.int32) for n in (rows, _LENGTHS))
    given: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
    }
    options: dict[str, Any] = {
        "max_seqlen_q": max(rows),
        "max_seqlen_k": max(_LENGTHS),
        "causal": True,
    }
    bounds = [
        error_bound(
            q[None, starts_q[b] : starts_q[b + 1]],
            k[None, starts_k[b] : starts_k[b + 1]],
            v[None, starts_k[b] : starts_k[b + 1]],
            causal=True,
        )
        for b in range(2)
    ]
    want = attention_varlen_reference(**given, **options)
    return Trial(
        "attention_varlen", given, {**options, "return_lse": True}, want, _worst_of(bounds)
    )


def _worst_of(bounds: Iterable[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(max(each) for each in zip(*bounds, strict=True))


def _kvcache(dtype: str) -> Trial:
    """A few queries over keys in pages, each sequence with a length of its own."""
    pages = -(-_KEYS // _PAGE_SIZE)
    cache = (_BATCH_SIZE * pages, _PAGE_SIZE, _HEADS_KV, _HEAD_DIM)
    q, k, v = _draw(dtype, (_BATCH_SIZE, 3, _HEADS, _HEAD_DIM), cache, cache)
    order = np.random.default_rng(2).permutation(_BATCH_SIZE * pages)
    table = order.reshape(_BATCH_SIZE, pages).astype(np.int32)
    lists: dict[str, Any] = {"seqused_k": np.array(_LENGTHS, np.int32), "page_table": table}
    bounds = [
        error_bound(*own[:3], **own[3]) for own in kvcache_problems(q, k, v, **lists, causal=True)
    ]
    want = attention_with_kvcache_reference(q, k, v, **lists, causal=True)
    return Trial(
        "attention_with_kvcache",
        {"q": q, "k_cache": k, "v_cache": v, **lists},
        {"causal": True, "return_lse": True},
        want,
        _worst_of(bounds),
    )


def _backward(dtype: str) -> Trial:
    given = _qkv(dtype)
    out, lse = attention_reference(**given, causal=True)
    out, lse = out.astype(numpy_dtype(np, dtype)), lse.astype(np.float32)
    (dout,) = _draw(dtype, given["q"].shape)
    given |= {"out": out, "lse": lse, "dout": dout}
    want = attention_backward_reference(**given, causal=True)[:3]
    plain = same_dtype_gradients(**given, dtype=dtype, causal=True)[:3]
    bounds = tuple(
        3 * max_error(rough, exact) + ABSOLUTE_TERM[dtype] * float(np.max(np.abs(exact)))
        for rough, exact in zip(plain, want, strict=True)
    )
    return Trial("attention_backward", given, {"causal": True}, want, bounds)


FEATURES: dict[str, Callable[[str], Trial]] = {
    "grouped heads, causal": lambda dtype: _forward(dtype, causal=True),
    "window": lambda dtype: _forward(dtype, window=(40, 10)),
    "softcap": lambda dtype: _forward(dtype, softcap=2.0),
    "bias and mask": _scores,
    "ALiBi": lambda dtype: _forward(dtype, causal=True, alibi_slopes=_by_head()),
    "sinks": lambda dtype: _forward(dtype, causal=True, sinks=_by_head()),
    "varlen": _varlen,
    "KV cache in pages": _kvcache,
    "backward": _backward,
}


def check_features(device: Device, asked: str | None) -> Iterator[FeatureResult]:
    """All features on a device, by one kernel or by all that serve them."""
    kernels = CPU_KERNELS if device.kind == "cpu" else ("auto", *GPU_KERNELS)
    for name, make in FEATURES.items():
        for dtype in DTYPES[device.kind]:
            if dtype == "bfloat16" and not _holds_bfloat16(device):
                continue
            trial = make(dtype)
            tensors = {argument: device.put(x) for argument, x in trial.tensors.items()}
            for kernel in (asked,) if asked else kernels:
                yield from _attempt(device, name, dtype, trial, tensors, kernel)


def _holds_bfloat16(device: Device) -> bool:
    """NumPy by ml_dtypes; of CuPy no version does."""
    return find_spec("ml_dtypes") is not None and "CuPy" not in device.label


def _attempt(
    device: Device, name: str, dtype: str, trial: Trial, tensors: dict[str, Any], kernel: str
) -> Iterator[FeatureResult]:
    """The result of a kernel, or nothing of one that does not serve the problem."""
    try:
        found = getattr(dlattn, trial.function)(**tensors, **trial.options, kernel=kernel)
    except dlattn.UnsupportedError as error:
        if kernel in ("auto", *CPU_KERNELS):
            yield FeatureResult(name, dtype, kernel, float("inf"), str(error))
        return
    except (ValueError, RuntimeError) as error:  # those of dlattn and of the framework
        yield FeatureResult(name, dtype, kernel, float("inf"), str(error))
        return
    errors = (
        max_error(device.get(x), want) / bound
        for x, want, bound in zip(found, trial.expected, trial.bounds, strict=False)
    )
    yield FeatureResult(name, dtype, kernel, max(errors), "")

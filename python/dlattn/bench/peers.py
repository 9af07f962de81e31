"""Who is timed: this library's kernels, and whatever else on this machine computes attention."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.bench.cases import Case

Array = NDArray[Any]
Call = Callable[[], Any]

GPU_KERNELS = ("scalar", "wmma_qk", "wmma_smem", "wmma")
CPU_KERNELS = ("cpu",)


class UnavailableError(Exception):
    """A contestant that cannot take part, and why."""


@dataclass(frozen=True)
class Problem:
    """One case and its inputs: (batch, num_heads, seqlen, head_dim), contiguous, for everybody."""

    case: Case
    q: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class Bound:
    """A contestant with a problem: the call to time, and the context it has to be made in.

    `checked` does the same into memory full of NaN, for those who can write where they are told.
    """

    call: Call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    checked: Call | None = None


@dataclass(frozen=True)
class Contestant:
    """Somebody who can compute attention."""

    name: str
    ours: bool
    bind: Callable[[Problem], Bound]  # raises UnavailableError
    to_host: Callable[[Any], Array]


def gpu_contestants() -> list[Contestant]:
    """All that could run on a GPU with torch tensors."""
    ours = [_ours(kernel, _torch_to_host) for kernel in GPU_KERNELS]
    backends = (
        ("torch-flash", "FLASH_ATTENTION"),
        ("torch-cudnn", "CUDNN_ATTENTION"),
        ("torch-efficient", "EFFICIENT_ATTENTION"),
        ("torch-math", "MATH"),
    )
    sdpa = [Contestant(name, False, _sdpa(backend), _torch_to_host) for name, backend in backends]
    return [*ours, *sdpa, Contestant("cupy", False, _cupy_composition, _cupy_to_host)]


def cpu_contestants() -> list[Contestant]:
    """All that could run on the CPU with NumPy arrays."""
    return [
        *(_ours(kernel, np.asarray) for kernel in CPU_KERNELS),
        Contestant("torch", False, _torch_cpu, _torch_to_host),
        Contestant("numpy", False, _numpy_composition, np.asarray),
    ]


def gpu_problem(case: Case, q: Array, k: Array, v: Array) -> Problem:
    """The inputs as torch CUDA tensors."""
    torch: Any = importlib.import_module("torch")
    dtype = getattr(torch, case.dtype)
    tensors = [torch.from_numpy(x.astype(np.float32)).cuda().to(dtype) for x in (q, k, v)]
    return Problem(case, *tensors)


def cpu_problem(case: Case, q: Array, k: Array, v: Array) -> Problem:
    """The inputs as NumPy arrays."""
    return Problem(case, q, k, v)


def _ours(kernel: Any, to_host: Callable[[Any], Array]) -> Contestant:
    def bind(problem: Problem) -> Bound:
        q, k, v, causal = problem.q, problem.k, problem.v, problem.case.causal
        support = dlattn.supported(q, k, v, causal=causal, layout="bhsd", kernel=kernel)
        if not support.ok:
            raise UnavailableError("; ".join(support.reasons))

        def once(out: Any = None) -> Any:
            return dlattn.attention(q, k, v, causal=causal, layout="bhsd", kernel=kernel, out=out)

        return Bound(once, checked=lambda: once(_poisoned(problem.v)))

    return Contestant(f"dlattn {kernel}", True, bind, to_host)


def _poisoned(like: Any) -> Any:
    """An array of NaN of the same kind."""
    return np.full_like(like, np.nan) if isinstance(like, np.ndarray) else like * float("nan")


def _sdpa(backend: str) -> Callable[[Problem], Bound]:
    def bind(problem: Problem) -> Bound:
        torch: Any = importlib.import_module("torch")
        attention: Any = importlib.import_module("torch.nn.attention")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        q, k, v, causal = problem.q, problem.k, problem.v, problem.case.causal
        pinned = getattr(attention.SDPBackend, backend)
        # Entered once around many calls: choosing the backend is no part of a call's host time.
        return Bound(lambda: sdpa(q, k, v, is_causal=causal), lambda: attention.sdpa_kernel(pinned))

    return bind


def _torch_cpu(problem: Problem) -> Bound:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError("torch is not installed") from error
    dtype = getattr(torch, problem.case.dtype)
    inputs = (problem.q, problem.k, problem.v)
    q, k, v = (torch.from_numpy(x.astype(np.float32)).to(dtype) for x in inputs)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal = problem.case.causal
    return Bound(lambda: sdpa(q, k, v, is_causal=causal))


def _cupy_composition(problem: Problem) -> Bound:
    """Matrix product, softmax, matrix product: what a CuPy user writes."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        raise UnavailableError("CuPy is not installed") from error
    if problem.case.dtype != "float16":
        raise UnavailableError(f"dtype is {problem.case.dtype}; composed for float16 only")
    torch: Any = importlib.import_module("torch")
    q, k, v = (cupy.from_dlpack(x) for x in (problem.q, problem.k, problem.v))
    seqlen, head_dim = problem.case.sizes[2:]
    scale = cupy.float32(1.0 / math.sqrt(head_dim))
    later = cupy.triu(cupy.ones((seqlen, seqlen), dtype=bool), 1) if problem.case.causal else None

    def once() -> Any:
        # torch times and captures its own stream, so CuPy must work on that one.
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            scores = cupy.matmul(q, k.swapaxes(2, 3)).astype(cupy.float32) * scale
            if later is not None:
                scores = cupy.where(later, cupy.float32(-cupy.inf), scores)
            weights = cupy.exp(scores - scores.max(axis=3, keepdims=True))
            weights /= weights.sum(axis=3, keepdims=True)
            return cupy.matmul(weights.astype(cupy.float16), v)

    return Bound(once)


def _numpy_composition(problem: Problem) -> Bound:
    """Matrix product, softmax, matrix product: what a NumPy user writes."""
    seqlen, head_dim = problem.case.sizes[2:]
    scale = np.float32(1.0 / math.sqrt(head_dim))
    later = np.triu(np.ones((seqlen, seqlen), dtype=bool), 1) if problem.case.causal else None

    def once() -> Array:
        q, k, v = (x.astype(np.float32, copy=False) for x in (problem.q, problem.k, problem.v))
        scores = np.matmul(q, k.swapaxes(2, 3))
        scores *= scale
        if later is not None:
            scores[..., later] = -np.inf
        scores -= scores.max(axis=3, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=3, keepdims=True)
        return np.matmul(scores, v).astype(problem.q.dtype, copy=False)

    return Bound(once)


def _torch_to_host(tensor: Any) -> Array:
    host: Array = tensor.float().cpu().numpy()
    return host


def _cupy_to_host(array: Any) -> Array:
    host: Array = array.get()
    return host

"""Who is timed: this library's kernels, and whatever else on this machine computes attention."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.bench import tensors
from dlattn.bench.cases import FLOAT8, Case
from dlattn.console.devices import CPU_KERNELS, GPU_KERNELS
from dlattn.console.errors import first_line

if TYPE_CHECKING:
    from dlattn.bench.backward import BackwardInputs
    from dlattn.bench.decode.caches import Caches

Array = NDArray[Any]
Call = Callable[[], Any]


class UnavailableError(Exception):
    """A contestant that cannot take part, and why."""


@dataclass(frozen=True)
class Varlen:
    """Sequences one after the other, without padding; q, k and v are (total, heads, dim)."""

    lengths: tuple[int, ...]
    cu_seqlens: Any


@dataclass(frozen=True)
class Problem:
    """One case and its inputs, the same for everybody: (batch, num_heads, seqlen, head_dim)."""

    case: Case
    q: Any
    k: Any
    v: Any
    options: Mapping[str, Any] = field(default_factory=dict)  # of dlattn.attention, causal apart
    varlen: Varlen | None = None
    caches: Caches | None = None  # of decoding: q, k and v are laid out as it says
    backward: BackwardInputs | None = None  # where gradients are computed


@dataclass(frozen=True)
class Bound:
    """A contestant with a problem: the call to time, and the context it has to be made in.

    `checked` does the same into memory full of NaN, for those who can write where they are told.
    `averaged` is for those whose results are rounded to few bits: without most of that rounding.
    `note` is what is to be known of the call's time.
    `plan` is the kernel that the call takes, and its shape if it has several: "wmma:wide".
    `turn` is what to time instead: calls like it, one after the other, on tensors that are not all
    in a cache.
    """

    call: Call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    checked: Call | None = None
    plan: str = ""
    averaged: Call | None = None
    note: str = ""
    turn: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Contestant:
    """Somebody who can compute attention."""

    name: str
    ours: bool
    bind: Callable[[Problem], Bound]  # raises UnavailableError


def gpu_contestants() -> list[Contestant]:
    """All that could run on a GPU with torch tensors."""
    peers = [Contestant(name, False, bind) for name, bind in TORCH_PEERS.items()]
    ours = [ours_with(kernel) for kernel in GPU_KERNELS]
    return [*ours, *peers, Contestant("cupy", False, _cupy_composition)]


def cpu_contestants() -> list[Contestant]:
    """All that could run on the CPU with NumPy arrays."""
    return [
        *(ours_with(kernel) for kernel in CPU_KERNELS),
        Contestant("torch", False, _torch_cpu),
        Contestant("numpy", False, _numpy_composition),
    ]


def ours_with(kernel: Any) -> Contestant:
    """This library with `kernel`, any string that `dlattn.attention` takes."""

    def bind(problem: Problem) -> Bound:
        q, k, v, options = problem.q, problem.k, problem.v, dict(problem.options)
        options.update(causal=problem.case.causal, kernel=kernel)
        arguments: tuple[Any, ...] = (q, k, v)
        function: Any = dlattn.attention
        if problem.varlen is None:
            options["layout"] = "bhsd"
        else:
            cu_seqlens, longest = problem.varlen.cu_seqlens, max(problem.varlen.lengths)
            arguments = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
            function = dlattn.attention_varlen
        support = dlattn.supported(*arguments, **options)
        if not support.ok:
            raise UnavailableError("; ".join(support.reasons))

        def checked() -> Any:
            result = function(*arguments, out=_poisoned(v, q), **options)
            return result[0] if isinstance(result, tuple) else result

        plan = dlattn.plan(*arguments, **options)
        taken = f"{plan.kernel}:{plan.variant}" if plan.variant else plan.kernel
        return Bound(lambda: function(*arguments, **options), checked=checked, plan=taken)

    return Contestant(f"dlattn {kernel}", True, bind)


def _poisoned(like: Any, q: Any) -> Any:
    """An array of NaN for a result: of q's heads and v's columns."""
    if isinstance(like, np.ndarray):
        return np.full((*q.shape[:-1], like.shape[-1]), np.nan, like.dtype)
    dtype = like.dtype
    if tensors.dtype_of(like) == FLOAT8:
        dtype = getattr(tensors.torch_module(), tensors.RESULT_OF_FLOAT8)
    return like.new_full((*q.shape[:-1], like.shape[-1]), float("nan"), dtype=dtype)


def _sdpa(backend: str | None) -> Callable[[Problem], Bound]:
    def bind(problem: Problem) -> Bound:
        torch: Any = importlib.import_module("torch")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        q, k, v = problem.q, problem.k, problem.v
        asked: dict[str, Any] = {"is_causal": problem.case.causal}
        if problem.case.num_heads_kv:
            asked["enable_gqa"] = True
        for name, value in problem.options.items():
            if name not in ("bias", "mask"):
                raise UnavailableError(f"does not take {name}")
            asked["attn_mask"] = value
        if problem.varlen is not None:
            raise UnavailableError("does not take sequences of several lengths")
        if backend is None:
            return Bound(lambda: sdpa(q, k, v, **asked))
        attention: Any = importlib.import_module("torch.nn.attention")
        pinned = getattr(attention.SDPBackend, backend)
        # Entered once around many calls: choosing the backend is no part of a call's host time.
        return Bound(lambda: sdpa(q, k, v, **asked), lambda: attention.sdpa_kernel(pinned))

    return bind


def _flash_4(problem: Problem) -> Bound:
    """FlashAttention-4, which compiles its kernel for a problem in the first call."""
    bound = _flash_attn(problem, ("flash_attn.cute",), "flash-attn-4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler warns about the package's own code
        bound.call()
    return bound


def _flash_3(problem: Problem) -> Bound:
    """FlashAttention-3: the whole of it as built from its repository, or the forward pass alone."""
    return _flash_attn(problem, ("flash_attn_interface", "fa3_fwd_interface"), "fa3-fwd")


def _flash_attn(problem: Problem, modules: Sequence[str], package: str) -> Bound:
    """The functions for dense and varlen tensors of the first module that is there."""
    if problem.options:
        raise UnavailableError("is timed on plain problems only")
    module = _first_of(modules, package)
    q, k, v, causal = problem.q, problem.k, problem.v, problem.case.causal

    def first(result: Any) -> Any:
        return result[0] if isinstance(result, tuple) else result

    if problem.varlen is not None:
        cu_seqlens, longest = problem.varlen.cu_seqlens, max(problem.varlen.lengths)
        asked = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "causal": causal,
        }
        return Bound(lambda: first(module.flash_attn_varlen_func(q, k, v, **asked)))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return Bound(lambda: first(module.flash_attn_func(*rows, causal=causal)).transpose(1, 2))


def _first_of(modules: Sequence[str], package: str) -> Any:
    """The first of these modules that can be imported; `package` has the last one."""
    reason = ""
    for name in modules:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = f"is not installed: {first_line(error)}"
        except Exception as error:  # its library may not fit torch's, or the driver
            reason = f"cannot be imported: {first_line(error)}"
    raise UnavailableError(f"{package} {reason}")


def _xformers(problem: Problem) -> Bound:
    """xFormers' memory_efficient_attention, which takes the fastest of the kernels that it has."""
    if problem.options or problem.varlen is not None or problem.case.num_heads_kv:
        raise UnavailableError("is timed on plain problems with as many heads of keys only")
    module = _first_of(("xformers.ops",), "xformers")
    rows = [x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)]
    mask = module.LowerTriangularMask() if problem.case.causal else None
    attend = module.memory_efficient_attention
    return Bound(lambda: attend(*rows, attn_bias=mask).transpose(1, 2))


def _sage(problem: Problem) -> Bound:
    """SageAttention: 16-bit tensors, quantised in the call as its version does it."""
    if problem.options or problem.varlen is not None:
        raise UnavailableError("is timed on plain problems only")
    module = _first_of(("sageattention",), "sageattention")
    q, v, causal = problem.q, problem.v, problem.case.causal
    k = problem.k.clone()  # version 1 takes the mean of k away in place
    return Bound(lambda: module.sageattn(q, k, v, tensor_layout="HND", is_causal=causal))


def _flash_varlen(problem: Problem) -> Bound:
    """FlashAttention-2 for sequences of several lengths (varlen), as torch has it."""
    torch: Any = importlib.import_module("torch")
    if problem.varlen is None or problem.options:
        raise UnavailableError("takes sequences of several lengths only, without options")
    cu_seqlens, longest = problem.varlen.cu_seqlens, max(problem.varlen.lengths)
    arguments = (problem.q, problem.k, problem.v, cu_seqlens, cu_seqlens, longest, longest)
    forward, causal = torch.ops.aten._flash_attention_forward, problem.case.causal
    return Bound(lambda: forward(*arguments, 0.0, causal, False)[0])


def _comfy_int8(problem: Problem) -> Bound:
    """comfy-kitchen's attention: 16-bit tensors, quantised to int8 in the call."""
    try:
        module: Any = importlib.import_module("comfy_kitchen")
    except ImportError as error:
        raise UnavailableError(f"comfy-kitchen is not installed: {first_line(error)}") from error
    if problem.options or problem.varlen is not None or problem.case.causal:
        raise UnavailableError("is timed on plain problems without a causal mask only")
    q, k, v = problem.q, problem.k, problem.v
    if not module.int8_attention_is_available(q.device):
        raise UnavailableError("comfy-kitchen has no int8 attention for this device")
    return Bound(lambda: module.int8_attention(q, k, v))


TORCH_PEERS: dict[str, Callable[[Problem], Bound]] = {
    "torch-flash": _sdpa("FLASH_ATTENTION"),
    "torch-cudnn": _sdpa("CUDNN_ATTENTION"),
    "torch-efficient": _sdpa("EFFICIENT_ATTENTION"),
    "torch-math": _sdpa("MATH"),
    "fa3": _flash_3,
    "fa4": _flash_4,
    "xformers": _xformers,
}
TORCH_FLASH_VARLEN = Contestant("torch-flash varlen", False, _flash_varlen)
TORCH_SDPA = Contestant("torch", False, _sdpa(None))
COMFY_INT8 = Contestant("comfy-int8", False, _comfy_int8)
SAGE = Contestant("sageattention", False, _sage)


def gpu_problem(case: Case, q: Any, k: Any, v: Any) -> Problem:
    """The inputs, torch tensors, as they are."""
    return Problem(case, q, k, v)


def cpu_problem(case: Case, q: Array, k: Array, v: Array) -> Problem:
    """The inputs, NumPy arrays, as they are."""
    return Problem(case, q, k, v)


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
    q, k, v = (cupy.from_dlpack(x) for x in (problem.q, problem.k, problem.v))
    seqlen, head_dim = problem.case.sizes[2:]
    scale = cupy.float32(1.0 / math.sqrt(head_dim))
    later = cupy.triu(cupy.ones((seqlen, seqlen), dtype=bool), 1) if problem.case.causal else None

    def once() -> Any:
        with _torch_stream(cupy):
            scores = cupy.matmul(q, k.swapaxes(2, 3)).astype(cupy.float32) * scale
            if later is not None:
                scores = cupy.where(later, cupy.float32(-cupy.inf), scores)
            weights = cupy.exp(scores - scores.max(axis=3, keepdims=True))
            weights /= weights.sum(axis=3, keepdims=True)
            return cupy.matmul(weights.astype(cupy.float16), v)

    return Bound(once)


class _TorchStream:
    """torch's current stream, by the protocol that CuPy reads."""

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        self.handle = int(torch.cuda.current_stream().cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version and the handle."""
        return 0, self.handle


def _torch_stream(cupy: Any) -> AbstractContextManager[Any]:
    """torch times and captures a stream of its own, so CuPy must work on that one."""
    stream = _TorchStream()
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cast("AbstractContextManager[Any]", cupy.cuda.Stream.from_external(stream))
    return cast("AbstractContextManager[Any]", cupy.cuda.ExternalStream(stream.handle))


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

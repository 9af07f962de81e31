"""What dlattn must know of the tensor libraries whose types lack DLPack's C exchange API.

No library is imported here before one of its own tensors has come in, by which time the caller
has imported it. The native module calls `find` once per type and keeps what it returns. It imports
this module with itself: an import on the first call would be waited for for ever in a process
forked meanwhile.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dlattn._cuda_array import INTERFACE, CudaArray, Numba
from dlattn._errors import UnsupportedError
from dlattn._framework import Framework, module_of, numpy_dtype, type_text
from dlattn._other_frameworks import Paddle, Warp

_TENSORS = f"a torch, CuPy, JAX or NumPy array, or an object with __dlpack__ or {INTERFACE}"

# Runs the computation on a stream; returns the outputs and the memory that it may still be using.
Launch = Callable[[int | None], tuple[list[Any], list[Any]]]


class NumPy(Framework):
    name = "numpy"

    def empty_of(self, dtype: str) -> Callable[[tuple[int, ...]], Any]:
        """Return what makes new arrays of `dtype`, given their shape."""
        numpy = sys.modules["numpy"]
        return partial(numpy.empty, dtype=numpy_dtype(numpy, dtype))


class Torch(Framework):
    """torch before 2.10; later ones have the exchange API."""

    name = "torch"

    def current_stream(self, x: Any, device: int) -> int:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    gives_workspace = True

    def workspace(self, like: Any, nbytes: int, device: int, stream: int | None) -> Any:
        torch = sys.modules["torch"]
        memory = torch.empty(nbytes // 4, dtype=torch.float32, device=like.device)
        if stream is not None:  # else another stream could be given the memory too early
            memory.record_stream(torch.cuda.ExternalStream(stream, device=device))
        return memory

    def watched(self) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any], Any]:
        """What tells the native module quickly whether to call check_modes and check_tangent.

        The number of dispatch modes, torch.jit's tracing, what increments versions, the variables
        of torch.autograd.forward_ad and torch.utils._python_dispatch, as far as this torch has
        them, and what tells negated views.
        """
        torch = sys.modules["torch"]
        dispatch = sys.modules.get("torch.utils._python_dispatch")
        return (
            getattr(torch._C, "_len_torch_dispatch_stack", int),
            getattr(torch._C, "_is_tracing", bool),
            _version_incrementer(torch),
            vars(torch.autograd.forward_ad),
            vars(dispatch) if dispatch is not None else {},
            torch.Tensor.is_neg,
        )

    def check_modes(self, argument: str) -> None:
        """Raise UnsupportedError where this thread's torch would not see what dlattn computes."""
        torch = sys.modules["torch"]
        modes = [
            torch._C._get_dispatch_stack_at(n) for n in range(torch._C._len_torch_dispatch_stack())
        ]
        before_dispatch = getattr(torch._ops, "_mode_stack_state_for_pre_dispatch", None)
        if before_dispatch is not None:
            modes += [before_dispatch.get(0), before_dispatch.get(1)]
        names = {base.__name__ for mode in modes for base in type(mode).__mro__}
        tracing = names & {"ProxyTorchDispatchMode", "FunctionalTensorMode"}
        if tracing or torch.jit.is_tracing():
            how = min(tracing, default="torch.jit.trace")
            raise UnsupportedError(
                f"{argument} is a torch.Tensor while torch traces ({how}), which would keep the "
                "result as a constant; accepted: a call outside make_fx, torch.export and "
                "torch.jit.trace (torch.compile runs the call as it is)"
            )
        if "FakeTensorMode" in names:
            raise UnsupportedError(
                f"{argument} is a plain torch.Tensor under torch's FakeTensorMode, which computes "
                "shapes alone; accepted: a call outside that mode"
            )

    def check_tangent(self, x: Any, argument: str) -> None:
        """Raise UnsupportedError for a dual tensor of torch.autograd.forward_ad."""
        if sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"{argument} has a tangent (torch.autograd.forward_ad), and dlattn computes no "
                f"gradients; accepted: a tensor without one, {argument}.detach()"
            )


class CuPy(Framework):
    name = "cupy"

    def current_stream(self, x: Any, device: int) -> int:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, dtype=like.dtype if dtype == "bfloat16" else dtype)

    gives_workspace = True

    def workspace(self, like: Any, nbytes: int, device: int, stream: int | None) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            if stream is None:
                return cupy.empty(nbytes // 4, dtype="float32")
            # Its pool hands memory on within one stream.
            with cupy.cuda.ExternalStream(stream, device):
                return cupy.empty(nbytes // 4, dtype="float32")


class Jax(Framework):
    """JAX shows no current stream: it orders itself by events on its buffers.

    jax.dlpack.from_dlpack names a stream to the exporter, then takes the memory to be ready when
    all that is on that stream is done. So the launch happens inside the exporter's __dlpack__, on
    the very stream that JAX named: nothing waits on the host, and JAX orders what follows.
    """

    name = "jax"

    def __init__(self) -> None:
        # Memory in use by kernels: (an array that is ready once the kernel is done, the memory).
        # JAX does not know that dlattn still reads it, so dlattn must hold it until then.
        self._in_flight: deque[tuple[Any, list[Any]]] = deque()

    def check(self, x: Any, argument: str) -> None:
        jax = sys.modules["jax"]
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"{argument} is a {type_text(type(x))}, which has no memory; accepted: a concrete "
                "JAX array"
            )
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{argument} is a JAX array of {x.dtype}, which are no numbers; accepted: an array "
                "of numbers (for random keys, jax.random.key_data)"
            )
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{argument} is a JAX tracer, which has no memory yet; accepted: a concrete array "
                "(call dlattn outside jax.jit, jax.grad and jax.vmap)"
            )
        if len(x.devices()) != 1:
            raise TypeError(
                f"{argument} is a JAX array spread over {len(x.devices())} devices; accepted: an "
                "array on one device"
            )

    def current_stream(self, x: Any, device: int) -> int:
        return int(_jax_device(x).get_stream_for_external_ready_events())

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if _jax_device(like).platform == "cpu":
            # JAX takes this memory over later; an array of its own could not be written to.
            from dlattn._core import HostBuffer

            return HostBuffer(shape, dtype)
        return sys.modules["jax"].numpy.empty(shape, dtype=dtype, device=_jax_device(like))

    gives_workspace = True

    def workspace(self, like: Any, nbytes: int, device: int, stream: int | None) -> Any:
        return self.empty(like, (nbytes // 4,), "float32")

    def run(self, like: Any, launch: Launch) -> list[Any]:
        """Compute, and return the outputs as JAX arrays."""
        from_dlpack = sys.modules["jax"].dlpack.from_dlpack
        if _jax_device(like).platform == "cpu":
            buffers, _ = launch(None)
            return [on_device_of(like, from_dlpack(buffer)) for buffer in buffers]

        self._release()
        exporter = _Launching(like, launch)
        outputs = [from_dlpack(exporter)]
        for buffer in exporter.buffers[1:]:
            outputs.append(from_dlpack(_After(outputs[0], buffer)))
        # An array of dlattn's own tells that the kernel is done: the caller may delete the outputs.
        sentinel = self.empty(like, (1,), "float32")
        self._in_flight.append((from_dlpack(_After(outputs[0], sentinel)), exporter.held))
        return outputs

    def _release(self) -> None:
        while self._in_flight:
            try:
                entry = self._in_flight.popleft()  # from here on, no other thread looks at it
            except IndexError:
                return
            if not entry[0].is_ready():
                self._in_flight.appendleft(entry)
                return


class _Launching:
    """Exports the first output, launching the computation when JAX has named its stream."""

    def __init__(self, like: Any, launch: Launch) -> None:
        self._like = like
        self._launch = launch
        self.buffers: list[Any] = []
        self.held: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self._like.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.buffers, self.held = self._launch(stream)
        return _lend(self.buffers[0], stream)


class _After:
    """Exports `buffer`, written by the computation that wrote `output`, once that is ready."""

    def __init__(self, output: Any, buffer: Any) -> None:
        self._output = output
        self._buffer = buffer

    def __dlpack_device__(self) -> Any:
        return self._buffer.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self._output.__dlpack__(stream=stream)  # makes the stream wait; the export is dropped
        return _lend(self._buffer, stream)


def _lend(buffer: Any, stream: int | None) -> Any:
    """Export a JAX array for JAX to take over.

    It lets go of what it has taken over in a thread of its own, when the GPU is done. Its exports
    must not be let go of there: they put the array among JAX's garbage before they let go of its
    memory, and any thread may clear that garbage away in between.
    """
    from dlattn._core import relay

    return relay(buffer.__dlpack__(stream=stream))


_FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(),
    "torch": Torch(),
    "cupy": CuPy(),
    "jax": Jax(),
    "numba": Numba(),
    "paddle": Paddle(),
    "warp": Warp(),
}
_FRAMEWORKS["jaxlib"] = _FRAMEWORKS["jax"]
_DLPACK = Framework()
_CUDA_ARRAY = CudaArray()


def find(kind: type, argument: str, x: Any = None) -> Framework:
    """Return the framework that tensors of type `kind` belong to; TypeError if they are none.

    `x` is one of them, as an object may have `__cuda_array_interface__` where its type has not.
    """
    for base in kind.__mro__:
        root = module_of(base).partition(".")[0]
        if root == "numpy" and base is not getattr(sys.modules.get("numpy"), "ndarray", None):
            continue
        if root == "torch" and base.__name__ != "Tensor":
            continue
        if root == "numba" and not hasattr(kind, INTERFACE):
            continue
        if root in ("paddle", "warp") and not hasattr(kind, "__dlpack__"):
            continue
        framework = _FRAMEWORKS.get(root)
        if framework is not None:
            _check_kind(kind, framework, argument)
            return framework
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _DLPACK
    if hasattr(kind, INTERFACE) or _has_interface(x):
        return _CUDA_ARRAY
    raise TypeError(f"{argument} is of type {type_text(kind)}; accepted: {_TENSORS}")


def _has_interface(x: Any) -> bool:
    try:
        return hasattr(x, INTERFACE)
    except Exception:  # what is no array may raise anything
        return False


def is_plain(kind: type) -> bool:
    """Whether nobody but NumPy or torch wrote code that runs when such a tensor is read."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and kind is numpy.ndarray) or (
        torch is not None and kind in (torch.Tensor, torch.nn.Parameter)
    )


def export(x: Any, stream: int | None) -> Any:
    """Return what x.__dlpack__ returns, asking for `stream` (a CUDA handle; None on the CPU)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor) and x.is_cuda:
        with torch.cuda.device(x.device):  # torch exports from its current device only
            return _export(x, stream)
    return _export(x, stream)


def _export(x: Any, stream: int | None) -> Any:
    if stream == 0:
        stream = 1  # DLPack's name for the legacy default stream
    if getattr(x, "requires_grad", False) and hasattr(x, "detach"):
        x = x.detach()  # torch would refuse, even where its gradients are off
    method = x.__dlpack__
    try:
        return method(stream=stream, max_version=(1, 1))
    except TypeError as error:
        if not _refuses_max_version(method, error):
            raise
    # An exporter older than DLPack 1.0.
    return method(stream=stream) if stream is not None else method()


def _refuses_max_version(method: Any, error: TypeError) -> bool:
    """Whether `error` says that `method` has no such parameter, not that it failed inside."""
    import inspect  # which takes a while, and is hardly ever needed

    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # native, and tells none: what it raises itself has no frame
        return error.__traceback__ is None or error.__traceback__.tb_next is None
    try:
        signature.bind(stream=None, max_version=(1, 1))
    except TypeError:
        return True
    return False


def torch_grad_enabled() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def _check_kind(kind: type, framework: Framework, argument: str) -> None:
    if framework.name == "numpy" and any(map(_is_masked_array, kind.__mro__)):
        raise TypeError(
            f"{argument} is a masked array, whose mask attention would not see; accepted: a plain "
            "array, and the mask as mask="
        )
    if framework.name == "torch":
        plain = sys.modules["torch"].Tensor.__torch_dispatch__
        if getattr(kind, "__torch_dispatch__", plain) is not plain:
            raise TypeError(
                f"{argument} is a {type_text(kind)}, which wraps other tensors or none at all "
                "(as fake and distributed tensors do); accepted: a plain torch.Tensor"
            )


def _is_masked_array(kind: type) -> bool:
    # By name: NumPy imports numpy.ma when someone first asks for it.
    return kind.__name__ == "MaskedArray" and module_of(kind).startswith("numpy.ma")


def _version_incrementer(torch: Any) -> Callable[[tuple[Any, ...]], None]:
    try:
        torch._C._increment_version(())  # of a tuple since torch 2.5
    except (AttributeError, TypeError):
        pass
    else:
        increment: Callable[[tuple[Any, ...]], None] = torch._C._increment_version
        return increment
    public = getattr(torch.autograd.graph, "increment_version", None)  # since torch 2.1
    if public is not None:
        return lambda tensors: public(tensors[0])

    def set_next(tensors: tuple[Any, ...]) -> None:
        if not tensors[0].is_inference():
            version = tensors[0]._version + 1
            torch._C._autograd._unsafe_set_version_counter(tensors[0], version)

    return set_next


def _jax_device(x: Any) -> Any:
    return next(iter(x.devices()))


def on_device_of(like: Any, x: Any) -> Any:
    """`x` on the device of `like`, both of JAX: DLPack has one CPU, JAX may have several."""
    return (
        x if x.devices() == like.devices() else sys.modules["jax"].device_put(x, _jax_device(like))
    )

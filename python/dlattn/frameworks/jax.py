"""JAX's arrays, and how its work and dlattn's are ordered."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from dlattn.frameworks.base import Framework, type_text

# Runs the computation on a stream; returns the outputs and the memory that it may still be using.
Launch = Callable[[int | None], tuple[list[Any], list[Any]]]


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
                "(under jax.jit, jax.grad and jax.vmap call dlattn.jax.attention)"
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


def _jax_device(x: Any) -> Any:
    return next(iter(x.devices()))


def on_device_of(like: Any, x: Any) -> Any:
    """`x` on the device of `like`, both of JAX: DLPack has one CPU, JAX may have several."""
    return (
        x if x.devices() == like.devices() else sys.modules["jax"].device_put(x, _jax_device(like))
    )

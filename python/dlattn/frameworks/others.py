"""NumPy, CuPy, Paddle and Warp: libraries that need a few words each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import Framework, numpy_dtype


class NumPy(Framework):
    name = "numpy"

    def empty_of(self, dtype: str) -> Callable[[tuple[int, ...]], Any]:
        """Return what makes new arrays of `dtype`, given their shape."""
        numpy = sys.modules["numpy"]
        return partial(numpy.empty, dtype=numpy_dtype(numpy, dtype))


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


class Paddle(Framework):
    """Paddle 3.3 and later have DLPack's C exchange API, which streams and new tensors come by."""

    name = "paddle"

    def check(self, x: Any, argument: str) -> None:
        if not x.stop_gradient and sys.modules["paddle"].is_grad_enabled():
            raise UnsupportedError(
                f"{argument} requires grad (its stop_gradient is False), and dlattn computes no "
                "gradients; accepted: a tensor that does not. Call it under paddle.no_grad() or "
                f"pass {argument}.detach()"
            )

    def mark_modified(self, x: Any) -> None:
        """Tell autograd that `x` was modified in place."""
        x._bump_inplace_version()


class Warp(Framework):
    name = "warp"

    def current_stream(self, x: Any, device: int) -> int:
        return int(x.device.stream.cuda_stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        warp = sys.modules["warp"]
        return warp.empty(shape, dtype=getattr(warp, dtype), device=like.device)

"""Paddle and Warp: tensors with DLPack whose libraries are worth a few words more."""

from __future__ import annotations

import sys
from typing import Any

from dlattn._errors import UnsupportedError
from dlattn._framework import Framework


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

    def wrote(self, x: Any) -> None:
        """Tell autograd that `x` was modified in place."""
        x._bump_inplace_version()


class Warp(Framework):
    name = "warp"

    def current_stream(self, x: Any, device: int) -> int:
        return int(x.device.stream.cuda_stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        warp = sys.modules["warp"]
        return warp.empty(shape, dtype=getattr(warp, dtype), device=like.device)

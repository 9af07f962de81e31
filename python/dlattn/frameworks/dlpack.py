"""`__dlpack__` of any exporter, of DLPack 1.0 and before."""

from __future__ import annotations

import sys
from typing import Any


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

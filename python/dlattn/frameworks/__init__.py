"""Adapters for the tensor libraries whose types lack DLPack's C exchange API.

No library is imported here before one of its own tensors has come in, by which time the caller
has imported it. The native module calls `find` once per type and keeps what it returns. It imports
this module with itself: an import on the first call would be waited for for ever in a process
forked meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any

from dlattn.frameworks.base import Framework, module_of, type_text
from dlattn.frameworks.cuda_array import INTERFACE, CudaArray, Numba
from dlattn.frameworks.dlpack import export
from dlattn.frameworks.jax import Jax
from dlattn.frameworks.others import CuPy, NumPy, Paddle, Warp
from dlattn.frameworks.torch import Torch, torch_grad_enabled

__all__ = ["export", "find", "is_plain", "torch_grad_enabled"]

_TENSORS = f"a torch, CuPy, JAX or NumPy array, or an object with __dlpack__ or {INTERFACE}"

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
    except Exception:  # an object that is no array may raise anything
        return False


def is_plain(kind: type) -> bool:
    """Whether nobody but NumPy or torch wrote code that runs when such a tensor is read."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and kind is numpy.ndarray) or (
        torch is not None and kind in (torch.Tensor, torch.nn.Parameter)
    )


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

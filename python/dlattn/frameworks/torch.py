"""torch's tensors, and what autograd and dispatch modes have to do with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import Framework


class Torch(Framework):
    """torch before 2.10; later ones have the exchange API."""

    name = "torch"

    def current_stream(self, x: Any, device: int) -> int:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    @property
    def folder(self) -> str:
        """Where libtorch lies."""
        package = getattr(sys.modules["torch"], "__file__", None) or ""
        return os.path.join(os.path.dirname(package), "lib")

    gives_workspace = True

    def workspace(self, like: Any, nbytes: int, device: int, stream: int | None) -> Any:
        torch = sys.modules["torch"]
        memory = torch.empty(nbytes // 4, dtype=torch.float32, device=like.device)
        if stream is not None:  # else another stream could be given the memory too early
            memory.record_stream(torch.cuda.ExternalStream(stream, device=device))
        return memory

    def watched(self) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any], Any]:
        """The state from which the native module sees quickly whether to call check_modes and
        check_tangent.

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


def torch_grad_enabled() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


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

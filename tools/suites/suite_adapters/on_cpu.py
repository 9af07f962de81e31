"""Tests that were written for a GPU, on the CPU: what they make on "cuda" is made on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from suite_adapters.serving import refuse

CAPABILITY = (8, 0)  # of the GPU that tests are told there is
MEMORY = 1 << 36  # bytes of it


def device_on_cpu(device: Any) -> Any:
    """The CPU for a GPU, whatever it is called by."""
    named = isinstance(device, str) and device.startswith("cuda")
    numbered = isinstance(device, int) and not isinstance(device, bool)
    known = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if named or numbered or known else device


class OnCpu(TorchFunctionMode):
    """Within it torch's functions take the CPU for "cuda"."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = device_on_cpu(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(device_on_cpu(argument) for argument in args[1:]))
        return function(*args, **kwargs)


def _graphs(*_: Any, **__: Any) -> NoReturn:
    refuse("streams and CUDA graphs: there is no GPU")


def patch() -> None:
    """Answer what tests ask of torch.cuda."""
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=MEMORY)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    for name in ("Stream", "Event", "CUDAGraph", "graph", "current_stream", "stream"):
        setattr(torch.cuda, name, _graphs)
    made = torch.Generator

    class Generator:  # a class: torch's own annotations combine it with others
        def __new__(cls, device: Any = "cpu") -> Any:
            return made(device_on_cpu(device))

    torch.Generator = Generator

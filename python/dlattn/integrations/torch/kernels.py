"""The kernels of torch's operators: native ones, or Python's where torch lacks what those need.

The native ones (python/bindings/torch_ops.cpp) are registered through torch's stable C ABI, of
torch 2.10 and later, as this process has loaded it: nothing of torch is compiled or linked. They
run without the GIL. What they refuse arrives as torch's RuntimeError; `own_error` tells which of
dlattn's exceptions it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dlattn
from dlattn import _core

BACKENDS = ("CPU", "CUDA")
Kernel = Callable[..., Any]

_ERRORS: dict[str, type[Exception]] = {
    "UnsupportedError": dlattn.UnsupportedError,
    "DeviceError": dlattn.DeviceError,
    "TypeError": TypeError,
    "MemoryError": MemoryError,
}


# By an operator's name, its kernel in Python.
IN_PYTHON: dict[str, Kernel] = {}


class Kernels:
    """The kernels of the operators, by backend.

    Attributes:
        python: By an operator's name, its kernel in Python.
        why: By backend, why its kernels are not native; empty if they are.
        native: Whether those of the CPU are, and so need help with what is Python's of torch.
    """

    def __init__(self, python: dict[str, Kernel]) -> None:
        self.python = python
        IN_PYTHON.update(python)
        self.why: dict[str, str] = {}
        self.native = False
        self._libraries: list[Any] = []

    def register(self, native: bool = True) -> None:
        """Put kernels into torch's dispatcher, native ones if `native` is true and they exist."""
        self.why.clear()
        self._register(self.python, native)
        self.native = not self.why["CPU"]
        if self.native:
            writing = {n: _counting_writes(n) for n in self.python if n.endswith("_out")}
            self._implement(writing, "ADInplaceOrView")

    def add(self, python: dict[str, Kernel]) -> None:
        """Register more operators, with these kernels in Python."""
        self.python |= python
        IN_PYTHON.update(python)
        self._register(python, native=True)

    def _register(self, python: dict[str, Kernel], native: bool) -> None:
        folder = str(Path(torch.__file__).parent / "lib")
        schemas = {name: _arguments(name) for name in python}
        for backend in BACKENDS:
            why = "they were not asked for"
            if native:
                why = _core.register_torch_ops(folder, backend, schemas)
            self.why[backend] = self.why.get(backend) or why
            if why:
                self._implement(python, backend)

    def _implement(self, kernels: dict[str, Kernel], key: str) -> None:
        library = torch.library.Library("dlattn", "IMPL")
        self._libraries.append(library)
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)

    def described(self) -> dict[str, str]:
        return {b: f"Python: {why}" if why else "native" for b, why in self.why.items()}

    def remove(self) -> None:
        """Take them out again."""
        _core.unregister_torch_ops()
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    @contextmanager
    def in_python(self) -> Iterator[None]:
        """Python's kernels for a block of code. For tests."""
        self.remove()
        self.register(native=False)
        try:
            yield
        finally:
            self.remove()
            self.register()


def _arguments(name: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.dlattn, name).default._schema
    return tuple(f"{argument.type} {argument.name}" for argument in schema.arguments)


def count_write(out: torch.Tensor) -> None:
    """Tell autograd that a tensor was written in place, which native kernels cannot."""
    if not out.is_inference():
        torch._C._increment_version((out,))


def _counting_writes(name: str) -> Kernel:
    """Call an operator's kernel where no gradients are wanted."""
    call = getattr(torch.ops.dlattn, name).default

    def write(*arguments: Any, out: torch.Tensor) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = call(*arguments, out=out)
        count_write(out)
        return result

    return write


def own_error(error: RuntimeError) -> Exception:
    """Return the exception that a native kernel stopped with, or `error` if it was none."""
    failure = _core.torch_ops_failure()
    if failure is None or not str(error).startswith(failure[1]):
        return error
    kind = _ERRORS.get(failure[0])
    return kind(failure[1]) if kind else error


def run(name: str, call: Kernel, arguments: Any, named: Any) -> Any:
    """Call an operator below autograd; what it raises is dlattn's exception.

    A native kernel that lacked memory leaves the call to the one in Python, which asks torch again:
    what torch raises then keeps its class, as torch.OutOfMemoryError. That one has no gradients;
    autograd, which has them, is above it.
    """
    try:
        return call(*arguments, **named)
    except RuntimeError as error:
        if not _lacked_memory(error):
            raise own_error(error) from None
    with torch.no_grad():
        return IN_PYTHON[name](*arguments, **named)


def _lacked_memory(error: RuntimeError) -> bool:
    failure = _core.torch_ops_failure()
    return (
        failure is not None
        and failure[0] == "AllocationError"
        and str(error).startswith(failure[1])
    )
